"""ATen operators in JAX: products, convolutions, pooling, normalisation, linear algebra."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import linalg

from pyro_bdl.mcmc.aten_ops import OPERATORS, aten, register

# torch multiplies float32 in float32; JAX on an accelerator would round to TF32.
EXACT = lax.Precision.HIGHEST


# Products ---------------------------------------------------------------------------------------


@register(aten.mm, aten.bmm, aten.mv, aten.dot)
def _matmul(x, y):
    return jnp.matmul(x, y, precision=EXACT)


@register(aten.addmm, aten.baddbmm, aten.addmv)
def _addmm(bias, x, y, *, beta=1, alpha=1):
    product = _matmul(x, y)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


@register(aten._trilinear)
def _trilinear(x, y, z, expand1, expand2, expand3, sumdim, unroll_dim=1):
    x, y, z = (jnp.expand_dims(t, e) for t, e in ((x, expand1), (y, expand2), (z, expand3)))
    return jnp.sum(x * y * z, tuple(sumdim))


@register(aten._cdist_forward)
def _cdist(x, y, p, mode):
    return OPERATORS[aten.linalg_vector_norm](x[..., :, None, :] - y[..., None, :, :], p, [-1])


# Embedding, softmax, dropout --------------------------------------------------------------------


@register(aten.embedding)
def _embedding(weight, index, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    if padding_idx >= 0:
        frozen = lax.stop_gradient(weight[padding_idx])
        weight = weight.at[padding_idx].set(frozen)
    return weight.at[index].get(mode="promise_in_bounds")


@register(aten._softmax)
def _softmax(x, dim, half_to_float):
    return jax.nn.softmax(x, dim)


@register(aten._log_softmax)
def _log_softmax(x, dim, half_to_float):
    return jax.nn.log_softmax(x, dim)


@register(aten.native_dropout)
def _dropout(x, p, train):
    if train and p:
        raise NotImplementedError("dropout in train mode")
    return x, jnp.ones(x.shape, bool)


@register(aten.rrelu_with_noise_functional)
def _rrelu(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    if training:
        raise NotImplementedError("a randomised ReLU in train mode")
    return jnp.where(x > 0, x, 0.5 * (lower + upper) * x), noise


# Convolution ------------------------------------------------------------------------------------


def _each(value, n):
    """A per-dimension setting of torch (one number may stand for all) as ``n`` numbers."""
    value = [value] if isinstance(value, int) else list(value)
    return value * n if len(value) == 1 else value


@register(aten.convolution)
def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = weight.ndim - 2
    unbatched = x.ndim == n + 1
    x = x[None] if unbatched else x
    stride, padding, dilation, extra = (
        _each(s, n) for s in (stride, padding, dilation, output_padding)
    )
    if transposed:
        # The adjoint: a convolution of the dilated input with the flipped, transposed kernel.
        inputs, outputs, *size = weight.shape
        weight = weight.reshape(groups, inputs // groups, outputs, *size)
        weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *size)
        weight = jnp.flip(weight, range(2, n + 2))
        reach = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
        window = {"window_strides": [1] * n, "lhs_dilation": stride}
    else:
        pads = [(p, p) for p in padding]
        window = {"window_strides": stride}
    y = lax.conv_general_dilated(
        x, weight, padding=pads, rhs_dilation=dilation, feature_group_count=groups,
        precision=EXACT, **window,
    )  # fmt: skip
    if bias is not None:
        y = y + bias.reshape(-1, *[1] * n)
    return y[0] if unbatched else y


# Pooling and resizing ---------------------------------------------------------------------------


def _windows(x, n, kernel, stride, padding, dilation, ceil_mode):
    """Window arguments of ``lax.reduce_window`` over the last ``n`` dimensions."""
    kernel, padding, dilation = (_each(v, n) for v in (kernel, padding, dilation))
    stride = _each(stride, n) if stride or stride == 0 else kernel
    pads = []
    for size, k, s, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        count = -(-(size + 2 * p - reach) // s) if ceil_mode else (size + 2 * p - reach) // s
        if ceil_mode and count * s >= size + p:  # a window must start inside
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
        return lax.reduce_window(x, -jnp.inf, lax.max, *window), None

    return pool


def _avg_pool(n):
    def pool(
        x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor=None
    ):
        window = _windows(x, n, kernel, stride, padding, 1, ceil_mode)
        total = lax.reduce_window(x, 0.0, lax.add, *window)
        if divisor is None:
            sizes, kernels, strides = x.shape[-n:], window[0][-n:], window[1][-n:]
            settings = zip(
                sizes, kernels, strides, _each(padding, n), total.shape[-n:], strict=True
            )
            counts = [_counts(*setting, count_include_pad) for setting in settings]
            divisor = math.prod(np.ix_(*counts))
        return total / jnp.asarray(divisor, x.dtype)

    return pool


def _counts(size, kernel, stride, padding, windows, include_pad):
    """How many elements each window of one dimension averages."""
    start = np.arange(windows) * stride - padding
    low, high = (-padding, size + padding) if include_pad else (0, size)
    return np.minimum(start + kernel, high) - np.maximum(start, low)


for _n in (2, 3):
    OPERATORS[getattr(aten, f"max_pool{_n}d_with_indices")] = _max_pool(_n)
    OPERATORS[getattr(aten, f"avg_pool{_n}d")] = _avg_pool(_n)


def _parts(size, count):
    """Where the windows of an adaptive pooling of ``size`` elements to ``count`` begin and end."""
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
    for axis, count in enumerate(output_size, x.ndim - len(output_size)):
        parts = _parts(x.shape[axis], count)
        slices = [lax.slice_in_dim(x, start, end, axis=axis) for start, end in parts]
        x = jnp.concatenate([jnp.max(s, axis, keepdims=True) for s in slices], axis)
    return x, None


def _along(matrix, x, axis):
    """``x`` multiplied along one axis by a constant matrix."""
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


# Normalisation ----------------------------------------------------------------------------------


def _standardise(x, mean, var, eps):
    rstd = lax.rsqrt(var + eps)
    return (x - mean) * rstd, rstd


def _moments(x, axis):
    return jnp.mean(x, axis, keepdims=True), jnp.var(x, axis, keepdims=True)


def _affine(x, weight, bias, shape):
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


@register(aten.native_layer_norm)
def _layer_norm(x, shape, weight, bias, eps):
    mean, var = _moments(x, tuple(range(-len(shape), 0)))
    y, rstd = _standardise(x, mean, var, eps)
    return _affine(y, weight, bias, shape), mean, rstd


@register(aten.native_group_norm)
def _group_norm(x, weight, bias, N, C, HxW, group, eps):
    mean, var = _moments(x.reshape(N, group, -1), -1)
    y, rstd = _standardise(x.reshape(N, group, -1), mean, var, eps)
    shape = (C,) + (1,) * (x.ndim - 2)
    return _affine(y.reshape(x.shape), weight, bias, shape), mean[..., 0], rstd[..., 0]


def _batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    shape = (-1,) + (1,) * (x.ndim - 2)
    if training:
        mean, var = _moments(x, (0, *range(2, x.ndim)))
        y, rstd = _standardise(x, mean, var, eps)
        saved = mean.ravel(), rstd.ravel()
    else:
        y, _ = _standardise(x, mean.reshape(shape), var.reshape(shape), eps)
        saved = jnp.zeros(0, x.dtype), jnp.zeros(0, x.dtype)
    return _affine(y, weight, bias, shape), *saved


@register(aten._native_batch_norm_legit_no_training)
def _batch_norm_eval(x, weight, bias, mean, var, momentum, eps):
    return _batch_norm(x, weight, bias, mean, var, False, momentum, eps)


@register(aten._native_batch_norm_legit.no_stats)
def _batch_norm_stateless(x, weight, bias, training, momentum, eps):
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)


OPERATORS[aten.native_batch_norm] = _batch_norm
OPERATORS[aten._native_batch_norm_legit.default] = _batch_norm


# Linear algebra ---------------------------------------------------------------------------------


@register(aten.linalg_cholesky_ex)
def _cholesky_ex(x, *, upper=False, check_errors=False):
    return jnp.linalg.cholesky(x, upper=upper), jnp.zeros(x.shape[:-2], jnp.int32)


def _cholesky(x, upper=False):
    return jnp.linalg.cholesky(x, upper=upper)


if hasattr(aten, "cholesky"):  # gone since torch 2.15
    register(aten.cholesky)(_cholesky)


@register(aten.linalg_solve_triangular)
def _solve_triangular(a, b, *, upper, left=True, unitriangular=False):
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@register(aten.triangular_solve)
def _old_triangular_solve(b, a, upper=True, transpose=False, unitriangular=False):
    a, upper = (jnp.swapaxes(a, -1, -2), not upper) if transpose else (a, upper)
    return _solve_triangular(a, b, upper=upper, unitriangular=unitriangular), a


@register(aten.cholesky_solve, aten._cholesky_solve_helper)
def _cholesky_solve(b, factor, upper=False):
    adjoint = jnp.swapaxes(factor, -1, -2)
    lower, higher = (adjoint, factor) if upper else (factor, adjoint)
    return _solve_triangular(higher, _solve_triangular(lower, b, upper=False), upper=True)


@register(aten.cholesky_inverse)
def _cholesky_inverse(factor, upper=False):
    return _cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@register(aten.linalg_inv_ex)
def _inv_ex(x, *, check_errors=False):
    return jnp.linalg.inv(x), jnp.zeros(x.shape[:-2], jnp.int32)


@register(aten._linalg_solve_ex)
def _solve_ex(a, b, *, left=True, check_errors=False):
    if not left:
        a, b = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
    vector = b.ndim == 1 or b.shape == a.shape[:-1]
    x = jnp.linalg.solve(a, b[..., None] if vector else b)
    x = x[..., 0] if vector else x
    x = x if left else jnp.swapaxes(x, -1, -2)
    return x, None, None, jnp.zeros(a.shape[:-2], jnp.int32)


@register(aten._linalg_det)
def _det(x):
    return jnp.linalg.det(x), None, None


@register(aten._linalg_slogdet)
def _slogdet(x):
    return *jnp.linalg.slogdet(x), None, None


@register(aten._linalg_eigh)
def _eigh(x, UPLO="L", compute_v=True):
    return jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False)


@register(aten._linalg_svd)
def _svd(x, full_matrices=False, compute_uv=True, *, driver=None):
    if compute_uv:
        return jnp.linalg.svd(x, full_matrices=full_matrices)
    return None, jnp.linalg.svd(x, compute_uv=False), None


@register(aten.linalg_qr)
def _qr(x, mode="reduced"):
    return jnp.linalg.qr(x, mode)


@register(aten.linalg_matrix_exp)
def _matrix_exp(x):
    return linalg.expm(x)
