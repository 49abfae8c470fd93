"""The figures of a comparison: the plots of :mod:`pyro_bdl.plots` that apply to it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl import plots
from pyro_bdl.comparison.distances import latent_distances
from pyro_bdl.comparison.judge import DISTANCE
from pyro_bdl.comparison.observe import class_labels
from pyro_bdl.data.dataset import LINKS, Dataset
from pyro_bdl.guides.draws import latent_draws, samples_of_mcmc
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded

if TYPE_CHECKING:
    from pyro_bdl.comparison.table import Comparison

CAPTIONS = {
    "bands": "Mean and 90 % interval of the function along the feature.",
    "forest": "The function at four test points, ordered by the reference's sd; the shaded column "
    "is the reference's 90 % interval.",
    "calibration": "Calibration on the test data: below the diagonal, beyond the band or bar that "
    "chance has if the targets are independent, a posterior is overconfident about them.",
    "ppc": "The test targets beside draws of them from each posterior.",
    "pit": "Distribution of the test targets' places among the predictions (probability integral "
    "transforms), less a uniform one: within the band, in 95 % of the cases, if calibrated and the "
    "targets are independent; rising through the middle if too wide, falling if too narrow.",
    "function_space": "Mean and sd at each test point: on the diagonal, a posterior agrees with "
    "the reference.",
    "cost": "Time to fit against the distance to the reference. The dashed line is the distance "
    "between two halves of the reference's own draws.",
    "hyperparameters": "Latents that are no weights, such as noise and scales, of many numbers the "
    "six that are the farthest from the reference: median, 50 % and 90 % interval.",
    "ranks": "Each chain's share of the ranks of all draws, for the function at test points and "
    "for latents that are single numbers: flat where chains agree. The band is for independent "
    "draws.",
}
_POINTS = 4
_DRAWS = 500  # of latents, from a guide
_LATENTS = 6  # named numbers that are shown
# Tasks whose targets are standardized, and the latent that is their sd.
_SHIFTED = {"regression": "noise", "censored": "scale"}


def figures(
    comparison: "Comparison",
    data: Dataset | None = None,
    *,
    posteriors: Mapping[str, Any] | None = None,
) -> dict[str, Figure]:
    """Figures of a comparison, by the names in :data:`CAPTIONS`, which can be used for files.

    :param data: the data, for names and units, training data and the rows of test points.
    :param posteriors: the compared posteriors, to show their latents too.
    """
    draws, reference = _functions(comparison), comparison.reference
    quantity = _quantity(comparison, data)
    drawn = {"bands": _bands(comparison, draws, quantity, data)} | _predictions(comparison, data)
    scalars = _scalars(comparison, posteriors or {}, data)
    if reference is not None:
        at = {
            title: {name: values[:, *index] for name, values in draws.items()}  # type: ignore[index]
            for title, index in points(comparison, data).items()
        }
        if len(draws) > 1:
            by_name = {name: {title: at[title][name] for title in at} for name in draws}
            drawn |= {
                "forest": plots.intervals(by_name, reference=reference, label=quantity),
                "function_space": plots.function_space(
                    draws, reference=reference, quantity=quantity
                ),
                "cost": cost(comparison),
            }
        chains = comparison.first.chains
        if chains > 1:
            shown = {title: values[reference] for title, values in at.items()}
            shown |= scalars.get(reference, {})
            drawn["ranks"] = plots.ranks(
                {k: v.unflatten(0, (chains, -1)) for k, v in shown.items()}
            )
    if scalars:
        known = reference if reference in scalars else None
        drawn["hyperparameters"] = plots.intervals(scalars, reference=known)
    return {name: figure for name in CAPTIONS if (figure := drawn.get(name)) is not None}


def _functions(comparison: "Comparison") -> dict[str, Tensor]:
    """Draws of each function; of two classes, those of the second's probability."""
    draws = {name: evaluation.function for name, evaluation in comparison.evaluations.items()}
    if comparison.task == "classification" and comparison.first.function.shape[-1] == 2:
        return {name: values[..., 1] for name, values in draws.items()}
    return draws


def _quantity(comparison: "Comparison", data: Dataset | None) -> str:
    """The function in words."""
    if comparison.task == "classification":
        two = comparison.first.function.shape[-1] == 2
        return "probability of the second class" if two else "class probability"
    target = "target" if data is None else data.target_name
    return f"{LINKS[data.task]} of {target}" if data is not None and data.task in LINKS else target


def points(comparison: "Comparison", data: Dataset | None = None) -> dict[str, tuple[int, ...]]:
    """Four test points, at evenly spaced ranks of the reference's sd: name to index in (N, ...).

    A point is named by its row and target where the data are known; empty without a reference.
    """
    if comparison.reference is None:
        return {}
    draws = _functions(comparison)[comparison.reference]
    order = double(draws.flatten(1)).std(0, correction=0).argsort(stable=True).cpu().numpy()
    chosen = order[np.linspace(0, len(order) - 1, min(_POINTS, len(order))).round().astype(int)]
    titles = {}
    for place in chosen:
        row, *output = (int(i) for i in np.unravel_index(place, tuple(draws.shape[1:])))
        kept = int(comparison.first.places[row])
        title = f"point {kept}" if data is None else data.point_name(kept)
        if draws[0, 0].numel() > 1:
            title += f" [{', '.join(map(str, output))}]"
        titles[title] = (row, *output)
    return titles


def _bands(
    comparison: "Comparison", draws: Mapping[str, Tensor], quantity: str, data: Dataset | None
) -> Figure | None:
    """Bands over a single input."""
    x = comparison.inputs[0] if len(comparison.inputs) == 1 else None
    if not isinstance(x, Tensor) or x[0].numel() != 1 or next(iter(draws.values())).dim() != 2:
        return None
    train: dict[str, Any] = {}
    if data is not None and data.task in ("regression", "classification"):
        train = {"x_train": data.x_train, "y_train": data.in_units(data.y_train)}
    return plots.predictive_bands(
        x, draws, reference=comparison.reference, ylabel=quantity,
        xlabel="x" if data is None else _feature(data), **train,
    )  # fmt: skip


def _feature(data: Dataset) -> str:
    return data.feature_names[0] + (" (standardized)" if data.x_mean else "")


def _predictions(comparison: "Comparison", data: Dataset | None) -> dict[str, Figure]:
    """Calibration of classes, or of posteriors with draws of the target; of targets that may be
    limits their PITs alone."""
    drawn, reference = {}, comparison.reference
    if comparison.task == "classification":
        known = {name: each.function.mean(0) for name, each in comparison.evaluations.items()}
        y = class_labels(comparison.y, next(iter(known.values())))
    else:
        known = {
            name: each.predictions
            for name, each in comparison.evaluations.items()
            if each.predictions is not None
        }
        if not known:
            return {}
        y = comparison.y.reshape(next(iter(known.values())).shape[1:])
    options: Any = {"reference": reference if reference in known else None}
    if not comparison.first.may_be_censored:
        drawn["calibration"] = plots.calibration(known, y, task=comparison.task, **options)
        if comparison.task != "classification":
            target = "target" if data is None else data.target_name
            drawn["ppc"] = plots.ppc(known, y, xlabel=target, **options)
    pit = {name: p for name in known if (p := comparison.evaluations[name].pit) is not None}
    return drawn | ({"pit": plots.pit_ecdf(pit, **options)} if pit else {})


def cost(comparison: "Comparison") -> Figure | None:
    """Time to fit against distance; None where these are not known."""
    reference, numbers = comparison.reference, comparison.numbers()
    # not in the order of the ranking: the colors of every figure
    rows = {name: numbers[name] for name in comparison.evaluations if "seconds" in numbers[name]}
    distance = {n: row[DISTANCE] for n, row in rows.items() if n != reference and DISTANCE in row}
    if not distance:
        return None
    return plots.cost_against_quality(
        {name: row["seconds"] for name, row in rows.items() if name in {reference, *distance}},
        distance,
        reference=reference,
        floor=list(numbers.values())[-1].get(DISTANCE),
        errors={name: rows[name].get(f"{DISTANCE}_se", 0.0) for name in distance},
    )


def _farthest(comparison: "Comparison") -> list[str]:
    """The names of the compared latents that are the farthest from the reference's."""
    most: dict[str, float] = {}
    for evaluation in comparison.evaluations.values():
        most |= {name: most.get(name, 0.0) for name in evaluation.latent_names}
        if comparison.reference is None:
            continue
        found = latent_distances(evaluation, comparison.evaluations[comparison.reference])
        for name, far in zip(found.names, found.distances.tolist(), strict=True) if found else ():
            most[name] = max(most[name], far)
    return sorted(most, key=lambda name: -most[name])[:_LATENTS]


def _scalars(
    comparison: "Comparison", posteriors: Mapping[str, Any], data: Dataset | None
) -> dict[str, dict[str, Tensor]]:
    """Draws ``(S,)`` of the compared latents that are the farthest from the reference's, and of
    each posterior's others that are single numbers; the noise in the target's units."""
    scales: dict[str, float] = {}
    if data is not None and data.task in _SHIFTED and data.y_sd != 1:
        scales = {_SHIFTED[data.task]: data.y_sd}
    scalars, farthest = {}, _farthest(comparison)
    with seeded(0):
        for name, evaluation in comparison.evaluations.items():
            found = {}
            if evaluation.latents is not None:
                columns = zip(evaluation.latent_names, evaluation.latents.unbind(1), strict=True)
                found = {latent: values for latent, values in columns if latent in farthest}
            posterior = samples_of_mcmc(posteriors.get(name))
            if isinstance(posterior, Samples) or callable(posterior):
                total = None if isinstance(posterior, Samples) else _DRAWS
                drawn = latent_draws(posterior, total, *comparison.inputs, None)
                known = evaluation.latent_names
                found |= {n: v for n, v in drawn.items() if v.dim() == 1 and n not in known}
            scalars[name] = {
                f"{site}, target's units" if site in scales else site: v * scales.get(site, 1.0)
                for site, v in found.items()
            }
    return {name: sites for name, sites in scalars.items() if sites}
