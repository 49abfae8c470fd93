"""ATen operators in JAX: shapes, slices, padding, indexing, sorting."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from pyro_bdl.tracing.jax.ops.registry import OPERATORS, aten, register, table

# Shapes -----------------------------------------------------------------------------------------

table({
    "permute": jnp.transpose, "flip": jnp.flip, "unsqueeze": jnp.expand_dims,
    "repeat": jnp.tile,
})  # fmt: skip


@register(aten.view.default, aten.reshape)
def _view(x, size, *_):
    return jnp.reshape(x, size)


@register(aten.expand)
def _expand(x, size, *, implicit=False):
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [o if s == -1 else s for s, o in zip(size, own, strict=True)])


@register(aten.squeeze)
def _squeeze(x, dim=None):
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return lax.squeeze(x, [d for d in dims if x.shape[d] == 1]) if x.ndim else x


@register(aten.slice.Tensor)
def _slice(x, dim=0, start=None, end=None, step=1):
    bounds = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, bounds[0], max(bounds[0], bounds[1]), step, dim)


@register(aten.select.int)
def _select(x, dim, index):
    return lax.index_in_dim(x, index, dim, keepdims=False)


def _at(x, dim, index):
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)]


def _pick(x, dim, index):
    return _at(x, dim, index).get(mode="promise_in_bounds")


@register(aten.slice_scatter)
def _slice_scatter(x, source, dim=0, start=None, end=None, step=1):
    return _at(x, dim, slice(start, end, step)).set(source)


@register(aten.diagonal_scatter)
def _diagonal_scatter(x, source, offset=0, dim1=0, dim2=1):
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows = np.arange(source.shape[-1]) + max(-offset, 0)
    last = last.at[..., rows, rows + offset].set(source)
    return jnp.moveaxis(last, (-2, -1), (dim1, dim2))


@register(aten.split_with_sizes)
def _split(x, sizes, dim=0):
    return lax.split(x, sizes, dim % x.ndim)


@register(aten.cat)
def _cat(tensors, dim=0):
    # torch accepts an empty vector among tensors of any rank.
    return jnp.concatenate([t for t in tensors if t.shape != (0,)] or tensors, dim)


@register(aten.diagonal)
def _diagonal(x, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(x, offset, dim1, dim2)


@register(aten.unfold)
def _unfold(x, dim, size, step):
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = _pick(x, dim, starts[:, None] + np.arange(size))
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


@register(aten.constant_pad_nd)
def _pad(x, pad, value=0):
    # torch counts its dimensions from the last
    sides = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), [(*side, 0) for side in sides])


# Indexing ---------------------------------------------------------------------------------------


def _where_to(indices):
    return tuple(slice(None) if index is None else index for index in indices)


@register(aten.index.Tensor)
def _index(x, indices):
    return x.at[_where_to(indices)].get(mode="promise_in_bounds")


@register(aten.index_put)
def _index_put(x, indices, values, accumulate=False):
    if indices[0] is not None and indices[0].dtype == bool and jnp.ndim(values) == 0:
        # A mask may depend on the latents if the shapes do not.
        mask = jnp.expand_dims(indices[0], range(indices[0].ndim, x.ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    place = x.at[_where_to(indices)]
    return place.add(values) if accumulate else place.set(values)


@register(aten.masked_select)
def _masked_select(x, mask):
    shape = np.broadcast_shapes(x.shape, mask.shape)
    return jnp.broadcast_to(x, shape)[np.broadcast_to(mask, shape)]


@register(aten.masked_scatter)
def _masked_scatter(x, mask, source):
    # The n-th place of the mask gets the n-th number of the source.
    mask = jnp.broadcast_to(mask, x.shape)
    order = jnp.clip(jnp.cumsum(mask.ravel()).reshape(x.shape) - 1, 0)
    return jnp.where(mask, source.ravel()[order], x)


@register(aten.put)
def _put(x, index, source, accumulate=False):
    return _index_put(x.ravel(), [index], source, accumulate).reshape(x.shape)


@register(aten.index_select)
def _index_select(x, dim, index):
    return _pick(x, dim, index)


def _grid(shape, dim, index):
    """The full index of each element of ``index`` in a tensor that it indexes along ``dim``."""
    grid = list(np.indices(index.shape, sparse=True))
    grid[dim] = index
    return tuple(grid)


@register(aten.gather)
def _gather(x, dim, index, *, sparse_grad=False):
    inner = [slice(None) if d == dim % x.ndim else slice(n) for d, n in enumerate(index.shape)]
    return _take(x[tuple(inner)], index, dim)


@register(aten.scatter)
def _scatter(x, dim, index, source, *, reduce=None):
    place = x.at[_grid(x.shape, dim, index)]
    source = source[tuple(map(slice, index.shape))] if jnp.ndim(source) else source
    return {None: place.set, "add": place.add, "multiply": place.multiply}[reduce](source)


@register(aten.scatter_add)
def _scatter_add(x, dim, index, source):
    return _scatter(x, dim, index, source, reduce="add")


@register(aten.scatter_reduce)
def _scatter_reduce(x, dim, index, source, reduce, *, include_self=True):
    grid = _grid(x.shape, dim, index)
    source = source[tuple(map(slice, index.shape))]
    if not include_self:
        x = x.at[grid].set({"amax": -np.inf, "amin": np.inf}.get(reduce, 0))
    place = x.at[grid]
    match reduce:
        case "sum":
            return place.add(source)
        case "mean":
            own = jnp.ones(x.shape, x.dtype)
            own = own if include_self else own.at[grid].set(0)
            return place.add(source) / own.at[grid].add(1)
        case "amax":
            return place.max(source)
        case "amin":
            return place.min(source)
    raise NotImplementedError(f"the reduction '{reduce}'")


@register(aten.index_reduce)
def _index_reduce(x, dim, index, source, reduce, *, include_self=True):
    along = jnp.expand_dims(index, [d for d in range(source.ndim) if d != dim % source.ndim])
    index = jnp.broadcast_to(along, source.shape)
    return _scatter_reduce(x, dim, index, source, reduce, include_self=include_self)


# Selection and sorting --------------------------------------------------------------------------


def _take(x, index, dim, keepdim=True):
    index = index if keepdim else jnp.expand_dims(index, dim)
    values = jnp.take_along_axis(x, index, dim, mode="promise_in_bounds")
    return values if keepdim else jnp.squeeze(values, dim)


def _picker(arg: Callable) -> Callable:
    def pick(x, dim, keepdim=False):
        index = arg(x, axis=dim, keepdims=keepdim)
        return _take(x, index, dim, keepdim), index

    return pick


OPERATORS[aten.max.dim] = _picker(jnp.argmax)
OPERATORS[aten.min.dim] = _picker(jnp.argmin)


@register(aten.sort)
def _sort(x, dim=-1, descending=False, *, stable=None):
    index = jnp.argsort(x, dim, stable=True, descending=descending)
    return _take(x, index, dim), index


@register(aten.topk)
def _topk(x, k, dim=-1, largest=True, sorted=True):
    index = lax.slice_in_dim(jnp.argsort(x, dim, descending=largest), 0, k, axis=dim)
    return _take(x, index, dim), index


def shared_gradient(value, x, mask, axis=None, *, share=True):
    """The value of some entries, which have its gradient, in equal parts or each all of it."""
    value = lax.stop_gradient(value)
    moved = jnp.where(mask & jnp.isfinite(x), x - lax.stop_gradient(x), 0)
    return value + jnp.sum(moved, axis) / (jnp.sum(mask, axis) if share else 1)


@register(aten.median.default)
def _median(x):
    if not x.size:
        return jnp.full((), jnp.nan, x.dtype)
    value = jnp.sort(x.ravel())[(x.size - 1) // 2]
    value = jnp.where(jnp.isnan(x).any(), jnp.nan, value)
    return shared_gradient(value, x, x == value)


@register(aten.median.dim)
def _median_along(x, dim=-1, keepdim=False):
    _, index = _kthvalue(x, (x.shape[dim] + 1) // 2 if x.ndim else 1, dim, True)
    missing = jnp.isnan(x)
    index = jnp.where(missing.any(dim, keepdims=True), missing.argmax(dim, keepdims=True), index)
    index = index if keepdim else jnp.squeeze(index, dim)
    return _take(x, index, dim, keepdim), index


@register(aten.kthvalue)
def _kthvalue(x, k, dim=-1, keepdim=False):
    order = jnp.argsort(x, dim)
    index = lax.slice_in_dim(order, k - 1, k, axis=dim)
    index = index if keepdim else jnp.squeeze(index, dim)
    return _take(x, index, dim, keepdim), index


@register(aten.searchsorted.Tensor)
def _searchsorted(sequence, x, *, right=False, side=None, **_):
    return jnp.searchsorted(sequence, x, side=side or ("right" if right else "left"))


def _running(scan: Callable) -> Callable:
    def apply(x, dim):
        if not x.ndim:
            return x, jnp.zeros((), int)
        axis = dim % x.ndim
        here = lax.broadcasted_iota(int, x.shape, axis)
        # torch returns the last one of equal entries, which also gets the gradient.
        index = lax.cummax(jnp.where((x == scan(x, axis)) | (x != x), here, 0), axis)
        return jnp.take_along_axis(x, index, axis), index

    return apply


table({"cummax": _running(lax.cummax), "cummin": _running(lax.cummin)})
