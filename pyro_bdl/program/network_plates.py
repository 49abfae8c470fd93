"""Plates of networks: the plates around a network's call, and all of their networks at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.tracker import are_tracked
from pyro_bdl.program.network_sites import PerNetwork
from pyro_bdl.program.vmap import DrawMap, looped
from pyro_bdl.utils.trees import tree_flatten, tree_map, tree_unflatten

_PLATES_OF_DRAWS = ("num_particles_vectorized", "_num_predictive_samples")


class Plates:
    """The vectorized plates around a call.

    ``sizes`` are those of the plates, by their dims from left to right; ``batch`` is the batch
    shape of the sites in them.

    :param dims: the size that each plate's dim has in this run.
    """

    def __init__(self, dims: Mapping[int, int]) -> None:
        self.sizes = torch.Size([dims[dim] for dim in sorted(dims)])
        self.batch = torch.Size([dims.get(dim, 1) for dim in range(min(dims, default=0), 0)])

    def stacked(self, tensor: Any, dim: int) -> Tensor:
        """An input with an entry for every network along dimension ``dim``, with that one first."""
        count = len(self.sizes)
        if isinstance(tensor, Tensor) and tensor.shape[dim:][:count] == self.sizes:
            moved = tensor.movedim(tuple(range(dim, dim + count)), tuple(range(count)))
            return moved.flatten(0, count - 1)
        given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor)
        sizes = ", ".join(map(str, self.sizes))
        raise ValueError(
            f"each(..., dim={dim}) needs tensors with an entry for every network of the plates, "
            f"whose sizes are ({sizes}), from dimension {dim} on, got {given}: leave each(...) out "
            "where all networks take the same input"
        )


def plates_of(frames: Sequence[Any], names: Sequence[str], weights: str) -> Plates:
    """The plates in which a network's call stands.

    :param frames: those around the call, of ``get_plates()``.
    :param names: the plates whose elements have a network each.
    :param weights: a site of the network, for messages.
    :raises UnsupportedProgramError: where the call stands in others, or not in all of these.
    """
    for frame in frames:
        if frame.name in _PLATES_OF_DRAWS:
            raise UnsupportedProgramError(
                "networks do not take Pyro's plates of draws (vectorize_particles=True, "
                "Predictive's parallel=True): leave that out, or use the ELBOs of "
                "pyro_bdl.elbo and pyro_bdl.Predictive, which vectorize over draws by vmap"
            )
        if frame.name not in names:
            raise UnsupportedProgramError(
                f"the weights '{weights}' would be sampled inside the plate '{frame.name}', which "
                "gives every datum its own copy: call the network outside the plate and observe "
                "inside it; where a network for every element of the plate is meant, say so by "
                f"bayesianize(..., plate='{frame.name}')"
            )
        if frame.dim is None:
            raise UnsupportedProgramError(
                f"the plate '{frame.name}' of networks is a loop: use it as a context manager "
                f"(with pyro.plate('{frame.name}', size): ...), which computes all at once"
            )
    inside = {frame.name for frame in frames}
    for name in names:
        if name not in inside:
            raise UnsupportedProgramError(
                f"there is a network of the weights '{weights}' for every element of the plate "
                f"'{name}', and it is called outside of it: call it inside "
                f"'with pyro.plate('{name}', size)'"
            )
    return Plates({frame.dim: frame.size for frame in frames})


def over_networks(
    network: Callable[..., Any],
    weights: Mapping[str, Tensor],
    plates: Plates,
    args: tuple,
    kwargs: Mapping[str, Any],
    draw_map: DrawMap,
) -> Any:
    """Outputs (*sizes, ...) of all networks of the plates: by ``vmap``, one after another where
    the weights are followed through the program (``Tracker``).

    :param network: ``(weights, *args, **kwargs)``, one network as a function of its weights.
    :param weights: for each name the values of all networks, (networks, *shape).
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    own = {
        number: tree_map(partial(plates.stacked, dim=leaf.dim), leaf.value)
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, PerNetwork)
    }
    inputs, own_spec = tree_flatten(own)
    names = [f"input {number}" for number in range(len(inputs))]

    def one(draw: Mapping[str, Tensor]) -> Any:
        parts = tree_unflatten([draw[name] for name in names], own_spec)
        given, options = tree_unflatten(
            [parts.get(number, leaf) for number, leaf in enumerate(leaves)], spec
        )
        return network({name: draw[name] for name in weights}, *given, **options)

    draws = {**weights, **dict(zip(names, inputs, strict=True))}
    followed = are_tracked(tuple(draws.values()))
    outputs = looped(one, draws) if followed else draw_map(one, draws)
    return tree_map(lambda output: output.reshape(*plates.sizes, *output.shape[1:]), outputs)
