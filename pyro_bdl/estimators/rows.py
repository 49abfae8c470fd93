"""The log likelihood of a program, one row of its arguments at a time."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.batch_norm import uses_its_batch
from pyro_bdl.program.batches import Batch, leading_size
from pyro_bdl.program.rows import FirstPass, check_rows, form_of
from pyro_bdl.program.supports import nan_outside_support
from pyro_bdl.program.trace import Run, Site, record, sum_out_discrete
from pyro_bdl.program.vmap import RowMap
from pyro_bdl.utils.module_state import changed

_INSTEAD = "use plain sampling (estimator=None)"


@dataclass
class _Form:
    """Facts from the statements about rows of one form.

    :param plates: the names of the data's plates.
    :param weights: c_s by site.
    """

    plates: tuple[str, ...]
    weights: dict[str, float]


class RowwiseLikelihood:
    """A program's log likelihood as a sum over its sites s and over single rows n,

        log p(y | w) = sum_s c_s sum_n log p_s(y_n | w, x_n).

    c_s is the scale of a site in a run over all B rows, relative to that in a run over one row
    (1 / B where a plate states N data); for a site about no row 1 / B of that.

    :param name: the estimator's name, for messages.
    """

    def __init__(self, name: str, model: Callable) -> None:
        self.name, self.model = name, model
        self._map = RowMap()
        self._forms: dict[Hashable, _Form] = {}
        self._first_pass = FirstPass()

    def is_due(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return whether these rows belong to the first pass over the data, and are to be
        checked."""
        batch = args, dict(kwargs)
        return _key(batch) not in self._forms or self._first_pass.is_due(batch)

    def check(self, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any]) -> None:
        """Check in evaluation mode that each row alone is what it is beside the others.

        :param values: latents by site.
        :raises UnsupportedProgramError: otherwise, or if the program cannot run on one row.
        """

        def refuse(module: nn.Module, args: Any) -> None:
            if uses_its_batch(module):
                raise UnsupportedProgramError(
                    f"{self.name} needs data that do not depend on each other, and a BatchNorm "
                    "layer normalizes by the batch: call eval() on it where it has running "
                    "statistics, use GroupNorm or LayerNorm where it has none, or "
                    f"{_INSTEAD}"
                )

        batch = args, kwargs
        with changed(refuse, self.model):
            whole, row, each = check_rows(
                self.model, values, batch, self._map, subject=self.name, advice=_INSTEAD
            )
        stated = whole.run.observed | whole.run.factors
        weights = {
            name: _ratio(stated[name], site) / (1 if each[name] else whole.count)
            for name, site in (row.observed | row.factors).items()
        }
        self._forms[_key(batch)] = _Form(tuple(whole.plates), weights)
        self._first_pass.note(batch, whole)

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
        form = self._forms[_key((args, dict(kwargs)))]
        index = torch.arange(
            leading_size((args, dict(kwargs))), device=next(iter(values.values())).device
        )
        plates = {name: values.get(name, index) for name in form.plates}

        def of_row(own_args: tuple, own_kwargs: dict[str, Any], lane: Tensor) -> Any:
            found = run(lambda: self._run(values, own_args, own_kwargs))
            last[:] = [found]
            terms = found.terms()
            first = next(iter(terms))
            terms[first] = nan_outside_support(terms[first], found)
            return terms, {name: site.value for name, site in found.observed.items()}

        try:
            terms, targets = self._map(of_row, (args, plates), kwargs)
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
        return sum(form.weights[site] * value.sum() for site, value in terms.items()), found

    def _run(self, values: Mapping[str, Tensor], both: tuple, kwargs: Mapping[str, Any]) -> Run:
        """A run on one row.

        :param both: the program's arguments, and the indices of the data's plates.
        """
        args, plates = both
        return record(self.model, {**values, **plates}, args, kwargs, draw=sum_out_discrete)


def _key(batch: Batch) -> Hashable:
    return leading_size(batch), form_of(batch)


def _ratio(whole: Site, row: Site) -> float:
    """The scale of a site in a run over all rows, relative to its scale in a run over one."""
    if isinstance(whole.scale, Tensor) or isinstance(row.scale, Tensor):
        return whole.subsampling / row.subsampling
    return whole.scale / row.scale
