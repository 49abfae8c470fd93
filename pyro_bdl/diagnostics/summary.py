"""Convergence of networks: R-hat and ESS over the weights of each site, and in function space."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import check_draws
from pyro_bdl.diagnostics.convergence import Convergence, bfmi, convergence
from pyro_bdl.diagnostics.ess import ess
from pyro_bdl.diagnostics.mcse import mcse
from pyro_bdl.diagnostics.rhat import SHARE, limit_of_rhat, rhat, within_rhat
from pyro_bdl.guides.draws import samples_of_mcmc
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.names import chooser
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require

if TYPE_CHECKING:  # pandas takes long to import, and is imported when it is needed
    import pandas as pd

ESS_LIMIT = 100  # draws per chain
_LISTED = 12  # sites with more numbers have one row for all of them
_NAME = 20  # characters of a name in print
_MANY = "R-hat and ESS of many numbers: median, quantile, worst"
_SAMPLER = {
    "divergences": "divergences: {:.0f}",
    "bfmi": "BFMI: {:.2f} (worst chain, poor below 0.3)",
    "saturated": "at the cap of steps: {:.1%} of the draws",
}
# The columns of ``Summary.table`` that are printed, under shorter names.
_PRINTED = {
    "size": "size", "rhat_median": "R-hat", "rhat_95": "95 %", "rhat_max": "max",
    "rhat_share": "high", "worst": "worst", "ess_bulk_median": "ESS", "ess_bulk_05": "5 %",
    "ess_bulk_min": "min", "ess_bulk_share": "low", "ess_tail_min": "tail min",
}  # fmt: skip
_FORMATS = {"size": "{:.0f}", "rhat": "{:.3f}", "share": "{:.0%}", "ess": "{:.0f}", "worst": "{}"}


@dataclass(frozen=True, repr=False)
class Summary:
    """Draws and their convergence; prints the numbers of small sites one by one.

    :param latents: the draws, site to ``(chains, draws, ...)``.
    :param table: a row for each site, and one named "all" if there are several: ``size``;
        ``no_rhat``, how many numbers have no R-hat (constants, NaN, all of a single chain);
        ``rhat_median``, ``rhat_95``, ``rhat_max``, and ``rhat_share`` above ``rhat_limit``;
        ``worst``, the index of the largest R-hat; ``ess_bulk_median``, ``ess_bulk_05``,
        ``ess_bulk_min``, and ``ess_bulk_share`` below ``ess_limit``; ``ess_tail_median``,
        ``ess_tail_min``; as far as the cost is known ``per_second`` and ``per_1000_gradients``, the
        smallest bulk ESS over the seconds of the run, warm-up included, and over the gradients.
    :param by_site: R-hat and ESS of every number, in the shape of the site.
    :param rhat_limit: R-hat above it counts as high.
    :param ess_limit: effective draws; a bulk ESS below it counts as low.
    :param sampler: of ``Samples`` of HMC and NUTS, as far as they are known: ``divergences``, the
        number of draws that ended in one; ``bfmi``, the smallest of the chains, poor below 0.3;
        ``saturated``, the share of draws that took all the steps that they may.
    :param listed: the sites whose numbers are printed one by one.
    """

    latents: Mapping[str, Tensor]
    table: "pd.DataFrame"
    by_site: Mapping[str, Convergence]
    rhat_limit: float
    ess_limit: float
    sampler: Mapping[str, float] = field(default_factory=dict)
    listed: Sequence[str] = ()

    @cached_property
    def numbers(self) -> "pd.DataFrame":
        """A row for each number of all sites, such as ``theta[3]``, and ``mean``, ``mcse`` (the
        Monte Carlo standard error of the mean), ``sd``, the quantiles ``5 %`` and ``95 %``,
        ``rhat``, ``ess_bulk`` and ``ess_tail``."""
        return self._rows(list(self.by_site))

    def _rows(self, sites: Sequence[str]) -> "pd.DataFrame":
        import pandas as pd

        parts = [_numbers(site, self.latents[site], self.by_site[site]) for site in sites]
        return pd.concat(parts)

    def __repr__(self) -> str:
        lines = []
        if self.listed:
            rows = self._rows(self.listed)
            for name in rows:
                digits = {"rhat": ".3f", "ess_bulk": ".0f", "ess_tail": ".0f"}.get(name, ".3g")
                rows[name] = [_shown(value, f"{{:{digits}}}") for value in rows[name]]
            lines += [rows.rename(index=_shortened).to_string(), ""]
        others = [site for site in self.table.index if site not in self.listed]
        if others != ["all"] and others:
            rows = self.table.loc[others, list(_PRINTED)].astype(object)
            for name in _PRINTED:
                form = _FORMATS[name if name in _FORMATS else name.split("_")[0]]
                form = _FORMATS["share"] if name.endswith("share") else form
                rows[name] = [_shown(value, form) for value in rows[name]]
            rows["worst"] = [_shortened(place, 16) for place in rows["worst"]]
            rows = rows.rename(columns=_PRINTED, index=_shortened)
            lines += [rows.to_string(), _MANY, ""]
        lines.append(f"high: R-hat above {self.rhat_limit:.4g}; low: ESS below {self.ess_limit:g}")
        last = self.table.iloc[-1]
        if last["no_rhat"]:
            lines.append(
                f"without R-hat (constants, NaN, single chains): {last['no_rhat']} numbers"
            )
        rates = {"per_second": "a second", "per_1000_gradients": "per 1000 gradients"}
        if known := [f"{last[name]:.3g} {text}" for name, text in rates.items() if name in last]:
            lines.append(f"smallest bulk ESS: {', '.join(known)}")
        if self.sampler:
            said = (_SAMPLER[name].format(value) for name, value in self.sampler.items())
            lines.append("; ".join(said))
        return "\n".join(lines)


def _shown(value: Any, form: str) -> str:
    return "-" if isinstance(value, float) and np.isnan(value) else form.format(value)


def _shortened(name: str, width: int = _NAME) -> str:
    """A name that fits its column, without its middle."""
    half = width // 2 - 1
    return name if len(name) <= width else f"{name[:half]}..{name[-half:]}"


def names_of_numbers(site: str, shape: Sequence[int]) -> list[str]:
    """A name for each number of a site, such as ``theta[3]``."""
    places = (f"[{', '.join(map(str, place))}]" if place else "" for place in np.ndindex(*shape))
    return [site + place for place in places]


def listed_sites(latents: Mapping[str, Tensor], sites: str | Sequence[str] | None) -> list[str]:
    """The sites with a row for each number: chosen by name, else those of at most 12 numbers.

    :param latents: site to ``(chains, draws, ...)``.
    """
    is_listed = (lambda _: True) if sites is None else chooser(sites, "sites")
    most = _LISTED if sites is None else np.inf
    return [s for s, v in latents.items() if is_listed(s) and v[0, 0].numel() <= most]


def _numbers(site: str, draws: Tensor, found: Convergence) -> "pd.DataFrame":
    """The rows of ``Summary.numbers`` of a site."""
    import pandas as pd

    shape = draws.shape[2:]
    values = double(draws.detach().cpu()).reshape(draws.shape[:2].numel(), -1).numpy()
    low, high = np.quantile(values, (0.05, 0.95), axis=0)
    columns = {
        "mean": values.mean(0), "mcse": mcse(draws), "sd": values.std(0, ddof=1), "5 %": low,
        "95 %": high, "rhat": found.rhat, "ess_bulk": found.ess_bulk, "ess_tail": found.ess_tail,
    }  # fmt: skip
    flat = {n: np.ravel(v.cpu() if isinstance(v, Tensor) else v) for n, v in columns.items()}
    return pd.DataFrame(flat, index=names_of_numbers(site, shape))


def summary(
    draws: Samples | Mapping[str, Tensor],
    functions: Mapping[str, Tensor] | None = None,
    *,
    sites: str | Sequence[str] | None = None,
    rhat_limit: float | None = None,
    ess_limit: float | None = None,
) -> Summary:
    """Mean, sd, quantiles, R-hat and ESS of each number; of large sites R-hat and ESS of all.

    The weights of a network are not identified: hidden units can be permuted. Chains may therefore
    disagree about weights but agree about the function, whose draws ``functions`` adds.

    Example::

        >>> chains = {"weight": torch.randn(4, 200, 3, 2), "bias": torch.randn(4, 200, 3)}
        >>> summary = bdl.diagnostics.summary(chains)  # print(summary) shows the tables
        >>> summary.table["size"].to_dict()
        {'weight': 6, 'bias': 3, 'all': 9}
        >>> list(summary.numbers)
        ['mean', 'mcse', 'sd', '5 %', '95 %', 'rhat', 'ess_bulk', 'ess_tail']

    :param draws: ``Samples``, an MCMC of Pyro or NumPyro, or site -> ``(chains, draws, ...)``.
    :param functions: further rows, as ``function_draws`` gives them.
    :param sites: names or patterns of those printed number by number; by default those of at most
        12 numbers.
    :param rhat_limit: R-hat above it counts as high; by default 1.01, or for short chains what
        independent draws exceed twice in a thousand times.
    :param ess_limit: a bulk ESS below it counts as low; by default 100 per chain.
    :raises TypeError: if a site holds no real tensor.
    :raises ValueError: for no site, fewer than 4 draws, or sites with different chains or draws.

    Source: limits of Vehtari et al. (2021), Rank-normalization, folding, and localization.
    """
    import pandas as pd

    draws = samples_of_mcmc(draws)
    require(draws, Samples | Mapping, "draws must be Samples, or a dict from sites to draws")
    latents = dict(draws.latents if isinstance(draws, Samples) else draws) | dict(functions or {})
    chains, length = check_sites(latents)
    low = ESS_LIMIT * chains if ess_limit is None else ess_limit
    high = limit_of_rhat(chains, length) if rhat_limit is None else rhat_limit
    by_site = {site: convergence(value) for site, value in latents.items()}
    parts = dict(by_site)
    if len(parts) > 1:
        together = zip(*by_site.values(), strict=True)
        parts["all"] = Convergence(*(torch.cat([p.flatten().cpu() for p in v]) for v in together))
    table = pd.DataFrame({site: _row(part, high, low) for site, part in parts.items()}).T
    if len(parts) > 1 and table["rhat_max"].notna().any():
        table.loc["all", "worst"] = table["rhat_max"].iloc[:-1].astype(float).idxmax()
    table = table.infer_objects()
    if isinstance(draws, Samples):
        if "seconds" in draws.info:
            table["per_second"] = table["ess_bulk_min"] / draws.info["seconds"]
        if "num_steps" in draws.stats:
            gradients = float(draws.stats["num_steps"].sum())
            table["per_1000_gradients"] = 1000 * table["ess_bulk_min"] / gradients
    sampler = sampler_statistics(draws) if isinstance(draws, Samples) else {}
    listed = listed_sites(latents, sites)
    return Summary(latents, table, by_site, high, low, sampler, listed)


def sampler_statistics(draws: Samples) -> dict[str, float]:
    """``divergences``, ``bfmi`` and ``saturated`` of chains, as far as they are known: see
    ``Summary.sampler``."""
    stats = draws.stats
    found: dict[str, float] = {}
    if "diverging" in stats:
        found["divergences"] = float(stats["diverging"].sum())
    if "energy" in stats and "energy_variance" not in stats:
        found["bfmi"] = float(bfmi(stats["energy"]).min())
    options = draws.info.get("options", {})
    depth, most = options.get("max_tree_depth"), options.get("max_steps")
    if depth is not None:
        most = 2**depth - 1
    if most is not None and "num_steps" in stats and "energy_variance" not in stats:
        found["saturated"] = float(double(stats["num_steps"] >= most).mean())
    return found


def _row(found: Convergence, rhat_limit: float, ess_limit: float) -> dict[str, Any]:
    import pandas as pd

    rhat, bulk, tail = (pd.Series(value.flatten().cpu().numpy()) for value in found)
    known, index = rhat.notna(), ()
    if known.any():
        index = np.unravel_index(rhat.argmax(), found.rhat.shape)
    return {
        "size": len(rhat),
        "no_rhat": int((~known).sum()),
        "rhat_median": rhat.median(),
        "rhat_95": rhat.quantile(0.95),
        "rhat_max": rhat.max(),
        "rhat_share": (rhat[known] > rhat_limit).mean(),
        "worst": f"[{', '.join(map(str, index))}]" if index else "",
        "ess_bulk_median": bulk.median(),
        "ess_bulk_05": bulk.quantile(0.05),
        "ess_bulk_min": bulk.min(),
        "ess_bulk_share": (bulk[bulk.notna()] < ess_limit).mean(),
        "ess_tail_median": tail.median(),
        "ess_tail_min": tail.min(),
    }


def explain_chains(model: Callable, samples: Samples, *args: Any, **kwargs: Any) -> str:
    """Say in words what R-hat of the weights and R-hat of the function tell together.

    Chains agree if R-hat of 95 % of the numbers is at most 1.01, or what short chains exceed by
    chance; the same limit decides whether ``compare`` trusts its reference.
    Chains of a network that agree about the function and not about its weights mostly differ by
    symmetries (permuted hidden units, flipped signs), or move slowly where the data do not tell:
    nothing here speaks against predictions at these inputs, but weights cannot be compared.
    Where the function has fewer than 100 effective draws a chain at 5 % of the numbers or more,
    R-hat cannot tell, and the answer says so.
    Divergences are said first: where R-hat looks right the chains may have missed the neck of a
    funnel together. Chains that disagree about the function have not seen the same posterior. If
    the halves of each agree they mostly sit in separate modes, as those of
    ``mcmc.ensemble_sample`` do.

    :param model: the Pyro program.
    :param samples: chains of its latents, at least two.
    :param args: the program's arguments, such as x, without the targets.
    :raises ValueError: for a single chain.
    """
    require(samples, Samples, "samples must be Samples")
    if samples.num_chains < 2:
        raise ValueError("one chain cannot be compared with others: draw at least two")
    f = _columns(function_draws(model, samples, *args, **kwargs))
    weights, function, within = (
        float(torch.nanquantile(value, SHARE))
        for value in (rhat(_columns(samples.latents)), rhat(f), within_rhat(f))
    )
    size = float(torch.nanquantile(ess(f), 1 - SHARE))
    limit = limit_of_rhat(samples.num_chains, samples.num_draws)
    needed = ESS_LIMIT * samples.num_chains
    text = (
        f"R-hat (95 % quantile): weights {weights:.3f}, function {function:.3f}, "
        f"function within each chain {within:.3f}; chains agree up to {limit:.3f}. "
    )
    if count := int(samples.stats.get("diverging", torch.zeros(1, device="cpu")).sum()):
        text += (
            f"{count} draw{'s' * (count > 1)} ended in a divergence, as in a funnel, where the "
            "scale of a hierarchy comes near 0: write it with standard normal latents "
            "(pyro.poutine.reparam with LocScaleReparam), then take smaller steps (target_accept). "
        )
    if function <= limit:
        if size < needed:
            return text + (
                f"The chains agree about the function as far as can be seen, but it has only "
                f"{size:.0f} effective draws (5 % quantile), and R-hat needs {needed}: its mean "
                f"may be off by {2 / size**0.5:.2g} sds (two standard errors) and more. Draw "
                "longer before you trust predictions."
            )
        if weights <= limit:
            return text + "The chains agree."
        return text + (
            "The chains agree about the function and not about the weights, as where they differ "
            "by symmetries of the network, such as permuted hidden units. Nothing here speaks "
            "against predictions at these inputs; do not compare or average weights across chains."
        )
    if within <= limit_of_rhat(1, samples.num_draws):
        return text + (
            "The halves of each chain agree, but the chains disagree about the function, as where "
            "they sit in separate modes. Their mixture does not weight modes by their mass."
        )
    return text + (
        "The chains have not converged, not even each on its own: draw longer, start from a "
        "trained guide, or sample fewer numbers."
    )


def _columns(draws: Mapping[str, Tensor]) -> Tensor:
    """All numbers of some sites, each (chains, draws, ...), as (chains, draws, numbers)."""
    return torch.cat([value.reshape(*value.shape[:2], -1) for value in draws.values()], -1)


def function_draws(
    model: Callable, samples: Samples, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """The network's predictions along the chains, for diagnostics in function space.

    ::

        E[y | w_ct, x],    c the chain, t the draw;   for classes their probabilities

    Permuting hidden units, flipping signs or shifting all logits changes the weights, but not these
    predictions.

    Example::

        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> latents = {"weight": torch.randn(2, 50, 1, 1), "bias": torch.randn(2, 50, 1)}
        >>> samples = bdl.Samples(latents)  # two chains, as mcmc.sample returns them
        >>> f = bdl.diagnostics.function_draws(model, samples, x)
        >>> f["y"].shape
        torch.Size([2, 50, 20])
        >>> bdl.diagnostics.rhat(f["y"]).shape
        torch.Size([20])

    :param model: the Pyro program.
    :param samples: draws of its latents.
    :param args: the program's arguments, such as x, without the targets.
    :returns: observed site -> ``(chains, draws, N, ...)``, for ``rhat``, ``ess`` or ``summary``.
    :raises TypeError: if ``samples`` is not ``Samples``; draws of a guide are independent and form
        no chain.
    """
    samples = samples_of_mcmc(samples)
    advice = ": draws of a guide are independent, so that R-hat and ESS say nothing about them"
    require(samples, Samples, "samples must be Samples", advice)
    from pyro_bdl.predictive.sampled import Predictive  # its users import this package

    leading = (samples.num_chains, samples.num_draws)
    means = Predictive(model, samples).mean(*args, **kwargs)
    return {site: value.unflatten(0, leading) for site, value in means.items()}


def check_sites(latents: Mapping[str, Tensor]) -> tuple[int, int]:
    """The numbers of chains and draws, the same for all sites."""
    if not latents:
        raise ValueError("there is no site to summarize")
    for site, value in latents.items():
        check_draws(value, f"site {site!r}")
    shapes = {site: (value.shape[0], value.shape[1]) for site, value in latents.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all sites must have the same (chains, draws), got {shapes}")
    return next(iter(shapes.values()))
