"""``ensemble_sample``: a deep ensemble, and a chain from each of its members."""

from typing import Any

from pyro_bdl.guides.ensemble import AutoEnsemble
from pyro_bdl.mcmc.sampling import sample
from pyro_bdl.mcmc.stochastic_gradient.methods import METHODS
from pyro_bdl.mcmc.stochastic_gradient.sampling import sgmcmc
from pyro_bdl.samples import Samples
from pyro_bdl.training.held_out import HeldOut
from pyro_bdl.training.svi import train
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number


def ensemble_sample(
    model: Any,
    x: Any,
    y: Any,
    *,
    members: int = 10,
    kernel: Any = "mclmc",
    num_warmup: int = 500,
    num_samples: int = 500,
    held_out: float = 0.1,
    training_steps: int = 2000,
    patience: int = 10,
    learning_rate: float = 0.01,
    batch_size: int | None = None,
    guide: AutoEnsemble | None = None,
    seed: int = 0,
    progress: bool | None = None,
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

    :param model: a program ``model(x, y)``; with minibatches its ``num_data`` is the number of all
        rows.
    :param members: the number of members and chains.
    :param kernel: of ``mcmc.sample`` ("mclmc", "mams", "nuts", "hmc"), or a method of
        ``mcmc.sgmcmc`` such as "sghmc", which needs ``step_size=``.
    :param num_warmup: see ``mcmc.sample`` and ``mcmc.sgmcmc``; so ``num_samples``, of each chain.
    :param held_out: the share of the rows that the training of the members holds back.
    :param training_steps: at most so many steps of Adam.
    :param patience: checks, of which there are 50 in all, without a better held-out value after
        which a training stops.
    :param batch_size: rows of a step of the training, and of the chain where it is of ``sgmcmc``.
    :param guide: a trained ensemble to start from, instead of the training.
    :param options: further arguments of ``mcmc.sample`` or ``mcmc.sgmcmc``.
    :returns: one chain for each member; ``info["ensemble"]`` holds each member's best training step
        and its held-out log likelihood there, mean per row in nats.
    :raises ValueError: as these functions; for an ensemble of another size.

    Source: Sommer, Robnik, Nozadze, Seljak & Rügamer (2025), Microcanonical Langevin Ensembles,
    arXiv 2502.06335.
    """
    members = whole_number(members, "members", least=2)
    record: dict[str, Any] = {}
    if guide is None:
        with seeded(seed):
            guide = AutoEnsemble(model, size=members)
            found = train(
                model, guide, x, y, steps=training_steps, learning_rate=learning_rate,
                batch_size=batch_size, held_out=HeldOut(held_out, patience),
                progress="ensemble" if progress else None,
            )  # fmt: skip
        if found.held_out is not None and found.best_steps is not None:
            record = {
                "best_steps": found.best_steps.tolist(),
                "held_out": found.held_out.amax(0).tolist(),
            }
    if guide.size != members:
        raise ValueError(f"the ensemble has {guide.size} members, but members is {members}")
    common: dict[str, Any] = {
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_chains": members,
        "init": guide,
        "seed": seed,
        "progress": progress,
    }
    if isinstance(kernel, str) and kernel in METHODS:
        samples = sgmcmc(model, (x, y), method=kernel, batch_size=batch_size, **common, **options)
    else:
        samples = sample(model, x, y, kernel=kernel, **common, **options)
    info = {**samples.info, "ensemble": {"members": members, **record}}
    return Samples(samples.latents, samples.stats, info, samples.resume)
