"""Markov chains."""

import math
from dataclasses import replace
from typing import Any

from pyro_bdl import mcmc
from pyro_bdl.guides import AutoEnsemble, AutoSubnetwork
from pyro_bdl.posteriors.registry import Problem, Result, register, trained

# The largest number of rows that "sghmc" uses at once, and the size of minibatches beyond it.
_MOST_ROWS, _ROWS = 8192, 1024
# Steps between draws, largest friction per step, curvature times step size.
_THINNING, _FRICTION, _REACH = 30, 0.02, 0.5


@register(
    "sghmc",
    "SGHMC",
    "Markov chains by underdamped Langevin dynamics, on minibatches of many data",
    default=True,
)
def _sghmc(problem: Problem) -> Result:
    """SGHMC chains that start at MAP networks; the step size follows the curvature at the chains.

    On all data the friction is f = sqrt(eps), critical damping of a number with unit curvature: the
    directions that the data leave to the prior are the slow ones, and more friction would make
    their motion a random walk. Minibatch noise heats the stiffest direction by the share
    eps lambda (N / B) / (2 f), which the step size keeps at 5 %.
    """
    options, data, rows = problem.options, problem.data, len(problem.x)
    chains = options.chains
    members = AutoEnsemble(problem.model, size=chains)
    run = trained(problem, members, steps=500)
    if run.interrupted:
        raise KeyboardInterrupt
    batch, reach = None, _REACH
    if rows > _MOST_ROWS:
        batch = _ROWS
        reach = 0.05 * 2 * (5 * _FRICTION) * batch / rows
    start: Any = members
    settings: dict[str, Any] = {
        "num_chains": chains,
        "batch_size": batch,
        "seed": options.seed,
        "progress": problem.progress,
    }
    # The curvature at the MAP is several times smaller than at later draws, hence in stages.
    for share, warmup, draws, thinning in (
        (0.01, options.settling, 1, 1),
        (0.1, options.settling, 1, 1),
        (1.0, 16 * options.warmup, options.draws, _THINNING),
    ):
        step_size = mcmc.suggest_step_size(
            problem.model, data, at=start, fraction=share * reach, num_points=chains,
            seed=options.seed,
        )  # fmt: skip
        kernel = mcmc.SGHMC(
            step_size=step_size,
            adapt_step_size=True,
            friction=5 * _FRICTION if batch else min(_FRICTION, math.sqrt(step_size)),
            thinning=thinning,
        )
        start = mcmc.sgmcmc(
            problem.model, data, kernel=kernel, init=start, num_warmup=warmup, num_samples=draws,
            **settings,
        )  # fmt: skip
    made_with = {
        "num_warmup": start.info["num_warmup"],
        "thinning": kernel.thinning,
        "batch_size": start.info["batch_size"],
        "num_chains": chains,
        "step_size": f"{step_size * start.info['step_size_factor']:.3g}",
        "friction": f"{kernel.friction:.3g}",
        "MAP steps": run.settings["steps"],
    }
    return Result(start, made_with, bool(start.info["interrupted"]))


def _nuts(problem: Problem, kernel: mcmc.NUTS, **more: Any) -> Result:
    options = problem.options
    settings: dict[str, Any] = {
        "num_chains": options.chains,
        "num_warmup": options.warmup,
        "num_samples": options.draws,
    }
    samples = mcmc.sample(
        problem.model, *problem.data, kernel=kernel, seed=options.seed, progress=problem.progress,
        **settings, **more,
    )  # fmt: skip
    settings["max_tree_depth"] = kernel.max_tree_depth
    return Result(samples, settings, bool(samples.info.get("interrupted")))


@register("nuts", "NUTS", "Markov chains by the No-U-Turn sampler; the reference", default=True)
def _reference(problem: Problem) -> Result:
    # small steps, since all others are judged by it
    kernel = mcmc.NUTS(max_tree_depth=problem.options.max_tree_depth, target_accept=0.9)
    made = _nuts(problem, kernel)
    return replace(made, settings={**made.settings, "target_accept": kernel.target_accept})


@register(
    "subnetwork-nuts",
    "NUTS on a subnetwork",
    "NUTS over the tenth of the weights the data determine most, the rest at the MAP",
)
def _subnetwork_nuts(problem: Problem) -> Result:
    guide = AutoSubnetwork(problem.model, size=0.1)
    center = trained(problem, guide, steps=2000)
    if center.interrupted:
        raise KeyboardInterrupt
    kernel = mcmc.NUTS(max_tree_depth=problem.options.max_tree_depth)
    made = _nuts(problem, kernel, subset=guide.laplace_approximation(problem.data))
    return replace(made, settings={**made.settings, "MAP steps": center.settings["steps"]})
