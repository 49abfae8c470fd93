"""Copies of distributions: without validation, without masks, on another device, or expanded to the
shape of their targets."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from pyro.distributions import Delta, ImproperUniform
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent

from pyro_bdl.distributions.parameters import base_distribution


def without_validation(distribution: Distribution) -> Distribution:
    """The distribution itself if it validates nothing, else a copy with validation turned off.

    ``vmap`` and ``make_fx`` forbid the checks of values, which also cost more time than the
    densities.
    """
    old = vars(distribution)
    if _CHECKED in old:
        return distribution
    inner = {k: without_validation(v) for k, v in old.items() if isinstance(v, Distribution)}
    # its own attribute: without it the process's setting counts, which is another one later
    unchecked = old.get("_validate_args") is False
    if unchecked and all(old[key] is value for key, value in inner.items()):
        return distribution
    result = object.__new__(type(distribution))
    vars(result).update(old, _validate_args=False, **inner, **{_CHECKED: True})
    return result


_CHECKED = "_pyro_bdl_unvalidated"  # marks copies made here, so that they are not searched again


_CONSTANT = "_pyro_bdl_constant"  # marks distributions whose numbers never change


def declare_constant(distribution: Distribution) -> None:
    """Declare that the numbers of a distribution without its wrappers never change, so that what
    follows from them may be kept."""
    vars(base_distribution(distribution, through_masks=False))[_CONSTANT] = True


def is_constant(distribution: Distribution) -> bool:
    """Return whether the numbers of a distribution without wrappers are declared constant."""
    return _CONSTANT in vars(distribution)


def without_masks(
    distribution: Distribution, mask: bool | Tensor | None = None
) -> tuple[Any, bool | Tensor | None]:
    """The distribution inside ``mask`` wrappers, and all their masks combined into one mask of its
    batch shape.

    An improper uniform distribution has the mask False. A mask tensor inside ``to_event`` is not
    taken out, because it has more dimensions than the batch shape.
    """
    if isinstance(distribution, ImproperUniform):
        return distribution, False
    if isinstance(distribution, MaskedDistribution):
        inner, own = without_masks(distribution.base_dist, distribution._mask)
        return inner, _both(own, mask)
    if isinstance(distribution, Independent):
        if isinstance(distribution.base_dist, Independent | MaskedDistribution | ImproperUniform):
            inner, own = without_masks(distribution.base_dist)
        else:
            return distribution, mask  # the usual case
        if isinstance(own, bool):
            return inner.to_event(distribution.reinterpreted_batch_ndims), _both(own, mask)
    return distribution, mask


def _both(one: bool | Tensor | None, other: bool | Tensor | None) -> bool | Tensor | None:
    if one is False or other is False:
        return False
    if one is None or one is True:
        return other
    return one if other is None or other is True else one & other


def masks_of(distribution: Distribution) -> list[tuple[Tensor, torch.Size]]:
    """The mask tensors inside a distribution, each with the batch shape of the distribution that it
    masks."""
    masks = []
    while isinstance(distribution, Independent | MaskedDistribution):
        mask = getattr(distribution, "_mask", None)
        if isinstance(mask, Tensor):
            masks.append((mask, distribution.batch_shape))
        distribution = distribution.base_dist
    return masks


def point_of(distribution: Distribution) -> Delta | None:
    """The Delta inside ``to_event`` and ``mask``; None for any other distribution."""
    base = base_distribution(distribution)
    return base if isinstance(base, Delta) else None


def is_improper(distribution: Distribution) -> bool:
    """Return whether the distribution is an ``ImproperUniform``, which cannot be sampled."""
    return isinstance(base_distribution(distribution), ImproperUniform)


def moved_like(distribution: Distribution, like: Tensor) -> Distribution:
    """The distribution with its tensors on the device, and of the floating dtype, of ``like``.

    Returns a copy if any tensor has to be converted, else the distribution itself.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype = like.dtype if value.is_floating_point() else value.dtype
            return value.to(like.device, dtype, non_blocking=like.is_cuda)  # no wait for the GPU
        if isinstance(value, Distribution):
            return moved_like(value, like)
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return type(value)(moved(v) for v in value)
        return value

    return _copied(distribution, moved)


def on_device_of(distribution: Distribution, value: Any) -> Distribution:
    """The distribution with its tensors on the device of ``value``; a copy if they have to be
    moved."""
    if not isinstance(value, Tensor):
        return distribution
    with torch._C.DisableTorchFunction():  # trackers must not count this as a use
        device = value.device
    if device.type == "cpu":
        return distribution  # the usual case
    like = _first_tensor(distribution)
    if like is None or like.device == device:
        return distribution
    return moved_like(distribution, like.new_empty(0, device=device))


def placeholder(distribution: Distribution) -> Tensor:
    """Zeros with the shape, dtype and device of a draw."""
    like = _first_tensor(distribution)
    if like is None:
        like = torch.zeros((), device="cpu")
    dtype = torch.long if _holds_categories(distribution) else like.dtype
    return like.new_zeros(distribution.shape(), dtype=dtype)  # type: ignore[attr-defined]


def expanded_to_targets(
    name: str,
    distribution: Any,
    targets: Any,
    plate_dims: Collection[int | None] = (),
    enumerated: Collection[int] = (),
) -> Any:
    """The distribution of an observed site, expanded to the shape of its targets.

    Each term of log p(targets) then belongs to one element of the distribution. Targets with fewer
    numbers than the distribution are broadcast to it, as in Pyro.

    :param name: the site's name, for errors.
    :param targets: the observed value.
    :param plate_dims: the dims of the plates around the site.
    :param enumerated: the batch dims along which the distribution has values of discrete sites.
    :raises ValueError: if targets and distribution broadcast against each other, such as targets
        (N,) against means (N, 1), which gives N x N terms.
    """
    if not isinstance(targets, Tensor) or targets.shape == distribution.shape():
        return distribution
    own = _without_dims(distribution, enumerated)
    try:
        full = torch.broadcast_shapes(own, targets.shape)
        whole = torch.broadcast_shapes(distribution.shape(), targets.shape)
    except RuntimeError:  # left to log_prob: some events may have any length
        return distribution
    batch = full[: len(full) - distribution.event_dim]
    if full.numel() > max(own.numel(), targets.numel()) or (
        _are_repeated(batch, targets, distribution.event_dim, plate_dims)
    ):
        raise ValueError(
            f"the targets of site '{name}' have shape {tuple(targets.shape)} and their "
            f"distribution {tuple(own)}, which makes {full.numel()} terms of "
            f"{targets.numel()} targets: give both one shape, for example by mean.squeeze(-1) or "
            "y.reshape(mean.shape)"
        )
    batch = whole[: len(whole) - distribution.event_dim]
    return _expanded(distribution, batch, whole[len(batch) :])


def _without_dims(distribution: Any, dims: Collection[int]) -> torch.Size:
    """The shape of a draw without the size of some batch dims, and without leading ones then."""
    batch = distribution.batch_shape
    if dims:
        sizes = [1 if dim in dims else size for dim, size in enumerate(batch, -len(batch))]
        first = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
        batch = torch.Size(sizes[first:])
    return batch + distribution.event_shape


def _are_repeated(
    batch: torch.Size, targets: Tensor, event_dim: int, plate_dims: Collection[int | None]
) -> bool:
    """Return whether several targets are repeated along a batch dimension that belongs to no plate.

    Returns False if there are no plates.
    """
    if not plate_dims or targets.numel() == 1:
        return False
    own = targets.shape[: max(0, targets.dim() - event_dim)]
    own = torch.Size([1] * (len(batch) - len(own))) + own
    return any(
        size > 1 and there == 1 and dim not in plate_dims
        for dim, (size, there) in enumerate(zip(batch, own, strict=True), -len(batch))
    )


def _expanded(distribution: Any, batch: torch.Size, event: torch.Size) -> Any:
    """The distribution expanded to these shapes; an event of dependent numbers keeps its shape."""
    if distribution.batch_shape == batch and distribution.event_shape == event:
        return distribution
    if isinstance(distribution, Independent):
        dims = distribution.reinterpreted_batch_ndims
        base = _expanded(distribution.base_dist, batch + event[:dims], event[dims:])
        return base.to_event(dims)
    if isinstance(distribution, MaskedDistribution):
        return _expanded(distribution.base_dist, batch, event).mask(distribution._mask)
    return distribution if distribution.batch_shape == batch else distribution.expand(batch)


def _copied(distribution: Distribution, changed: Callable[[Any], Any]) -> Distribution:
    """A copy whose attributes are results of a function; the distribution itself where none of
    them is new."""
    old = vars(distribution)
    new = {key: changed(value) for key, value in old.items()}
    if all(value is old[key] for key, value in new.items()):
        return distribution
    result = object.__new__(type(distribution))
    vars(result).update(new)
    return result


def _first_tensor(distribution: Distribution) -> Tensor | None:
    for value in distribution.__dict__.values():
        if isinstance(value, Distribution):
            value = _first_tensor(value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _holds_categories(distribution: Distribution) -> bool:
    return isinstance(base_distribution(distribution), torch.distributions.Categorical)
