"""References that are known by their predictions alone, and data that do not fit."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import PredictiveDraws, Samples, compare
from pyro_bdl.errors import BdlWarning

X = torch.linspace(-1, 1, 9)[:, None]
Y = X[:, 0]


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * x[:, 0])
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def coin(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * x[:, 0]), obs=y)


def draws(seed=0, chains=2, count=200):
    torch.manual_seed(seed)
    return Samples({"w": torch.randn(chains, count, 2)})


def function(samples):
    w = samples.flat()["w"]
    return w[:, :1] + w[:, 1:] * X[:, 0]


def test_predictions_take_the_place_of_their_posterior():
    """The numbers are those of the samples that the predictions come from."""
    exact = draws(seed=1)
    f = function(exact)
    held = PredictiveDraws(f, f + 0.5 * torch.randn_like(f), dist.Normal(f, 0.5).log_prob(Y))
    scale = {"units": (10.0, 3.0)}
    by_name = {"vi": draws(), "exact": held, "same": exact}
    found = compare(line, by_name, X, Y, reference="exact", **scale)
    plain = compare(line, {"vi": draws(), "same": exact}, X, Y, reference="same", **scale)
    rows, expected = found.numbers(), plain.numbers()
    for key in ("mean_error", "sd_error", "wasserstein", "wasserstein2", "sd_ratio", "khat_high"):
        assert rows["vi"][key] == pytest.approx(expected["vi"][key], rel=1e-4)
    assert rows["exact"]["nlpd"] == pytest.approx(expected["same"]["nlpd"], rel=1e-4)
    for key in ("rmse", "crps"):
        assert rows["exact"][key] == pytest.approx(expected["same"][key], rel=0.15)
    assert rows["same"]["wasserstein"] == pytest.approx(0, abs=1e-5)
    assert not found.warnings and "rhat" not in rows["exact"]
    assert [*found.numbers().values()][-1]["posterior"] == "exact, half to half" and [
        *found.numbers().values()
    ][-1]["wasserstein"] > 0


def test_the_function_alone_is_enough_and_the_rest_stays_open():
    rows = compare(
        line, {"vi": draws(), "exact": PredictiveDraws(function(draws(1)))}, X, Y, reference="exact"
    ).numbers()
    assert rows["vi"]["wasserstein"] > 0 and "kl" not in rows["vi"]
    assert {"rmse"} == {"rmse", "nlpd", "crps", "pit"} & set(rows["exact"])


@pytest.mark.parametrize("both", [False, True])
def test_class_probabilities(both):
    exact = draws(seed=1)
    ones = function(exact).sigmoid()
    held = PredictiveDraws(torch.stack([1 - ones, ones], -1) if both else ones)
    y = (torch.arange(9) % 2).float()
    by_name = {"vi": draws(), "exact": held, "same": exact}
    rows = compare(coin, by_name, X, y, reference="exact").numbers()
    shared = ("accuracy", "nlpd", "expected_nll", "brier", "ece", "ace", "confidence")
    for key in (*shared, "aleatoric", "epistemic"):
        assert rows["exact"][key] == pytest.approx(rows["same"][key], rel=1e-4)
    for key in ("total_variation", "kl", "wasserstein"):
        assert rows["same"][key] == pytest.approx(0, abs=1e-5) and rows["vi"][key] > 1e-4


def test_chains_of_predictions_are_checked():
    f = function(draws(1))
    f[200:] += 3
    found = compare(
        line, {"vi": draws(), "old": PredictiveDraws(f, chains=2)}, X, Y, reference="old"
    )
    assert found.numbers()["old"]["rhat"] > 1.5 and "cannot be trusted" in found.warnings[0]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda f: PredictiveDraws(f[:1]), "at least 2 draws"),
        (lambda f: PredictiveDraws(f, f[:9]), "targets has .draws, points. .9, 9., but function"),
        (lambda f: PredictiveDraws(f * torch.inf), "function holds NaN or infinity"),
        (lambda f: PredictiveDraws(f, chains=3), "chains=3 does not divide the 400 draws"),
    ],
)
def test_bad_draws_are_told(make, words):
    with pytest.raises(ValueError, match=words):
        make(function(draws()))


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"exact": PredictiveDraws(torch.zeros(5, 8))}, ValueError, "at 8 points, but .* 9 test"),
        ({"vi": PredictiveDraws(torch.zeros(5, 9))}, ValueError, "guide or Samples besides"),
        ({"exact": PredictiveDraws(torch.zeros(5, 9, 2))}, ValueError, "y_test has shape"),
        ({"y": None}, TypeError, "y_test must be a tensor, got NoneType"),
        ({"train": X}, TypeError, "train must be a tuple of tensors"),
        ({"train": (X,)}, ValueError, "train must hold inputs and, last, targets.*got 1"),
        ({"train": (X, None)}, TypeError, "y_train must be a tensor"),
        ({"train": (X, Y[:3])}, ValueError, "train data must have the same number of rows"),
        ({"ood": X * torch.nan}, ValueError, "ood holds NaN"),
        ({"ood": (X, X)}, ValueError, "ood must hold inputs without targets"),
        ({"costs": {"vi": 1.0}}, TypeError, r"costs\['vi'\] must be a Costs"),
    ],
)
def test_what_does_not_fit_is_told(change, error, words):
    posteriors = {"vi": draws(), "exact": PredictiveDraws(torch.randn(5, 9))}
    posteriors |= {name: change.pop(name) for name in ("vi", "exact") if name in change}
    y = change.pop("y", Y)
    with pytest.raises(error, match=words):
        compare(line, posteriors, X, y, reference="exact", **change)


def test_probabilities_that_do_not_sum_to_one_are_told():
    held = PredictiveDraws(torch.ones(5, 9, 2))
    with pytest.raises(ValueError, match="'exact': it must hold class probabilities"):
        compare(coin, {"vi": draws(), "exact": held}, X, torch.ones(9), reference="exact")


def test_integer_targets_are_numbers_as_well(recwarn):
    whole = torch.arange(9) % 3
    rows = [
        compare(line, {"a": draws()}, X, y, reference=None, train=(X, y)).numbers()["a"]
        for y in (whole, whole.float())
    ]
    for row in rows:
        row.pop("draw_seconds")
    assert rows[0] == rows[1] and not [w for w in recwarn if w.category is BdlWarning]


def test_counts_have_a_uniform_transform():
    def counts(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((w[0] + w[1] * x[:, 0]).exp()), obs=y)

    torch.manual_seed(0)
    x = torch.randn(800, 1)
    known = Samples({"w": torch.tensor([0.5, 0.3]).repeat(2, 300, 1)})
    y = torch.poisson((0.5 + 0.3 * x[:, 0]).exp())
    found = compare(counts, {"a": known}, x, y, reference=None)
    assert found.numbers()["a"]["pit"] < 1.63 / math.sqrt(800)
    assert found.evaluations["a"].pit.shape == (800,)
    assert found.numbers()["a"]["aleatoric"] == pytest.approx(
        (0.5 + 0.3 * x[:, 0]).exp().mean().sqrt().item(), rel=0.02
    )


def test_inputs_from_elsewhere_are_told_apart():
    """The sd of a line grows with |x|; that of a constant function does not."""
    wide, flat = draws(), Samples({"w": draws().latents["w"] * torch.tensor([1.0, 0.0])})
    far = 5 + torch.rand(30, 1)
    rows = compare(line, {"wide": wide, "flat": flat}, X, Y, reference=None, ood=far).numbers()
    assert rows["wide"]["auroc"] == 1 == rows["wide"]["auroc_epistemic"]
    assert rows["flat"]["auroc"] == pytest.approx(0.5, abs=0.01)
    y = (torch.arange(9) % 2).float()
    row = compare(coin, {"wide": wide}, X, y, reference=None, ood=far).numbers()["wide"]
    assert row["auroc_epistemic"] > 0.9 and 0 <= row["auroc"] <= 1
