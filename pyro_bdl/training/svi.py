"""Training of a guide by stochastic variational inference, and estimates of its ELBO."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from pyro_bdl.elbo.checks import check_data, require_differentiable, require_gradients
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import ArgumentError, MissingOperatorError, UnsupportedProgramError, warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import DRAWS_AT_ONCE
from pyro_bdl.program.batches import Batch, Batches, device_of_rows, leading_size
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.program import Program
from pyro_bdl.training.checkpoint import Checkpoint
from pyro_bdl.training.collapse import warn_of_collapse, warn_of_joint_scales
from pyro_bdl.training.descent import Descent, Training, data_for, rows_of
from pyro_bdl.training.held_out import EarlyStopping, HeldOut
from pyro_bdl.utils.jackknife import GROUPS
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import fixed_normal, seeded
from pyro_bdl.utils.validation import as_path, one_of, real_number, require, whole_number

BACKENDS = ("torch", "jax", "auto")  # of the steps
_ROWS_AT_ONCE = 4096
_LEAST_PARTICLES, _NUMBERS_AT_ONCE = 16, 16 * _ROWS_AT_ONCE  # draws, and draws times rows
_WORTH_COMPILING = 1000  # steps: tracing and compilation take as long as JAX saves in these
_SPREAD = 0.1  # of the unconstrained latents at which the data are recognized


def train(
    model: Callable,
    guide: Guide,
    *args: Any,
    steps: int,
    learning_rate: float = 0.01,
    elbo: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch_size: int | None = None,
    held_out: float | HeldOut | None = None,
    checkpoint: str | Path | None = None,
    on_nonfinite: str = "raise",
    progress: str | None = None,
    backend: str = "torch",
) -> Training:
    """Maximize the ELBO by Adam with a cosine schedule: the learning rate falls to zero along half
    a cosine.

    Ctrl-C ends the training with a warning and keeps the parameters reached so far. A warning is
    given if a Gaussian guide of more numbers than data has collapsed to the prior at temperature 1,
    or ignores the inputs after 100 steps or more, see :func:`pyro_bdl.training.collapse`.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> training.losses.shape
        torch.Size([100])

    :param model: a program ``model(x, y)``.
    :param guide: trained in place.
    :param args: all training data, ``x`` and ``y`` (N, ...): tensors, or dicts and tuples of
        tensors. Or, in their place, an iterable of such batches that is read as it is needed: a
        ``DataLoader``, a list, or a function that makes an iterator for each pass. Each batch is a
        step, and a last smaller one of b rows counts N / b times in its step. Batches are moved to
        the device of the guide and the program.
    :param steps: number of gradient steps, at least 1.
    :param learning_rate: Adam's initial learning rate.
    :param elbo: the bound, with its temperature, particles and estimator; by default
        ``TemperedTraceMeanField_ELBO()``, for an ensemble with a particle for each member.
    :param optimizer: another optimizer, and the parameters to train; it replaces Adam with those of
        the guide and of the program. Its learning rate falls in the same way. Under a MAP guide,
        scales of the prior that are ``PyroParam``s need one over ``guide.parameters()`` after
        ``guide.prototype(x, y)``: with the weights they have no joint maximum, and
        :func:`pyro_bdl.evidence.maximize` sets them.
    :param batch_size: rows in each step, of tensors. A program states by its plate that they are
        some of N rows, ``pyro.plate("data", N, subsample_size=len(x))`` (``num_data`` of the
        ready-made ones). Each pass is in a new random order, and rows at its end that do not fill a
        batch are left out of it. The default is all rows; 256 of more than 1024 if ``num_data`` is
        N.
    :param held_out: the share of the rows, chosen at random, that is held back from training, or a
        :class:`HeldOut`. The posterior is that of the rows that are kept: N counts these. The
        training stops when the log likelihood of the others no longer grows, and guide and
        program have their best parameters and buffers at the end.
    :param checkpoint: a file that holds the state of the training, written once a minute and at
        the end. If it exists, the training goes on from there, and ends as one that was never
        stopped: on a CPU bit for bit. A file of another program, other data or other settings is
        refused; the batches of an iterable are not compared, and their order must come from torch's
        random numbers or be fixed. See :class:`Checkpoint`.
    :param on_nonfinite: what follows a loss or gradient that is not finite: "raise" an error with
        the step, the rows and the parameters of before, or "skip" the step with a warning. Ten in
        a row are an error.
    :param progress: description of the progress bar, which terminals and notebooks show; None for
        no bar.
    :param backend: "torch", or "jax" for steps in one compiled loop, see
        :mod:`pyro_bdl.training.jax_steps`: after a second or two of compilation a step of a small
        network takes a tenth of the time. It draws other random numbers. What it cannot do
        (operators without translation, running statistics, hooks, other optimizers than Adam,
        AdamW, SGD and IVON) is done in torch, with a warning that says why. "auto" is "jax" where
        it was measured to pay: 1,000 steps or more on a CPU, without convolutions, which are
        faster in torch there.
    :raises FailedStepError: for a loss or gradient that is not finite, unless it is skipped.
    :raises ValueError: for data that are not finite, targets outside their support, fewer than one
        step, or a minibatch for a program that does not state N, which would give its log
        likelihood too little weight.
    :raises TypeError: for a guide of Pyro, or data that are not tensors, or of another dtype than
        the weights; for an ELBO without ``differentiable_loss``, as ``pyro.infer.RenyiELBO``.
    """
    require_gradients()
    one_of(backend, "backend", BACKENDS)
    advice = ": use pyro.infer.SVI for Pyro's guides"
    require(guide, Guide, "train takes the guides of pyro_bdl", advice)
    steps = whole_number(steps, "steps")
    learning_rate = real_number(learning_rate, "learning_rate")
    checkpoint = None if checkpoint is None else as_path(checkpoint, "checkpoint")
    data = data_for(model, guide, args)
    stopping, total = None, None
    if held_out is not None:
        options = held_out if isinstance(held_out, HeldOut) else HeldOut(held_out)
        if data.whole is None:
            raise ArgumentError(
                "held_out is for rows of tensors (x, y), and the data are an iterable: leave rows "
                "out of it"
            )
        kept, back = options.split(data.whole)
        total, data = leading_size(data.whole), Batches([kept])
        stopping = EarlyStopping(model, guide, back, options, steps)
    rows = rows_of(model, data, batch_size, total=total)
    args, size, stream = rows.first[0], rows.size, rows.stream
    batches = [rows.first]
    if stream is None and size < leading_size(args):  # a full batch is checked at the first step
        batches = list(data.parts(_ROWS_AT_ONCE))
        for batch in batches:
            check_data(model, guide, *batch)
    elbo = TemperedTraceMeanField_ELBO(num_particles=guide.num_members) if elbo is None else elbo
    require_differentiable(elbo)
    if isinstance(elbo, TemperedTrace_ELBO):
        elbo.begin_training()
    objective: Any = elbo(model if stopping is None else stopping.of_kept(args), guide)
    if optimizer is None:
        optimizer = torch.optim.Adam(objective.parameters(), lr=learning_rate)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer must be one of torch over parameters, such as "
            f"torch.optim.Adam(guide.parameters()), got {optimizer!r}: those of Pyro are for "
            "pyro.infer.SVI"
        )
    if isinstance(elbo, TemperedTrace_ELBO):
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        warn_of_joint_scales(model, guide, trained, rows.first)
    rates = partial(cosine, [group["lr"] for group in optimizer.param_groups], steps)
    descent = Descent(objective, optimizer, args, size, stream=stream, on_nonfinite=on_nonfinite)
    stride = {} if stopping is None else {"stride": stopping.check_every}
    descent = in_backend(descent, backend, "train", steps=steps, rates=rates, **stride)
    numbers: Iterable[int] = range(0, steps, descent.stride)
    if checkpoint is not None:
        parts: dict[str, Any] = {"program": model} if isinstance(model, nn.Module) else {}
        parts |= {} if stopping is None else {"held_out": stopping}
        settings = {
            "steps": steps,
            "batch_size": size,
            "backend": backend,
            "held_out": None if stopping is None else options.share,
            **_settings(guide, elbo, optimizer),
        }
        if stream is None:
            settings["log density of the data"] = _log_density(model, batches, optimizer)
        numbers = Checkpoint(
            checkpoint, settings=settings, guide=guide, optimizer=optimizer, elbo=elbo,
            descent=descent, **parts,
        ).steps(steps, stride=descent.stride)  # fmt: skip

    def after(step: int) -> None:
        for group, value in zip(optimizer.param_groups, rates(step), strict=True):
            group["lr"] = value
        if stopping is not None:
            stopping.after(step)

    if stopping is not None:
        numbers = takewhile(lambda _: not stopping.done, numbers)
    interrupted = descent.run(numbers, steps, progress, after)
    if not interrupted:
        taken = len(descent.losses)
        warn_of_collapse(model, guide, elbo, rows.first, size, total=rows.total, steps=taken)
    run = Training(descent.stacked_losses(), size, interrupted, skipped=tuple(descent.skipped))
    return run if stopping is None else stopping.restored(run)


@overload
def estimate_elbo(
    model: Callable, guide: Guide, *args: Any, num_particles: int = ...,
    batch_size: int | None = ..., with_error: Literal[False] = ..., progress: bool | None = ...,
) -> float: ...  # fmt: skip


@overload
def estimate_elbo(
    model: Callable, guide: Guide, *args: Any, num_particles: int = ...,
    batch_size: int | None = ..., with_error: Literal[True], progress: bool | None = ...,
) -> tuple[float, float]: ...  # fmt: skip


@overload
def estimate_elbo(
    model: Callable, guide: Guide, *args: Any, num_particles: int = ...,
    batch_size: int | None = ..., with_error: bool, progress: bool | None = ...,
) -> float | tuple[float, float]: ...  # fmt: skip


@torch.no_grad()
def estimate_elbo(
    model: Callable,
    guide: Guide,
    *args: Any,
    num_particles: int = 512,
    batch_size: int | None = None,
    with_error: bool = False,
    progress: bool | None = None,
) -> float | tuple[float, float]:
    """Estimate the ELBO at temperature 1, E_q[log p(y | w)] - KL(q || p), in nats, over all data.

    Batches of ``batch_size`` rows need a program that states N, as for ``train``. Each batch has
    its own share of the draws, at least 16. The sum is about as exact as with all draws at each
    batch, since likelihoods of batches of thousands rise and fall together.

    :param model: a program ``model(x, y)``.
    :param guide: a guide with a density; for a point mass the number is log p(y, w) instead.
    :param args: all training data, as for ``train``; the bounds of an iterable's batches count by
        their rows.
    :param num_particles: draws of the guide that the expectation is averaged over, over all
        batches together.
    :param batch_size: rows that are evaluated at once, the last ones fewer. The default is all
        rows; 4096 if the program's ``num_data`` is N.
    :param with_error: return ``(estimate, error)``, with the standard error over the draws, in
        nats: of ten estimates or more, whose mean is returned. A point mass has none.
    :param progress: show a bar; by default in terminals and notebooks.
    :raises ValueError: for batches of a program that does not state N.
    :raises UnsupportedProgramError: for a latent of which a mask leaves numbers without a density,
        for which there is no bound.
    """
    require(guide, Guide, "estimate_elbo takes the guides of pyro_bdl")
    num_particles = whole_number(num_particles, "num_particles")
    batch_size = None if batch_size is None else whole_number(batch_size, "batch_size")
    data = data_for(model, guide, args)
    with torch.no_grad():
        program, run = Program.with_run(model, *data.first())
    run.refuse_improper("evidence lower bound")
    count = 0 if data.whole is None else leading_size(data.whole)
    if batch_size is None and count:
        batch_size = _ROWS_AT_ONCE if getattr(model, "num_data", None) == count else count
    all_rows, size, *_ = rows_of(model, data, batch_size, run=run)
    at_once = min(_NUMBERS_AT_ONCE // max(1, size), DRAWS_AT_ONCE // max(1, program.size))
    share = math.ceil(num_particles / max(1, math.ceil(all_rows / max(1, size))))
    share = max(_LEAST_PARTICLES, share)  # of the draws, for a batch
    repeats = max(GROUPS, math.ceil(share / max(1, at_once)))
    members = guide.num_members if isinstance(guide, Guide) else 1
    particles = members * math.ceil(share / repeats / members)
    elbo = TemperedTraceMeanField_ELBO(num_particles=particles)
    totals, counts = torch.zeros(repeats, dtype=torch.float64, device="cpu"), 0
    for batch in progress_bar(data.parts(size), "ELBO", progress):
        check_finite(model, *batch)
        count = max(1, leading_size(batch))
        losses = [elbo.loss(model, guide, *batch[0], **batch[1]) for _ in range(repeats)]
        totals -= count * torch.tensor(losses, dtype=torch.float64, device="cpu")
        counts += count
    estimate = float(totals.mean() / counts)
    if not with_error:
        return estimate
    return estimate, float(totals.std() / counts) / math.sqrt(repeats)


def cosine(largest: Sequence[float], steps: int, step: int) -> list[float]:
    """The learning rates of a step, which fall to zero along half a cosine."""
    factor = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return [factor * rate for rate in largest]


def in_backend(
    descent: Descent, backend: str, caller: str, *, steps: int, **options: Any
) -> Descent:
    """The descent with steps in a backend, see ``train``; the same one where that is torch.

    :param caller: the public function, for the warning.
    :param options: of ``JaxDescent``.
    """
    auto = backend == "auto"
    pays = device_of_rows(descent.args).type == "cpu" and steps >= _WORTH_COMPILING
    if backend == "torch" or (auto and not pays):
        return descent
    from pyro_bdl.training.jax_steps import JaxDescent  # JAX is imported where it is used

    try:
        if descent.stream is not None:
            raise UnsupportedProgramError("the data are an iterable, whose batches come one by one")
        return JaxDescent(
            descent.objective, descent.optimizer, descent.args, descent.batches.size,
            scale=descent.scale, on_nonfinite=descent.policy, convolutions=not auto, steps=steps,
            **options,
        )  # fmt: skip
    except (UnsupportedProgramError, MissingOperatorError) as error:
        if not auto or isinstance(error, MissingOperatorError):
            warn(f"{caller} takes the steps in torch: {error}", "uncompiled")
        return descent


# What a checkpoint recognizes its run by


def _settings(guide: Any, elbo: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings of a guide, a bound and an optimizer before its first step, by name."""
    groups = [
        {name: v for name, v in group.items() if isinstance(v, bool | int | float | str | tuple)}
        for group in optimizer.param_groups
    ]
    return {
        "guide": type(guide).__name__,
        "elbo": type(elbo).__name__,
        "temperature": getattr(elbo, "temperature", None),
        "num_particles": getattr(elbo, "num_particles", None),
        "estimator": getattr(getattr(elbo, "estimator", None), "name", None),
        "optimizer": type(optimizer).__name__,
        "optimizer's options": groups,
    }


@torch.no_grad()
def _log_density(
    model: Callable, batches: Iterable[Batch], optimizer: torch.optim.Optimizer
) -> Tensor:
    """log p(y, w) summed over batches, in nats, at one w that is the same in every run.

    The program's parameters that are to be trained have fixed values meanwhile, since their start
    may be drawn anew in every run.
    """
    moved = {id(value) for group in optimizer.param_groups for value in group["params"]}
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    start = [(value, value.clone()) for value in parameters if id(value) in moved]
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    try:
        for value, _ in start:
            value.copy_(_SPREAD * fixed_normal(value))
        with evaluation_mode(model), seeded(0):
            for args, kwargs in batches:
                program = Program(model, *args, **kwargs)
                at = _SPREAD * fixed_normal(program.unconstrain(program.initial))
                total += program.log_density(at).cpu()
    finally:
        for value, before in start:
            value.copy_(before)
    return total
