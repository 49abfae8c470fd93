"""Several runs of one method as one row: means, with the runs' differences in the errors."""

import math

import pytest
import torch
from helpers.comparisons import GRID, line, weights
from scipy.special import ndtr, stdtrit

import pyro_bdl as bdl
from pyro_bdl.comparison.metric import PointScores, over_runs

Y = GRID[:, 0]


@pytest.fixture(scope="module")
def comparison():
    runs = [weights(2, seed=seed, scale=scale) for seed, scale in ((1, 0.5), (2, 1.0), (3, 2.0))]
    posteriors = {"nuts": weights(2), "swag": runs, "one": runs[0]}
    singles = {"nuts": weights(2), **dict(zip("abc", runs, strict=True))}
    return bdl.compare(line, posteriors, GRID, Y), bdl.compare(line, singles, GRID, Y)


def student(values):
    """The standard error of a mean, enlarged by t / z."""
    values = torch.as_tensor(values, dtype=torch.float64)
    factor = float(stdtrit(len(values) - 1, ndtr(2.0))) / 2
    return float(values.std()) / len(values) ** 0.5 * factor


@pytest.mark.parametrize("key", ["sd_ratio", "wasserstein", "mean_shift", "nlpd", "rmse"])
def test_a_number_is_the_mean_and_its_error_holds_the_runs(comparison, key):
    found, singles = (each.table for each in comparison)
    assert found.loc["swag", key] == pytest.approx(singles.loc[list("abc"), key].mean())
    between = student(singles.loc[list("abc"), key].tolist())
    assert found.loc["swag", f"{key}_se"] >= between
    within = singles.loc[list("abc"), f"{key}_se"].mean()
    assert found.loc["swag", f"{key}_se"] <= math.hypot(between, within) * 1.0001
    assert found.loc["one", f"{key}_se"] == singles.loc["a", f"{key}_se"]


def test_a_fault_in_places_of_one_run_in_three_is_none_of_the_method():
    x = torch.linspace(-1, 1, 20)[:, None]
    basis = torch.cat([torch.ones(20, 1), x], 1).mT

    def run(seed, width=1.0):
        torch.manual_seed(seed)
        return bdl.PredictiveDraws(width * torch.randn(400, 2) @ basis)

    sets = {"all": [run(1, 0.1), run(2, 0.1), run(3, 0.1)], "one": [run(1, 0.1), run(2), run(3)]}
    found = bdl.compare(line, {**sets, "exact": run(4)}, x, x[:, 0], reference="exact")
    groups = {name: judgment.group for name, judgment in found.judgments.items()}
    assert groups["all"] == "far" and groups["one"] == "undecided"
    assert found.table.loc["one", "far_at"] == pytest.approx(1 / 3)
    assert not any(finding.fault for finding in found.judgments["one"].findings)


def test_it_is_said(comparison):
    found, _ = comparison
    assert found.judgments["swag"].verdict.startswith("mean of 3 runs, whose differences are in")
    assert found.table.loc["swag", "runs"] == 3 and "runs" not in found.judgments["one"].verdict


def test_a_difference_of_scores_has_the_error_over_the_runs():
    influence, groups = torch.linspace(0, 1, 50).double(), torch.zeros(10)
    runs = [PointScores(n, 0.0, influence * 0, groups) for n in (1.0, 2.0, 4.0)]
    other = PointScores(1.0, 0.0, influence * 0, groups)
    gap, error = PointScores.of_runs(runs).difference(other)
    assert gap == pytest.approx(4 / 3)
    assert error == pytest.approx(student([1.0, 2.0, 4.0]))
    assert PointScores.of_runs(runs).error == pytest.approx(student([1.0, 2.0, 4.0]))
    assert over_runs(torch.empty(0)) == 0.0


def test_saved_runs_are_compared_and_a_reference_has_one(tmp_path):
    runs = [bdl.evaluate(line, weights(2, seed=seed), GRID, Y) for seed in (1, 2)]
    loaded = [bdl.Evaluation.load(run.save(tmp_path / str(n))) for n, run in enumerate(runs)]
    found = bdl.compare_evaluations({"a": runs[0], "b": loaded}, "a")
    assert found.table.loc["b", "runs"] == 2
    for several in (loaded, []):
        with pytest.raises(ValueError, match=f"'b' has {len(several)} evaluations: give at least"):
            bdl.compare_evaluations({"a": runs[0], "b": several}, "b")
