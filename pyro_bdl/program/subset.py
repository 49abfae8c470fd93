"""Subsets of a program's latents, such as those with a curvature."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.program.layout import Latent, Layout
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.utils.validation import require

Selection = (
    str | nn.Module | Callable[[str, Latent], bool] | Tensor | Iterable["str | nn.Module"] | None
)


class Subset:
    """Numbers chosen from the flat vector (P,) of the latents, in the vector's order.

    :param layout: the latents.
    :param indices: the chosen positions in the vector, sorted and unique; None for all.
    """

    def __init__(self, layout: Layout, indices: Tensor | None = None) -> None:
        self.layout = layout
        self.indices = indices
        self.parts: dict[str, slice] = {}  # slices of the subset's vector, by site
        self.chosen: dict[str, Tensor | None] = {}  # entries of the site; None: all
        start = 0
        for name, where in layout.slices.items():
            entries, count = None, where.stop - where.start
            if indices is not None:
                inside = indices[(indices >= where.start) & (indices < where.stop)]
                if len(inside) < count:
                    entries, count = inside - where.start, len(inside)
            if count:
                self.parts[name] = slice(start, start + count)
                self.chosen[name] = entries
                start += count
        self.size = start

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.parts)

    @property
    def complete(self) -> bool:
        return self.size == self.layout.size

    def take(self, vector: Tensor) -> Tensor:
        """The chosen entries (..., p) of vectors (..., P)."""
        return vector if self.indices is None else vector[..., self.indices.to(vector.device)]

    def of_sites(self, values: Iterable[Tensor], batch: Sequence[int] = ()) -> Tensor:
        """The chosen entries (*batch, p) of tensors of the sites' unconstrained shapes, one for
        each site in ``parts``.

        :param batch: leading axes of the tensors.
        """
        flat = (value.reshape(*batch, -1) for value in values)
        pairs = zip(flat, self.chosen.values(), strict=True)
        return torch.cat([v if c is None else v[..., c.to(v.device)] for v, c in pairs], -1)

    def put(self, vector: Tensor, values: Tensor) -> Tensor:
        """Copies (..., P) of the vector (P,) with ``values`` (..., p) at the chosen entries."""
        if self.indices is None:
            return values
        whole = vector.expand(*values.shape[:-1], -1)
        return whole.index_copy(-1, self.indices.to(vector.device), values)  # also under vmap

    def by_site(self, vector: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The sites with entries in the subset, unconstrained, site -> (S, *shape): those of the
        vector (P,) with ``values`` (S, p) at the chosen entries."""
        found = {}
        for name, part in self.parts.items():
            own, chosen = values[:, part], self.chosen[name]
            if chosen is not None:
                whole = vector[self.layout.slices[name]].expand(len(values), -1)
                own = whole.index_copy(-1, chosen.to(vector.device), own)
            found[name] = own.reshape(-1, *self.layout.latents[name].unconstrained_shape)
        return found

    def latents(self, vector: Tensor, values: Tensor) -> dict[str, Tensor]:
        """All latents in their supports, site -> (S, *shape), at the vector (P,) with ``values``
        (S, p) at the chosen entries; those of other sites are views of one value."""
        center = {name: value.clone() for name, value in self.layout.unflatten(vector).items()}
        moved = self.by_site(vector, values)
        found = self.layout.to_supports(center | moved)
        return {
            name: value if name in moved else value.expand(len(values), *value.shape)
            for name, value in found.items()
        }


def select(layout: Layout, selection: Any = None, *, model: Any = None) -> Subset:
    """The subset for a user's selection.

    :param selection: None for all latents; a site's name or a pattern with shell wildcards; a
        module of the network, for its weights; a predicate ``(name, latent) -> bool``; positions
        in the flat vector, as integers or a mask (P,); or several names and modules.
    :param model: the program, which is searched for modules.
    :raises ValueError: for a selection that chooses nothing, or that is not in the program.
    """
    if selection is None:
        return Subset(layout)
    if isinstance(selection, Tensor):
        return Subset(layout, _checked_indices(layout, selection))
    if callable(selection) and not isinstance(selection, nn.Module):
        names = {name for name, latent in layout.latents.items() if selection(name, latent)}
        if not names:
            raise ValueError("the subset is empty: the predicate is true for no latent site")
    else:
        single = isinstance(selection, str | nn.Module)
        names = set()
        for part in [selection] if single else selection:
            names |= _named(layout, part, model)
    if not names:
        raise ValueError("the subset is empty: name at least one latent site")
    if len(names) == len(layout.latents):
        return Subset(layout)
    parts = [layout.slices[name] for name in layout.latents if name in names]
    every = torch.arange(layout.size, device="cpu")
    return Subset(layout, torch.cat([every[part] for part in parts]))


def _checked_indices(layout: Layout, selection: Tensor) -> Tensor:
    if selection.dtype == torch.bool:
        if selection.shape != (layout.size,):
            raise ValueError(
                f"the subset's mask has shape {tuple(selection.shape)}, the latents are "
                f"{layout.size} numbers"
            )
        selection = selection.nonzero()[:, 0]
    indices = selection.detach().reshape(-1).cpu().unique()
    if not len(indices):
        raise ValueError("the subset is empty: choose at least one index")
    if indices.is_floating_point() or indices[0] < 0 or indices[-1] >= layout.size:
        raise ValueError(f"the subset's indices must be integers from 0 to {layout.size - 1}")
    return indices


def _named(layout: Layout, part: Any, model: Any) -> set[str]:
    if isinstance(part, nn.Module):
        return _of_module(layout, part, model)
    require(part, str, "a subset is given by names, modules, a predicate or indices")
    if part in layout.latents:  # exact names first: a name may contain brackets
        return {part}
    names = {name for name in layout.latents if fnmatchcase(name, part)}
    if not names:
        known = ", ".join(layout.latents)
        raise ValueError(
            f"the subset names '{part}', which is not a latent site: give one of them ({known}), "
            "or a pattern such as '0.*'"
        )
    return names


def _of_module(layout: Layout, module: nn.Module, model: Any) -> set[str]:
    for outer in model.modules() if isinstance(model, nn.Module) else ():
        if not isinstance(outer, SampledNetwork):
            continue
        for prefix, inner in outer.network.named_modules():
            start = outer.site_prefix + (f"{prefix}." if prefix else "")
            if inner is module:
                return {name for name in layout.latents if name.startswith(start)}
    raise ValueError(
        f"the subset names a module ({type(module).__name__}) that is not in the program: take it "
        "from the network that bayesianize returned (bnn.network.<name>), or give the sites' names"
    )
