"""Memory, numbers held, and parameters that the data determine."""

import sys
import warnings

import pytest
import torch
from helpers.comparisons import shift, weights
from pyro.infer.autoguide import AutoNormal

import pyro_bdl as bdl
from pyro_bdl.comparison.costs import COSTS, Mixing, numbers_held, peak_memory
from pyro_bdl.comparison.metric import measure


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_is_what_the_block_took():
    # Threads of JAX from earlier tests may free or take memory meanwhile, so the median of five.
    assert 60 * 2**20 < _median_peak(2**24) < 80 * 2**20  # 64 MiB
    assert _median_peak(10) < 10 * 2**20


def _median_peak(size):
    found = []
    for _ in range(5):
        with peak_memory(torch.device("cpu")) as peak:
            held = torch.ones(size)
            del held
        found.append(peak.bytes)
    return sorted(found)[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    "use",
    [
        lambda model, guide, *data: bdl.compare(
            model, {"a": guide}, *data, reference=None, train=data, num_samples=400, progress=False
        ),
        lambda *args: bdl.calibration.temperature_scaling(*args, num_samples=400),
        lambda *args: bdl.to_arviz(*args, prior_samples=0, num_samples=400),
    ],
    ids=["compare", "temperature_scaling", "to_arviz"],
)
def test_draws_of_all_weights_are_held_once(use, monkeypatch):
    """Not copied to be made, checked, flattened or weighed: the peak is the draws, and a part."""
    for module in ("guides.draws", "comparison.evaluate", "comparison.leave_one_out"):
        monkeypatch.setattr(f"pyro_bdl.{module}.DRAWS_AT_ONCE", 2**19)
    net = torch.nn.Sequential(
        torch.nn.Linear(50, 200), torch.nn.ReLU(), torch.nn.Linear(200, 150), torch.nn.ReLU(),
        torch.nn.Linear(150, 1),
    )  # fmt: skip
    x, y = torch.randn(20, 50), torch.randn(20)
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(0.1)), noise=0.5)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    draws = 4 * 400 * guide.layout.size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use(model, guide, x, y)  # what is allocated once only
        with peak_memory(torch.device("cpu")) as peak:
            use(model, guide, x, y)
    # a copy would make it twice the draws; what other tests left in the process, a fifth more
    assert peak.bytes < 1.5 * draws + 10 * 2**20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_on_a_gpu_is_exact():
    with peak_memory(torch.device("cuda")) as peak:
        held = torch.ones(2**20, device="cuda")
        del held
    assert peak.bytes == 4 * 2**20


def test_numbers_are_those_of_the_posterior():
    x, y = torch.randn(10, 3), torch.randn(10)
    model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(3, 1)), noise=1.0)
    assert numbers_held(bdl.guides.AutoMeanField(model).prototype(x, y)) == 2 * 4
    assert numbers_held(bdl.guides.AutoMAP(model).prototype(x, y)) == 4
    assert numbers_held(bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)) == 12
    theirs = AutoNormal(model)
    theirs(x, y)
    assert numbers_held(theirs) == 2 * 4
    assert numbers_held(bdl.Samples({"w": torch.zeros(2, 5, 3)})) == 30
    assert numbers_held(lambda: None) is None


def test_costs_are_columns_where_they_are_known():
    x, y, given = torch.zeros(3, 1), torch.zeros(3), {"a": weights(), "b": weights()}
    assert "log_evidence" not in bdl.compare(shift, given, x, y, reference=None).table
    costs = bdl.Costs(elbo=-15.5, log_evidence=-12.345, peak_memory=2**21, elbo_error=0.25)
    found = bdl.compare(shift, given, x, y, reference=None, costs={"a": costs})
    assert "-15.50 ± 0.25" in str(found)
    assert "log evid." in found.to_text(details=True) and "log evid." not in str(found)
    row = found.numbers()["a"]
    assert row["log_evidence"] == -12.345 and row["memory"] == 2 and row["draw_seconds"] > 0
    assert "log_evidence" not in found.numbers()["b"]


@pytest.mark.usefixtures("double")
def test_the_parameters_that_the_data_determine_are_a_column():
    """Linear regression: gamma is the trace of the posterior's share of the curvature."""
    x, y = torch.randn(30, 3), torch.randn(30)
    net = bdl.bayesianize(torch.nn.Linear(3, 1), bdl.priors.Normal(10.0))
    model = bdl.models.Regression(net, noise=0.5)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)
        posterior = guide.laplace_approximation((x, y))
    design = torch.cat([x, torch.ones(30, 1)], 1)
    curvature = design.T @ design / 0.25
    gamma = torch.linalg.solve(curvature + 0.01 * torch.eye(4), curvature).trace().item()
    given = {"laplace": posterior, "map": guide}
    found = bdl.compare(model, given, x, y, reference=None, num_samples=4)
    row = found.numbers()["laplace"]
    assert (row["gamma"], row["latents"], row["fitted"]) == (pytest.approx(gamma), 4, 30)
    assert "gamma" not in found.numbers()["map"] and "gamma" in found.to_text()
    assert "nearly all, the network may be too small" in found.verdicts["laplace"]


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_r_hat_and_effective_draws_are_those_of_95_percent_of_the_points(share):
    bad = torch.arange(100) < 100 * share
    mixing = Mixing(torch.where(bad, 2.0, 1.0), *2 * (torch.where(bad, 9.0, 400.0),), 1.01, 4)
    scores = measure(COSTS, "regression", {"mixing": (mixing,)})
    assert (
        (scores["rhat"] == 1.0)
        == (scores["ess_low"] == scores["ess_tail"] == 400)
        == (share < 0.05)
    )
