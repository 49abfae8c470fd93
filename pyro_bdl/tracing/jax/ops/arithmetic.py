"""ATen operators in JAX: arithmetic, comparisons, creation and reductions."""

import builtins
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from pyro_bdl.tracing.jax.ops.registry import OPERATORS, aten, axes, cast, register, table

# Elementwise ------------------------------------------------------------------------------------

SAME_NAME = """
    exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh atanh
    floor ceil trunc signbit isnan isinf maximum minimum fmod remainder logical_not
    logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor
"""
table({name: getattr(jnp, name) for name in SAME_NAME.split()})

table({
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal,
    "neg": jnp.negative, "reciprocal": lambda x: 1.0 / x, "rsqrt": lax.rsqrt,
    "mul": jnp.multiply, "sinc": jnp.sinc,
    "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid,
    "erf": special.erf, "erfc": special.erfc, "erfinv": special.erfinv,
    "lgamma": special.gammaln,
    "igamma": special.gammainc, "igammac": special.gammaincc,
    "i0": lambda x: jnp.exp(_abs(x)) * special.i0e(x),
    "special_i0e": special.i0e, "special_i1": special.i1,
    "special_i1e": special.i1e, "special_ndtri": special.ndtri,
    "special_zeta": special.zeta, "detach": lax.stop_gradient,
})  # fmt: skip


@register(aten.clone, aten.alias, aten.lift_fresh_copy, aten.contiguous, aten._to_copy)
def _same(x, **_):
    return jnp.asarray(x)


@register(aten.abs)
def _abs(x):
    # torch's subgradient at 0 is 0, not 1.
    return jnp.where(x == 0, 0, jnp.abs(x))


@register(aten.acosh)
def _acosh(x):
    if jnp.iscomplexobj(x):  # JAX's derivative is on the other side of the branch cut
        return jnp.log(x + jnp.sqrt(x + 1) * jnp.sqrt(x - 1))
    return jnp.arccosh(x)


@register(aten.add)
def _add(x, y, alpha=1):
    return jnp.add(x, y if alpha == 1 else alpha * y)


@register(aten.sub)
def _sub(x, y, alpha=1):
    return jnp.subtract(x, y if alpha == 1 else alpha * y)


@register(aten.div)
def _div(x, y, rounding_mode=None):
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    quotient = jnp.true_divide(x, y)
    return jnp.trunc(quotient) if rounding_mode == "trunc" else quotient


@register(aten.sign)
def _sign(x):
    return jnp.where(x != x, 0, jnp.sign(x))  # torch's of NaN is 0


def _with_slopes(value: Callable, *slopes: Callable) -> Callable:
    """A function of two arrays with the derivatives of torch's formulas, at singular points too.

    :param slopes: for each array (x, y, value) -> the derivative in it.
    """
    function = jax.custom_jvp(value)
    function.defjvps(*(
        lambda tangent, result, x, y, slope=slope: slope(x, y, result) * tangent
        for slope in slopes
    ))  # fmt: skip

    def call(x, y):
        dtype = jnp.result_type(x, y)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return value(x, y)
        return function(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))

    return call


def _zero_if(condition, value):
    return jnp.where(condition, 0, value)


def _over_square(z, x, y):
    return _zero_if((x == 0) & (y == 0), z / (x * x + y * y))


_power = _with_slopes(
    jnp.power,
    lambda x, y, _: _zero_if(y == 0, y * jnp.power(x, jnp.where(y == 0, 1, y) - 1)),
    lambda x, y, value: _zero_if((x == 0) & (y >= 0), value * jnp.log(x)),
)
table({
    "hypot": _with_slopes(
        jnp.hypot, lambda x, y, value: x / value, lambda x, y, value: y / value
    ),
    "atan2": _with_slopes(
        jnp.arctan2, lambda x, y, _: _over_square(y, x, y), lambda x, y, _: _over_square(-x, x, y)
    ),
    "copysign": _with_slopes(
        jnp.copysign,
        lambda x, y, value: _zero_if(x == 0, value / x), lambda x, *_: jnp.zeros_like(x),
    ),
    "xlogy": _with_slopes(
        special.xlogy,
        lambda x, y, _: _zero_if((x == 0) & (y <= 0), jnp.log(y)), lambda x, y, _: x / y,
    ),
    "special_xlog1py": _with_slopes(
        special.xlog1py,
        lambda x, y, _: _zero_if((x == 0) & (y <= -1), jnp.log1p(y)), lambda x, y, _: x / (1 + y),
    ),
})  # fmt: skip


@register(aten.pow)
def _pow(x, y):
    if isinstance(y, int | float):
        if y == int(y) and builtins.abs(y) <= 64:
            return lax.integer_pow(x, int(y))
        if builtins.abs(y) == 0.5:
            return jnp.sqrt(x) if y > 0 else lax.rsqrt(x)
    return _power(x, y)


@register(aten.round)
def _round(x, decimals=0):
    return jnp.round(x, decimals)


@register(aten.polygamma)
def _polygamma(n, x):
    if n == 0:
        return _digamma(x)
    # JAX's zeta function is for positive numbers; on the others by reflection:
    # psi_n(x) = (-1)^n psi_n(1 - x) - d^n/dx^n pi cot(pi x).
    negative = x < 0
    slope: Callable = lambda x: np.pi * jnp.cos(np.pi * x) / jnp.sin(np.pi * x)  # noqa: E731
    for _ in range(n):
        slope = functools.partial(_slope, slope)
    up = jnp.where(negative, 1 - x, x)
    value = (-1.0) ** (n + 1) * math.factorial(n) * special.zeta(n + 1.0, up)
    below = jnp.where(negative, x, -0.5)
    return jnp.where(negative, (-1.0) ** n * value - slope(below), value)


def _slope(function, x):
    return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@jax.custom_jvp
def _digamma(x):
    return jnp.where(x == 0, -1 / x, special.digamma(jnp.where(x == 0, 1, x)))


_digamma.defjvps(lambda tangent, _, x: _polygamma(1, x) * tangent)
register(aten.digamma)(_digamma)


@register(aten.special_log_ndtr)
def _log_ndtr(x):
    # JAX's function loses digits in the upper tail.
    upper = x > 1
    tail = special.ndtr(-jnp.where(upper, x, 1))
    return jnp.where(upper, jnp.log1p(-tail), special.log_ndtr(jnp.where(upper, 1, x)))


@register(aten.special_erfcx)
def _erfcx(x):
    # exp(x^2) erfc(x) up to 2, where the factors have their digits; above Laplace's continued
    # fraction x + (1/2) / (x + 1 / (x + (3/2) / ...)) from its 50th term inward.
    small, large = jnp.where(x > 2, 2, x), jnp.where(x > 2, x, 2)
    terms = jnp.arange(50, 0, -1, dtype=x.dtype) / 2
    fraction, _ = lax.scan(lambda f, term: (large + term / f, None), large, terms)
    below = jnp.exp(small * small) * special.erfc(small)
    return jnp.where(x > 2, 1 / (np.sqrt(np.pi) * fraction), below)


@register(aten.softplus)
def _softplus(x, beta=1, threshold=20):
    linear = x * beta > threshold
    return jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, x) * beta)) / beta)


@register(aten.elu)
def _elu(x, alpha=1, scale=1, input_scale=1):
    negative = alpha * scale * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return jnp.where(x > 0, scale * x, negative)


@register(aten.celu)
def _celu(x, alpha=1):
    return _elu(x, alpha, 1, 1 / alpha)


@register(aten.clamp)
def _clamp(x, min=None, max=None):
    # At the bounds jnp.clip halves the gradient; torch does not, and has none between equal ones.
    if min is not None and max is not None:
        min = jnp.where(min == max, lax.stop_gradient(min), min)
    if min is not None:
        x = jnp.where((x < min) | jnp.isnan(min), min, x)
    return x if max is None else jnp.where((x > max) | jnp.isnan(max), max, x)


@register(aten.hardtanh)
def _hardtanh(x, min_val=-1, max_val=1):
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


@register(aten.fmax)
def _fmax(x, y):
    # At ties torch gives the first one all of the gradient.
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@register(aten.fmin)
def _fmin(x, y):
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@register(aten.hardswish)
def _hardswish(x):
    inside = jnp.where(jnp.abs(x) >= 3, 0, x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, inside * (inside + 3) / 6))


@register(aten.hardsigmoid)
def _hardsigmoid(x):
    return _hardtanh(x + 3, 0, 6) / 6


@register(aten.where)
def _where(condition, x, y):
    return jnp.where(condition, x, y)


@register(aten.copy)
def _copy(x, source, non_blocking=False):
    return jnp.broadcast_to(source, x.shape)


# Creation ---------------------------------------------------------------------------------------


@register(aten.full_like)
def _full_like(x, value, **_):
    return jnp.full(x.shape, value)


# Reductions and scans ---------------------------------------------------------------------------


def _reduction(function: Callable) -> Callable:
    def reduce(x, dim=None, keepdim=False, *, dtype=None):
        x = x if dtype is None else cast(x, dtype)
        return function(x, axis=axes(dim), keepdims=keepdim)

    return reduce


table({
    "sum": _reduction(jnp.sum), "mean": _reduction(jnp.mean), "prod": _reduction(jnp.prod),
    "amax": _reduction(jnp.max), "amin": _reduction(jnp.min), "any": _reduction(jnp.any),
    "argmax": _reduction(jnp.argmax), "argmin": _reduction(jnp.argmin),
    "logsumexp": _reduction(jax.nn.logsumexp),
})  # fmt: skip
OPERATORS[aten.max.default] = OPERATORS[aten.amax]
OPERATORS[aten.min.default] = OPERATORS[aten.amin]


@register(aten.var.correction)
def _var(x, dim=None, *, correction=1, keepdim=False):
    return jnp.var(x, axes(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


@register(aten.std.correction)
def _std(x, dim=None, **options):
    # torch's gradient where all are equal is 0; that of the root is not finite.
    variance = _var(x, dim, **options)
    return jnp.where(variance == 0, 0, jnp.sqrt(jnp.where(variance == 0, 1, variance)))


def _with_mean(deviation: Callable) -> Callable:
    def both(x, dim=None, *, keepdim=False, **options):
        mean = jnp.mean(x, axes(dim), keepdims=keepdim)
        return deviation(x, dim, keepdim=keepdim, **options), mean

    return both


OPERATORS[aten.var_mean.correction] = _with_mean(_var)
OPERATORS[aten.std_mean.correction] = _with_mean(_std)


@register(aten.linalg_vector_norm)
def _vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else cast(x, dtype)
    x = _abs(x) if jnp.iscomplexobj(x) else x
    options: dict[str, Any] = {"axis": axes(dim), "keepdims": keepdim}
    if np.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(_abs(x), **options)
    if ord == 0:
        return jnp.sum(x != 0, **options)
    if ord == 1:
        return jnp.sum(_abs(x), **options)
    total = jnp.sum(x * x if ord == 2 else _abs(x) ** ord, **options)
    # torch's subgradient at the origin is 0; that of the square root would be NaN.
    root = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0, jnp.sqrt(root) if ord == 2 else root ** (1 / ord))


def _scan(function: Callable) -> Callable:
    def scan(x, dim, *, dtype=None):
        x = x if dtype is None else cast(x, dtype)
        return function(jnp.atleast_1d(x), dim).reshape(x.shape)

    return scan


table({"cumsum": _scan(jnp.cumsum), "cumprod": _scan(jnp.cumprod)})
OPERATORS[aten.logcumsumexp] = _scan(lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim))
