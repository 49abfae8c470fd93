"""Targets and distributions of different shapes: what is accepted, and what is refused."""

from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

import pyro_bdl as bdl
from pyro_bdl.distributions.copies import expanded_to_targets
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.program import Program

X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8], [0.6, 0.1]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.9, 0.4], dtype=torch.float64)


def _program(observe, plate=True):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2, 1), 1.0).to_event(2))
        with pyro.plate("data", len(x)) if plate else nullcontext():
            distribution, targets = observe(x @ w, y)
            pyro.sample("y", distribution, obs=targets)

    return model


def _column(mean, y):
    return dist.Normal(mean, 1.0), y


def _column_of_targets(mean, y):
    return dist.Normal(mean[:, 0], 1.0), None if y is None else y[:, None]


SQUARES = {
    "column in a plate": _program(_column),
    "column without a plate": _program(_column, plate=False),
    "events in a plate": _program(lambda mean, y: (dist.Normal(mean, 1.0).to_event(1), y)),
    "one event": _program(lambda mean, y: (dist.Normal(mean, 1.0).to_event(2), y), plate=False),
    "column of targets": _program(_column_of_targets),
    "column of targets without a plate": _program(_column_of_targets, plate=False),
}


def _later_step(model):
    """After a prototype without targets."""
    guide = bdl.guides.AutoMAP(pyro.poutine.block(model, hide=["y"])).prototype(X)
    TemperedTrace_ELBO().loss(model, guide, X, Y)


def _compare(model):
    samples = bdl.Samples({"w": torch.randn(1, 10, 2, 1, dtype=torch.float64)})
    bdl.compare(model, {"a": samples}, X, Y, reference=None)


NUTS = {"backend": "pyro", "num_warmup": 1, "num_samples": 1, "progress": False}
USES = {
    "Trace_ELBO": lambda model: Trace_ELBO().loss(model, bdl.guides.AutoMeanField(model), X, Y),
    "later step": _later_step,
    "laplace": lambda model: bdl.guides.AutoLaplaceGGN(model).laplace_approximation((X, Y)),
    "nuts": lambda model: bdl.mcmc.sample(model, X, Y, **NUTS),
    "compare": _compare,
}


@pytest.mark.parametrize("model", SQUARES.values(), ids=SQUARES)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_targets_that_make_a_square_of_terms_are_refused(model, use):
    with pytest.raises(ValueError, match=r"site 'y' have shape .* makes 16 terms of 4 targets"):
        use(model)


WIDE = torch.stack([Y, Y + 1.0, Y - 0.5], -1)
# Targets that stand for all, or distributions that do: the same in plain words.
ACCEPTED = {
    "one target for all rows": (
        lambda mean, y: dist.Normal(mean[:, 0], 1.0),
        Y[0],
        lambda mean: (mean[:, 0], Y[0].expand(4)),
    ),
    "one target for an event": (
        lambda mean, y: dist.Normal(mean[:, 0], 1.0).to_event(1),
        Y[0],
        lambda mean: (mean[:, 0], Y[0].expand(4)),
    ),
    "a row for an event": (
        lambda mean, y: dist.Normal(mean[:, 0], 1.0).to_event(1),
        Y[None],
        lambda mean: (mean[:, 0], Y),
    ),
    "one mean for three targets of a row": (
        lambda mean, y: dist.Normal(mean, 1.0).to_event(1),
        WIDE,
        lambda mean: (mean.expand(4, 3), WIDE),
    ),
    "one mean for all": (
        lambda mean, y: dist.Normal(mean[0, 0], 1.0),
        Y,
        lambda mean: (mean[0, 0].expand(4), Y),
    ),
    "masked": (
        lambda mean, y: dist.Normal(mean, 1.0).mask(torch.ones(4, 1, dtype=bool)).to_event(1),
        WIDE,
        lambda mean: (mean.expand(4, 3), WIDE),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_targets_that_broadcast_count_each_term_once(name):
    """Density and curvature of the program with all shapes written out."""
    given, y, plain = ACCEPTED[name]

    def broadcast(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2, 1), 1.0).to_event(2))
        pyro.sample("y", given(x @ w, y), obs=y)

    def written_out(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2, 1), 1.0).to_event(2))
        mean, targets = plain(x @ w)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(mean.dim()), obs=targets)

    at = torch.tensor([0.4, -0.7], dtype=torch.float64)
    densities = [Program(model, X, y).log_density(at) for model in (broadcast, written_out)]
    torch.testing.assert_close(*densities)
    found = []
    for model in (broadcast, written_out):
        guide = bdl.guides.AutoLaplaceGGN(model, structure="full", rows="together")
        found.append(
            guide.laplace_approximation((X, y)).precision.solve(torch.eye(2, dtype=X.dtype))
        )
    torch.testing.assert_close(*found)


def test_a_program_of_the_shape_of_its_targets_keeps_its_distribution():
    given = dist.Normal(torch.zeros(4), 1.0)
    assert expanded_to_targets("y", given, torch.zeros(4), [-1]) is given
    assert expanded_to_targets("y", given, 0.5) is given  # no tensor
    assert expanded_to_targets("y", given, torch.zeros(3)) is given  # an error of log_prob
    rows = dist.Normal(torch.zeros(2, 4), 1.0)  # one series of targets under two plates
    assert expanded_to_targets("y", rows, torch.zeros(4), [-1, -2]) is rows
