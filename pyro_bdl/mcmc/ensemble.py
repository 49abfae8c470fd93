"""``ensemble_sample``: a deep ensemble, and a chain from each of its members."""

from dataclasses import replace
from typing import Any

from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.mcmc.kernels import MCLMC, Kernel
from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.sampling import sgmcmc
from pyro_bdl.program.samples import Samples
from pyro_bdl.training.svi import train
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

KERNEL = MCLMC(energy_variance=0.01, thinning=50)


def ensemble_sample(
    model: Any,
    *args: Any,
    members: int | AutoEnsemble = 10,
    kernel: str | Kernel | StochasticKernel = KERNEL,
    num_warmup: int = 300,
    num_samples: int = 300,
    training_steps: int = 2000,
    learning_rate: float = 0.01,
    held_out: float | None = 0.1,
    batch_size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Samples:
    """Draw from a network's posterior by a short chain from each member of a deep ensemble.

    First the members are trained from separate initializations, each stopped where the log
    likelihood of held-back rows is largest (``training.train``). Then a chain starts from each, on
    all rows. The posterior of a network has many modes, and no chain visits all of them: the
    members find separate ones, and each chain explores its own. The draws of all chains count
    alike. They are no exact draws of the posterior, which would weight the modes by their mass.

    R-hat over all chains is therefore large in weight space and says nothing; see
    ``diagnostics.within_rhat`` for each chain on its own, and ``diagnostics.function_draws`` for
    R-hat of the function between chains.

    :param model: a program ``model(x, y)``; for minibatches it states N, as for ``training.train``.
    :param args: all training data, as for ``training.train``.
    :param members: the number of members and chains, or a trained ensemble to start from.
    :param kernel: of ``mcmc.sample``, or of ``mcmc.sgmcmc``, such as ``mcmc.SGHMC(step_size=...)``;
        by default ``mcmc.MCLMC(energy_variance=0.01, thinning=50)``. Its steps are longer than
        those of "mclmc": so short chains lose more by moving slowly than by this bias.
    :param num_warmup: see ``mcmc.sample`` and ``mcmc.sgmcmc``; so ``num_samples``, of each chain.
    :param training_steps: at most so many steps of Adam for the members.
    :param held_out: the share of the rows that their training holds back.
    :param batch_size: rows of a step of the training, and of the chain where it is of ``sgmcmc``.
    :param options: further arguments of ``mcmc.sample`` or ``mcmc.sgmcmc``.
    :returns: one chain for each member; ``info["ensemble"]`` holds each member's best training step
        and its held-out log likelihood there, mean per row in nats.
    :raises ValueError: as these functions.

    Source: Sommer, Robnik, Nozadze, Seljak & Rügamer (2025), Microcanonical Langevin Ensembles,
    arXiv 2502.06335.
    """
    num_warmup = whole_number(
        num_warmup, "num_warmup", least=0
    )  # before a training that takes long
    num_samples = whole_number(num_samples, "num_samples")
    training_steps = whole_number(training_steps, "training_steps")
    record: dict[str, Any] = {}
    if isinstance(members, AutoEnsemble):
        guide = members
    else:
        with seeded(seed):
            guide = AutoEnsemble(model, size=whole_number(members, "members", least=2))
            training = train(
                model, guide, *args, steps=training_steps, learning_rate=learning_rate,
                batch_size=batch_size, held_out=held_out,
                progress="ensemble" if options.get("progress") else None,
            )  # fmt: skip
        if training.best_scores is not None and training.best_steps is not None:
            record = {
                "best_steps": training.best_steps.tolist(),
                "held_out": training.best_scores.tolist(),
            }
    options |= {
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_chains": guide.size,
        "init": guide,
        "seed": seed,
    }
    if isinstance(kernel, StochasticKernel):
        samples = sgmcmc(model, [args], kernel=kernel, batch_size=batch_size, **options)
    else:
        samples = sample(model, *args, kernel=kernel, **options)
    info = {**samples.info, "ensemble": {"members": guide.size, **record}}
    return replace(samples, info=info)
