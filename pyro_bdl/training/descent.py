"""Gradient steps over minibatches: the loop that all trainings share, and its record."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from tqdm import tqdm

from pyro_bdl.curvature.fisher import check_scales, num_data
from pyro_bdl.elbo.checks import check_data, step_of
from pyro_bdl.errors import ArgumentError, FailedStepError, warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.program.batches import (
    Batch,
    Batches,
    Stream,
    device_of_rows,
    leading_size,
    select_rows,
)
from pyro_bdl.program.check import (
    TENSORS_NEEDED,
    WholeData,
    check_finite,
    kind_of,
    named_arguments,
    require_program,
)
from pyro_bdl.program.program import trace_once
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.module_state import Modules, device_of, evaluation_mode
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.progress import is_silent
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import listed, one_of, ranked, whole_number

BATCH = 256
_MOST_FULL_BATCH = 1024
_MOST_SKIPPED = 10  # in a row
_SHOWN_EVERY = 50


@dataclass(frozen=True, repr=False)
class Training:
    """The record of a training run.

    :param losses: ``(steps,)``, the negative ELBO of each step taken, in nats.
    :param batch_size: rows in each step; of the batches of an iterable those of the first.
    :param interrupted: whether Ctrl-C ended it early.
    :param held_out: the mean log likelihood of the rows held back, in nats, (checks, members); one
        member of a guide that is no ensemble. None without ``held_out``.
    :param best_steps: the step whose parameters each member has now, (members,).
    :param learning_rate: the one that ``collect_swag`` found or was given.
    :param skipped: the numbers of the steps whose loss or gradient was not finite, from 0.
    """

    losses: Tensor
    batch_size: int
    interrupted: bool
    held_out: Tensor | None = None
    best_steps: Tensor | None = None
    learning_rate: float | None = None
    skipped: tuple[int, ...] = ()

    @property
    def best_scores(self) -> Tensor | None:
        """The held-out log likelihood at ``best_steps``, in nats, (members,)."""
        return None if self.held_out is None else ranked(self.held_out).amax(0)

    def __repr__(self) -> str:
        """The run in a line: its steps, the first and the last loss, and how it ended."""
        words = [f"{len(self.losses)} steps of {self.batch_size} rows"]
        if len(self.losses):
            words.append(f"loss {self.losses[0]:.5g} to {self.losses[-1]:.5g}")
        if self.best_steps is not None:
            steps = ", ".join(map(str, self.best_steps.tolist()))
            words.append(f"parameters of step {steps}")
        if self.skipped:
            words.append(f"{len(self.skipped)} skipped")
        if self.interrupted:
            words.append("interrupted")
        return f"Training({', '.join(words)})"


class Minibatches:
    """Minibatches without end; each pass over the rows is in a new random order.

    Incomplete batches at the end of a pass are left out. It is a part for ``Checkpoint``.

    :param rows: N.
    :param size: rows in each batch; N or more for all rows at once, in their order.
    :param device: of the indices.
    """

    def __init__(self, rows: int, size: int, *, device: torch.device | str = "cpu") -> None:
        self.rows, self.size = whole_number(rows, "rows"), whole_number(size, "size")
        self.device = torch.device(device)
        self._order: Tensor | None = None
        self._position = 0

    def next(self) -> Tensor | None:
        """The indices of the next batch; None for all rows."""
        if self.size >= self.rows:
            return None
        if self._order is None or self._position + self.size > self.rows:
            self._order, self._position = torch.randperm(self.rows, device=self.device), 0
        start = self._position
        self._position += self.size
        return self._order[start : self._position]

    def state_dict(self) -> dict[str, Any]:
        """The present order and the position in it."""
        return {"rows": self.rows, "order": self._order, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        :raises RuntimeError: for a state of other data.
        """
        if state["rows"] != self.rows:
            raise RuntimeError(
                f"the checkpoint is of {state['rows']} rows of data, and these are {self.rows}"
            )
        order = state["order"]
        self._order = None if order is None else order.to(self.device)
        self._position = state["position"]


class Descent:
    """Gradient steps over minibatches, taken where the loss and its gradient are finite.

    Both are read before the optimizer steps, so that there is nothing to undo. Batches, losses and
    skipped steps are a part of a ``Checkpoint``.

    :param objective: a bound at a program and its guide, ``elbo(model, guide)``.
    :param args: the program's arguments with all rows.
    :param size: rows in each step.
    :param stream: batches to take the steps on, in the place of rows of ``args``. Each is checked
        in the first pass.
    :param scale: a factor of the bound in the loss.
    :param on_nonfinite: "raise" an error, or "skip" the optimizer's step with a warning.
    :raises ValueError: for another policy.
    """

    stride = 1  # steps that ``advance`` takes at once

    def __init__(
        self,
        objective: Any,
        optimizer: torch.optim.Optimizer,
        args: tuple,
        size: int,
        *,
        stream: Stream | None = None,
        scale: float = 1.0,
        on_nonfinite: str = "raise",
    ) -> None:
        one_of(on_nonfinite, "on_nonfinite", ("raise", "skip"))
        self.objective, self.optimizer, self.scale = objective, optimizer, scale
        self.args, self.policy = args, on_nonfinite
        self.size, self.stream = size, stream
        self.begin()

    def begin(self) -> None:
        """Begin a run: forget the order of rows, the losses and the skipped steps."""
        rows = max(1, leading_size(self.args))  # a program without arguments holds its data itself
        self.batches = Minibatches(rows, max(1, self.size), device=device_of_rows(self.args))
        self.losses: list[Tensor] = []
        self.skipped: list[int] = []

    def run(
        self, numbers: Iterable[int], steps: int, progress: str | None, after: Callable[[int], None]
    ) -> bool:
        """Take the steps of these numbers; return whether Ctrl-C ended them, with a warning.

        :param steps: the number of all steps, for the progress bar.
        :param progress: description of the bar; None for no bar.
        :param after: called with the number of steps after each step, or stretch of steps.
        """
        hide = progress is None or is_silent(None)
        with tqdm(total=steps, desc=progress, disable=hide, leave=False, delay=1) as bar:
            try:
                for number in numbers:
                    bar.update(number - bar.n)
                    done = self.advance(number)
                    after(done)
                    if not hide and self.losses and number % _SHOWN_EVERY == 0:
                        recent = torch.stack(self.losses[-_SHOWN_EVERY:]).mean().item()
                        bar.set_postfix_str(f"loss {recent:.4g}", refresh=False)
            except KeyboardInterrupt:
                warn(
                    f"interrupted after {len(self.losses)} of {steps} steps: what was reached is "
                    "kept",
                    "interrupted",
                )
                return True
        return False

    def advance(self, number: int) -> int:
        """Take the step of this number; return that of the next."""
        self.step(number)
        return number + 1

    def step(self, number: int) -> None:
        """Take a step with the next rows, or skip it.

        :raises FailedStepError: for a loss or gradient that is not finite, if the policy is
            "raise", at the tenth such step in a row, or if running statistics are not finite.
        """
        rows, (args, kwargs) = self._next()
        bound = self.objective
        with torch.enable_grad():
            step = step_of(bound.elbo, bound.model, bound.guide, args, kwargs)
        self.optimizer.zero_grad()
        step.backward(self.scale)
        loss = step.value.detach() * self.scale
        if bool(loss.isfinite() & self._largest_gradient(loss).isfinite()):
            step.move(self.optimizer)
            self.losses.append(loss)
            return
        self.optimizer.zero_grad()
        self._skip(number, f"step {number}{_words(rows)}: {self._reason(loss, args, kwargs)}")

    def fail(self, number: int, loss: Tensor, rows: Tensor | None) -> None:
        """Skip a step whose loss or gradient is not finite, or raise an error, as ``step`` says."""
        reason = self._reason(loss, self._rows_of(rows), {})
        self._skip(number, f"step {number}{_words(rows)}: {reason}")

    def _next(self) -> tuple[Tensor | None, Batch]:
        """The next batch, with the numbers of its rows where it is a part of those in memory."""
        if self.stream is None:
            rows = self.batches.next()
            return rows, (self._rows_of(rows), {})
        batch = self.stream.next()
        if self.stream.passes == 1:
            with own_randomness():
                check_data(self.objective.model, self.objective.guide, *batch)
        return None, batch

    def _rows_of(self, rows: Tensor | slice | None) -> tuple:
        return self.args if rows is None else tuple(select_rows(value, rows) for value in self.args)

    def _largest_gradient(self, loss: Tensor) -> Tensor:
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return torch.nn.utils.get_total_norm(gradients, norm_type=torch.inf).to(loss)

    def _reason(self, loss: Tensor, args: tuple, kwargs: dict[str, Any]) -> str:
        if loss.isfinite():
            return "the gradient is not finite (torch.autograd.set_detect_anomaly finds where)"
        try:
            check_data(self.objective.model, self.objective.guide, args, kwargs)
        except ValueError as error:
            return f"the loss is {loss.item()}, since {error}"
        return f"the loss is {loss.item()}"

    def _skip(self, number: int, reason: str) -> None:
        self.skipped.append(number)
        modules = Modules(self.objective.model, self.objective.guide)
        layers: list[Any] = [m for m in modules if keeps_statistics(m)]
        if self.policy == "raise":
            action = "the parameters are those before it"
        elif self.skipped[-_MOST_SKIPPED:] == [*range(number - _MOST_SKIPPED + 1, number + 1)]:
            action = f"the last of {_MOST_SKIPPED} in a row"
        elif not all(layer.running_var.isfinite().all() for layer in layers):
            action = "it left running statistics that are not finite"
        else:
            warn(f"{reason}: the step is left out", "failed-steps")
            return
        raise FailedStepError(f"{reason}: {action}", step=number)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the losses and the skipped steps."""
        state = {"losses": self.stacked_losses(), "skipped": self.skipped}
        return {**(self.stream or self.batches).state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        (self.stream or self.batches).load_state_dict(state)
        self.losses, self.skipped = list(state["losses"]), list(state["skipped"])

    def stacked_losses(self) -> Tensor:
        """(steps,), on the device of the losses."""
        return torch.stack(self.losses) if self.losses else torch.empty(0, device="cpu")


def _words(rows: Tensor | None) -> str:
    return "" if rows is None else f", rows {listed(rows.tolist())}"


class Rows(NamedTuple):
    """The data of gradient steps: rows in memory, or the batches of an iterable.

    :param total: N, the number of all data.
    :param size: rows in each step.
    :param first: the program's arguments with all rows, or with the first batch.
    :param stream: the batches of an iterable; None for rows in memory.
    """

    total: int
    size: int
    first: Batch
    stream: Stream | None = None


def data_for(model: Callable, guide: Guide, args: tuple) -> Batches:
    """The data of a training, given as its arguments, on the device of guide and program.

    The first batch is checked, and the guide gets its parameters.

    :raises ArgumentError: for data that are not tensors.
    :raises ValueError: for data that are not finite.
    """
    require_program(model)
    data = Batches.of(args, device_of(guide, model))
    check_tensors(model, *data.first())
    check_finite(model, *data.first())
    first, kwargs = data.first()
    if isinstance(guide, Guide):
        guide.prototype(*first, **kwargs)
    return data


def rows_of(
    model: Callable,
    data: Batches,
    size: int | None,
    *,
    total: int | None = None,
    run: Run | None = None,
) -> Rows:
    """Choose the data of the steps, and check that a program accepts them as a part of all data.

    :param size: rows in each step that the user wants; None for the default.
    :param total: the number of all data, where some are held back.
    :param run: one on the first batch, where there was one.
    :raises ArgumentError: for ``size`` with an iterable.
    :raises ValueError: if the program states no number of data that fits.
    """
    args, kwargs = data.first()
    check_tensors(model, args, kwargs)
    rows = leading_size((args, kwargs))
    if data.whole is not None:
        total = rows if total is None else total
        per_step = rows_per_step(model, args, size, total)
        if per_step == rows:  # all that it is given at once
            held, stated = counted((run or _run_on(model, (args, kwargs))).observed)
            if held == rows < stated != total:
                _warn_of_stated(stated, total)
        return Rows(rows, per_step, (args, {}))
    if size is not None:
        raise ArgumentError(
            f"batch_size={size} is for rows of tensors (x, y), and the data are an iterable, whose "
            "batches have their own size: make them of that many rows"
        )
    stated, known = rows, data.num_data
    if not data.is_single:
        run = run or _run_on(model, (args, kwargs))
        stated = stated_data(run.observed, rows, known, exact=False)
    # of another declared number a warning was given, before the first pass
    counted_by_pass = stated if known in (None, stated) else None
    return Rows(stated, rows, (args, kwargs), Stream(data.part, stated=counted_by_pass))


def check_tensors(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check that a program's arguments are tensors, or nested structures of them.

    :raises ArgumentError: for an argument of another kind.
    """
    for name, value in named_arguments(model, args, kwargs).items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}")


def rows_per_step(model: Callable, args: tuple, size: int | None, total: int) -> int:
    """The rows of each step, see ``batch_size`` of ``train``.

    :param args: the program's arguments with all rows to train on.
    :param size: the number that the user wants; None for the default.
    :param total: the number of all data, with those held back.
    :raises ValueError: for fewer rows than all of a program that does not state ``total``.
    """
    rows = leading_size(args)
    if size is None:
        many = rows > _MOST_FULL_BATCH and getattr(model, "num_data", None) == total
        return BATCH if many else rows
    size = whole_number(size, "batch_size")
    if not rows:
        raise ArgumentError(
            f"batch_size={size} is for data among the program's arguments, and there are none"
        )
    if size < rows:
        _check_batches(model, args, size, total)
    return min(size, rows)


def _check_batches(model: Callable, args: tuple, size: int, total: int) -> None:
    """Check that a program takes so many of the rows as a minibatch of all data.

    :raises ValueError: if it states another number of data.
    :raises ArgumentError: if it cannot run on some of the rows.
    """
    some = tuple(select_rows(value, slice(size)) for value in args)
    try:
        run = _run_on(model, (some, {}))
    except Exception as error:
        _explain_plate(model, args)
        text = (str(error).strip().splitlines() or [""])[0]
        raise ArgumentError(
            f"the program cannot run on {size} of its {leading_size(args)} rows, as "
            f"batch_size={size} needs ({type(error).__name__}: {text}): let its plate hold "
            f'the rows that it gets, pyro.plate("data", {total}, subsample_size=len(x))'
        ) from error
    stated_data(run.observed, size, total)


def _warn_of_stated(stated: int, known: int) -> None:
    warn(
        f"the program states {stated} data, and the data set holds {known}: the likelihood is "
        f"scaled to {stated}",
        "number-of-data",
    )


def _run_on(model: Callable, batch: Batch) -> Run:
    """The statements at a draw of the prior in evaluation mode; the run changes nothing."""
    with own_randomness(), evaluation_mode(model):
        nodes = trace_once(model, *batch).trace.nodes.values()
    run = Run()
    for node in nodes:
        if node["type"] == "sample" and not site_is_subsample(node):
            run.add(node)
    return run


def _explain_plate(model: Callable, args: tuple) -> None:
    """Refuse a program whose plate picks rows of the arguments itself."""
    program = model.forward if isinstance(model, nn.Module) else model
    advice = (
        f"take all of them in each step, batch_size={leading_size(args)}, or let the program use "
        "all rows that it gets"
    )
    with (
        Hidden(), own_randomness(), evaluation_mode(model), torch.no_grad(),
        WholeData(args, {}, advice=advice),
    ):  # fmt: skip
        program(*args)


def counted(sites: Mapping[str, Site]) -> tuple[int, int]:
    """The rows of a run's observed sites, and N, the number of data that their plates state."""
    rows = max((num_data(site) for site in sites.values()), default=0)
    return rows, round(max((num_data(s) * s.subsampling for s in sites.values()), default=0))


def stated_data(
    sites: Mapping[str, Site], size: int, total: int | None, *, exact: bool = True
) -> int:
    """N, the number of data that a program states by its plates' sizes, in a run on a minibatch.

    A ready-made program's plate has the size ``num_data``.

    :param sites: the observed sites of the run.
    :param size: the rows of the minibatch.
    :param total: the number of all data, where it is known.
    :param exact: whether it has to be the one that the program states; else a warning is given.
    :raises ValueError: if the program states no number, or not that of all data, or of one site
        only.
    """
    rows, stated = counted(sites)
    if stated == rows:
        number = "N" if total is None else total
        raise ValueError(
            f"the program treats a minibatch of {rows} rows as all data, so that its log "
            f"likelihood would have too little weight: give its plate the number of all data, "
            f'pyro.plate("data", {number}, subsample_size=len(x)), or a ready-made program '
            f"num_data={number}"
        )
    check_scales(sites)
    if total is not None and rows == size and stated != total:
        if not exact:
            _warn_of_stated(stated, total)
            return stated
        raise ValueError(
            f"the program states {stated} data, but data holds {total}: give its plate that size, "
            f"or a ready-made program num_data={total}"
        )
    return stated
