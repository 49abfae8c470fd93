"""Einsums as products of data with a weight: the same numbers, and what reads latents sees them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F

from pyro_bdl.guides import AutoLaplaceGGN, AutoMCDropout
from pyro_bdl.program.linear_ops.einsum import as_linear
from pyro_bdl.program.linear_ops.tracker import Tracker

D = torch.float64
SIZES = {"b": 4, "t": 3, "i": 5, "o": 2, "h": 3, "d": 2, "k": 4}


def _tensor(axes):
    return torch.randn([SIZES[axis] for axis in axes.replace("...", "bt")], dtype=D)


@pytest.mark.parametrize(
    "equation",
    [
        "bi,oi->bo", "bi,io->bo", "bi,io->ob", "bti,oi->bto", "tbi,oi->bot", "bit,oi->bot",
        "i,oi->o", "...i,oi->...o", "...i, io -> o...", "bi,i->b", "i,i->", "btd,hdk->bthk",
        "bthk,dhk->btd", "bthk,khd->dtb", "bd,hdk->bkh",
    ],
)  # fmt: skip
@pytest.mark.parametrize("listed", [False, True])
def test_it_has_the_numbers_of_the_einsum(equation, listed):
    data, weight = (_tensor(axes.strip()) for axes in equation.split("->")[0].split(","))
    turned = ",".join(reversed(equation.split("->")[0].split(","))) + "->" + equation.split("->")[1]
    for args in ((equation, data, weight), (turned, weight, data)):
        expected = torch.einsum(*args)
        args = (args[0], list(args[1:])) if listed else args
        product = as_linear(args, lambda operand: operand is weight)
        torch.testing.assert_close(product(), expected)


@pytest.mark.parametrize(
    "equation",
    [
        "bi,bi->b",
        "bi,oi->bio",
        "bi,oi->o",
        "bi,oi->b",
        "bi,o->bio",
        "bi,ii->b",
        "bi,oi",
        "bb,ob->o",
    ],
)
def test_other_einsums_are_left_alone(equation):
    data, weight = (_tensor(axes) for axes in equation.split("->")[0].split(","))
    assert as_linear((equation, data, weight), lambda operand: operand is weight) is None


def test_operands_that_are_both_weights_or_neither_or_broadcast():
    data, weight = _tensor("bi"), _tensor("oi")
    for answer in (True, False):
        assert as_linear(("bi,oi->bo", data, weight), lambda operand, a=answer: a) is None
    assert as_linear(("bi,oi->bo", data, weight[:, :1]), lambda v: v is not data) is None
    assert as_linear(("bi,oi,b->bo", data, weight, data[:, 0]), lambda v: v is not data) is None


class Seen(Tracker):
    """Names the operations on latents that are no views."""

    def operate(self, func, args, kwargs, tagged):
        self.names.append((func.__name__, tagged[0].index().tolist()))
        return func(*args, **kwargs)


def test_a_tracker_sees_the_product_and_the_entries():
    weight, data = _tensor("oi"), _tensor("bi")
    with Seen({"w": weight}) as tracker:
        tracker.names = []
        torch.einsum("bi,io->bo", data, weight.T)
        torch.einsum("bi,oi->bio", data, weight)
        torch.einsum("bi,ti->bt", data, data[:3])
    entries = torch.arange(10).reshape(2, 5).tolist()
    assert tracker.names == [("linear", entries), ("einsum", entries)]


def _program(first, second):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 5, dtype=D), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(torch.zeros(2, 5, dtype=D), 1.0).to_event(2))
        mean = second(torch.tanh(first(x, w)), v)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)

    return model


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_curvature_and_dropout_read_an_einsum_as_a_layer():
    x, y = torch.randn(8, 3, dtype=D), torch.randn(8, 2, dtype=D)
    layers = _program(lambda x, w: F.linear(x, w.T), F.linear)
    einsums = _program(
        lambda x, w: torch.einsum("bi,ih->bh", x, w), lambda h, v: torch.einsum("oh,bh->bo", v, h)
    )
    point = {"w": torch.randn(3, 5, dtype=D), "v": torch.randn(2, 5, dtype=D)}
    found = []
    for program in (layers, einsums):
        start = pyro.infer.autoguide.init_to_value(values=point)
        guide = AutoLaplaceGGN(program, init_loc_fn=start).prototype(x, y)
        posterior = guide.laplace_approximation((x, y), structure="kron")
        found.append(posterior.variances())
        dropout = AutoMCDropout(program, sites="all").prototype(x, y)
        assert torch.equal(dropout.weights["w"].units, torch.arange(3)[:, None].expand(3, 5))
        assert torch.equal(dropout.weights["v"].units, torch.arange(5).expand(2, 5))
        assert [w.hidden for w in dropout.weights.values()] == [False, True]
    torch.testing.assert_close(*found)
