"""Ensembles, SWAG and MultiSWAG."""

from pyro_bdl.guides import AutoEnsemble, AutoMultiSWAG, AutoSWAG
from pyro_bdl.posteriors.registry import Options, Problem, Result, register, trained
from pyro_bdl.training.swag import collect_swag


@register(
    "ensemble",
    title="ensemble",
    description="five networks, each a MAP estimate from its own initialization",
    default=True,
)
def _ensemble(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoEnsemble(problem.model, size=5), "ensemble" if progress else None
    return trained(guide, problem, options, label, steps=2000)


def _swag_of(
    guide: AutoSWAG | AutoMultiSWAG,
    made: Result,
    problem: Problem,
    options: Options,
    label: str | None,
) -> Result:
    """SGD from the end of training, and the Gaussian of its snapshots."""
    run = collect_swag(
        problem.model, guide, problem.x, problem.y, snapshots=options.snapshots, progress=label
    )
    count = int(guide.snapshots.count)
    if count < 2:
        raise KeyboardInterrupt
    rank = min(guide.rank, count)
    posterior = guide.swag_approximation(rank=rank)
    settings = {"snapshots": count, "rank": rank, "learning rate": run.learning_rate}
    return Result(posterior, {**made.settings, **settings}, made.interrupted or run.interrupted)


@register(
    "swag",
    title="SWAG",
    description="a Gaussian of rank 20 from 40 snapshots of SGD after MAP training",
    default=True,
)
def _swag(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoSWAG(problem.model), "swag" if progress else None
    made = trained(guide, problem, options, label, steps=2000)
    return _swag_of(guide, made, problem, options, label)


@register(
    "multi-swag", title="MultiSWAG", description="a mixture of the SWAG posteriors of five networks"
)
def _multi_swag(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoMultiSWAG(problem.model, size=5), "multi-swag" if progress else None
    made = trained(guide, problem, options, label, steps=2000)
    return _swag_of(guide, made, problem, options, label)
