"""``compare``: posteriors of one program side by side, and how far each is from a reference."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from pyro_bdl import metrics, plots
from pyro_bdl.checks import check_finite_tensor
from pyro_bdl.columns import columns
from pyro_bdl.evaluation import Evaluation, Test, Units, class_labels, evaluate
from pyro_bdl.samples import Samples
from pyro_bdl.table import Column, groups, to_csv, to_text
from pyro_bdl.verdicts import verdict

# Test points at which whole sets of draws are kept, and numbers that these may be in all.
_POINTS = 1000
_NUMBERS = 2**24


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; print it for the table and the verdicts.

    :param task: ``"regression"`` or ``"classification"``.
    :param reference: name of the reference, or None.
    :param rows: a dict for each posterior, and a last one for the reference's two halves against
        each other, the floor of the distances.
    :param columns: what the rows hold, with a sentence on each.
    :param verdicts: posterior to one sentence computed from its row.
    :param evaluations: posterior to its draws at the test points that were kept.
    :param inputs: these test points.
    :param y: their targets, those of a regression in their own units.
    """

    task: str
    reference: str | None
    rows: tuple[dict[str, Any], ...]
    columns: tuple[Column, ...]
    verdicts: Mapping[str, str]
    evaluations: Mapping[str, Evaluation] = field(repr=False)
    inputs: tuple[Tensor, ...] = field(repr=False)
    y: Tensor = field(repr=False)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Table and verdicts, groups of columns below each other where they are wider than
        ``width`` characters."""
        longest = max(map(len, self.verdicts))
        said = [f"{name.ljust(longest)}  {text}" for name, text in self.verdicts.items()]
        blocks = [to_text(self.rows, block) for block in self._blocks(width)]
        return "\n\n".join([*blocks, "\n".join(said)])

    def _blocks(self, width: int | None) -> list[list[Column]]:
        name, rest = self.columns[0], list(self.columns[1:])
        blocks = [[name]]
        for _, count in groups(rest):
            group, rest = rest[:count], rest[count:]
            lines = to_text(self.rows, [*blocks[-1], *group]).splitlines()
            if width is None or len(blocks[-1]) == 1 or max(map(len, lines)) <= width:
                blocks[-1] += group
            else:
                blocks.append([name, *group])
        return blocks

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows, numbers unrounded, with the verdicts; returns the path."""
        rows = [{**row, "verdict": self.verdicts.get(row["posterior"])} for row in self.rows]
        return to_csv(path, rows, [*self.columns, Column("verdict", "verdict", style="text")])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows and verdicts by posterior, in types that JSON knows; None for no number."""
        return {
            row["posterior"]: {
                key: value if _is_known(value) else None
                for key, value in row.items()
                if key != "posterior"
            }
            | {"verdict": self.verdicts.get(row["posterior"])}
            for row in self.rows
        }

    def figures(self, *, target: str = "target", units: str = "") -> dict[str, Figure]:
        """Pictures of the comparison, by a name that suits a file; see :data:`CAPTIONS`.

        :param target: what the target is, for labels.
        :param units: of the target, for labels.
        """
        found: dict[str, Figure] = {}
        functions = {name: said.function for name, said in self.evaluations.items()}
        x = self.inputs[0]
        if self.task == "regression":
            if x[0].numel() == 1 and next(iter(functions.values())).dim() == 2:
                found["bands"] = plots.predictive_bands(
                    x.reshape(-1), functions, reference=self.reference, ylabel=target
                )
            drawn: dict[str, Any] = {
                name: said.predictions for name, said in self.evaluations.items()
            }
            y = self.y.reshape(next(iter(drawn.values())).shape[1:])
        else:
            drawn = {name: said.function.mean(0) for name, said in self.evaluations.items()}
            y = class_labels(self.y, next(iter(drawn.values())))
        found["calibration"] = plots.calibration(drawn, y, task=self.task, reference=self.reference)
        if self.reference is None or len(functions) < 2:
            return found
        quantity = "prediction"
        if self.task == "classification":
            quantity = "class probabilities"
            if functions[self.reference].shape[-1] == 2:  # the other class mirrors this one
                functions = {name: draws[..., 1] for name, draws in functions.items()}
        found |= self._cost(units)
        found["function_space"] = plots.function_space(
            functions, reference=self.reference, quantity=quantity, units=units
        )
        return found

    def _cost(self, units: str) -> dict[str, Figure]:
        key = "wasserstein" if self.task == "regression" else "total_variation"
        *rows, floor = self.rows
        known = [row for row in rows if _is_known(row.get("seconds"))]
        others = [row for row in known if row["posterior"] != self.reference]
        if not others:
            return {}
        figure = plots.cost_against_quality(
            {row["posterior"]: row["seconds"] for row in known},
            {row["posterior"]: row[key] for row in others},
            reference=self.reference,
            floor=floor.get(key),
            units=units if self.task == "regression" else "total variation",
        )
        return {"cost": figure}


CAPTIONS = {
    "bands": "Mean and 90 % interval of the function along the feature.",
    "calibration": "Calibration on the test data: below the diagonal, a posterior is "
    "overconfident.",
    "function_space": "Mean and sd at each test point: on the diagonal, a posterior agrees with "
    "the reference.",
    "cost": "Time to fit against the distance to the reference. The dashed line is the distance "
    "between two halves of the reference's own draws.",
}


def compare(
    model: Callable,
    posteriors: Mapping[str, Any],
    *test: Tensor,
    reference: str | None = "nuts",
    num_samples: int = 1000,
    seconds: Mapping[str, float] | None = None,
    elbos: Mapping[str, float | None] | None = None,
    log_evidences: Mapping[str, float | None] | None = None,
    target_scale: float = 1.0,
    target_shift: float = 0.0,
    seed: int = 0,
) -> Comparison:
    """Score posteriors of a program on test data, and measure their distance to a reference.

    Distances are in function space: between the draws of the site ``f`` (or of the observation's
    mean where there is none, or of the class probabilities) at up to 1000 of the test inputs.
    The same seed gives the same table.

    :param model: a Pyro program with one observed site, called with ``*test`` and, to predict, with
        None for the targets.
    :param posteriors: name to guide or ``Samples``; Pyro's own guides too.
    :param test: the test inputs and, last, the targets, each ``(N, ...)``.
    :param reference: the posterior that the others are held against; None for none.
    :param num_samples: draws of each guide, at least 2; of ``Samples`` all are taken.
    :param seconds: training time by name, where known; that of ``Samples`` is.
    :param elbos: ELBO at temperature 1 by name, where known.
    :param log_evidences: log marginal likelihood by name, where known.
    :param target_scale: the target in its own units is ``y * target_scale + target_shift``; a
        regression is reported in these.
    :param target_shift: see ``target_scale``.
    :param seed: of the guides' draws and the noise of predictions.
    :raises TypeError: for a posterior that is neither a guide nor ``Samples``, test data that are
        not tensors.
    :raises ValueError: for no posterior, an unknown reference, several observed sites, a posterior
        of another program, test data that do not fit or are not finite.
    """
    given = {"seconds": seconds, "elbos": elbos, "log_evidences": log_evidences}
    _check_posteriors(posteriors, reference, {k: v or {} for k, v in given.items()})
    data = _test_data(test)
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, got {num_samples}")
    if not (math.isfinite(target_scale) and target_scale > 0):
        raise ValueError(f"target_scale must be positive and finite, got {target_scale}")
    kept = _kept_rows(posteriors, data, num_samples)
    units = Units(target_scale, target_shift)
    evaluations = {}
    with torch.random.fork_rng(devices=[data.y.device] if data.y.is_cuda else []):
        for name, posterior in posteriors.items():
            torch.manual_seed(seed)
            evaluations[name] = evaluate(
                name, model, posterior, data, num_samples=num_samples, kept=kept, units=units
            )
    task = next(iter(evaluations.values())).task
    times = _sampling_times(posteriors) | dict(seconds or {})
    rows: list[dict[str, Any]] = []
    for name, said in evaluations.items():
        row = {"posterior": name, "seconds": times.get(name), "elbo": (elbos or {}).get(name)}
        row["log_evidence"] = (log_evidences or {}).get(name)
        row |= said.scores
        if reference is not None and name != reference:
            row |= _distances(task, said.function, evaluations[reference].function)
        rows.append(row)
    floor = None if reference is None else _floor(task, reference, evaluations[reference])
    verdicts = {
        row["posterior"]: verdict(row, reference=reference, floor=floor, points=data.rows)
        for row in rows
    }
    rows += [] if floor is None else [floor]
    y = data.y[kept]
    return Comparison(
        task=task,
        reference=reference,
        rows=tuple(rows),
        columns=tuple(
            column
            for column in columns(task, reference)
            if any(_is_known(row.get(column.key)) for row in rows)
        ),
        verdicts=verdicts,
        evaluations=evaluations,
        inputs=tuple(x[kept] for x in data.inputs),
        y=y * target_scale + target_shift if task == "regression" else y,
    )


# --------------------------------------------------------------------------------------- rows


def _distances(task: str, draws: Tensor, reference: Tensor) -> dict[str, float]:
    """How far two sets of draws (S, N, ...) of a function are from each other.

    ``mean_shift`` is the difference of the means in sds of the reference.
    """
    ours, theirs = _sd(draws), _sd(reference)
    found = {
        "mean_error": metrics.mean_error(draws, reference),
        "sd_error": metrics.sd_error(draws, reference),
        "wasserstein": metrics.wasserstein1(draws, reference),
        "sd_ratio": ours.mean() / theirs.mean(),
    }
    found["mean_shift"] = found["mean_error"] / theirs.square().mean().sqrt()
    if task == "classification":
        found["agreement"] = metrics.agreement(draws, reference)
        found["total_variation"] = metrics.total_variation(draws, reference)
    return {key: value.item() for key, value in found.items()}


def _sd(draws: Tensor) -> Tensor:
    """The sd at each test point, zero where it is no more than rounding."""
    sd = (draws - draws[0]).double().std(0, correction=0)
    rounding = 4 * torch.finfo(draws.dtype).eps * draws.abs().max()
    return torch.where(sd > rounding, sd, 0.0)


def _floor(task: str, reference: str, said: Evaluation) -> dict[str, Any]:
    """The distances between two halves of the reference's own draws."""
    row: dict[str, Any] = {"posterior": f"{reference}, half to half"}
    if len(said.function) >= 2:
        first, second = metrics.halves(said.function, chains=said.chains)
        row |= _distances(task, first, second)
    return row


def _kept_rows(posteriors: Mapping[str, Any], test: Test, num_samples: int) -> Tensor:
    most = max(
        q.num_chains * q.num_draws if isinstance(q, Samples) else num_samples
        for q in posteriors.values()
    )
    count = min(test.rows, _POINTS, max(1, _NUMBERS // most))
    return (torch.arange(count, device=test.y.device) * test.rows) // count


def _sampling_times(posteriors: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: posterior.info["seconds"]
        for name, posterior in posteriors.items()
        if isinstance(posterior, Samples) and "seconds" in posterior.info
    }


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


# ------------------------------------------------------------------------------------- checks


def _check_posteriors(
    posteriors: Mapping[str, Any],
    reference: str | None,
    given: Mapping[str, Mapping[str, Any]],
) -> None:
    if not isinstance(posteriors, Mapping):
        raise TypeError(
            f"posteriors must be a mapping from names to guides or Samples, got "
            f"{type(posteriors).__name__}"
        )
    if not posteriors:
        raise ValueError("posteriors is empty: give at least one guide or Samples by name")
    there = ", ".join(map(repr, posteriors))
    if reference is not None and reference not in posteriors:
        raise ValueError(
            f"reference {reference!r} is not among the posteriors ({there}); name one of them, or "
            f"say reference=None to compare without"
        )
    for argument, values in given.items():
        unknown = [name for name in values if name not in posteriors]
        if unknown:
            raise ValueError(
                f"{argument} has {unknown[0]!r}, which is not among the posteriors: {there}"
            )


def _test_data(test: tuple[Tensor, ...]) -> Test:
    if len(test) < 2:
        raise ValueError("give the test inputs and, last, the test targets")
    for place, part in enumerate(test):
        name = "y_test" if place == len(test) - 1 else "x_test"
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(part).__name__}")
        if part.dim() == 0 or not len(part):
            raise ValueError(f"{name} must have at least one row")
        check_finite_tensor(name, part)
    if len({len(part) for part in test}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in test)
        raise ValueError(f"x_test and y_test must have the same number of rows, got {shapes}")
    return Test(tuple(test[:-1]), test[-1])
