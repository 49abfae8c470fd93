"""ATen operators in JAX: pooling and resizing."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from pyro_bdl.tracing.jax.ops.registry import EXACT, OPERATORS, aten, each, register


def _windows(x, n, kernel, stride, padding, dilation, ceil_mode):
    """Window arguments of ``lax.reduce_window`` over the last ``n`` dimensions."""
    kernel, padding, dilation = (each(v, n) for v in (kernel, padding, dilation))
    stride = each(stride, n) if stride or stride == 0 else kernel
    pads = []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        count = -(-(size + 2 * p - reach) // s) if ceil_mode else (size + 2 * p - reach) // s
        if ceil_mode and count * s >= size + p:  # a window must start inside the input
            count -= 1
        pads.append((p, max(p, count * s + reach - size - p)))
    lead = x.ndim - n
    return (
        (1,) * lead + tuple(kernel),
        (1,) * lead + tuple(stride),
        [(0, 0)] * lead + pads,
        None,
        (1,) * lead + tuple(dilation),
    )


def _max_pool(n):
    def pool(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
        window = _windows(x, n, kernel, stride, padding, dilation, ceil_mode)
        if any(step > 1 for step in window[-1]):
            return _dilated_max_pool(x, *window), None
        return lax.reduce_window(x, -jnp.inf, lax.max, *window), None

    return pool


def _dilated_max_pool(x, kernel, stride, pads, _, dilation):
    """Max pooling with dilation, for which ``lax.reduce_window`` has no gradient.

    As in torch, the first largest element gets the gradient.
    """
    padded = jnp.pad(x, pads, constant_values=-jnp.inf)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    ends = [size - r for size, r in zip(padded.shape, reach, strict=True)]
    offsets = itertools.product(*(range(0, r + 1, d) for r, d in zip(reach, dilation, strict=True)))
    parts = [
        lax.slice(padded, offset, [o + e for o, e in zip(offset, ends, strict=True)], stride)
        for offset in offsets
    ]
    stacked = jnp.stack(parts)
    first = jnp.argmax(stacked, 0, keepdims=True)
    return jnp.take_along_axis(stacked, first, 0)[0]


def _avg_pool(n):
    def pool(
        x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor=None
    ):
        window = _windows(x, n, kernel, stride, padding, 1, ceil_mode)
        total = lax.reduce_window(x, 0.0, lax.add, *window)
        if divisor is None:
            sizes, kernels, strides = x.shape[-n:], window[0][-n:], window[1][-n:]
            settings = zip(sizes, kernels, strides, each(padding, n), total.shape[-n:], strict=True)
            counts = [_counts(*setting, count_include_pad) for setting in settings]
            divisor = math.prod(np.ix_(*counts))
        return total / jnp.asarray(divisor, x.dtype)

    return pool


def _counts(size, kernel, stride, padding, windows, include_pad):
    """The number of elements in each window of one dimension."""
    start = np.arange(windows) * stride - padding
    low, high = (-padding, size + padding) if include_pad else (0, size)
    return np.minimum(start + kernel, high) - np.maximum(start, low)


for _n in (2, 3):
    OPERATORS[getattr(aten, f"max_pool{_n}d_with_indices")] = _max_pool(_n)
    OPERATORS[getattr(aten, f"avg_pool{_n}d")] = _avg_pool(_n)


def _parts(size, count):
    """The starts and ends of ``count`` windows of an adaptive pooling over ``size`` elements."""
    return [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


@register(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d)
def _adaptive_avg_pool(x, output_size):
    for axis, count in enumerate(output_size, x.ndim - len(output_size)):
        parts = _parts(x.shape[axis], count)
        matrix = np.zeros((count, x.shape[axis]))
        for i, (start, end) in enumerate(parts):
            matrix[i, start:end] = 1 / (end - start)
        x = _along(matrix, x, axis)
    return x


@register(aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def _adaptive_max_pool(x, output_size):
    # As in torch, the first largest element of a window gets the gradient: that of the last axis
    # first.
    for axis, count in reversed([*enumerate(output_size, x.ndim - len(output_size))]):
        parts = _parts(x.shape[axis], count)
        slices = [lax.slice_in_dim(x, start, end, axis=axis) for start, end in parts]
        x = jnp.concatenate([OPERATORS[aten.max.dim](s, axis, True)[0] for s in slices], axis)
    return x, None


def _along(matrix, x, axis):
    """Multiply ``x`` along one axis by a constant matrix."""
    y = jnp.tensordot(jnp.asarray(matrix, x.dtype), x, (1, axis), precision=EXACT)
    return jnp.moveaxis(y, 0, axis)


@register(aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d)
def _upsample_linear(x, output_size, align_corners, *scales):
    for i, (axis, count) in enumerate(enumerate(output_size, x.ndim - len(output_size))):
        size = x.shape[axis]
        scale = scales[i] if i < len(scales) and scales[i] else count / size
        if align_corners:
            source = np.arange(count) * ((size - 1) / max(count - 1, 1))
        else:
            source = np.maximum((np.arange(count) + 0.5) / scale - 0.5, 0)
        distance = np.abs(np.minimum(source, size - 1)[:, None] - np.arange(size))
        x = _along(np.maximum(1 - distance, 0), x, axis)
    return x
