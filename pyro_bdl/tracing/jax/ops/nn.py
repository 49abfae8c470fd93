"""ATen operators in JAX: products, convolutions, normalization, linear algebra."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import linalg

from pyro_bdl.tracing.jax.ops.registry import EXACT, OPERATORS, aten, each, register
from pyro_bdl.tracing.jax.ops.shapes import shared_gradient

# Products ---------------------------------------------------------------------------------------


@register(aten.mm, aten.bmm)
def _matmul(x, y):
    return jnp.matmul(x, y, precision=EXACT)


# Of a narrow layer: limits of the shorter and the longer side of its weights.
_SHORT_SIDE = 64
_LONG_SIDE = 128


def _narrow(bias, x, y) -> bool:
    """Return whether this is a narrow layer on many rows, on a CPU."""
    return (
        jax.default_backend() == "cpu"
        and x.ndim == y.ndim == 2
        and bias.ndim == 1
        and 1 < min(y.shape) <= _SHORT_SIDE
        and max(y.shape) <= _LONG_SIDE
        and len(x) >= 4 * min(y.shape)
    )


@register(aten.addmm, aten.addmv)
def _addmm(bias, x, y, *, beta=1, alpha=1):
    if alpha == beta == 1 and _narrow(bias, x, y):
        # With the rows of one unit next to each other a CPU is up to 3 times as fast. The barriers
        # keep XLA from turning the product around again.
        columns = _matmul(y.T, lax.optimization_barrier(x.T)) + bias[:, None]
        return lax.optimization_barrier(columns).T
    product = _matmul(x, y)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


@register(aten.addbmm)
def _addbmm(bias, x, y, *, beta=1, alpha=1):
    return beta * bias + alpha * _matmul(x, y).sum(0)


@register(aten._trilinear)
def _trilinear(x, y, z, expand1, expand2, expand3, sumdim, unroll_dim=1):
    x, y, z = (jnp.expand_dims(t, e) for t, e in ((x, expand1), (y, expand2), (z, expand3)))
    return jnp.sum(x * y * z, tuple(sumdim))


@register(aten._cdist_forward)
def _cdist(x, y, p, mode):
    difference = x[..., :, None, :] - y[..., None, :, :]
    if p == jnp.inf:  # each of several largest coordinates has all of the gradient
        sizes = OPERATORS[aten.abs](difference)
        largest = jnp.max(sizes, -1, keepdims=True)
        return shared_gradient(largest[..., 0], sizes, sizes == largest, -1, share=False)
    return OPERATORS[aten.linalg_vector_norm](difference, p, [-1])


@register(aten._pdist_forward)
def _pdist(x, p=2):
    first, second = jnp.triu_indices(len(x), 1)
    return _cdist(x[first, None], x[second, None], p, None).ravel()


# Embedding, softmax, dropout --------------------------------------------------------------------


def _refuse_frequencies(scale_grad_by_freq):
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq=True, whose gradient is not the function's")


@register(aten.embedding)
def _embedding(weight, index, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    _refuse_frequencies(scale_grad_by_freq)
    if padding_idx >= 0:
        frozen = lax.stop_gradient(weight[padding_idx])
        weight = weight.at[padding_idx].set(frozen)
    return weight.at[index].get(mode="promise_in_bounds")


@register(aten._embedding_bag_forward_only, aten._embedding_bag)
def _embedding_bag(
    weight, index, offsets, scale_grad_by_freq=False, mode=0, sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    _refuse_frequencies(scale_grad_by_freq)
    bags = len(offsets) - include_last_offset
    bag = jnp.searchsorted(offsets[:bags], jnp.arange(len(index)), side="right") - 1
    kept = index != padding_idx
    rows = weight.at[index].get(mode="promise_in_bounds")
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    count = jnp.zeros(bags, rows.dtype).at[bag].add(kept)[:, None]
    if mode == 2:
        shape, rows = (bags, rows.shape[1]), jnp.where(kept[:, None], rows, -jnp.inf)
        largest = rows == jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(rows)[bag]
        place = jnp.where(largest, jnp.arange(len(rows))[:, None], len(rows) - 1)
        # As in torch, the first largest row gets the gradient.
        first = jnp.full(shape, len(rows) - 1).at[bag].min(place)
        pooled = jnp.where(count > 0, jnp.take_along_axis(rows, first, 0), 0)
    else:
        total = jnp.zeros((bags, rows.shape[1]), rows.dtype).at[bag]
        pooled = total.add(jnp.where(kept[:, None], rows, 0))
        pooled = pooled / jnp.maximum(count, 1) if mode == 1 else pooled
    return pooled, None, None, None


@register(aten._softmax)
def _softmax(x, dim, half_to_float):
    return jax.nn.softmax(x, dim)


@register(aten._safe_softmax)
def _safe_softmax(x, dim, dtype=None):
    # A query that may not attend to any key gets zeros.
    nothing = jnp.all(jnp.isneginf(x), dim, keepdims=True)
    return jnp.where(nothing, 0, jax.nn.softmax(jnp.where(nothing, 0, x), dim))


@register(aten.native_dropout)
def _dropout(x, p, train):
    if train and p:
        raise NotImplementedError("dropout in train mode")
    return x, jnp.ones(x.shape, bool)


@register(aten.rrelu_with_noise_functional)
def _rrelu(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    if training:
        raise NotImplementedError("a randomized ReLU in train mode")
    return jnp.where(x > 0, x, 0.5 * (lower + upper) * x), noise


# Convolution ------------------------------------------------------------------------------------


@register(aten.convolution)
def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = weight.ndim - 2
    unbatched = x.ndim == n + 1
    x = x[None] if unbatched else x
    stride, padding, dilation, extra = (
        each(s, n) for s in (stride, padding, dilation, output_padding)
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


# Normalization ----------------------------------------------------------------------------------


@register(aten.native_group_norm)
def _group_norm(x, weight, bias, N, C, HxW, group, eps):
    parts = x.reshape(N, group, -1)
    mean, var = jnp.mean(parts, -1, keepdims=True), jnp.var(parts, -1, keepdims=True)
    rstd = lax.rsqrt(var + eps)
    y, shape = ((parts - mean) * rstd).reshape(x.shape), (C,) + (1,) * (x.ndim - 2)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    return y, mean[..., 0], rstd[..., 0]


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
    adjoint = jnp.swapaxes(factor, -1, -2).conj()
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


@register(aten.linalg_pinv.atol_rtol_tensor)
def _pinv(x, *, atol=None, rtol=None, hermitian=False):
    if atol is None:
        return jnp.linalg.pinv(x, rtol=rtol, hermitian=hermitian)
    largest = jnp.linalg.norm(x, 2, axis=(-2, -1))  # the largest singular value
    relative = jnp.maximum(0 if rtol is None else rtol, atol / largest)
    return jnp.linalg.pinv(x, rtol=lax.stop_gradient(relative), hermitian=hermitian)
