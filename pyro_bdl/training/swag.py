"""Snapshots of SGD around the MAP, for SWAG."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.distributions.parameters import parameters_of
from pyro_bdl.elbo.checks import require_gradients
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import FailedStepError, warn
from pyro_bdl.guides.swag import AutoMultiSWAG, AutoSWAG, Snapshots
from pyro_bdl.program.batches import Batch, Batches, leading_size
from pyro_bdl.program.trace import record
from pyro_bdl.training.descent import BATCH, Descent, Training, data_for, rows_of
from pyro_bdl.training.svi import BACKENDS, in_backend
from pyro_bdl.utils.memory import stored_numbers
from pyro_bdl.utils.module_state import Modules, preserved_buffers, saved_buffers
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import one_of, real_number, require, whole_number

_LOOKS = tuple(2**power for power in range(2, 20))  # numbers of snapshots whose mean is looked at
_RATES = tuple(first * 10.0**-power for power in range(8) for first in (1.0, 0.3))


def collect_swag(
    model: Callable,
    guide: AutoSWAG | AutoMultiSWAG,
    *args: Any,
    snapshots: int = 40,
    every: int | None = None,
    learning_rate: float | None = None,
    final_learning_rate: float | None = None,
    momentum: float = 0.9,
    batch_size: int | None = None,
    progress: str | None = None,
    backend: str = "torch",
) -> Training:
    """Run SGD from the MAP at a constant or cyclic learning rate, and collect snapshots.

    The loss is -log p(u, y) / N for each member of an ensemble; minibatches give the noise that
    moves the point. Only the guide's parameters are trained, and they stay at the last step. Ctrl-C
    ends the run with a warning and keeps the snapshots.

    The learning rate determines the width of the posterior. Draws of a Gaussian posterior raise
    -log p(u, y) by P / 2 on average (Mandt, Hoffman & Blei 2017, section 3.2); in the directions
    that data determine, in which SGD moves, they are at most R / 2, with R the smaller of P and of
    the numbers of all observed distributions that depend on the latents (N K logits). The mean of
    draws is the minimum again. The default is the largest of the rates 1, 0.3, 0.1, 0.03, ... at
    which N times the mean loss rises by at most R / 2, and at the mean of four snapshots or more by
    at most half of that. A run that rises further is ended, and begins anew at the next rate. At a
    rate that was given there is a warning above R, or at the mean as said.

    With ``final_learning_rate`` the rate falls linearly in each cycle of c = ``every`` steps, and a
    snapshot is taken at the end of the cycle: a(i) = (1 - t) a_1 + t a_2, t = (1 + (i - 1) mod c) /
    c (Izmailov et al. 2018, section 3.1). Otherwise it is constant (Maddox et al. 2019, section 3).

    :param model: a program ``model(x, y)``; for minibatches it states N, as for ``train``.
    :param guide: trained to a maximum; takes the snapshots.
    :param args: all training data, as for ``train``.
    :param snapshots: the number of new snapshots, at least 1.
    :param every: steps between snapshots; by default one pass over the data.
    :param learning_rate: SGD's learning rate a_1 at the start of each cycle; None to find it.
    :param final_learning_rate: the learning rate a_2 at the end of each cycle; None for a constant
        rate.
    :param momentum: SGD's momentum.
    :param batch_size: rows in each step, of tensors; by default a tenth of all rows, at most 256.
        What does not fill a batch at the end of a pass is left out of it.
    :param progress: description of the progress bar, which terminals and notebooks show; None for
        no bar.
    :param backend: of the steps, as in ``train``; those between two snapshots are taken at once.
    :raises ValueError: if a step diverges at a rate that was given, or at all rates; the guide and
        the program's buffers are then as at the start, and earlier snapshots are kept. Also for
        minibatches of a program that does not know N, and for a final rate without a first one.
    """
    require(guide, AutoSWAG | AutoMultiSWAG, "collect_swag needs an AutoSWAG guide")
    require_gradients()
    one_of(backend, "backend", BACKENDS)
    snapshots = whole_number(snapshots, "snapshots")
    momentum = real_number(momentum, "momentum", "[0, 1)")
    every = None if every is None else whole_number(every, "every")
    given = {"learning_rate": learning_rate, "final_learning_rate": final_learning_rate}
    for name, number in given.items():
        if number is not None:
            real_number(number, name)
    if learning_rate is None and final_learning_rate is not None:
        raise ValueError("final_learning_rate needs learning_rate, the rate that it falls from")
    data = data_for(model, guide, args)
    if batch_size is None and data.whole is not None and (count := leading_size(data.whole)):
        batch_size = min(BATCH, max(1, count // 10))
    count, size, first, stream = rows_of(model, data, batch_size)
    every = max(1, count // max(1, size)) if every is None else every
    steps = snapshots * every
    elbo: Any = TemperedTraceMeanField_ELBO(num_particles=guide.num_members)
    objective = elbo(model, guide)
    # a sum over the members, which share no parameters
    per_member = guide.num_members / max(1, count)
    parameters = list(guide.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    restore_buffers = saved_buffers(Modules(guide.program_modules, guide))  # the snapshots' too
    start = _mean_loss(objective, data, size) * per_member
    expected = 0.5 * min(
        guide.require_layout().size,
        _determined(model, guide, first) * count / max(1, leading_size(first)),
    )
    means: list[Snapshots] = []  # of the parameters in this run

    def rise_at_mean(risen: float) -> tuple[float, bool]:
        """By how many nats the mean of the run's snapshots lies above the start, and whether that
        is too far for a run that rises by ``risen``."""
        here = [parameter.detach().clone() for parameter in parameters]
        _put(parameters, [mean.mean for mean in means])
        try:
            found = _mean_loss(objective, data, size) - start / per_member
        finally:
            _put(parameters, here)
        chance = 3.0 * expected**0.5 / int(means[0].count)  # three sds of chi^2_R / (2 k)
        return found, not found <= 0.5 * max(risen, 0.0) + chance

    def rates(step: int) -> list[float]:
        t = (1 + step % every) / every
        return [rate if final_learning_rate is None else (1 - t) * rate + t * final_learning_rate]

    def after(step: int) -> None:
        if step % every == 0:
            try:
                guide.collect()
            except ValueError as error:
                raise _TooHigh(f"diverged within {step} steps") from error
            count = max(
                mean.add(parameter.detach())
                for mean, parameter in zip(means, parameters, strict=True)
            )
            if learning_rate is None:
                risen = double(torch.stack(descent.losses)).sum().item() - step * start
                left = not risen / per_member <= steps * expected
                is_due = count in _LOOKS or step == steps  # a look takes a pass over the data
                if not left and is_due and count >= _LOOKS[0]:
                    left = rise_at_mean(risen / per_member / step)[1]
                if left:
                    raise _TooHigh(f"left the maximum within {step} steps")
        (optimizer.param_groups[0]["lr"],) = rates(step)

    def run() -> bool:
        optimizer.state.clear()
        means[:] = [Snapshots(0, parameter.detach()) for parameter in parameters]
        (optimizer.param_groups[0]["lr"],) = rates(0)
        descent.begin()
        try:
            return descent.run(range(0, steps, descent.stride), steps, progress, after)
        except FailedStepError as error:
            raise _TooHigh(f"diverged within {error.step + 1} steps") from error

    candidates = _RATES if learning_rate is None else (learning_rate,)
    optimizer = torch.optim.SGD(parameters, lr=candidates[0], momentum=momentum)
    descent = Descent(objective, optimizer, first[0], size, stream=stream, scale=per_member)
    descent = in_backend(descent, backend, "collect_swag", steps=steps, rates=rates, stride=every)
    for candidate in candidates:
        rate = candidate
        try:
            interrupted = run()
            break
        except _TooHigh as error:
            reason = error
            _put(parameters, before)
            restore_buffers()
    else:
        raise ValueError(
            f"SGD {reason} at learning_rate={rate:g}: lower it; the guide is back where it "
            f"started, the {int(guide.snapshots.count)} snapshots from before are kept"
        ) from reason
    losses = descent.stacked_losses()
    rise = (losses[steps // 2 :].mean().item() - start) / per_member
    if learning_rate is not None and not interrupted:
        if rise > 2.0 * expected:
            warn(
                f"the loss rose by {rise:.0f} nats while the snapshots were taken, where a "
                f"Gaussian posterior explains {expected:.0f}: learning_rate={rate} makes the "
                "posterior too wide, lower it",
                "swag-rate",
            )
        elif snapshots >= _LOOKS[0]:
            at_mean, too_far = rise_at_mean(rise)
            if too_far:
                warn(
                    f"-log p(u, y) is {at_mean:.0f} nats higher at the mean of the snapshots than "
                    f"where they began, and {rise:.0f} nats on average over the last half of the "
                    f"run: SGD has left the maximum, so that the Gaussian is not around it; lower "
                    f"learning_rate={rate}",
                    "swag-rate",
                )
    return Training(losses, size, interrupted, learning_rate=rate)


class _TooHigh(Exception):
    """A learning rate at which the loss rises too far."""


@torch.enable_grad()
def _determined(model: Callable, guide: Any, batch: Batch) -> float:
    """How many numbers of a batch's observed distributions depend on the latents: the curvature
    that it gives has at most this rank."""
    layout = guide.require_layout()
    points = guide.parameter(guide.points).detach()
    vector = points.reshape(-1, layout.size)[0].clone().requires_grad_()
    with preserved_buffers(guide.program_modules), own_randomness():
        run = record(model, layout.to_supports(layout.unflatten(vector)), *batch)
    if run.factors:
        return math.inf
    parameters = [
        parameter
        for site in run.observed.values()
        for parameter in parameters_of(site.distribution).values()
    ]
    return sum(stored_numbers(parameter) for parameter in parameters if parameter.requires_grad)


@torch.no_grad()
def _put(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Give parameters values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def _mean_loss(objective: Any, data: Batches, size: int) -> float:
    """The mean loss over all rows, in batches of ``size`` rows, without side effects."""
    total, rows = 0.0, 0
    with preserved_buffers(objective.guide.program_modules), own_randomness():
        for args, kwargs in data.parts(max(1, size)):
            count = max(1, leading_size((args, kwargs)))
            total, rows = total + objective(*args, **kwargs).item() * count, rows + count
    return total / rows
