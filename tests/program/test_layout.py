"""Transforms of supports; the vector's order, shapes and errors."""

import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch.distributions.transforms import ExpTransform

from pyro_bdl import Program
from pyro_bdl.program.layout import transform_of

ONE = torch.ones(())


@pytest.mark.parametrize(
    "support",
    [
        constraints.real,
        constraints.real_vector,
        constraints.independent(constraints.real, 2),
        dist.Normal(0.0, ONE).expand([3]).to_event(1).support,
        dist.MultivariateNormal(torch.zeros(2), torch.eye(2)).support,
    ],
    ids=str,
)
def test_the_reals_need_no_transform(support):
    assert transform_of(support) is None


@pytest.mark.parametrize(
    "fn",
    [
        dist.HalfNormal(ONE),
        dist.HalfCauchy(ONE),
        dist.Gamma(ONE, ONE),
        dist.LogNormal(ONE, ONE),
        dist.Exponential(ONE).expand([2]).to_event(1),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_positive_supports_use_the_exponential(fn):
    assert isinstance(transform_of(fn.support), ExpTransform)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Beta(ONE, 2 * ONE),
        dist.Uniform(-ONE, 3 * ONE),
        dist.Pareto(2 * ONE, 3 * ONE),
        dist.Dirichlet(torch.ones(4)),
        dist.LKJCholesky(3, ONE),
        dist.Uniform(-torch.ones(2), torch.ones(2)).to_event(1),
        dist.HalfNormal(ONE).expand([2, 3]).to_event(1),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_transforms_map_onto_the_support_and_back(fn):
    transform = transform_of(fn.support)
    value = fn.sample((5,))
    u = transform.inv(value)
    assert torch.isfinite(u).all()
    torch.testing.assert_close(transform(u), value, rtol=1e-4, atol=1e-5)
    assert fn.support.check(transform(torch.randn_like(u))).all()


def test_a_layout_travels_by_pickle():
    def model():
        import pyro

        pyro.sample("s", dist.HalfNormal(ONE))
        pyro.sample("p", dist.Dirichlet(torch.ones(3)))

    layout = Program(model).layout
    again = pickle.loads(pickle.dumps(layout))
    u = torch.randn(2, layout.size)
    values, log_det = layout.constrain(u)
    others, other = again.constrain(u)
    assert torch.equal(log_det, other)
    assert all(torch.equal(others[name], value) for name, value in values.items())
