"""Every operator of the table: values and gradients are torch's at special points too.

The points are zeros of both signs, ties, kinks, poles, large numbers, infinities and NaN. Gradients
are compared at finite points with a finite value, since a step with another one is refused.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import special
from tracing.jax.ops import test_arithmetic

from pyro_bdl.tracing.jax.ops.registry import OPERATORS
from pyro_bdl.tracing.jax.translate import to_jax
from pyro_bdl.utils.trees import tree_leaves

INF, NAN = float("inf"), float("nan")
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}
GRID = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.5, 3.0, -3.0, 6.0, 1e-3, 20.5, -100.0, 1e5,
        INF, -INF, NAN]  # fmt: skip
MATRICES = {
    "generic": [[0.3, -1.2, 2.0], [0.7, 0.1, -0.4]],
    "ties": [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]],
    "zeros": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
    "negative": [[-1.0, -1.0, -2.0], [-1.0, -3.0, -3.0]],
    "infinite": [[INF, 1.0, -INF], [2.0, INF, 3.0]],
    "minus infinity": [[INF, INF, 1.0], [-INF, -INF, -INF]],
    "NaN": [[NAN, 1.0, 2.0], [0.0, NAN, NAN]],
}


def named(names, of=torch):
    return {name: getattr(of, name) for name in names.split()}


ONE = {
    **named("""
        exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh
        asinh acosh atanh floor ceil trunc sign signbit isnan isinf logical_not neg reciprocal relu
        sigmoid erf erfc erfinv lgamma digamma i0 abs round sinc angle logit nan_to_num
    """),
    **named("i0e i1 i1e ndtri erfcx entr", of=special),
    **named("elu celu selu leaky_relu softplus hardtanh relu6 mish logsigmoid softsign",
            of=F),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp from": lambda x: x.clamp_min(0),
    "rounded": lambda x: x.round(decimals=2),
    "polygamma": lambda x: torch.stack([
        torch.polygamma(n, x.nan_to_num(NAN, 9.0, -9.0).clamp(max=1e3) + 0.2) for n in range(4)]),
    "polygamma at half numbers": lambda x: torch.polygamma(
        1, torch.tensor([-0.5, -2.5, 1.5]).to(x) + 0 * x.nan_to_num(0, 0, 0)[..., None]),
    "powers": lambda x: torch.stack([x**p for p in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, 65, 0.0)]),
    "exponents": lambda x: torch.stack([p**x for p in (0.0, 1.0, 2.0, -2.0, 0.5)]),
    "quotients": lambda x: torch.stack([
        torch.div(x, p, rounding_mode=mode)
        for p in (2.0, -0.7, 0.0) for mode in (None, "floor", "trunc")]),
    "remainders": lambda x: torch.stack([
        f(x, p) for f in (torch.fmod, torch.remainder) for p in (2.0, -0.7, 0.0)]),
    "integers": lambda x: (x.nan_to_num(0, 5, -5).clamp(-9, 9).long(), ~(x > 0), x.bool()),
    "bits": lambda x: (
        (x > 0) & (x > 1) | (x < -1) ^ (x < -2), (x > 0).int() | 2, 6 & (x > 1).int() ^ 3),
    "filled": lambda x: torch.full_like(x, 3) * x.masked_fill(x > 1, 7.0),
    "kept": lambda x: x.detach() * torch.empty_like(x).copy_(x).contiguous().clone(),
    "dropout": lambda x: F.rrelu(F.dropout(x, 0.5, training=False), training=False),
    "zeta": lambda x: special.zeta(2.0 + x.detach().nan_to_num(1, 1, 1).abs().clamp(0, 9), 1.0),
    "log_ndtr": lambda x: special.log_ndtr(x.clamp(min=-30)),  # torch's slope is wrong below
    "hardswish": lambda x: F.hardswish(x.nan_to_num(NAN, INF, -9.0)),  # torch's is NaN at -inf
}  # fmt: skip
TWO = {
    **named("""
        atan2 hypot maximum minimum fmod remainder copysign logical_and logical_or logical_xor eq ne
        lt le gt ge mul add sub div pow fmax fmin xlogy logaddexp true_divide float_power
    """),
    "xlog1py": special.xlog1py,
    "gamma": lambda x, y: [
        f(0.1 + x.detach().nan_to_num(1, 1, 1).abs(), y.nan_to_num(1, 1, 1).clamp(0.1))
        for f in (torch.igamma, torch.igammac)],
    "chosen": lambda x, y: torch.where(x > y, x, y),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "with a factor": lambda x, y: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=3),
    "from": lambda x, y: torch.clamp(x, min=y),
    "to": lambda x, y: torch.clamp(x, max=y),
    "between": lambda x, y: torch.clamp(x, y, torch.ones_like(y)),
    "polar": lambda x, y: torch.view_as_real(torch.polar(x.abs(), y)),
    "angle": lambda x, y: torch.complex(x, y).angle(),
    "complex": lambda x, y: torch.complex(x, y).conj().real - torch.conj_physical(
        torch.view_as_complex(torch.stack([x, y], -1))).imag,
}  # fmt: skip


def each(names, make):
    return {name: make(name) for name in names.split()}


def along(name, *args, **options):
    """A function along both axes."""

    def function(x):
        return [getattr(torch, name)(x, *args, dim=dim, **options) for dim in (0, -1)]

    return function


REDUCTIONS = {
    **each("""
        sum mean prod amax amin any all argmax argmin max min median std var logsumexp cumsum
        cumprod cummax cummin logcumsumexp sort softmax log_softmax nansum
    """, along),
    "deviations": lambda x: along("std_mean")(x.clamp(-9, 9)) + along("var_mean")(x.clamp(-9, 9)),
    "kept": lambda x: [along(name, keepdim=True)(x)
                       for name in ("sum", "mean", "amax", "argmax", "max", "median", "std")],
    "of all": lambda x: [
        f(x) for f in (torch.sum, torch.mean, torch.prod, torch.amax, torch.any, torch.argmax,
                       torch.argmin, torch.max, torch.min, torch.median, torch.std, torch.var)],
    "topk": along("topk", 2), "smallest": along("topk", 2, largest=False),
    "descending": along("sort", descending=True),
    # of ties torch picks any
    "kthvalue": lambda x: along("kthvalue", 2)(x)[1].values.detach(),
    "norms": lambda x: [torch.linalg.vector_norm(x, p, dim=d)
                        for d in (0, -1, None) for p in (1, 2, INF, -INF, 0, 3)],
    "distances": lambda x: [torch.cdist(x, x.flip(1), p=p) for p in (1.0, 2.0, 3.0)]
    + [torch.cdist(x.nan_to_num(0, 5, -5), x.flip(1).nan_to_num(0, 5, -5), p=INF)]
    + [torch.pdist(x.nan_to_num(0, 5, -5).T, p) for p in (1.0, 2.0, 3.0, INF)],
    "norms of complex numbers": lambda x: [
        torch.linalg.vector_norm(torch.complex(y, y.flip(1)), p, dim=-1)
        for y in [x.nan_to_num(0, 5, -5)] for p in (1, 2, INF, -INF, 0, 3)],
    "safe softmax": lambda x: torch._safe_softmax(x, -1),
    "sorted places": lambda x: [
        torch.searchsorted(torch.tensor([-1.0, 0, 1, 1, 2]).to(x), x, right=r)
        for r in (False, True)],
    "scattered": lambda x: [
        x.new_ones(2, 3).scatter(1, torch.tensor([[0, 1, 2], [2, 1, 0]]), x),
        x.new_ones(2, 3).scatter_add(1, torch.tensor([[0, 0, 1], [2, 2, 2]]), x),
        *(x.new_full((2, 3), 0.6).scatter_reduce(1, torch.tensor([[0, 0, 1], [2, 2, 2]]), x, how)
          for how in ("sum", "mean", "amax", "amin"))],
    "put": lambda x: [
        x.new_zeros(3).index_put((torch.tensor([0, 0, 1]),), x[0], accumulate=True),
        x.new_zeros(2, 3).index_add(1, torch.tensor([0, 0, 2]), x),
        x.put(torch.tensor([0, -1]), x[0, :2] * 2),
        x.put(torch.tensor([0, 0]), x[0, :2] * 2, accumulate=True),
        x.masked_scatter(torch.tensor([False, True, True]), x.flip(0) * 2),
        x.masked_scatter(x > 0, x * 2), x.masked_select(torch.tensor([[True], [False]])),
        *(x.new_full((2, 3), 0.6).index_reduce(1, torch.tensor([0, 0, 2]), x, how)
          for how in ("mean", "amax", "amin")),
        x.slice_scatter(x[:, :1] * 2, -1, 1, 2), torch.diagonal_scatter(x, x[0, :2] * 2, 1)],
    "picked": lambda x: [
        x[:, torch.tensor([-1, 0, -2])], x.gather(1, torch.tensor([[2, 2]])), x[:, -2:],
        x.index_select(-1, torch.tensor([2, 0, 0])), x.select(-1, -1),
        x.take(torch.tensor([-1, 3])), F.embedding(torch.tensor([1, 1, 0]), x, padding_idx=0),
        F.embedding_bag(
            torch.tensor([0, 1, 1, 0]), x.nan_to_num(0, 5, -5), torch.tensor([0, 3]), mode="max")],
    "moved": lambda x: [
        x.flip(-1), x.unfold(-1, 2, 1), x.diagonal(-1, -2, -1), x.tril(-1), x.repeat(2, 1, 2),
        x.roll((1, -1), (0, 1)), F.pad(x, (1, -1, 0, 1), value=3.0), torch.stack([x, x], -1),
        torch.cat([x, x], -1), *x.split([1, 2], -1), x[:1].squeeze(), x[:, None].expand(2, 4, -1),
        x.T[::2].reshape(-1), x.unsqueeze(-1)],
}  # fmt: skip
WINDOWS = {
    "max": lambda x: F.max_pool2d(x, 2), "overlapping": lambda x: F.max_pool2d(x, 3, 1, 1),
    "dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "ceiling": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive 3d": lambda x: F.adaptive_max_pool3d(x[None], (1, 3, 2)),
    "max 3d": lambda x: F.max_pool3d(x[None], (1, 2, 2)),
    "mean": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "mean 3d": lambda x: F.avg_pool3d(x[None], (1, 3, 3)),
    "adaptive mean": lambda x: (
        F.adaptive_avg_pool2d(x.nan_to_num(), (3, 4)),
        F.adaptive_avg_pool3d(x[None].nan_to_num(), (1, 3, 4))),
    "resized": lambda x: (
        F.interpolate(x[None, None].nan_to_num(), size=(1, 3, 9), mode="trilinear"),
        F.interpolate(x[None].nan_to_num(), size=(3, 9), mode="bilinear"),
        F.interpolate(x.nan_to_num(), size=9, mode="linear")),
}  # fmt: skip
IMAGES = {
    "ties": torch.arange(84.0).view(2, 7, 6) % 3,
    "generic": torch.sin(torch.arange(84.0) * 1.7).view(2, 7, 6),
    "constant": torch.zeros(2, 7, 6),
    "with NaN": torch.where(torch.arange(84) == 10, NAN, 1.0).view(2, 7, 6),
}
SQUARE = {
    "solved": lambda x: torch.linalg.solve(x @ x.T + torch.eye(2).to(x), x),
    "triangular": lambda x: torch.ops.aten.triangular_solve(x, (x @ x.T).tril())[0],
    "factors": lambda x: torch.ops.aten.cholesky(x @ x.T + torch.eye(2).to(x)),
    "inverse": lambda x: torch.cholesky_inverse(
        torch.linalg.cholesky(x @ x.T + torch.eye(2).to(x))),
    "products": lambda x: (
        torch.addmv(x[0], x.T @ x, x[1], beta=0.5, alpha=2.0),
        torch.addbmm(x, x[None], (x.T @ x)[None], alpha=0.5)),
    "qr": lambda x: torch.linalg.qr(x.T)[1].abs(),
    "transforms": lambda x: torch.view_as_real(torch.fft.fft(torch.fft.fft(x))),
    "of complex numbers": lambda x: [
        torch.view_as_real(y) for z in [torch.complex(x, x.flip(1))]
        for a in [torch.linalg.cholesky(z @ z.mH + torch.eye(2).to(z))]
        for y in (torch.cholesky_solve(z, a), torch.cholesky_inverse(a), torch.acosh(z))],
}  # fmt: skip


def all_tensors(function):
    return lambda *a: [v for v in tree_leaves(function(*a)) if isinstance(v, torch.Tensor)]


def in_torch(function, point):
    """Values, and the gradients of a weighted sum of those that have one."""
    leaves = [value.clone().requires_grad_() for value in point]
    values = function(*leaves)
    moving = [v for v in values if v.requires_grad]
    weights = [torch.linspace(0.5, 1.5, v.numel()).view(v.shape).to(v) for v in moving]
    gradients = torch.zeros(len(leaves))
    if moving:
        gradients = torch.autograd.grad(moving, leaves, weights, materialize_grads=True)
    return [v.detach() for v in values], [v.requires_grad for v in values], weights, gradients


def in_jax(translated, moving, weights):
    def both(*point):
        def parts(*point):
            values = translated(*point)
            return [v for v, m in zip(values, moving, strict=True) if m], values

        _, pull, values = jax.vjp(parts, *point, has_aux=True)
        return values, pull([jnp.asarray(w.numpy()) for w in weights])

    return both


def differences(functions, points, dtype, *, elementwise=False):
    """Where a function differs from torch, in words.

    :param points: name -> arguments, of equal shapes in all points.
    """
    compare = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    stacked = [torch.stack(p).numpy() for p in zip(*points.values(), strict=True)]
    expected, parts, said = {}, {}, []
    with jax.enable_x64(dtype == torch.float64):
        for name, function in functions.items():
            whole = all_tensors(function)
            expected[name] = [in_torch(whole, point) for point in points.values()]
            _, moving, weights, _ = expected[name][0]
            translated = to_jax(whole, *next(iter(points.values())))
            parts[name] = jax.vmap(in_jax(translated, moving, weights))
        run = jax.jit(
            lambda arrays: {name: part(*arrays) for name, part in parts.items()},
            compiler_options=test_arithmetic.QUICK,
        )
        found = jax.tree.map(np.asarray, run([jnp.asarray(s) for s in stacked]))
    for name, (i, where) in itertools.product(functions, enumerate(points)):
        values, _, _, gradients = expected[name][i]
        mine, slopes = jax.tree.map(lambda v, i=i: v[i], found[name])
        finite = np.isfinite([s[i] for s in stacked]).all(0 if elementwise else None)
        for theirs, own in zip(values, mine, strict=True):
            theirs = theirs.numpy()
            if own.shape != theirs.shape or (own.dtype != theirs.dtype and dtype == torch.float64):
                said.append(f"{name}: {own.dtype} {own.shape}, not {theirs.dtype} {theirs.shape}")
                continue
            said += where_other(name, where, theirs, own, np.isclose(theirs, own, **compare))
            axis = theirs.shape.index(len(finite)) if elementwise else None
            finite &= np.isfinite(theirs).all(tuple({*range(theirs.ndim)} - {axis}))
        for theirs, own in zip(gradients, slopes, strict=False):
            theirs = theirs.numpy(force=True)
            same = np.isclose(theirs, own, **compare) | ~(np.isfinite(theirs) | np.isfinite(own))
            said += where_other(f"gradient of {name}", where, theirs, own, same | ~finite)
    return said


def where_other(name, where, theirs, own, same):
    return [
        f"{name} at {where}, {place.tolist()}: {own[tuple(place)]}, not {theirs[tuple(place)]}"
        for place in np.argwhere(~same)
    ]


@test_arithmetic.DTYPES
def test_functions_of_a_number(dtype):
    grid = {"the grid": (torch.tensor(GRID, dtype=dtype),)}
    assert not differences(ONE, grid, dtype, elementwise=True)


@test_arithmetic.DTYPES
def test_functions_of_two_numbers(dtype):
    pairs = torch.tensor(list(itertools.product(GRID[:9] + GRID[-3:], repeat=2)), dtype=dtype)
    assert not differences(TWO, {"the grid": tuple(pairs.T)}, dtype, elementwise=True)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("functions", [REDUCTIONS, SQUARE])
def test_functions_of_a_matrix(functions):
    points = {name: (torch.tensor(m, dtype=torch.float64),) for name, m in MATRICES.items()}
    points = points if functions is REDUCTIONS else {"generic": points["generic"]}
    assert not differences(functions, points, torch.float64)


def test_functions_of_an_image():
    points = {name: (image.double(),) for name, image in IMAGES.items()}
    assert not differences(WINDOWS, points, torch.float64)


SMALL = {  # the arguments have no entries, or no axes
    **each("sum prod any relu mean median", lambda n: (getattr(torch, n), torch.empty(0))),
    **each("softmax logsumexp", lambda n: (partial(getattr(torch, n), dim=1), torch.empty(2, 0))),
    **each("cumsum cumprod cummax cummin logcumsumexp",
           lambda n: (partial(getattr(torch, n), dim=0), torch.tensor(1.5))),
    "product of none": (lambda x: x @ x.T, torch.empty(2, 0)),
    "with none": (lambda x: torch.cat([x, torch.ones(2)]), torch.empty(0)),
    "norm of none": (lambda x: x.norm(), torch.empty(0)),
    "one deviation": (lambda x: x.var(correction=0), torch.ones(1)),
}  # fmt: skip


def test_functions_of_few_numbers():
    said = [
        line
        for name, (function, point) in SMALL.items()
        for line in differences({name: function}, {"the point": (point,)}, torch.float32)
    ]
    assert not said


# Operators of other forms in the graphs of this release of torch, or compared on their own.
ABSENT = """
    _cholesky_solve_helper _embedding_bag alias conj_physical contiguous hardsigmoid imag real
    lift_fresh_copy native_dropout reshape
"""


@pytest.mark.slow
def test_the_table_is_covered():
    """Each operator is compared with torch, here or in ``test_arithmetic``."""
    torch.manual_seed(0)
    matrix, image = torch.tensor(MATRICES["generic"]), IMAGES["generic"]
    cases = [(f, (matrix,)) for f in (*ONE.values(), *REDUCTIONS.values(), *SQUARE.values())]
    cases += [(f, (matrix, matrix)) for f in TWO.values()]
    cases += [(f, (image,)) for f in WINDOWS.values()] + [(f, (x,)) for f, x in SMALL.values()]
    cases += [(f, (torch.randn(6),)) for f in test_arithmetic.OBSERVATIONS.values()]
    for make in test_arithmetic.MODULES.values():
        module, *inputs = make()
        function, size = test_arithmetic.density(module.eval(), *inputs)
        cases.append((function, (torch.randn(size),)))
    compared = set().union(*(to_jax(all_tensors(f), *a).operators for f, a in cases))
    compared |= {op.overloadpacket for op in compared if hasattr(op, "overloadpacket")}
    rest = {str(op).removeprefix("aten.") for op in set(OPERATORS) - compared}
    assert rest <= set(ABSENT.split())
