"""Ensembles, SWAG and MultiSWAG."""

from pyro_bdl.guides import AutoEnsemble, AutoMultiSWAG, AutoSWAG
from pyro_bdl.posteriors.registry import Problem, Result, register, trained
from pyro_bdl.training.swag import collect_swag


@register(
    "ensemble",
    "ensemble",
    "five networks, each a MAP estimate from its own initialization",
    default=True,
)
def _ensemble(problem: Problem) -> Result:
    return trained(problem, AutoEnsemble(problem.model, size=5), steps=2000)


def _swag_of(problem: Problem, guide: AutoSWAG | AutoMultiSWAG) -> Result:
    """SGD from the end of training, and the Gaussian of its snapshots."""
    made = trained(problem, guide, steps=2000)
    run = collect_swag(
        problem.model, guide, *problem.data, snapshots=problem.options.snapshots,
        progress=problem.label,
    )  # fmt: skip
    count = int(guide.snapshots.count)
    if count < 2:
        raise KeyboardInterrupt
    rank = min(guide.rank, count)
    posterior = guide.swag_approximation(rank=rank)
    settings = {"snapshots": count, "rank": rank, "learning rate": run.learning_rate}
    return Result(posterior, {**made.settings, **settings}, made.interrupted or run.interrupted)


@register(
    "swag",
    "SWAG",
    "a Gaussian of rank 20 from 40 snapshots of SGD after MAP training",
    default=True,
)
def _swag(problem: Problem) -> Result:
    return _swag_of(problem, AutoSWAG(problem.model))


@register("multi-swag", "MultiSWAG", "a mixture of the SWAG posteriors of five networks")
def _multi_swag(problem: Problem) -> Result:
    return _swag_of(problem, AutoMultiSWAG(problem.model, size=5))
