"""Training a guide by stochastic variational inference, and the ELBO that it reached."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bdl.checks import check_finite
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO, check_data
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.base import Guide

_MOST_FULL_BATCH = 1024
_BATCH = 256
_ROWS_AT_ONCE = 4096
_PARTICLES_AT_ONCE = 16
_SHOWN_EVERY = 50
_REFRESH = 0.5  # seconds


@dataclass(frozen=True)
class Training:
    """What a training run did.

    :param losses: ``(steps,)``, the negative ELBO of each step taken, in nats.
    :param batch_size: rows in each step.
    :param interrupted: whether Ctrl-C ended it early.
    """

    losses: Tensor
    batch_size: int
    interrupted: bool


def train(
    model: nn.Module,
    guide: Guide,
    x: Tensor,
    y: Tensor,
    *,
    steps: int,
    learning_rate: float = 0.01,
    temperature: float = 1.0,
    num_particles: int = 1,
    batch_size: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    progress: str | None = None,
) -> Training:
    """Maximise the tempered ELBO by Adam, whose learning rate falls to zero along half a cosine.

    Ctrl-C ends the training with a warning and keeps what was learned.

    :param model: a program ``model(x, y)``.
    :param guide: trained in place.
    :param x: ``(N, ...)``, all training inputs.
    :param y: ``(N, ...)``, their targets.
    :param steps: number of gradient steps, at least 1.
    :param learning_rate: Adam's, at the start.
    :param temperature: eta, see :mod:`pyro_bdl.elbo`.
    :param num_particles: draws of the guide in each step.
    :param batch_size: rows in each step. By default all of up to 1024; of more rows 256, where the
        program knows by its ``num_data`` that there are N.
    :param parameters: which to train; by default the guide's and the program's.
    :param progress: description of the progress bar; None for no bar.
    :raises ValueError: for data that are not finite, targets outside of their support; fewer than
        one step; a minibatch for a program whose ``num_data`` is not N, so that its log likelihood
        would count too little.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    check_finite(model, (x, y), {})
    size = _batch_size(model, len(x), batch_size)
    guide.prototype(x, y)
    if size < len(x):  # a full batch is checked at the first step, as the first minibatch is
        for rows in torch.arange(len(x), device=x.device).split(_ROWS_AT_ONCE):
            check_data(model, guide, (x[rows], y[rows]), {})
    elbo = TemperedTraceMeanField_ELBO(temperature=temperature, num_particles=num_particles)
    objective: Any = elbo(model, guide)
    trained = list(objective.parameters() if parameters is None else parameters)
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[Tensor] = []
    interrupted = False
    bar = tqdm(
        total=steps, desc=progress, disable=progress is None, leave=False, mininterval=_REFRESH
    )
    with bar:
        try:
            for rows in _batches(len(x), size, steps, x.device):
                loss = objective(x, y) if rows is None else objective(x[rows], y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
                if len(losses) % _SHOWN_EVERY == 0:
                    recent = torch.stack(losses[-_SHOWN_EVERY:]).mean().item()
                    bar.set_postfix_str(f"loss {recent:.4g}", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        warnings.warn(
            f"interrupted after {len(losses)} of {steps} steps: what was learned so far is kept",
            BdlWarning,
            stacklevel=2,
        )
    kept = torch.stack(losses) if losses else torch.empty(0)
    return Training(kept, size, interrupted)


@torch.no_grad()
def estimate_elbo(
    model: nn.Module, guide: Guide, x: Tensor, y: Tensor, *, num_particles: int = 512
) -> float:
    """ELBO at temperature 1, E_q[log p(y | w)] - KL(q || p), in nats, over all of the data.

    Many rows are taken in parts, which needs a program whose ``num_data`` is N.

    :param model: a program ``model(x, y)``.
    :param guide: a guide with a density; for a point mass the number is log p(y, w) instead.
    :param x: ``(N, ...)``, the training inputs.
    :param y: ``(N, ...)``, their targets.
    :param num_particles: draws of the guide that the expectation is averaged over.
    """
    elbo = TemperedTraceMeanField_ELBO(num_particles=_PARTICLES_AT_ONCE)
    in_parts = len(x) > _ROWS_AT_ONCE and getattr(model, "num_data", None) == len(x)
    parts = torch.arange(len(x), device=x.device).split(_ROWS_AT_ONCE if in_parts else len(x))
    repeats = max(1, math.ceil(num_particles / _PARTICLES_AT_ONCE))
    total = 0.0
    for _ in range(repeats):
        for rows in parts:
            total -= elbo.loss(model, guide, x[rows], y[rows]) * len(rows) / len(x)
    return total / repeats


def _batch_size(model: Callable, rows: int, asked: int | None) -> int:
    knows_all = getattr(model, "num_data", None) == rows
    if asked is None:
        return _BATCH if rows > _MOST_FULL_BATCH and knows_all else rows
    if asked < 1:
        raise ValueError(f"batch_size must be at least 1, got {asked}")
    if asked < rows and not knows_all:
        raise ValueError(
            f"batch_size={asked} of {rows} rows needs a program that knows of all of them: make "
            f"it with num_data={rows}"
        )
    return min(asked, rows)


def _batches(rows: int, size: int, steps: int, device: torch.device) -> Iterator[Tensor | None]:
    """Row numbers for each step, None for all; each pass is in a new order."""
    if size == rows:
        yield from [None] * steps
        return
    taken = 0
    while taken < steps:
        for part in torch.randperm(rows, device=device).split(size):
            if len(part) < size or taken == steps:
                break
            taken += 1
            yield part
