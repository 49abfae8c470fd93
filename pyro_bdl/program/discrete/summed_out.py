"""Finite discrete latent sites, summed out exactly.

A discrete latent site without a value is given all values of its support at once, along a dimension
to the left of all plates. After the run each statement that depends on such sites gets its
marginal, by variable elimination in log space:

    log p(y_i | y_1, ..., y_{i-1}, w) = log sum_z p(z | y_1, ..., y_{i-1}, w) p(y_i | z, w),

in the program's order, so that these terms add up to log p(y | w). Where z stands in the plate of
the data and y is one site, the term is log p(y_n | w) for each datum. Where z stands outside of
that plate there is one term for all of the data. In a hidden Markov chain the terms are
one-step-ahead densities. A subsampled plate scales the sum of logs over its data by N/B; tempering
scales the term.
Latents that depend on discrete sites come first, so that log p(w) and log p(y | w) are told apart.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import Categorical, MixtureSameFamily, Unit
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bdl.distributions.parameters import is_known, parameters_of, rebuilt
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.discrete.elimination import (
    ROOM,
    Elimination,
    Factor,
    Variable,
    at_values,
    by_symbols,
    connected,
    symbols_of,
)
from pyro_bdl.program.discrete.enumeration import Enumeration, Statement
from pyro_bdl.program.discrete.marginals import JointMarginal, Marginal, MarginalShape


def sum_out(run: Any, enumeration: Enumeration) -> None:
    """Sum the discrete sites of a run out of all its statements, and put their marginals there.

    A discrete site that was left open, and that no statement depends on, stays open.
    """
    enumeration.remove_open_sites(run)
    if enumeration.variables:
        run.discrete = SummedOut(enumeration)
        run.discrete.put_marginals(run)


class SummedOut:
    """The discrete sites of one run, summed out of the statements that depend on them.

    ``names`` are those of the sites; ``sites`` the statements with a value that depend on them,
    with a dimension for each. All results are given the latents and the data of the run.
    ``one_step_ahead`` says why terms of the log likelihood are not log p(y_n | w) of each datum, as
    leave-one-out takes them, and ``bias_of_minibatches`` why minibatches estimate it with a bias;
    None where it is not so.
    """

    def __init__(self, enumeration: Enumeration) -> None:
        self._variables = enumeration.variables
        self._algebra = Elimination(self._variables, enumeration.plates)
        self._statements = [s for s in enumeration.statements if s.symbols]
        self._given = [s for s in self._statements if s.site.value is not None]
        self._densities = {s.name: s.site.distribution.log_prob(s.site.value) for s in self._given}
        self._factors = {s.name: self._factor(s, self._densities[s.name]) for s in self._given}
        self._ends: list[list[Factor]] = []  # the last factors of variables that are connected
        self.one_step_ahead: str | None = None
        self.bias_of_minibatches: str | None = None
        self.names = tuple(variable.name for variable in self._variables.values())
        self.sites = {s.name: s.site for s in self._given}

    # Results for all data

    def log_likelihood(self) -> tuple[Tensor, frozenset[str]] | None:
        """The sum of all marginals of observed sites and factors, scaled by N/B and tempered, a
        scalar; and the names of these sites. None where the sum must be taken term by term: for
        several temperatures, tensors as scales, and latents that depend on discrete sites."""
        sites = [s for s in self._given if s.kind != "discrete"]
        scales = {_tempering(s.site) for s in sites}
        if len(scales) != 1 or None in scales or any(s.kind == "latents" for s in sites):
            return None
        total = functools.reduce(torch.add, [self._algebra.total(end).sum() for end in self._ends])
        scale: Any = scales.pop()
        names = frozenset(statement.name for statement in sites)
        return total if scale == 1.0 else total * scale, names

    def weights(self) -> dict[str, Tensor]:
        """For each of ``sites`` p(z | y, w) of the discrete sites z in its log density.

        They have the shape of the log density, and are the derivatives of log p(y | w) in it.
        """

        def total(densities: dict[str, Tensor]) -> Tensor:
            factors = [self._factor(s, densities[s.name]) for s in self._given]
            return self._algebra.total(factors).sum()

        return torch.func.grad(total)({n: d.detach() for n, d in self._densities.items()})

    def responsibilities(self) -> dict[str, Tensor]:
        """p(z_n = k | y, w) of each site, (*plates, K): k counts the values of its support.

        They are the derivatives of log p(y | w) in log p(z_n = k).
        """
        factors, result = list(self._factors.values()), {}

        def total(tilts: dict[int, Tensor]) -> Tensor:
            tilted = [Factor(t, (s,), self._variables[s].plates) for s, t in tilts.items()]
            return self._algebra.total([*factors, *tilted]).sum()

        zeros = {
            symbol: factors[0].table.new_zeros(
                (len(variable.values), *self._algebra.sizes(variable.plates))
            )
            for symbol, variable in self._variables.items()
        }
        found = torch.func.grad(total)(zeros)
        for symbol, variable in self._variables.items():
            p = found[symbol] / found[symbol].sum(0)
            result[variable.name] = p.reshape(len(p), *self._cells(variable)).movedim(0, -1)
        return result

    @torch.no_grad()
    def sample(self) -> dict[str, Tensor]:
        """A draw from p(z | y, w), site -> (*plates, *event)."""
        drawn, result = self._draw(list(self._factors.values())), {}
        for symbol, variable in self._variables.items():
            cells, values = self._cells(variable), variable.values
            if symbol in drawn:
                # torch 2.9 has no vmap of values[index] for an index without axes
                picked = values.index_select(0, drawn[symbol].reshape(-1))
                result[variable.name] = picked.reshape((*cells, *values.shape[1:]))
            else:  # a site of one value
                result[variable.name] = values[0].expand(*cells, *values.shape[1:])
        return result

    def support(self, name: str) -> Tensor:
        """The values of a site, (K, *event), in the order in which they are counted."""
        return next(v for v in self._variables.values() if v.name == name).values

    def _draw(self, factors: Sequence[Factor]) -> dict[int, Tensor]:
        """Indices drawn jointly, in the reverse order of the sums; symbol -> (*ROOM dims)."""
        drawn: dict[int, Tensor] = {}
        steps = self._algebra.eliminate(factors, symbols_of(factors))[1]
        for symbol, factor in reversed(steps):
            table = at_values(factor.table, factor.symbols, drawn)
            sizes = self._algebra.sizes(self._variables[symbol].plates)
            table = table.expand(table.shape[:1] + torch.broadcast_shapes(table.shape[1:], sizes))
            noise = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)
            drawn[symbol] = (table - (-noise.log()).log()).argmax(0)
        return drawn

    def _cells(self, variable: Variable) -> tuple[int, ...]:
        """The sizes of a site's plates."""
        depth = max([0, *(-self._algebra.plates[name].dim for name in variable.plates)])
        return self._algebra.sizes(variable.plates)[ROOM - depth :]

    # Factors

    def _factor(self, statement: Statement, density: Tensor) -> Factor:
        """log p of a statement as a factor; a masked discrete site is uniform, so that its sum
        is 1.

        :raises UnsupportedProgramError: where plates do not tell the discrete sites apart.
        """
        name, mask, is_discrete = statement.name, statement.site.mask, statement.kind == "discrete"
        if mask is not None and mask is not True:
            mask = torch.as_tensor(mask, device=density.device)
            density = scale_and_mask(density, mask=mask)
            if is_discrete:
                count = len(statement.site.value)
                density = density - (~mask).to(density.dtype) * math.log(count)
        table, symbols = by_symbols(density, statement.symbols)
        for symbol in symbols:
            missing = self._variables[symbol].plates - statement.plates
            if missing:
                raise UnsupportedProgramError(
                    f"the site '{name}' depends on the discrete site "
                    f"'{self._variables[symbol].name}' of the plate '{min(missing)}' and stands "
                    "outside of it: put it into that plate"
                )
        inside = {self._algebra.plates[plate].dim for plate in statement.plates}
        loose = [dim for dim in range(-ROOM, 0) if table.shape[dim] > 1 and dim not in inside]
        if loose and is_discrete:
            raise UnsupportedProgramError(
                f"the discrete site '{name}' has {table.shape[loose[0]]} entries along dimension "
                f"{loose[0]}, which is no plate's: sample it in a pyro.plate of that size"
            )
        table = table.sum(loose, keepdim=True) if loose else table
        return Factor(table, symbols, statement.plates, not is_discrete)

    # Marginals

    def put_marginals(self, run: Any) -> None:
        """Replace the sites of a run that depend on discrete sites by their marginals."""
        statements = self._in_order()
        last = {s: place for place, each in enumerate(statements) for s in each.symbols.values()}
        pool: list[Factor] = []
        for place, statement in enumerate(statements):
            if statement.kind != "discrete":
                near = connected(statement.symbols.values(), pool)
                getattr(run, statement.kind)[statement.name] = self._marginal(statement, near)
            own = self._factors.get(statement.name)
            pool += [] if own is None else [own]
            reached = connected(statement.symbols.values(), pool)
            symbols = symbols_of(reached)
            over = {symbol for symbol in symbols if last[symbol] <= place}
            if symbols and over == symbols:
                self._ends.append(reached)
                pool = [other for other in pool if not symbols.intersection(other.symbols)]
            elif over:
                pool = self._algebra.eliminate(pool, over, partly=True)[0]

    def _in_order(self) -> list[Statement]:
        """The statements, those up to the last latent that depends on discrete sites without the
        data between, so that the prior is that of the latents alone."""
        moved = [place for place, s in enumerate(self._statements) if s.kind == "latents"]
        end = moved[-1] + 1 if moved else 0
        first, rest = self._statements[:end], self._statements[end:]
        return [*sorted(first, key=lambda s: s.kind not in ("discrete", "latents")), *rest]

    def _check_tempering(self, statement: Statement, names: set[str]) -> None:
        """Tempering scales log p(y | w), so that the discrete sites must not have another scale."""
        own = _tempering(statement.site)
        for name in names:
            scale = _tempering(self.sites[name])
            if own is None or scale is None or math.isclose(scale, 1.0) or math.isclose(scale, own):
                continue
            raise UnsupportedProgramError(
                f"the discrete site '{name}' has the scale {scale:g}, and '{statement.name}', "
                f"which depends on it, {own:g}: give both one scale"
            )

    def _marginal(self, statement: Statement, near: list[Factor]) -> Any:
        """The site of a statement with its marginal.

        :param near: the factors before that its discrete sites are connected to.
        """
        site, algebra, plates = statement.site, self._algebra, self._algebra.plates
        fn = site.distribution
        variables = [self._variables[symbol] for symbol in symbols_of(near)]
        self._check_tempering(statement, {variable.name for variable in variables})
        kept = frozenset.intersection(*(variable.plates for variable in variables))
        shape = MarginalShape.of(
            fn, {plates[name].dim for name in statement.plates}, {plates[name].dim for name in kept}
        )
        inner = math.prod(plates[name].scale for name in statement.plates - kept)
        has_inner = len(shape.event) > fn.event_dim or not shape.is_plain
        if self.bias_of_minibatches is None and inner != 1.0:
            outside = next(v.name for v in variables if not v.plates >= statement.plates)
            self.bias_of_minibatches = (
                f"the discrete site '{outside}' stands outside of a subsampled plate of "
                f"'{statement.name}', so that minibatches give a biased estimate of the log of its "
                "sum, with N/B inside of the log: pass all data at once"
            )
        after_data = any(factor.evidence for factor in near) or (has_inner and not kept)
        if self.one_step_ahead is None and after_data and statement.kind == "observed":
            self.one_step_ahead = (
                f"the data of the site '{statement.name}' depend on other data through discrete "
                "sites that are summed out, so that its terms are joint or one-step-ahead "
                "densities: leaving one term out does not leave one datum out"
            )

        def density(value: Tensor) -> Tensor:
            own = self._factors.get(statement.name)
            if own is None or value is not site.value:
                own = self._factor(statement, fn.log_prob(value))
            after = algebra.total([*near, own], kept)
            if any(factor.evidence for factor in near):
                after = after - algebra.total(near, kept)
            return shape.laid_out(after)

        def draw() -> Tensor:
            drawn = self._draw(near)
            table, found = by_symbols(fn.sample(), statement.symbols, fn.event_dim)
            return at_values(table, found, drawn, fn.event_dim).reshape(shape.value)

        mask, is_mixture = site.mask, shape.is_plain and inner == 1.0
        if isinstance(mask, Tensor) and (has_inner or mask.dim() > ROOM):
            mask = None  # inside of the density
            is_mixture = False
        is_mixture = is_mixture and all(variable.plates == kept for variable in variables)
        distribution: Any = JointMarginal(density, draw, fn.support, shape)
        if is_mixture and is_known(fn):
            mixture = functools.partial(self._mixture, statement, near, kept, shape)
            distribution = Marginal(mixture, fn.support, shape, has_inner and not kept)
        if statement.kind == "factors":
            total = density(site.value)
            distribution = Unit(total, validate_args=False)
            site = site._replace(value=total.new_empty((*total.shape, 0)))
        return site._replace(
            distribution=distribution,
            scale=site.scale if inner == 1.0 else site.scale / inner,
            mask=mask,
            subsampling=site.subsampling / inner,
            plates=tuple((name, plates[name].dim - shape.last) for name in sorted(kept)),
        )

    def _mixture(
        self, statement: Statement, near: list[Factor], kept: frozenset[str], shape: MarginalShape
    ) -> MixtureSameFamily:
        """p(y | w) with its components, one for each value of the statement's discrete sites, in
        the last dimension of a batch."""
        fn = statement.site.distribution
        own = set(statement.symbols.values())
        left = connected(own, self._algebra.eliminate(near, symbols_of(near) - own)[0])
        weights = self._algebra.product([self._algebra.reduced(f, kept) for f in left])
        inner = shape.event[: len(shape.event) - fn.event_dim]
        count = len(weights.symbols)

        def laid_out(tensor: Tensor) -> Tensor:
            rest = tensor.shape[len(fn.batch_shape) :]
            tensor, found = by_symbols(tensor, statement.symbols, len(rest))
            for place in [i for i, symbol in enumerate(weights.symbols) if symbol not in found]:
                tensor = tensor.unsqueeze(place)
            tensor = tensor.expand(weights.table.shape[:count] + tensor.shape[count:])
            tensor = tensor.reshape(-1, *shape.batch, *inner, *rest)
            return tensor.movedim(0, len(shape.batch))

        tensors = {name: laid_out(tensor) for name, tensor in parameters_of(fn).items()}
        components = rebuilt(fn, tensors).to_event(len(inner))
        logits = shape.laid_out(weights.table.flatten(0, count - 1)).movedim(0, -1)
        return MixtureSameFamily(
            Categorical(logits=logits, validate_args=False), components, validate_args=False
        )


def _tempering(site: Any) -> float | None:
    """A site's scale but for N/B; None for a tensor, which is not read."""
    if isinstance(site.scale, Tensor):
        return None
    return 1.0 if site.scale == site.subsampling else site.scale / site.subsampling
