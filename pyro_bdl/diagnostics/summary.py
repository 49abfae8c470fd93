"""Convergence of networks: R-hat and ESS over the weights of each site, and in function space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws
from pyro_bdl.diagnostics.convergence import Convergence, convergence
from pyro_bdl.diagnostics.rank import quantile_of_sorted, sort
from pyro_bdl.diagnostics.rhat import SHARE, limit_of_rhat, rhat, within_rhat
from pyro_bdl.guides.draws import samples_of_mcmc
from pyro_bdl.samples import Samples
from pyro_bdl.utils.tables import Column, Row, to_csv, to_text

ESS_LIMIT = 100  # draws per chain

_COLUMNS = (
    Column("site", "site", style="text", help="Site, or all sites."),
    Column("size", "size", help="How many numbers it has."),
    Column("no_rhat", "no R-hat", help="How many lack R-hat: constants, NaN, or a single chain."),
    Column("rhat_median", "median", "R-hat", "Median over the numbers of the site.", digits=4),
    Column("rhat_95", "95 %", "R-hat", "95 % quantile over the numbers of the site.", digits=4),
    Column("rhat_max", "worst", "R-hat", "The largest one.", digits=4),
    Column("rhat_share", "high", "R-hat", "Share of the numbers above the limit.", "percent"),
    Column("ess_bulk_median", "median", "ESS bulk", "Median effective sample size."),
    Column("ess_bulk_05", "5 %", "ESS bulk", "5 % quantile over the numbers of the site."),
    Column("ess_bulk_min", "worst", "ESS bulk", "The smallest one."),
    Column("ess_bulk_share", "low", "ESS bulk", "Share of the numbers below the limit.", "percent"),
    Column("ess_tail_median", "median", "ESS tail", "Median effective sample size of the tails."),
    Column("ess_tail_min", "worst", "ESS tail", "The smallest one."),
    Column("worst", "worst at", style="text", help="Index of the largest R-hat in the site."),
)


@dataclass(frozen=True, repr=False)
class Summary:
    """Convergence of every site, with one row per site; prints as a table.

    :param rows: a dict for each site, and one named ``all`` if there are several: ``site``,
        ``size``, ``no_rhat`` (the number of constants and NaN; all numbers if there is a single
        chain); ``rhat_median``, ``rhat_95``, ``rhat_max``, ``rhat_share`` above ``rhat_limit``;
        ``ess_bulk_median``, ``ess_bulk_05``, ``ess_bulk_min``, ``ess_bulk_share`` below
        ``ess_limit``; ``ess_tail_median``, ``ess_tail_min``; ``worst``, the index of the largest
        R-hat, for ``all`` its site.
    :param by_site: R-hat and ESS of every number, in the shape of the site.
    :param rhat_limit: R-hat above it counts as high.
    :param ess_limit: effective draws; a bulk ESS below it counts as low.
    :param ess_per_second: the smallest bulk ESS over the seconds of the whole run, warm-up
        included; None if the draws do not say how long they took.
    :param ess_per_gradient: the same over the gradients of the draws.
    """

    rows: tuple[Row, ...]
    by_site: Mapping[str, Convergence]
    rhat_limit: float
    ess_limit: float
    ess_per_second: float | None = None
    ess_per_gradient: float | None = None

    def __str__(self) -> str:
        lines = [
            to_text(self.rows, _COLUMNS),
            f"high: R-hat above {self.rhat_limit:g}; low: ESS below {self.ess_limit:g}",
        ]
        if self.ess_per_second is not None:
            lines.append(f"smallest bulk ESS per second: {self.ess_per_second:.3g}")
        if self.ess_per_gradient is not None:
            lines.append(f"smallest bulk ESS per 1000 gradients: {1e3 * self.ess_per_gradient:.3g}")
        return "\n".join(lines)

    __repr__ = __str__

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows with all digits; return the path."""
        return to_csv(path, self.rows, _COLUMNS)


def summary(
    draws: Samples | Mapping[str, Tensor],
    *,
    rhat_limit: float | None = None,
    ess_limit: float | None = None,
    progress: bool | None = None,
) -> Summary:
    """Distributions of R-hat and ESS over the numbers of each site, such as a layer's weights.

    The weights of a network are not identified: hidden units can be permuted. Chains may therefore
    disagree about weights but agree about the function. ``summary(function_draws(model, samples,
    x))`` checks the function.

    :param draws: ``Samples``, an MCMC of Pyro or NumPyro, or site -> ``(chains, draws, ...)``.
    :param rhat_limit: R-hat above it counts as high; by default 1.01, or for short chains what
        independent draws exceed once in a thousand times.
    :param ess_limit: a bulk ESS below it counts as low; by default 100 per chain.
    :param progress: show a bar for a site that takes more than a few seconds; by default in
        terminals and notebooks.
    :returns: ``Summary``.
    :raises TypeError: if a site holds no real tensor.
    :raises ValueError: for no site, fewer than 4 draws, or sites with different chains or draws.

    Source: limits of Vehtari et al. (2021), Rank-normalization, folding, and localization.
    """
    draws = samples_of_mcmc(draws)
    latents = draws.latents if isinstance(draws, Samples) else dict(draws)
    num_chains = _check_sites(latents)
    limit = ESS_LIMIT * num_chains if ess_limit is None else ess_limit
    num_draws = next(iter(latents.values())).shape[1]
    high = limit_of_rhat(num_chains, num_draws) if rhat_limit is None else rhat_limit
    by_site = {site: convergence(value, progress=progress) for site, value in latents.items()}
    rows = [_row(site, found, high, limit) for site, found in by_site.items()]
    if len(rows) > 1:
        together = zip(*by_site.values(), strict=True)
        device = next(iter(latents.values())).device
        joined = [torch.cat([part.flatten().to(device) for part in parts]) for parts in together]
        total = _row("all", Convergence(*joined), high, limit)
        if total["rhat_max"] is not None:
            total["worst"] = max(rows, key=lambda row: row["rhat_max"] or 0.0)["site"]
        rows.append(total)
    known = [row["ess_bulk_min"] for row in rows if row["ess_bulk_min"] is not None]
    least = min(known, default=None)
    seconds, gradients = _cost(draws)
    return Summary(
        tuple(rows),
        by_site,
        high,
        limit,
        None if least is None or not seconds else least / seconds,
        None if least is None or not gradients else least / gradients,
    )


def _cost(draws: Any) -> tuple[float | None, float | None]:
    """The seconds of the run, and the gradients of its draws; None if they are not known."""
    if not isinstance(draws, Samples):
        return None, None
    steps = draws.stats.get("num_steps")
    return draws.info.get("seconds"), None if steps is None else float(steps.sum())


def _columns(draws: Mapping[str, Tensor]) -> Tensor:
    """All numbers of some sites, each (chains, draws, ...), as (chains, draws, numbers)."""
    return torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)


def explain_chains(model: Callable, samples: Samples, *args: Any, **kwargs: Any) -> str:
    """Say in words what R-hat of the weights and R-hat of the function tell together.

    Chains agree if R-hat of 95 % of the numbers is at most 1.01, or what short chains exceed by
    chance; the same limit decides whether ``compare`` trusts its reference.
    Chains of a network that agree about the function and not about its weights differ by symmetries
    (permuted hidden units, flipped signs): predictions can be trusted, weights cannot be compared.
    Chains that disagree about the function have not seen the same posterior. If each of them is
    stationary they sit in separate modes, as those of ``mcmc.ensemble_sample`` do.

    :param model: the Pyro program.
    :param samples: chains of its latents, at least two.
    :param args: the program's arguments, such as x, without the targets.
    :raises ValueError: for a single chain.
    """
    if samples.num_chains < 2:
        raise ValueError("one chain cannot be compared with others: draw at least two")
    f = _columns(function_draws(model, samples, *args, **kwargs))
    weights = _columns(samples.latents)
    high = {
        name: float(torch.nanquantile(value, SHARE))
        for name, value in (
            ("weights", rhat(weights, progress=False)),
            ("function", rhat(f, progress=False)),
            ("within", within_rhat(f, progress=False)),
        )
    }
    limit = limit_of_rhat(samples.num_chains, samples.num_draws)
    text = (
        f"R-hat (95 % quantile): weights {high['weights']:.3f}, function {high['function']:.3f}, "
        f"function within each chain {high['within']:.3f}; chains agree up to {limit:.3f}. "
    )
    if high["function"] <= limit:
        if high["weights"] <= limit:
            return text + "The chains agree."
        return text + (
            "The chains agree about the function and not about the weights: they differ by "
            "symmetries of the network, such as permuted hidden units. Predictions can be trusted; "
            "do not compare or average weights across chains."
        )
    if high["within"] <= limit_of_rhat(1, samples.num_draws):
        return text + (
            "Each chain is stationary, but they disagree about the function: they sit in separate "
            "modes. Their mixture does not weight the modes by their mass."
        )
    return text + (
        "The chains have not converged, not even each on its own: draw longer, start from a "
        "trained guide, or sample fewer numbers."
    )


def function_draws(
    model: Callable, samples: Samples, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """The network's predictions along the chains, for diagnostics in function space.

    ::

        E[y | w_ct, x],    c the chain, t the draw;   for classes their probabilities

    Permuting hidden units, flipping signs or shifting all logits changes the weights, but not these
    predictions.

    :param model: the Pyro program.
    :param samples: draws of its latents.
    :param args: the program's arguments, such as x, without the targets.
    :returns: observed site -> ``(chains, draws, N, ...)``, for ``rhat``, ``ess`` or ``summary``.
    :raises TypeError: if ``samples`` is not ``Samples``; draws of a guide are independent and form
        no chain.
    """
    samples = samples_of_mcmc(samples)
    if not isinstance(samples, Samples):
        raise TypeError(
            f"samples must be Samples, got {type(samples).__name__}: draws of a guide are "
            f"independent, so that R-hat and ESS say nothing about them"
        )
    from pyro_bdl.predictive.sampled import Predictive  # its users import this package

    leading = (samples.num_chains, samples.num_draws)
    means = Predictive(model, samples).mean(*args, **kwargs)
    return {site: value.unflatten(0, leading) for site, value in means.items()}


def _check_sites(latents: Mapping[str, Tensor]) -> int:
    """The number of chains, the same for all sites."""
    if not latents:
        raise ValueError("there is no site to summarize")
    for site, value in latents.items():
        check_draws(value, f"site {site!r}")
    shapes = {site: tuple(value.shape[:2]) for site, value in latents.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all sites must have the same (chains, draws), got {shapes}")
    return next(iter(shapes.values()))[0]


def _row(site: str, found: Convergence, rhat_limit: float, ess_limit: float) -> dict[str, Any]:
    rhat, bulk, tail = (value.flatten() for value in found)
    known = ~rhat.isnan()
    row: dict[str, Any] = {"site": site, "size": len(rhat), "no_rhat": int((~known).sum())}
    row |= {column.key: None for column in _COLUMNS if column.key not in row}
    if known.any():
        ratio = rhat[known]
        row["rhat_median"], row["rhat_95"] = _quantiles(ratio, 0.5, 0.95)
        row["rhat_max"] = ratio.max().item()
        row["rhat_share"] = (ratio > rhat_limit).double().mean().item()
        place = torch.where(known, rhat, -torch.inf).argmax()
        index = torch.unravel_index(place, found.rhat.shape)
        row["worst"] = f"[{', '.join(str(int(i)) for i in index)}]" if index else ""
    bulk, tail = bulk[~bulk.isnan()], tail[~tail.isnan()]
    if bulk.numel():
        row["ess_bulk_median"], row["ess_bulk_05"] = _quantiles(bulk, 0.5, 0.05)
        row["ess_bulk_min"] = bulk.min().item()
        row["ess_bulk_share"] = (bulk < ess_limit).double().mean().item()
        (row["ess_tail_median"],) = _quantiles(tail, 0.5)
        row["ess_tail_min"] = tail.min().item()
    return row


def _quantiles(x: Tensor, *levels: float) -> list[float]:
    in_order = sort(x)
    return [quantile_of_sorted(in_order, level).item() for level in levels]
