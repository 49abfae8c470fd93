"""Complete training that alternates between the MAP and the hyperparameters."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pyro_bdl.curvature.config import check_memory
from pyro_bdl.curvature.hyperparameters import followed, read_at_center
from pyro_bdl.elbo.compiled import bound_for
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.maximize import maximize, warn_of_shared_scales
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.program.subset import Subset
from pyro_bdl.training.descent import data_for
from pyro_bdl.training.svi import train
from pyro_bdl.utils.validation import real_number, whole_number


def train_by_evidence(
    model: Callable,
    guide: AutoLaplaceGGN,
    *args: Any,
    steps: int = 2000,
    rounds: int = 4,
    between: int | None = None,
    learning_rate: float = 0.01,
    batch_size: int | None = None,
    linearized: bool | None = None,
    progress: str | None = None,
    backend: str = "torch",
) -> tuple[LaplaceGuide, bool]:
    """Train the MAP, set the hyperparameters to the maximum of its evidence, and so on; then make
    the Laplace approximation, with the hyperparameters of the last maximum.

    The last maximum is that at the optimum of the linearized model, see ``maximize``; those before
    are at the weights. Many rounds with few steps between them and ``linearized=False`` are the
    online evidence of Immer et al. 2021a (algorithm 1). A scale for each layer needs the latter:
    the linearized model can do without the first layers' weights, and drives their scales to 0.
    Start the scales wide, such as at 1: a narrow prior holds the weights back, and the evidence
    then finds small scales around them. Where the guide's subset is a part of the latents, the
    hyperparameters are set once, at the end.

    In a loop of your own, whose optimizer trains the guide's parameters only, call ``maximize`` on
    ``guide.laplace_approximation(data)`` every few epochs, with ``linearized=False`` and few steps.

    :param model: a program ``model(x, y)``; its hyperparameters change in place.
    :param guide: of the program; trained in place.
    :param args: all training data, as for ``training.train``.
    :param steps: gradient steps of the first round.
    :param rounds: the number of rounds.
    :param between: gradient steps of each later round, by default half of ``steps``.
    :param learning_rate: Adam's at the start of each round; it falls to zero.
    :param batch_size: rows in each step, as in ``training.train``.
    :param linearized: of the last maximum, as in ``maximize``.
    :param progress: description of the progress bar; None for no bar.
    :param backend: of the steps, as in ``training.train``.
    :returns: the posterior, and whether Ctrl-C ended the training early.
    :raises MemoryError: if the guide's structure does not fit in memory.
    """
    steps, rounds = whole_number(steps, "steps"), whole_number(rounds, "rounds")
    later = max(1, steps // 2) if between is None else whole_number(between, "between", least=0)
    learning_rate = real_number(learning_rate, "learning_rate")
    batch_size = None if batch_size is None else whole_number(batch_size, "batch_size")
    data = data_for(model, guide, args)
    reading = read_at_center(model, guide, data)
    tuned = followed(reading)
    partial = guide.subset is not None
    if not partial:  # raise errors before training, not after it
        subset = Subset(guide.require_layout())
        warn_of_shared_scales(guide, subset, reading)
        check_memory(guide.config, guide.require_layout().size, guide.location())
    leaves = {id(parameter.leaf) for parameter in tuned.values()}
    own = model.parameters() if isinstance(model, nn.Module) else ()
    trained = [p for p in (*guide.parameters(), *own) if id(p) not in leaves]
    rounds = rounds if tuned and not partial else 1
    bars = None if progress else False
    elbo = bound_for(steps + (rounds - 1) * later)  # one graph in all rounds
    for number in range(rounds):
        taken = later if number else steps
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
        run = train(
            model, guide, data, elbo=elbo,
            steps=taken, optimizer=optimizer, batch_size=batch_size, progress=progress,
            backend=backend,
        )  # fmt: skip
        if run.interrupted or number == rounds - 1:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # the MAP is trained further
            posterior = guide.laplace_approximation(data, progress=bars)
            maximize(posterior, linearized=False, progress=bars)
    posterior = guide.laplace_approximation(data, progress=bars)
    if tuned:
        maximize(posterior, linearized=linearized, progress=bars)
    return posterior, run.interrupted
