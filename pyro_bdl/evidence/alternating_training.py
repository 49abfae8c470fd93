"""Complete training that alternates between the MAP and the hyperparameters."""

import warnings

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.config import check_memory
from pyro_bdl.curvature.hyperparameters import followed, read_at_center
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.marginal import read_guide
from pyro_bdl.evidence.maximize import mackay_update, maximize
from pyro_bdl.evidence.shared_scales import warn_of_shared_scales
from pyro_bdl.guides.laplace import AutoLaplaceGGN, LaplaceGuide
from pyro_bdl.program.subset import Subset
from pyro_bdl.training.svi import train

_ROUNDS = 4


def train_by_evidence(
    model: nn.Module,
    guide: AutoLaplaceGGN,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 2000,
    rounds: int = _ROUNDS,
    progress: str | None = None,
) -> tuple[LaplaceGuide, bool]:
    """Train the MAP, set the hyperparameters to the maximum of its evidence, and so on; then make
    the Laplace approximation, with the hyperparameters of the last maximum.

    The last maximum is that at the optimum of the linearized model, see ``maximize``. Where the
    guide's subset is a part of the latents, the others' prior stays as it is while the MAP is
    trained, and the hyperparameters are set once, at the end.

    :param model: a program ``model(x, y)``; its hyperparameters change in place.
    :param guide: of the program; trained in place.
    :param x: ``(N, ...)``, all training inputs.
    :param y: ``(N, ...)``, their targets.
    :param steps: gradient steps of the first round; later rounds take half as many.
    :param rounds: the number of rounds.
    :param progress: description of the progress bar; None for no bar.
    :returns: the posterior, and whether Ctrl-C ended the training early.
    :raises MemoryError: if the guide's structure does not fit in memory.
    """
    guide.prototype(x, y)
    reading = read_at_center(model, guide, (x, y), {})
    tuned = followed(reading)
    partial = guide.subset is not None
    if not partial:  # raise errors before training, not after it
        subset = Subset(guide.require_layout())
        warn_of_shared_scales(guide, subset, reading, ((x, y), {}), stacklevel=2)
        check_memory(guide.config, guide.require_layout().size, guide.location())
    leaves = {id(parameter.leaf) for parameter in tuned.values()}
    trained = [p for p in (*guide.parameters(), *model.parameters()) if id(p) not in leaves]
    rounds = rounds if tuned and not partial else 1
    bars = None if progress else False
    for number in range(rounds):
        taken = steps if number == 0 else max(1, steps // 2)
        optimizer = torch.optim.Adam(trained, lr=0.01)
        run = train(model, guide, x, y, steps=taken, optimizer=optimizer, progress=progress)
        if run.interrupted or number == rounds - 1:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # the MAP is trained further
            _set(
                guide.laplace_approximation((x, y), progress=bars), linearized=False, progress=bars
            )
    posterior = guide.laplace_approximation((x, y), progress=bars)
    if tuned:
        _set(posterior, progress=bars)
    return posterior, run.interrupted


def _set(
    posterior: LaplaceGuide, *, linearized: bool | None = None, progress: bool | None = None
) -> None:
    closed = mackay_update(posterior, read_guide(posterior))
    method = "mackay" if closed else "gradient"
    maximize(posterior, method=method, linearized=linearized, progress=progress)
