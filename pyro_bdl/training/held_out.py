"""Early stopping by the log likelihood of data that are held back from training."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.handlers import WithHandler
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.program.batches import device_of_rows, leading_size, select_rows
from pyro_bdl.program.program import Program
from pyro_bdl.program.rows import along_rows, plates_of_rows, refuse_local_latents
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.training.descent import Training
from pyro_bdl.utils.module_state import Modules, evaluation_mode
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import listed, ranked, real_number, whole_number

_DRAWS = 16  # of a guide, for its predictive density
_CHECKS = 50


class KeptRows(OneThread):
    """Handler that makes the K rows left for training all of the data: N / B becomes K / B.

    Where a plate of the data has more cells than the rows that the program gets, it has the size N
    that the program states of all of them, and gets the size K. A program that counts the rows it
    gets is left alone.

    :param plates: the plates of the data.
    :param share: K / N, the share of the rows that is kept.
    """

    def __init__(self, plates: Container[str], share: float) -> None:
        super().__init__()
        self.plates, self.share = plates, share

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] != "sample":
            return
        frames = []
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.plates and frame.full_size not in (None, frame.size):
                msg["scale"] = msg["scale"] * self.share
                frame = frame._replace(full_size=frame.full_size * self.share)
            frames.append(frame)
        msg["cond_indep_stack"] = tuple(frames)


@dataclass(frozen=True)
class HeldOut:
    """Rows that are held back from training, and when they end it.

    :param share: of the rows, in (0, 1); they are chosen at random, the same in every run.
    :param patience: checks without a better log likelihood after which the training stops.
    :param check_every: steps between two checks, by default a fiftieth of all steps.
    :raises ValueError: for a share outside (0, 1), or numbers below 1.
    """

    share: float
    patience: int = 10
    check_every: int | None = None

    def __post_init__(self) -> None:
        real_number(self.share, "held_out, the share of rows,", "(0, 1)")
        whole_number(self.patience, "patience")
        whole_number(1 if self.check_every is None else self.check_every, "check_every")

    def split(self, args: tuple) -> tuple[tuple, tuple]:
        """The arguments with the rows for training, and with those held back.

        :raises ValueError: for a share that leaves no row on a side.
        """
        count = leading_size(args)
        size = round(self.share * count)
        if not count:
            raise ValueError("held_out needs data among the program's arguments, to hold rows back")
        if not 0 < size < count:
            raise ValueError(
                f"held_out must leave rows on both sides, got the share {self.share} of {count} "
                "rows"
            )
        generator = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(count, generator=generator, device="cpu").to(device_of_rows(args))
        parts = order[size:], order[:size]
        kept, back = (tuple(select_rows(value, rows) for value in args) for rows in parts)
        return kept, back


class EarlyStopping:
    """The best state of a guide and its program so far, by the mean log likelihood of held-back
    rows in nats, of those that masks do not leave out.

    The state is the guide's parameters, and the program's parameters and buffers. Of an ensemble
    each member has its own best step, if the program has neither parameters nor running statistics,
    which the members share. Of other guides the score is the log predictive density of 16 draws.

    :param back: the program's arguments with the rows held back.
    :param steps: the number of all steps.
    """

    def __init__(self, model: Any, guide: Guide, back: tuple, options: HeldOut, steps: int) -> None:
        self.model, self.guide, self.patience = model, guide, options.patience
        self.check_every = options.check_every or max(1, steps // _CHECKS)
        self.program = Program(model, *back)
        self.plates, self.dims, self.seen = _rows_of(self.program)
        self.is_ensemble = isinstance(guide, AutoEnsemble)
        modules = Modules(self.program.modules, guide.program_modules, guide)
        tensors: list[Tensor] = list(guide.parameters())
        trained = len(tensors)
        for module in modules:
            tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        self.parts = list({id(tensor): tensor for tensor in tensors}.values())
        shares = any(tensor.requires_grad for tensor in self.parts[trained:])
        self.separate = self.is_ensemble and not shares and not any(map(keeps_statistics, modules))
        self.scores: list[Tensor] = []
        self.steps: list[int] = []
        self.best: list[Tensor] = []

    def of_kept(self, kept: tuple) -> WithHandler:
        """The program whose data are the rows that are kept."""
        rows = leading_size(kept)
        share = rows / (rows + leading_size(self.program.args))
        return WithHandler(self.model, KeptRows(self.plates, share))

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Score the guide if a check is due after a step, and copy the state of the best one."""
        if step % self.check_every:
            return
        score = self._score()
        known = ranked(score)
        better = known > (ranked(self.table).amax(0) if self.scores else -torch.inf)
        self.scores.append(score)
        self.steps.append(step)
        if not self.best:
            self.best = [value.detach().clone() for value in self.parts]
        elif self.separate:
            self.best[0][better] = self.parts[0].detach()[better]
        elif bool(better):
            self.best = [value.detach().clone() for value in self.parts]

    def _score(self) -> Tensor:
        guide: Any = self.guide
        with evaluation_mode(self.program.modules, guide), own_randomness():
            draws = guide.sample_latents(guide.size if self.is_ensemble else _DRAWS)
            values = map_draws(lambda draw: self.program.log_likelihood(draw), draws)
        count = leading_size(self.program.args)
        own = [values[name].movedim(dim, 1) for name, dim in self.dims.items() if name in values]
        per_row = sum(value.reshape(len(value), count, -1).sum(-1) for value in own)
        if self.seen is not None:
            per_row = per_row[:, self.seen]
        if self.is_ensemble:
            scores = per_row.mean(-1)
            return scores if self.separate else scores.mean()[None]
        return (per_row.logsumexp(0) - math.log(len(per_row))).mean()[None]

    @property
    def table(self) -> Tensor:
        """The scores (checks, members), or (checks, 1) of members that share a best step."""
        return torch.stack(self.scores)

    @property
    def done(self) -> bool:
        """True if every member went ``patience`` checks without a better value."""
        if len(self.scores) <= self.patience:
            return False
        since_best = len(self.scores) - 1 - ranked(self.table).argmax(0)
        return bool((since_best >= self.patience).all())

    @torch.no_grad()
    def restored(self, run: Training) -> Training:
        """Put the best state back into guide and program; the run with its scores.

        A warning is given where scores are not finite: these are never the best.
        """
        if not self.scores:
            return run
        failed = ~self.table.isfinite().all(-1)
        if failed.any():
            steps = [step for step, bad in zip(self.steps, failed.tolist(), strict=True) if bad]
            warn(
                f"the log likelihood of the rows held back is not finite at {len(steps)} of "
                f"{len(self.steps)} checks, after steps {listed(steps)}: these are never the best",
                "failed-steps",
            )
        for tensor, value in zip(self.parts, self.best, strict=True):
            tensor.copy_(value)
        best_steps = torch.tensor(self.steps, device="cpu")[ranked(self.table).argmax(0).cpu()]
        return replace(run, held_out=self.table, best_steps=best_steps)

    def state_dict(self) -> dict[str, Any]:
        """The scores and the best state so far, for a ``Checkpoint``."""
        return {"scores": self.scores, "steps": self.steps, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        device = self.parts[0].device
        self.scores = [score.to(device) for score in state["scores"]]
        self.best = [value.to(device) for value in state["best"]]
        self.steps = list(state["steps"])


def _rows_of(program: Program) -> tuple[set[str], dict[str, int], Tensor | None]:
    """The plates that hold the rows; the observed sites of rows, each with its dimension of them,
    counted from the right; and the rows of which something counts, bool (N,), None where no mask
    leaves any out.

    :raises UnsupportedProgramError: for a latent site in one of the plates, and for observed sites
        without a dimension of the rows.
    """
    rows = leading_size(program.args)
    with torch.no_grad():
        observed = program.run(program.initial).observed
    places = plates_of_rows(observed, program.args)
    plates, dims = (
        {plate for plate, _ in places.values()},
        {n: dim for n, (_, dim) in places.items()},
    )
    refuse_local_latents(
        program.latents, plates, "and nothing is learned of those of rows that held_out holds back",
        "train on all rows",
    )  # fmt: skip
    if not dims:
        batches = {name: site.distribution.batch_shape for name, site in observed.items()}
        dims = {name: -len(shape) for name, shape in batches.items() if shape[:1] == (rows,)}
        if not dims or any(along_rows(observed[n].value, program.args) is False for n in dims):
            raise UnsupportedProgramError(
                "held_out scores rows, and no plate of an observed site has a cell for each of "
                'them: write the likelihood in pyro.plate("data", len(x))'
            )
    seen = None
    if any(observed[name].is_masked for name in dims):
        counted = []
        for name, dim in dims.items():
            mark, batch = observed[name].seen(), len(observed[name].distribution.batch_shape)
            counted.append(mark.movedim(batch + dim, 0).reshape(rows, -1).any(1))
        seen = torch.stack(counted).any(0)
    return plates, dims, seen
