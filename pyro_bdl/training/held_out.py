"""Early stopping by the log likelihood of data that are held back from training."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.program import Program
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.utils.module_state import evaluation_mode, modules_of
from pyro_bdl.utils.random_state import own_randomness

_DRAWS = 16  # of a guide, for its predictive density


def split(x: Any, y: Any, share: float) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Rows for training and rows held back, chosen at random; the same in every call.

    :raises ValueError: for a share outside (0, 1), or one that leaves no row on a side.
    """
    count = leading_size(x)
    size = round(share * count)
    if not 0 < share < 1 or not 0 < size < count:
        raise ValueError(
            f"held_out must be a share between 0 and 1 that leaves rows on both sides, got {share} "
            f"of {count} rows"
        )
    shuffled = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    order = shuffled.to(device_of_rows(x))
    kept, back = order[size:], order[:size]
    return (taken(x, kept), taken(y, kept)), (taken(x, back), taken(y, back))


class HeldOut:
    """The best state of a guide and its program so far, by the mean log likelihood of held-back
    rows in nats.

    The state is the guide's parameters, and the program's parameters and buffers. Of an ensemble
    each member has its own best step, if the program has neither parameters nor running statistics,
    which the members share. Of other guides the score is the log predictive density of 16 draws.

    :param patience: the number of checks without a better value after which ``done`` is true.
    """

    def __init__(self, model: Any, guide: Guide, x: Any, y: Any, patience: int) -> None:
        self.model, self.guide, self.patience = model, guide, patience
        self.program = Program(model, x, y)
        self.is_ensemble = isinstance(guide, AutoEnsemble)
        self.modules = modules_of(model, guide)
        shared = [p for m in modules_of(model) for p in m.parameters(recurse=False)]
        statistics = any(map(keeps_statistics, self.modules))
        self.apart = (
            self.is_ensemble and not statistics and not any(p.requires_grad for p in shared)
        )
        self.scores: list[Tensor] = []
        self.steps: list[int] = []
        self.best: list[Tensor] = []

    def _state(self) -> list[Tensor]:
        """The guide's parameters, then the program's parameters and all buffers."""
        of_modules = [
            value
            for module in self.modules
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ]
        return list({id(v): v for v in (*self.guide.parameters(), *of_modules)}.values())

    @torch.no_grad()
    def check(self, step: int) -> None:
        """Score the guide after a step, and copy the state where it is the best one."""
        score = self._score()
        before = (
            torch.stack(self.scores).amax(0) if self.scores else score.new_full((1,), -torch.inf)
        )
        self.scores.append(score)
        self.steps.append(step)
        better = score > before
        if self.best and self.apart:
            self.best[0][better] = next(self.guide.parameters()).detach()[better]
        elif not self.best or bool(better):
            self.best = [value.detach().clone() for value in self._state()]

    def _score(self) -> Tensor:
        guide: Any = self.guide
        with evaluation_mode(self.model, guide), own_randomness():
            draws = guide.sample_latents(guide.size if self.is_ensemble else _DRAWS)
            found = map_draws(lambda draw: self.program.log_likelihood(draw), draws)
        count = leading_size(self.program.args[0])
        per_row = sum(value.reshape(len(value), count, -1).sum(-1) for value in found.values())
        if self.is_ensemble:
            scores = per_row.mean(-1)
            return scores if self.apart else scores.mean()[None]
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
        last = self.table.flip(0).argmax(0)  # checks since the best one
        return bool((last >= self.patience).all())

    def best_steps(self) -> Tensor:
        """The step of the best score (members,)."""
        return torch.tensor(self.steps, device="cpu")[self.table.argmax(0).cpu()]

    def state_dict(self) -> dict[str, Any]:
        """The scores and the best state so far, for a ``Checkpoint``."""
        return {"scores": self.scores, "steps": self.steps, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        like = next(self.guide.parameters())
        self.scores = [score.to(like.device) for score in state["scores"]]
        self.best = [value.to(like.device) for value in state["best"]]
        self.steps = list(state["steps"])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the best state back into the guide and the program."""
        for tensor, value in zip(self._state(), self.best, strict=True):
            tensor.copy_(value)
