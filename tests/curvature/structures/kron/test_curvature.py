"""Kronecker factors, their corrections, and curvature added later."""

import copy
from types import MappingProxyType

import pytest
import torch
from torch import nn

from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.program.subset import Subset


def blocks(curvature):
    """site -> its block as a matrix."""
    return {part.position.key[0]: part.matrix() for part in curvature.parts.values()}


def mlp(oracle, n=6, width=3):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3))
    model, (x, y) = oracle.classification(net, torch.randn(n, width))
    return (*oracle.program(model, x, y), x, y)


def test_the_factors_of_kfac(oracle):
    """(1 / N) sum a a' kron sum g g', with g the columns of J_z' S by hand. Source: Martens &
    Grosse 2015, section 3."""
    program, vector, x, y = mlp(oracle)
    curvature = oracle.fit(program, vector, (x, y), structure="kron").curvature
    values = program.constrain(vector)[0]
    hidden = (x @ values["0.weight"].T + values["0.bias"]).tanh()
    p = (hidden @ values["2.weight"].T + values["2.bias"]).softmax(-1)
    outputs = torch.diag(p.sum(0)) - p.T @ p
    found = blocks(curvature)
    torch.testing.assert_close(found["2.weight"], torch.kron(outputs, hidden.T @ hidden / 6))
    torch.testing.assert_close(found["2.bias"], outputs)


def test_expand_and_reduce(oracle):
    """Weights shared by T positions: each a datum (expand), or a averaged and g added (reduce).
    Source: Eschenhagen et al. 2023."""
    torch.manual_seed(0)
    x = torch.randn(4, 5, 3)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2, bias=False)

        def forward(self, x):
            return (self.a(x) * torch.arange(1.0, 6.0)[:, None]).sum(1)

    model, data = oracle.regression(Net(), x, 2, noise=1.0)
    program, vector = oracle.program(model, *data)
    g = torch.arange(1.0, 6.0)
    flat = x.flatten(0, 1)
    expand = oracle.fit(program, vector, data, structure="kron").curvature
    outputs = 4 * g.square().sum() * torch.eye(2)
    expected = torch.kron(outputs, flat.T @ flat / 20)
    torch.testing.assert_close(blocks(expand)["a.weight"], expected)
    reduce = oracle.fit(program, vector, data, structure="kron", reduce=True).curvature
    mean = x.mean(1)
    expected = torch.kron(4 * g.sum() ** 2 * torch.eye(2), mean.T @ mean / 4)
    torch.testing.assert_close(blocks(reduce)["a.weight"], expected)


def test_groups_have_factors_of_their_own(oracle):
    """The block of each group is exact for one datum at one position, and groups are independent.
    Source: Grosse & Martens 2016."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(6, 2))
    model, data = oracle.regression(net, torch.randn(1, 4, 2), 2)
    program, vector = oracle.program(model, *data)
    found = blocks(oracle.fit(program, vector, data, structure="kron").curvature)["0.weight"]
    exact = oracle.ggn(program, vector)[:24, :24]
    torch.testing.assert_close(found, torch.block_diag(exact[:12, :12], exact[12:, 12:]))


def test_ekfac_is_the_best_diagonal_in_the_eigenbasis(oracle):
    """values = diag(Q' G Q), with G the exact block (George et al. 2018, proposition 2)."""
    program, vector, x, y = mlp(oracle)
    exact = oracle.ggn(program, vector)
    kron = blocks(oracle.fit(program, vector, (x, y), structure="kron").curvature)
    curvature = oracle.fit(program, vector, (x, y), structure="ekfac").curvature
    corrected = blocks(curvature)
    for factors in curvature.parts.values():
        name = factors.position.key[0]
        part = program.slices[name]
        block = exact[part, part]
        q = torch.kron(factors.block().outputs[0], factors.block().inputs[0])
        torch.testing.assert_close(factors.corrected.flatten(), (q.T @ block @ q).diagonal())
        far, near = (kron[name] - block).norm(), (corrected[name] - block).norm()
        assert near <= far + 1e-12
    assert (kron["0.weight"] - exact[:12, :12]).norm() > 1e-3


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_look_ups(oracle, structure):
    """For one datum with one token the block is exact; rows without a look-up have no curvature."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(3, 2))
    model, data = oracle.regression(net, torch.tensor([[2]]), 2)
    program, vector = oracle.program(model, *data)
    found = blocks(oracle.fit(program, vector, data, structure=structure).curvature)["0.weight"]
    torch.testing.assert_close(found, oracle.ggn(program, vector)[:12, :12])
    assert (found.diagonal() > 0).nonzero()[:, 0].tolist() == [6, 7, 8]


@pytest.mark.parametrize("size", [6, 1025])
def test_large_rest_blocks_are_diagonal(oracle, size):
    """J = the normalized inputs, for the gains of a norm whose outputs are added up."""

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(size, bias=False)

        def forward(self, x):
            return self.norm(x).sum(-1, keepdim=True)

    torch.manual_seed(0)
    model, data = oracle.regression(Summed(), torch.randn(5, size))
    program, vector = oracle.program(model, *data)
    jacobian = nn.functional.layer_norm(data[0], (size,))
    exact = jacobian.T @ jacobian / 0.5**2
    found = blocks(oracle.fit(program, vector, data, structure="kron").curvature)["norm.weight"]
    torch.testing.assert_close(found, exact if size == 6 else exact.diagonal().diag())


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("width", [3, 10, 17], ids=["narrow", "to dense", "wide"])
def test_merging(oracle, structure, width):
    """Wide inputs have as many eigenvectors as data: first three, then eight, which is more than
    half of ten, but not of seventeen."""
    program, vector, x, y = mlp(oracle, 8, width)
    config = CurvatureConfig(structure)
    at = ProgramAtPoint(program.model, Subset(program.layout), vector)

    def fit(start, stop, before=None):
        data = (x[start:stop], y[start:stop])
        return fit_curvature(at, data, config, before=before).curvature

    whole = blocks(fit(0, 8))
    first = fit(0, 3)
    assert first.parts["0"].block().inputs.shape[2] == 3
    both = fit(3, 8, before=first)
    merged = blocks(both)
    for name, block in whole.items():
        if structure == "kron":
            torch.testing.assert_close(merged[name], block)
        else:  # eigenvectors of the first data
            torch.testing.assert_close(merged[name].trace(), block.trace())
            part = program.slices[name]
            (basis_of,) = [f for f in both.parts.values() if f.position.key[0] == name]
            basis = basis_of.block()
            q = torch.kron(basis.outputs[0].contiguous(), basis.inputs[0].contiguous())
            exact = oracle.ggn(program, vector)[part, part]
            own = (q.T @ exact @ q).diagonal()
            torch.testing.assert_close(basis_of.corrected.flatten(), own)
            torch.testing.assert_close(own.sum(), exact.diagonal().sum())


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_state(oracle, structure):
    """The state loads into a curvature of other data, whose factors have other shapes."""
    program, vector, x, y = mlp(oracle, width=12)
    a = oracle.fit(program, vector, (x, y), structure=structure).curvature
    b = oracle.fit(program, vector + 1.0, (x[:3], y[:3]), structure=structure).curvature
    b.load_state_dict(a.state_dict())
    expected = a.diagonal().clone()
    torch.testing.assert_close(b.diagonal(), expected)
    torch.testing.assert_close(copy.deepcopy(a).diagonal(), expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        b.load_state_dict({})


def test_a_prior_with_a_parameter_for_every_row(oracle):
    """Its log determinant's gradient where all rows have the same value, by differences."""
    program, vector, x, y = mlp(oracle, 4, width=10)
    curvature = oracle.fit(program, vector, (x, y), structure="kron").curvature

    def logdet(scales, uniform=MappingProxyType({})):
        rows = scales.repeat_interleave(10)
        prior = torch.cat([rows, rows.new_ones(program.size - 40)])
        return curvature.with_prior(PriorPrecision(prior, uniform=uniform)).logdet()

    scales = torch.full((4,), 0.7, requires_grad=True)
    logdet(scales).backward()
    for row in range(4):
        step = 1e-5 * torch.eye(4)[row]
        with torch.no_grad():
            slope = (logdet(scales + step) - logdet(scales - step)) / 2e-5
        torch.testing.assert_close(scales.grad[row], slope, rtol=1e-6, atol=1e-6)
    one = torch.tensor(0.7, requires_grad=True)
    logdet(one.expand(4), {"0.weight": one}).backward()
    torch.testing.assert_close(one.grad, scales.grad.sum())
