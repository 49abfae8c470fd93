"""A program's log density as a graph: values, gradients, and when the program itself runs."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam

import pyro_bdl as bdl
from pyro_bdl import Program
from pyro_bdl.errors import BdlWarning
from pyro_bdl.tracing.compiled import CompiledDensity
from pyro_bdl.utils.module_state import Modules


class Chain(PyroModule):
    """A hidden Markov chain whose noise is a parameter and whose shift is a plain number."""

    def __init__(self):
        super().__init__()
        self.noise = PyroParam(torch.tensor(0.5), dist.constraints.positive)
        self.shift, self.runs = 0.0, [0]

    def forward(self, y):
        self.runs[0] += 1
        means = pyro.sample("means", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        moves = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
        z = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
            pyro.sample(f"y{t}", dist.Normal(means[z] + self.shift, self.noise), obs=y[t])


def value_and_gradients(density, vector, *others):
    leaf = vector.clone().requires_grad_()
    value = density(leaf)
    return value.detach(), *torch.autograd.grad(value, [leaf, *others])


def chain():
    model = Chain()
    program = Program(model, torch.tensor([0.3, -0.2, 1.0, 0.4]))
    return model, program, program.compile()


def test_later_calls_run_the_graph_alone_and_agree_with_the_program():
    model, program, density = chain()
    raw = model.noise_unconstrained
    for point in torch.randn(4, 2):
        found = value_and_gradients(density, point, raw)
        torch.testing.assert_close(found, value_and_gradients(program.log_density, point, raw))
    assert density.graphs.num_traces == 1 and density.graphs.num_replays == 1
    before = model.runs[0]
    density(torch.zeros(2))
    assert model.runs[0] == before


def test_parameters_in_place_are_followed_and_changed_attributes_traced_again():
    model, program, density = chain()
    point = torch.tensor([0.4, -0.7])
    for _ in range(3):
        density(point)
    with torch.no_grad():
        model.noise_unconstrained.add_(0.3)
    torch.testing.assert_close(density(point), program.log_density(point))
    assert density.graphs.num_traces == 1
    model.shift = 0.8  # after evaluation 4
    for _ in range(3):
        torch.testing.assert_close(density(point), program.log_density(point))
    assert density.graphs.num_traces == 2


def test_transforms_other_shapes_and_calls_without_gradients_run_the_program():
    model, program, density = chain()
    points = torch.randn(3, 2)
    for point in points:
        density(point)
    exact = torch.stack([program.log_density(point) for point in points])
    torch.testing.assert_close(torch.vmap(density)(points), exact)
    torch.testing.assert_close(
        torch.func.grad(density)(points[0]), torch.func.grad(program.log_density)(points[0])
    )
    before = model.runs[0]
    with torch.no_grad():
        torch.testing.assert_close(density(points[0]), exact[0])
    assert model.runs[0] == before + 1
    torch.testing.assert_close(density(points[0].double()).float(), exact[0])


def test_a_graph_that_does_not_run_leaves_the_program():
    """The gradient of an LSTM on a CPU cannot be traced."""

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.out = torch.nn.LSTM(2, 2, batch_first=True), torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.out(self.recurrent(x)[0][:, -1])

    model = bdl.models.Regression(bdl.bayesianize(Last()), noise=0.5)
    program = Program(model, torch.randn(6, 3, 2), torch.randn(6))
    compiled, vector = program.compile(), torch.randn(program.size)
    with pytest.warns(BdlWarning, match="its graph cannot be run"):
        for _ in range(3):
            ours = value_and_gradients(compiled, vector)
            for a, b in zip(ours, value_and_gradients(program.log_density, vector), strict=True):
                torch.testing.assert_close(a, b)
    assert compiled.graphs.num_replays == 0


def test_a_gradient_that_is_not_finite_is_no_change_of_the_program():
    """The root of a negative number that ``where`` leaves out: the gradient is NaN."""

    def log_density(x):
        return x[0] + torch.where(x[1] > 0.0, x[1].sqrt(), 0.0)

    density = CompiledDensity(log_density, Modules())
    inside, outside = torch.tensor([1.0, 4.0]), torch.tensor([1.0, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for point in (inside, inside, inside, outside, outside, inside, inside):
            value, gradient = value_and_gradients(density, point)
            assert value == (3.0 if point is inside else 1.0)
            assert gradient.isfinite().all() == (point is inside)
    assert density.graphs.num_traces == 1


def test_terms_that_cancel_are_compared_by_their_size():
    """The density is 1e-6 at the point that is compared; the graph's constant is rounded there."""
    calls = []

    def log_density(x):
        calls.append(x)  # the program's own value differs by the rounding of terms of 10
        return x.square().sum() - 10.0 + (1e-6 if len(calls) % 2 else 2e-6)

    density = CompiledDensity(log_density, Modules())
    point = torch.full((10,), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            value_and_gradients(density, point)
    assert density.graphs.num_traces == 1
