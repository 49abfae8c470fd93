"""Laplace approximations, last layers and subnetworks."""

import glob
from typing import Any

from torch import nn

from pyro_bdl import evidence
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer, AutoSubnetwork, LaplaceGuide
from pyro_bdl.nn import BayesianModule, with_learnable_prior
from pyro_bdl.posteriors.registry import Options, Problem, Result, given_program, register, trained
from pyro_bdl.training.svi import train


def _register_laplace(
    name: str,
    title: str,
    description: str,
    *,
    default: bool = False,
    by_evidence: bool = False,
    **choice: Any,
) -> None:
    """Register a Laplace approximation of the program.

    :param by_evidence: give the program a factor of its prior's scale, and train it and the MAP by
        turns; else only hyperparameters that the program has.
    :param choice: arguments of ``AutoLaplaceGGN``.
    """

    @register(
        name, title=title, description=description, default=default,
        program=_with_learnable_scale if by_evidence else given_program,
    )  # fmt: skip
    def fit(problem: Problem, options: Options, progress: bool) -> Result:
        guide = AutoLaplaceGGN(problem.model, **choice)
        steps = options.steps or (2000 if by_evidence else 3000)
        posterior, interrupted = evidence.train_by_evidence(
            problem.model, guide, problem.x, problem.y, steps=steps, rounds=options.rounds,
            progress=name if progress else None,
        )  # fmt: skip
        settings = {**choice, "structure": posterior.config.structure, **_tuned(posterior)}
        return Result(posterior, {"steps": steps, **settings}, interrupted)


def _with_learnable_scale(problem: Problem) -> nn.Module:
    try:
        return with_learnable_prior(problem.model)
    except (TypeError, ValueError):  # a program of its own, or a prior without a scale
        return problem.model


def _tuned(posterior: LaplaceGuide) -> dict[str, str]:
    """The hyperparameters that the evidence set, for tables."""
    result = {}
    for name, value in posterior.hyperparameters().items():
        words = name.rpartition(".")[2].removeprefix("hyper_").replace("_", " ").split()
        if value.numel() == 1:
            result[" ".join(words)] = f"{value:.3g}"
    return result


_register_laplace(
    "laplace",
    "Laplace",
    "Laplace, linearized, with the full Gauss-Newton matrix where it fits, else Kronecker factors",
    default=True,
    structure="auto",
)
_register_laplace(
    "laplace-evidence",
    "Laplace, prior by evidence",
    "the same, with a factor of the prior's scale that the evidence sets",
    structure="auto",
    by_evidence=True,
)
_register_laplace(
    "laplace-kron", "Laplace, Kronecker", "Kronecker-factored Laplace, linearized", structure="kron"
)
_register_laplace(
    "laplace-full",
    "Laplace, full",
    "Laplace with the full Gauss-Newton matrix, linearized, where it fits in memory",
    structure="full",
)
_register_laplace(
    "laplace-diag",
    "Laplace, diagonal",
    "Laplace with the diagonal of the Gauss-Newton matrix, linearized",
    structure="diag",
)
_register_laplace(
    "laplace-last-layer",
    "Laplace, last layer",
    "full Laplace over the last layer, the rest at the MAP",
    structure="full",
    subset="last-layer",
)


def _with_scale_of_last_layer(problem: Problem) -> nn.Module:
    """The program with a PyroParam as the scale of the last layer's prior, if possible.

    The scale belongs to the last layer only: with a shared scale the features would shrink.
    """
    guide = AutoLastLayer(problem.model)
    guide.prototype(problem.x, problem.y)
    networks = [part for part in problem.model.modules() if isinstance(part, BayesianModule)]
    if len(networks) != 1:
        return problem.model
    prefix = networks[0].site_prefix
    names = [site.removeprefix(prefix) for site in guide.layer(problem.x, problem.y)]
    layer = names[0].rpartition(".")[0]
    pattern = glob.escape(layer) + ".*" if layer else glob.escape(names[0])
    try:
        return with_learnable_prior(problem.model, only=pattern)
    except (TypeError, ValueError):  # a prior without a scale that is a number
        return problem.model


@register(
    "last-layer",
    title="last layer",
    description="last layer integrated out while the features train, in closed form; for classes "
    "Laplace at its mode given MAP features; its prior scale by the evidence",
    default=True,
    program=_with_scale_of_last_layer,
)
def _last_layer(problem: Problem, options: Options, progress: bool) -> Result:
    x, y, label = problem.x, problem.y, "last-layer" if progress else None
    steps, interrupted = options.steps or 2000, False
    model = problem.model
    guide = AutoLastLayer(model)
    guide.prototype(x, y)
    objective = evidence.LastLayerEvidence()
    try:
        objective.loss(model, guide, x, y)
        features = "evidence"
    except UnsupportedProgramError:  # not a linear regression
        features = "MAP"
    if features == "evidence":
        run = train(
            model, guide, x, y, steps=steps, batch_size=len(x), elbo=objective, progress=label
        )
        posterior: LaplaceGuide = guide.laplace_approximation((x, y))
        interrupted = run.interrupted
    else:
        posterior, interrupted = evidence.train_by_evidence(
            model, guide, x, y, steps=steps, progress=label
        )
    told = {"steps": steps, "features": features, **_tuned(posterior)}
    return Result(posterior, told, interrupted)


@register(
    "subnetwork",
    title="subnetwork Laplace",
    description="full Laplace, linearized, over the tenth of the weights the data determine most",
    default=True,
)
def _subnetwork(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoSubnetwork(problem.model, size=0.1), "subnetwork" if progress else None
    made = trained(guide, problem, options, label, steps=2000)
    posterior = guide.laplace_approximation((problem.x, problem.y), progress=progress)
    settings = {**made.settings, "weights": posterior.subset.size}
    return Result(posterior, settings, made.interrupted)
