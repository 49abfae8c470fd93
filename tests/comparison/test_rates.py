"""How often each sentence, group and rank is given where it is false.

The posterior is that of a Bayesian linear regression, known exactly. Two sets of its draws are
equal in truth; a set that is narrowed or shifted is off by a known amount.
"""

import collections
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from scipy.special import ndtr, stdtrit

import pyro_bdl as bdl
from pyro_bdl.comparison.distances import latent_distances, worst_latent
from pyro_bdl.comparison.judge import ALIKE, FAR, USABLE, WITHIN, WORSE
from pyro_bdl.comparison.kind import Kind
from pyro_bdl.comparison.leave_one_out import difference
from pyro_bdl.comparison.metric import standard_error_of_mean
from pyro_bdl.comparison.observe import Block
from pyro_bdl.comparison.scores import Score, separation
from pyro_bdl.comparison.summarize import answer_of
from pyro_bdl.diagnostics.loo import left_out_columns
from pyro_bdl.utils.jackknife import ERRORS, jackknife_error

WEIGHTS, NOISE, DATA = 10, 0.5, 30
MOST = 0.07  # a nominal 5 %, and what 200 repetitions may be off by (1.3 standard errors)
NORMAL = Kind({"y": "Normal"}, "regression")
NET = torch.nn.Linear(WEIGHTS, 1).double()
MODEL = bdl.models.Regression(bdl.bayesianize(NET), noise=NOISE)


class Truth:
    """Data of a linear regression, its posterior, and test data of N points."""

    def __init__(self, seed, points):
        torch.manual_seed(seed)
        self.design, w = torch.randn(DATA, WEIGHTS).double(), torch.randn(WEIGHTS).double()
        self.targets = self.design @ w + NOISE * torch.randn(DATA)
        exact = Conjugate(self.design, self.targets, NOISE)
        self.root, self.mean = torch.linalg.cholesky(exact.covariance), exact.mean
        self.x = torch.randn(points, WEIGHTS).double()
        self.y = self.x @ w + NOISE * torch.randn(points)

    def functions(self, count, x=None, *, width=1.0):
        weights = self.mean + width * torch.randn(count, WEIGHTS).double() @ self.root.mT
        return weights @ (self.x if x is None else x).mT

    def predictions(self, count, *, width=1.0, shift=0.0, places=None, known="fyp"):
        """Draws, off by ``shift`` sds of the function at each point, or at some of them.

        :param known: "f", the function; "fp", also the densities of the targets; "fyp", all.
        """
        f = self.functions(count, width=width)
        f[:, :places] += shift * (self.x @ self.root).norm(dim=1)[:places]
        density = dist.Normal(f, NOISE).log_prob(self.y) if "p" in known else None
        targets = f + NOISE * torch.randn_like(f) if "y" in known else None
        return bdl.PredictiveDraws(f, targets, density)

    def evaluated(self, predictions):
        return bdl.evaluate(MODEL, predictions, self.x, self.y, progress=False)

    def compared(self, reference="b", **sets):
        options = {"reference": reference, "progress": False}
        return bdl.compare(MODEL, sets, self.x, self.y, **options)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "points, count, other",
    [
        (200, 40, 60),
        pytest.param(400, 100, 100, marks=SLOW),
        pytest.param(30, 300, 300, marks=SLOW),
        pytest.param(200, 40, 400, marks=SLOW),
        pytest.param(600, 60, 200, marks=SLOW),
    ],
)
def test_scores_of_one_posterior_differ_by_two_errors_in_a_twentieth(points, count, other):
    """NLPD by its error over the points alone differs in a third of the comparisons and more."""
    beyond, by_points = collections.Counter(), 0
    repetitions, most = (60, 0.1) if other == 60 else (200, MOST)
    for seed in range(repetitions):
        truth = Truth(seed, points)
        several = []
        for number in (count, other):
            f = truth.functions(number)
            density = dist.Normal(f, NOISE).log_prob(truth.y)
            score = Score(NORMAL)
            noise = torch.full_like(f, NOISE**2)
            score.add(Block(points, f, f, truth.y, noise, None, density))
            several.append(score.points())
        for key in several[0].keys() - {"nlpd_few"}:  # which is about the number of draws
            gap, error = several[0][key].difference(several[1][key])
            beyond[key] += abs(gap) > ERRORS * error
        a, b = (side["nlpd"].influence for side in several)
        by_points += abs((a - b).mean()) > ERRORS * standard_error_of_mean(a - b)
    assert {"nlpd", "rmse", "nlpd_normal", "nlpd_calibrated"} <= beyond.keys()
    assert {key: times for key, times in beyond.items() if times > repetitions * most} == {}
    assert by_points > repetitions * (0.3 if points >= 200 else 0.12)


def test_a_temperature_of_few_draws_is_within_two_errors_of_that_of_many():
    """At the same test points, by the part of its error that is over the draws."""
    beyond = 0
    for seed in range(25):
        truth, of = Truth(seed, 400), []
        for count in (20, 500):
            f, score = truth.functions(count), Score(NORMAL)
            density = dist.Normal(f, NOISE).log_prob(truth.y)
            noise = torch.full_like(f, NOISE**2)
            score.add(Block(400, f, f, truth.y, noise, None, density))
            points = Score(NORMAL, are_draws=False)
            points.add(Block(400, f, f, truth.y, noise, None, density))
            of.append((*score.inputs()["temperature"], points.inputs()["temperature"][1]))
        (few, error, over_points), (many, *_) = of
        beyond += abs(few - many) > ERRORS * (error**2 - over_points**2) ** 0.5
    assert beyond <= 25 * 0.12


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")  # k-hats
def test_elpd_of_one_posterior_differs_by_two_errors_in_a_twentieth():
    beyond = 0
    for seed in range(60):
        truth = Truth(seed, 1)
        loos = []
        for _ in range(2):
            f = truth.functions(400, truth.design).unflatten(0, (4, -1))
            loos.append(bdl.diagnostics.loo(dist.Normal(f, NOISE).log_prob(truth.targets)))
        gap, error = difference(*loos)
        beyond += abs(gap) > ERRORS * error
    assert beyond <= 60 * MOST


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")  # k-hats
@pytest.mark.parametrize("weights, data", [pytest.param(2, 30, marks=pytest.mark.slow), (10, 40)])
def test_an_elpd_is_within_two_errors_of_the_exact_one(weights, data):
    """Of ten weights and forty data the smoothing of the weights' tails sets it too high by 0.17
    nats, as large as the spread over draws: by that alone a fifth is beyond."""
    beyond = by_spread = 0
    for seed in range(30):
        torch.manual_seed(seed)
        x, w = torch.randn(data, weights).double(), torch.randn(weights).double()
        y = x @ w + NOISE * torch.randn(data)
        f = Conjugate(x, y, NOISE).law.sample((4, 500)) @ x.mT
        density = dist.Normal(f, NOISE).log_prob(y)
        every = torch.arange(data)
        laws = [Conjugate(x[every != n], y[every != n], NOISE).law for n in range(data)]
        exact = sum(
            dist.Normal(
                row @ law.mean, (row @ law.covariance_matrix @ row + NOISE**2).sqrt()
            ).log_prob(target)
            for row, target, law in zip(x, y, laws, strict=True)
        )
        found = bdl.diagnostics.loo(density)
        groups = left_out_columns(density)[4:14].sum(1)
        beyond += abs(found.elpd - exact) > ERRORS * found.draws_se
        by_spread += abs(found.elpd - exact) > ERRORS * jackknife_error(groups)
    assert beyond <= 30 * 0.1
    assert by_spread > 30 * 0.1 or weights == 2


def worse(found):
    """Whether the best of some posteriors is said to be better than another."""
    return any(judgment.group == WORSE for judgment in found.judgments.values())


def of_equals(points, count, other, repetitions):
    """How often each false finding is stated of two sets of draws of one posterior."""
    said = collections.Counter()
    for seed in range(repetitions):
        truth = Truth(seed, points)
        sets = {"a": count, "b": other}
        sets = {name: truth.evaluated(truth.predictions(n)) for name, n in sets.items()}
        judgment = bdl.compare_evaluations(sets, "b", progress=False).judgments["a"]
        said["far"] += judgment.group == FAR
        said.update(finding.key for finding in judgment.findings if finding.fault)
        said["worse"] += worse(bdl.compare_evaluations(sets, progress=False))
    return {words: times / repetitions for words, times in said.items() if times}


def test_little_false_is_said_of_one_posterior():
    assert all(rate <= 0.1 for rate in of_equals(30, 50, 50, 12).values())


@SLOW
@pytest.mark.parametrize(
    "points, count, other",
    [(100, 100, 100), (30, 400, 400), (100, 50, 300), (20, 30, 100)],
)
def test_nothing_false_is_said_of_one_posterior_in_more_than_a_twentieth(points, count, other):
    rates = of_equals(points, count, other, 200)
    assert {words: rate for words, rate in rates.items() if rate > MOST} == {}


@SLOW
@pytest.mark.parametrize("points, count", [(30, 300), (300, 100)])
def test_the_best_of_six_equal_posteriors_is_not_said_to_be_better(points, count):
    false = 0
    for seed in range(200):
        truth = Truth(seed, points)
        sets = {name: truth.predictions(count, known="fp") for name in "abcdef"}
        false += worse(truth.compared(None, **sets))
    assert false <= 200 * MOST


# False statements about posteriors that are off, with the deviation in a point's distances.
OFF = {
    "narrow": ({"width": 0.75}, ("sd_ratio", ALIKE)),  # 0.25
    "half": ({"width": 0.45}, ("sd_ratio", ALIKE, USABLE)),  # 0.55
    "shifted": ({"shift": 0.3}, ("mean_shift", ALIKE, FAR)),  # 0.38
    "far": ({"shift": 0.5}, ("mean_shift", ALIKE, USABLE)),  # 0.63
    "local": ({"places": 6, "shift": 0.8}, (ALIKE, USABLE)),  # at a fifth of the points
}


def of_others(points, count, repetitions, **off):
    """How often each group and each agreement is stated of posteriors that are off."""
    said = {name: collections.Counter() for name in off}
    for seed in range(repetitions):
        truth = Truth(seed, points)
        sets = {n: truth.predictions(count, known="f", **by) for n, by in off.items()}
        judgments = truth.compared(**sets, b=truth.predictions(count, known="f")).judgments
        for name, counter in said.items():
            agree = [f.key for f in judgments[name].findings if f.says == WITHIN]
            counter.update([judgments[name].group, *agree])
    return {n: {words: c[words] / repetitions for words in c} for n, c in said.items()}


@SLOW
@pytest.mark.parametrize("count", [60, 300])
def test_what_is_false_of_a_posterior_that_is_off_is_not_said(count):
    rates = of_others(30, count, 200, **{name: by for name, (by, _) in OFF.items()})
    false = {(n, words): rates[n].get(words, 0.0) for n, (_, of) in OFF.items() for words in of}
    assert {key: rate for key, rate in false.items() if rate > MOST} == {}


TRUE = {"narrow": {"sd_ratio": 0.6, "mean_error": 0.0}, "equal": {"sd_ratio": 1.0}}
TRUE["equal"] |= dict.fromkeys(("wasserstein", "wasserstein2", "mean_error", "sd_error"), 0.0)


@pytest.mark.parametrize("repetitions", [30, pytest.param(200, marks=SLOW)])
@pytest.mark.parametrize("name, width", [("equal", 1.0), ("narrow", 0.6)])
def test_a_distance_is_within_two_errors_of_that_of_all_draws(name, width, repetitions):
    """Few draws make distances too large: by the spread of W1 alone that of equal posteriors is
    five errors from zero."""
    beyond = collections.Counter()
    for seed in range(repetitions):
        truth = Truth(seed, 30)
        sets = {"a": truth.predictions(100, width=width, known="f")}
        row = truth.compared(b=truth.predictions(100, known="f"), **sets).table.loc["a"]
        for key, true in TRUE[name].items():
            beyond[key] += abs(row[key] - true) > ERRORS * row[f"{key}_se"]
        spread = row["wasserstein_spread_se"]
        beyond["by spread"] += name == "equal" and row["wasserstein"] > 4 * spread
    assert beyond.pop("by spread") > 0.7 * repetitions or name != "equal"
    most = 0.12 if repetitions == 30 else 0.1
    assert {key: times for key, times in beyond.items() if times > repetitions * most} == {}


def test_more_draws_never_lower_a_grade():
    """A posterior with 0.9 of the sd is off by a tenth of a point's distance: alike, once known."""
    grades = {ALIKE: 2, USABLE: 1}
    means = []
    for count in (60, 300, 1500):
        rates = of_others(10, count, 4, narrow={"width": 0.9})["narrow"]
        means.append(sum(grades.get(group, 0) * rate for group, rate in rates.items()))
    assert means == sorted(means) and means[-1] == 2.0


# ------------------------------------------------------------- classes, and inputs from elsewhere

CLASSES = Kind({"y": "Categorical"}, "classification")


class Classes:
    """A linear classifier whose weights' posterior is known, with classes from its mean
    probabilities, which are therefore calibrated; N test inputs and M wider ones from elsewhere."""

    def __init__(self, seed, points, others=100, *, width=0.5):
        torch.manual_seed(0)
        self.weights, self.width = torch.randn(5, 3).double(), width
        torch.manual_seed(seed)
        self.x, self.other = torch.randn(points, 5).double(), 2 * torch.randn(others, 5).double()
        self.mean = self.probabilities(1000)[0].mean(0)
        self.y = dist.Categorical(self.mean).sample()

    def probabilities(self, count):
        """At the test inputs and at the others, by the same draws."""
        weights = self.weights + self.width * torch.randn(count, 5, 3).double()
        return [(x @ weights).softmax(-1) for x in (self.x, self.other)]

    def points(self, here, *, are_draws=True):
        """The scores of draws of the probabilities, or of the one prediction that they are."""
        score = Score(CLASSES, are_draws=are_draws)
        score.add(self.block(here, self.y))
        return score.points()

    def separation(self, here, there, *, are_draws=True):
        """The AUROCs."""
        blocks = self.block(here), self.block(there)
        return separation(*blocks, "classification", are_draws=are_draws)

    def block(self, p, y=None):
        places = None if y is None else y.expand(len(p), -1)[..., None]
        density = None if y is None else p.gather(2, places)[..., 0].log()
        mean = p.mean(0).log()
        return Block(p.shape[1], p, p, y, log_density=density, log_mean=mean)


def test_scores_of_classes_are_within_two_errors_of_those_of_all_points_and_draws():
    """Few points and few draws: the errors are the spread of the scores over both."""
    truth = Classes(-1, 3000, 3000)
    mean = truth.mean.expand(2, -1, -1)
    parts = [bdl.metrics.entropy_parts(p) for p in truth.probabilities(500)]
    total, true = [part.total for part in parts], {"ood_entropy": parts[1].total.mean()}
    true |= {"aupr": bdl.metrics.aupr(*total), "fpr95": bdl.metrics.fpr95(*total)}
    true |= {"aleatoric": parts[0].aleatoric.mean(), "epistemic": parts[0].epistemic.mean()}
    true["aurc"] = truth.points(mean, are_draws=False)["aurc"].number
    scores, beyond = collections.defaultdict(list), collections.Counter()
    for seed in range(40):
        few = Classes(seed, 100)
        here, there = few.probabilities(40)
        found = few.points(here) | few.separation(here, there)
        for key, value in true.items():
            beyond[key] += not abs(found[key].number - float(value)) <= ERRORS * found[key].error
            scores[key].append((found[key].number, found[key].error))
    assert max(beyond.values()) <= 40 * 0.12
    for key in true.keys() - {"fpr95"}:  # whose points of the threshold are few
        numbers, errors = torch.tensor(scores[key]).T
        assert 0.7 < errors.square().mean().sqrt() / numbers.std() < 1.6, key


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_right_predictions_are_not_said_to_have_a_distance_from_uniform(shift):
    """A Normal that is right, and one that is half an sd off, whose distance is 0.2."""
    beyond = 0
    for seed in range(15):
        torch.manual_seed(seed)
        f, y = torch.zeros(40, 400).double(), shift + torch.randn(400).double()
        score = Score(NORMAL)
        score.add(Block(400, f, f, y, torch.ones_like(f), torch.randn_like(f), None))
        found = score.points()["pit"]
        beyond += found.number > ERRORS * found.error
    assert beyond <= 15 * MOST if shift == 0.0 else beyond > 15 * 0.9


AREAS = "auroc", "auroc_epistemic"
SIZES = [(400, 30, 30), *(pytest.param(*s, marks=SLOW) for s in ((60, 40, 60), (200, 40, 400)))]


@pytest.mark.parametrize("points, count, other", SIZES)
def test_aurocs_of_one_posterior_differ_by_two_errors_in_a_twentieth(points, count, other):
    """By their errors over the inputs alone in an eighth of the comparisons and more."""
    beyond, by_points = collections.Counter(), collections.Counter()
    for seed in range(40):
        truth = Classes(seed, points, points)
        first, second = (truth.separation(*truth.probabilities(n)) for n in (count, other))
        for key in AREAS:
            gap, error = first[key].difference(second[key])
            beyond[key] += abs(gap) > ERRORS * error
            error = replace(first[key], groups=torch.zeros(10)).difference(
                replace(second[key], groups=torch.zeros(10))
            )[1]
            by_points[key] += abs(gap) > ERRORS * error
    assert max(beyond.values()) <= 40 * MOST
    assert min(by_points.values()) > 40 * 0.12 or points < 100


@SLOW
@pytest.mark.parametrize("points, count, other", [(400, 30, 30), (60, 40, 60), (200, 40, 400)])
def test_scores_of_classes_of_one_posterior_differ_by_two_errors_in_a_twentieth(
    points, count, other
):
    beyond = collections.Counter()
    for seed in range(200):
        truth = Classes(seed, points)
        first, second = (truth.points(truth.probabilities(n)[0]) for n in (count, other))
        for key in first.keys() - {"nlpd_few"}:
            gap, error = first[key].difference(second[key])
            beyond[key] += abs(gap) > ERRORS * error
    assert {"nlpd", "nlpd_calibrated", "ece", "accuracy", "brier"} <= beyond.keys()
    assert {key: n for key, n in beyond.items() if n > 200 * MOST} == {}


@pytest.mark.parametrize("points", [60, *(pytest.param(n, marks=SLOW) for n in (20, 200))])
def test_calibrated_probabilities_are_not_said_to_have_a_calibration_error(points):
    """By the spread of the points alone, the ECE of half of them is beyond two errors of zero; nor
    have sharper ones another than vaguer ones that are calibrated too."""
    said = by_points = differ = 0
    for seed in range(100):
        truth = Classes(seed, points, 1)
        known = truth.x[:, None].repeat(1, 100, 1)
        known[..., 2:] = torch.randn(points, 100, 3)  # of two of the five inputs
        weights = truth.weights + truth.width * torch.randn(100, 5, 3).double()
        vague = torch.einsum("nsd,sdc->nsc", known, weights).softmax(-1).mean(1)
        exact, vague = (
            truth.points(p.expand(2, -1, -1), are_draws=False)["ece"] for p in (truth.mean, vague)
        )
        said += exact.number > ERRORS * exact.error
        by_points += exact.number > ERRORS * standard_error_of_mean(exact.influence)
        gap, error = exact.difference(vague)
        differ += abs(gap) > ERRORS * error
    assert said <= 100 * MOST and differ <= 100 * MOST and by_points > 100 * 0.3


@pytest.mark.parametrize("points, count", [(400, 20), pytest.param(200, 40, marks=SLOW)])
def test_an_auroc_is_within_two_errors_of_that_of_all_inputs_and_draws(points, count):
    """An entropy of few draws is biased and noisy, which makes the area smaller."""
    areas, beyond = {}, collections.Counter()
    here, there = map(bdl.metrics.entropy_parts, Classes(-1, 3000, 3000).probabilities(500))
    for key, of in zip(AREAS, ("total", "epistemic"), strict=True):
        areas[key] = float(bdl.metrics.auroc(getattr(here, of), getattr(there, of)))
    repetitions = 200 if count == 40 else 40
    for seed in range(repetitions):
        truth = Classes(seed, points, points)
        found = truth.separation(*truth.probabilities(count))
        for key in AREAS:
            beyond[key] += abs(found[key].number - areas[key]) > ERRORS * found[key].error
    assert max(beyond.values()) <= repetitions * MOST


@SLOW
@pytest.mark.parametrize("points", [100, 300])
def test_draws_of_what_the_network_predicts_are_not_said_to_be_better(points):
    better = apart = 0
    for seed in range(150):
        truth = Classes(seed, points, points, width=0.2)
        means = [p.mean(0).expand(2, -1, -1) for p in truth.probabilities(1000)]
        network = truth.points(means[0], are_draws=False)
        network |= truth.separation(*means, are_draws=False)
        here, there = truth.probabilities(40)
        draws = truth.points(here) | truth.separation(here, there)
        del draws["auroc_epistemic"]  # which may be the better one in truth
        sides = {"network": network, "Laplace": draws}
        of = {name: SimpleNamespace(points=p, rows=points) for name, p in sides.items()}
        text = answer_of(of, ["network"])
        better += "no posterior has better" not in text
        apart += "No posterior separates" not in text
    assert better <= 150 * MOST and apart <= 150 * MOST


# --------------------------------------------------------------------------------- named latents

LAWS = {
    "normal": lambda *shape: torch.randn(*shape).double(),
    "half normal": lambda *shape: torch.randn(*shape).double().abs(),
    "log normal": lambda *shape: torch.randn(*shape).double().exp(),
    "t, 3": lambda *shape: dist.StudentT(3.0).sample(shape).double(),
}


DRAWS = [(40, 40), *(pytest.param(*s, marks=SLOW) for s in ((200, 1000), (1000, 1000)))]


def of_latents(draws):
    """A posterior of which only draws of named latents matter, ``(S, K)``."""
    none = torch.zeros(1)
    names = tuple(map(str, range(draws.shape[1])))
    return bdl.Evaluation(
        "regression", 1, none, (), none, {}, 1, draws[:, :1], none, latents=draws,
        latent_names=names,
    )  # fmt: skip


def latents_far(law, count, other, latents, repetitions, shift=0.0):
    """How often one of some latents is called far, with ``count`` and ``other`` draws."""
    far = 0
    for seed in range(repetitions):
        torch.manual_seed(seed)
        a, b = (of_latents(LAWS[law](draws, latents)) for draws in (count, other))
        a = of_latents(a.latents + shift)
        far += worst_latent(a, b)["latent_far"] > 0
    return far / repetitions


def test_the_error_of_a_latent_is_that_of_the_jackknife_for_three_errors():
    """Over ten groups of four draws, enlarged by Student's t."""
    torch.manual_seed(0)
    a, b = torch.randn(40).double(), torch.randn(40).double()
    found = latent_distances(of_latents(a[:, None]), of_latents(b[:, None]))
    without = [
        [torch.cat([x[: 4 * g], x[4 * g + 4 :]]).sort().values for x in (a, b)] for g in range(10)
    ]
    distances = torch.stack([(p - q).abs().mean() for p, q in without]) / b.std(correction=0)
    spread = float(distances.std(correction=0)) * 3
    assert float(found.errors) == pytest.approx(spread * stdtrit(9, ndtr(3.0)) / 3, rel=1e-6)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count, other", DRAWS)
def test_a_latent_of_one_posterior_is_not_called_far(law, count, other):
    """Of one hundred latents too, of which the worst decides."""
    few = 60 if count == 40 else 200
    for latents, repetitions in ((1, few), (100, min(few, 60) // (1 + (count == 40)))):
        assert latents_far(law, count, other, latents, repetitions) <= MOST


@pytest.mark.parametrize("count, other", DRAWS)
def test_a_latent_that_is_as_far_as_half_of_a_point_is_not_called_far(count, other):
    """A Normal that is 0.4 sds off: one is called far with three errors to spare, and it is far at
    twice that distance once there are draws enough."""
    half = (2 / torch.pi) ** 0.5 / 2
    assert latents_far("normal", count, other, 1, 60 if count == 40 else 200, half) <= MOST
    assert latents_far("normal", 1000, 1000, 1, 10, 2 * half) == 1.0


# ---------------------------------------------------------------------- several runs of a method


def of_seeds(repetitions, runs):
    """How often two methods that are equal on average over training seeds, whose shifts have sd
    0.4, are told apart by NLPD, and how often the mean sd ratio is more than two errors off."""
    worse_by_seed, off = 0, 0
    for seed in range(repetitions):
        truth = Truth(seed, 40)
        exact = truth.predictions(200, known="f")
        sets = {}
        for name in "ab":
            widths = (1 + 0.3 * torch.randn(runs)).clamp_min(0.1).tolist()
            shifts = (0.4 * torch.randn(runs)).tolist()
            sets[name] = [
                truth.predictions(200, width=w, shift=s, known="fp")
                for w, s in zip(widths, shifts, strict=True)
            ]
        worse_by_seed += worse(truth.compared(None, **sets))
        row = truth.compared("b", a=sets["a"], b=exact).table.loc["a"]
        off += abs(row["sd_ratio"] - 1.0) > 2 * row["sd_ratio_se"]
    return worse_by_seed / repetitions, off / repetitions


@SLOW
@pytest.mark.parametrize("runs", [3, 5])
def test_the_errors_of_several_runs_hold_their_differences(runs):
    told, off = of_seeds(60, runs)
    assert told <= MOST and off <= MOST


@SLOW
def test_the_errors_of_one_run_do_not_hold_the_differences_between_runs():
    assert of_seeds(30, 1)[1] > 0.3


# ------------------------------------------------------------------- sensitivity to the prior

SHARE = 0.05  # of the posterior's precision that is the prior's


def sensitive(mean, draws, latents=1, others=0, rho=0.0):
    """The table of chains of a posterior of Normals of sd 1, with more numbers that have nothing
    to do with them, whose draws weight theirs at random."""

    def program(y=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(latents).double(), SHARE**-0.5).to_event(1))
        pyro.sample("z", dist.Normal(torch.zeros(max(1, others)), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mu, (1 - SHARE) ** -0.5).to_event(1), obs=y)

    z = torch.randn(*draws, latents + max(1, others)).double()
    for t in range(1, draws[1] if rho else 0):
        z[:, t] = rho * z[:, t - 1] + (1 - rho**2) ** 0.5 * z[:, t]
    latent = {"mu": mean + z[..., :latents], "z": z[..., latents:]}
    y = torch.full((latents,), mean / (1 - SHARE)).double()
    return bdl.diagnostics.prior_sensitivity(program, bdl.Samples(latent), y, sites="mu")


# Means of which evenly spaced draws show 0.049, just below the limit; it falls with their number.
BELOW = {40: 5.1, 200: 5.6, 2000: 6.2}
CHAINS = {
    "few": ((4, 10), {}),
    "short": ((4, 50), {"latents": 12}),
    "noise": ((4, 50), {"others": 100}),
    "much noise": ((4, 500), {"others": 1000}),
    "correlated": ((4, 500), {"latents": 12, "others": 100, "rho": 0.9}),
}


def said_of(mean, draws, options, repetitions):
    said = 0
    for seed in range(repetitions):
        torch.manual_seed(seed)
        said += (sensitive(mean, draws, **options)["diagnosis"] != "").any()
    return said / repetitions


@pytest.mark.parametrize("chains", [pytest.param(n, marks=SLOW) for n in CHAINS] + ["quick"])
def test_what_hardly_depends_on_the_prior_is_not_said_to(chains):
    """Without the noise that other latents add, and its errors, it is said in 30 to 90 %."""
    draws, options = CHAINS["noise" if chains == "quick" else chains]
    mean = BELOW[draws[0] * draws[1]]
    repetitions = 20 if chains == "quick" else 60
    assert said_of(mean, draws, options, repetitions) <= MOST


def test_what_depends_on_the_prior_is_said_to():
    """A posterior 25 sds from the prior's mean, whose sensitivity is 0.2."""
    assert said_of(25.0, (4, 250), {}, 10) == 1.0
