"""How far a posterior is from the reference: distances, their Monte Carlo errors, their floor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import importance, metrics
from pyro_bdl.comparison.evaluation import Evaluation
from pyro_bdl.diagnostics.summary import RHAT_LIMIT

# Draws of each of which all pairs are taken, and of which a k-hat is found.
_MOST_PAIRED, _MOST_TAIL = 500, 1000
# Test points of which Monte Carlo errors are found, which takes each distance ten times.
_MOST_POINTS = 100
_LEAST_TAIL, _HIGH_K = 25, 0.7
# What mends a reference: arguments of ``mcmc.sample`` and options of the command.
_LONGER = (
    "longer warm-up and more draws (num_warmup and num_samples of mcmc.sample; --warmup and "
    "--draws of pyro-bdl compare)"
)
_SMALLER = "smaller steps (target_accept of mcmc.sample nearer 1) or a smoother model"

Numbers = dict[str, float]


def distances(said: Evaluation, reference: Evaluation) -> Numbers:
    """All distances of a posterior from the reference, by key, and their errors as ``key_se``.

    ``mean_shift`` is the difference of the means in sds of the reference.
    """
    ours, theirs = said.function, reference.function
    found = _with_errors(_marginal, ours, theirs)
    spread = sd_of_draws(theirs).square().mean().sqrt()
    found["mean_shift"] = (found["mean_error"] / spread).item() if spread > 0 else float("nan")
    few = evenly(ours, said.chains, _MOST_PAIRED), evenly(theirs, reference.chains, _MOST_PAIRED)
    scale = metrics.median_distance(few[1])
    found |= _with_errors(lambda a, b: _joint(a, b, scale), *few)
    if said.task == "classification":
        found |= _with_errors(_of_classes, ours, theirs)
    elif said.expected is not None and reference.expected is not None:
        found |= _with_errors(_of_numbers, said.moments(), reference.moments(), points=2)
    found["khat_high"] = _share_of_high_khat(said, reference)
    return {key: float(value) for key, value in found.items()}


def floor(reference: Evaluation) -> Numbers:
    """The distances between two halves of the reference's own draws."""
    if len(reference.function) < 2:
        return {}
    return distances(*reference.halves())


def sd_of_draws(draws: Tensor) -> Tensor:
    """The sd at each test point, zero where it is no more than rounding."""
    sd = (draws - draws[0]).double().std(0, correction=0)
    rounding = 4 * torch.finfo(draws.dtype).eps * draws.abs().max()
    return torch.where(sd <= rounding, 0.0, sd)  # NaN stays


def evenly(draws: Tensor, chains: int, most: int) -> Tensor:
    """At most so many draws, evenly spaced, as many of each chain."""
    by_chain = draws.unflatten(0, (chains, -1))
    total, count = by_chain.shape[1], max(1, most // chains)
    if total <= count:
        return draws
    chosen = (torch.arange(count, device=draws.device) * total) // count
    return by_chain[:, chosen].flatten(0, 1)


def doubts(name: str, row: dict[str, Any]) -> list[str]:
    """Why the reference cannot be trusted, a sentence each: its chains have not converged.

    :param row: its line of the table.
    """
    rhat, divergences = row.get("rhat"), row.get("divergences")
    said, needed = [], []
    if rhat is not None and rhat > RHAT_LIMIT:
        said.append(f"R-hat is {rhat:.3f} in function space, above {RHAT_LIMIT:g}")
        needed.append(_LONGER)
    if divergences:
        said.append(f"{divergences} of its draws diverged")
        needed.append(_SMALLER)
    if not said:
        return []
    return [
        f"{name} cannot be trusted as the reference: {' and '.join(said)}. Before relying on the "
        f"distances, give it {' and '.join(needed)}."
    ]


def _with_errors(
    distance: Callable[[Tensor, Tensor], Numbers | dict[str, Tensor]],
    a: Tensor,
    b: Tensor,
    *,
    points: int = 1,
) -> dict[str, Any]:
    """:param points: the axis of the test points."""
    found = distance(a, b)

    def stacked(p: Tensor, q: Tensor) -> Tensor:
        found = distance(p, q).values()
        return torch.stack([torch.as_tensor(v, device="cpu").double() for v in found])

    # A draw's errors at many test points hang together: more points would not make them less.
    few = (evenly(draws.movedim(points, 0), 1, _MOST_POINTS).movedim(0, points) for draws in (a, b))
    errors = metrics.monte_carlo_error(stacked, *few).tolist()
    return found | {f"{key}_se": error for key, error in zip(found, errors, strict=True)}


def _marginal(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        "mean_error": metrics.mean_error(a, b),
        "sd_error": metrics.sd_error(a, b),
        "wasserstein": metrics.wasserstein1(a, b),
        "wasserstein2": metrics.wasserstein2(a, b),
        "sd_ratio": sd_of_draws(a).mean() / sd_of_draws(b).mean(),
    }


def _joint(a: Tensor, b: Tensor, scale: Tensor) -> dict[str, Tensor]:
    found = {"energy": metrics.energy_distance(a, b)}
    if scale > 0:
        found["mmd"] = metrics.mmd(a, b, length_scale=scale)
    return found


def _of_classes(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {
        "agreement": metrics.agreement(a, b),
        "total_variation": metrics.total_variation(a, b),
        "kl": metrics.categorical_kl(a, b),
    }


def _of_numbers(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """From draws ``(S, 2, N, ...)`` of mean and variance given the draw."""
    p, q = (metrics.variance_parts(draws[:, 0], draws[:, 1]).total for draws in (a, b))
    return {"kl": metrics.gaussian_kl(a[:, 0].mean(0), p, b[:, 0].mean(0), q)}


def _share_of_high_khat(said: Evaluation, reference: Evaluation) -> float:
    """Share of the test points at which the k-hat of the function is above 0.7."""
    ours = evenly(said.function, said.chains, _MOST_TAIL)
    theirs = evenly(reference.function, reference.chains, _MOST_TAIL)
    spread = sd_of_draws(theirs) > 0
    if len(ours) < _LEAST_TAIL or len(theirs) < 2 or not spread.any():
        return float("nan")
    k = importance.function_khat(ours[:, spread], theirs[:, spread])
    collapsed = sd_of_draws(ours)[spread] == 0  # up to rounding
    return ((k > _HIGH_K) | collapsed).double().mean().item()
