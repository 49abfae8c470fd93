"""Curvature of a program's log likelihood over data: passes over batches, in parts."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_bdl.curvature.chunking import linearizations
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.fisher import (
    cell_weights,
    check_information,
    check_scales,
    num_data,
    site_parameters,
)
from pyro_bdl.curvature.fisher_roots import Cotangent
from pyro_bdl.curvature.jacobian.datum_axes import Alignment
from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.linearization import Linearization, Pullback
from pyro_bdl.curvature.linear_outputs import LinearOutputs
from pyro_bdl.curvature.prior import hyperpriors
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.distributions.take_apart import base_distribution, parameters_of_any
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.trace import Run, Site, leave_open, record
from pyro_bdl.program.validation import check_finite_batches
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers

_COLUMNS_BUDGET = 8 * 2**20  # bytes of columns that are stacked, which costs a copy


@dataclass
class Fitted:
    """A curvature over data, with the sums of the same pass.

    :param curvature: of minus the tempered log likelihood in the subset.
    :param log_likelihood: the tempered log likelihood of the data, factors included, a scalar.
    :param num_data: how many data, counted along the leading axes of the observed sites.
    :param gradient: of the tempered log likelihood in the subset, (p,).
    :param squares: of Normal sites the sum of ((y - loc) / scale)^2, each times its tempering.
    :param factor: by which the sums over the data passed were multiplied.
    :param cells: of Normal sites how many terms that sum has, each times its tempering.
    """

    curvature: Curvature
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
    config: CurvatureConfig,
    *,
    before: Any = None,
    offset: Tensor | None = None,
    progress: bool = False,
) -> Fitted:
    """Compute the curvature of a program's log likelihood at a vector (P,).

    Every datum counts once, times its tempering. Where the program speaks of more data than were
    passed (``num_data``), the sum is scaled up to them, and a warning says so. A program that does
    so for one observed site and not for another with as many rows is refused.

    :param data: the program's arguments, or an iterable of batches of them.
    :param before: a curvature of earlier data that the result will include.
    :param offset: of the subset (p,); the Fisher information is then that of the linearized
        outputs there, J and the other sums being those at the vector.
    :raises ValueError: for an offset with curvature="hessian", which is no Gauss-Newton matrix.
    """
    if offset is not None and config.curvature == "hessian":
        raise ValueError(
            'curvature="hessian" has no linearized outputs to be evaluated at: use "ggn"'
        )
    batches = data if isinstance(data, Batches) else Batches(data)
    batches.check_same("location", vector)
    like = vector.detach().new_empty(0, dtype=torch.promote_types(vector.dtype, torch.float32))
    check_memory(config, subset.size, like)
    if config.curvature == "hessian":
        curvature, seen = batches.together(
            lambda: _hessian(model, subset, vector, batches, config, like)
        )
        batches.add_up(*curvature.sums())
        seen.add_up(batches)
    else:
        curvature, seen = _accumulated(
            model, subset, vector, batches, config, like, before, offset, progress
        )
    factor = seen.factor()
    curvature.scale(factor)
    curvature = curvature.finish(before)
    total = torch.as_tensor(seen.log_likelihood * factor, device=seen.gradient.device)
    gradient = subset.take(seen.gradient) * factor
    squares, cells = seen.squares * factor, seen.cells * factor
    return Fitted(curvature, total, seen.num_data, gradient, squares, cells, factor)


def _accumulated(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Batches,
    config: CurvatureConfig,
    like: Tensor,
    before: Any,
    offset: Tensor | None,
    progress: bool,
) -> tuple[Curvature, "_Seen"]:
    curvature = config.kind.empty(subset, like, config, before)
    known: dict[Any, Alignment] = {}
    seen = _Seen(vector, batches)
    states = _random_states(vector.device)

    def one_pass(number: int) -> None:
        if number:  # the same draws, so that all passes are about one matrix
            _set_random_states(states, vector.device)
        curvature.start_pass(number)
        parts = tqdm(
            linearizations(model, subset, vector, batches.part(), config, known=known),
            desc=f"curvature, pass {number + 1} of {curvature.passes}",
            unit="batch",
            disable=not progress,
            leave=False,
            delay=1,
        )
        for linearization in parts:
            if number == 0:
                first = not seen.num_data
                seen.add(linearization)
                for name, site in linearization.run.observed.items() if first else ():
                    check_information(name, site)
            for jacobian in fisher_jacobians(linearization, config, offset):
                curvature.add(jacobian)
            curvature.end_batch()

    for number in range(curvature.passes):
        batches.together(functools.partial(one_pass, number))
        if batches.ranks is not None:
            batches.add_up(*curvature.sums())
    seen.add_up(batches)
    return curvature, seen


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


class FactorStatements:
    """A memory of factors that tells those of the data from those of the latents alone.

    ``values`` are those of the last batch, without hyperpriors, which are no part of the
    likelihood. ``new`` are the factors to be counted for it: not those
    that had the same value in the batch before, which are about the latents alone and count once.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.new: list[Site] = []

    def read(self, run: Run, apart: Iterable[str]) -> None:
        """Take up a run.

        :param apart: the names of the hyperpriors.
        """
        before, apart = self.values, set(apart)
        factors = {name: site for name, site in run.factors.items() if name not in apart}
        self.values = {name: site.log_prob().detach() for name, site in factors.items()}
        self.new = [
            site
            for name, site in factors.items()
            if name not in before or not torch.equal(before[name], self.values[name])
        ]


class _Seen:
    """Sums over the data of a pass: their number, log likelihood and its gradient."""

    def __init__(
        self, vector: Tensor, batches: Batches, *, second_derivatives: bool = False
    ) -> None:
        self.batches, self.second_derivatives = batches, second_derivatives
        self.factors = FactorStatements()
        self.log_likelihood: Any = 0.0
        self.num_data = 0
        self.gradient = torch.zeros_like(vector)
        self.squares = self.cells = torch.zeros((), dtype=torch.float64, device=vector.device)
        self.stated: float = 0.0
        self.scaled = False

    def add(self, linearization: Linearization) -> None:
        run = linearization.run
        if not run.observed and run.factors and not self.second_derivatives:
            raise UnsupportedProgramError(
                f"the likelihood is in the factor '{next(iter(run.factors))}', which has no Fisher "
                'information: take structure="full" with curvature="hessian", write it as a sample '
                "statement with obs=..., or use a variational guide or NUTS"
            )
        if not run.observed and not run.factors:
            raise ValueError(
                "the program has no observed site: pass the targets, so that a sample statement "
                "gets obs=..."
            )
        check_scales(run.observed)
        check_support(run, first_row=self.num_data)
        part, largest = linearization.vector.new_zeros(()), 0
        for name, site in run.observed.items():
            if site.value is None:
                raise ValueError(
                    f"site '{name}' has no observation: pass the targets as well, as in "
                    "laplace_approximation((x, y))"
                )
            count = num_data(site)
            self._add_squares(site)
            largest = max(largest, count)
            self.stated = max(self.stated, round(count * site.subsampling, 3))  # N / B * B
            self.scaled = self.scaled or site.subsampling != 1
            part = part + (site.log_prob() / site.subsampling).sum()
        self.factors.read(run, hyperpriors(run, linearization.leaves))
        for factor in self.factors.new:
            part = part + (factor.log_prob() / factor.subsampling).sum()
        if not torch.isfinite(part):
            check_finite_batches(linearization.model, self.batches.part())
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
        base: Any = base_distribution(site.distribution)
        if type(base).__name__ == "Normal":
            weights = cell_weights(site).square()
            offsets = ((site.value - base.loc) / base.scale).detach()
            self.squares = self.squares + (weights * offsets.square()).sum().double()
            self.cells = self.cells + weights.sum().double()

    def add_up(self, batches: Batches) -> None:
        """Add the sums of the other processes, where the data are shared among them."""
        ranks = batches.ranks
        if ranks is None:
            return
        counts = self.squares.new_tensor([self.num_data, float(self.log_likelihood)])
        self.squares, self.cells = self.squares.clone(), self.cells.clone()
        ranks.add_up([counts, self.gradient, self.squares, self.cells])
        self.num_data, self.log_likelihood = round(counts[0].item()), counts[1]
        stated, scaled = zip(*ranks.gather((self.stated, self.scaled)), strict=True)
        self.stated, self.scaled = max(stated), any(scaled)
        if self.scaled and self.num_data > self.stated:
            warnings.warn(
                f"the processes hold {self.num_data} data and the program speaks of "
                f"{self.stated:.0f}: those that several hold, such as the rows that a "
                "DistributedSampler repeats, count several times",
                BdlWarning,
                stacklevel=5,
            )

    def factor(self) -> float:
        if self.stated <= self.num_data or not self.num_data:
            return 1.0
        if self.factors.values and self.second_derivatives:
            raise ValueError(
                f"the program speaks of {self.stated:.0f} data, {self.num_data} were passed, and "
                f"by what the factor '{next(iter(self.factors.values))}' is to be scaled up is not "
                "known: pass all data, in batches if need be"
            )
        warnings.warn(
            f"the program speaks of {self.stated:.0f} data, {self.num_data} were passed: their "
            "curvature is scaled up; for the exact sum pass all data as an iterable of batches, or "
            "let a plate that picks its own rows (subsample_size) take all of them",
            BdlWarning,
            stacklevel=5,
        )
        return self.stated / self.num_data


# ------------------------------------------------------------------------------- Jacobians


def fisher_jacobians(
    linearization: Linearization, config: CurvatureConfig, offset: Tensor | None = None
) -> Iterator[Jacobian]:
    """Yield Jacobians whose rows' outer products add up to the batch's curvature.

    :param offset: where the Fisher information is that of the linearized outputs, (p,).
    """
    for name in linearization.run.observed:
        if offset is None:
            yield from site_jacobians(linearization, name, config)
        else:
            yield from _moved_jacobians(linearization, name, config, offset)


def _moved_jacobians(
    linearization: Linearization, name: str, config: CurvatureConfig, offset: Tensor
) -> Iterator[Jacobian]:
    """Yield the Jacobians of a site's unconstrained parameters, weighed by their information at
    an offset."""
    outputs = LinearOutputs.of_site(linearization, name, linearization.run.observed[name])
    if not outputs.moving:
        return
    values = {key: value.detach() for key, value in outputs.moved(offset).items()}
    pullback = outputs.pullback()
    most = _columns_at_once(linearization, outputs.num_data, config)
    columns: list[list[Tensor]] = []
    for column in outputs.unconstrained(values, config.columns):
        columns.append([column[key] for key in outputs.moving])
        if len(columns) >= most:
            yield pullback.jacobian(columns)
            columns = []
    if columns:
        yield pullback.jacobian(columns)


def site_jacobians(
    linearization: Linearization, name: str, config: CurvatureConfig
) -> Iterator[Jacobian]:
    """Yield the Jacobians of one observed site, each datum counted once."""
    site = linearization.run.observed[name]
    if not site_parameters(site):
        _check_readable(linearization, name, site)
        return
    known = _softmax_jacobian(linearization, name, site, config)
    if known is not None:
        yield known
        return
    groups: dict[tuple[str, ...], list[Cotangent]] = {}
    most = _columns_at_once(linearization, num_data(site), config)
    for column in config.columns(site):
        touched = tuple(key for key, value in column.items() if value.any())
        if not touched:
            continue
        groups.setdefault(touched, []).append(column)
        if len(groups[touched]) >= most:
            yield _jacobian(linearization, name, touched, groups.pop(touched))
    for touched, columns in groups.items():
        yield _jacobian(linearization, name, touched, columns)


def _check_readable(linearization: Linearization, name: str, site: Site) -> None:
    """Raise an error if latents move a site's density other than by its parameters.

    :raises ValueError: where they enter the distribution in ways that are not understood.
    """
    total = site.log_prob().sum()
    leaves = [linearization.leaves[part] for part in linearization.subset.parts]
    if not total.requires_grad:
        return
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    if any(gradient is not None for gradient in found):
        kind = type(base_distribution(site.distribution)).__name__
        raise ValueError(
            f"the Fisher information of site '{name}' is not known: its {kind} is not made of "
            'tensors that can be read off it; use structure="full" with curvature="hessian", or '
            "observe a distribution with parameters"
        )


def _softmax_jacobian(
    linearization: Linearization, name: str, site: Site, config: CurvatureConfig
) -> Jacobian | None:
    """Return all columns at once where the subset is the last layer of a classifier."""
    base = base_distribution(site.distribution)
    if (
        config.curvature != "ggn"
        or not config.kind.takes_softmax
        or type(base).__name__ not in ("Categorical", "OneHotCategorical")
        or tuple(site_parameters(site)) != ("logits",)
        or len(base.batch_shape) != 1
    ):
        return None
    return site_pullback(linearization, name, ("logits",)).softmax(cell_weights(site).square())


def _jacobian(
    linearization: Linearization, name: str, keys: tuple[str, ...], columns: list[Cotangent]
) -> Jacobian:
    pullback = site_pullback(linearization, name, keys)
    return pullback.jacobian([[column[key] for key in keys] for column in columns])


def site_pullback(linearization: Linearization, name: str, keys: tuple[str, ...]) -> Pullback:
    """Parameters of a site's distribution, ready to be differentiated datum by datum."""

    def outputs(run: Run) -> Sequence[Tensor]:
        parameters = parameters_of_any(base_distribution(run.observed[name].distribution))
        return [parameters[key] for key in keys]

    site = linearization.run.observed[name]
    return linearization.pullback(outputs, num_data(site), label=(name, keys))


def _columns_at_once(linearization: Linearization, count: int, config: CurvatureConfig) -> int:
    item = linearization.vector.element_size()
    per_column = item * sum(math.prod(use.output_shape) for use in linearization.uses)
    shared = [math.prod(u.shape) for u in linearization.uses if u.unfold is not None]
    numbers = config.kind.numbers_per_gradient(linearization.subset.size, max(shared, default=0))
    per_column += item * numbers * count
    return max(1, int(_COLUMNS_BUDGET / max(1, per_column)))


# ------------------------------------------------------------------------------- Hessian, memory


def _hessian(
    model: Callable,
    subset: Subset,
    vector: Tensor,
    batches: Batches,
    config: CurvatureConfig,
    like: Tensor,
) -> tuple[Curvature, _Seen]:
    """Minus the second derivatives of the log likelihood, factors included."""
    matrix = like.new_zeros(subset.size, subset.size)
    seen = _Seen(vector, batches, second_derivatives=True)
    for linearization in linearizations(model, subset, vector, batches.part(), None):
        seen.add(linearization)
        total: Any = 0.0
        run = linearization.run
        for site in (*run.observed.values(), *seen.factors.new):
            total = total + (site.log_prob() / site.subsampling).sum()
        leaves = [linearization.leaves[name] for name in subset.parts]
        chosen = [subset.chosen[name] for name in subset.parts]
        if not isinstance(total, Tensor) or not total.requires_grad:
            continue
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
                    matrix[start] -= torch.cat(row)
                start += 1
    return config.kind.from_matrix(0.5 * (matrix + matrix.mT)), seen


def check_factors(run: Run, leaves: Mapping[str, Tensor], config: CurvatureConfig) -> None:
    """Warn where the program has factor statements, which have no Fisher information."""
    moved = [n for n, site in run.factors.items() if reaches(site.log_prob(), leaves.values())]
    if moved and config.curvature != "hessian":
        warnings.warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            "the curvature; it counts in the MAP, and to first order in the evidence; "
            'structure="full" with curvature="hessian" includes it',
            BdlWarning,
            stacklevel=4,
        )


def warn_of_randomness(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """Warn where a program in evaluation mode observes other distributions in a second run at the
    same latents, as dropout that is always on makes it."""
    values = subset.layout.constrain(vector)[0]
    with torch.no_grad(), evaluation_mode(model), preserved_buffers(model):
        first = record(model, values, args, kwargs, draw=leave_open)
        again = record(model, {**values, **first.subsamples}, args, kwargs, draw=leave_open)
    for name in first.observed:
        before, after = (
            parameters_of_any(base_distribution(run.observed[name].distribution))
            for run in (first, again)
        )
        for key, value in before.items():
            if not torch.allclose(value, after[key].to(value), rtol=1e-3, equal_nan=True):
                warnings.warn(
                    f"the {key} of site '{name}' is random: it differs between two runs of the "
                    "program in evaluation mode with the same latents, and the approximation is "
                    "that of one draw; for dropout write F.dropout(x, p, self.training) or "
                    "nn.Dropout, or take AutoMCDropout",
                    BdlWarning,
                    stacklevel=5,
                )
                return
