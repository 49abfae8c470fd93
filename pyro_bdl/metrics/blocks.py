"""Blocks of test points that limit the memory, and checks of shapes, for all metrics."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.precision import double, double_device
from pyro_bdl.utils.validation import require_tensors

_BLOCK = 2**25  # bytes processed at once; a metric needs a few times that for temporaries


def blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the same block of points of each tensor ``(S, ...)``, as contiguous ``(block, S)``."""
    flat = [t.detach().reshape(t.shape[0], -1) for t in tensors]
    block = max(1, bytes_at_once(_BLOCK) // (8 * sum(t.shape[0] for t in flat)))
    for start in range(0, flat[0].shape[1], block):
        yield [t[:, start : start + block].T.contiguous() for t in flat]


def double_blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield ``blocks`` in float64."""
    for parts in blocks(*tensors):
        yield [double(part) for part in parts]


def mean_of_draws(draws: Tensor) -> Tensor:
    """The mean over the first axis, in float64."""
    means = torch.cat([part.mean(-1) for (part,) in double_blocks(draws)])
    return means.reshape(draws.shape[1:])


def same_shape(name_a: str, a: Tensor, name_b: str, b: Tensor) -> None:
    """Check that two tensors have the same shape.

    :raises ValueError: if the shapes differ.
    """
    require_tensors(**{name_a: a, name_b: b})
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} and {name_b} must have the same shape, but have {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )


def same_points(draws: Tensor, y: Tensor) -> None:
    """Check that draws have the targets' shape behind their first axis.

    :raises ValueError: if the shapes differ.
    """
    require_tensors(draws=draws, y=y)
    if draws.shape[1:] != y.shape:
        raise ValueError(
            f"draws must have the shape of y with the draws in front, (S, "
            f"{', '.join(map(str, y.shape))}), but have shape {tuple(draws.shape)}"
        )


def same_functions(a: Tensor, b: Tensor) -> None:
    """Check that draws of two functions are at the same points.

    :raises ValueError: if the shapes of the points differ.
    """
    require_tensors(a=a, b=b)
    if a.dim() < 2 or a.shape[1:] != b.shape[1:]:
        raise ValueError(
            f"a and b must be draws at the same test points, shapes (S1, N, ...) and "
            f"(S2, N, ...), but have shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )


def checked_labels(probabilities: Tensor, y: Tensor) -> Tensor:
    """y as class indices ``(N,)``, where probabilities are float64.

    :raises ValueError: if the shapes do not fit, there is no point, a label is not a whole number
        from 0 to C - 1, or a row of ``probabilities`` is no distribution.
    """
    require_tensors(probabilities=probabilities, y=y)
    if probabilities.dim() != 2 or y.shape != probabilities.shape[:1]:
        hint = (
            ": average the draws first, probabilities.mean(0)" if probabilities.dim() == 3 else ""
        )
        raise ValueError(
            f"probabilities and y must have shapes (N, C) and (N,), but have "
            f"{tuple(probabilities.shape)} and {tuple(y.shape)}{hint}"
        )
    check_probabilities(probabilities)
    labels, classes = y.long(), probabilities.shape[-1]
    if not len(labels):
        raise ValueError("y must hold at least one label, but is empty")
    if not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(
            f"y must hold class indices from 0 to {classes - 1}, but holds values from "
            f"{int(labels.min())} to {int(labels.max())}"
        )
    if y.is_floating_point() and not torch.equal(labels.to(y), y):
        raise ValueError("y must hold class indices, but holds numbers that are not whole")
    return labels.to(double_device(labels.device))


def check_probabilities(probabilities: Tensor, name: str = "probabilities") -> None:
    """Check that class probabilities ``(..., C)`` are none below 0 and add up to 1, but for
    rounding in half precision; NaN passes.

    :raises ValueError: otherwise, as for logits.
    """
    require_tensors(**{name: probabilities})
    if bool((probabilities < 0).any() | ((double(probabilities).sum(-1) - 1).abs() > 0.01).any()):
        raise ValueError(
            f"{name} must be class probabilities, which add up to 1 over the last axis: pass "
            "logits.softmax(-1) of logits"
        )


def nan_where(missing: Tensor, values: Tensor) -> Tensor:
    """Values that are NaN where a prediction is: comparisons with NaN are False, not NaN."""
    return values.masked_fill(missing.to(values.device), torch.nan)


def in_order(values: Tensor, scores: Tensor) -> Tensor:
    """Values ``(N,)`` in the order of rising scores ``(N,)``; those of equal scores are their mean,
    as they are on average over all orders."""
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(sizes)).index_add_(0, group, values)
    return (sums / sizes).repeat_interleave(sizes)
