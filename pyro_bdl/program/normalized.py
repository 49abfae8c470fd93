"""Weights before a normalization, whose size does not change the outputs.

f(theta' + theta'') = f(theta' + k theta'') for every k > 0, with theta'' the weights to which a
normalization is applied (Antoran et al. 2022, section 5). They are found by scaling them.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_TOLERANCE = 1e-3  # the epsilon of a normalization lets sizes through
_SLOPE = 5 * _TOLERANCE  # above it the outputs change by more


def normalized_groups(
    outputs: Callable[[Collection[str], float], list[Tensor]],
    layers: Mapping[str, Collection[str]],
    slope: Callable[[Collection[str]], float] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return the layers, or else single weights, that can be doubled, but not be put to zero,
    without a change of the outputs.

    :param outputs: the outputs where some weights, by name, are multiplied by a factor.
    :param layers: the names of the weights of every layer.
    :param slope: the derivative of the outputs' size in the size of some weights, both relative;
        where it is not small, their outputs are not compared, since f(k w) = f(w) implies 0.
    :returns: the weights of each group; a single weight of a layer, as the direction under
        ``weight_norm``, has its own name as the group's.
    """
    before: list[Tensor] = []

    def is_free(names: Collection[str]) -> bool:
        if slope is not None and abs(slope(names)) > _SLOPE:
            return False
        if not before:
            before.extend(outputs((), 1.0))
        return _same(outputs(names, 2.0), before) and not _same(outputs(names, 0.0), before)

    found: dict[str, tuple[str, ...]] = {}
    for layer, names in layers.items():
        if is_free(names):
            found[layer] = tuple(names)
        elif len(names) > 1:
            found |= {name: (name,) for name in names if is_free((name,))}
    return found


def _same(values: list[Tensor], before: list[Tensor]) -> bool:
    for value, known in zip(values, before, strict=True):
        if value.shape != known.shape:
            return False
        slack = _TOLERANCE * float(known.abs().max()) if known.numel() else 0.0
        if not torch.allclose(value, known, rtol=_TOLERANCE, atol=slack):
            return False
    return True
