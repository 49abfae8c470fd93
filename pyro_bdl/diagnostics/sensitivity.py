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
from pyro_bdl.utils.jackknife import jackknife_error, number_of_groups, without_each
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.names import chooser
from pyro_bdl.utils.precision import double

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
    they may be in conflict, else the prior is strong or the data say little. Where Pareto's k of
    the weights is too high for these draws, the numbers are NaN.

    :param posterior: ``Samples``, an MCMC after its run, or a dict of draws.
    :param data: the inputs and, last, the targets.
    :param functions: predictions along the chains, of ``function_draws``, as further rows.
    :param sites: names or patterns of the latents with a row for each number; by default those of
        at most 12 numbers.
    :param prior: names or patterns of the sites whose prior is scaled; by default those whose prior
        depends on no other latent: of a hierarchy its hyperparameters.
    :returns: a row for each number: ``prior``, ``prior_se`` (over the draws, by the jackknife),
        ``likelihood``, ``likelihood_se``, ``diagnosis``, which is empty where nothing is found.
    :raises TypeError: for a guide, whose draws are not of the posterior.
    :raises ValueError: if ``prior`` or ``sites`` match no site.

    Source: Kallioinen, Paananen, Bürkner, Vehtari (2024), Detecting and diagnosing prior and
    likelihood sensitivity with power-scaling. ``arviz.psense_summary`` of 1.x smooths both tails.
    """
    import pandas as pd

    args = tuple(map(as_dicts, data))
    samples = as_posterior(posterior, model, args)
    if not isinstance(samples, Samples):
        raise TypeError(
            "prior_sensitivity needs draws of the posterior from chains, got "
            f"{type(samples).__name__}"
        )
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
    found = _sensitivities(draws, ratios)
    groups = number_of_groups(len(draws))
    errors = np.full((len(_PARTS), len(names)), np.nan)
    if groups:
        without = [
            _sensitivities(draws[kept], {key: w[kept] for key, w in ratios.items()})
            for kept in without_each(torch.arange(len(draws), device="cpu"), groups)
        ]
        errors = jackknife_error(torch.as_tensor(np.array(without), device="cpu")).numpy()
    rows: dict[str, np.ndarray] = {}
    for part, values, error in zip(_PARTS, found, errors, strict=True):
        rows |= {part: values, f"{part}_se": error}
    table = pd.DataFrame(rows, index=names)
    table["diagnosis"] = [_diagnosis(*row) for row in table.itertuples(index=False)]
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


def _sensitivities(
    draws: np.ndarray, weights: Mapping[tuple[str, float], np.ndarray]
) -> list[np.ndarray]:
    """The sensitivities of K numbers, draws ``(S, K)``, to the prior and to the likelihood."""
    order = draws.argsort(0)
    ordered = np.take_along_axis(draws, order, 0)
    found = []
    for part in _PARTS:
        slopes = []
        for alpha in _ALPHAS:
            w = weights[part, alpha]
            distance = _distances(np.diff(ordered, axis=0), (w / w.sum())[order])
            slopes.append(distance / np.log2(alpha) * np.sign(alpha - 1))
        found.append(np.abs(slopes).mean(0))
    return found


def _distances(steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Cumulative Jensen-Shannon distances of sorted draws from the same with weights; the larger
    one of the draws and of their negatives.

    :param steps: ``(S - 1, K)``, between sorted draws; ``weights`` ``(S, K)`` in their order.
    """
    count = len(weights)
    p = (np.arange(1, count) / count)[:, None]
    q = weights.cumsum(0)[:-1].clip(1e-300, 1.0)
    values = []
    for a, b in ((p, q), (1 - p, (1 - q).clip(1e-300))):
        middle = np.log2((a + b) / 2)
        entropy = a * (np.log2(a) - middle) + b * (np.log2(b) - middle)
        bound = (steps * (a + b)).sum(0)
        share = (steps * entropy).sum(0) / np.where(bound > 0, bound, 1.0)
        values.append(np.sqrt(share.clip(0)))
    return np.maximum(*values)


def _diagnosis(prior: float, prior_se: float, likelihood: float, likelihood_se: float) -> str:
    """The sentence for both sensitivities, where they are beyond the limit by two errors."""
    if not prior - 2 * prior_se > _LIMIT:
        return ""
    if likelihood - 2 * likelihood_se > _LIMIT:
        return "prior and data may be in conflict"
    if likelihood + 2 * likelihood_se < _LIMIT:
        return "strong prior or weak data"
    return "depends on the prior"
