"""The setting of a comparison: its program, the checked data as its arguments, and the options."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.kind import Kind, Seen, needs_targets, observed
from pyro_bdl.errors import ArgumentError
from pyro_bdl.program.batches import (
    Batches,
    as_dicts,
    device_of_rows,
    has_rows,
    holds_batches,
    leading_size,
    select_rows,
)
from pyro_bdl.program.check import by_entry, takes_missing
from pyro_bdl.program.rows import rows_of
from pyro_bdl.utils.module_state import device_of
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.trees import tensors_in, tree_leaves
from pyro_bdl.utils.validation import check_finite_tensor, require, require_tensors, whole_number

MOST_POINTS = 1000  # at which draws are kept
REGIONS = {
    "near": "near training inputs",
    "between": "between training inputs, far from all of them",
    "beyond": "beyond the training inputs, far from all of them",
}
_MOST_TRAINING = 4096
_FAR = 2.0  # times the spacing of the training inputs


@dataclass(frozen=True)
class Setting:
    """A program with the data that posteriors are scored on, as its arguments, and the options.

    :param kind: what the program observes of them.
    :param test: inputs and, last, targets.
    :param y: the numbers that the program observes, in its units.
    :param seen: which of them masks do not leave out; None where they leave out none.
    :param train: the training data, or None.
    :param ood: out-of-distribution inputs, or None.
    :param latents: names of the latent sites that are compared too.
    :param units: scale and shift to the target's own units.
    :param num_samples: draws of a guide.
    :param batch_norm_data: see ``Predictive``.
    :param seed: with which the evaluation of each posterior starts.
    :param progress: whether bars are shown.
    """

    model: Callable
    kind: Kind
    test: tuple
    y: Tensor
    seen: Seen | None
    bounds: Tensor | None
    train: tuple | None
    ood: tuple | None
    latents: tuple[str, ...]
    units: tuple[float, float]
    num_samples: int
    batch_norm_data: Any
    seed: int
    progress: bool | None

    @classmethod
    def read(
        cls, model: Callable, posterior: Any, *, test: Any, train: Any, ood: Any,
        units: tuple[float, float], num_samples: int, seed: int,
        sites: str | Collection[str] | None = None,
        latents: str | Collection[str] | None = None, rows: str | None = None, **options: Any,
    ) -> "Setting":  # fmt: skip
        """Check the data and read what the program observes.

        :param posterior: one that gives values to latents with an improper prior.
        :param sites: the observed sites that are scored; all by default.
        :param latents: the latent sites that are compared; by default those that are no weights.
        :param rows: "together" where rows need each other; by default as the program or the
            posterior says.
        :raises TypeError: for data that are not tensors.
        :raises ValueError: for data or units that do not fit, and NaN.
        """
        num_samples = whole_number(num_samples, "num_samples", least=2)
        rows = rows_of(model, posterior) if rows is None else rows
        device = device_of(model)
        args = arguments_of("test", test, model, device=device)
        if train is not None:
            train = arguments_of("train", train, model, device=device, count=len(args))
        if ood is not None:
            ood = (ood,) if isinstance(ood, Tensor | Mapping) else ood
            ood = arguments_of("ood", ood, model, device=device, count=len(args) - 1)
            ood = ood if rows == "together" else _thinned(ood)
        if not (all(map(math.isfinite, units)) and units[0] > 0):
            raise ValueError(f"units must be (scale, shift) with a positive scale, got {units}")
        with seeded(seed):
            try:
                kind, y, seen, bounds, _ = observed(
                    model, args, posterior, sites=sites, draws=num_samples, rows=rows
                )
            except (ValueError, RuntimeError, IndexError):
                _check_rows("test", args)
                raise
        if seen is not None and y.is_floating_point():
            y = y.where(seen.numbers.to(y.device).reshape(y.shape), 0.0)
        if seen is not None and not seen.numbers.any():
            raise ValueError(
                f"masks leave out all test data of {', '.join(map(repr, kind.sites))}, and nothing "
                "is left to be scored: pass test data of which some were seen"
            )
        if kind.is_single and len(y) == leading_size((args[-1],)):
            _check_rows("test", args)  # only of several sites there may be different numbers
        if not kind.has_rows_of_one and (ood is not None or tuple(units) != (1, 0)):
            raise ValueError(
                "ood and units are for programs that observe a number for each row at one site, "
                f"and this one has the data of {', '.join(map(repr, kind.sites))}"
            )
        if train is not None and kind.by_rows:
            _check_rows("train", train)
        if ood is not None:
            with seeded(seed):
                needed = needs_targets(model, kind, args, posterior)
            ood = (*ood, args[-1][:1].expand(leading_size(ood), *y.shape[1:]) if needed else None)
        names = (latents,) if isinstance(latents, str) else latents
        known = kind.named if kind.latents is None else kind.latents
        if unknown := [name for name in names or () if name not in known]:
            raise ValueError(
                f"latents={unknown[0]!r} is no latent site of the program, which has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
        chosen = kind.named if names is None else tuple(names)
        units = units if kind.task == "regression" else (1.0, 0.0)
        return cls(
            model, kind, args, y, seen, bounds, train, ood, chosen, units, num_samples, seed=seed,
            **options,
        )  # fmt: skip


def arguments_of(
    name: str,
    data: Any,
    model: Callable | None,
    *,
    device: torch.device | None = None,
    count: int | None = None,
) -> tuple:
    """Data as a program's arguments, of an iterable all its batches together: finite tensors with
    rows, or dicts of them.

    :param name: ``"test"``, ``"train"``, ``"ood"`` or ``"data"``, for messages.
    :param model: that says which may be missing; None where it is not known, and targets may be.
    :param count: how many arguments there must be.
    """
    return _checked(model, name, _in_memory(name, data, device), count=count)


def _in_memory(name: str, parts: Any, device: torch.device | None) -> Any:
    tensors = isinstance(parts, list) and all(isinstance(part, Tensor) for part in parts)
    if tensors or not holds_batches(parts):
        return parts
    args, kwargs = Batches.of(parts if isinstance(parts, tuple) else (parts,), device).joined()
    if kwargs:
        raise ArgumentError(
            f"the batches of {name} are dicts by name ({', '.join(kwargs)}), and a comparison "
            "needs the targets last: let the loader give tuples (inputs, targets)"
        )
    return args


def _checked(model: Callable | None, name: str, parts: Any, *, count: int | None) -> tuple:
    require(parts, tuple | list, f"{name} must be a tuple of tensors, or batches of them")
    if not parts or count not in (None, len(parts)):
        wanted = "inputs and, last, targets" if name != "ood" else "inputs without targets"
        raise ValueError(
            f"{name} must hold {wanted}, as the test data do, got {len(parts)} tensors"
        )
    for place, part in enumerate(parts):
        argument = name if name == "ood" else f"{'y' if place == len(parts) - 1 else 'x'}_{name}"
        for entry, tensor in by_entry({argument: part}).items():
            require_tensors(**{entry: tensor})
            if tensor.dim() == 0 or not len(tensor):
                raise ValueError(f"{entry} must have at least one row")
            if model is None and place == len(parts) - 1:
                continue
            own = entry.replace(f"_{name}", "", 1)
            missing = model is not None and takes_missing(model, own)
            check_finite_tensor(entry, tensor, missing=missing)
    return tuple(map(as_dicts, parts))


def _check_rows(name: str, args: tuple) -> None:
    """Check that all tensors of the data have the same number of rows."""
    if not has_rows((args, {}), leading_size(args)):
        tensors = tensors_in(args)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"the {name} data must have the same number of rows, got {shapes}")


def _thinned(args: tuple) -> tuple:
    """At most so many rows as are kept of the test data, evenly spaced."""
    _check_rows("ood", args)
    return select_rows(args, spaced(leading_size(args)).to(device_of_rows(args)))


def spaced(rows: int) -> Tensor:
    """The places of the stored points: all, or evenly spaced ones of many."""
    count = min(rows, MOST_POINTS)
    return torch.arange(count, device="cpu") * rows // count


# ------------------------------------- test inputs near, between and beyond training inputs


def regions(test: tuple[Any, ...], train: tuple[Any, ...]) -> dict[str, Tensor]:
    """A mask over the test rows for each region: ``near``, ``between`` and ``beyond``.

    An input is near if its distance to a training input is at most twice the 95 % quantile of the
    distances between training inputs and their nearest neighbors. Other inputs lie between the
    training inputs if every feature is within its training range, else beyond them. Features are
    divided by their training sds. If there are many training inputs, evenly spaced ones are used.

    :param test: inputs of N rows, tensors or dicts of them.
    :param train: as many inputs, of M rows.
    :returns: bool ``(N,)`` each; nothing for inputs that are not numbers, or fewer than 3 rows.
    """
    tensors, others = tree_leaves(test), tree_leaves(train)
    if not tensors or len(tensors) != len(others):
        return {}
    if not all(x.is_floating_point() and x.layout is torch.strided for x in tensors + others):
        return {}
    points, known = _flat(tensors), _flat(others)
    if len(known) < 3 or points.shape[1] != known.shape[1]:
        return {}
    if len(known) > _MOST_TRAINING:
        rows = torch.arange(_MOST_TRAINING, device=known.device) * len(known) // _MOST_TRAINING
        known = known[rows]
    low, high = known.amin(0), known.amax(0)
    sd = known.std(0)
    sd = torch.where(sd > 0, sd, torch.ones_like(sd))
    among = torch.cdist(known / sd, known / sd).fill_diagonal_(torch.inf).amin(1)
    spacing = among.quantile(0.95)
    near = torch.cdist(points / sd, known / sd).amin(1) <= _FAR * spacing
    within = ((points >= low) & (points <= high)).all(1)
    return {"near": near, "between": ~near & within, "beyond": ~near & ~within}


def _flat(inputs: list[Tensor]) -> Tensor:
    return torch.cat([double(x.detach()).reshape(len(x), -1) for x in inputs], 1)
