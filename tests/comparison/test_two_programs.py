"""Posteriors are scored under the program that they are of."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn

import pyro_bdl as bdl

torch.manual_seed(0)
X = torch.linspace(-1, 1, 12)[:, None]
Y = torch.sin(3 * X[:, 0])


def program(noise=0.3, prior=1.0, activation=nn.Tanh, **options):
    net = nn.Sequential(nn.Linear(1, 4), activation(), nn.Linear(4, 1))
    prior = bdl.priors.Normal(prior)
    return bdl.models.Regression(bdl.bayesianize(net, prior), noise=noise, **options)


def guide(model):
    return bdl.guides.AutoMeanField(model).prototype(X, Y)


def chains(model):
    kernel = bdl.mcmc.NUTS(max_tree_depth=2)
    options = {"kernel": kernel, "num_warmup": 5, "num_samples": 12, "progress": False}
    return bdl.mcmc.sample(model, X, Y, **options)


def laplace(model):
    return bdl.guides.AutoLaplaceGGN(model).prototype(X, Y).laplace_approximation((X, Y))


def draws(model):
    """Posteriors that know their program, as chains do."""
    drawn = guide(model).sample_latents(12)
    samples = bdl.Samples({name: value[None] for name, value in drawn.items()})
    return samples.of_program(bdl.Program(model, X, Y))


MAKERS = pytest.mark.parametrize("make", [guide, draws, laplace])
pytestmark = pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")


@MAKERS
@pytest.mark.parametrize("other", [{"noise": 0.9}, {"prior": 3.0}, {"activation": nn.ReLU}])
def test_a_posterior_of_another_program_is_refused(make, other):
    posterior = make(program(**other))
    with pytest.raises(ValueError, match=r"posterior 'q': .*another program.*under its own progr"):
        bdl.compare(program(), {"q": posterior}, X, Y, reference=None)
    with pytest.raises(ValueError, match="another program"):
        bdl.evaluate(program(), posterior, X, Y)


@MAKERS
def test_the_same_program_made_again_is_no_other(make):
    """Also with another num_data or temperature, which predictions do not depend on."""
    posterior = make(bdl.handlers.temper(program(num_data=12), 0.5))
    for model in (program(), program(num_data=40)):
        found = bdl.evaluate(model, posterior, X[:5], Y[:5], num_samples=10)
        assert found.scores["nlpd"] == found.scores["nlpd"]


def test_draws_know_their_program_as_it_was():
    """A noise that is learned afterwards is another program."""
    model = program(noise=PyroParam(torch.tensor(0.3), dist.constraints.positive))
    samples = chains(model)
    bdl.evaluate(model, samples, X, Y)
    with torch.no_grad():
        model.noise = torch.tensor(0.6)
    with pytest.raises(ValueError, match="the site 'y' was"):
        bdl.evaluate(model, samples, X, Y)


def test_each_posterior_is_scored_under_its_own_program():
    """Two noises: NLPD of each is that of its draws under its own noise."""
    noises = {"a": 0.1, "b": 0.5}
    models = {name: program(noise=noise) for name, noise in noises.items()}
    guides = {name: guide(model) for name, model in models.items()}
    pairs = {name: (models[name], guides[name]) for name in models}
    found = bdl.compare(models["a"], pairs, X, Y, reference="a")
    for name, model in models.items():
        alone = bdl.evaluate(model, guides[name], X, Y)
        assert found.numbers()[name]["nlpd"] == alone.scores["nlpd"]
        f = alone.function
        exact = -(dist.Normal(f, noises[name]).log_prob(Y).double().logsumexp(0))
        assert alone.scores["nlpd"] == pytest.approx((exact + torch.tensor(1000.0).log()).mean())
    mixed = bdl.compare(models["a"], {"a": guides["a"], "b": pairs["b"]}, X, Y, reference="a")
    assert mixed.numbers()["b"]["nlpd"] == found.numbers()["b"]["nlpd"]
