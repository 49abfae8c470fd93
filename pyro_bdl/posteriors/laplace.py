"""Laplace approximations, last layers and subnetworks."""

import glob
from functools import partial
from typing import Any

from torch import nn

from pyro_bdl import evidence
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer, AutoSubnetwork, LaplaceGuide
from pyro_bdl.nn import BayesianModule, with_prior
from pyro_bdl.posteriors.registry import Problem, Result, register, trained
from pyro_bdl.priors import ByName, has_scale, learnable
from pyro_bdl.training.svi import train


def _laplace(problem: Problem, *, steps: int = 3000, **choice: Any) -> Result:
    """A Laplace approximation whose program's hyperparameters, if any, the evidence sets.

    :param steps: where the problem's options have no number of steps.
    :param choice: arguments of ``AutoLaplaceGGN``.
    """
    guide, options = AutoLaplaceGGN(problem.model, **choice), problem.options
    steps = options.steps or steps
    posterior, interrupted = evidence.train_by_evidence(
        problem.model, guide, *problem.data, steps=steps, rounds=options.rounds,
        progress=problem.label, backend="auto",
    )  # fmt: skip
    settings = {"steps": steps, **choice, "structure": posterior.config.structure.name}
    return Result(posterior, settings, interrupted)


def _with_learnable_scale(problem: Problem, only: str | None = None) -> nn.Module:
    """The program with a PyroParam as the scale of each prior that has one; a program without
    networks of ``bayesianize`` as it is.

    :param only: the names of the weights with that scale; None for all.
    """

    def changed(prior: Any) -> Any:
        if not has_scale(prior):
            return prior
        scaled = learnable(prior)
        return scaled if only is None else ByName({only: scaled, "*": prior})

    if not any(isinstance(module, BayesianModule) for module in problem.model.modules()):
        return problem.model
    return with_prior(problem.model, changed)


register(
    "laplace",
    "Laplace",
    "Laplace, linearized, with the full Gauss-Newton matrix where it fits, else Kronecker factors",
    default=True,
)(partial(_laplace, structure="auto"))
register(
    "laplace-evidence",
    "Laplace, prior by evidence",
    "the same, with a factor of the prior's scale that the evidence sets",
    program=_with_learnable_scale,
)(partial(_laplace, steps=2000, structure="auto"))
register("laplace-kron", "Laplace, Kronecker", "Kronecker-factored Laplace, linearized")(
    partial(_laplace, structure="kron")
)
register(
    "laplace-full",
    "Laplace, full",
    "Laplace with the full Gauss-Newton matrix, linearized, where it fits in memory",
)(partial(_laplace, structure="full"))
register(
    "laplace-diag",
    "Laplace, diagonal",
    "Laplace with the diagonal of the Gauss-Newton matrix, linearized",
)(partial(_laplace, structure="diag"))
register(
    "laplace-last-layer",
    "Laplace, last layer",
    "full Laplace over the last layer, the rest at the MAP",
)(partial(_laplace, structure="full", subset="last-layer"))


def _with_scale_of_last_layer(problem: Problem) -> nn.Module:
    """The program with a PyroParam as the scale of the last layer's prior, if possible.

    The scale belongs to the last layer only: with a shared scale the features would shrink.
    """
    guide = AutoLastLayer(problem.model).prototype(*problem.data)
    networks = [part for part in problem.model.modules() if isinstance(part, BayesianModule)]
    if len(networks) != 1:
        return problem.model
    prefix = networks[0].site_prefix
    first = guide.layer(*problem.data).sites[0].removeprefix(prefix)
    layer = first.rpartition(".")[0]
    return _with_learnable_scale(
        problem, glob.escape(layer) + ".*" if layer else glob.escape(first)
    )


@register(
    "last-layer",
    "last layer",
    "last layer integrated out while the features train, in closed form; for classes "
    "Laplace at its mode given MAP features; its prior scale by the evidence",
    default=True,
    program=_with_scale_of_last_layer,
)
def _last_layer(problem: Problem) -> Result:
    model, data = problem.model, problem.data
    options: dict[str, Any] = {"steps": problem.options.steps or 2000, "progress": problem.label}
    guide = AutoLastLayer(model).prototype(*data)
    objective = evidence.LastLayerEvidence()
    try:
        objective.loss(model, guide, *data)
        features = "evidence"
    except UnsupportedProgramError:  # not a linear regression
        features = "MAP"
    if features == "evidence":
        run = train(
            model, guide, *data, batch_size=len(problem.x), elbo=objective, backend="auto",
            **options,
        )  # fmt: skip
        posterior: LaplaceGuide = guide.laplace_approximation(data)
        interrupted = run.interrupted
    else:
        posterior, interrupted = evidence.train_by_evidence(
            model, guide, *data, backend="auto", **options
        )
    settings = {"steps": options["steps"], "features": features}
    return Result(posterior, settings, interrupted)


@register(
    "subnetwork",
    "subnetwork Laplace",
    "full Laplace, linearized, over the tenth of the weights the data determine most",
    default=True,
)
def _subnetwork(problem: Problem) -> Result:
    guide = AutoSubnetwork(problem.model, size=0.1)
    made = trained(problem, guide, steps=2000)
    posterior = guide.laplace_approximation(problem.data, progress=problem.progress)
    settings = {**made.settings, "weights": posterior.subset.size}
    return Result(posterior, settings, made.interrupted)
