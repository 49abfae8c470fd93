"""Ensembles, SWAG and MultiSWAG."""

import warnings

from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoEnsemble, AutoMultiSWAG, AutoSWAG
from pyro_bdl.posteriors.registry import Options, Problem, Result, register, trained
from pyro_bdl.training.svi import collect_swag, estimate_elbo


@register(
    "ensemble",
    title="ensemble",
    description="five networks, each a MAP estimate from its own initialization",
    default=True,
)
def _ensemble(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoEnsemble(problem.model, size=5), "ensemble" if progress else None
    return trained(guide, problem, options, label, steps=2000, num_particles=5)


_RATES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)


def _swag_of(
    guide: AutoSWAG | AutoMultiSWAG,
    made: Result,
    problem: Problem,
    options: Options,
    label: str | None,
) -> Result:
    """SGD from the end of training, and the Gaussian of its snapshots.

    Under a Gaussian posterior -log p(u, y) lies P / 2 above its minimum on average (Mandt, Hoffman
    & Blei 2017, section 3.2). The largest learning rate that does not exceed this is used.
    """
    size, rows = guide.require_layout().size, len(problem.x)
    members = guide.size if isinstance(guide, AutoMultiSWAG) else 1
    lowest = -estimate_elbo(problem.model, guide, problem.x, problem.y, num_particles=members)
    (parameter,) = guide.parameters()
    start = parameter.detach().clone()
    for rate in _RATES:
        parameter.data.copy_(start)
        guide.discard()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", BdlWarning)
                run = collect_swag(
                    problem.model, guide, problem.x, problem.y,
                    snapshots=options.snapshots, learning_rate=rate, progress=label,
                )  # fmt: skip
        except ValueError:
            if rate == _RATES[-1]:
                raise
            continue
        excess = run.losses.mean().item() * rows / members - lowest
        if excess <= 0.5 * size or run.interrupted:
            break
    for warning in caught:  # the warnings of the chosen rate only
        warnings.warn(warning.message, stacklevel=2)
    count = int(guide.snapshots.count)
    if count < 2:
        raise KeyboardInterrupt
    posterior = guide.swag_approximation(rank=min(guide.rank, count))
    settings = {"snapshots": count, "rank": min(guide.rank, count), "learning rate": rate}
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
    made = trained(guide, problem, options, label, steps=2000, num_particles=5)
    return _swag_of(guide, made, problem, options, label)
