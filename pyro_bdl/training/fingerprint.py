"""What a checkpoint of ``train`` recognizes its run by: settings, and a log density of the data."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.program.program import Program
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import fixed_normal, seeded

_SPREAD = 0.1  # of the unconstrained latents around 0


def settings_of(guide: Any, elbo: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings of a guide, a bound and an optimizer before its first step, by name."""
    estimator = getattr(elbo, "estimator", None)
    found = {
        "guide": type(guide).__name__,
        "elbo": type(elbo).__name__,
        "temperature": getattr(elbo, "temperature", None),
        "num_particles": getattr(elbo, "num_particles", None),
        "estimator": None if estimator is None else type(estimator).__name__,
        "optimizer": type(optimizer).__name__,
    }
    for number, group in enumerate(optimizer.param_groups):
        suffix = f" of group {number}" if number else ""
        for name, value in group.items():
            if isinstance(value, bool | int | float | str | tuple):
                found[name + suffix] = value
    return found


@torch.no_grad()
def log_density_of_data(
    model: Callable, batches: Iterable[tuple[Any, Any]], trained: Iterable[Tensor]
) -> Tensor:
    """log p(y, w) summed over batches, in nats, at one w that is the same in every run.

    :param trained: parameters to be trained. Those of the program have fixed values meanwhile,
        since their start may be drawn anew in every run.
    """
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    moved = {id(value) for value in trained}
    start = [(value, value.clone()) for value in parameters if id(value) in moved]
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    try:
        for value, _ in start:
            value.copy_(_SPREAD * fixed_normal(value))
        with evaluation_mode(model), seeded(0):
            for batch in batches:
                program = Program(model, *batch)
                at = _SPREAD * fixed_normal(program.unconstrain(program.initial))
                total += program.log_density(at).cpu()
    finally:
        for value, before in start:
            value.copy_(before)
    return total
