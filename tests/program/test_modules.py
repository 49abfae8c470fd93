"""The modules of a program, wherever it holds them, and vectorized runs of several programs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.calls import Case, X, Y
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program import Program
from pyro_bdl.program.vmap import DrawMap

pytestmark = pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")


def _programs():
    """The same program as a module and as a function."""
    case = Case(hidden=True)
    return case.module, case.model


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
