"""Hyperparameters that maximize the evidence of a Laplace approximation."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    ParameterReading,
    followed,
    group_sum,
    noise_owner,
    owners,
    prior_locations,
    restored_on_error,
)
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence.linearized import (
    either_spelling,
    linearized_log_likelihood,
    linearized_optimum,
)
from pyro_bdl.evidence.marginal import effective_parameters, log_marginal_likelihood, read_guide
from pyro_bdl.guides.laplace import LaplaceGuide

METHODS = ("mackay", "gradient")

_ROUNDING = 1e-4  # relative rounding of the log evidence
_SMALLEST = 1e-8  # lower bound of gamma and of squared weights


@dataclass
class Evidence:
    """The result of a maximization.

    :param log_evidence: log p(y) at the hyperparameters found, in nats.
    :param gamma: the effective number of parameters.
    :param hyperparameters: name -> value.
    :param history: log p(y) after every step, or every tenth step.
    """

    log_evidence: float
    gamma: float
    hyperparameters: dict[str, Tensor]
    history: list[float] = field(default_factory=list)


def maximize(
    guide: LaplaceGuide,
    *,
    method: str = "mackay",
    steps: int = 100,
    learning_rate: float = 0.1,
    tolerance: float = 1e-4,
    linearized: bool = False,
    linearised: bool | None = None,
) -> Evidence:
    """Set the program's hyperparameters to the maximum of the evidence, with the MAP fixed.

    "mackay" iterates a fixed point for every positive ``PyroParam`` theta that scales Normal
    priors, s_i = c_i theta, and for one that scales the noise of a Normal observation:

        theta^2 = sum_i (w_i / c_i)^2 / gamma,  gamma = sum_i (1 - C_ii / s_i^2)
        noise^2 = sum of squared residuals / (N - gamma of all latents)

    (MacKay 1992, section 3; alpha = gamma / w'w, beta = (N - gamma) / residuals). "gradient"
    ascends the log evidence by Adam in all parameters of the priors and of a Normal's noise. The
    fixed point fails if gamma is not below N, which is possible if the curvature is not the full
    Gauss-Newton matrix of all latents (such as "kron"), or if the evidence falls below its initial
    value. Then a warning is given, and gradient ascent takes the remaining steps, or as many again.

    The parameters change in place, and the guide follows. Retrain the MAP afterwards, or use
    ``MarginalLikelihoodTraining``, which alternates.

    :param guide: a guide of ``laplace_approximation``.
    :param method: "mackay" or "gradient".
    :param steps: the largest number of steps.
    :param learning_rate: learning rate of gradient ascent, in unconstrained units.
    :param tolerance: "mackay" stops when no parameter changes by more than this fraction.
    :param linearized: evaluate at the optimum of the linearized model, which is computed again at
        every step (Antoran et al. 2022, recommendation 1).
    :param linearised: the former name of ``linearized``.
    :raises ValueError: for an unknown method, or a program without hyperparameters.
    """
    linearized = either_spelling(linearized, linearised)
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} (there are {', '.join(METHODS)})")
    reading = read_guide(guide)
    if not followed(reading):
        raise ValueError(
            "the priors and the noise have no PyroParam to tune: make a prior's scale one, as in "
            "priors.Normal(PyroParam(torch.tensor(1.0), constraint=constraints.positive))"
        )
    with restored_on_error(reading.parameters, guide.refresh):
        guide.refresh()
        history: list[float] = []
        left = steps
        if method == "mackay":
            history, left = _fixed_point(guide, steps, tolerance, linearized)
        if left:
            history += _ascend(guide, left, learning_rate, linearized)
        guide.refresh()
    offset = linearized_optimum(guide) if linearized else None
    values = hyperparameters(guide)
    return Evidence(
        log_marginal_likelihood(guide, offset=offset).item(),
        float(effective_parameters(guide)),
        values,
        history,
    )


def hyperparameters(guide: LaplaceGuide) -> dict[str, Tensor]:
    """The current values of the hyperparameters that the evidence can set, by name."""
    found = followed(read_guide(guide))
    return {name: parameter.value.detach().clone() for name, parameter in found.items()}


def _fixed_point(
    guide: LaplaceGuide, steps: int, tolerance: float, linearized: bool
) -> tuple[list[float], int]:
    """Iterate the fixed point; return the history, and the number of steps left for gradient ascent
    if it fails."""
    history: list[float] = []
    best: tuple[float, dict[str, Tensor]] | None = None
    for step in range(steps):
        reading = read_guide(guide)
        offset = linearized_optimum(guide) if linearized else None
        changes = mackay_update(guide, reading, offset)
        if not changes:
            raise ValueError(
                "no hyperparameter of the program is the scale of Normal priors or of a Normal "
                'observation: use method="gradient"'
            )
        noise = noise_owner(reading, guide.subset)
        if noise is not None and not any(noise[0].name == p.name for p, _ in changes):
            return history, steps - step  # mackay_update has warned
        if best is None:
            best = log_marginal_likelihood(guide, offset=offset).item(), hyperparameters(guide)
        largest = 0.0
        for parameter, value in changes:
            before = parameter.value.detach()
            largest = max(largest, float((value / before).log().abs().max()))
            parameter.set(value)
        guide.refresh()
        if linearized or step % 10 == 0 or largest < tolerance:
            history.append(log_marginal_likelihood(guide, offset=offset).item())
        if largest < tolerance:
            break
    offset = linearized_optimum(guide) if linearized else None
    reached = log_marginal_likelihood(guide, offset=offset).item()
    if best is None or reached >= best[0] - _ROUNDING * max(1.0, abs(best[0])):
        return history, 0
    warnings.warn(
        f"the fixed point has taken the log evidence from {best[0]:.6g} to {reached:.6g}: gradient "
        "ascent continues from the start",
        BdlWarning,
        stacklevel=3,
    )
    for name, parameter in followed(read_guide(guide)).items():
        parameter.set(best[1][name])
    guide.refresh()
    return history, steps


@torch.enable_grad()
def mackay_update(
    guide: LaplaceGuide, reading: ParameterReading, offset: Tensor | None = None
) -> list[tuple[Hyperparameter, Tensor]]:
    """One step of the fixed point: new values for the hyperparameters that it covers."""
    subset = guide.subset
    vector = subset.take(guide.loc)
    if offset is not None:
        vector = vector + offset.to(vector)
    variances = guide.precision.variances().to(vector)
    changes: list[tuple[Hyperparameter, Tensor]] = []
    for name, sites in owners(reading, subset).items():
        parameter = reading.parameters[name]
        gamma, squares = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
        for site, scale in sites:
            part = subset.parts[site]
            weights = vector[part] - prior_locations(reading, subset, site)
            precision = scale.detach().square().reciprocal()
            gamma += group_sum(scale, 1.0 - variances[part] * precision, parameter)
            squares += group_sum(scale, weights.square() * precision, parameter)
        ratio = squares.clamp(min=_SMALLEST) / gamma.clamp(min=_SMALLEST)
        changes.append((parameter, parameter.value.detach() * ratio.detach().sqrt()))
    noise = noise_owner(reading, subset)
    if noise is not None:
        parameter, _ = noise
        gamma = effective_parameters(guide)
        free = guide.cells - gamma
        if free <= 0:
            warnings.warn(
                f"the effective number of parameters ({float(gamma):.1f}) is not below the number "
                f"of observations ({float(guide.cells):.0f}): the noise has no fixed point there",
                BdlWarning,
                stacklevel=4,
            )
        else:
            squares = guide.squares if offset is None else _linearized_squares(guide, offset)
            factor = guide.noise_factor
            ratio = (squares * factor / free).clamp(min=_SMALLEST).sqrt()
            changes.append((parameter, (parameter.value * ratio.to(parameter.value)).detach()))
    return changes


def _linearized_squares(guide: LaplaceGuide, offset: Tensor) -> Tensor:
    """Squared residuals of the linearized model in units of the reference noise."""
    # log lik = -1/2 c Q + 1/2 n log c + constant, at both points with the same c
    now = linearized_log_likelihood(guide, offset)
    here = linearized_log_likelihood(guide, torch.zeros_like(offset))
    return guide.squares - 2.0 * (now - here) / guide.noise_factor


def _ascend(guide: LaplaceGuide, steps: int, learning_rate: float, linearized: bool) -> list[float]:
    leaves = [parameter.leaf for parameter in followed(read_guide(guide)).values()]
    gradients = [leaf.grad for leaf in leaves]
    optimizer = torch.optim.Adam(leaves, lr=learning_rate)
    history: list[float] = []
    best: tuple[float, list[Tensor]] | None = None
    try:
        for _ in range(steps):
            offset = linearized_optimum(guide) if linearized else None
            for leaf in leaves:
                leaf.grad = None
            value = log_marginal_likelihood(guide, offset=offset)
            found: Any = torch.autograd.grad(-value, leaves, allow_unused=True)
            history.append(value.item())
            if best is None or history[-1] > best[0]:
                best = history[-1], [leaf.detach().clone() for leaf in leaves]
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf.grad = gradient
            optimizer.step()
            if linearized:
                guide.refresh()
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
    if best is not None:
        with torch.no_grad():
            for leaf, value in zip(leaves, best[1], strict=True):
                leaf.copy_(value)
    return history
