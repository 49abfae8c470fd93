"""Kronecker factors, their corrections, and curvature added later."""

import copy

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature import kronecker
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.curvature.recipe import Recipe
from pyro_bdl.curvature.subset import Subset


def blocks(curvature):
    """site -> its block as a matrix."""
    curvature.diagonal()
    return {
        place.key[0]: block if isinstance(block, torch.Tensor) else block.matrix()
        for place, block in curvature._blocks()
    }


def mlp(oracle, n=6):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model, (x, y) = oracle.classification(net, torch.randn(n, 3))
    return (*oracle.program(model, x, y), x, y)


def test_the_factors_of_kfac(oracle):
    """(1 / N) sum a a' kron sum g g', with g the columns of J_z' S by hand."""
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
    """Weights shared by T positions: each a datum (expand), or a averaged and g added (reduce)."""
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
    """A grouped convolution is as many convolutions side by side."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(18, 2))
    model, data = oracle.regression(net, torch.randn(3, 4, 4), 2)
    program, vector = oracle.program(model, *data)
    curvature = oracle.fit(program, vector, data, structure="kron").curvature
    curvature.diagonal()
    (factors,) = [f for f in curvature.products.values() if f.place.key[0] == "0.weight"]
    assert factors.inputs.shape == (2, 4, 4) and factors.outputs.shape == (2, 3, 3)
    values = program.constrain(vector)[0]
    for group in range(2):

        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(2, 3, 2, bias=False)

            def forward(self, x, group=group):
                other = nn.functional.conv1d(
                    x[:, 2 - 2 * group : 4 - 2 * group],
                    values["0.weight"][3 - 3 * group : 6 - 3 * group],
                )
                mine = self.conv(x[:, 2 * group : 2 * group + 2])
                both = [mine, other] if group == 0 else [other, mine]
                h = torch.cat(both, 1).flatten(1)
                return h @ values["2.weight"].T + values["2.bias"]

        half = models.Regression(bayesianize(Half()), noise=0.5)
        inner, _ = oracle.program(half, *data)
        at = values["0.weight"][3 * group : 3 * group + 3].reshape(-1)
        single = oracle.fit(inner, at, data, structure="kron").curvature
        single.diagonal()
        (mine,) = single.products.values()
        torch.testing.assert_close(factors.inputs[group], mine.inputs[0])
        torch.testing.assert_close(factors.outputs[group], mine.outputs[0])


def test_ekfac_is_the_best_diagonal_in_the_eigenbasis(oracle):
    """values = diag(Q' G Q), with G the exact block (George et al. 2018, proposition 2)."""
    program, vector, x, y = mlp(oracle)
    exact = oracle.ggn(program, vector)
    kron = blocks(oracle.fit(program, vector, (x, y), structure="kron").curvature)
    curvature = oracle.fit(program, vector, (x, y), structure="ekfac").curvature
    corrected = blocks(curvature)
    for factors in curvature.products.values():
        name = factors.place.key[0]
        part = program.slices[name]
        block = exact[part, part]
        inputs = torch.eye(1)[None] if factors.inputs_basis is None else factors.inputs_basis
        q = torch.kron(factors.outputs_basis[0], inputs[0])
        torch.testing.assert_close(factors.values.flatten(), (q.T @ block @ q).diagonal())
        far, near = (kron[name] - block).norm(), (corrected[name] - block).norm()
        assert near <= far + 1e-12
    assert (kron["0.weight"] - exact[:12, :12]).norm() > 1e-3


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_look_ups(oracle, structure):
    """Of one datum with one token the block is exact; rows that no datum looks up have none."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(3, 2))
    model, data = oracle.regression(net, torch.tensor([[2]]), 2)
    program, vector = oracle.program(model, *data)
    found = blocks(oracle.fit(program, vector, data, structure=structure).curvature)["0.weight"]
    torch.testing.assert_close(found, oracle.ggn(program, vector)[:12, :12])
    assert (found.diagonal() > 0).nonzero()[:, 0].tolist() == [6, 7, 8]


def test_large_rest_blocks_are_diagonal(oracle, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 1))
    model, data = oracle.regression(net, torch.randn(5, 6))
    program, vector = oracle.program(model, *data)
    exact = oracle.ggn(program, vector)[:6, :6]
    small = blocks(oracle.fit(program, vector, data, structure="kron").curvature)["0.weight"]
    torch.testing.assert_close(small, exact)
    monkeypatch.setattr(kronecker, "_DENSE_UP_TO", 5)
    curvature = oracle.fit(program, vector, data, structure="kron").curvature
    torch.testing.assert_close(blocks(curvature)["0.weight"], exact.diagonal())


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_merging(oracle, structure):
    program, vector, x, y = mlp(oracle, 8)
    recipe, subset = Recipe(structure), Subset(program.layout)

    def fit(start, stop, before=None):
        data = (x[start:stop], y[start:stop])
        return fit_curvature(program.model, subset, vector, data, recipe, before=before).curvature

    whole = blocks(fit(0, 8))
    first = fit(0, 3)
    first.diagonal()  # a precision was made in between
    merged = blocks(fit(3, 8, before=first))
    for name, block in whole.items():
        if structure == "kron":
            torch.testing.assert_close(merged[name], block)
        else:  # eigenvectors of the first data
            torch.testing.assert_close(merged[name].trace(), block.trace())
            part = program.slices[name]
            (basis_of,) = [f for f in first.products.values() if f.place.key[0] == name]
            inputs = basis_of.inputs_basis
            inputs = torch.eye(1) if inputs is None else inputs[0]
            q = torch.kron(basis_of.outputs_basis[0], inputs)
            exact = oracle.ggn(program, vector)[part, part]
            own = (q.T @ exact @ q).diagonal()
            torch.testing.assert_close(basis_of.values.flatten(), own)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_state(oracle, structure):
    program, vector, x, y = mlp(oracle)
    a = oracle.fit(program, vector, (x, y), structure=structure).curvature
    b = oracle.fit(program, vector + 1.0, (x, y), structure=structure).curvature
    expected = a.diagonal().clone()
    b.diagonal()
    b.load_state_dict(a.state_dict())
    torch.testing.assert_close(b.diagonal(), expected)
    torch.testing.assert_close(copy.deepcopy(a).diagonal(), expected)
