"""Linearizations of batches of data, cut into pieces that fit in memory."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.curvature.jacobian.datum_axes import Alignment
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.distributions.take_apart import base_distribution, parameters_of_any
from pyro_bdl.program.batches import Batch, has_rows, leading_size, rows
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, leave_open, record
from pyro_bdl.utils.memory import Allocations, bytes_at_once
from pyro_bdl.utils.module_state import evaluation_mode

_PROBED = 17  # rows; other axes are seldom as long, so that it is clear which one is the data's
_BUDGET = 24 * 2**20  # bytes for the activations and gradients of a piece, at least
_PER_WEIGHT = 8  # or this multiple of the weights' bytes, which every piece reads and adds to


def linearizations(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Iterable[Batch],
    config: CurvatureConfig | None,
    *,
    known: dict[Any, Alignment] | None = None,
    every_output: bool = False,
    as_rows: bool = False,
) -> Iterator[Linearization]:
    """Yield the linearization of each batch at the vector; a large batch is cut into pieces.

    A few rows of the first batch come first, so that alignments, which take a dozen passes, are
    found on them.

    :param known: alignments found in earlier batches; filled here.
    :param every_output: choose the pieces' size for Jacobians of all outputs at once.
    :param as_rows: as rows over all latents, in float64.
    """
    known = {} if known is None else known
    size = None
    for batch in batches:
        few = 0
        if size is None:
            size = _part_size(model, subset, vector, batch, config, every_output, as_rows)
            few = 0 if known else min(_PROBED, size)  # to find the alignments on
        count = leading_size(batch) if size else 0
        if not size or count <= min(size, 4 * few or size):
            yield Linearization(model, subset, vector, *batch, known=known)
            continue
        for start, stop in pairwise(sorted({0, few, *range(few, count, size), count})):
            part = rows(batch, start, stop, count)
            yield Linearization(model, subset, vector, *part, known=known)


def _outputs(model: Callable, subset: Subset, vector: Tensor, batch: Batch) -> Run:
    layout = subset.layout
    with torch.no_grad(), evaluation_mode(model):
        values = layout.to_supports(layout.unflatten(vector.detach()))
        return record(model, values, *batch, draw=leave_open)


def _part_size(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batch: Batch,
    config: CurvatureConfig | None,
    every_output: bool,
    as_rows: bool,
) -> int:
    """Return the number of rows to use at once, 0 for the whole batch.

    A batch is cut only if its first rows alone give the same outputs as in the whole batch.
    """
    count = leading_size(batch)
    if count < 2 or not has_rows(batch, count):
        return 0
    some = min(count, _PROBED)
    try:
        with Allocations() as allocations:
            whole = _outputs(model, subset, vector, rows(batch, 0, some, count))
        part = _outputs(model, subset, vector, rows(batch, 0, (some + 1) // 2, count))
    except Exception:
        return 0  # the program needs all of its data; the run over them reports errors
    if whole.factors or not _agree(part, whole):
        return 0
    per_datum = 2.0 * allocations.bytes / some
    item = vector.element_size()
    if every_output:
        bases = [base_distribution(site.distribution) for site in whole.observed.values()]
        outputs = sum(v.numel() for base in bases for v in parameters_of_any(base).values()) / some
        per_datum *= 1.0 + 0.5 * outputs
        per_datum += 8 * outputs * subset.size if as_rows else 0
    shared = [s.size for s in subset.layout.latents.values() if len(s.shape) > 2]
    largest = max(shared, default=0)
    numbers = config.kind.numbers_per_gradient(subset.size, largest) if config else largest
    per_datum += item * numbers
    budget = bytes_at_once(max(_BUDGET, _PER_WEIGHT * item * subset.layout.size))
    return max(1, int(budget / max(per_datum, 1.0)))


def _agree(part: Run, whole: Run) -> bool:
    """Return True if a run over the first rows gives the first rows of a longer run."""
    for name, site in whole.observed.items():
        if name not in part.observed:
            return False
        size = num_data(part.observed[name])
        if size == num_data(site):  # not per datum: each piece would count it again
            return False
        first = parameters_of_any(base_distribution(part.observed[name].distribution))
        second = parameters_of_any(base_distribution(site.distribution))
        for key, value in first.items():
            ahead = second[key][:size] if second[key].dim() else second[key]
            if value.shape != ahead.shape:
                return False
            slack = 1e-3 * float(ahead.abs().max()) if ahead.is_floating_point() else 0.0
            if not math.isfinite(slack) or not torch.allclose(
                value, ahead, rtol=1e-3, atol=slack, equal_nan=True
            ):
                return False
    return True
