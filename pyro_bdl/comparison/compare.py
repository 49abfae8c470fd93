"""``compare``: posteriors of one program side by side, and their distances to a reference."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.captions import CAPTIONS
from pyro_bdl.comparison.columns import check_keys, columns, details
from pyro_bdl.comparison.convergence import efficiency
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.determined import determined
from pyro_bdl.comparison.distances import distances, floor
from pyro_bdl.comparison.evaluation import Evaluation, evaluate, evaluate_draws
from pyro_bdl.comparison.held_out import PredictiveDraws, Test, Units
from pyro_bdl.comparison.input_regions import regions, sd_ratios
from pyro_bdl.comparison.judge import doubts, judge, reasons, verdict
from pyro_bdl.comparison.k_fold import KFold
from pyro_bdl.comparison.leave_one_out import CORRECTED, comparable, difference, withheld_notes
from pyro_bdl.comparison.metric import of_task
from pyro_bdl.comparison.program_sites import Subject, read_program, stated_num_data
from pyro_bdl.comparison.result import Comparison, is_known
from pyro_bdl.comparison.scores import TEST_DATA, few_draws, few_draws_note
from pyro_bdl.errors import UnusableDrawsError
from pyro_bdl.guides.draws import as_posterior
from pyro_bdl.program.batches import as_dicts, leading_size, taken
from pyro_bdl.program.check import by_entry
from pyro_bdl.samples import Samples
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.tables import Column
from pyro_bdl.utils.trees import tree_leaves
from pyro_bdl.utils.validation import check_finite_tensor

__all__ = ["CAPTIONS", "Comparison", "compare"]

# The largest number of test points at which all draws are kept, and of numbers kept in total.
_POINTS = 1000
_NUMBERS = 2**24

Row = dict[str, Any]


def compare(
    model: Callable,
    posteriors: Mapping[str, Any],
    *test: Any,
    reference: str | None = "nuts",
    train: tuple[Any, ...] | None = None,
    ood: Any = None,
    num_samples: int = 1000,
    batch_norm_data: Any = None,
    costs: Mapping[str, Costs] | None = None,
    left_out: Mapping[str, KFold] | None = None,
    target_scale: float = 1.0,
    target_shift: float = 0.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Score posteriors of a program on test data, and measure their distance to a reference.

    Distances are in function space, between draws at up to 1000 of the test inputs, each with its
    Monte Carlo error. The draws are of the site ``f``, or of the observation's mean if there is no
    such site, or of the class probabilities. The last row of the table compares two halves of the
    reference's draws: a smaller distance cannot be told from zero. The same seed gives the same
    table.

    If the program observes one joint distribution over all rows, NLPD is the joint one, divided by
    the number of rows. All other scores use each row's marginal distribution, and there is no
    leave-one-out. If also the mean of this distribution does not depend on the latents, as for a
    Gaussian process whose function is integrated out, distances are between draws of the target,
    and R-hat and ESS are those of its log density.

    :param model: a Pyro program, called with ``*test`` and, to predict, with None for the targets.
        The numbers of several observed sites are scored together, each given the data before it:
        see :mod:`pyro_bdl.comparison.several_sites`. Give them like units.
    :param posteriors: name to guide (Pyro's own guides too), ``Samples``, an ``MCMC`` of Pyro or
        NumPyro, a dict of draws, or ``PredictiveDraws`` if only predictions are known. At least one
        must not be ``PredictiveDraws``.
    :param test: the test inputs and, last, the targets, each ``(N, ...)``, or dicts of tensors. A
        program of targets alone gets these.
    :param reference: name of the posterior with which the others are compared; None for no
        reference.
    :param train: the inputs and, last, the targets that the posteriors were fitted to. They are
        used for leave-one-out, and to sort test inputs into near, between and beyond the training
        inputs.
    :param ood: out-of-distribution inputs, to score how well the uncertainty separates them from
        the test inputs.
    :param num_samples: draws of each guide, at least 2; of ``Samples`` all draws are used.
    :param batch_norm_data: the training data, ``(x, y)`` or an iterable of batches, for networks
        with BatchNorm: each draw gets its own running statistics, as in ``Predictive``. The linear
        model of a Laplace approximation keeps the network's statistics.
    :param costs: name to ``Costs``: time and memory of the fit, ELBO and evidence, if known.
    :param left_out: name to the result of ``k_fold``, which is shown in place of PSIS-LOO.
    :param target_scale: the target in its own units is ``y * target_scale + target_shift``; a
        regression is reported in its own units.
    :param target_shift: see ``target_scale``.
    :param seed: seed of the guides' draws and the noise of predictions.
    :param progress: show bars, in terminals and notebooks, for what takes longer than a second.
    :raises TypeError: for a value that is not a posterior, or data that are not tensors.
    :raises UnusableDrawsError: if draws of a posterior, or their predictions, are NaN or infinite;
        the error names the posterior and counts the draws.
    :raises ValueError: for no posterior, an unknown reference, no observed site, a posterior of
        another program (the error lists the sites that do not match), or data that do not fit or
        are not finite.
    """
    costs = costs or {}
    data = _data("test", test)
    posteriors = _recognized(model, posteriors, data)
    _check_posteriors(posteriors, reference)
    _check_costs(costs, posteriors)
    known = None if train is None else _training_data(train, data)
    elsewhere = None if ood is None else _other_inputs(ood, data)
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, got {num_samples}")
    if not (math.isfinite(target_scale) and target_scale > 0):
        raise ValueError(f"target_scale must be positive and finite, got {target_scale}")
    with seeded(seed):
        subject = _read(model, data, posteriors)
        known = _known(subject, known)
    if subject.several is not None and (ood is not None or (target_scale, target_shift) != (1, 0)):
        sites = ", ".join(map(repr, subject.several.kinds))
        raise ValueError(
            "ood, target_scale and target_shift are for programs that observe the last argument "
            f"at one site, and this one has the data of {sites}"
        )
    with seeded(seed):
        data = subject.data(data)
    kept = _kept_rows(posteriors, data, num_samples, subject.most_rows)
    units = Units(target_scale, target_shift)
    with seeded(seed):
        found = _evaluations(
            subject, posteriors, data,
            num_samples=num_samples, kept=kept, units=units, seed=seed, train=known, ood=elsewhere,
            batch_norm_data=batch_norm_data, left_out=left_out or {},
            progress=progress,
        )  # fmt: skip
        rows = [
            costs.get(name, Costs()).row(name, posteriors[name])
            | determined(posteriors[name])
            | dict(evaluation.scores)
            for name, evaluation in found.items()
        ]
    for row in rows:
        row |= efficiency(posteriors[row["posterior"]], row)
    floor_row = None
    if reference is not None:
        areas = {} if known is None else regions(data.part(kept).inputs, known.inputs)
        for row in shown(rows, "distances", progress):
            if row["posterior"] != reference:
                row |= _against(found[row["posterior"]], found[reference], areas)
        floor_row = {"posterior": f"{reference}, half to half"} | floor(found[reference])
    task = next(iter(found.values())).task
    few = few_draws(rows)
    by = "nlpd_normal" if few else "nlpd"
    ranking = judge(rows, found, reference=reference, points=data.rows, score=by)
    rows = ranking.ordered(rows)
    lines = (*rows, *([] if floor_row is None else [floor_row]))
    check_keys(task, lines)
    verdicts, warned = {}, []
    if reference is not None:
        base = next(row for row in rows if row["posterior"] == reference)
        verdicts[reference] = f"the reference: {verdict(reasons(base, base, data.rows))}"
        warned = doubts(reference, base)
    verdicts |= {row.posterior: verdict(row.reasons) for row in ranking.rows}
    y = data.y[kept]
    heading = f"{reference} (doubtful)" if warned else reference
    first, further = columns(task, heading), details(task, heading)
    if not few:  # then it says what NLPD says
        further = [*(c for c in first if c.key == "nlpd_normal"), *further]
        first = [c for c in first if c.key != "nlpd_normal"]
    return Comparison(
        task=task,
        reference=reference,
        rows=lines,
        columns=_filled(first, rows),
        details=_filled(further, rows),
        verdicts=verdicts,
        warnings=tuple(warned),
        ranking=ranking,
        notes=(*([few_draws_note(few)] if few else []), *withheld_notes(rows)),
        evaluations=found,
        inputs=data.part(kept).inputs,
        places=tuple(kept.tolist()),
        y=y * target_scale + target_shift if task == "regression" else y,
    )


# --------------------------------------------------------------------------------------- rows


def _evaluations(
    subject: Subject,
    posteriors: Mapping[str, Any],
    data: Test,
    *,
    kept: Tensor,
    units: Units,
    seed: int,
    left_out: Mapping[str, KFold],
    **options: Any,
) -> dict[str, Evaluation]:
    """Evaluations by name; each starts from the same seed, so that none depends on the others."""
    found = {}
    for name, posterior in posteriors.items():
        with seeded(seed):
            if isinstance(posterior, PredictiveDraws):
                found[name] = evaluate_draws(
                    name, subject.observation, posterior, data, kept=kept, units=units
                )
                continue
            try:
                found[name] = evaluate(
                    name, subject, posterior, data,
                    seed=seed, kept=kept, units=units, left_out=left_out.get(name), **options,
                )  # fmt: skip
            except UnusableDrawsError as error:
                raise UnusableDrawsError(f"posterior {name!r}: {error}", name) from None
    return found


def _against(evaluation: Evaluation, reference: Evaluation, areas: Mapping[str, Tensor]) -> Row:
    """The numbers that compare a posterior with the reference."""
    if evaluation.function.shape[1:] != reference.function.shape[1:]:
        raise ValueError(
            f"the posteriors' functions must have the shape of the reference's at each draw, "
            f"{tuple(reference.function.shape[1:])}, got {tuple(evaluation.function.shape[1:])}"
        )
    row: Row = dict(distances(evaluation, reference))
    for metric in of_task(TEST_DATA, evaluation.task):
        if metric.key in evaluation.points and metric.key in reference.points:
            key = f"{metric.key}_diff"
            row[key], row[f"{key}_se"] = evaluation.points[metric.key].difference(
                reference.points[metric.key]
            )
    sides = evaluation, reference
    known = all(is_known(side.scores.get("elpd_loo")) for side in sides)
    if known and all(side.loo_by != CORRECTED for side in sides):  # of the exact posterior
        own, other = evaluation.loo, reference.loo
        if own is not None and other is not None and comparable(own, other):
            row["elpd_diff"], row["elpd_diff_se"] = difference(own, other)
    return row | sd_ratios(evaluation, reference, areas)


def _filled(candidates: list[Column], rows: list[Row]) -> tuple[Column, ...]:
    return tuple(c for c in candidates if any(is_known(row.get(c.key)) for row in rows))


def _kept_rows(
    posteriors: Mapping[str, Any], test: Test, num_samples: int, most_rows: int | None
) -> Tensor:
    most = max(_number_of_draws(q, num_samples) for q in posteriors.values())
    count = min(test.rows, _POINTS, max(1, _NUMBERS // most), most_rows or test.rows)
    return (torch.arange(count, device=test.y.device) * test.rows) // count


def _number_of_draws(posterior: Any, num_samples: int) -> int:
    if isinstance(posterior, Samples):
        return posterior.num_chains * posterior.num_draws
    return len(posterior.function) if isinstance(posterior, PredictiveDraws) else num_samples


# ------------------------------------------------------------------------------------- checks


def _recognized(model: Callable, posteriors: Any, test: Test) -> dict[str, Any]:
    """The posteriors as guides, ``Samples`` or ``PredictiveDraws``."""
    if not isinstance(posteriors, Mapping):
        raise TypeError(
            f"posteriors must be a mapping from names to guides or Samples, got "
            f"{type(posteriors).__name__}"
        )
    rows = test.first(stated_num_data(model))
    found = {}
    for name, posterior in posteriors.items():
        if isinstance(posterior, PredictiveDraws):
            found[name] = posterior
            continue
        try:
            found[name] = as_posterior(posterior, model, rows.given())
        except (TypeError, ValueError) as error:
            raise type(error)(f"posterior {name!r}: {error}") from error
    return found


def _check_posteriors(
    posteriors: Mapping[str, Any],
    reference: str | None,
) -> None:
    if not posteriors:
        raise ValueError("posteriors is empty: give at least one guide or Samples by name")
    if all(isinstance(posterior, PredictiveDraws) for posterior in posteriors.values()):
        raise ValueError("give at least one guide or Samples besides the predictive draws")
    for name, posterior in posteriors.items():
        if isinstance(posterior, Samples) and posterior.num_chains * posterior.num_draws < 2:
            raise UnusableDrawsError(
                f"posterior {name!r} has one draw: at least 2 are needed", name
            )
    there = ", ".join(map(repr, posteriors))
    if reference is not None and reference not in posteriors:
        raise ValueError(
            f"reference {reference!r} is not among the posteriors ({there}); name one of them, or "
            f"say reference=None to compare without"
        )


def _check_costs(costs: Mapping[str, Costs], posteriors: Mapping[str, Any]) -> None:
    for name, value in costs.items():
        if name not in posteriors:
            there = ", ".join(map(repr, posteriors))
            raise ValueError(f"costs has {name!r}, which is not among the posteriors: {there}")
        if not isinstance(value, Costs):
            raise TypeError(f"costs[{name!r}] must be a Costs, got {type(value).__name__}")


def _data(kind: str, parts: tuple[Any, ...]) -> Test:
    if not parts:
        raise ValueError(f"give the {kind} inputs and, last, the {kind} targets")
    for place, part in enumerate(parts):
        _checked_tensors(f"y_{kind}" if place == len(parts) - 1 else f"x_{kind}", part)
    return Test(tuple(map(as_dicts, parts[:-1])), as_dicts(parts[-1]))


def _check_rows(kind: str, data: Test) -> None:
    """Check that all tensors of the data have the same number of rows."""
    tensors = [leaf for leaf in tree_leaves(data.given()) if isinstance(leaf, Tensor)]
    if len({len(tensor) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"x_{kind} and y_{kind} must have the same number of rows, got {shapes}")


def _read(model: Callable, data: Test, posteriors: Mapping[str, Any]) -> Subject:
    """The program; only of several observed sites the data may have different numbers of rows."""
    own = {k: q for k, q in posteriors.items() if not isinstance(q, PredictiveDraws)}
    try:
        subject = read_program(model, data, own)
    except (ValueError, RuntimeError, IndexError):
        _check_rows("test", data)
        raise
    if subject.several is None:
        _check_rows("test", data)
    return subject


def _known(subject: Subject, train: Test | None) -> Test | None:
    """The training data as the program uses them."""
    if train is None:
        return None
    if subject.several is None or subject.several.by_rows:
        _check_rows("train", train)
    return subject.data(train)


def _training_data(train: Any, test: Test) -> Test:
    if not isinstance(train, tuple | list):
        raise TypeError(
            f"train must be a tuple of the inputs and, last, the targets, got "
            f"{type(train).__name__}"
        )
    if len(train) != len(test.inputs) + 1:
        raise ValueError(
            f"train must hold the {len(test.inputs)} input tensors and, last, the targets, as the "
            f"test data do, got {len(train)} tensors"
        )
    return _data("train", tuple(train))


def _other_inputs(ood: Any, test: Test) -> tuple[Any, ...]:
    """Up to 1000 rows of the out-of-distribution inputs."""
    parts = (ood,) if isinstance(ood, Tensor | Mapping) else tuple(ood)
    tensors = [tensor for part in parts for tensor in _checked_tensors("ood", part)]
    if len(parts) != len(test.inputs) or len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(
            f"ood must hold {len(test.inputs)} input tensors of one length, as the test data "
            f"without targets, got {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"
        )
    rows = leading_size(tensors)
    count = min(rows, _POINTS)
    return taken(parts, (torch.arange(count, device=tensors[0].device) * rows) // count)


def _checked_tensors(name: str, part: Any) -> list[Tensor]:
    """The tensor that a part of the data is, or those in its dict."""
    entries = by_entry({name: part})
    for entry, tensor in entries.items():
        _check_tensor(entry, tensor)
    return list(entries.values())


def _check_tensor(name: str, part: Any) -> None:
    if part is None:
        raise TypeError(f"{name} is missing: give it as a tensor")
    if not isinstance(part, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(part).__name__}: pass torch.as_tensor(...)"
        )
    if part.dim() == 0 or not len(part):
        raise ValueError(f"{name} must have at least one row")
    check_finite_tensor(name, part)
