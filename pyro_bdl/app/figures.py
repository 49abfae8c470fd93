"""The figures of a comparison: the plots of :mod:`pyro_bdl.plots` that apply to it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl import plots
from pyro_bdl.comparison.judge import DISTANCE
from pyro_bdl.comparison.observe import class_labels
from pyro_bdl.diagnostics import summary
from pyro_bdl.guides.draws import latent_draws, samples_of_mcmc
from pyro_bdl.plots.intervals import chosen_points, point_name
from pyro_bdl.samples import Samples
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.tables import number

if TYPE_CHECKING:
    from pyro_bdl.comparison.table import Comparison

CAPTIONS = {
    "bands": "Mean and 90 % interval of the function along the feature.",
    "sd_map": "The function's sd divided by the reference's, at the test points: red where a "
    "posterior is overconfident about the function, blue where it is underconfident.",
    "forest": "The function at four test points, ordered by the reference's sd; the shaded column "
    "is the reference's 90 % interval.",
    "calibration": "Calibration on the test data: below the diagonal, a posterior is "
    "overconfident about the targets.",
    "pit": "Where the test targets lie among the predictions (probability integral transform): "
    "flat within the band if calibrated, a valley if too narrow, a hill if too wide.",
    "function_space": "Mean and sd at each test point: on the diagonal, a posterior agrees with "
    "the reference.",
    "cost": "Time to fit against the distance to the reference. The dashed line is the distance "
    "between two halves of the reference's own draws.",
    "hyperparameters": "Latents that are single numbers, such as noise and scales: median, 50 % "
    "and 90 % interval.",
    "pairs": "Latents that are single numbers against each other.",
    "trace": "The chains' draws in order, for the function at test points and for latents that are "
    "single numbers: chains that mixed look alike.",
    "ranks": "Each chain's share of the ranks of all draws: flat where chains agree. The band is "
    "for independent draws.",
    "layers": "R-hat and effective draws of the weights of every site. Weights of networks may "
    "differ between chains where their functions agree.",
}
# The figures without their numbers, for those who cannot see them; "cost" is described by its
# numbers.
_DESCRIPTIONS = {
    "bands": "Curves of mean and interval against the feature, a panel for each posterior",
    "sd_map": "Maps of the sd ratio over two features, a panel for each posterior",
    "forest": "Intervals of each posterior at four test points",
    "calibration": "Curves of observed against nominal shares, one for each posterior",
    "pit": "Histograms of the probability integral transforms, a panel for each posterior",
    "function_space": "Scatter plots of each posterior's means and sds against the reference's",
    "hyperparameters": "Intervals of latents that are single numbers, one for each posterior",
    "pairs": "Scatter plots of latents that are single numbers, with their densities",
    "trace": "Lines of the draws of each chain",
    "ranks": "Histograms of the ranks of each chain",
    "layers": "Ranges of R-hat and of effective draws for each site",
}

_POINTS = 4  # test points in trace plots
_MOST_SCALARS = 4
_MOST_IN_PAIRS = 5
_DRAWS = 500

Draws = dict[str, Tensor]


def figures(
    comparison: "Comparison",
    *,
    target: str = "target",
    units: str = "",
    features: Sequence[str] = (),
    train: tuple[Tensor, Tensor] | None = None,
    posteriors: Mapping[str, Any] | None = None,
    points: Sequence[str] = (),
    scales: Mapping[str, float] | None = None,
) -> dict[str, Figure]:
    """Figures of a comparison, by the names in :data:`CAPTIONS`, which can be used for files.

    :param target: name of the target, for labels.
    :param units: units of the target, for labels.
    :param features: names of the inputs, for labels.
    :param train: training inputs and targets in the units of ``inputs`` and ``y``; shown if there
        are one or two inputs.
    :param posteriors: the compared posteriors, to show their latents too: hyperparameters, chains
        and layers.
    :param points: names of the kept test points; by default "point 17".
    :param scales: site to a factor that brings its values to the target's units, for a noise that
        the program sees in other units.
    """
    functions = _functions(comparison)
    scales = scales or {}
    if posteriors is not None:
        posteriors = {name: samples_of_mcmc(given) for name, given in posteriors.items()}
    known = None if posteriors is None else _latents(comparison, posteriors, scales)
    chains = _chains(comparison, functions, posteriors or {}, points, scales)
    found = _inputs(comparison, functions, target, features, train)
    found |= _predictions(comparison)
    found |= _against_reference(comparison, functions, target, units, points)
    found |= _scalars(known or {}, comparison.reference)
    if chains:
        found["trace"] = plots.trace(chains)
        if min(next(iter(chains.values())).shape[:2]) > 1:
            found["ranks"] = plots.ranks(chains)
    reference = (posteriors or {}).get(comparison.reference or "")
    if isinstance(reference, Samples) and reference.num_chains > 1 and reference.num_draws >= 4:
        convergence = summary(reference, progress=False)
        if any(row["rhat_max"] is not None for row in convergence.rows):
            found["layers"] = plots.convergence(convergence)
    return {name: found[name] for name in CAPTIONS if name in found}


def _inputs(
    comparison: "Comparison",
    functions: Draws,
    target: str,
    features: Sequence[str],
    train: tuple[Tensor, Tensor] | None,
) -> dict[str, Figure]:
    """Bands over one input, maps over two."""
    if len(comparison.inputs) != 1:
        return {}
    x, reference = comparison.inputs[0], comparison.reference
    if not isinstance(x, Tensor) or x.dim() > 2:
        return {}
    single = x[0].numel() == 1
    x_train, y_train = (None, None) if train is None else train
    if single and next(iter(functions.values())).dim() == 2:
        is_class = comparison.task == "classification"
        return {
            "bands": plots.predictive_bands(
                x.reshape(-1),
                functions,
                reference=reference,
                x_train=x_train,
                y_train=y_train,
                xlabel=features[0] if features else "x",
                ylabel="probability of the second class" if is_class else target,
            )
        }
    if x[0].numel() == 2 and reference is not None and len(functions) > 1:
        labels = features if len(features) == 2 else ("first input", "second input")
        return {
            "sd_map": plots.sd_ratio_maps(
                x, functions, reference=reference, x_train=x_train, labels=labels
            )
        }
    return {}


def _predictions(comparison: "Comparison") -> dict[str, Figure]:
    """Calibration of classes, or of posteriors with draws of the target."""
    if comparison.task == "classification":
        mean = {
            name: evaluation.function.mean(0) for name, evaluation in comparison.evaluations.items()
        }
        y = class_labels(comparison.y, next(iter(mean.values())))
        drawn = plots.calibration(mean, y, task=comparison.task, reference=comparison.reference)
        return {"calibration": drawn}
    predictions = {
        name: evaluation.predictions
        for name, evaluation in comparison.evaluations.items()
        if evaluation.predictions is not None
    }
    if not predictions:
        return {}
    reference = comparison.reference if comparison.reference in predictions else None
    y = comparison.y.reshape(next(iter(predictions.values())).shape[1:])
    return {
        "calibration": plots.calibration(predictions, y, task="regression", reference=reference),
        "pit": plots.pit_histogram(predictions, y, reference=reference),
    }


def _against_reference(
    comparison: "Comparison", functions: Draws, target: str, units: str, points: Sequence[str]
) -> dict[str, Figure]:
    reference = comparison.reference
    if reference is None or len(functions) < 2:
        return {}
    is_class = comparison.task == "classification"
    unit = f" ({units})" if units else ""
    base = functions[reference]
    places = chosen_points(base, _POINTS)
    found = {
        "forest": plots.forest(
            functions,
            reference=reference,
            points=places,
            labels=[point_name(place, base, points) for place in places],
            quantity="class probability" if is_class else f"{target}{unit}",
        ),
        "function_space": plots.function_space(
            functions,
            reference=reference,
            quantity="class probabilities" if is_class else "prediction",
            units=units,
        ),
    }
    return found | cost(comparison, units)


def cost(comparison: "Comparison", units: str = "") -> dict[str, Figure]:
    """Time to fit against distance, under its name; nothing where these are not known."""
    reference = comparison.reference
    if reference is None:
        return {}
    key = DISTANCE
    *rows, floor = comparison.numbers().values()
    order = list(comparison.evaluations)  # not that of the ranking: the colors of every figure
    timed = sorted(
        (row for row in rows if row.get("seconds") is not None),
        key=lambda row: order.index(row["posterior"]),
    )
    others = [row for row in timed if row["posterior"] != reference and row.get(key) is not None]
    if not others:
        return {}
    there = {reference, *(row["posterior"] for row in others)}
    drawn = plots.cost_against_quality(
        {row["posterior"]: row["seconds"] for row in timed if row["posterior"] in there},
        {row["posterior"]: row[key] for row in others},
        reference=reference,
        floor=floor.get(key),
        errors={row["posterior"]: row.get(f"{key}_se") or 0.0 for row in others},
        units="probability" if comparison.task == "classification" else units,
    )
    return {"cost": drawn}


def shown_points(comparison: "Comparison") -> list[int]:
    """The places, among the kept test points, of those that figures show one by one."""
    if comparison.reference is None:
        return []
    draws = _functions(comparison)[comparison.reference]
    outputs = max(1, draws[0, 0].numel())
    return sorted({place // outputs for place in chosen_points(draws, _POINTS)})


def _functions(comparison: "Comparison") -> Draws:
    """Draws of each function; of two classes, those of the second's probability."""
    functions = {name: evaluation.function for name, evaluation in comparison.evaluations.items()}
    if comparison.task == "classification" and next(iter(functions.values())).shape[-1] == 2:
        return {name: draws[..., 1] for name, draws in functions.items()}
    return functions


def alternative(name: str, comparison: "Comparison") -> str:
    """The alternative text of a figure; that of "cost" holds its numbers."""
    if name != "cost":
        return _DESCRIPTIONS[name]
    known = [row for row in comparison.numbers().values() if DISTANCE in row and row.get("seconds")]
    told = "; ".join(
        f"{row['posterior']} {number(row[DISTANCE], 2)} after {number(row['seconds'], 2)} s"
        for row in sorted(known, key=lambda row: row[DISTANCE])
    )
    return f"Scatter plot of time to fit against distance to {comparison.reference}: {told}"


# ------------------------------------------------------------------------------------- latents


def _latents(
    comparison: "Comparison", posteriors: Mapping[str, Any], scales: Mapping[str, float]
) -> dict[str, Draws]:
    """Draws ``(S,)`` of each posterior's latents that are single numbers."""
    found = {}
    with seeded(0):
        for name in comparison.evaluations:
            posterior = posteriors.get(name)
            if not (isinstance(posterior, Samples) or callable(posterior)):
                continue  # only its predictions are known
            total = None if isinstance(posterior, Samples) else _DRAWS
            drawn = latent_draws(posterior, total, *comparison.inputs, None)
            scalars = {
                _in_units(site, scales): values * scales.get(site, 1.0)
                for site, values in drawn.items()
                if values.dim() == 1
            }
            if scalars:
                found[name] = scalars
    return found


def _scalars(latents: Mapping[str, Draws], reference: str | None) -> dict[str, Figure]:
    if not latents:
        return {}
    reference = reference if reference in latents else None
    found = {"hyperparameters": plots.intervals(latents, reference=reference)}
    sites = list(latents[reference or next(iter(latents))])[:_MOST_SCALARS]
    paired = {
        name: {site: draws[site] for site in sites}
        for name, draws in latents.items()
        if all(site in draws for site in sites)
    }
    if len(sites) > 1:  # if there are many posteriors: the reference and the first ones
        others = [name for name in paired if name != reference]
        chosen = others[: _MOST_IN_PAIRS - (reference is not None)]
        shown = {name: paired[name] for name in paired if name in chosen or name == reference}
        found["pairs"] = plots.pairs(shown, reference=reference)
    return found


def _in_units(site: str, scales: Mapping[str, float]) -> str:
    return f"{site}, target's units" if site in scales else site


def _chains(
    comparison: "Comparison",
    functions: Draws,
    posteriors: Mapping[str, Any],
    points: Sequence[str],
    scales: Mapping[str, float],
) -> Draws:
    """The reference's functions at test points and single numbers: name to ``(chains, draws)``."""
    name = comparison.reference
    if name is None or (name not in posteriors and comparison.evaluations[name].chains < 2):
        return {}
    samples = posteriors.get(name)
    if samples is not None and not isinstance(samples, Samples):
        return {}
    draws = functions[name]
    count = comparison.evaluations[name].chains
    flat = draws.flatten(1).unflatten(0, (count, -1))
    found = {
        point_name(place, draws, points): flat[..., place]
        for place in chosen_points(draws, _POINTS)
    }
    if isinstance(samples, Samples):
        scalars = {
            _in_units(site, scales): value * scales.get(site, 1.0)
            for site, value in samples.latents.items()
            if value.dim() == 2
        }
        found |= dict(list(scalars.items())[:_MOST_SCALARS])
    return found
