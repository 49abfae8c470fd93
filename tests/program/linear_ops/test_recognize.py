"""Calls of torch as affine operations: the record of each gives the call's numbers again."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_bdl.guides import AutoLaplaceGGN, AutoMCDropout
from pyro_bdl.program.linear_ops.recognize import FUNCTIONS, as_linear, recognize
from pyro_bdl.program.linear_ops.tracker import Tracker

D = torch.float64


def _numbers(*shape):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape)))


X, SEQUENCE, IMAGE, VOLUME = (
    _numbers(5, 3), _numbers(5, 7, 3), _numbers(5, 4, 7, 6), _numbers(2, 4, 5, 4, 3),
)  # fmt: skip
W, WT, V, B, ROW = _numbers(2, 3), _numbers(3, 2), _numbers(3), _numbers(2), _numbers(4)
COLUMNS, GRID = _numbers(5), _numbers(7, 3)
KERNEL = _numbers(4, 2, 3, 2)
TOKENS = torch.tensor([[3, 1, 3], [0, 2, 1]])
MEAN, VARIANCE = _numbers(4), _numbers(4).square()

# name: function, arguments, the weight, the bias, (input_dim, weight_dim, output_dim)
PRODUCTS = {
    "linear": (F.linear, (X, W, B), W, B, (-1, 1, -1)),
    "linear of a sequence": (F.linear, (SEQUENCE, W), W, None, (-1, 1, -1)),
    "linear, a vector": (F.linear, (X, V), V, None, (-1, 0, -1)),
    "x @ w": (Tensor.__matmul__, (X, WT), WT, None, (-1, 0, -1)),
    "one row @ w": (torch.matmul, (X[0], WT), WT, None, (-1, 0, -1)),
    "w @ x": (Tensor.matmul, (W, SEQUENCE.mT), W, None, (-2, 1, -2)),
    "w @ one column": (torch.matmul, (W, X[0]), W, None, (-1, 1, -1)),
    "x @ vector": (torch.matmul, (SEQUENCE, V), V, None, (-1, 0, -1)),
    "vector @ x": (torch.matmul, (V, X.T), V, None, (-2, 0, -2)),
    "from the right": (Tensor.__rmatmul__, (WT, X), WT, None, (-1, 0, -1)),
    "mm": (torch.mm, (X, WT), WT, None, (-1, 0, -1)),
    "w.mm(x)": (Tensor.mm, (W, X.T), W, None, (-2, 1, -2)),
    "mv": (torch.mv, (X, V), V, None, (-1, 0, -1)),
    "w.mv(x)": (Tensor.mv, (W, X[0]), W, None, (-1, 1, -1)),
    "addmm": (torch.addmm, (B, X, WT), WT, B, (-1, 0, -1)),
    "addmm, the weight first": (torch.addmm, (COLUMNS, W, X.T), W, COLUMNS, (-2, 1, -2)),
}

CONVOLUTIONS = {
    "conv1d": (F.conv1d, (SEQUENCE.mT, _numbers(2, 3, 2), B), {"stride": 2}, 1, 1),
    "conv1d, one datum": (F.conv1d, (X.T, _numbers(2, 3, 3), B), {"padding": "same"}, 0, 1),
    "conv2d": (F.conv2d, (IMAGE, KERNEL, None, 2, 1, 1, 2), {}, 1, 1),
    "conv3d": (F.conv3d, (VOLUME, _numbers(2, 4, 2, 2, 1)), {"bias": B, "dilation": 2}, 1, 1),
    "conv_transpose1d": (F.conv_transpose1d, (SEQUENCE.mT, _numbers(3, 2, 2), B, 2), {}, 1, 0),
    "conv_transpose2d": (F.conv_transpose2d, (IMAGE, KERNEL), {"groups": 2}, 1, 0),
    "conv_transpose3d": (F.conv_transpose3d, (VOLUME, _numbers(4, 2, 2, 2, 1)), {}, 1, 0),
}

# name: function, arguments, keyword arguments, the latents (weight, bias)
SCALES = {
    "layer_norm": (F.layer_norm, (SEQUENCE, (3,), V, V + 1, 0.1), {}, (V, V + 1)),
    "rms_norm": (F.rms_norm, (SEQUENCE, (7, 3)), {"weight": GRID}, (GRID, None)),
    "group_norm": (F.group_norm, (IMAGE, 2, ROW, ROW + 1), {"eps": 0.1}, (ROW, ROW + 1)),
    "batch_norm": (F.batch_norm, (IMAGE, MEAN, VARIANCE, ROW), {}, (ROW, None)),
    "x * w": (Tensor.__mul__, (X, V), {}, (V, None)),
    "w * x": (torch.mul, (V, X), {}, (V, None)),
    "w.mul(x)": (Tensor.mul, (W, SEQUENCE[:, :1]), {}, (W, None)),
    "2 w": (Tensor.__rmul__, (W, 2.0), {}, (W, None)),
}

# name: function, arguments, the latent
ADDITIONS = {
    "x + b": (torch.add, (X, V), V),
    "b + x": (Tensor.__add__, (V, X), V),
    "b.add(x)": (Tensor.add, (W, SEQUENCE[:, :1]), W),
    "1 + b": (Tensor.__radd__, (V, 1.0), V),
    "x - b": (torch.sub, (X, V), V),
    "b - x": (Tensor.__sub__, (V, X), V),
    "x.sub(b)": (Tensor.sub, (X, V), V),
    "1 - b": (Tensor.__rsub__, (V, 1.0), V),
}


def _is_one_of(*latents):
    return lambda value: any(value is latent for latent in latents if latent is not None)


def _along(values, dim, output):
    """Numbers that lie along some dimension of an output and the following ones."""
    start = dim % output.dim()
    return values.reshape(
        (1,) * start + values.shape + (1,) * (output.dim() - start - values.dim())
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    function, args, weight, bias, dims = PRODUCTS[name]
    op = recognize(function, args, {}, _is_one_of(weight))
    assert op.kind == "product" and op.is_plain and op.weight is weight and op.bias is bias
    assert (op.input_dim, op.weight_dim, op.output_dim) == dims
    z = F.linear(op.rows(), op.as_matrix(weight))
    z = z[..., 0] if weight.dim() == 1 else op.permute_output(z)
    torch.testing.assert_close(z if bias is None else z + bias, function(*args))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    function, args, kwargs, channels, dim = CONVOLUTIONS[name]
    op = recognize(function, args, kwargs, _is_one_of(args[1]))
    assert op.kind == ("convolution" if dim else "transposed convolution") and op.is_plain
    assert (op.input_dim, op.weight_dim, op.output_dim, op.bias_dim) == (
        channels,
        dim,
        *[channels] * 2,
    )
    assert op.inputs.shape[channels] == op.weight.shape[dim] * op.groups
    z = op.function(op.inputs, op.weight, **op.settings)
    z = z if op.bias is None else z + _along(op.bias, op.bias_dim, z)
    torch.testing.assert_close(z, function(*args, **kwargs))


@pytest.mark.parametrize("padding", [None, 1, -1])
def test_embeddings(padding):
    op = recognize(F.embedding, (TOKENS, KERNEL[..., 0, 0], padding), {}, _is_one_of(None))
    assert (op.kind, op.input_dim, op.weight_dim, op.is_plain) == ("embedding", None, 0, True)
    assert op.settings == {"padding_idx": padding}
    assert torch.equal(op.weight[op.inputs], F.embedding(TOKENS, KERNEL[..., 0, 0], padding))


@pytest.mark.parametrize("name", SCALES)
def test_scales(name):
    function, args, kwargs, (weight, bias) = SCALES[name]
    op = recognize(function, args, kwargs, _is_one_of(weight))
    expected = function(*args, **kwargs)
    z = op.multiplier() * _along(weight, op.output_dim, expected)
    z = z if bias is None else z + _along(op.bias, op.bias_dim, expected)
    assert op.kind == "scale" and op.is_plain and op.weight is weight
    torch.testing.assert_close(z, expected)


@pytest.mark.parametrize("name", ADDITIONS)
def test_additions(name):
    function, args, latent = ADDITIONS[name]
    op = recognize(function, args, {}, _is_one_of(latent))
    assert op.kind == "addition" and op.is_plain and op.bias is latent and op.weight is None
    expected = function(*args)
    rest = expected - op.sign * _along(latent, op.bias_dim, expected)
    same = torch.as_tensor(op.inputs, dtype=D).expand(expected.shape)
    torch.testing.assert_close(rest, same if op.sign < 0 or "-" not in name else -same)


def test_every_function_of_the_table_has_a_case_here():
    cases = [*PRODUCTS.values(), *CONVOLUTIONS.values(), *SCALES.values(), *ADDITIONS.values()]
    assert {case[0] for case in cases} | {F.embedding} == FUNCTIONS


@pytest.mark.parametrize(
    "function, args, kwargs",
    [
        (torch.addmm, (B, X, WT), {"beta": 2}),
        (torch.addmm, (B, X, WT), {"alpha": 2}),
        (torch.add, (X, V), {"alpha": 2}),
        (F.embedding, (TOKENS, W), {"max_norm": 1.0}),
        (F.embedding, (TOKENS, W), {"scale_grad_by_freq": True}),
    ],
)
def test_factors_and_changed_rows_or_gradients_are_told(function, args, kwargs):
    assert not recognize(function, args, kwargs, _is_one_of(*args[1:])).is_plain


def test_two_latents_of_which_none_is_the_weight():
    both = _is_one_of(W, WT)
    for function in (torch.matmul, torch.mm, torch.add, torch.sub, torch.mul):
        assert recognize(function, (W, WT), {}, both) is None
    op = recognize(torch.addmm, (B, W, WT), {}, both)
    assert op.kind == "addition" and op.bias is B


@pytest.mark.parametrize(
    "function, args",
    [(torch.exp, (W,)), (torch.matmul, (X, _numbers(2, 3, 4))), (torch.bmm, (SEQUENCE, SEQUENCE))],
)
def test_other_calls_are_left_alone(function, args):
    assert recognize(function, args, {}, _is_one_of(args[-1])) is None


def test_arguments_by_name():
    found = recognize(F.conv1d, (SEQUENCE.mT,), dict(weight=KERNEL[..., 0], groups=1), _is_one_of())
    assert found.weight is not None and found.settings == {"groups": 1}
    assert recognize(torch.mm, (X,), {"mat2": WT}, _is_one_of(WT)).weight is WT


# Einsums as products of data with a weight

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
