"""Posteriors as models of BoTorch: closed forms of linear regression, draws of others."""

import math
import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl

pytest.importorskip("botorch")

from botorch.acquisition import (
    qExpectedImprovement,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qMaxValueEntropy,
)
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.analytic import ExpectedImprovement, PosteriorMean
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import ChainedInputTransform, InputStandardize
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.posteriors.ensemble import EnsemblePosterior
from botorch.sampling.get_sampler import get_sampler
from botorch.sampling.normal import SobolQMCNormalSampler
from helpers.conjugate import Conjugate, with_ones

from pyro_bdl.contrib.botorch import PosteriorModel

# BoTorch advises against the improvement without a logarithm, which has a closed form to compare.
pytestmark = pytest.mark.filterwarnings("ignore:.*ExpectedImprovement has known numerical issues")

NOISE, PRIOR = 0.3, 1.5  # scales
ROWS, INPUTS = 12, 2
DOUBLE = {"dtype": torch.float64}


def data(outputs=1, rows=ROWS):
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.rand(rows, INPUTS, generator=generator, **DOUBLE)
    slopes = torch.randn(INPUTS, outputs, generator=generator, **DOUBLE)
    y = x @ slopes + NOISE * torch.randn(rows, outputs, generator=generator, **DOUBLE)
    return x, y


def program(network, noise=NOISE):
    network = bdl.bayesianize(network.double(), bdl.priors.Normal(PRIOR))
    return bdl.models.Regression(network, noise=noise)


def targets(y):
    return y.squeeze(-1)


def laplace_of(model, x, y, structure="full", steps=1):
    guide = bdl.guides.AutoLaplaceGGN(model, structure=structure)
    bdl.training.train(model, guide, x, targets(y), steps=steps, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step is not enough for a maximum
        return guide.laplace_approximation((x, targets(y)))


def linear(outputs=1, x=None, y=None):
    """Linear regression with its posterior, found in closed form."""
    if x is None:
        x, y = data(outputs)
    model = program(nn.Linear(INPUTS, outputs))
    guide = bdl.guides.AutoLastLayer(model)
    bdl.training.train(model, guide, x, targets(y), steps=1, progress=False)
    return model, guide.laplace_approximation((x, targets(y))), x, y


def closed_form(x, y, new):
    """Mean and covariance of one output at new inputs (..., q, d), by the textbook's formulas."""
    return Conjugate(with_ones(x), y, NOISE, PRIOR).predictive(with_ones(new))


def surrogate(outputs=1, **options):
    model, posterior, x, y = linear(outputs)
    return PosteriorModel(model, posterior, num_outputs=outputs, **options), x, y


def network_model(kind, outputs=1, **options):
    """A small network under a posterior of each kind."""
    torch.manual_seed(0)
    x, y = data(outputs)
    model = program(nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, outputs)))
    if kind == "laplace":
        posterior = laplace_of(model, x, y, structure="kron")
    elif kind == "mixture":
        members = [laplace_of(model, x, y) for _ in range(2)]
        posterior = bdl.guides.MixtureGuide(members)
    else:
        posterior = bdl.guides.AutoMeanField(model).prototype(x, targets(y))
        if kind == "samples":
            draws = posterior.sample_latents(6)
            posterior = bdl.Samples({k: v.reshape(2, 3, *v.shape[1:]) for k, v in draws.items()})
    return PosteriorModel(model, posterior, num_outputs=outputs, **options), x, y


KINDS = ("laplace", "mixture", "guide", "samples")


def test_linear_regression_has_its_closed_form_posterior_and_expected_improvement():
    surrogate_model, x, y = surrogate()
    new = torch.rand(3, 4, INPUTS, **DOUBLE)
    posterior = surrogate_model.posterior(new)
    mean, covariance = closed_form(x, y, new)
    assert isinstance(posterior, GPyTorchPosterior)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.distribution.covariance_matrix, covariance)
    noisy = surrogate_model.posterior(new, observation_noise=True).distribution
    eye = torch.eye(4, **DOUBLE)
    torch.testing.assert_close(noisy.covariance_matrix, covariance + NOISE**2 * eye)
    given = torch.full((4, 1), 0.5, **DOUBLE)
    noisy = surrogate_model.posterior(new, observation_noise=given).distribution
    torch.testing.assert_close(noisy.covariance_matrix, covariance + 0.5 * eye)

    best, sd = y.max(), covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    z, normal = (mean[..., 0] - best) / sd, torch.distributions.Normal(0.0, 1.0)
    improvement = sd * (z * normal.cdf(z) + (-z.square() / 2).exp() / math.sqrt(2 * math.pi))
    found = ExpectedImprovement(surrogate_model, best_f=best)(new.flatten(0, 1)[:, None])
    torch.testing.assert_close(found, improvement.flatten())


def test_several_outputs_are_those_of_one_regression_each():
    """The outputs of a linear network are independent; their order is that of BoTorch."""
    surrogate_model, x, y = surrogate(outputs=2)
    new = torch.rand(3, 4, INPUTS, **DOUBLE)
    posterior = surrogate_model.posterior(new)
    mean, covariance = closed_form(x, y, new)
    torch.testing.assert_close(posterior.mean, mean)
    variance = covariance.diagonal(dim1=-2, dim2=-1)[..., None].expand(3, 4, 2)
    torch.testing.assert_close(posterior.variance, variance)
    blocks = posterior.distribution.covariance_matrix.reshape(3, 4, 2, 4, 2)
    torch.testing.assert_close(blocks[:, :, 0, :, 0], covariance)
    assert blocks[:, :, 0, :, 1].abs().max() < 1e-12
    for other in (
        surrogate_model.posterior(new, output_indices=[1]),
        surrogate_model.subset_output([1]).posterior(new),
    ):
        torch.testing.assert_close(other.mean, mean[..., 1:])
        torch.testing.assert_close(other.distribution.covariance_matrix, covariance)
    noisy = surrogate_model.posterior(new, [1], observation_noise=new.new_full((4, 1), 0.5))
    torch.testing.assert_close(noisy.variance, variance[..., 1:] + 0.5)
    weights = torch.tensor([1.0, -2.0], **DOUBLE)
    summed = surrogate_model.posterior(
        new, posterior_transform=ScalarizedPosteriorTransform(weights)
    )
    torch.testing.assert_close(summed.mean[..., 0], mean @ weights)
    torch.testing.assert_close(summed.distribution.covariance_matrix, 5.0 * covariance)


@pytest.mark.parametrize("outputs", [1, 2])
def test_conditioning_is_refitting_on_all_data(outputs):
    surrogate_model, x, y = surrogate(outputs)
    more_x, more_y = data(outputs, rows=ROWS + 5)
    more_x, more_y = more_x[-5:] + 0.5, more_y[-5:]
    first = surrogate_model.condition_on_observations(more_x[:2], more_y[:2])
    found = first.condition_on_observations(more_x[2:], more_y[2:])
    model, posterior, *_ = linear(outputs, torch.cat([x, more_x]), torch.cat([y, more_y]))
    new = torch.rand(3, 4, INPUTS, **DOUBLE)
    expected = PosteriorModel(model, posterior, num_outputs=outputs).posterior(new)
    posterior = found.posterior(new)
    torch.testing.assert_close(posterior.mean, expected.mean)
    covariances = (p.distribution.covariance_matrix for p in (posterior, expected))
    torch.testing.assert_close(*covariances)
    assert surrogate_model.batch_shape == torch.Size()  # which is as before

    fantasies = torch.stack([more_y, 2 * more_y, -more_y])  # a batch of observations
    batch = surrogate_model.condition_on_observations(more_x, fantasies)
    assert batch.batch_shape == torch.Size([3])
    torch.testing.assert_close(batch.posterior(new[0]).mean[0], expected.mean[0])
    torch.testing.assert_close(batch.posterior(new).mean[0], expected.mean[0])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_loops(kind):
    surrogate_model, *_ = network_model(kind)
    new = torch.rand(2, 3, 4, INPUTS, **DOUBLE)
    posterior = surrogate_model.posterior(new)
    assert posterior.mean.shape == (2, 3, 4, 1)
    for i in range(2):
        for j in range(3):
            alone = surrogate_model.posterior(new[i, j])
            torch.testing.assert_close(posterior.mean[i, j], alone.mean)
            if kind == "laplace":
                joint = posterior.distribution.covariance_matrix[i, j]
                torch.testing.assert_close(joint, alone.distribution.covariance_matrix)
            else:
                torch.testing.assert_close(posterior.values[i, j], alone.values)


@pytest.mark.parametrize("kind", KINDS)
def test_posteriors_are_differentiable_in_the_inputs(kind):
    surrogate_model, *_ = network_model(kind, num_samples=4)

    def function(new):
        posterior = surrogate_model.posterior(new)
        return posterior.mean, posterior.variance

    new = torch.rand(2, 2, INPUTS, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(function, (new,))
    if kind == "laplace":
        given = surrogate_model.condition_on_observations(new[0].detach() + 0.1, new[0, :, :1])

        def conditioned(new):
            return given.posterior(new).distribution.covariance_matrix

        assert torch.autograd.gradcheck(conditioned, (new,))


@pytest.mark.parametrize("kind", ["guide", "samples"])
def test_ensembles_are_the_draws_of_predictive(kind):
    surrogate_model, *_ = network_model(kind, outputs=2)
    held = surrogate_model._predictive.posterior
    new = torch.rand(4, INPUTS, **DOUBLE)
    draws = bdl.Predictive(surrogate_model._predictive.model, held)(new)["f"]
    posterior = surrogate_model.posterior(new)
    assert isinstance(posterior, EnsemblePosterior)
    torch.testing.assert_close(posterior.mean, draws.mean(0))
    torch.testing.assert_close(posterior.variance, draws.var(0))
    assert surrogate_model.posterior(new, output_indices=[1]).values.shape == (len(draws), 4, 1)
    noisy = surrogate_model.posterior(new, observation_noise=True).values
    torch.testing.assert_close(noisy, surrogate_model.posterior(new, None, True).values)
    assert (noisy - draws).std() == pytest.approx(NOISE, rel=0.3)


def test_acquisitions_average_all_draws_alike_in_all_batches():
    """With 2 S samples qEI is the mean improvement over the S draws, and has no noise over X."""
    surrogate_model, _, y = network_model("samples")
    new, best = torch.rand(5, 1, INPUTS, **DOUBLE), y.mean()
    values = surrogate_model.posterior(new).values[..., 0, 0]  # (5, S)
    sampler = get_sampler(surrogate_model.posterior(new), torch.Size([2 * values.shape[1]]))
    found = qExpectedImprovement(surrogate_model, best_f=best, sampler=sampler)(new)
    torch.testing.assert_close(found, (values - best).clamp(min=0.0).mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_functions(kind):
    """A draw is the same function at any inputs in any batch, and one of the posterior's."""
    surrogate_model, *_ = network_model(kind)
    path, new = surrogate_model.draw(1), torch.rand(2, 3, INPUTS, **DOUBLE)
    values = path.posterior(new).mean
    torch.testing.assert_close(path.posterior(new[1, 1:]).mean, values[1, 1:])
    if kind != "laplace":
        torch.testing.assert_close(values, surrogate_model.posterior(new).values[:, 1])
        return
    drawn = [surrogate_model.draw(i).posterior(new).mean.flatten() for i in range(30)]
    expected = surrogate_model.posterior(new)
    z = (torch.stack(drawn) - expected.mean.flatten()) / expected.variance.flatten().sqrt()
    assert (z.mean(0) * 30**0.5).abs().max() < 4.0
    assert z.square().mean() == pytest.approx(1.0, abs=0.6)


def test_transforms_of_inputs_and_outcomes():
    """A posterior in standardized units gives one in those of the data, as BoTorch's models do."""
    model, posterior, _, y = linear()
    scale = Standardize(m=1)
    scale(5.0 + 2.0 * y)
    plain = PosteriorModel(model, posterior)
    unit = Normalize(d=INPUTS, bounds=torch.tensor([[0.0, 0.0], [10.0, 10.0]], **DOUBLE))
    options = {"input_transform": unit, "outcome_transform": scale}
    transformed = PosteriorModel(model, posterior, **options)
    new = torch.rand(3, INPUTS, **DOUBLE)
    expected, found = plain.posterior(new), transformed.posterior(10.0 * new)
    torch.testing.assert_close(found.mean, scale.means + scale.stdvs * expected.mean)
    torch.testing.assert_close(found.variance, scale.stdvs**2 * expected.variance)
    value = torch.ones(3, 1, **DOUBLE)
    given = transformed.condition_on_observations(10.0 * new, value)
    same = plain.condition_on_observations(new, (value - scale.means) / scale.stdvs)
    torch.testing.assert_close(
        given.posterior(10.0 * new).mean, scale.means + scale.stdvs * same.posterior(new).mean
    )
    draws = PosteriorModel(model, network_free(posterior), **options)
    assert draws.posterior(10.0 * new).mean == pytest.approx(found.mean.numpy(), abs=2.0)


LEARNING = {
    "Normalize": lambda: Normalize(d=INPUTS),
    "Normalize around 0": lambda: Normalize(d=INPUTS, center=0.0),
    "InputStandardize": lambda: InputStandardize(d=INPUTS),
    "a chain": lambda: ChainedInputTransform(
        first=Normalize(d=INPUTS, bounds=torch.tensor([[0.0] * 2, [3.0] * 2], **DOUBLE)),
        second=InputStandardize(d=INPUTS),
    ),
}


@pytest.mark.parametrize("name", LEARNING)
def test_a_transform_that_learns_takes_the_training_inputs(name):
    model, posterior, *_ = linear()
    x = 5.0 + 10.0 * data()[0]
    with pytest.raises(ValueError, match=r"has not seen any.*pass train_inputs"):
        PosteriorModel(model, posterior, input_transform=LEARNING[name]().double())
    called = LEARNING[name]().double()
    inside = called(x)
    expected = PosteriorModel(model, posterior).posterior(inside).mean
    learned = LEARNING[name]().double()
    for options in ({"input_transform": called}, {"input_transform": learned, "train_inputs": x}):
        found = PosteriorModel(model, posterior, **options)
        torch.testing.assert_close(found.posterior(x).mean, expected)
        found.posterior(x + 100.0)  # which teaches it nothing
        torch.testing.assert_close(found.posterior(x).mean, expected)


def network_free(posterior):
    return bdl.Samples({k: v[None] for k, v in posterior.sample_latents(50).items()})


def test_float32_programs_take_the_double_inputs_of_botorch():
    x, y = (value.float() for value in data())
    network = bdl.bayesianize(nn.Linear(INPUTS, 1), bdl.priors.Normal(PRIOR))
    model = bdl.models.Regression(network, noise=NOISE)
    guide = bdl.guides.AutoLastLayer(model)
    bdl.training.train(model, guide, x, targets(y), steps=1, progress=False)
    found = PosteriorModel(model, guide.laplace_approximation((x, targets(y))))
    new = torch.rand(3, INPUTS, **DOUBLE)
    posterior = found.posterior(new)
    mean, _ = closed_form(x.double(), y.double(), new)
    assert posterior.mean.dtype == torch.float64
    torch.testing.assert_close(posterior.mean, mean, atol=1e-4, rtol=1e-4)
    assert posterior.rsample(torch.Size([2])).shape == (2, 3, 1)


@pytest.mark.parametrize("kind", ["laplace", "guide", "samples"])
def test_acquisitions_are_optimized(kind):
    surrogate_model, x, y = network_model(kind)
    box = torch.tensor([[0.0] * INPUTS, [1.0] * INPUTS], **DOUBLE)
    options = {"bounds": box, "num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 5}}
    for acquisition in (
        qLogExpectedImprovement(surrogate_model, best_f=y.max()),
        qLogNoisyExpectedImprovement(surrogate_model, X_baseline=x, prune_baseline=True),
    ):
        candidates, value = optimize_acqf(acquisition, q=2, **options)
        assert candidates.shape == (2, INPUTS)
        assert value.isfinite()
    thompson = PosteriorMean(surrogate_model.draw(0))
    value = optimize_acqf(thompson, q=1, **options)[1]
    corners = torch.cartesian_prod(*box.mT)
    assert value >= thompson(corners[:, None]).max() - 1e-3


def test_acquisitions_that_need_a_gaussian_run():
    surrogate_model, *_ = surrogate()
    new, box = torch.rand(2, 1, INPUTS, **DOUBLE), torch.rand(20, INPUTS, **DOUBLE)
    assert qMaxValueEntropy(surrogate_model, box)(new).isfinite().all()
    gradient = qKnowledgeGradient(surrogate_model, num_fantasies=3)
    assert gradient(torch.rand(2, 4, INPUTS, **DOUBLE)).isfinite().all()


@pytest.mark.parametrize("kind", ["guide", "samples"])
def test_acquisitions_that_look_ahead_refuse_draws(kind):
    surrogate_model, *_ = network_model(kind)
    new = torch.rand(2, 4, INPUTS, **DOUBLE)
    with pytest.raises(UnsupportedError, match=r"look ahead by fantasies .knowledge gradient"):
        qKnowledgeGradient(surrogate_model, num_fantasies=3)(new)
    variance = qNegIntegratedPosteriorVariance(surrogate_model, mc_points=new[0])
    with pytest.raises(UnsupportedError, match="need a linearized Gaussian"):
        variance(new[:, :1])
    improvement = qExpectedImprovement(
        surrogate_model, best_f=0.0, sampler=SobolQMCNormalSampler(torch.Size([4]))
    )
    with pytest.raises(UnsupportedError, match="no Normal base samples"):
        improvement(new[:, :1])


def test_what_has_no_answer_is_refused():
    ensemble, x, y = network_model("samples")
    with pytest.raises(UnsupportedError, match="can be conditioned"):
        ensemble.condition_on_observations(x, y)
    with pytest.raises(UnsupportedError, match="noise of a given variance"):
        ensemble.posterior(x, observation_noise=y)
    with pytest.raises(ValueError, match="num_outputs=1 numbers"):
        model, posterior, x, _ = linear(2)
        PosteriorModel(model, posterior).posterior(x)
    with pytest.raises(ValueError, match="site="):
        PosteriorModel(
            ensemble._predictive.model, ensemble._predictive.posterior, site="g"
        ).posterior(x)
    gaussian, x, y = surrogate(2)
    with pytest.raises(UnsupportedError, match="all outputs"):
        gaussian.subset_output([0]).condition_on_observations(x, y[:, :1])
    with pytest.raises(UnsupportedError, match="before condition_on_observations"):
        gaussian.condition_on_observations(x, y).draw(0)
    model = program(nn.Linear(INPUTS, 1), noise=dist.HalfNormal(torch.tensor(1.0, **DOUBLE)))
    x, y = data()
    uncertain = PosteriorModel(model, laplace_of(model, x, y))
    with pytest.raises(UnsupportedError, match=r"scale is no latent: give .* fit again"):
        uncertain.condition_on_observations(x, y)
