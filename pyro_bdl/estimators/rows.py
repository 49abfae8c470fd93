"""The log likelihood of a program, one row of its arguments at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batch_norm import uses_its_batch
from pyro_bdl.program.batches import as_dicts, leading_size, taken
from pyro_bdl.program.supports import nan_outside_support
from pyro_bdl.program.trace import Run, Site, record, sum_out_discrete
from pyro_bdl.program.vmap import RowMap
from pyro_bdl.utils.module_state import changed, evaluation_mode
from pyro_bdl.utils.random_state import own_randomness

_INSTEAD = "use plain sampling (estimator=None)"
_SLACK = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the sum of the terms' sizes


class RowwiseLikelihood:
    """A program's log likelihood as a sum over its sites s and over single rows n,

        log p(y | w) = sum_s c_s sum_n log p_s(y_n | w, x_n).

    c_s is the scale of a site in a run over all rows, relative to that in a run over one row (1/B
    where a plate states N data), and 1/B for a site whose term does not depend on the row. At
    construction the program runs at one draw, in evaluation mode, over all B rows and over each of
    them alone; both must have the same log likelihood.

    :param name: the estimator's name, for messages.
    :param values: latents by site.
    :raises UnsupportedProgramError: if data depend on each other, or the program cannot run on one
        row.
    """

    def __init__(
        self,
        name: str,
        model: Callable,
        values: Mapping[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        self.name, self.model = name, model
        self._map = RowMap()
        self._of_data: set[str] = set()  # plates of the data
        self._plates: dict[str, Tensor] = {}  # their indices in a run over one row

        def refuse(module: nn.Module, args: Any) -> None:
            if uses_its_batch(module):
                raise UnsupportedProgramError(
                    f"{name} needs data that do not depend on each other, and a BatchNorm layer "
                    "normalizes by the batch: call eval() on it where it has running statistics, "
                    f"use GroupNorm or LayerNorm where it has none, or {_INSTEAD}"
                )

        with torch.no_grad(), changed(refuse, model), evaluation_mode(model):
            with own_randomness():
                whole = self._run(values, args, kwargs)
                count = leading_size((args, kwargs))
                self._of_data = {p for p, rows in whole.subsamples.items() if len(rows) == count}
                first = self._first_row(values, args, kwargs)
            alike = {p for p in self._of_data if len(first.subsamples[p]) == count > 1}
            self._of_data -= alike  # another plate of this length
            for plate in self._of_data:
                self._plates[plate] = torch.zeros_like(first.subsamples[plate][:1])
            alone = self._map(lambda a, k, _: self._run(values, a, k).terms(), args, kwargs)
        sites, of_row = whole.observed | whole.factors, first.observed | first.factors
        if sites.keys() != of_row.keys():
            other = next(iter(sites.keys() ^ of_row.keys()))
            raise UnsupportedProgramError(
                f"{name} runs the program on one row of its arguments at a time, and the site "
                f"'{other}' is not there for every number of rows: {_INSTEAD}"
            )
        self._weights = {
            site: self._weight(site, alone[site], together, _ratio(sites[site], of_row[site]))
            for site, together in whole.terms().items()
        }

    def __call__(
        self,
        values: Mapping[str, Tensor],
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        run: Callable[[Callable[[], Run]], Run],
    ) -> tuple[Tensor, Run]:
        """log p(y | w) at latents, a scalar, and a run with the targets of all rows; NaN if a
        target lies outside its support.

        :param run: calls a function that runs the program on one row.
        """
        last: list[Run] = []

        def of_row(own_args: tuple, own_kwargs: dict[str, Any], lane: Tensor) -> Any:
            found = run(lambda: self._run(values, own_args, own_kwargs))
            last[:] = [found]
            terms = found.terms()
            first = next(iter(terms))
            terms[first] = nan_outside_support(terms[first], found)
            return terms, {name: site.value for name, site in found.observed.items()}

        try:
            terms, targets = self._map(of_row, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as torch's, for noise inside the network's own vmap
            raise UnsupportedProgramError(
                f"{self.name} runs the program on one row of its arguments at a time, with noise "
                f"in its products, and it cannot run so ({str(error).splitlines()[0]}): give "
                f"batches to a network that calls torch.vmap itself, or {_INSTEAD}"
            ) from error
        (found,) = last  # its latents and their priors are the same for all rows
        for site, value in targets.items():
            found.observed[site] = found.observed[site]._replace(value=value)
        return sum(self._weights[site] * value.sum() for site, value in terms.items()), found

    def _run(self, values: Mapping[str, Tensor], args: tuple, kwargs: Mapping[str, Any]) -> Run:
        given = {name: value for name, value in values.items() if name not in self._of_data}
        return record(self.model, {**given, **self._plates}, args, kwargs, draw=sum_out_discrete)

    def _first_row(self, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> Run:
        batch = tuple(map(as_dicts, args)), as_dicts(kwargs)
        try:
            return self._run(values, *taken(batch, slice(1)))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UnsupportedProgramError(
                f"{self.name} runs the program on one row of its arguments at a time, and it "
                f"cannot run on one ({str(error).splitlines()[0]}): {_INSTEAD}"
            ) from error

    def _weight(self, site: str, alone: Tensor, together: Tensor, ratio: float) -> float:
        """c_s, given the terms of the rows alone (B,) and of all at once."""
        slack = _SLACK.get(alone.dtype, 0.05)
        size = alone.abs().sum() * ratio
        if not together.isfinite() or (alone.sum() * ratio - together).abs() <= slack * size:
            return ratio
        if ((alone - together).abs() <= slack * together.abs()).all():
            return 1.0 / len(alone)
        raise UnsupportedProgramError(
            f"{self.name} needs data that do not depend on each other, and the log likelihood of "
            f"the site '{site}' is {float(together):.6g} for all rows at once and "
            f"{float(alone.sum() * ratio):.6g} as the sum over each row alone: {_INSTEAD}"
        )


def _ratio(whole: Site, row: Site) -> float:
    """The scale of a site in a run over all rows, relative to its scale in a run over one."""
    if isinstance(whole.scale, Tensor) or isinstance(row.scale, Tensor):
        return whole.subsampling / row.subsampling
    return whole.scale / row.scale
