"""Transforms of supports, and layouts in files."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch.distributions.transforms import ExpTransform

from pyro_bdl import Program
from pyro_bdl.program.layout import transform_of

ONE = torch.ones(())
KINDS = [
    (constraints.real, type(None)),
    (constraints.real_vector, type(None)),
    (constraints.independent(constraints.real, 2), type(None)),
    (dist.Normal(0.0, ONE).expand([3]).to_event(1).support, type(None)),
    (dist.MultivariateNormal(torch.zeros(2), torch.eye(2)).support, type(None)),
    (dist.HalfCauchy(ONE).support, ExpTransform),
    (dist.Gamma(ONE, ONE).support, ExpTransform),
    (dist.Exponential(ONE).expand([2]).to_event(1).support, ExpTransform),
]


@pytest.mark.parametrize("support, kind", KINDS, ids=str)
def test_the_reals_need_no_transform_and_positive_numbers_the_exponential(support, kind):
    assert isinstance(transform_of(support), kind)


@pytest.mark.parametrize("names", ["", "ab", "ad", "abcd"])
def test_named_sites_are_split_from_the_others(names):
    def model():
        for name, size in {"a": 2, "b": 3, "c": 1, "d": 2}.items():
            pyro.sample(name, dist.Normal(torch.zeros(size), 1.0).to_event(1))

    layout = Program(model).layout
    u = torch.randn(2, layout.size, requires_grad=True)
    sites, (taken, others) = layout.unflatten(u), layout.split(u, names)
    assert torch.equal(taken, torch.cat([u[:, :0], *[sites[n] for n in sorted(names)]], -1))
    assert list(others) == [name for name in sites if name not in names]
    assert all(torch.equal(others[name], sites[name]) for name in others)
    total = (taken**2).sum() + sum((part**2).sum() for part in others.values())
    torch.testing.assert_close(torch.autograd.grad(total, u)[0], 2 * u.detach())
