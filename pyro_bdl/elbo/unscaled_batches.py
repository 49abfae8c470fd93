"""A warning if a program treats minibatches as its complete data."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.elbo.finite_loss import OnHost
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Site

_STEPS = 3
_ROUNDING = 1e-5


class UnscaledBatches:
    """Comparison of the targets of the first training steps, to find batches that count as all
    data.

    A batch counts as all data if an observed site has scale 1. If such batches differ, a warning is
    given. Batches are compared by sums that do not depend on the order of the rows, so shuffled
    data count as the same data. The sums are read once an accelerator has computed them, so that no
    step waits for it.

    :param enabled: False if the user weights the KL term.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pair: tuple[Callable, Callable] | None = None
        self._steps_left = 0
        self._is_open = False
        self._first: dict[str, tuple[int, Tensor]] = {}
        self._found: list[tuple[str, OnHost]] = []

    @contextmanager
    def step(self, model: Callable, guide: Callable) -> Iterator[None]:
        """One training step: ``see`` uses only the first run in it."""
        if self._pair != (model, guide):
            self._pair, self._steps_left = (model, guide), _STEPS if self.enabled else 0
            self._first, self._found = {}, []
        self._is_open = self._steps_left > 0
        try:
            yield
        finally:
            self._steps_left -= self._steps_left > 0
            self._is_open = False
        self.report()

    def see(self, observed: Mapping[str, Site]) -> None:
        """Compare the targets of a run with those of the first step."""
        if not self._is_open:
            return
        self._is_open = False  # one run per step is enough
        with torch.no_grad():
            for name, site in observed.items():
                self._compare(name, site)

    def _compare(self, name: str, site: Site) -> None:
        value = site.value
        if not _counts_as_all(site) or not isinstance(value, Tensor) or _is_batched(value):
            return
        sums = _sums(value)
        size, first = self._first.setdefault(name, (value.numel(), sums))
        if size != value.numel():
            self._found.append((name, OnHost(torch.ones((), dtype=torch.bool, device="cpu"))))
        elif first is not sums:
            differs = (sums - first)[:2].abs() > _ROUNDING * (1.0 + first[2])
            self._found.append((name, OnHost(differs.any())))

    def report(self) -> None:
        """Warn once if the batches are known to differ."""
        while self._found and self._found[0][1].has_arrived():
            name, differ = self._found.pop(0)
            if differ.value():
                self._found, self._steps_left = [], 0
                warnings.warn(
                    f"the first batches hold different targets at site '{name}', and each counts "
                    "as all of the data (its scale is 1), so that the posterior is that of a "
                    "single batch: tell the program the number N of all data, by num_data=N or "
                    'pyro.plate("data", N, subsample=...); if each batch is all there is, ignore '
                    "this",
                    BdlWarning,
                    stacklevel=7,  # the line of SVI's step
                )


def _counts_as_all(site: Site) -> bool:
    return site.subsampling == 1 and isinstance(site.scale, int | float) and site.scale == 1


def _is_batched(value: Any) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def _sums(value: Tensor) -> Tensor:
    """Three sums of the entries: values, squares, and absolute values plus squares."""
    wide = value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    return torch.stack([wide.sum(), wide.square().sum(), wide.abs().sum() + wide.square().sum()])
