"""A warning if a program treats minibatches as its complete data."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_bdl.errors import BdlWarning
from pyro_bdl.program.trace import Site

_STEPS = 3
_ROUNDING = 1e-5


class UnscaledBatches:
    """Comparison of the targets of the first training steps, to find batches that count as all
    data.

    A batch counts as all data if an observed site has scale 1. If such batches differ, a warning is
    given. Batches are compared by sums that do not depend on the order of the rows, so shuffled
    data count as the same data.

    :param enabled: False if the user weights the KL term.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.restart()

    def restart(self) -> None:
        """Look at the next steps, which are those of another program or guide."""
        self._steps_left = _STEPS if self.enabled else 0
        self.expected = False
        self._first: dict[str, tuple[int, list[float]]] = {}

    def expect(self) -> None:
        """Begin a training step: the first run in it is to be seen, if it is an early step."""
        self.expected = self._steps_left > 0
        self._steps_left -= self.expected

    def see(self, observed: Mapping[str, Site]) -> None:
        """Compare the targets of a run with those of the first step; warn once if they differ."""
        self.expected = False
        for name, site in observed.items():
            if _counts_as_all(site) and self._differs(name, site.value):
                self._steps_left = 0
                warnings.warn(
                    f"the first batches hold different targets at site '{name}', and each counts "
                    "as all of the data (its scale is 1), so that the posterior is that of a "
                    "single batch: tell the program the number N of all data, by num_data=N or "
                    'pyro.plate("data", N, subsample=...); if each batch is all there is, ignore '
                    "this",
                    BdlWarning,
                    stacklevel=2,
                )
                return

    def _differs(self, name: str, value: Tensor) -> bool:
        sums = _sums(value.detach())
        size, first = self._first.setdefault(name, (value.numel(), sums))
        slack = _ROUNDING * (1.0 + first[2])
        return size != value.numel() or any(
            abs(a - b) > slack for a, b in zip(sums[:2], first, strict=False)
        )


def _counts_as_all(site: Site) -> bool:
    unscaled = site.subsampling == 1 and isinstance(site.scale, int | float) and site.scale == 1
    has_values = isinstance(site.value, Tensor)
    return (
        unscaled and has_values and not torch._C._functorch.is_functorch_wrapped_tensor(site.value)
    )


def _sums(value: Tensor) -> list[float]:
    """Three sums of the entries: values, squares, and absolute values plus squares."""
    wide = value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    squares = wide.square().sum()
    return torch.stack([wide.sum(), squares, wide.abs().sum() + squares]).tolist()
