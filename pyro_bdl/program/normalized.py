"""Weights before a normalization, whose size does not change the outputs.

f(theta' + theta'') = f(theta' + k theta'') for every k > 0, with theta'' the weights to which a
normalization is applied (Antoran et al. 2022, section 5). They are found by scaling them.

Most often theta'' is one layer before a normalization. Where layers add to a stream that is
normalized only where it is read, as in a transformer with ``x + block(norm(x))``, it is all of
these layers together.
"""

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from pyro_bdl.utils.precision import double

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_TOLERANCE = 1e-3  # the epsilon of a normalization lets sizes through
_SLOPE = 5 * _TOLERANCE  # above it the outputs change by more
_NEGLIGIBLE = 0.01  # entry of a null vector of length 1
_STEP = 0.01  # of a size, relative, for a central difference of the outputs


def normalized_groups(
    outputs: Callable[[Collection[str], float], list[Tensor]],
    layers: Mapping[str, Collection[str]],
    *,
    joint: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Return the layers, or else single weights, that can be doubled, but not be put to zero,
    without a change of the outputs.

    :param outputs: the outputs where some weights, by name, are multiplied by a factor.
    :param layers: the names of the weights of every layer.
    :param joint: look for layers that are free together, too, in two runs for each layer.
    :returns: the weights of each group. Its name is the layer's, those of several layers joined by
        " + ", or that of a single weight, as the direction under ``weight_norm``.
    """
    before: list[Tensor] = []

    def is_free(names: Collection[str]) -> bool:
        if not before:
            before.extend(outputs((), 1.0))
        return _same(outputs(names, 2.0), before) and not _same(outputs(names, 0.0), before)

    groups: dict[str, tuple[str, ...]] = {}
    for layer, names in layers.items():
        if is_free(names):
            groups[layer] = tuple(names)
        elif len(names) > 1:
            groups |= {name: (name,) for name in names if is_free((name,))}
    if joint:
        known = {name for own in groups.values() for name in own}
        others = {layer: own for layer, own in layers.items() if not known & set(own)}
        for group in _without_slope(outputs, others):
            names = tuple(name for layer in group for name in others[layer])
            if is_free(names):
                groups[" + ".join(layer or ", ".join(others[layer]) for layer in group)] = names
    return groups


def _without_slope(
    outputs: Callable[[Collection[str], float], list[Tensor]],
    layers: Mapping[str, Collection[str]],
) -> list[list[str]]:
    """Return disjoint sets of layers whose derivatives of the outputs in their sizes add up to 0.

    A set is a row of zeros and ones in the reduced echelon form of the derivatives' null space,
    which also has rows such as (1, -1): layers whose sizes make up for each other.
    """

    def at(names: Collection[str], factor: float) -> Tensor:
        return double(torch.cat([value.flatten() for value in outputs(names, factor)])).cpu()

    size = at((), 1.0).norm()
    slopes = {
        layer: (at(names, 1.0 + _STEP) - at(names, 1.0 - _STEP)) / (2.0 * _STEP * size)
        for layer, names in layers.items()
    }
    # not those that are NaN, as of outputs that are infinite or all zero
    slopes = {layer: slope for layer, slope in slopes.items() if _SLOPE < slope.norm() < math.inf}
    if len(slopes) < 2:
        return []
    rows = torch.stack(list(slopes.values()))
    squares, vectors = torch.linalg.eigh(rows @ rows.mT)
    groups: list[list[str]] = []
    for row in _reduced(vectors[:, squares < _TOLERANCE**2].mT):
        group = [layer for layer, weight in zip(slopes, row, strict=True) if weight > 0.5]
        whole = float((row - row.round()).abs().max()) < 0.1 and set(row.round().tolist()) <= {0, 1}
        if whole and len(group) > 1 and not any(set(group) & set(other) for other in groups):
            groups.append(group)
    return groups


def _reduced(rows: Tensor) -> Tensor:
    """The reduced row echelon form of independent rows."""
    rows = rows.clone()
    column = 0
    for number in range(len(rows)):
        while column < rows.shape[1] and float(rows[number:, column].abs().max()) < _NEGLIGIBLE:
            column += 1
        if column == rows.shape[1]:  # what is left is rounding
            return rows[:number]
        best = number + int(rows[number:, column].abs().argmax())
        rows[[number, best]] = rows[[best, number]]
        rows[number] /= rows[number, column].clone()
        others = torch.arange(len(rows), device=rows.device) != number
        rows[others] -= rows[others, column, None] * rows[number]
        column += 1
    return rows


def _same(values: list[Tensor], before: list[Tensor]) -> bool:
    for value, known in zip(values, before, strict=True):
        if value.shape != known.shape:
            return False
        slack = _TOLERANCE * float(known.abs().max()) if known.numel() else 0.0
        if not torch.allclose(value, known, rtol=_TOLERANCE, atol=slack):
            return False
    return True
