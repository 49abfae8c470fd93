"""Subsets of the latents by name, module, predicate and index."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.program import Program
from pyro_bdl.program.subset import select


@pytest.fixture
def model():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    return models.Regression(bayesianize(net))


@pytest.fixture
def layout(model):
    return Program(model, torch.zeros(4, 2), torch.zeros(4)).layout


def sites(subset):
    return set(subset.sites)


def test_all(layout):
    subset = select(layout)
    assert subset.complete and subset.indices is None and subset.size == layout.size
    assert subset.parts == layout.slices
    assert select(layout, list(layout.latents)).indices is None
    assert select(layout, torch.arange(layout.size)).complete


def test_names_and_patterns(layout):
    assert sites(select(layout, "0.weight")) == {"0.weight"}
    assert sites(select(layout, "*.bias")) == {"0.bias", "2.0.bias", "2.1.bias"}
    assert sites(select(layout, ["noise", "2.1.*"])) == {"noise", "2.1.weight", "2.1.bias"}


def test_modules(model, layout):
    inner = model.network.network[2]
    assert sites(select(layout, inner[1], model=model)) == {"2.1.weight", "2.1.bias"}
    assert len(sites(select(layout, inner, model=model))) == 4
    both = select(layout, [model.network.network[0], "noise"], model=model)
    assert sites(both) == {"0.weight", "0.bias", "noise"}
    with pytest.raises(ValueError, match="not in the program"):
        select(layout, nn.Linear(2, 3), model=model)
    with pytest.raises(ValueError, match="not in the program"):
        select(layout, inner, model=lambda x: x)


def test_predicates(layout):
    large = select(layout, lambda name, latent: latent.size > 5)
    assert sites(large) == {"0.weight", "2.0.weight"}


@pytest.mark.parametrize("mask", [False, True])
def test_indices(layout, mask):
    chosen = torch.tensor([7, 2, 2, 20])
    if mask:
        chosen = torch.zeros(layout.size, dtype=torch.bool).index_fill_(0, chosen, True)
    subset = select(layout, chosen)
    assert subset.indices.tolist() == [2, 7, 20]
    vector = torch.randn(2, layout.size)
    assert torch.equal(subset.take(vector), vector[:, [2, 7, 20]])
    values = torch.randn(5, 3)
    put = subset.put(vector[0], values)
    assert torch.equal(put[:, [2, 7, 20]], values)
    rest = [i for i in range(layout.size) if i not in (2, 7, 20)]
    assert torch.equal(put[:, rest], vector[0, rest].expand(5, -1))
    starts = {name: where.start for name, where in layout.slices.items()}
    for name, part in subset.parts.items():
        entries = subset.chosen[name]
        whole = torch.arange(layout.slices[name].stop - starts[name])
        entries = whole if entries is None else entries
        assert subset.indices[part].tolist() == (entries + starts[name]).tolist()


@pytest.mark.parametrize(
    ("selection", "match"),
    [
        ("1.weight", r"'1.weight', which is not a latent site: .* \(0.weight, 0.bias, 2.0.w"),
        ([], "empty"),
        (torch.tensor([], dtype=torch.long), "empty"),
        (torch.zeros(3, dtype=torch.bool), "mask has shape"),
        (torch.tensor([0, 1000]), "from 0 to"),
        (torch.tensor([-1]), "from 0 to"),
        (torch.tensor([0.5]), "integers"),
        (lambda name, latent: False, "true for no latent site"),
        ([3], "got int"),
    ],
)
def test_what_chooses_nothing(layout, selection, match):
    with pytest.raises((TypeError, ValueError), match=match):
        select(layout, selection)


def test_names_with_brackets_and_of_a_named_network():
    """A hyperparameter of ByName has its pattern in its name."""
    prior = priors.ByName({"*.weight": priors.Normal(dist.HalfNormal(1.0)), "*": priors.Normal()})
    bnn = bayesianize(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), prior, name="g")
    layout = Program(bnn, torch.zeros(4, 2)).layout
    name = "g.prior[*.weight].scale"
    assert sites(select(layout, name)) == {name}
    assert sites(select(layout, bnn.network[1], model=bnn)) == {"g.1.weight", "g.1.bias"}
