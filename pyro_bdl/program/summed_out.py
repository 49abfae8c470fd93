"""Finite discrete latent sites, summed out exactly.

A discrete latent site without a value is given all values of its support at once, along a dimension
of its own to the left of all plates, as Pyro's ``infer={"enumerate": "parallel"}`` does; sites in
``pyro.markov`` share dimensions. After the run each statement that depends on such sites gets its
marginal, by variable elimination in log space:

    log p(y_i | y_1, ..., y_{i-1}, w) = log sum_z p(z | y_1, ..., y_{i-1}, w) p(y_i | z, w),

in the program's order, so that these terms add up to log p(y | w). Where z stands in the plate of
the data and y is one site, the term is log p(y_n | w) for each datum. Where z stands outside of
that plate there is one term for all of the data. In a hidden Markov chain the terms are
one-step-ahead densities. A subsampled plate scales the sum of logs over its data by N/B; tempering
scales the term.
Latents that depend on discrete sites come first, so that log p(w) and log p(y | w) are told apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import Categorical, MixtureSameFamily, Unit
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bdl.distributions.take_apart import rebuild, take_apart
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.elimination import (
    ROOM,
    Elimination,
    Factor,
    Plate,
    Statement,
    Variable,
    at_values,
    by_symbols,
    spread,
    symbols_of,
)
from pyro_bdl.program.enumeration import Enumeration
from pyro_bdl.program.marginals import JointMarginal, Marginal, MarginalShape


def _shape_of(
    statement: Statement, plates: Mapping[str, Plate], kept: frozenset[str]
) -> MarginalShape:
    """The shapes of p(y | w) with a term for each cell of the plates ``kept``."""
    site = statement.site
    fn = site.distribution
    sizes = ((1,) * ROOM + tuple(fn.batch_shape))[-ROOM:]
    depth = max([0, *(-plates[name].dim for name in statement.plates)])
    is_given = isinstance(site.value, Tensor) and statement.kind != "factors"
    if is_given and site.value.dim() - fn.event_dim <= ROOM:  # or else drawn for each value of z
        rank = max(depth, site.value.dim() - fn.event_dim)
    else:
        rank = max([depth, *(ROOM - i for i, size in enumerate(sizes) if size > 1)])
    inside = {plates[name].dim for name in kept}
    own = {plates[name].dim for name in statement.plates}
    extra = [d for d in range(-rank, 0) if d not in inside and (d in own or sizes[d] > 1)]
    first = min(extra, default=0)
    if all(dim < first for dim in inside):
        batch, inner = torch.Size(sizes[ROOM - rank : ROOM + first]), sizes[ROOM + first :]
        return MarginalShape(batch, torch.Size((*inner, *fn.event_shape)), -rank, first, True)
    while rank and -rank not in inside:
        rank -= 1
    batch = torch.Size(sizes[d] if d in inside else 1 for d in range(-rank, 0))
    return MarginalShape(batch, torch.Size(), -rank, 0, False)


class SummedOut:
    """The discrete sites of one run, summed out of the statements that depend on them.

    ``names`` are those of the sites. ``one_step_ahead`` is the first observed site whose terms are
    not log p(y_n | w) of each datum by itself: they are conditional on data before, or joint.
    ``biased`` is the first site of a subsampled plate with a discrete site outside of it, and the
    latter: N/B is then inside of the log of the sum. All results are given the latents and the data
    of the run.
    """

    def __init__(self, enumeration: Enumeration) -> None:
        self._variables = enumeration.variables
        self._plates = enumeration.plates
        self._algebra = Elimination(self._variables, self._plates)
        self._statements = enumeration.statements
        self._scales = {  # of the discrete sites that are tempered
            statement.name: scale
            for statement in self._statements
            if statement.kind == "discrete"
            and (scale := _tempering(statement.site)) is not None
            and not math.isclose(scale, 1.0)
        }
        self.names = tuple(variable.name for variable in self._variables.values())
        self.one_step_ahead: str | None = None
        self.biased: tuple[str, str] | None = None
        self._own = enumeration.own_symbols()
        self._tables: dict[str, Factor] = {}  # of the statements
        self._densities: dict[str, Tensor] | None = None  # of like statements
        self._in_turn: list[Factor] = []

    def support(self, name: str) -> Tensor:
        """The values of a site, (K, *event), in the order in which they are counted."""
        variable = next(v for v in self._variables.values() if v.name == name)
        values = variable.values
        return values.reshape(values.shape[:1] + values.shape[values.dim() - variable.event_dim :])

    # Posterior of the discrete sites

    def log_density(self) -> Tensor:
        """log p of the statements that depend on discrete sites, these summed out, a scalar; not
        tempered."""
        return self._algebra.total(self._factors()).sum()

    def log_likelihood(self) -> tuple[Tensor, frozenset[str]] | None:
        """The sum of all marginals of observed sites and factors by one elimination, scaled by N/B
        and tempered, a scalar; and the names of these sites. None where the sum must be taken term
        by term: for several temperatures, tensors as scales, and latents that depend on discrete
        sites."""
        reached = [s for s in self._statements if s.kind != "discrete" and symbols_of(s)]
        given = [s for s in reached if s.site.value is not None]
        scales = {_tempering(s.site) for s in given}
        if len(scales) != 1 or None in scales or any(s.kind == "latents" for s in reached):
            return None
        discrete = [s for s in self._statements if s.kind == "discrete"]
        total = self._algebra.total([self._later(s) for s in (*discrete, *given)]).sum()
        (scale,) = scales
        names = frozenset(statement.name for statement in given)
        return total if scale == 1.0 else total * scale, names

    @property
    def sites(self) -> dict[str, Any]:
        """The statements that depend on discrete sites, with a dimension for each of these."""
        return {s.name: s.site for s in self._statements if s.site.value is not None}

    def weights(self) -> dict[str, Tensor]:
        """For each of ``sites`` p(z | y, w) of the discrete sites z in its log density.

        They have the shape of the log density, and are the derivatives of log p(y | w) in it.
        """
        statements = [s for s in self._statements if s.site.value is not None]

        def total(densities: dict[str, Tensor]) -> Tensor:
            factors = [self._factor(s, density=densities[s.name]) for s in statements]
            return self._algebra.total(factors).sum()

        return torch.func.grad(total)(
            {s.name: s.site.distribution.log_prob(s.site.value).detach() for s in statements}
        )

    def responsibilities(self) -> dict[str, Tensor]:
        """p(z_n = k | y, w) of each site, (*plates, K): k counts the values of its support.

        They are the derivatives of log p(y | w) in log p(z_n = k).
        """
        factors, places = self._factors(), self._places()
        tilts = {
            symbol: torch.zeros_like(self._own_table(factors[place], symbol))
            for symbol, place in places.items()
        }

        def tilted(tilts: dict[int, Tensor]) -> Tensor:
            now = list(factors)
            for symbol, place in places.items():
                factor = factors[place]
                tilt = Factor(tilts[symbol], (symbol,), factor.plates)
                now[place] = self._algebra.product([factor, tilt])
            return self._algebra.total(now).sum()

        found = torch.func.grad(tilted)(tilts) if tilts else {}
        result = {}
        for symbol, variable in self._variables.items():
            depth = self._depth(variable)
            if symbol not in found:  # of one value
                shape = self._algebra.sizes(variable.plates)[ROOM - depth :]
                result[variable.name] = variable.values.new_ones((*shape, 1), dtype=torch.float)
                continue
            p = found[symbol] / found[symbol].sum(0)
            p = p.reshape(p.shape[:1] + p.shape[p.dim() - depth :])
            result[variable.name] = p.movedim(0, -1)
        return result

    @torch.no_grad()
    def sample(self) -> dict[str, Tensor]:
        """A draw from p(z | y, w), site -> (*plates, *event)."""
        drawn = self._draw(self._factors())
        return {variable.name: self._value(s, drawn) for s, variable in self._variables.items()}

    def _draw(self, factors: Sequence[Factor]) -> dict[int, Tensor]:
        """Indices drawn jointly, in the reverse order of the sums; symbol -> (*ROOM dims)."""
        drawn: dict[int, Tensor] = {}
        for symbol, factor in reversed(self._algebra.all_summed(factors)[1]):
            table = at_values(factor.table, factor.symbols, drawn)
            sizes = self._algebra.sizes(self._variables[symbol].plates)
            table = table.expand(table.shape[:1] + torch.broadcast_shapes(table.shape[1:], sizes))
            noise = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)
            drawn[symbol] = (table - (-noise.log()).log()).argmax(0)
        return drawn

    def _value(self, symbol: int, drawn: Mapping[int, Tensor]) -> Tensor:
        variable = self._variables[symbol]
        values = variable.values
        event = values.shape[values.dim() - variable.event_dim :]
        values = values.reshape(values.shape[:1] + event)
        shape = self._algebra.sizes(variable.plates)[ROOM - self._depth(variable) :]
        if symbol not in drawn:
            return values[0].expand(*shape, *event)
        return values[drawn[symbol].reshape(shape)]

    def _depth(self, variable: Variable) -> int:
        return max([0, *(-self._plates[name].dim for name in variable.plates)])

    def _places(self) -> dict[int, int]:
        """For each variable of several values the place of its own statement."""
        places = {
            self._own[statement.name]: place
            for place, statement in enumerate(self._statements)
            if statement.kind == "discrete"
        }
        return {s: place for s, place in places.items() if len(self._variables[s].values) > 1}

    def _own_table(self, factor: Factor, symbol: int) -> Tensor:
        """A table of the shape of a variable's values and the plates of its factor."""
        where = [i for i, other in enumerate(factor.symbols) if other != symbol]
        table = factor.table
        for i in reversed(where):
            table = table.select(i, 0)
        return table

    def _factors(self) -> list[Factor]:
        return [self._later(s) for s in self._statements if s.site.value is not None]

    # Marginals

    def _factor(self, statement: Statement, value: Any = None, density: Any = None) -> Factor:
        """log p of a statement at its value as a factor; checks the discrete sites' plates.

        A masked discrete site is uniform, so that its sum is 1.
        """
        site = statement.site
        value = site.value if value is None else value
        if density is None and value is site.value:
            density = self._density(statement)
        table = site.distribution.log_prob(value) if density is None else density
        is_discrete = statement.kind == "discrete"
        if isinstance(site.mask, bool) and not site.mask:
            table = torch.zeros_like(table)
        elif isinstance(site.mask, Tensor):
            table = scale_and_mask(table, mask=site.mask)
        if is_discrete and site.mask is not None and site.mask is not True:
            count = len(value)
            masked = ~torch.as_tensor(site.mask, device=table.device)
            table = table - masked.to(table.dtype) * math.log(count)
        return self._algebra.factor(
            table, statement.symbols, statement.plates, evidence=not is_discrete
        )

    def _density(self, statement: Statement) -> Tensor | None:
        """log p of a statement at its value, where others are like it: one operation computes them
        all, as the steps of a hidden Markov chain. None where it stands alone."""
        if self._densities is None:
            alike: dict[Any, list[Statement]] = {}
            for other in self._statements:
                form = _form(other)
                if form is not None:
                    alike.setdefault(form, []).append(other)
            self._densities = {}
            for group in alike.values():
                if len(group) > 1:
                    names = [other.name for other in group]
                    self._densities |= zip(names, _densities_of_like(group), strict=True)
        return self._densities.get(statement.name)

    def _later(self, statement: Statement) -> Factor:
        """The factor of a statement at its value, computed when it is asked for, and then kept."""
        if statement.name not in self._tables:
            found = set(symbols_of(statement).values())
            if statement.kind == "discrete":
                own = self._own[statement.name]
                found |= {own} if len(self._variables[own].values) > 1 else set()
            symbols = tuple(sorted(found))
            for symbol in symbols:
                variable = self._variables[symbol]
                missing = variable.plates - statement.plates
                if missing:
                    raise UnsupportedProgramError(
                        f"the site '{statement.name}' depends on the discrete site "
                        f"'{variable.name}' of the plate '{min(missing)}' and stands outside of "
                        "it: put it into that plate"
                    )

            def table() -> Tensor:
                factor = self._factor(statement)
                return spread(factor.table, factor.symbols, symbols)

            is_discrete = statement.kind == "discrete"
            factor = Factor(table, symbols, statement.plates, not is_discrete)
            self._tables[statement.name] = factor
        return self._tables[statement.name]

    def put_marginals(self, run: Any) -> None:
        """Replace the sites of a run that depend on discrete sites by their marginals.

        Only their form is found here; the densities are computed where they are asked for.
        """
        statements = self._in_order()
        lasts = self._last_uses(statements)
        pool: list[Factor] = []
        for place, statement in enumerate(statements):
            if statement.kind == "discrete":
                pool.append(self._later(statement))
                self._check_plates(statement)
                pool = self._forget(pool, lasts, place)
                continue
            symbols = symbols_of(statement)
            if not symbols:
                continue
            near = self._algebra.connected(symbols.values(), pool)
            self._check_tempering(statement, near)
            getattr(run, statement.kind)[statement.name] = self._marginal(statement, symbols, near)
            reached = {symbol for other in near for symbol in other.symbols}
            if all(lasts[symbol] <= place for symbol in reached):
                pool = [other for other in pool if not reached.intersection(other.symbols)]
            elif statement.site.value is not None:
                pool = self._forget([*pool, self._later(statement)], lasts, place)

    def _in_order(self) -> list[Statement]:
        """The statements, those up to the last latent that depends on discrete sites without the
        data between, so that the prior is that of the latents alone."""
        moved = [i for i, s in enumerate(self._statements) if s.kind == "latents" and symbols_of(s)]
        end = moved[-1] + 1 if moved else 0
        first, rest = self._statements[:end], self._statements[end:]
        kinds = ("discrete", "latents")
        return [
            *(s for s in first if s.kind in kinds),
            *(s for s in first if s.kind not in kinds),
            *rest,
        ]

    def _last_uses(self, statements: Sequence[Statement]) -> dict[int, int]:
        """The place of the last statement that each variable enters."""
        lasts = {}
        for place, statement in enumerate(statements):
            for symbol in symbols_of(statement).values():
                lasts[symbol] = place
            if statement.kind == "discrete":
                lasts[self._own[statement.name]] = place
        return lasts

    def _forget(self, pool: list[Factor], lasts: Mapping[int, int], place: int) -> list[Factor]:
        """Sum out the variables that no later statement depends on."""
        for symbol in self._algebra.order(pool):
            if lasts[symbol] <= place:
                after = self._algebra.without(symbol, pool)
                if after is not None:
                    pool = after
                    self._in_turn.append(pool[-1])
        return pool

    def _compute(self, count: int) -> None:
        """Compute the first sums in their turn: the last of a long chain would be a deep
        recursion."""
        for factor in self._in_turn[:count]:
            _ = factor.table

    def _check_plates(self, statement: Statement) -> None:
        """Each entry of a discrete site's batch is a variable of its own, which plates tell."""
        inside = {self._plates[name].dim for name in statement.plates}
        shape = statement.site.distribution.batch_shape[-ROOM:]
        loose = [d for d in range(-len(shape), 0) if shape[d] > 1 and d not in inside]
        if loose:
            raise UnsupportedProgramError(
                f"the discrete site '{statement.name}' has {shape[loose[0]]} entries along "
                f"dimension {loose[0]}, which is no plate's: sample it in a pyro.plate of that size"
            )

    def _check_tempering(self, statement: Statement, near: Sequence[Factor]) -> None:
        """Tempering scales log p(y | w), so that the discrete sites must not have another scale."""
        own = _tempering(statement.site)
        for name in {self._variables[s].name for factor in near for s in factor.symbols}:
            scale = self._scales.get(name)
            if scale is not None and own is not None and not math.isclose(scale, own):
                raise UnsupportedProgramError(
                    f"the discrete site '{name}' has the scale {scale:g}, and "
                    f"'{statement.name}', which depends on it, {own:g}: give both one scale"
                )

    def _marginal(
        self, statement: Statement, symbols: Mapping[int, int], near: Sequence[Factor]
    ) -> Any:
        """The site of a statement with its marginal.

        :param near: the factors that its discrete sites are connected to.
        """
        site, algebra = statement.site, self._algebra
        variables = [self._variables[symbol] for factor in near for symbol in factor.symbols]
        kept = frozenset.intersection(*(variable.plates for variable in variables))
        shape = _shape_of(statement, self._plates, kept)
        later, count = self._later(statement), len(self._in_turn)

        def factor(value: Tensor) -> Factor:
            self._compute(count)
            return later if value is site.value else self._factor(statement, value)

        def laid_out(table: Tensor) -> Tensor:
            rank = -shape.first
            table = table.reshape(table.shape[ROOM - rank : ROOM + shape.last])
            return table.expand(shape.batch)

        def draw() -> Tensor:
            self._compute(count)
            drawn = self._draw(near)
            fn = site.distribution
            table, found = by_symbols(fn.sample(), symbols, fn.event_dim)
            table = at_values(table, found, drawn, fn.event_dim)
            return table.reshape(shape.batch + shape.event if shape.is_plain else fn.shape())

        inner = math.prod(self._plates[name].scale for name in statement.plates - kept)
        if self.biased is None and inner != 1.0:
            outside = next(v for v in variables if not v.plates >= statement.plates)
            self.biased = statement.name, outside.name
        has_inner = len(shape.event) > site.distribution.event_dim or not shape.is_plain
        after_data = any(other.evidence for other in near) or (has_inner and not kept)
        if self.one_step_ahead is None and after_data and statement.kind == "observed":
            self.one_step_ahead = statement.name
        masked = isinstance(site.mask, Tensor) and (has_inner or site.mask.dim() > ROOM)
        distribution: Any
        if all(variable.plates == kept for variable in variables):
            near = [algebra.reduced(other, kept) for other in near]
            weights = self._weights(near, sorted(symbols.values()))

            def density(value: Tensor) -> Tensor:
                product = algebra.product([algebra.reduced(factor(value), kept), weights])
                return laid_out(algebra.summed(product, product.symbols).table)

            def mixture() -> MixtureSameFamily:
                self._compute(count)
                return self._mixture(site.distribution, symbols, weights, shape)

            if shape.is_plain and inner == 1.0 and not masked and take_apart(site.distribution):
                distribution = Marginal(
                    density, mixture, site.distribution.support, shape, has_inner and not kept
                )
            else:
                distribution = JointMarginal(density, draw, site.distribution.support, shape)
        else:
            before = Factor(lambda: algebra.total(near, kept), (), kept)

            def density(value: Tensor) -> Tensor:
                after = algebra.total([*near, factor(value)], kept)
                return laid_out(after - before.table)

            distribution = JointMarginal(density, draw, site.distribution.support, shape)
        if statement.kind == "factors":
            total = distribution.log_prob(site.value)
            distribution = Unit(total, validate_args=False)
            site = site._replace(value=total.new_empty((*total.shape, 0)))
        mask = None if masked else site.mask
        scale = site.scale if inner == 1.0 else site.scale / inner
        return site._replace(
            distribution=distribution,
            scale=scale,
            mask=mask,
            subsampling=site.subsampling / inner,
            plates=tuple((name, self._plates[name].dim - shape.last) for name in sorted(kept)),
        )

    def _weights(self, near: Sequence[Factor], symbols: Sequence[int]) -> Factor:
        """log p(z | y_1, ..., y_{i-1}, w) of some variables, the others summed out."""
        factors: list[Factor] = list(near)
        for symbol in self._algebra.order(near):
            if symbol not in symbols:
                factors = self._algebra.without(symbol, factors) or factors
        factors = self._algebra.connected(symbols, factors)
        weights = self._algebra.product(factors)
        if not weights.evidence:
            return weights
        where = list(range(len(weights.symbols)))
        return weights.changed(lambda table: table - torch.logsumexp(table, where, keepdim=True))

    def _mixture(
        self, fn: Any, symbols: Mapping[int, int], weights: Factor, shape: MarginalShape
    ) -> MixtureSameFamily:
        """p(y | w) with its components in the last dimension of a batch."""
        found: Any = take_apart(fn)
        structure, tensors = found
        inner = shape.event[: len(shape.event) - fn.event_dim]
        batch = len(fn.batch_shape)

        def laid_out(tensor: Tensor) -> Tensor:
            rest = tensor.shape[batch:]
            tensor, found = by_symbols(tensor, symbols, len(rest))
            missing = [i for i, symbol in enumerate(weights.symbols) if symbol not in found]
            for place in missing:
                tensor = tensor.unsqueeze(place)
            count = len(weights.symbols)
            values = weights.table.shape[:count]
            tensor = tensor.expand(values + tensor.shape[count:])
            tensor = tensor.reshape(values.numel(), *shape.batch, *inner, *rest)
            return tensor.movedim(0, len(shape.batch))

        components = rebuild(
            structure._replace(event_dims=structure.event_dims + len(inner)),
            {name: laid_out(tensor) for name, tensor in tensors.items()},
        )
        count = len(weights.symbols)
        table = weights.table.reshape(-1, *weights.table.shape[count:])
        table = table.reshape(table.shape[:1] + table.shape[1 + ROOM + shape.first :])
        table = table.reshape(table.shape[: table.dim() + shape.last])
        logits = table.expand(-1, *shape.batch).movedim(0, -1)
        return MixtureSameFamily(
            Categorical(logits=logits, validate_args=False), components, validate_args=False
        )


def _form(statement: Statement) -> Any:
    """Equal for statements whose densities one operation can compute: of one family, and of one
    shape. None where that would cost more memory than the densities one by one."""
    site = statement.site
    fn: Any = site.distribution
    if statement.kind not in ("observed", "latents") or not isinstance(site.value, Tensor):
        return None
    taken = take_apart(fn)
    if taken is None or taken[0].parts or taken[0].constants:
        return None
    structure, tensors = taken
    numbers = fn.batch_shape.numel() * fn.event_shape.numel()
    for tensor in tensors.values():
        if tensor.shape[: len(fn.batch_shape)] != fn.batch_shape or tensor.numel() > numbers:
            return None
    values = {**tensors, "value": site.value}
    shapes = tuple((name, t.shape, t.dtype, t.device) for name, t in values.items())
    return structure.kind, structure.event_dims, fn.batch_shape, shapes


def _densities_of_like(statements: Sequence[Statement]) -> Sequence[Tensor]:
    """log p of statements of one ``_form`` at their values, of parameters and values stacked."""
    first: Any = statements[0].site.distribution
    taken: Any = [take_apart(statement.site.distribution) for statement in statements]
    values = [statement.site.value for statement in statements]
    batch, of_values = len(first.batch_shape), values[0].dim() - first.event_dim
    rank = max(batch, of_values)

    def stacked(tensors: Sequence[Tensor], own: int) -> Tensor:
        together = torch.stack(list(tensors))
        ones = (1,) * (rank - own)
        return (
            together.reshape(together.shape[:1] + ones + together.shape[1:]) if ones else together
        )

    parameters = {
        name: stacked([tensors[name] for _, tensors in taken], batch) for name in taken[0][1]
    }
    return rebuild(taken[0][0], parameters).log_prob(stacked(values, of_values)).unbind()


def _tempering(site: Any) -> float | None:
    """A site's scale but for N/B; None for a tensor, which is not read."""
    if isinstance(site.scale, Tensor):
        return None
    return 1.0 if site.scale == site.subsampling else site.scale / site.subsampling


def sum_out(run: Any, enumeration: Enumeration) -> None:
    """Sum the discrete sites of a run out of all its statements.

    A discrete site that was left open, and that no statement depends on, stays open.
    """
    used = enumeration.used()
    for symbol, variable in list(enumeration.variables.items()):
        may_be_open = variable.name in run.observed
        if not may_be_open:
            continue
        if symbol in used:
            del run.observed[variable.name]
            continue
        run.open = True
        run.followed = run.followed or variable.name != enumeration.last
        enumeration.leave_open(variable.name)
    if enumeration.variables:
        run.discrete = SummedOut(enumeration)
        run.discrete.put_marginals(run)
