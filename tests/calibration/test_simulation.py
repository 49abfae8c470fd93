"""Simulation-based calibration against exact posteriors, and guides trained guides."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.calibration import Calibration, simulation_based_calibration
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField, MixtureGuide
from pyro_bdl.program import Program
from pyro_bdl.program.observed_arguments import TargetArguments
from pyro_bdl.training.several_targets import GuidesOfTargets

N = 5
POSTERIOR_VARIANCE = 1 / (1 + N)


def level(y=None):
    """w ~ N(0, 1), y_n ~ N(w, 1): the posterior is N(sum y / (1 + N), 1 / (1 + N))."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def exactly(factor=1.0, shift=0.0):
    def inference(model, y):
        sd = POSTERIOR_VARIANCE**0.5
        draws = y.sum() / (1 + N) + shift * sd + factor * sd * torch.randn(4, 100)
        return bdl.Samples({"w": draws})

    return inference


def _calibrate(inference, num_simulations=400, **options):
    return simulation_based_calibration(
        level, inference, torch.zeros(N), num_simulations=num_simulations, progress=False, **options
    )


def test_the_exact_posterior_is_calibrated():
    """Ranks are uniform (Talts et al. 2018, theorem 1)."""
    found = _calibrate(exactly(), num_simulations=200)
    assert found.names == ("mean of y[0]", *(f"mean of y[{i}]" for i in range(1, N)), "w")
    assert found.ranks.shape == (200, N + 1)
    assert (found.uniformity() > 1e-3).all()
    assert (found.symmetry() > 1e-3).all()
    assert found.table()["verdict"].iloc[-1] == "calibrated, as far as seen"
    low, high = found.band(level=0.9999)
    assert ((found.counts() >= low) & (found.counts() <= high)).all()


def test_one_of_many_calibrated_quantities_is_rarely_said_not_to_be():
    """At p-values of 0.01 for each of both tests one of thirty is, in nearly half of the tables."""
    said = 0
    for seed in range(60):
        torch.manual_seed(seed)
        found = Calibration(torch.randint(100, (100, 30)), 99, tuple(map(str, range(30))))
        said += (found.table()["verdict"] != "calibrated, as far as seen").any()
    assert said <= 60 * 0.07


@pytest.mark.parametrize(
    ("factor", "shift", "verdict"),
    [(0.5, 0.0, "too narrow"), (2.0, 0.0, "too wide"), (1.0, 1.0, "too high"), (1, -1, "too low")],
)
def test_what_is_wrong_is_named(factor, shift, verdict):
    found = _calibrate(exactly(factor, shift), num_simulations=150)
    assert verdict in found.table()["verdict"].iloc[-1]
    assert verdict in str(found)
    assert found.uniformity()[-1] < 1e-4


@pytest.mark.parametrize(("shift", "rank"), [(-100.0, 10), (100.0, 0)])
def test_ranks_count_the_draws_below_the_truth(shift, rank):
    found = _calibrate(
        lambda model, y: bdl.Samples({"w": shift + torch.arange(10.0)[None]}),
        num_simulations=10,
        num_draws=10,
        quantities=of_w,
    )
    assert found.names == ("w",)
    assert (found.ranks == rank).all()


@pytest.mark.parametrize(
    ("simulations", "draws", "bins", "widths"),
    [
        (200, 99, 20, {5}),
        (200, 100, 20, {5, 6}),  # 101 is a prime number: nothing divides the ranks
        (200, 30, 31, {1}),
        (10, 10, 2, {5, 6}),
    ],
)
def test_bins_that_hold_enough_simulations(simulations, draws, bins, widths):
    found = Calibration(torch.arange(simulations)[:, None] % (draws + 1), draws, ("a",))
    assert found.bins == bins
    assert set(found.widths().tolist()) == widths and found.widths().sum() == draws + 1
    assert found.counts().sum() == simulations
    with pytest.raises(ValueError, match=f"bins must be from 1 to {draws + 1}, got"):
        found.counts(draws + 2)


def test_bands_and_p_values_of_uniform_ranks():
    draws = 100
    torch.manual_seed(0)
    found = Calibration(torch.randint(0, draws + 1, (200, 300)), draws, tuple(map(str, range(300))))
    low, high = found.band(0.99)
    inside = ((found.counts() >= low) & (found.counts() <= high)).double().mean()
    assert inside + 0.002 >= 0.99 and inside < 0.9995
    for p in (found.uniformity(), found.symmetry()):
        assert ((p < 0.1).double().mean() - 0.1).abs() < 0.05  # its standard error is 0.017


def test_ranks_of_discrete_quantities_are_uniform():
    """Only the sign is ranked, which most draws share with the truth. Source: Modrak et al.
    2023."""
    found = _calibrate(exactly(), quantities=lambda draw: {"sign": (draw["w"] > 0).float()})
    assert found.table()["verdict"].iloc[0] == "calibrated, as far as seen"
    assert found.uniformity() > 1e-3


# Guides trained together


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_guides_trained_together_reach_each_data_sets_posterior(backend):
    y = torch.randn(6, N)
    guide = AutoMeanField(level).prototype(torch.zeros(N))
    before = {name: value.detach().clone() for name, value in guide.named_parameters()}
    program = Program(level, torch.zeros(N))
    guides = GuidesOfTargets(level, guide, TargetArguments(program), {"y": y})
    torch.manual_seed(0)
    options = {"steps": 500, "learning_rate": 0.05, "num_particles": 8, "backend": backend}
    losses = guides.train(**options)
    assert losses.shape == (500, 6)
    if backend == "jax":  # each is what it is alone
        alone = GuidesOfTargets(level, guide, TargetArguments(program), {"y": y[:1]})
        torch.manual_seed(0)
        torch.testing.assert_close(alone.train(**options)[:, 0], losses[:, 0])
    for name, value in guide.named_parameters():
        assert torch.equal(value, before[name])
    draws = guides.sample_latents(4000)["w"]
    assert draws.shape == (6, 4000)
    with pytest.raises(ValueError, match="MixtureGuide has no parameters itself"):
        GuidesOfTargets(level, MixtureGuide([guide]), TargetArguments(program), {"y": y})
    torch.testing.assert_close(draws.mean(1), y.sum(1) / (1 + N), atol=0.05, rtol=0)
    sds = torch.full((6,), POSTERIOR_VARIANCE**0.5)
    torch.testing.assert_close(draws.std(1), sds, atol=0.04, rtol=0)


def two_levels(y=None):
    """Two latents of which the data see the sum: mean-field is too narrow."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(w.sum(), 0.3), obs=y)


def test_mean_field_is_too_narrow_where_latents_are_correlated():
    found = simulation_based_calibration(
        two_levels, AutoMeanField(two_levels), torch.zeros(N),
        num_simulations=100, steps=200, learning_rate=0.1, progress=False,
        quantities=lambda draw: {"w[0]": draw["w"][0]},
    )  # fmt: skip
    assert found.table()["verdict"].iloc[0] == "too narrow"


def test_unfinished_training_is_said():
    def narrow(y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(w.sum(), 0.02), obs=y)

    options = {"num_simulations": 10, "num_draws": 9, "progress": False}
    with pytest.warns(bdl.errors.BdlWarning, match=r"losses still fell by .* more steps, such as"):
        simulation_based_calibration(
            narrow, AutoMeanField(narrow), torch.zeros(N), steps=100, **options
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", bdl.errors.BdlWarning)
        simulation_based_calibration(
            level, AutoMeanField(level), torch.zeros(N), steps=300, **options
        )


@pytest.mark.filterwarnings("ignore:the guides' losses")
def test_networks_are_ranked_by_their_functions():
    x = torch.linspace(-2, 2, 30)[:, None]
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=dist.HalfNormal(1.0))
    guide = AutoMeanField(model)
    found = simulation_based_calibration(
        model, guide, x, torch.zeros(30), num_simulations=10, num_draws=9, steps=5, progress=False
    )
    assert found.names == tuple(f"f[{i * 29 // 9}]" for i in range(10))


def test_any_way_of_inference_can_be_asked():
    def inference(model, y):
        guide = AutoLaplaceGGN(model, structure="full").prototype(y)
        with torch.no_grad():
            guide.loc.fill_(y.sum() / (1 + N))
        return guide.laplace_approximation((y,))

    found = _calibrate(inference, num_simulations=100)
    assert (found.uniformity() > 1e-3).all()


# What it refuses


def of_w(draw):
    return {"w": draw["w"]}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: _calibrate(exactly(), num_simulations=3),
            ValueError,
            "must be at least 10, got 3",
        ),
        (lambda: _calibrate(exactly(), num_draws=2), ValueError, "num_draws must be at least 9"),
        (lambda: _calibrate(exactly(), num_draws=500), ValueError, "has 400 draws, fewer than"),
        (lambda: _calibrate(exactly(), steps=3), TypeError, "'steps' is for training a guide"),
        (
            lambda: simulation_based_calibration(lambda: level(torch.randn(N)), exactly()),
            ValueError,
            "data of the observed site 'y' are not an argument",
        ),
        (
            lambda: _calibrate(
                lambda model, y: bdl.Samples({"w": torch.full((1, 99), torch.nan)}), quantities=of_w
            ),
            ValueError,
            "draws of 'w' are NaN in simulation 0",
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()
