"""A program that is a function has the results of the module inside it, wherever that is held."""

import types

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program import Program
from pyro_bdl.program.vmap import DrawMap

pytestmark = pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
X = torch.linspace(-1, 1, 24).reshape(12, 2)
Y = X.sum(1).sin()


class _Slots:
    __slots__ = ("inner",)


def _programs():
    """The same program as a module and as a function, with dropout and BatchNorm in training."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1)
    )
    net(X)
    module = bdl.models.Regression(bdl.bayesianize(net), noise=0.3)
    held = _Slots()
    held.inner = types.SimpleNamespace(model=module)
    return module, lambda x, y=None: held.inner.model(x, y)


def _laplace(model, **options):
    return bdl.guides.AutoLaplaceGGN(model, **options).laplace_approximation((X, Y))


def _draws(model):
    guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
    return {name: value[None] for name, value in guide.sample_latents(5).items()}


_TASKS = {
    "check": lambda model: Program(model, X, Y).check() or torch.zeros(()),
    "predict": lambda model: bdl.Predictive(
        model, bdl.guides.AutoMAP(model).prototype(X, Y), 3
    )(X)["f"],
    "draws": lambda model: bdl.Predictive(model, bdl.Samples(_draws(model), {}, {}))(X)["f"],
    "prior": lambda model: bdl.Predictive(model, num_samples=4)(X)["f"],
    "full": lambda model: _laplace(model, structure="full").variances(),
    "kron": lambda model: _laplace(model, structure="kron").variances(),
    "last layer": lambda model: _laplace(model, subset="last-layer").variances(),
    "linearized": lambda model: bdl.LinearizedPredictive(
        model, _laplace(model, structure="full")
    ).parameter_moments(X)["y"].variance["loc"],
    "evidence": lambda model: bdl.evidence.log_marginal_likelihood(_laplace(model)),
    "evaluate": lambda model: bdl.evaluate(
        model, bdl.guides.AutoMeanField(model).prototype(X, Y), X, Y, seed=0
    ).scores["nlpd"],
    "freeze": lambda model: bdl.freeze(
        model, bdl.guides.AutoMeanField(model).prototype(X, Y), X[:1], draws=4
    )(X)[0],
    "arviz": lambda model: bdl.to_arviz(
        model, bdl.guides.AutoMeanField(model).prototype(X, Y), X, Y, num_samples=4
    )["log_likelihood"]["y"].values,
    "nuts": lambda model: bdl.mcmc.sample(
        model, X, Y, num_warmup=3, num_samples=3, num_chains=1, seed=0, progress=False
    ).latents["0.weight"],
    "sghmc": lambda model: bdl.mcmc.sgmcmc(
        model, (X, Y), kernel=bdl.mcmc.SGHMC(step_size=1e-3), num_samples=3, seed=0, progress=False
    ).latents["0.weight"],
    "importance": lambda model: bdl.importance.ratios(
        model, bdl.guides.AutoMeanField(model).prototype(X, Y), X, Y, num_samples=25
    ).pareto_k,
    "held out": lambda model: bdl.training.train(
        model, bdl.guides.AutoMAP(model), X, Y, steps=6,
        held_out=bdl.training.HeldOut(0.25, check_every=2),
    ).losses,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    # compiled for each, and the density is that of the others
    [pytest.param(name, marks=pytest.mark.slow if name == "nuts" else ()) for name in _TASKS],
)
def test_a_function_has_the_results_of_its_module(name):
    task, results = _TASKS[name], []
    for number in (0, 1):
        model = _programs()
        net = model[0].network.network
        states = {name: value.clone() for name, value in net.named_buffers()}
        pyro.clear_param_store()
        torch.manual_seed(1)
        results.append(torch.as_tensor(task(model[number])).detach())
        assert all(module.training for module in net.modules())
        if name != "held out":
            assert all(torch.equal(states[name], value) for name, value in net.named_buffers())
    torch.testing.assert_close(*results)


def test_the_modules_of_a_program_are_those_that_it_calls():
    used, unused = nn.Linear(2, 3), nn.Linear(2, 3)
    called = bdl.bayesianize(nn.Sequential(nn.Linear(3, 1), nn.Dropout()))

    def program(x):
        hidden = nn.functional.linear(x, used.weight) + len([unused])
        f = called(hidden)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=Y)

    assert list(Program(program, X).modules) == list(called.modules())
    module, function = _programs()
    for model in (module, function, bdl.handlers.temper(module, 2.0), module.forward):
        assert {id(part) for part in module.modules()} <= set(map(id, Program(model, X, Y).modules))
        guide = bdl.guides.AutoMAP(model).prototype(X, Y)
        assert {id(part) for part in module.modules()} <= set(map(id, guide.program_modules))


def test_one_elbo_for_several_programs_moves_the_statistics_of_each():
    """In the order of first a program without BatchNorm, and then one with it."""

    def statistics(elbo):
        model = _programs()[1]
        guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
        torch.manual_seed(2)
        elbo(model, guide)(X, Y)
        (layer,) = [m for m in guide.program_modules if isinstance(m, nn.BatchNorm1d)]
        return layer.state_dict()

    plain = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1)), noise=0.3)
    shared = TemperedTraceMeanField_ELBO(num_particles=4)
    shared(plain, bdl.guides.AutoMeanField(plain))(X, Y)
    found, expected = statistics(shared), statistics(TemperedTraceMeanField_ELBO(num_particles=4))
    assert found["num_batches_tracked"] == 1 + 4
    torch.testing.assert_close(found, expected)


class _Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_program_that_is_looped_over_does_not_make_the_next_one_loop():
    elbo = TemperedTraceMeanField_ELBO(num_particles=4)
    odd = bdl.models.Regression(nn.Sequential(bdl.bayesianize(nn.Linear(2, 1)), _Branching()))
    with pytest.warns(BdlWarning, match="cannot be vectorized"):
        elbo(odd, bdl.guides.AutoMeanField(odd))(X, Y)
    calls = []
    plain = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1)), noise=0.3)
    guide = bdl.guides.AutoMeanField(plain)
    elbo(plain, guide)(X, Y)
    plain.network.network.register_forward_hook(lambda *call: calls.append(1))
    elbo(plain, guide)(X, Y)
    assert len(calls) == 1  # all draws at once


def test_a_want_of_memory_is_looped_over_that_once():
    calls = []

    def function(draw):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return 2.0 * draw["a"]

    mapped = DrawMap()
    with pytest.warns(BdlWarning, match="out of memory"):
        assert torch.equal(mapped(function, {"a": torch.ones(3)}), torch.full((3,), 2.0))
    assert len(calls) == 1 + 3
    mapped(function, {"a": torch.ones(3)})
    assert len(calls) == 1 + 3 + 1
