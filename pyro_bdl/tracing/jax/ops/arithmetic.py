"""ATen operators in JAX: arithmetic, comparisons, creation and reductions."""

import builtins
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
    exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
    atanh floor ceil trunc sign signbit isnan isinf atan2 hypot maximum minimum
    fmod remainder copysign logical_not logical_and logical_or logical_xor bitwise_not
    bitwise_and bitwise_or bitwise_xor
"""
table({name: getattr(jnp, name) for name in SAME_NAME.split()})

table({
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal,
    "neg": jnp.negative, "reciprocal": lambda x: 1.0 / x, "rsqrt": lax.rsqrt,
    "mul": jnp.multiply, "sinc": jnp.sinc,
    "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid,
    "erf": special.erf, "erfc": special.erfc, "erfinv": special.erfinv,
    "lgamma": special.gammaln, "digamma": special.digamma,
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


@register(aten.pow)
def _pow(x, y):
    if isinstance(y, int | float) and y == int(y) and builtins.abs(y) <= 64:
        return lax.integer_pow(x, int(y))
    return jnp.power(x, y)


@register(aten.round)
def _round(x, decimals=0):
    return jnp.round(x, decimals)


@register(aten.polygamma)
def _polygamma(n, x):
    return special.digamma(x) if n == 0 else special.polygamma(n, x)


@register(aten.special_log_ndtr)
def _log_ndtr(x):
    # JAX's function loses digits in the upper tail.
    upper = x > 1
    tail = special.ndtr(-jnp.where(upper, x, 1))
    return jnp.where(upper, jnp.log1p(-tail), special.log_ndtr(jnp.where(upper, 1, x)))


@register(aten.special_erfcx)
def _erfcx(x):
    above = jnp.where(x > 0, x, 0)
    below = jnp.where(x > 0, 0, x)
    scaled = 2 * jnp.exp(special.log_ndtr(-np.sqrt(2.0) * above) + above**2)
    return jnp.where(x > 0, scaled, jnp.exp(below**2) * special.erfc(below))


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
    # At the bounds jnp.clip halves the gradient; torch does not.
    if min is not None:
        x = jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


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
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


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


@register(aten.var_mean.correction)
def _var_mean(x, dim=None, *, keepdim=False, **options):
    mean = jnp.mean(x, axes(dim), keepdims=keepdim)
    return _var(x, dim, keepdim=keepdim, **options), mean


@register(aten.linalg_vector_norm)
def _vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = x if dtype is None else cast(x, dtype)
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
