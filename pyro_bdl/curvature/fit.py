"""Curvature of a program's log likelihood over data: passes over batches, in parts."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.curvature.alignment import Alignment
from pyro_bdl.curvature.data import (
    Batch,
    Batches,
    available_memory,
    has_rows,
    leading_size,
    rows,
)
from pyro_bdl.curvature.dense import DiagonalCurvature, FullCurvature
from pyro_bdl.curvature.fisher import (
    Cotangent,
    cell_weights,
    empirical_columns,
    exact_columns,
    num_data,
    parameters_of_any,
    sampled_columns,
    site_parameters,
)
from pyro_bdl.curvature.jacobian import Jacobian
from pyro_bdl.curvature.kronecker import KroneckerCurvature
from pyro_bdl.curvature.linearize import Linearization, Pullback, constrained
from pyro_bdl.curvature.low_rank import LowRankCurvature
from pyro_bdl.curvature.subset import Subset
from pyro_bdl.errors import BdlWarning
from pyro_bdl.modules import evaluation_mode, preserved_buffers
from pyro_bdl.observation import without_wrappers
from pyro_bdl.program import Run, Site, leave_open, record
from pyro_bdl.vectorize import _Allocations as Allocations

STRUCTURES = ("kron", "ekfac", "full", "diag", "low_rank")
CURVATURES = ("ggn", "ggn-mc", "empirical-fisher", "hessian")

_PROBED = 16
_BUDGET = 24 * 2**20  # bytes of a part's activations and gradients, at least
_PER_WEIGHT = 8  # or so many times the bytes of the weights, which every part reads and adds to
_COLUMNS_BUDGET = 8 * 2**20  # bytes of columns that are stacked, which costs a copy


@dataclass(frozen=True)
class Recipe:
    """Which matrix is computed, and in which form.

    :param structure: "kron", "ekfac", "full", "diag" or "low_rank".
    :param curvature: "ggn", the generalised Gauss-Newton matrix; "ggn-mc", its estimate from
        ``num_draws`` drawn observations per datum; "empirical-fisher"; or "hessian" (full only).
    :param rank: of "low_rank".
    :param reduce: of "kron" and "ekfac", see ``KroneckerCurvature``.
    """

    structure: str = "kron"
    curvature: str = "ggn"
    num_draws: int = 1
    rank: int = 50
    reduce: bool = False

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise ValueError(
                f"unknown structure {self.structure!r} (there are {', '.join(STRUCTURES)})"
            )
        if self.curvature not in CURVATURES:
            raise ValueError(
                f"unknown curvature {self.curvature!r} (there are {', '.join(CURVATURES)})"
            )
        if self.curvature == "hessian" and self.structure != "full":
            raise ValueError('curvature="hessian" needs structure="full": it may be indefinite')
        for name in ("num_draws", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def columns(self, site: Site) -> Iterator[Cotangent]:
        """Cotangents whose outer products are the Fisher information of a site."""
        if self.curvature == "ggn-mc":
            return sampled_columns(site, self.num_draws)
        if self.curvature == "empirical-fisher":
            return empirical_columns(site)
        return exact_columns(site)

    def empty(self, size: int, like: Tensor, before: Any = None) -> Any:
        """A curvature of this structure over nothing yet, in R^p."""
        if self.structure == "full":
            return FullCurvature(size, like)
        if self.structure == "diag":
            return DiagonalCurvature(size, like)
        if self.structure == "low_rank":
            return LowRankCurvature(size, like, rank=self.rank, start=before)
        corrected = self.structure == "ekfac"
        return KroneckerCurvature(
            size, like, reduce=self.reduce, corrected=corrected, start=before if corrected else None
        )


@dataclass
class Fitted:
    """A curvature over data, and what was met on the way.

    :param curvature: of minus the tempered log likelihood in the subset.
    :param log_likelihood: the tempered log likelihood of the data, factors included, a scalar.
    :param num_data: how many data, counted along the leading axes of the observed sites.
    :param gradient: of the tempered log likelihood in the subset, (p,).
    :param squares: of Normal sites the sum of ((y - loc) / scale)^2, each times its tempering.
    :param factor: by which the sums over the data passed were multiplied.
    :param cells: of Normal sites how many terms that sum has, each times its tempering.
    """

    curvature: Any
    log_likelihood: Tensor
    num_data: int
    gradient: Tensor
    squares: Tensor
    cells: Tensor
    factor: float


@torch.enable_grad()
def fit_curvature(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    data: Any,
    recipe: Recipe,
    *,
    before: Any = None,
    progress: bool = False,
) -> Fitted:
    """The curvature of a program's log likelihood at a vector (P,).

    Every datum counts once, times its tempering. Where the program speaks of more data than were
    passed (``num_data``), the sum is scaled up to them, and a warning says so.

    :param data: the program's arguments, or an iterable of batches of them.
    :param before: a curvature of earlier data that the result will include.
    """
    batches = data if isinstance(data, Batches) else Batches(data)
    like = vector.detach().new_empty(0, dtype=torch.promote_types(vector.dtype, torch.float32))
    check_memory(recipe, subset.size, like)
    if recipe.curvature == "hessian":
        curvature, seen = _hessian(model, subset, vector, batches, like)
    else:
        curvature, seen = _accumulated(
            model, subset, vector, batches, recipe, like, before, progress
        )
    factor = seen.factor()
    curvature.scale(factor)
    if isinstance(curvature, LowRankCurvature):
        curvature.finish()
    elif before is not None:
        before.merge(curvature)
        curvature = before
    total = torch.as_tensor(seen.log_likelihood * factor)
    gradient = subset.take(seen.gradient) * factor
    squares, cells = seen.squares * factor, seen.cells * factor
    return Fitted(curvature, total, seen.num_data, gradient, squares, cells, factor)


def _accumulated(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Batches,
    recipe: Recipe,
    like: Tensor,
    before: Any,
    progress: bool,
) -> tuple[Any, "_Seen"]:
    curvature = recipe.empty(subset.size, like, before)
    known: dict[Any, Alignment] = {}
    seen = _Seen(vector)
    states = _random_states(vector.device)
    for number in range(curvature.passes):
        if number:  # the same draws, so that all passes are about one matrix
            _set_random_states(states)
        if hasattr(curvature, "start_pass"):
            curvature.start_pass(number)
        parts = tqdm(
            linearizations(model, subset, vector, batches, recipe, known=known),
            desc=f"curvature, pass {number + 1} of {curvature.passes}",
            unit="batch",
            disable=not progress,
        )
        for linearization in parts:
            if number == 0:
                seen.add(linearization)
            for jacobian in fisher_jacobians(linearization, recipe):
                curvature.add(jacobian)
            if hasattr(curvature, "end_batch"):
                curvature.end_batch()
    return curvature, seen


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _check_shape(name: str, site: Site) -> None:
    """:raises ValueError: where values broadcast against a distribution, which hides data."""
    distribution: Any = site.distribution
    if site.log_prob().shape != distribution.batch_shape:
        raise ValueError(
            f"site '{name}' observes values of shape {tuple(site.value.shape)} under a "
            f"distribution of shape {tuple(distribution.shape())}: put it into a plate over "
            "the data, or expand the distribution"
        )


class _Seen:
    """Counts data and adds up their log likelihood and its gradient in a pass."""

    def __init__(self, vector: Tensor) -> None:
        self.log_likelihood: Any = 0.0
        self.num_data = 0
        self.gradient = torch.zeros_like(vector)
        self.squares = self.cells = torch.zeros((), dtype=torch.float64, device=vector.device)
        self.stated: float = 0.0

    def add(self, linearization: Linearization) -> None:
        run = linearization.run
        if not run.observed:
            raise ValueError(
                "the program has no observed site: pass the targets, so that a sample statement "
                "gets obs=..."
            )
        part, largest = linearization.vector.new_zeros(()), 0
        for name, site in run.observed.items():
            if site.value is None:
                raise ValueError(
                    f"site '{name}' has no observation: pass the targets as well, as in "
                    "laplace_approximation((x, y))"
                )
            count = num_data(site)
            _check_shape(name, site)
            self._add_squares(site)
            largest = max(largest, count)
            self.stated = max(self.stated, count * site.subsampling)
            part = part + (site.log_prob() / site.subsampling).sum()
        for factor in run.factors.values():
            part = part + (factor.log_prob() / factor.subsampling).sum()
        if not torch.isfinite(part):
            raise ValueError(
                f"the log likelihood at the MAP is {float(part.detach())}: the data or the "
                "network's outputs are not finite"
            )
        leaves = [linearization.leaves[name] for name in linearization.subset.parts]
        if part.requires_grad:
            found = torch.autograd.grad(part, leaves, retain_graph=True, allow_unused=True)
            for name, gradient in zip(linearization.subset.parts, found, strict=True):
                if gradient is not None:
                    where = linearization.subset.layout.slices[name]
                    self.gradient[where] += gradient.reshape(-1)
        self.log_likelihood = self.log_likelihood + part.detach().double()
        self.num_data += largest

    def _add_squares(self, site: Site) -> None:
        base: Any = without_wrappers(site.distribution)[0]
        if type(base).__name__ == "Normal":
            weights = cell_weights(site).square()
            offsets = ((site.value - base.loc) / base.scale).detach()
            self.squares = self.squares + (weights * offsets.square()).sum().double()
            self.cells = self.cells + weights.sum().double()

    def factor(self) -> float:
        if self.stated <= self.num_data or not self.num_data:
            return 1.0
        warnings.warn(
            f"the program speaks of {self.stated:.0f} data, {self.num_data} were passed: their "
            "curvature is scaled up; pass all data as an iterable of batches for the exact sum",
            BdlWarning,
            stacklevel=5,
        )
        return self.stated / self.num_data


# ------------------------------------------------------------------------------- batches in parts


def linearizations(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Iterable[Batch],
    recipe: Recipe | None,
    *,
    known: dict[Any, Alignment] | None = None,
    every_output: bool = False,
) -> Iterator[Linearization]:
    """Each batch of the data at the vector, cut into parts where it is large.

    :param every_output: size the parts for Jacobians of all outputs at once.
    """
    known = {} if known is None else known
    size = None
    for batch in batches:
        if size is None:
            size = _part_size(model, subset, vector, batch, recipe, every_output)
        count = leading_size(batch) if size else 0
        if not size or count <= size:
            yield Linearization(model, subset, vector, *batch, known=known)
            continue
        for start in range(0, count, size):
            part = rows(batch, start, start + size, count)
            yield Linearization(model, subset, vector, *part, known=known)


def _outputs(model: Callable, subset: Subset, vector: Tensor, batch: Batch) -> Run:
    layout = subset.layout
    with torch.no_grad(), evaluation_mode(), preserved_buffers():
        values = constrained(layout, layout.unflatten(vector.detach()))
        return record(model, values, *batch, draw=leave_open)


def _part_size(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batch: Batch,
    recipe: Recipe | None,
    every_output: bool,
) -> int:
    """How many rows to take at once; 0 for all of a batch.

    A batch is cut only where a part of it gives the same outputs as the whole.
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
        return 0  # the program wants all of its data; the run over them tells what is wrong
    if whole.factors or not _agree(part, whole):
        return 0
    per_datum = 2.0 * allocations.bytes / some
    item = vector.element_size()
    if every_output:
        bases = [without_wrappers(site.distribution)[0] for site in whole.observed.values()]
        outputs = sum(v.numel() for base in bases for v in parameters_of_any(base).values()) / some
        per_datum *= 1.0 + 0.5 * outputs
    if recipe is not None and recipe.structure in ("full", "low_rank"):
        per_datum += item * subset.size
    elif recipe is None or recipe.structure != "kron":
        shared = [s.size for s in subset.layout.latents.values() if len(s.shape) > 2]
        per_datum += item * max(shared, default=0)
    budget = max(_BUDGET, _PER_WEIGHT * item * subset.layout.size)
    return max(1, int(budget / per_datum))


def _agree(part: Run, whole: Run) -> bool:
    """Whether a run over the first rows gives the first rows of a longer run."""
    for name, site in whole.observed.items():
        if name not in part.observed:
            return False
        size = num_data(part.observed[name])
        if size == num_data(site):  # of no datum: parts would count it again and again
            return False
        first = parameters_of_any(without_wrappers(part.observed[name].distribution)[0])
        second = parameters_of_any(without_wrappers(site.distribution)[0])
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


# ------------------------------------------------------------------------------- Jacobians


def fisher_jacobians(linearization: Linearization, recipe: Recipe) -> Iterator[Jacobian]:
    """Jacobians whose rows' outer products add up to the batch's curvature."""
    for name, site in linearization.run.observed.items():
        if not site_parameters(site):
            _check_readable(linearization, name, site)
            continue
        known = _softmax_jacobian(linearization, name, site, recipe)
        if known is not None:
            yield known
            continue
        groups: dict[tuple[str, ...], list[Cotangent]] = {}
        most = _columns_at_once(linearization, num_data(site), recipe)
        for column in recipe.columns(site):
            touched = tuple(key for key, value in column.items() if value.any())
            if not touched:
                continue
            groups.setdefault(touched, []).append(column)
            if len(groups[touched]) >= most:
                yield _jacobian(linearization, name, touched, groups.pop(touched))
        for touched, columns in groups.items():
            yield _jacobian(linearization, name, touched, columns)


def _check_readable(linearization: Linearization, name: str, site: Site) -> None:
    """:raises ValueError: where latents enter a distribution in ways that are not understood."""
    total = site.log_prob().sum()
    leaves = [linearization.leaves[part] for part in linearization.subset.parts]
    if not total.requires_grad:
        return
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    if any(gradient is not None for gradient in found):
        kind = type(without_wrappers(site.distribution)[0]).__name__
        raise ValueError(
            f"the Fisher information of site '{name}' is not known: its {kind} is not made of "
            'tensors that can be read off it; use structure="full" with curvature="hessian", or '
            "observe a distribution with parameters"
        )


def _softmax_jacobian(
    linearization: Linearization, name: str, site: Site, recipe: Recipe
) -> Jacobian | None:
    """All columns at once where the subset is the last layer of a classifier."""
    base, _ = without_wrappers(site.distribution)
    if (
        recipe.curvature != "ggn"
        or recipe.structure not in ("kron", "ekfac", "diag")
        or type(base).__name__ not in ("Categorical", "OneHotCategorical")
        or tuple(site_parameters(site)) != ("logits",)
        or len(base.batch_shape) != 1
    ):
        return None
    return _pullback(linearization, name, ("logits",)).softmax(cell_weights(site).square())


def _jacobian(
    linearization: Linearization, name: str, keys: tuple[str, ...], columns: list[Cotangent]
) -> Jacobian:
    pullback = _pullback(linearization, name, keys)
    return pullback.jacobian([[column[key] for key in keys] for column in columns])


def _pullback(linearization: Linearization, name: str, keys: tuple[str, ...]) -> Pullback:
    def outputs(run: Run) -> Sequence[Tensor]:
        parameters = parameters_of_any(without_wrappers(run.observed[name].distribution)[0])
        return [parameters[key] for key in keys]

    site = linearization.run.observed[name]
    return linearization.pullback(outputs, num_data(site), label=(name, keys))


def _columns_at_once(linearization: Linearization, count: int, recipe: Recipe) -> int:
    item = linearization.vector.element_size()
    per_column = item * sum(math.prod(use.output_shape) for use in linearization.uses)
    if recipe.structure in ("full", "low_rank"):
        per_column += item * linearization.subset.size * count
    elif recipe.structure != "kron":
        shared = [math.prod(u.shape) for u in linearization.uses if u.unfold is not None]
        per_column += item * max(shared, default=0) * count
    return max(1, int(_COLUMNS_BUDGET / max(1, per_column)))


# ------------------------------------------------------------------------------- Hessian, memory


def _hessian(
    model: Callable, subset: Subset, vector: Tensor, batches: Batches, like: Tensor
) -> tuple[FullCurvature, _Seen]:
    """Minus the second derivatives of the log likelihood, factors included."""
    curvature, seen = FullCurvature(subset.size, like), _Seen(vector)
    for linearization in linearizations(model, subset, vector, batches, None):
        seen.add(linearization)
        total: Any = 0.0
        run = linearization.run
        for site in (*run.observed.values(), *run.factors.values()):
            total = total + (site.log_prob() / site.subsampling).sum()
        leaves = [linearization.leaves[name] for name in subset.parts]
        chosen = [subset.chosen[name] for name in subset.parts]
        gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        start = 0
        for gradient, leaf, kept in zip(gradients, leaves, chosen, strict=True):
            flat = torch.zeros_like(leaf) if gradient is None else gradient
            flat = flat.reshape(-1)
            for entry in flat if kept is None else flat[kept.to(flat.device)]:
                if entry.requires_grad:
                    found = torch.autograd.grad(entry, leaves, retain_graph=True, allow_unused=True)
                    row = [
                        (torch.zeros_like(other) if g is None else g).reshape(-1)
                        for g, other in zip(found, leaves, strict=True)
                    ]
                    row = [
                        r if k is None else r[k.to(r.device)]
                        for r, k in zip(row, chosen, strict=True)
                    ]
                    curvature.matrix[start] -= torch.cat(row)
                start += 1
    curvature.matrix = 0.5 * (curvature.matrix + curvature.matrix.mT)
    return curvature, seen


def check_memory(recipe: Recipe, size: int, like: Tensor) -> None:
    """:raises MemoryError: before a matrix is made that cannot fit, naming what would."""
    copies = {"full": 3 * size, "low_rank": 3 * (recipe.rank + 10), "diag": 3}
    needed = copies.get(recipe.structure, 0) * size * like.element_size()
    available = available_memory(like.device)
    if available is None or needed <= available:
        return
    others = (
        '"kron" or "diag"' if recipe.structure == "low_rank" else '"kron", "low_rank" or "diag"'
    )
    raise MemoryError(
        f'structure="{recipe.structure}" over {size:,} latents needs about '
        f"{needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free: use structure={others}, "
        "or a subset of the latents"
    )


def check_factors(run: Run, recipe: Recipe) -> None:
    """Warn where the program has factor statements, which have no Fisher information."""
    if run.factors and recipe.curvature != "hessian":
        warnings.warn(
            f"the factor '{next(iter(run.factors))}' has no Fisher information and is left out of "
            'the curvature; structure="full" with curvature="hessian" includes it',
            BdlWarning,
            stacklevel=4,
        )
