"""Training of a guide by stochastic variational inference, and estimates of its ELBO."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO, check_data
from pyro_bdl.errors import ArgumentError, BdlWarning
from pyro_bdl.estimators import PerDatum
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.swag import AutoMultiSWAG, AutoSWAG
from pyro_bdl.program.argument_errors import TENSORS_NEEDED, by_entry, kind_of
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.validation import check_finite
from pyro_bdl.training.checkpoint import Checkpoint, Losses
from pyro_bdl.training.collapse import warn_of_collapse
from pyro_bdl.training.held_out import HeldOut, split
from pyro_bdl.training.minibatches import Minibatches
from pyro_bdl.training.safeguard import Failure, Safeguard
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.progress import hidden, shown
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import whole_number

_MOST_FULL_BATCH = 1024
_BATCH = 256
_ROWS_AT_ONCE = 4096
_PARTICLES_AT_ONCE = 16
_SHOWN_EVERY = 50
_REFRESH = 0.5  # seconds
_SWAG_RATES = tuple(first * 10.0**-power for power in range(8) for first in (1.0, 0.3))


@dataclass(frozen=True)
class Training:
    """The record of a training run.

    :param losses: ``(steps,)``, the negative ELBO of each step taken, in nats.
    :param batch_size: rows in each step.
    :param interrupted: whether Ctrl-C ended it early.
    :param held_out: the mean log likelihood of the rows held back, in nats, (checks, members); one
        member of a guide that is no ensemble. None without ``held_out``.
    :param best_steps: the step whose parameters each member has now, (members,).
    :param learning_rate: the one that ``collect_swag`` found or was given.
    :param failures: the steps that went wrong, whose losses are left out.
    """

    losses: Tensor
    batch_size: int
    interrupted: bool
    held_out: Tensor | None = None
    best_steps: Tensor | None = None
    learning_rate: float | None = None
    failures: tuple[Failure, ...] = ()


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
    on_failure: str = "stop",
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
        training stops when their log likelihood no longer grows, and the guide has its best
        parameters at the end; each member of an ensemble its own.
    :param patience: checks without a better value after which the training stops.
    :param check_every: steps between two checks, by default a fiftieth of all steps.
    :param checkpoint: a file that holds the state of the training. If it exists, the training goes
        on from there, and ends as one that was never stopped: on a CPU bit for bit. See
        :class:`Checkpoint`.
    :param every: write the checkpoint after every so many steps; by default once a minute. It is
        written after the last step too.
    :param on_failure: what follows a step that goes wrong (a loss or gradient that is not finite,
        out of memory, a loss that diverges): "stop" with an error, "skip" the batch, or "restore"
        the last good state and halve the learning rate. The guide keeps no trace of such a step,
        and the error or warning names it and the rows of its batch. See :class:`Safeguard`.
    :param progress: description of the progress bar, which terminals and notebooks show; None for
        no bar.
    :raises MemoryError: if the gradients and Adam's state alone do not fit in memory.
    :raises FailedStepError: if ``on_failure`` says stop.
    :raises ValueError: for data that are not finite, targets outside their support, fewer than one
        step, or a minibatch for a program whose ``num_data`` is not N, which would give its log
        likelihood too little weight.
    :raises TypeError: for data that are not tensors, or of another dtype than the weights.
    """
    steps = whole_number(steps, "steps")
    total = _count(x=x, y=y)
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
    if size < count:  # a full batch, and the first minibatch, are checked at the first step
        for rows in torch.arange(count, device=device_of_rows(x)).split(_ROWS_AT_ONCE):
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

    safeguard = Safeguard(objective, optimizer, on_failure=on_failure, schedule=schedule)
    descent = _Descent(safeguard.step, x, y, size, after=after)
    numbers: Iterable[int] = range(steps)
    if checkpoint is not None:
        parts: dict[str, Any] = {"program": model} if isinstance(model, nn.Module) else {}
        parts |= {} if held is None else {"held_out": held}
        saved = Checkpoint(
            checkpoint,
            settings={"steps": steps, "batch_size": size, "held_out": held_out},
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
    failures = tuple(safeguard.failures)
    if held is None or not held.scores:
        return Training(losses, size, interrupted, failures=failures)
    held.restore()
    return Training(losses, size, interrupted, held.table, held.best_steps(), failures=failures)


def collect_swag(
    model: nn.Module,
    guide: AutoSWAG | AutoMultiSWAG,
    x: Any,
    y: Any,
    *,
    snapshots: int = 40,
    every: int | None = None,
    learning_rate: float | None = None,
    final_learning_rate: float | None = None,
    momentum: float = 0.9,
    temperature: float = 1.0,
    batch_size: int | None = None,
    progress: str | None = None,
) -> Training:
    """Run SGD from the MAP at a constant or cyclic learning rate, and collect snapshots.

    The loss is -log p(u, y) / N for each member of an ensemble; minibatches give the noise that
    moves the point. Only the guide's parameters are trained, and they stay at the last step. Ctrl-C
    ends the run with a warning and keeps the snapshots.

    The learning rate determines the width of the posterior. Under a Gaussian posterior -log p(u, y)
    lies P / 2 above its minimum on average (Mandt, Hoffman & Blei 2017, section 3.2). The default
    is the largest of the rates 1, 0.3, 0.1, 0.03, ... at which N times the mean loss of the run
    rises by no more than that: a run that rises further is ended, and begins anew at the next
    rate. A warning is given if it rises by more than P at a rate that was given.

    With ``final_learning_rate`` the rate falls linearly in each cycle of c = ``every`` steps, and a
    snapshot is taken at the end of the cycle: a(i) = (1 - t) a_1 + t a_2, t = (1 + (i - 1) mod c) /
    c (Izmailov et al. 2018, section 3.1). Otherwise it is constant (Maddox et al. 2019, section 3).

    :param model: a program ``model(x, y)``; its ``num_data`` is N.
    :param guide: trained to a maximum; takes the snapshots.
    :param x: ``(N, ...)``, all training inputs; or a dict of such tensors.
    :param y: ``(N, ...)``, their targets.
    :param snapshots: the number of new snapshots, at least 1.
    :param every: steps between snapshots; by default one pass over the data.
    :param learning_rate: SGD's learning rate a_1 at the start of each cycle; None to find it.
    :param final_learning_rate: the learning rate a_2 at the end of each cycle; None for a constant
        rate.
    :param momentum: SGD's momentum.
    :param temperature: eta, see :mod:`pyro_bdl.elbo`.
    :param batch_size: rows in each step; by default a tenth of all rows, at most 256.
    :param progress: description of the progress bar, which terminals and notebooks show; None for
        no bar.
    :raises ValueError: if a step diverges at a rate that was given, or at all rates; the guide is
        then reset to its start and earlier snapshots are kept. Also for minibatches of a program
        that does not know N, and for a final rate without a first one.
    """
    if not isinstance(guide, AutoSWAG | AutoMultiSWAG):
        raise TypeError(f"collect_swag needs an AutoSWAG guide, got {type(guide).__name__}")
    snapshots = whole_number(snapshots, "snapshots")
    every = None if every is None else whole_number(every, "every")
    if any(rate is not None and not rate > 0 for rate in (learning_rate, final_learning_rate)):
        raise ValueError("learning rates must be positive")
    if learning_rate is None and final_learning_rate is not None:
        raise ValueError("final_learning_rate needs learning_rate, the rate that it falls from")
    count = _count(x=x, y=y)
    check_finite(model, (x, y), {})
    tenth = min(_BATCH, max(1, count // 10))
    size = rows_per_step(model, count, tenth if batch_size is None else batch_size)
    every = max(1, count // size) if every is None else every
    steps = snapshots * every
    guide.prototype(x, y)
    members = guide.size if isinstance(guide, AutoMultiSWAG) else 1
    elbo = TemperedTraceMeanField_ELBO(temperature=temperature, num_particles=members)
    pair: Any = elbo(model, guide)
    parameters = list(guide.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    taken_before = {name: v.clone() for name, v in guide.snapshots.state_dict().items()}

    def objective(*args: Any) -> Tensor:  # a sum over the members, which share no parameters
        return pair(*args) * members / count

    def begin_again() -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        guide.snapshots.load_state_dict(taken_before)

    start = _mean_loss(objective, x, y, size)
    expected = 0.5 * temperature * guide.require_layout().size

    def run_at(rate: float) -> tuple[Tensor, bool]:
        optimizer = torch.optim.SGD(parameters, lr=rate, momentum=momentum)
        risen = 0.0  # the sum of the losses above the start, in nats per member

        def at_step(step: int) -> None:
            if final_learning_rate is not None:
                t = (1 + step % every) / every
                optimizer.param_groups[0]["lr"] = (1 - t) * rate + t * final_learning_rate

        def after(step: int) -> None:
            nonlocal risen
            if step % every == 0:
                try:
                    guide.collect()
                except ValueError as error:
                    raise _TooHigh(f"diverged within {step} steps") from error
                recent = torch.stack(descent.losses.values[-every:]).double().sum().item()
                risen += (recent - every * start) * count / members
                if learning_rate is None and not risen <= steps * expected:
                    raise _TooHigh(f"left the maximum within {step} steps")
            at_step(step)

        def take(*args: Any, batch: Any = None) -> Tensor:
            loss = objective(*args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        descent = _Descent(take, x, y, size, after=after)
        at_step(0)
        with warnings.catch_warnings():
            if learning_rate is None:  # of a rate that is tried
                warnings.filterwarnings("ignore", "Encountered NaN", UserWarning)
            return descent.run(range(steps), steps, progress)

    rates = list(_SWAG_RATES if learning_rate is None else (learning_rate,))
    while True:
        rate = rates.pop(0)
        try:
            losses, interrupted = run_at(rate)
            break
        except _TooHigh as error:
            begin_again()
            if not rates:
                raise ValueError(
                    f"SGD {error} at learning_rate={rate:g}: lower it; the guide is back where it "
                    f"started, the {int(guide.snapshots.count)} snapshots from before are kept"
                ) from error
    if interrupted:
        warnings.warn(
            f"interrupted after {len(losses)} of {steps} steps: the guide keeps its "
            f"{int(guide.snapshots.count)} snapshots",
            BdlWarning,
            stacklevel=2,
        )
        return Training(losses, size, interrupted, learning_rate=rate)
    rise = (losses[steps // 2 :].mean().item() - start) * count / members
    if learning_rate is not None and rise > 2.0 * expected:
        warnings.warn(
            f"the loss rose by {rise:.0f} nats while the snapshots were taken, where a Gaussian "
            f"posterior explains {expected:.0f}: learning_rate={rate} makes the posterior "
            "too wide, lower it",
            BdlWarning,
            stacklevel=2,
        )
    return Training(losses, size, interrupted, learning_rate=rate)


class _TooHigh(Exception):
    """A learning rate at which the loss rises too far."""


@torch.no_grad()
def _mean_loss(objective: Callable[..., Tensor], x: Any, y: Any, size: int) -> float:
    """The mean loss over all rows, in batches of ``size`` rows, without side effects."""
    count, total = leading_size(x), 0.0
    with preserved_buffers(objective), own_randomness():
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            total += objective(taken(x, rows), taken(y, rows)).item() * (rows.stop - start)
    return total / count


class _Descent:
    """Gradient steps over minibatches.

    :param step: ``step(x, y, batch=rows)`` takes a step with these rows and returns its loss, or
        None if there is none to keep.
    :param size: rows in each step.
    :param after: called with the number of steps after each step.
    """

    def __init__(
        self,
        step: Callable[..., Tensor | None],
        x: Any,
        y: Any,
        size: int,
        *,
        after: Callable[[int], None],
    ) -> None:
        self.step, self.after = step, after
        self.x, self.y = x, y
        self.batches = Minibatches(leading_size(x), size, device=device_of_rows(x))
        self.losses = Losses()

    def run(self, numbers: Iterable[int], steps: int, progress: str | None) -> tuple[Tensor, bool]:
        """Take the steps of these numbers, with a progress bar of ``steps`` steps.

        :returns: the losses (steps taken,), and whether Ctrl-C ended the steps.
        """
        bar = tqdm(
            total=steps,
            desc=progress,
            disable=progress is None or hidden(None),
            leave=False,
            mininterval=_REFRESH,
            delay=1,
        )
        losses = self.losses.values
        with bar:
            try:
                for number in numbers:
                    bar.update(number - bar.n)
                    rows = self.batches.next()
                    x, y = self.x, self.y
                    batch = (x, y) if rows is None else (taken(x, rows), taken(y, rows))
                    loss = self.step(*batch, batch=rows)
                    if loss is not None:
                        losses.append(loss)
                    self.after(number + 1)
                    if losses and len(losses) % _SHOWN_EVERY == 0:
                        recent = torch.stack(losses[-_SHOWN_EVERY:]).mean().item()
                        bar.set_postfix_str(f"loss {recent:.4g}", refresh=False)
            except KeyboardInterrupt:
                return self.losses.stacked(), True
        return self.losses.stacked(), False


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
    count = _count(x=x, y=y)
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
            f"{free / 2**30:.2f} GiB are free: take AutoMAP, fewer weights or another device; "
            "estimate_memory says what fits"
        )


def _count(**arguments: Any) -> int:
    """The number of rows of tensors, or of dicts of tensors.

    :raises ArgumentError: for an argument of another kind.
    """
    entries = by_entry(arguments)
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}")
    return leading_size(entries)


def rows_per_step(model: Callable, rows: int, asked: int | None, total: int | None = None) -> int:
    """The rows of each step, see ``batch_size`` of ``train``.

    :param rows: the number of rows to train on.
    :param asked: the number that was asked for; None for the default.
    :param total: the number of all data, with those held back; by default ``rows``.
    :raises ValueError: for fewer rows than all, if the program's ``num_data`` is not their number.
    """
    total = rows if total is None else total
    knows_all = getattr(model, "num_data", None) == total
    if asked is None:
        return _BATCH if rows > _MOST_FULL_BATCH and knows_all else rows
    asked = whole_number(asked, "batch_size")
    if asked < rows and not knows_all:
        raise ValueError(
            f"batch_size={asked} of {rows} rows needs a program that knows of all of them: make "
            f"it with num_data={total}"
        )
    return min(asked, rows)
