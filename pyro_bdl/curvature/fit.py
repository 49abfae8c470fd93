"""The curvature of a program's log likelihood over data, in passes over batches: Jacobians of the
observed sites, whose rows' outer products it is the sum of, and the sums that go with it."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig, check_memory, chosen_config, rows_of
from pyro_bdl.curvature.fisher import (
    cell_weights,
    check_information,
    check_scales,
    num_data,
    site_parameters,
)
from pyro_bdl.curvature.hyperparameters import Noise, shares_noise
from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.jacobian.linearization import VJP, Linearization
from pyro_bdl.curvature.linearized_data import GaussNewtonProducts
from pyro_bdl.curvature.prior import FactorStatements, hyperpriors
from pyro_bdl.curvature.structures.base import Curvature
from pyro_bdl.distributions.families import Cotangent, name_of
from pyro_bdl.distributions.parameters import SEVERAL_CLASSES, base_distribution
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.batches import Batches, leading_size
from pyro_bdl.program.check import check_finite_batches
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import has_own_functions, reaches
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.memory import bytes_at_once, stored_numbers
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import set_torch_states, torch_states

_COLUMNS_BUDGET = 8 * 2**20  # bytes of columns that are stacked, which copies them
SCALED_UP = (
    "the program states more data than it was given, so that each part is scaled up to all of them "
    "and parts do not add up: pass all data to laplace_approximation as an iterable of batches, or "
    "leave num_data out of the program"
)


def _refuse_together(linearization: Linearization, name: str, config: CurvatureConfig) -> NoReturn:
    """Refuse a batch that was run as a whole for a structure of single rows.

    :param name: the first site with several data.
    """
    rows = leading_size((linearization.args, linearization.kwargs))
    counts = {other: num_data(site) for other, site in linearization.run.observed.items()}
    own = next((other for other, count in counts.items() if rows and count != rows), None)
    reason = (
        f"those of site '{name}' depend on each other, or are no rows of the program's arguments: "
        "pass tensors whose first dimension numbers the data, or"
        if own is None
        else f"the site '{own}' has {counts[own]} data beside the {rows} rows of the program's "
        "arguments: pass its data as one entry for each row, or"
    )
    raise UnsupportedProgramError(
        f'structure="{config.structure}" takes the rows of the data one at a time, and {reason} '
        'use structure="full" or "diag"'
    )


def fisher_jacobians(linearization: Linearization, config: CurvatureConfig) -> Iterator[Jacobian]:
    """Yield Jacobians whose rows' outer products add up to the batch's curvature."""
    for name, site in linearization.run.observed.items():
        known = None if linearization.rows is None else linearization.rows.num_data
        if config.kind.takes_single_rows and num_data(site) not in (1, known):
            _refuse_together(linearization, name, config)
        yield from site_jacobians(linearization, name, config)


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

    def jacobian(keys: tuple[str, ...], columns: list[Cotangent]) -> Jacobian:
        vjp = _vjp(linearization, name, keys)
        return vjp.jacobian([[column[key] for key in keys] for column in columns])

    groups: dict[tuple[str, ...], list[Cotangent]] = {}
    most = _columns_at_once(linearization, num_data(site), config)
    for column in config.columns(site):
        touched = tuple(key for key, value in column.items() if value.any())
        if not touched:
            continue
        groups.setdefault(touched, []).append(column)
        if len(groups[touched]) >= most:
            yield jacobian(touched, groups.pop(touched))
    for touched, columns in groups.items():
        yield jacobian(touched, columns)


def _check_readable(linearization: Linearization, name: str, site: Site) -> None:
    """Check that a site's density depends on the latents only through its parameters.

    :raises ValueError: if the latents enter the distribution in an unknown way.
    """
    leaves = [linearization.leaves[part] for part in linearization.subset.parts]
    if reaches(site.log_prob().sum(), leaves):
        kind = type(base_distribution(site.distribution)).__name__
        raise ValueError(
            f"the Fisher information of site '{name}' is not known: its {kind} is not made of "
            'tensors that can be read off it; use structure="full" with curvature="hessian", or '
            "observe a distribution with parameters"
        )


def _softmax_jacobian(
    linearization: Linearization, name: str, site: Site, config: CurvatureConfig
) -> Jacobian | None:
    """Return all columns at once if the subset is the last layer of a classifier; else None."""
    base = base_distribution(site.distribution)
    if (
        config.curvature != "ggn"
        or not config.kind.takes_softmax
        or name_of(base) not in SEVERAL_CLASSES
        or tuple(site_parameters(site)) != ("logits",)
        or len(base.batch_shape) != 1
    ):
        return None
    return _vjp(linearization, name, ("logits",)).softmax(cell_weights(site).square())


def _vjp(linearization: Linearization, name: str, keys: tuple[str, ...]) -> VJP:
    """Return a site's parameters in a form that can be differentiated datum by datum."""
    parameters = linearization.parameters(name)
    count = num_data(linearization.run.observed[name])
    return VJP(linearization, [parameters[key] for key in keys], count, (name, keys[0]))


def _columns_at_once(linearization: Linearization, count: int, config: CurvatureConfig) -> int:
    item = linearization.vector.element_size()
    uses = [] if linearization.rows is None else linearization.rows.uses
    per_column = item * count * sum(use.output_shape.numel() for use in uses)
    shared = [use.shape.numel() for use in uses if use.unfold is not None]
    subset, kind = linearization.subset, config.kind
    numbers = {"rows": subset.size, "entries": max(shared, default=0), "factors": 0}
    partial = any(entries is not None for entries in subset.chosen.values())
    per_column += item * count * numbers["rows" if partial else kind.per_column or kind.makes]
    budget = bytes_at_once(_COLUMNS_BUDGET, linearization.vector.device)
    return max(1, int(budget / max(1, per_column)))


class LikelihoodSums:
    """Sums over the data of a pass: their number, log likelihood and its gradient.

    ``log_likelihood`` is tempered and includes factors, a scalar in nats; ``gradient`` is its
    gradient in the subset, (p,); ``squares`` is the sum over Normal sites of ((y - loc) / scale)^2
    and ``cells`` the number of its terms, both weighted by the tempering; ``num_data`` counts along
    the leading axes of the observed sites. ``finish`` multiplies all by ``factor``. ``curvature``
    is that of the same data, and ``config`` says which; ``first`` is the pass's first run.
    ``noise`` is that of a Normal observation, if it is the same number, or multiples of the same
    parameter, in all rows.

    :param earlier: whether these are added to the sums over earlier data.
    """

    curvature: Curvature
    first: Linearization
    noise: Noise | None = None
    factor: float = 1.0

    def __init__(
        self,
        at: ProgramAtPoint,
        batches: Batches,
        config: CurvatureConfig,
        *,
        earlier: bool = False,
    ) -> None:
        self.batches, self.config = batches, config
        self.factors = FactorStatements(batches.ranks, earlier=earlier)
        self._earlier = earlier
        self.log_likelihood: Any = 0.0
        self.num_data = 0
        self.gradient = torch.zeros_like(at.subset.take(at.vector))
        self.squares = self.cells = double(at.vector.new_zeros(()))
        self.stated: float = 0.0
        self.scaled = False

    @property
    def second_derivatives(self) -> bool:
        """True if a likelihood in a factor statement will do."""
        return self.config.curvature == "hessian"

    def add(self, linearization: Linearization) -> None:
        run = linearization.run
        if not run.observed and run.factors and not self.second_derivatives:
            raise UnsupportedProgramError(
                f"the likelihood is in the factor '{next(iter(run.factors))}', which has no Fisher "
                'information: take structure="full" with curvature="hessian", write it as a sample '
                "statement with obs=..., or use a variational guide or NUTS"
            )
        name = run.coupled_data()
        if name is not None and self.num_data:
            raise UnsupportedProgramError(
                f"the data of site '{name}' depend on each other through discrete sites, so that "
                "batches of them do not add up: pass all data as one batch"
            )
        check_scales(run.observed)
        check_support(run, first_row=self.num_data)
        self._refuse_repeated(linearization)
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
            part = part + site.batch_log_prob()
        if self.noise is not None and not shares_noise(run, self.noise):
            self.noise = None
        hyperprior_names = hyperpriors(run, linearization.leaves)
        self.factors.read(run, hyperprior_names, linearization.origins)
        for factor in self.factors.new:
            part = part + factor.batch_log_prob()
        if not torch.isfinite(part):
            check_finite_batches(linearization.model, self.batches.part())
            raise ValueError(
                f"the log likelihood at the MAP is {float(part.detach())}: the data or the "
                "network's outputs are not finite"
            )
        if part.requires_grad:
            self.gradient += linearization.gradient(part)
        self.log_likelihood = self.log_likelihood + double(part.detach())
        self.num_data += largest

    def _refuse_repeated(self, linearization: Linearization) -> None:
        """Refuse values of the program's own in several batches, by what they are computed from:
        of no argument, or more of them than there are numbers in the arguments."""
        alone = self.num_data == 0 and not self._earlier and self.batches.ranks is None
        if linearization.rows is not None or alone:
            return
        origins = linearization.origins()
        rows = leading_size((linearization.args, linearization.kwargs))
        for name, site in linearization.run.observed.items():
            if site.value is None:
                continue
            passed = sum(source.numel() for source in origins[name])
            more = num_data(site) > rows and stored_numbers(site.value) > passed
            if more or not origins[name]:
                raise UnsupportedProgramError(
                    f"the site '{name}' observes values that the program holds itself, and would "
                    "count them again in each batch: pass them as an argument, or all data as one "
                    "batch"
                )

    def _add_squares(self, site: Site) -> None:
        base: Any = base_distribution(site.distribution)
        if name_of(base) == "Normal":
            weights = cell_weights(site).square()
            offsets = ((site.value - base.loc) / base.scale).detach()
            self.squares = self.squares + double((weights * offsets.square()).sum())
            self.cells = self.cells + double(weights.sum())

    def finish(self) -> None:
        """Add the sums of the other processes, and scale to the number of data that the program
        states."""
        if self.batches.ranks is not None:
            self._add_up(self.batches.ranks)
        self.factor = factor = self._factor()
        self.gradient = self.gradient * factor
        self.squares, self.cells = self.squares * factor, self.cells * factor
        total = self.log_likelihood * factor
        self.log_likelihood = torch.as_tensor(total, device=self.squares.device)

    def _add_up(self, ranks: Ranks) -> None:
        counts = self.squares.new_tensor([self.num_data, float(self.log_likelihood)])
        self.squares, self.cells = self.squares.clone(), self.cells.clone()
        ranks.add_up([counts, self.gradient, self.squares, self.cells])
        self.num_data, self.log_likelihood = round(counts[0].item()), counts[1]
        own = self.stated, self.scaled, self.noise is not None
        stated, scaled, noisy = zip(*ranks.gather(own), strict=True)
        self.noise = self.noise if all(noisy) else None
        self.stated, self.scaled = max(stated), any(scaled)

    def _factor(self) -> float:
        if not self.scaled or round(self.stated) == self.num_data or not self.num_data:
            return 1.0
        if self.factors.values and self.second_derivatives:
            raise ValueError(
                f"the program states {self.stated:.0f} data, but {self.num_data} were passed, and "
                f"it is unknown how to scale the factor '{next(iter(self.factors.values))}': "
                "pass all data, in batches if necessary"
            )
        more = self.num_data > self.stated
        warn(
            f"the program states {self.stated:.0f} data, but {self.num_data} were passed: their "
            f"curvature is scaled {'down' if more else 'up'}; for the exact sum pass each datum "
            + (
                "once, where a sampler repeats some, or give their number as num_data"
                if more
                else "as an iterable of batches, or let a plate that chooses its own rows "
                "(subsample_size) use all of them"
            ),
            "number-of-data",
        )
        return self.stated / self.num_data


def check_factors(run: Run, leaves: Mapping[str, Tensor], config: CurvatureConfig) -> None:
    """Warn if the program has factor statements, which have no Fisher information."""
    with torch.enable_grad():
        values = {name: site.log_prob() for name, site in run.factors.items()}
    moved = [name for name, value in values.items() if reaches(value, leaves.values())]
    if moved and config.curvature != "hessian":
        warn(
            f"the factor '{moved[0]}' has no Fisher information and is left out of "
            "the curvature; it counts in the MAP, and to first order in the evidence; "
            'structure="full" with curvature="hessian" includes it',
            "no-fisher-information",
        )


@torch.enable_grad()
def fit_curvature(
    at: ProgramAtPoint,
    data: Any,
    config: CurvatureConfig,
    *,
    before: Any = None,
    has_noise: bool = False,
    progress: bool | None = None,
) -> LikelihoodSums:
    """Compute the curvature of minus the tempered log likelihood at a point, and the other sums.

    Every datum counts once, weighted by its tempering. If the program states another number of
    data (``num_data``) than were passed, the sums are scaled to that number, with a warning. A
    program that scales one observed site, but not another one with the same number of rows, is
    refused.

    :param data: the program's arguments, or an iterable of batches of them.
    :param config: with "auto" for a structure that the first run chooses.
    :param before: a curvature of earlier data to include in the result's.
    :param has_noise: whether those have a ``LikelihoodSums.noise``, which these must have too.
    """
    batches = data if isinstance(data, Batches) else Batches(data)
    batches.check_same("location", at.vector)
    sums = LikelihoodSums(at, batches, config, earlier=before is not None)
    states = [torch_states()]  # before the first run, and after it

    def one_pass(number: int) -> None:
        if number:  # the same draws in all passes, for one matrix
            set_torch_states(states[0])
            sums.curvature.start_pass(number)
        found = at.linearizations(batches.part(), lambda: sums.config, read=number == 0)
        title = f"curvature, pass {number + 1} of {sums.config.kind.passes}"
        for place, linearization in enumerate(progress_bar(found, title, progress)):
            is_first = number == place == 0
            if is_first:
                _begin(sums, linearization, before)
                states.append(torch_states())
            elif place == 0:
                set_torch_states(states[1])
            is_hessian = sums.config.curvature == "hessian"
            if number == 0:
                sums.add(linearization)
                for name, site in linearization.run.observed.items():
                    if is_first and not is_hessian:
                        check_information(name, site)
            if is_hessian:
                _add_hessian(sums.curvature, linearization, sums)
            else:
                for jacobian in fisher_jacobians(linearization, sums.config):
                    with torch.no_grad():  # the sums hold no graph of a batch
                        sums.curvature.add(jacobian)
            sums.curvature.end_batch()

    for number in itertools.count():
        batches.on_all_ranks(functools.partial(one_pass, number))
        curvature = sums.curvature
        if batches.ranks is not None:
            curvature.add_up(batches.ranks)
        if number + 1 == curvature.passes:
            break
    sums.finish()
    if before is not None and sums.factor != 1.0:
        raise ValueError(SCALED_UP)
    if before is not None and has_noise and sums.noise is None:
        raise ValueError(
            "the noise of these data depends on the program's parameters otherwise than that of "
            "the data before: call laplace_approximation with all data"
        )
    curvature.scale(sums.factor)
    if sums.config.structure.takes_products:
        products = GaussNewtonProducts(at, [(batches, sums.factor)], sums.noise is not None)
        curvature.connect(products)
    sums.curvature = curvature.finish(before)
    return sums


def _begin(sums: LikelihoodSums, first: Linearization, before: Any) -> None:
    """Choose the structure by the first run of a pass, and make an empty curvature."""
    subset, reading, batches = first.subset, first.reading, sums.batches
    assert reading is not None
    batch = first.args, dict(first.kwargs)
    like = first.vector.new_empty(0, dtype=torch.promote_types(first.vector.dtype, torch.float32))
    config = chosen_config(sums.config, reading.run, reading.leaves, subset, batch, batches)
    stored = config.structure.stores_rows
    num_rows = rows_of(reading.run, batch, batches, config) if stored else 0
    check_memory(config, subset.size, like, num_rows=num_rows)
    sums.first, sums.config, sums.noise = first, config, reading.noise
    sums.curvature = config.structure.empty(subset, like, before)
    sums.curvature.start_pass(0)


def _add_hessian(curvature: Any, linearization: Linearization, sums: LikelihoodSums) -> None:
    """Add minus the second derivatives of a batch's log likelihood, factors included."""
    total: Any = 0.0
    for site in (*linearization.run.observed.values(), *sums.factors.new):
        total = total + site.batch_log_prob()
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return
    if has_own_functions([total]):
        raise UnsupportedProgramError(
            'curvature="hessian" takes second derivatives, and the program has a '
            "torch.autograd.Function of its own, whose part in them autograd may leave out: use "
            'curvature="ggn", or write the function with torch\'s operators'
        )
    matrix = torch.zeros_like(curvature.matrix)
    for row, entry in enumerate(linearization.gradient(total, create_graph=True)):
        if entry.requires_grad:
            matrix[row] = linearization.gradient(entry)
    curvature.matrix -= 0.5 * (matrix + matrix.mT)
