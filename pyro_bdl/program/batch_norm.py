"""BatchNorm layers with several draws of the weights at once.

A layer's running statistics depend on its inputs, and so on the draw of the weights before it. For
prediction they are computed again for each draw. In training the running statistics are not used;
after ``vmap`` over several draws the layers update them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import trange

from pyro_bdl.program.batches import Batches
from pyro_bdl.program.trace import placeholder_for_observed, record
from pyro_bdl.utils.module_state import hooked
from pyro_bdl.utils.progress import is_silent

_RUNNING = ("running_mean", "running_var")
_STATISTICS = (*_RUNNING, "num_batches_tracked")

Draws = dict[str, Tensor]


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer with running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def uses_its_batch(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer that normalizes by its batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


@contextmanager
def layers_called(
    *owners: Any, chosen: Callable[[nn.Module], bool] = keeps_statistics
) -> Iterator[list[_BatchNorm]]:
    """Yield a list of the BatchNorm layers that programs call inside the context.

    :param owners: as in ``module_state.changed``.
    :param chosen: selects layers; by default those with running statistics.
    """
    layers: list[Any] = []

    def note(module: nn.Module, args: object) -> None:
        if chosen(module) and module not in layers:
            layers.append(module)

    with hooked(note, None, *owners, kind=_BatchNorm):
        yield layers


# ----------------------------------------------------------------------------------- prediction


@torch.no_grad()
def statistics_of_draws(
    model: Callable, draws: Draws, data: Batches, *, progress: bool | None = None
) -> tuple[list[_BatchNorm], Draws]:
    """A program's BatchNorm layers, and their statistics over the data for each draw of the
    latents.

    The statistics are named tensors (S, C). Other layers keep their mode.

    :raises ValueError: if the program calls no BatchNorm layer with running statistics.
    """
    rows: list[Draws] = []
    total = next(iter(draws.values())).shape[0]
    for i in trange(total, desc="batch norm", disable=is_silent(progress), leave=False, delay=1):
        draw = {name: value[i] for name, value in draws.items()}
        with leaving_running_statistics(model, in_evaluation=True) as calls:
            for args, kwargs in data:
                record(model, draw, args, kwargs, draw=placeholder_for_observed)
        layers, means = _means(calls)
        rows.append(means)
        if not layers:
            raise ValueError(
                "batch_norm_data is given, but the program has no BatchNorm layer with running "
                "statistics: leave it out"
            )
    return layers, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _means(calls: "list[BatchStatistics]") -> tuple[list[_BatchNorm], Draws]:
    """The layers of calls, and the means of their statistics over each layer's calls."""
    layers, means = list(dict.fromkeys(call.layer for call in calls)), {}
    for i, layer in enumerate(layers):
        values = [(call.mean, call.variance) for call in calls if call.layer is layer]
        for name, rows in zip(_RUNNING, zip(*values, strict=True), strict=True):
            means[_key(i, name)] = torch.stack(rows).mean(0)
    return layers, means


def _key(number: int, name: str) -> str:
    return f"<batch norm {number}>.{name}"  # not the name of a sample site


@contextmanager
def computing_with(layers: list[_BatchNorm], draw: Draws) -> Iterator[None]:
    """Run with one draw's statistics in the layers."""
    saved = [{name: layer._buffers[name] for name in _RUNNING} for layer in layers]
    try:
        for i, layer in enumerate(layers):
            layer._buffers.update({name: draw[_key(i, name)] for name in _RUNNING})
        yield
    finally:
        for layer, values in zip(layers, saved, strict=True):
            layer._buffers.update(values)


# ------------------------------------------------------------------------------------- training


class BatchStatistics(NamedTuple):
    """The mean (C,) and variance (C,), with correction, of a layer's inputs in one call."""

    layer: _BatchNorm
    mean: Tensor
    variance: Tensor


@contextmanager
def leaving_running_statistics(
    *owners: Any, in_evaluation: bool = False
) -> Iterator[list[BatchStatistics]]:
    """Let BatchNorm layers normalize by their batch, with their running statistics unchanged.

    Yields a list of the statistics of their calls, in order.

    :param owners: as in ``module_state.changed``.
    :param in_evaluation: also the layers in evaluation mode, not only those in training mode.
    """
    calls: list[BatchStatistics] = []
    away: dict[_BatchNorm, dict[str, Tensor | None]] = {}

    def take_away(module: Any, args: tuple) -> None:
        if not keeps_statistics(module) or not (module.training or in_evaluation):
            return
        inputs = args[0].detach()
        dims = [0, *range(2, inputs.dim())]
        variance, mean = torch.var_mean(inputs, dims, correction=1)
        calls.append(BatchStatistics(module, mean, variance))
        away[module] = {name: module._buffers[name] for name in _STATISTICS}
        module._buffers.update(dict.fromkeys(_STATISTICS))

    def put_back(module: Any, args: object = None, result: object = None) -> None:
        if module in away:
            module._buffers.update(away.pop(module))

    try:
        with hooked(take_away, put_back, *owners, kind=_BatchNorm):
            yield calls
    finally:
        for module in list(away):
            put_back(module)


@torch.no_grad()
def update_running_statistics(calls: list[BatchStatistics]) -> None:
    """Update running statistics from calls at S draws, with means and variances (S, C).

    The result is that of the draws one after another: r <- (1 - m) r + m s with momentum m, or
    cumulative averages.
    """
    for layer in dict.fromkeys(call.layer for call in calls):
        of_layer = [call for call in calls if call.layer is layer]
        count: Any = layer.num_batches_tracked
        before, steps = int(count), of_layer[0].mean.shape[0] * len(of_layer)
        for name, values in (
            ("running_mean", [call.mean for call in of_layer]),
            ("running_var", [call.variance for call in of_layer]),
        ):
            running: Any = getattr(layer, name)
            rows = torch.stack(values, 1).flatten(0, 1).to(running)
            if layer.momentum is None:
                remaining = before / (before + steps)
                weights = torch.full_like(rows[:, 0], 1.0 / (before + steps))
            else:
                remaining = (1.0 - layer.momentum) ** steps
                powers = torch.arange(steps - 1, -1, -1, device=rows.device)
                weights = layer.momentum * (1.0 - layer.momentum) ** powers.to(running)
            running.mul_(remaining).add_(weights @ rows)
        count += steps
