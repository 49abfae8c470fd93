"""Base class of the kernels of ``mcmc.sgmcmc``; each is a file of ``samplers``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pyro_bdl.mcmc.kernels import Options, positive
from pyro_bdl.utils.validation import check_temperature


def _friction(value: float, name: str) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value}")
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class StochasticKernel(Options):
    """Base class of kernels on gradients of minibatches; ``SGLD`` explains the options."""

    settles: ClassVar[bool] = False  # after the first half of the warm-up
    checks: ClassVar[dict[str, Callable[[Any, str], Any]]] = {
        **Options.checks,
        "step_size": lambda value, name: value if callable(value) else positive(value, name),
        "temperature": check_temperature,
        "friction": _friction,
    }
    step_size: float | Callable[[int], float]
    thinning: int = 10
    temperature: float = 1.0
    adapt_step_size: bool = False

    def size(self, step: int) -> float:
        if not callable(self.step_size):
            return self.step_size
        size = self.step_size(step)
        if not 0 < size < float("inf"):
            raise ValueError(f"step_size must be positive and finite, got {size} at step {step}")
        return size

    def explores(self, step: int) -> bool:
        explores = getattr(self.step_size, "explores", None)
        return explores is not None and bool(explores(step))

    def init(self, position: Tensor) -> Any:
        """The state at positions (chains, P)."""
        raise NotImplementedError

    def update(self, state: Any, gradient: Tensor, size: float, temperature: float) -> Any:
        """The state after a step; ``state.position`` are the positions."""
        raise NotImplementedError

    def statistics(self, state: Any, gradient: Tensor, size: float) -> dict[str, Tensor]:
        """Statistics (chains,) of a state, by name."""
        return {}

    def settle(self, state: Any) -> Any:
        """The state for the steps after the first half of the warm-up."""
        return state
