"""Metrics: one function gives the number and the column, and no number goes without a column."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import GRID, line, shift, weights
from scipy import stats

from pyro_bdl import PredictiveDraws, Samples, compare
from pyro_bdl.comparison import distances, evaluate, scores, table
from pyro_bdl.comparison.kind import Kind
from pyro_bdl.comparison.metric import PointScores, measure, metric
from pyro_bdl.comparison.observe import Block


@metric("bias", "mean", group="test data")
def bias(mean, y):
    """Mean
    error."""
    return (mean - y).mean()


@metric("far", "function", error=True)
def far(a, b):
    """Largest difference."""
    return (a - b).mean()


def test_a_metric_gives_its_score_and_its_column():
    mean, y = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.5])
    assert measure([bias], "regression", {"mean": (mean, y)}) == {"bias": 0.75}
    assert measure([bias], "regression", {"draws": (mean, y)}) == {}
    column = bias.column()
    assert (column.key, column.title, column.help) == ("bias", "bias", "Mean error.")
    assert column.error == "" and far.column().error == "far_se"


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_every_column_is_declared_once_and_explained(task):
    shown = [column for part in table.columns(task, "nuts") for column in part]
    keys = [column.key for column in shown]
    assert len(keys) == len(set(keys)) and all(column.help.endswith(".") for column in shown)


def test_a_new_score_is_in_the_table(monkeypatch):
    """A score of the mean and a distance, of posteriors and of predictions alone."""
    monkeypatch.setattr(evaluate, "NUMBERS_OF_ONE", (*evaluate.NUMBERS_OF_ONE, bias))
    monkeypatch.setattr(table, "SCORES", (*table.SCORES, bias))
    monkeypatch.setattr(distances, "ALL_DISTANCES", (*distances.ALL_DISTANCES, far))
    monkeypatch.setattr(table, "ALL_DISTANCES", (*table.ALL_DISTANCES, far))
    posterior, x = weights(), torch.linspace(-1, 1, 5)[:, None]
    known = PredictiveDraws(posterior.flat()["w"][:, None].expand(-1, 5))
    found = compare(shift, {"a": posterior, "b": known}, x, x[:, 0] + 1, reference="a")
    row = found.numbers()["b"]
    expected = (found.evaluations["b"].mean - x[:, 0] - 1).mean().item()
    assert row["bias"] == pytest.approx(expected)
    assert row["far"] == pytest.approx(0.0, abs=1e-6) and row["far_se"] >= 0
    assert {"bias", "far"} <= {column.key for column in found.table.attrs["columns"]}


STUDENT = stats.t(399).ppf(stats.norm.cdf(2)) / 2  # by which an error of 400 points is enlarged


def test_errors_over_the_points_are_those_of_the_delta_method_and_paired():
    torch.manual_seed(0)
    a, b = torch.rand(400).double(), torch.rand(400).double()
    mean = PointScores.of(scores.crps, a)
    assert mean.error == pytest.approx(a.std().item() / 20)
    gap = mean.difference(PointScores.of(scores.crps, a + b))
    assert gap == pytest.approx((-b.mean().item(), STUDENT * b.std().item() / 20))
    root = PointScores.of(scores.rmse, a)
    assert root.number == pytest.approx(a.mean().sqrt().item())
    without = ((a.sum() - a) / 399).sqrt()  # the jackknife agrees to the order 1 / N
    jackknife = (without.var(correction=0) * 399).sqrt().item()
    assert root.error == pytest.approx(jackknife, rel=5e-3)
    gap, error = root.difference(PointScores.of(scores.rmse, b))
    others = without - ((b.sum() - b) / 399).sqrt()
    assert gap == pytest.approx((a.mean().sqrt() - b.mean().sqrt()).item())
    expected = (others.var(correction=0) * 399).sqrt().item() * STUDENT
    assert error == pytest.approx(expected, rel=5e-3)
    assert root.difference(root) == (0.0, 0.0)


def test_a_share_of_all_points_has_an_error():
    every = PointScores.of(scores.coverage, torch.ones(24).double())
    p, n = 26 / 28, 28  # two of each kind more
    assert every.number == 1.0 and every.error == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)


def test_paired_differences_and_errors_are_in_the_rows():
    given = {"a": weights(2), "b": Samples({"w": 0.1 * weights(2).latents["w"]})}
    found = compare(line, given, GRID, torch.sin(3 * GRID[:, 0]), reference="a")
    a, b = (found.evaluations[name].points for name in "ab")
    row = found.numbers()["b"]
    for key in ("rmse", "nlpd", "nlpd_normal", "crps", "coverage"):
        assert (row[f"{key}_diff"], row[f"{key}_diff_se"]) == b[key].difference(a[key])
        assert row[f"{key}_se"] == b[key].error > 0
    assert not found.notes and "nlpd_normal" in [c.key for c in found.table.attrs["details"]]


def test_a_density_that_rests_on_few_draws_decides_nothing():
    """Where the noise is much smaller than the function's sd, NLPD is mostly about the draws: its
    error says so, and two sets of draws of one posterior are not told from each other."""

    def sharp(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.expand(len(x)), 1e-3), obs=y)

    x, y = torch.zeros(4, 1), torch.tensor([-1.0, 0.0, 0.5, 2.0])
    given = {name: weights(count=200, seed=seed) for seed, name in enumerate("ab")}
    found = compare(sharp, given, x, y, reference="a")
    row, w = found.numbers()["a"], given["a"].flat()["w"]
    assert row["nlpd_few"] == 1.0 and row["nlpd"] > 10
    exact = -dist.Normal(w.mean(), (w.var(correction=0) + 1e-6).sqrt()).log_prob(y).mean()
    assert row["nlpd_normal"] == pytest.approx(exact.item(), rel=1e-4)
    assert "predicts worse" not in str(found)
    alone = compare(sharp, given, x, y, reference=None)
    assert {judgment.group for judgment in alone.judgments.values()} == {"alike"}


def test_the_error_over_the_draws_is_the_spread_of_scores_over_sets_of_draws():
    """NLPD, RMSE, CRPS and coverage of 80 sets of 200 draws of one posterior: their sd over the
    sets, which no error over the points contains. Of shares inside quantiles, which are not smooth
    in the draws, the jackknife's error is up to twice too large."""
    torch.manual_seed(0)
    kind, y = Kind({"y": "Normal"}, "regression"), torch.linspace(-1.6, 1.6, 30).double()
    found = []
    for _ in range(80):
        f = 0.5 * torch.randn(200, 2).double() @ torch.stack([torch.ones_like(y), y])
        draws = f + 0.3 * torch.randn_like(f)
        density = dist.Normal(f, 0.3).log_prob(y)
        score = scores.Score(kind)
        score.add(Block(30, f, f, y, torch.full_like(f, 0.09), draws, density))
        found.append(score.points())
    most = {"coverage": 2.2}
    for key in ("nlpd", "rmse", "crps", "coverage", "nlpd_normal", "nlpd_calibrated"):
        spread = torch.tensor([one[key].number for one in found]).std().item()
        errors = torch.tensor([one[key].over_draws for one in found])
        assert 0.8 < errors.square().mean().sqrt().item() / spread < most.get(key, 1.25), key


def test_scores_in_closed_form_have_no_error_over_draws_and_few_draws_an_unknown_one():
    given = {"few": weights(2, count=8), "many": weights(2, count=100)}
    found = {name: evaluate.evaluate(line, q, GRID, GRID[:, 0]) for name, q in given.items()}
    assert math.isnan(found["few"].scores["nlpd_se"]) and found["many"].scores["nlpd_se"] > 0
    gap, error = found["few"].points["nlpd"].difference(found["many"].points["nlpd"])
    assert math.isfinite(gap) and math.isnan(error)
    slow = found["many"].points["nlpd"]
    assert math.isnan(slow.with_effective(30.0).error) and slow.with_effective(40.0) is slow
    point = Samples({"w": torch.ones(1, 60, 2)})
    assert evaluate.evaluate(line, point, GRID, GRID[:, 0]).points["nlpd"].over_draws == 0.0


def test_of_many_differences_one_is_beyond_two_errors_as_rarely_as_is_said():
    """By ten groups of draws alone it is Student's distribution with nine degrees of freedom."""
    groups = torch.randn(10, generator=torch.Generator().manual_seed(0))
    score = PointScores(0.0, 0.0, torch.zeros(50), groups)
    none = PointScores(0.0, 0.0, torch.zeros(50), torch.zeros(10))
    for count in (1, 3, 20):
        limit = 2 * score.difference(none, of=count)[1] / score.over_draws
        rare = 2 * stats.t.sf(limit, 9)
        assert 0.8 * 0.05 / count < rare <= 0.05 / count


def test_the_error_over_draws_holds_the_bias_of_few_of_them():
    """The square of a mean of S draws is s^2 / S too high (Quenouille 1956)."""
    draws = torch.tensor([0.3, -1.2, 2.0, 0.4, 1.1, -0.6]).double()
    without = (draws.sum() - draws) / 5
    found = PointScores(0.0, 0.0, draws, without**2 - draws.mean() ** 2)
    spread = math.sqrt(5 / 6 * (without**2 - (without**2).mean()).square().sum())
    assert found.over_draws == pytest.approx(math.hypot(spread, float(draws.var()) / 6))
    share = PointScores.of(scores.accuracy, torch.ones(9), torch.rand(5, 9))
    assert float(share.groups.mean()) == pytest.approx(0.0, abs=1e-7)
