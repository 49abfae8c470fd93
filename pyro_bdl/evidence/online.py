"""Maximization of the evidence during training (Immer et al. 2021a)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import read_at_center
from pyro_bdl.evidence.maximize import Evidence, maximize
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide
from pyro_bdl.program.batches import Batches


@dataclass
class _Best:
    epoch: int
    evidence: Evidence
    loc: Tensor


class MarginalLikelihoodTraining:
    """Updates of hyperparameters by the evidence within the user's SVI loop for the MAP::

        online = MarginalLikelihoodTraining(guide, data, every=5, burn_in=20)
        for epoch in range(1000):
            for x, y in loader:
                svi.step(x, y)
            if not online.step():
                break
        posterior = online.finish()

    After ``burn_in`` epochs, every ``every`` epochs a Laplace approximation is made at the current
    weights, and the program's hyperparameters take steps of ``maximize`` on its evidence (Immer et
    al. 2021a, algorithm 1). The loop's optimizer must train the guide's parameters only: if it also
    holds the hyperparameters, it undoes these steps.

    Start the scales wide, such as at 1: a narrow prior holds the weights back, the evidence then
    finds small scales around them, and a few updates do not undo this. Evidences are compared even
    if the weights are not at a maximum, so choose ``burn_in`` long enough for training to settle.
    The evidence may fall again later, since the weights do not follow it: ``finish()`` takes the
    best update. Then the weights can be trained further at the hyperparameters found, with a
    falling learning rate, before the final ``laplace_approximation``.

    :param guide: the guide that the loop trains.
    :param data: ``(x, y)`` or an iterable of batches, for the evidence.
    :param every: epochs between updates.
    :param burn_in: epochs before the first update.
    :param method: the method of ``maximize``.
    :param steps: steps of ``maximize`` in each update.
    :param patience: stop after this many updates without a better evidence; None: never.
    :param linearized: True evaluates at the linearized model's optimum at every update; False
        never does, so that ``finish()`` leaves the hyperparameters of the best update. By default
        updates evaluate at the present weights, and ``finish()`` sets the hyperparameters at the
        linearized model's optimum. See ``maximize``.
    :param changes: options of the Laplace approximations, such as ``structure``.
    :raises ValueError: for counts that are not positive.
    """

    def __init__(
        self,
        guide: AutoLaplaceGGN,
        data: Any,
        *,
        every: int = 5,
        burn_in: int = 20,
        method: str = "mackay",
        steps: int = 10,
        patience: int | None = 10,
        linearized: bool | None = None,
        **changes: Any,
    ) -> None:
        for name, value in (("every", every), ("steps", steps), ("patience", patience)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}")
        self.guide, self.batches = guide, Batches(data)
        self.every, self.burn_in, self.patience = every, burn_in, patience
        self.method, self.steps = method, steps
        self.linearized = linearized
        self.subset = changes.pop("subset", guide.subset)
        self.config = replace(guide.config, **changes)
        self.epoch = 0
        self.history: list[tuple[int, Evidence]] = []
        self.final: Evidence | None = None
        self._best: _Best | None = None

    def step(self) -> bool:
        """Count an epoch, and update the hyperparameters if it is time.

        :returns: False if the evidence has stopped improving.
        """
        self.epoch += 1
        since = self.epoch - self.burn_in
        if since <= 0 or (since - 1) % self.every:
            return True
        evidence = self._update()
        self.history.append((self.epoch, evidence))
        if self._best is None or evidence.log_evidence > self._best.evidence.log_evidence:
            loc = self.guide.location().detach().clone()
            self._best = _Best(len(self.history), evidence, loc)
        stale = len(self.history) - self._best.epoch
        return self.patience is None or stale < self.patience

    def _update(self) -> Evidence:
        return maximize(
            self._laplace(),
            method=self.method,
            steps=self.steps,
            linearized=bool(self.linearized),
        )

    def _laplace(self, *, check: bool = False) -> LaplaceGuide:
        args, kwargs = self.batches.first()
        self.guide.prototype(*args, **kwargs)
        return LaplaceGuide(self.guide, self.config, self.subset, self.batches, check=check)

    @property
    def best(self) -> Evidence:
        """The best evidence so far.

        :raises RuntimeError: before the first update.
        """
        if self._best is None:
            raise RuntimeError(
                f"no update has been made after {self.epoch} epochs (burn_in={self.burn_in}): "
                "call step() once after every epoch, or make burn_in shorter"
            )
        return self._best.evidence

    def finish(self) -> LaplaceGuide:
        """Put the guide back to where the evidence was best, and return the Laplace approximation
        there.

        The weights are those at which the update began. The hyperparameters are those it ended
        with; where the updates were at the weights, they are then set to the maximum of the
        evidence at the linearized model's optimum (``linearized=False`` leaves them). ``final``
        is this maximum.

        :raises RuntimeError: before the first update.
        """
        best = self.best
        assert self._best is not None
        with torch.no_grad():
            self.guide.loc.copy_(self._best.loc)
        model = self.guide.program_model
        reading = read_at_center(model, self.guide, *self.batches.first())
        for name, value in best.hyperparameters.items():
            reading.parameters[name].set(value)
        posterior = self._laplace()
        if self.linearized is None:
            self.final = maximize(posterior, method=self.method)
        return posterior
