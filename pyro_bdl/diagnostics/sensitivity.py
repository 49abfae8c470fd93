"""Sensitivity of a posterior to its prior and its likelihood, by power scaling."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.diagnostics.psis import good_k, psis
from pyro_bdl.diagnostics.summary import check_sites, listed_sites, names_of_numbers
from pyro_bdl.guides.draws import DRAWS_AT_ONCE, as_posterior
from pyro_bdl.program.batches import as_dicts, leading_size
from pyro_bdl.program.program import Program
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.jackknife import (
    ERRORS,
    enlarged,
    jackknife_error,
    number_of_groups,
    of_many,
)
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.names import chooser
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require

if TYPE_CHECKING:
    import pandas as pd

_ALPHAS = (0.99, 1.01)
_LIMIT = 0.05
_PARTS = ("prior", "likelihood")


def prior_sensitivity(
    model: Callable,
    posterior: Any,
    *data: Any,
    functions: Mapping[str, Tensor] | None = None,
    sites: str | Sequence[str] | None = None,
    prior: str | Sequence[str] | None = None,
) -> "pd.DataFrame":
    """How fast each number's posterior moves as the prior, or the likelihood, is raised to a power.

    With p_a ~ p(y | w) p(w)^a, or p(y | w)^a p(w), by Pareto smoothed weights p^(a - 1), and the
    cumulative Jensen-Shannon distance of the distribution functions, relative to its bound::

        sensitivity = (D(p, p_1.01) / log2(1.01) - D(p, p_0.99) / log2(0.99)) / 2

    Where the prior's is above 0.05 the answer depends on it: with a likelihood's above 0.05 too
    they may be in conflict, else the prior is strong or the data say little. What other latents
    add by chance is taken off; where Pareto's k of the weights is too high, the numbers are NaN.

    :param posterior: ``Samples``, an MCMC after its run, or a dict of draws.
    :param data: the inputs and, last, the targets.
    :param functions: predictions along the chains, of ``function_draws``, as further rows.
    :param sites: names or patterns of the latents with a row for each number; by default those of
        at most 12 numbers.
    :param prior: names or patterns of the sites whose prior is scaled; by default those whose prior
        depends on no other latent: of a hierarchy its hyperparameters.
    :returns: a row for each number: ``prior``, ``prior_se`` (over the draws, enlarged for few),
        ``likelihood``, ``likelihood_se``, and ``diagnosis``: empty, or what is beyond the limit by
        two errors, and by more of several numbers, of which one in twenty tables has a false one.
    :raises TypeError: for a guide, whose draws are not of the posterior.
    :raises ValueError: if ``prior`` or ``sites`` match no site.

    Source: Kallioinen, Paananen, Bürkner, Vehtari (2024), Detecting and diagnosing prior and
    likelihood sensitivity with power-scaling. ``arviz.psense_summary`` of 1.x smooths both tails.
    """
    import pandas as pd

    args = tuple(map(as_dicts, data))
    samples = as_posterior(posterior, model, args)
    require(samples, Samples, "prior_sensitivity needs draws of the posterior from chains")
    latents = dict(samples.latents) | dict(functions or {})
    check_sites(latents)
    small = listed_sites(samples.latents, sites)
    if not small and not functions:
        raise ValueError(f"sites={sites!r} matches no site; there are: {', '.join(latents)}")
    logs = _log_densities(model, samples, args, prior)
    limit = good_k(logs["prior"].numel())
    ratios = {}
    for part, alpha in itertools.product(_PARTS, _ALPHAS):
        smoothed = psis((alpha - 1) * logs[part])
        weights = smoothed.log_weights.flatten().exp()
        if (smoothed.pareto_k > limit).any():
            weights = torch.full_like(weights, torch.nan)
        ratios[part, alpha] = weights.cpu().numpy()
    names, columns = [], []
    for site in [*small, *(functions or {})]:
        value = latents[site]
        names += names_of_numbers(site, value.shape[2:])
        columns.append(double(value.detach().cpu()).reshape(value.shape[:2].numel(), -1).numpy())
    draws = np.concatenate(columns, 1)
    rows: dict[str, np.ndarray] = {}
    groups = number_of_groups(len(draws))
    for part, values, error in zip(_PARTS, *_without_noise(draws, ratios, groups), strict=True):
        rows |= {part: values, f"{part}_se": error * enlarged(ERRORS, (1.0, groups - 1))}
    table = pd.DataFrame(rows, index=names)
    limit = of_many(len(names))
    beyond = limit * enlarged(limit, (1.0, groups - 1)) / enlarged(ERRORS, (1.0, groups - 1))
    table["diagnosis"] = [diagnosis(row, beyond) for row in table.to_numpy().tolist()]
    return table


@torch.no_grad()
def _log_densities(
    model: Callable, samples: Samples, args: tuple, prior: str | Sequence[str] | None
) -> dict[str, Tensor]:
    """log p(w) of the chosen sites and log p(y | w), ``(chains, draws)`` each."""
    with evaluation_mode(model, samples):
        program = Program(model, *args)
        is_scaled = chooser(_independent(program) if prior is None else prior, "prior")

        def densities(draw: dict[str, Tensor]) -> dict[str, Tensor]:
            run = program.run(draw)
            chosen = [site.log_prob().sum() for n, site in run.priors.items() if is_scaled(n)]
            if not chosen:
                raise ValueError(
                    f"prior={prior!r} matches no site with a prior; there are: "
                    f"{', '.join(run.priors)}"
                )
            return {
                "prior": torch.stack(chosen).sum(),
                "likelihood": torch.as_tensor(run.log_likelihood(), device=chosen[0].device),
            }

        chunk = max(1, DRAWS_AT_ONCE // max(1, program.size + leading_size(args)))
        values = map_draws(densities, samples.flat(), chunk_size=chunk)
    leading = samples.num_chains, samples.num_draws
    return {name: double(value).reshape(leading) for name, value in values.items()}


@torch.enable_grad()
def _independent(program: Program) -> list[str]:
    """The sites whose prior autograd traces back to no other latent."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in program.initial.items()}
    priors = program.run(leaves).priors
    return [
        name
        for name, site in priors.items()
        if not reaches(site.log_prob().sum(), [v for n, v in leaves.items() if n != name])
    ]


def _without_noise(
    draws: np.ndarray, weights: Mapping[tuple[str, float], np.ndarray], groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """The sensitivities ``(2, K)`` of K numbers to the prior and to the likelihood, and their
    errors; without the errors those that the draws show, where they are too few to say more.

    What other latents add to the log density weights the draws of a number at random, which adds
    c / S to the squared distance. The jackknife takes it off, and what is taken off is as uncertain
    as it is large.

    Source: Quenouille (1956), Notes on bias in estimation.
    """
    count = len(draws)
    order = draws.argsort(0)
    steps = np.diff(np.take_along_axis(draws, order, 0), axis=0)

    def sensitivities(kept: np.ndarray) -> np.ndarray:
        found = []
        for part in _PARTS:
            slopes = [
                _distances(steps, kept[order], (kept * weights[part, alpha])[order])
                / np.log2(alpha)
                for alpha in _ALPHAS
            ]
            found.append(np.abs(slopes).mean(0))
        return np.stack(found)

    seen = sensitivities(np.ones(count))
    if not groups:
        return seen, np.full_like(seen, np.nan)
    parts = np.array_split(np.arange(count), groups)
    # All draws stay ends of the range, to which the distances are relative.
    without = np.stack([sensitivities(1.0 * ~np.isin(np.arange(count), part)) for part in parts])
    noise = (groups - 1) * ((without**2).mean(0) - seen**2)
    values = np.sqrt(np.clip(seen**2 - np.clip(noise, 0.0, None), 0.0, None))
    errors = jackknife_error(torch.as_tensor(without, device="cpu")).numpy()
    return values, np.hypot(errors, seen - values)


def _distances(steps: np.ndarray, ours: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Cumulative Jensen-Shannon distances of sorted draws with two kinds of weights; the larger one
    of the draws and of their negatives.

    :param steps: ``(S - 1, K)``, between sorted draws; the weights ``(S, K)`` in their order.
    """
    p, q = (w.cumsum(0)[:-1] / w.sum(0) for w in (ours, others))
    values = []
    for sides in ((p, q), (1 - p, 1 - q)):
        a, b = (side.clip(1e-300, 1.0) for side in sides)
        middle = np.log2((a + b) / 2)
        entropy = a * (np.log2(a) - middle) + b * (np.log2(b) - middle)
        bound = (steps * (a + b)).sum(0)
        share = (steps * entropy).sum(0) / np.where(bound > 0, bound, 1.0)
        values.append(np.sqrt(share.clip(0)))
    return np.maximum(*values)


def diagnosis(row: list[float], errors: float) -> str:
    """The sentence for both sensitivities, where they are so many errors beyond the limit.

    :param row: of the prior and its error, of the likelihood and its error.
    """
    prior, prior_se, likelihood, likelihood_se = row
    if not prior - errors * prior_se > _LIMIT:
        return ""
    if likelihood - errors * likelihood_se > _LIMIT:
        return "prior and data may be in conflict"
    if likelihood + errors * likelihood_se < _LIMIT:
        return "strong prior or weak data"
    return "depends on the prior"
