"""Jacobians in latents outside of linear operations against one backward pass for every datum."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fisher_jacobians
from pyro_bdl.curvature.structures.full import FullCurvature
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset

N, OUT = 10, 3


def _sample(name, *shape, positive=False):
    zeros = torch.zeros(shape, dtype=torch.float64)
    prior = dist.LogNormal(zeros - 0.3, 0.5) if positive else dist.Normal(zeros, 0.5)
    return pyro.sample(name, prior.to_event(len(shape)))


def one_scale(x, y):
    mean = x @ _sample("w", 2, OUT)
    pyro.sample("y", dist.Normal(mean, _sample("noise", positive=True)).to_event(1), obs=y)


def a_scale_for_each_output(x, y):
    mean = x @ _sample("w", 2, OUT)
    pyro.sample("y", dist.Normal(mean, _sample("noise", OUT, positive=True)).to_event(1), obs=y)


def a_factor(x, y):
    mean = x @ _sample("w", 2, OUT)
    factor = torch.eye(OUT, dtype=x.dtype) + _sample("factor", OUT, OUT).tril(-1)
    pyro.sample("y", dist.MultivariateNormal(mean, scale_tril=factor), obs=y)


def degrees_too(x, y):
    mean = x @ _sample("w", 2, OUT)
    degrees, scale = _sample("degrees", positive=True), _sample("noise", positive=True)
    pyro.sample("y", dist.StudentT(2.0 + degrees, mean, scale).to_event(1), obs=y)


def in_the_mean_as_well(x, y):
    noise = _sample("noise", positive=True)
    mean = x @ _sample("w", 2, OUT) + noise.sin()
    pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)


def heteroscedastic(x, y):
    mean, slope = x @ _sample("w", 2, OUT), _sample("slope", 2)
    pyro.sample("y", dist.Normal(mean, (x * slope).sum(1, True).exp()).to_event(1), obs=y)


def its_own_map_over_rows(x, y):
    w, v = _sample("w", 2, 4), _sample("v", 4, OUT)
    mean = torch.vmap(lambda row: (row @ w).tanh() @ v)(x) + x @ w[:, :OUT]
    pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


def its_own_map_over_weights(x, y):
    w = _sample("w", OUT, 2, 4)
    mean = torch.vmap(lambda own: (x @ own).tanh().sum(1), out_dims=1)(w)
    pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


def rows_of_a_table(x, y):
    group = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    table, w = _sample("table", 3, OUT), _sample("w", 2, OUT)
    mean = x @ w + table[group] + table[0] * table[group.flip(0).flip(0), :1]
    pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


PROGRAMS = [
    one_scale, a_scale_for_each_output, a_factor, degrees_too, in_the_mean_as_well, heteroscedastic,
    its_own_map_over_rows, its_own_map_over_weights, rows_of_a_table,
]  # fmt: skip


def _found(program, x, y, curvature, run=ProgramAtPoint.linearize):
    torch.manual_seed(1)
    layout = Program(program, x, y).layout
    vector = 0.3 * torch.randn(layout.size, dtype=torch.float64)
    at = run(ProgramAtPoint(program, Subset(layout), vector), (x, y), {})
    full = FullCurvature(Subset(layout), vector)
    config = CurvatureConfig("full", curvature)
    jacobians = list(fisher_jacobians(at, config))
    for jacobian in jacobians:
        full.add(jacobian)
    return layout, vector, full.matrix


@pytest.mark.parametrize("rows", [1, N])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_empirical_fisher_is_the_sum_over_the_datas_own_gradients(program, rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 2, dtype=torch.float64)
    y = torch.randn(rows, OUT, dtype=torch.float64)
    layout, vector, found = _found(program, x, y, "empirical-fisher")
    scores = torch.stack(
        [
            torch.func.grad(
                lambda u, n=n: Program(program, x, y).log_likelihood(
                    layout.constrain(u)[0], x, y
                )["y"][n]
            )(vector)
            for n in range(rows)
        ]
    )  # fmt: skip
    torch.testing.assert_close(found, scores.mT @ scores)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_gauss_newton_matrix_is_that_of_backward_passes(program):
    """sum_n J_n' F_n J_n, with one backward pass for each row."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 2, dtype=torch.float64), torch.randn(N, OUT, dtype=torch.float64)
    found = _found(program, x, y, "ggn")[2]
    expected = _found(program, x, y, "ggn", ProgramAtPoint.linearize_batch)[2]
    torch.testing.assert_close(found, expected)


@torch.jit.script
def _scripted(x, v):
    return torch.matmul(x, v)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_scripted_use_that_is_zero_in_the_first_batch(structure):
    """No recorder sees the operations of TorchScript, and the feature is absent at first."""
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 1.0], [4.0, 2.0]])

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            f = x[:, :1] @ w + _scripted(x[:, 1:], v)
            return pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    y = torch.zeros(4)
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    guide.loc.data = torch.zeros(2)
    posterior = guide.laplace_approximation([(x[:2], y[:2]), (x[2:], y[2:])])
    torch.testing.assert_close(posterior.curvature.diagonal(), torch.tensor([30.0, 5.0]))
