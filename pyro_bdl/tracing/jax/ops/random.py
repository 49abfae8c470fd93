"""Operators that draw random numbers: functions of a key, the result's shape and dtype, and torch's
arguments.

The numbers have torch's distributions and are others than torch's. Draws that torch differentiates
(normal, Gamma) have the same gradients here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pyro_bdl.tracing.jax.ops.registry import RANDOM, aten

Key = Any
Spec = Any  # jax.ShapeDtypeStruct of the result


def draws(*operators: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function for overloads or packets."""

    def enter(function: Callable) -> Callable:
        RANDOM.update(dict.fromkeys(operators, function))
        return function

    return enter


@draws(aten.randn, aten.randn_like)
def standard_normal(key: Key, spec: Spec, *_: Any, **__: Any) -> jax.Array:
    return jax.random.normal(key, spec.shape, spec.dtype)


@draws(aten.normal)
def normal(key: Key, spec: Spec, mean: Any, std: Any = 1.0, *_: Any, **__: Any) -> jax.Array:
    return mean + std * jax.random.normal(key, spec.shape, spec.dtype)


@draws(aten.normal_functional)
def normal_like(
    key: Key, spec: Spec, like: Any, mean: float = 0.0, std: float = 1.0, **_: Any
) -> jax.Array:
    return mean + std * jax.random.normal(key, spec.shape, spec.dtype)


@draws(aten.rand, aten.rand_like)
def standard_uniform(key: Key, spec: Spec, *_: Any, **__: Any) -> jax.Array:
    return jax.random.uniform(key, spec.shape, spec.dtype)


@draws(aten.uniform)
def uniform(
    key: Key, spec: Spec, like: Any, start: float = 0.0, stop: float = 1.0, **_: Any
) -> jax.Array:
    return jax.random.uniform(key, spec.shape, spec.dtype, start, stop)


@draws(aten.bernoulli.default)
def bernoulli(key: Key, spec: Spec, p: Any, **_: Any) -> jax.Array:
    return jax.random.bernoulli(key, p, spec.shape)


@draws(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_like(key: Key, spec: Spec, like: Any, p: Any = 0.5, **_: Any) -> jax.Array:
    return jax.random.bernoulli(key, p, spec.shape)


@draws(aten.native_dropout)
def native_dropout(key: Key, spec: Spec, x: Any, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    mask = jax.random.bernoulli(key, 1.0 - p, x.shape)
    return jnp.where(mask, x / (1.0 - p) if p < 1 else 0.0, 0.0), mask


@draws(aten.randint)
def randint(key: Key, spec: Spec, *args: Any, **_: Any) -> jax.Array:
    low, high = args[:2] if isinstance(args[1], int) else (0, args[0])
    return jax.random.randint(key, spec.shape, low, high)


@draws(aten.randperm)
def randperm(key: Key, spec: Spec, n: int, **_: Any) -> jax.Array:
    return jax.random.permutation(key, n)


@draws(aten.exponential)
def exponential(key: Key, spec: Spec, like: Any, rate: float = 1.0, **_: Any) -> jax.Array:
    return jax.random.exponential(key, spec.shape, spec.dtype) / rate


@draws(aten._standard_gamma)
def standard_gamma(key: Key, spec: Spec, concentration: Any, **_: Any) -> jax.Array:
    return jax.random.gamma(key, concentration, spec.shape, spec.dtype)


@draws(aten.poisson)
def poisson(key: Key, spec: Spec, rate: Any, **_: Any) -> jax.Array:
    return jax.random.poisson(key, rate, spec.shape)


@draws(aten.multinomial)
def multinomial(
    key: Key, spec: Spec, weights: Any, count: int, replacement: bool = False, **_: Any
) -> jax.Array:
    logits = jnp.log(weights)
    if replacement or count == 1:
        numbers = jax.random.categorical(key, logits, shape=(count, *weights.shape[:-1]))
        return jnp.moveaxis(numbers, 0, -1)
    scores = logits + jax.random.gumbel(key, weights.shape, weights.dtype)
    return jnp.argsort(-scores, axis=-1)[..., :count]  # the largest are a draw without replacement
