"""Training of a guide by stochastic variational inference, and estimates of its ELBO."""

import math
import warnings
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.elbo.finite_loss import require_gradients
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO, check_data
from pyro_bdl.errors import BdlWarning
from pyro_bdl.estimators import PerDatum
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.check import check_finite
from pyro_bdl.training.checkpoint import Checkpoint
from pyro_bdl.training.collapse import warn_of_collapse
from pyro_bdl.training.descent import Descent, Training, num_rows, rows_per_step
from pyro_bdl.training.fingerprint import log_density_of_data, settings_of
from pyro_bdl.training.finite_steps import FiniteSteps
from pyro_bdl.training.held_out import HeldOut, split
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.validation import whole_number

_ROWS_AT_ONCE = 4096
_PARTICLES_AT_ONCE = 16


def train(
    model: nn.Module,
    guide: Guide,
    x: Any,
    y: Any,
    *,
    steps: int,
    learning_rate: float = 0.01,
    temperature: float = 1.0,
    num_particles: int | None = None,
    estimator: str | PerDatum | None = None,
    batch_size: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    elbo: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    held_out: float | None = None,
    patience: int = 10,
    check_every: int | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    on_nonfinite: str = "raise",
    progress: str | None = None,
) -> Training:
    """Maximize the tempered ELBO by Adam with a cosine schedule.

    The learning rate falls to zero along half a cosine. Ctrl-C ends the training with a warning and
    keeps the parameters reached so far. A warning is given if a mean-field guide has collapsed to
    the prior at temperature 1, see :func:`pyro_bdl.training.collapse`.

    :param model: a program ``model(x, y)``.
    :param guide: trained in place.
    :param x: ``(N, ...)``, all training inputs; or a dict of such tensors.
    :param y: ``(N, ...)``, their targets.
    :param steps: number of gradient steps, at least 1.
    :param learning_rate: Adam's initial learning rate.
    :param temperature: eta, see :mod:`pyro_bdl.elbo`.
    :param num_particles: draws of the guide in each step; by default 1, and of an ensemble all
        members.
    :param estimator: estimator of the expected log likelihood, see
        :class:`pyro_bdl.elbo.TemperedTrace_ELBO`.
    :param batch_size: rows in each step. The default is all rows if there are at most 1024. For
        more rows it is 256 if the program's ``num_data`` is N.
    :param parameters: the parameters to train; by default those of the guide and of the program.
    :param elbo: another loss; it replaces the ELBO with this temperature, number of particles and
        estimator.
    :param optimizer: another optimizer; it replaces Adam with these parameters and this learning
        rate, for example ``torch.optim.AdamW`` with weight decay. Its learning rate falls in the
        same way.
    :param held_out: the share of the rows, chosen at random, that is held back from training. The
        training stops when their log likelihood no longer grows, and guide and program have their
        best parameters and buffers at the end; each member of an ensemble its own, unless the
        program has parameters or running statistics, which the members share.
    :param patience: checks without a better value after which the training stops.
    :param check_every: steps between two checks, by default a fiftieth of all steps.
    :param checkpoint: a file that holds the state of the training. If it exists, the training goes
        on from there, and ends as one that was never stopped: on a CPU bit for bit. A file of
        another program, other data or other settings is refused. See :class:`Checkpoint`.
    :param every: write the checkpoint after every so many steps; by default once a minute. It is
        written after the last step too.
    :param on_nonfinite: what follows a loss or gradient that is not finite: "raise" an error with
        the step, the rows and the parameters of before, or "skip" the step with a warning. Ten in
        a row are an error.
    :param progress: description of the progress bar, which terminals and notebooks show; None for
        no bar.
    :raises MemoryError: if the gradients and Adam's state alone do not fit in memory.
    :raises FailedStepError: for a loss or gradient that is not finite, unless it is skipped.
    :raises ValueError: for data that are not finite, targets outside their support, fewer than one
        step, or a minibatch for a program whose ``num_data`` is not N, which would give its log
        likelihood too little weight.
    :raises TypeError: for data that are not tensors, or of another dtype than the weights.
    """
    require_gradients()
    steps = whole_number(steps, "steps")
    total = num_rows(x=x, y=y)
    check_finite(model, (x, y), {})
    guide.prototype(x, y)
    held = None
    if held_out is not None:
        (x, y), back = split(x, y, held_out)
        held = HeldOut(model, guide, *back, whole_number(patience, "patience"))
        check_every = max(1, steps // 50) if check_every is None else check_every
        whole_number(check_every, "check_every")
    count = leading_size(x)
    size = rows_per_step(model, count, batch_size, total)
    whole = torch.arange(count, device=device_of_rows(x)).split(_ROWS_AT_ONCE)
    if size < count:  # a full batch, and the first minibatch, are checked at the first step
        for rows in whole:
            check_data(model, guide, (taken(x, rows), taken(y, rows)), {})
    bayesian = elbo is None and temperature == 1.0
    if elbo is None:
        particles = guide.num_members if num_particles is None else num_particles
        elbo = TemperedTraceMeanField_ELBO(temperature, particles, estimator=estimator)
    objective: Any = elbo(model, guide)
    if optimizer is None:
        trained = list(objective.parameters() if parameters is None else parameters)
        _check_memory(trained)
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def after(step: int) -> None:
        schedule.step()
        if held is not None and check_every is not None and step % check_every == 0:
            held.check(step)

    steps_taken = FiniteSteps(objective, optimizer, on_nonfinite)
    descent = Descent(steps_taken.step, x, y, size, after=after)
    numbers: Iterable[int] = range(steps)
    if checkpoint is not None:
        parts: dict[str, Any] = {"program": model} if isinstance(model, nn.Module) else {}
        parts |= {} if held is None else {"held_out": held}
        batches = [(taken(x, rows), taken(y, rows)) for rows in whole] if size < count else [(x, y)]
        trained = [value for group in optimizer.param_groups for value in group["params"]]
        saved = Checkpoint(
            checkpoint,
            settings={
                "steps": steps,
                "batch_size": size,
                "held_out": held_out,
                **settings_of(guide, elbo, optimizer),
                "log density of the data": log_density_of_data(model, batches, trained),
            },
            guide=guide, optimizer=optimizer, schedule=schedule, elbo=elbo,
            batches=descent.batches, losses=descent.losses, **parts,
        )  # fmt: skip
        numbers = saved.steps(steps, every=every)
    if held is not None:
        stopper = held
        numbers = takewhile(lambda _: not stopper.done, numbers)
    losses, interrupted = descent.run(numbers, steps, progress)
    if interrupted:
        warnings.warn(
            f"interrupted after {len(losses)} of {steps} steps: the parameters so far are kept",
            BdlWarning,
            stacklevel=2,
        )
    elif bayesian:
        warn_of_collapse(model, guide, elbo.kl, x, y)
    skipped = tuple(steps_taken.skipped)
    if held is None or not held.scores:
        return Training(losses, size, interrupted, skipped=skipped)
    held.restore()
    return Training(losses, size, interrupted, held.table, held.best_steps(), skipped=skipped)


@torch.no_grad()
def estimate_elbo(
    model: nn.Module,
    guide: Guide,
    x: Any,
    y: Any,
    *,
    num_particles: int = 512,
    batch_size: int = _ROWS_AT_ONCE,
    progress: bool | None = None,
) -> float:
    """Estimate the ELBO at temperature 1, E_q[log p(y | w)] - KL(q || p), in nats, over all data.

    More than ``batch_size`` rows are evaluated in batches, which needs a program whose ``num_data``
    is N.

    :param model: a program ``model(x, y)``.
    :param guide: a guide with a density; for a point mass the number is log p(y, w) instead.
    :param x: ``(N, ...)``, the training inputs; or a dict of such tensors.
    :param y: ``(N, ...)``, their targets.
    :param num_particles: draws of the guide that the expectation is averaged over.
    :param batch_size: rows that are evaluated at once.
    :param progress: show a bar; by default in terminals and notebooks.
    """
    count = num_rows(x=x, y=y)
    elbo = TemperedTraceMeanField_ELBO(num_particles=_PARTICLES_AT_ONCE)
    in_parts = count > batch_size and getattr(model, "num_data", None) == count
    parts = torch.arange(count, device=device_of_rows(x)).split(batch_size if in_parts else count)
    repeats = max(1, math.ceil(num_particles / _PARTICLES_AT_ONCE))
    total = 0.0
    for rows in shown([*parts] * repeats, "ELBO", progress):
        loss = elbo.loss(model, guide, taken(x, rows), taken(y, rows))
        total -= loss * len(rows) / count
    return total / repeats


def _check_memory(parameters: list[Tensor]) -> None:
    """Check that gradients and Adam's state fit in memory, the least that training takes.

    :raises MemoryError: if they do not.
    """
    needed = 3 * sum(p.numel() * p.element_size() for p in parameters)
    free = available_memory(parameters[0].device) if parameters else None
    if free is not None and needed > free:
        numbers = sum(p.numel() for p in parameters)
        raise MemoryError(
            f"gradients and Adam's state of {numbers:,} parameters need {needed / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free: take AutoMAP, fewer weights or another device"
        )
