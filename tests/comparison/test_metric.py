"""Metrics: one entry gives the score and the column, and no number goes without a column."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import PredictiveDraws, Samples, compare, metrics
from pyro_bdl.comparison import distances, scores, table
from pyro_bdl.comparison.metric import Metric, PointScores, measure

TASKS = ["regression", "classification"]


def test_a_metric_gives_its_score_and_its_column():
    bias = Metric(
        "bias", "bias", "Mean error.", lambda mean, y: (mean - y).mean(), of="mean", error=True
    )
    mean, y = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.5])
    assert measure([bias], "regression", {"mean": (mean, y)}) == {"bias": 0.75}
    assert measure([bias], "regression", {"draws": (mean, y)}) == {}
    column = bias.column()
    assert (column.key, column.title, column.help) == ("bias", "bias", "Mean error.")
    assert column.error == "bias_se"


@pytest.mark.parametrize("task", TASKS)
def test_every_column_is_declared_once_and_explained(task):
    shown = [*table.columns(task, "nuts"), *table.details(task, "nuts")]
    keys = [column.key for column in shown]
    assert len(keys) == len(set(keys))
    assert all(column.help.endswith(".") for column in shown)


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)


@pytest.fixture
def posterior():
    torch.manual_seed(0)
    return Samples({"w": torch.randn(2, 30)})


def test_a_new_score_is_in_the_table(monkeypatch, posterior):
    """A score of the mean and a distance, of posteriors and of predictions alone."""
    new = Metric("bias", "bias", "Mean error.", lambda mean, y: (mean - y).mean(), of="mean")
    far = Metric("far", "far", "Largest.", lambda a, b: (a - b).mean(), "function", error=True)
    monkeypatch.setattr(scores, "SCORES", (*scores.SCORES, new))
    monkeypatch.setattr(table, "TEST_DATA", (*table.TEST_DATA, new))
    monkeypatch.setattr(distances, "ALL_DISTANCES", (*distances.ALL_DISTANCES, far))
    monkeypatch.setattr(table, "DISTANCES", (*table.DISTANCES, far))
    x = torch.linspace(-1, 1, 5)
    given = {"a": posterior, "b": PredictiveDraws(posterior.flat()["w"][:, None] * x)}
    found = compare(line, given, x, x + 1, reference="a")
    row = found.numbers()["b"]
    assert row["bias"] == pytest.approx((found.evaluations["b"].mean - x - 1).mean().item())
    assert row["far"] == pytest.approx(0.0, abs=1e-6) and row["far_se"] >= 0
    assert {"bias", "far"} <= {column.key for column in found.table.attrs["columns"]}


def test_errors_over_the_points_are_those_of_the_delta_method_and_paired():
    torch.manual_seed(0)
    a, b = torch.rand(400).double(), torch.rand(400).double()
    of = {m.key: m for m in scores.TEST_DATA}
    mean = PointScores.of(of["crps"], a)
    assert mean.error == pytest.approx(a.std().item() / 20)
    assert mean.difference(PointScores.of(of["crps"], a + b)) == pytest.approx(
        (-b.mean().item(), b.std().item() / 20)
    )
    root = PointScores.of(of["rmse"], a)
    assert root.number == pytest.approx(a.mean().sqrt().item())
    without = ((a.sum() - a) / 399).sqrt()  # the jackknife agrees to the order 1 / N
    jackknife = (without.var(correction=0) * 399).sqrt().item()
    assert root.error == pytest.approx(jackknife, rel=5e-3)
    gap, error = root.difference(PointScores.of(of["rmse"], b))
    others = without - ((b.sum() - b) / 399).sqrt()
    assert gap == pytest.approx((a.mean().sqrt() - b.mean().sqrt()).item())
    assert error == pytest.approx((others.var(correction=0) * 399).sqrt().item(), rel=5e-3)
    assert root.difference(root) == (0.0, 0.0)


def test_a_share_of_all_points_has_an_error():
    coverage = next(m for m in scores.TEST_DATA if m.key == "coverage")
    every = PointScores.of(coverage, torch.ones(24).double())
    p, n = 26 / 28, 28  # two of each kind more
    assert every.number == 1.0 and every.error == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)


def test_paired_differences_and_errors_are_in_the_rows(posterior):
    x = torch.linspace(-1, 1, 30)
    y = torch.sin(3 * x)
    given = {"a": posterior, "b": Samples({"w": 0.1 * posterior.latents["w"]})}
    found = compare(line, given, x, y, reference="a")
    a, b = (found.evaluations[name].points for name in "ab")
    row = found.numbers()["b"]
    for key in ("rmse", "nlpd", "nlpd_normal", "crps", "coverage"):
        assert (row[f"{key}_diff"], row[f"{key}_diff_se"]) == b[key].difference(a[key])
        assert row[f"{key}_se"] == b[key].error > 0
    assert not found.notes and "nlpd_normal" in [c.key for c in found.table.attrs["details"]]


def test_a_density_that_rests_on_few_draws_is_said_and_not_relied_on():
    def sharp(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.expand(len(x)), 1e-3), obs=y)

    torch.manual_seed(0)
    x, y = torch.zeros(4, 1), torch.tensor([-1.0, 0.0, 0.5, 2.0])
    given = {name: Samples({"w": torch.randn(2, 200)}) for name in "ab"}
    found = compare(sharp, given, x, y, reference="a")
    row = found.numbers()["a"]
    assert row["nlpd_few"] == 1.0 and row["nlpd"] > 10
    w = given["a"].flat()["w"]
    exact = -dist.Normal(w.mean(), (w.var(correction=0) + 1e-6).sqrt()).log_prob(y).mean()
    assert row["nlpd_normal"] == pytest.approx(exact.item(), rel=1e-4)
    assert "nlpd_normal" in [c.key for c in found.table.attrs["columns"]]
    assert "NLPD of a and b rests on fewer than 10 draws" in " ".join(str(found).split())
    alone = compare(sharp, given, x, y, reference=None)
    assert " predict the test data alike" in alone.summary


def test_scores_of_draws_are_those_of_the_posterior(posterior):
    """One function scores both: equal draws get equal scores, but for the noise drawn anew."""
    x, y = torch.linspace(-1, 1, 5), torch.linspace(-2, 1, 5)
    f = posterior.flat()["w"][:, None] * x
    density = dist.Normal(f, 0.5).log_prob(y)
    known = PredictiveDraws(f, f + 0.5 * torch.randn_like(f), density)
    given = {"a": posterior, "b": known}
    options = {"units": (2.0, -1.0)}
    rows = compare(line, given, x, y, reference=None, **options).numbers()
    assert rows["b"]["nlpd"] == pytest.approx(rows["a"]["nlpd"], rel=1e-6)
    exact = metrics.crps(2 * known.targets - 1, 2 * y - 1).item()
    assert rows["b"]["crps"] == pytest.approx(exact, rel=1e-6)
    shared = {"rmse", "nlpd", "crps", "coverage", "coverage_50", "coverage_95", "pit"}
    assert shared <= set(rows["a"]) & set(rows["b"])
