"""Dropout as a guide: its bound enumerated, its closed forms, which weights it drops."""

import itertools
import math
import warnings

import numpy
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.distributions.dropout_noise import log_uniform_kl
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoMCDropout, AutoMeanField, BernoulliNoise, GaussianNoise

D = torch.float64
OURS = [TemperedTrace_ELBO, TemperedTraceMeanField_ELBO]
ELBOS = [Trace_ELBO, TraceMeanField_ELBO, *OURS]
GRID = (torch.arange(4, dtype=D) + 0.5) / 4  # below p = k / 4 lie k of the four


def _decay(latents, dropped, scale):
    """Gal's weight decay in the convention of mean weights, and the prior's constants."""
    total = torch.zeros((), dtype=D)
    for name, value in latents.items():
        rate = dropped.get(name, 0.0)
        total = total + value.square().sum() / (2 * scale**2 * (1 - rate))
        total = total + value.numel() * (math.log(scale) + 0.5 * math.log(2 * math.pi))
    return total


def _enumerated(net, latents, p, x, y, noise):
    """-E[log p(y | w)] with dropout on the three hidden units, mask by mask."""
    total = torch.zeros((), dtype=D)
    hidden = torch.tanh(F.linear(x, latents["0.weight"], latents["0.bias"]))
    for kept in itertools.product([0.0, 1.0], repeat=3):
        probability = math.prod(1 - p if k else p for k in kept)
        dropped = hidden * torch.tensor(kept, dtype=D) / (1 - p)
        mean = F.linear(dropped, latents["2.weight"], latents["2.bias"])[:, 0]
        density = dist.Normal(mean, torch.tensor(noise, dtype=D)).log_prob(y).sum()
        total = total - probability * density
    return total


@pytest.fixture
def every_mask(monkeypatch):
    """Uniform numbers become all 4^K points of a grid: with p = k / 4 the mean over as many
    particles is the exact expectation over the masks."""

    def install(count):
        points = torch.tensor(list(itertools.product(GRID.tolist(), repeat=count)), dtype=D)

        def rand(*shape, dtype, device):
            assert shape == points.shape
            return points.to(dtype)

        monkeypatch.setattr(torch, "rand", rand)
        return len(points)

    return install


@pytest.mark.parametrize("elbo", OURS)
@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_the_bound_is_gals_objective(elbo, p, model, data, every_mask):
    """sum_i |M_i|^2 / (2 s^2 (1 - p)) (Gal & Ghahramani 2016, appendix 4.1)."""
    guide = AutoMCDropout(model, p=p).prototype(*data)
    value = elbo(num_particles=1)(model, guide)
    value(*data)  # its checks of the first step
    value = elbo(num_particles=every_mask(3))
    value._checked = model, guide
    loss = value.differentiable_loss(model, guide, *data)
    (gradient,) = torch.autograd.grad(loss, guide.loc)
    latents = {k: v.detach().clone().requires_grad_() for k, v in guide.mean_latents().items()}
    expected = _enumerated(model.network.network, latents, p, *data, 0.5)
    expected = expected + _decay(latents, {"2.weight": p}, 0.7)
    torch.testing.assert_close(loss, expected)
    by_hand = torch.autograd.grad(expected, list(latents.values()))
    torch.testing.assert_close(gradient, torch.cat([g.reshape(-1) for g in by_hand]))


@pytest.mark.parametrize(
    ("options", "learn_p"),
    [
        ({}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
        pytest.param({"mask": "weights"}, True, marks=pytest.mark.slow),
        ({"noise": GaussianNoise()}, True),
    ],
)
def test_every_bound_has_the_same_expectation(options, learn_p, model, data):
    guide = AutoMCDropout(model, p=0.3, sites="all", learn_p=learn_p, **options).prototype(*data)
    found = []
    with torch.no_grad():
        for elbo in ELBOS:
            bound = elbo()
            losses = torch.tensor([bound.loss(model, guide, *data) for _ in range(30)])
            found.append((losses.mean(), losses.var() / len(losses)))
    for mean, variance in found[1:]:
        assert abs(mean - found[0][0]) < 4.5 * (variance + found[0][1]).sqrt()


# Learned rates


def test_the_gradient_of_a_learned_rate(model, data):
    """d/dp of -K H(p) + |M|^2 / (2 s^2 (1 - p)), against the closed form. Source: Gal, Hron &
    Kendall 2017, equation 3."""
    guide = AutoMCDropout(model, p=0.2, learn_p=True).prototype(*data)
    elbo = TemperedTraceMeanField_ELBO(num_particles=2)
    elbo.loss(model, guide, *data)
    with guide.cached_parameters():
        vector = guide.sample_vectors(1)[0]
        values, log_det = guide.layout.constrain(vector)
        from pyro_bdl.program import record

        kl = guide.kl(vector, log_det, record(model, values, data))
        (gradient,) = torch.autograd.grad(kl, guide.parameter("p"))
    p, weight = 0.2, guide.mean_latents()["2.weight"]
    expected = 3 * math.log(p / (1 - p)) + weight.square().sum() / (2 * 0.7**2 * (1 - p) ** 2)
    torch.testing.assert_close(gradient[0], expected.detach())
    assert kl.item() == pytest.approx(
        _decay(guide.mean_latents(), {"2.weight": p}, 0.7).item()
        + 3 * (p * math.log(p) + (1 - p) * math.log(1 - p))
    )


def test_relaxed_draws_become_masks(model, data):
    """The concrete relaxation (Gal, Hron & Kendall 2017, section 3.2; Maddison et al. 2017)."""
    guide = AutoMCDropout(model, p=0.3, learn_p=True).prototype(*data)
    weight = guide.mean_latents()["2.weight"].detach()
    relaxed = guide.sample_latents(2000)["2.weight"] / weight
    assert relaxed.requires_grad and len(relaxed.unique()) > 1000
    with torch.no_grad():
        hard = guide.sample_latents(2000)["2.weight"] / weight
    values = hard.unique()
    torch.testing.assert_close(values.min(), torch.tensor(0.0, dtype=D))
    torch.testing.assert_close(values.max(), torch.tensor(1 / 0.7, dtype=D))
    assert hard.mean().item() == pytest.approx(1.0, abs=4.5 * (0.3 / 0.7 / 6000) ** 0.5)
    cold = AutoMCDropout(model, p=0.3, learn_p=True, noise=BernoulliNoise(1e-4)).prototype(*data)
    relaxed = (cold.sample_latents(2000)["2.weight"] / weight).detach()
    between = (relaxed > 0.01 / 0.7) & (relaxed < 0.99 / 0.7)
    assert between.double().mean() < 0.01
    error = 4.5 * (0.3 / 0.7 / 6000) ** 0.5
    assert relaxed.mean().item() == pytest.approx(1.0, abs=error)


def test_the_temperature_falls_with_the_steps_and_is_saved(model, data):
    seen = []

    def schedule(step):
        seen.append(step)
        return 0.5

    guide = AutoMCDropout(model, learn_p=True, noise=BernoulliNoise(schedule)).prototype(*data)
    elbo = TemperedTraceMeanField_ELBO()
    elbo.loss(model, guide, *data)
    for _ in range(3):
        elbo.differentiable_loss(model, guide, *data)
    assert seen == [0, 1, 2]
    other = AutoMCDropout(model, learn_p=True).prototype(*data)
    other.load_state_dict(guide.state_dict())
    assert int(other.steps) == 3


@pytest.mark.parametrize("options", [{"sticking_the_landing": True}, {"num_particles": 3}])
def test_steps_of_a_part_of_a_guide(model, data, options):
    """A step counts once, however often the guide is run in it, and has one temperature."""
    seen = []

    def schedule(step):
        seen.append(step)
        return 0.5

    guide, noise = AutoGuideList(model), BernoulliNoise(schedule)
    part = pyro.poutine.block(model, hide=["0.bias"])
    guide.append(AutoMCDropout(part, learn_p=True, noise=noise))
    guide.append(AutoMeanField(pyro.poutine.block(model, expose=["0.bias"])))
    elbo = TemperedTrace_ELBO(**options)
    for _ in range(3):
        elbo.differentiable_loss(model, guide, *data).backward()
    assert seen == [step for step in range(3) for _ in range(elbo.num_particles)]
    assert int(guide[0].steps) == 3


# The improper prior of variational dropout


@pytest.fixture
def scale_free(net):
    rules = {"*.weight": priors.LogUniform(), "*": priors.Normal(1.0)}
    return models.Regression(bayesianize(net, priors.ByName(rules)), noise=0.5)


def test_the_approximation_of_the_log_uniform_kl():
    """Against -H(eps) + E log |eps| + constant by quadrature, within the paper's 0.009 nats.
    Source: Molchanov, Ashukha & Vetrov 2017, equation 14."""
    alphas = torch.logspace(-3, 2, 30, dtype=D)
    expected = []
    for alpha in alphas:
        grid = torch.linspace(-9, 9, 400_001, dtype=D)
        density = torch.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi)
        values = (1 + alpha.sqrt() * grid).abs().clamp(min=1e-12).log() * density
        expected.append(torch.trapezoid(values, grid) - 0.5 * alpha.log())
    limit = -0.5 * (math.log(2) + 0.5772156649)  # E log |z|: the KL falls to 0 as alpha grows
    assert (log_uniform_kl(alphas) - (torch.stack(expected) - limit)).abs().max() < 0.01
    narrow = torch.tensor(1e-8, dtype=D)
    exact = -0.5 * math.log(1e-8) + 0.5 * (math.log(2) + 0.5772156649)
    assert log_uniform_kl(narrow).item() == pytest.approx(exact, abs=0.01)


def test_its_kl_does_not_depend_on_the_means(scale_free, data):
    guide = AutoMCDropout(scale_free, p=0.3, sites="all", noise=GaussianNoise()).prototype(*data)
    elbo = TemperedTraceMeanField_ELBO()
    found = []
    for factor in (1.0, 7.0):
        with torch.no_grad():
            for name in guide.weights:
                guide.loc[guide.layout.slices[name]] *= factor
        elbo.loss(scale_free, guide, *data)
        found.append(elbo.kl)
    torch.testing.assert_close(*found)


def test_where_the_improper_prior_is_refused(net, scale_free, data):
    with pytest.raises(ValueError, match=r"log-uniform prior of '0.weight' needs noise"):
        AutoMCDropout(scale_free, sites="all").prototype(*data)
    everywhere = models.Regression(bayesianize(net, priors.LogUniform()), noise=0.5)
    with pytest.raises(ValueError, match=r"log-uniform prior of '0.bias'"):
        AutoMCDropout(everywhere, sites="all", noise=GaussianNoise()).prototype(*data)
    with pytest.raises(NotImplementedError, match="improper"):
        scale_free(data[0])


# Prediction


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"p": "a"}, TypeError, "p must be a number"),
        ({"p": [0.1, 0.2]}, TypeError, "p must be a number"),
        ({"p": 0.0}, ValueError, "p must lie between 0 and 1"),
        ({"p": math.nan}, ValueError, "p must lie between 0 and 1"),
        ({"p": {"0.weight": 1.0}}, ValueError, r"p\['0.weight'\] must lie between 0 and 1"),
        ({"p": {"*": 0.1}, "sites": "all"}, ValueError, "either a dict of rates or sites"),
        ({"p": {}}, ValueError, "at least one name of a weight"),
        ({"sites": []}, ValueError, "at least one name of a weight"),
        ({"sites": 3}, TypeError, "sites must be .*names of weights, got int"),
        ({"sites": [3]}, TypeError, "by its name or a pattern, got int"),
        ({"mask": "unit"}, ValueError, "mask must be one of 'units', 'weights', got 'unit'"),
        ({"noise": 0.3}, TypeError, "noise must be"),
    ],
)
def test_options_that_are_refused(options, error, words, model):
    with pytest.raises(error, match=words):
        AutoMCDropout(model, **options)


def test_temperatures_that_are_refused():
    with pytest.raises(ValueError, match="temperature must be positive"):
        BernoulliNoise(0.0)
    with pytest.raises(TypeError, match="temperature must be a number"):
        BernoulliNoise("warm")


def test_numbers_of_other_libraries_are_rates(model, data):
    for p in (torch.tensor(0.3), numpy.float32(0.3)):
        assert AutoMCDropout(model, p=p).prototype(*data).rates()["2.weight"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ("0.bias", r"'0.bias' is not a weight matrix.*'0.weight', '2.weight'"),
        (["*.weight", "*.bias"], r"'\*.bias' is not a weight matrix"),
        ("0.weigth", r"'0.weigth' is not a latent site.*'hidden'.*'0.weight'"),
    ],
)
def test_a_site_that_is_no_weight(sites, message, model, data):
    guide = AutoMCDropout(model, sites=sites)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            guide.prototype(*data)


@pytest.mark.parametrize("sites", [None, "hidden"])
@pytest.mark.parametrize("learn_p", [False, True])
def test_nothing_to_drop_is_said(data, sites, learn_p):
    model = models.Regression(bayesianize(nn.Linear(2, 1).to(D)), noise=0.5)
    with pytest.warns(BdlWarning, match='drops nothing.*sites="all"'):
        guide = AutoMCDropout(model, sites=sites, learn_p=learn_p).prototype(*data)
    assert (guide.sample_vectors(3) == guide.location()).all()
    assert math.isfinite(TemperedTraceMeanField_ELBO().loss(model, guide, *data))


def test_dropout_layers_on_top_of_the_guide_are_said(data):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(0.3), nn.Linear(3, 1)).to(D)
    model = models.Regression(bayesianize(net), noise=0.5)
    with pytest.warns(
        BdlWarning, match=r"own Dropout\(0.3\) 'network.*2' drops.*from_dropout_layers"
    ):
        AutoMCDropout(model).prototype(*data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        AutoMCDropout.from_dropout_layers(model).prototype(*data)
        model.eval()
        AutoMCDropout(model).prototype(*data)
