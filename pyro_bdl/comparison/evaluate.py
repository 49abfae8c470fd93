"""``evaluate``: the scores, function draws and diagnostics of one posterior on test data."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import diagnostics
from pyro_bdl.comparison.columns import with_error
from pyro_bdl.comparison.costs import COSTS, Costs, Mixing
from pyro_bdl.comparison.kind import without_targets
from pyro_bdl.comparison.leave_one_out import (
    LEFT_OUT,
    KFold,
    LeftOut,
    leave_one_out,
    of_state,
    state_of,
)
from pyro_bdl.comparison.metric import PointScores, mean_of_runs, measure
from pyro_bdl.comparison.networks import Members
from pyro_bdl.comparison.observe import Block, PredictiveDraws, check_draws, known_block, observe
from pyro_bdl.comparison.scores import SCORES, Score, separation
from pyro_bdl.comparison.setting import Setting, regions, spaced
from pyro_bdl.diagnostics.summary import listed_sites, names_of_numbers
from pyro_bdl.errors import UnsupportedProgramError, UnusableDrawsError, warn
from pyro_bdl.guides.draws import (
    DRAWS_AT_ONCE,
    as_posterior,
    check_program,
    evenly,
)
from pyro_bdl.metrics.calibration import coverage_range
from pyro_bdl.predictive.predictor import predictor
from pyro_bdl.program.batches import leading_size, select_rows
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.jackknife import halves
from pyro_bdl.utils.precision import double_device
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.tensor_file import load_tree, save_tree
from pyro_bdl.utils.trees import tree_map

MOST_NUMBERS = 2**24  # the largest number of numbers in the draws that are kept
_LEAST_FOR_RANGE = 40
_FILE = "Evaluation"
DRAWS = 1000  # of a guide, by default
NUMBERS_OF_ONE = (*SCORES, *COSTS, *LEFT_OUT)


@dataclass(frozen=True)
class Evaluation:
    """One posterior at the test inputs; numbers are in the target's units.

    :param task: ``"regression"`` or ``"classification"``.
    :param rows: the number of test points: rows of the test data of which some target was seen.
    :param places: the stored test points, at most 1000 and evenly spaced, among the rows of the
        test data, counted from 0.
    :param inputs: the stored test points.
    :param y: their targets; NaN where a number was not seen.
    :param regions: which of them are near, between and beyond the training inputs, bool ``(N,)``.
    :param chains: number of Markov chains, whose draws follow each other; 1 for a guide.
    :param function: ``(S, N, ...)``, draws of f or of the observation's mean, or of class
        probabilities, at the stored points.
    :param mean: ``(N, ...)``, the mean prediction, or the mean class probabilities, at all points.
    :param predictions: ``(S, N)``, draws of the target, including noise, at the stored points; None
        for classes.
    :param expected: ``(S, N, ...)``, E[y | draw] at the stored points; for regression.
    :param noise: ``(S, N, ...)``, Var[y | draw] at the stored points; for regression.
    :param pit: the probability integral transforms of all test targets; for regression. Where only
        some numbers of a target were seen, those of these, one after another.
    :param scores: the numbers that need no reference, by key.
    :param points: the scores that are means over all test points, or AUROCs, with their errors.
    :param loo: leave-one-out on the training data, if these are given, or cross-validation.
    :param seen: how many numbers of the test targets were seen, and how many there are; those that
        masks leave out of the likelihood count in no score.
    :param factors: the program's factors, which are likelihood that no score counts.
    :param observed_inputs: its observed sites of inputs, of which some may be missing; nor are they
        targets.
    :param latents: ``(S, K)``, draws of at most 1000 numbers of the named latents; None without.
    :param latent_names: their names, as "tau" or "theta[3]".
    :param at_points: those of them that a guide holds at one value in all draws.
    :param sensitivity: of chains, name of a named latent to its row of
        ``diagnostics.prior_sensitivity`` on the training data; of sites of at most 12 numbers.
    :param may_be_censored: whether some targets may be limits, which the log score alone
        can take.
    """

    task: str
    rows: int
    places: Tensor
    inputs: tuple[Any, ...]
    y: Tensor
    regions: Mapping[str, Tensor]
    chains: int
    function: Tensor
    mean: Tensor
    predictions: Tensor | None = None
    expected: Tensor | None = None
    noise: Tensor | None = None
    pit: Tensor | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    points: Mapping[str, PointScores] = field(default_factory=dict)
    loo: LeftOut | None = None
    seen: tuple[int, int] | None = None
    factors: tuple[str, ...] = ()
    observed_inputs: tuple[str, ...] = ()
    latents: Tensor | None = None
    latent_names: tuple[str, ...] = ()
    at_points: tuple[str, ...] = ()
    sensitivity: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    may_be_censored: bool = False

    def __repr__(self) -> str:
        """The scores with their errors; the draws would fill pages."""
        points = self.points.items()
        scores = (f"{key} {with_error(score.number, score.error)}" for key, score in points)
        return f"<Evaluation at {self.rows} test rows, {self.task}: {', '.join(scores)}>"

    @property
    def effective(self) -> float:
        """The number of effective draws: the median ESS of chains; NaN if it is unknown."""
        return float(self.scores.get("ess_median", len(self.function)))

    def halves(self) -> tuple["Evaluation", "Evaluation"]:
        """Two halves: half of the chains and the other half, or both ends of a single chain."""
        parts: dict[str, Any] = {
            name: halves(value, chains=self.chains)
            for name in ("function", "expected", "noise", "latents")
            if (value := getattr(self, name)) is not None
        }
        chains = (1, 1) if self.chains == 1 else (self.chains // 2, -(-self.chains // 2))
        scores = {**self.scores, "ess_median": self.effective / 2}
        first, second = (
            replace(
                self, chains=n, scores=scores, **{name: part[i] for name, part in parts.items()}
            )
            for i, n in enumerate(chains)
        )
        return first, second

    def to(self, device: torch.device | str) -> "Evaluation":
        """The same evaluation on another device."""
        moved: Any = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        inputs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self.inputs)
        regions = {name: mask.to(device) for name, mask in self.regions.items()}
        return replace(self, **moved, inputs=inputs, regions=regions)

    def save(self, path: str | Path) -> Path:
        """Write it to a file without code, which ``Evaluation.load`` reads; return the path."""
        state = dict(vars(self))
        state["points"] = {key: vars(value) for key, value in self.points.items()}
        if self.loo is not None:
            state["loo"] = state_of(self.loo)
        return save_tree(path, state, kind=_FILE)

    @classmethod
    def load(cls, path: str | Path) -> "Evaluation":
        """Read what ``save`` wrote, onto the CPU.

        :raises FileNotFoundError: if there is no such file.
        :raises ValueError: for another or a damaged file.
        """
        state = load_tree(path, kind=_FILE)
        state["points"] = {key: PointScores(**value) for key, value in state["points"].items()}
        if state["loo"] is not None:
            state["loo"] = of_state(state["loo"])
        return cls(**state)


def evaluate(
    model: Callable,
    posterior: Any,
    *test: Any,
    train: tuple[Any, ...] | None = None,
    ood: Any = None,
    num_samples: int = DRAWS,
    batch_norm_data: Any = None,
    costs: Costs | None = None,
    left_out: KFold | None = None,
    units: tuple[float, float] = (1.0, 0.0),
    observed: str | Collection[str] | None = None,
    latents: str | Collection[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Evaluation:
    """Score one posterior of a program on test data, with the draws that distances need.

    The arguments are those of :func:`pyro_bdl.compare`, for one posterior.

    :param costs: time and memory of the fit, ELBO and evidence, if known.
    :param left_out: the result of ``k_fold``, in place of PSIS-LOO.
    :raises TypeError: for a value that is not a posterior, or data that are not tensors.
    :raises UnusableDrawsError: if draws, or their predictions, are NaN or infinite, or if there is
        only one.
    :raises ValueError: for no observed site, a posterior of another program (the error lists the
        sites that do not match), or data that do not fit or are not finite.
    """
    setting = Setting.read(
        model, posterior, test=test, train=train, ood=ood, units=units, num_samples=num_samples,
        batch_norm_data=batch_norm_data, sites=observed, latents=latents, seed=seed,
        progress=progress,
    )  # fmt: skip
    return evaluate_in(setting, posterior, costs or Costs(), left_out)


def evaluate_in(
    setting: Setting, posterior: Any, costs: Costs, left_out: KFold | None
) -> Evaluation:
    """``evaluate`` in a setting that is read; it starts from the seed, whatever came before."""
    if left_out is not None and setting.train is not None:
        left_out.check_data(setting.train)
    with seeded(setting.seed), torch.no_grad():
        if isinstance(posterior, PredictiveDraws):
            block, chains = known_block(setting.kind, posterior, setting.y), posterior.chains
            block = replace(block, bounds=setting.bounds).counted(setting.seen)
            evaluation, inputs, *_ = _scored(setting, [block], chains)
            if chains > 1:
                inputs["mixing"] = (Mixing.of(evaluation.function, chains),)
        else:
            drawn = _Draws(setting, posterior)
            evaluation, inputs = drawn.evaluation()
            posterior = drawn.posterior
            if setting.train is not None and (found := drawn.sensitivity(setting.train)):
                evaluation = replace(evaluation, sensitivity=found)
                known = [item for item in found.items() if math.isfinite(item[1]["prior"])]
                if known:
                    inputs["sensitivity"] = max(known, key=lambda item: item[1]["prior"])
            if left_out is None and setting.train is not None:
                inputs |= drawn.left_out(setting.train)
        if left_out is not None:
            inputs["loo"] = left_out, ""
        inputs |= costs.inputs(posterior, *inputs.get("mixing", ()))
        scores = measure(NUMBERS_OF_ONE, evaluation.task, inputs)
    draws = replace(evaluation, scores=scores).effective
    points = {key: score.with_effective(draws) for key, score in evaluation.points.items()}
    loo = inputs.get("loo", (None,))[0]
    return replace(evaluation, scores=scores | _numbers(points), points=points, loo=loo)


def _numbers(points: Mapping[str, PointScores]) -> dict[str, float]:
    numbers = {key: score.number for key, score in points.items()}
    return numbers | {f"{key}_se": score.error for key, score in points.items()}


def of_runs(runs: Sequence[Evaluation]) -> Evaluation:
    """Runs of one method as one evaluation: the first, with scores that are means over the runs,
    whose differences are in the errors."""
    first = runs[0]
    if len(runs) == 1:
        return first
    keys = [key for key in first.points if all(key in run.points for run in runs)]
    points = {key: PointScores.of_runs([run.points[key] for run in runs]) for key in keys}
    scores = mean_of_runs([run.scores for run in runs]) | _numbers(points)
    return replace(first, scores={**scores, "runs": len(runs)}, points=points)


class _Draws:
    """Draws of a posterior, made once, so that all numbers are about the same ones."""

    def __init__(self, setting: Setting, posterior: Any) -> None:
        kind, args, model = setting.kind, setting.test, setting.model
        rows = args if kind.most_rows is None else select_rows(args, slice(0, kind.most_rows))
        started = time.perf_counter()
        self.setting, self.chains, self.are_draws = setting, 1, not isinstance(posterior, Members)
        if isinstance(posterior, Members):
            self.posterior: Any = posterior
            self.count = len(posterior.members)
            self.predictive: Any = posterior.predictor(without_targets(args), setting.seed)
            self.seconds = time.perf_counter() - started
            return
        self.posterior = as_posterior(posterior, model, rows)
        self.predictive = predictor(
            model, self.posterior, evenly(self.posterior, setting.num_samples),
            args=without_targets(args),
            seed=setting.seed, unknown=kind.unknown, batch_norm_data=setting.batch_norm_data,
            latents=kind.latents,
        )  # fmt: skip
        check_program(model, self.posterior)
        self.seconds = time.perf_counter() - started
        self.count = setting.num_samples
        if (samples := self.predictive.samples) is not None:
            for site, values in samples.flat().items():
                check_draws(f"values of the site {site!r}", _not_finite(values))
            self.count, self.chains = samples.num_chains * samples.num_draws, samples.num_chains
        if self.count < 2:
            raise UnusableDrawsError("it has one draw: at least 2 are needed")

    def evaluation(self) -> tuple[Evaluation, dict[str, tuple]]:
        """The evaluation without its numbers but the points', and the inputs of metrics."""
        data, chains = self.setting, self.chains
        evaluation, inputs, here, density = _scored(
            data, self._blocks(), chains, are_draws=self.are_draws
        )
        evaluation = replace(evaluation, **self._named())
        inputs["drawing"] = self.seconds, self.count
        if data.ood is not None:
            there = observe(self.predictive, data.kind, data.ood, None)
            there = there.on(double_device(there.mean.device))
            there = there.in_units(*data.units, is_log=data.kind.is_log)
            every_row = torch.arange(there.rows, device=there.mean.device)
            there = there.at(every_row, chains, len(here.mean))  # the draws that are kept of here
            points = separation(here, there, data.kind.task, are_draws=self.are_draws)
            evaluation = replace(evaluation, points={**evaluation.points, **points})
        if isinstance(self.posterior, Samples):
            # noisy draws of the target always seem to mix
            function = (
                density if data.kind.fixed_mean and density is not None else evaluation.function
            )
            inputs["mixing"] = (Mixing.of(function, chains),)
        return evaluation, inputs

    def _named(self) -> dict[str, Any]:
        """The fields of an evaluation on named latents.

        Chains draw all of them: what does not move there has not mixed.
        """
        predictive, chosen = self.predictive, self.setting.latents
        if not chosen:
            return {}
        samples = predictive.samples
        values = predictive.latents() if samples is None else samples.flat()
        numbers, names = [], []
        for site in chosen:
            numbers.append(values[site].reshape(len(values[site]), -1))
            names += names_of_numbers(site, values[site].shape[1:])
        places = spaced(len(names))
        kept = torch.cat(numbers, 1)[:, places.to(numbers[0].device)]
        named = tuple(names[place] for place in places.tolist())
        fixed = (kept == kept[0]).all(0).tolist()
        held = () if isinstance(self.posterior, Samples) else compress(named, fixed)
        return {"latents": kept, "latent_names": named, "at_points": tuple(held)}

    def _blocks(self) -> Iterator[Block]:
        data = self.setting
        width = data.y[0].numel()
        if data.kind.task == "classification" and not data.y.is_floating_point():
            width *= int(data.y.max()) + 1  # each label has a probability for every class
        batches = data.kind.batches(data.test, self.count, width)
        for args, rows in progress_bar(batches, "scores", data.progress):
            seen = None if data.seen is None else data.seen.at(rows)
            if seen is not None and not seen.numbers.any():
                continue
            started = time.perf_counter()
            ends = None if data.bounds is None else data.bounds[:, rows]
            try:
                block = observe(self.predictive, data.kind, args, data.y[rows], seen, ends)
            except RuntimeError as error:
                if len(batches) == 1 or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise UnsupportedProgramError(
                    f"the program does not run on {leading_size(args)} of its {len(data.y)} test "
                    f'rows ({error}): if its rows need each other, say model.rows = "together"'
                ) from error
            self.seconds += time.perf_counter() - started
            yield block

    def sensitivity(self, train: tuple) -> dict[str, dict[str, Any]]:
        """``prior_sensitivity`` of named latents, by name; none of guides and of chains that walk
        by minibatches, whose draws are not weighted by the program's density."""
        samples = self.posterior
        exact = isinstance(samples, Samples) and "batch_size" not in samples.info
        if not exact or samples.num_draws < 4:  # the least of a diagnostic
            return {}
        sites = [s for s in listed_sites(samples.latents, None) if s in self.setting.latents]
        if not sites:
            return {}
        table = diagnostics.prior_sensitivity(self.setting.model, samples, *train, sites=sites)
        return {str(name): row for name, row in table.to_dict("index").items()}

    def left_out(self, train: tuple) -> dict[str, tuple]:
        """Leave-one-out on the training data as an input of metrics; empty where there is none."""
        data = self.setting
        if data.kind.no_single:
            words = f"{data.kind.no_single}: no datum can be left out, and there is no elpd"
            warn(words, "data-depend")
            return {}
        loo, by = leave_one_out(
            data.model, data.kind, self.posterior, self.predictive, train, progress=data.progress
        )
        return {"loo": (loo, by)} if by else {}


def _not_finite(draws: Tensor) -> Tensor:
    """Whether a draw ``(S, ...)`` has a number that is not finite, bool ``(S, 1)``; for a few draws
    at a time, since all may take much memory."""
    most = max(1, DRAWS_AT_ONCE // max(1, draws[0].numel()))
    parts = [~part.isfinite().reshape(len(part), -1).all(1) for part in draws.split(most)]
    return torch.cat(parts)[:, None]


def _scored(
    data: Setting, blocks: Iterable[Block], chains: int, *, are_draws: bool = True
) -> tuple[Evaluation, dict[str, tuple], Block, Tensor | None]:
    """The scores of all rows of which something was seen, with the draws at some of them, the
    inputs of the other metrics, the predictions at the stored points, and the last batch's
    density."""
    kind, rows, (scale, shift) = data.kind, len(data.y), data.units
    score, chosen_blocks, density, start = Score(kind, are_draws=are_draws), [], None, 0
    seen_rows = torch.arange(rows, device="cpu")
    if data.seen is not None:
        seen_rows = data.seen.of_rows().cpu().nonzero().flatten()
        rows = len(seen_rows)
    places = spaced(rows)
    for block in blocks:
        block = block.on(double_device(block.mean.device))
        block = block.in_units(scale, shift, is_log=kind.is_log)
        score.add(block)
        density = block.log_density
        inside = places[(places >= start) & (places < start + block.rows)] - start
        if len(inside):
            inside = inside.to(block.mean.device)
            most = MOST_NUMBERS // (len(places) * (block.mean[0].numel() // block.rows))
            chosen_blocks.append(block.at(inside, chains, max(most, 2 * chains)))
        start += block.rows
    places = seen_rows[places]
    block, chosen = Block.joined(chosen_blocks), places.to(data.y.device)
    x = select_rows(data.test[:-1], chosen) if kind.by_rows and len(data.test) > 1 else ()
    y, points, whole = data.y[chosen], score.points(), score.whole()
    if data.seen is not None and kind.task == "regression" and not kind.mixed:
        unseen = ~data.seen.numbers.to(y.device).reshape(data.y.shape)[chosen]
        y = y.masked_fill(unseen, torch.nan) if unseen.any() else y
    evaluation = Evaluation(
        task=kind.task,
        rows=rows,
        places=places,
        inputs=x,
        y=y * scale + shift if kind.task == "regression" else y,
        regions=regions(x, data.train[:-1]) if data.train and x else {},
        chains=chains,
        function=block.function,
        mean=whole["mean"],
        predictions=block.draws,
        expected=None if block.noise is None else block.mean,
        noise=block.noise,
        pit=score.of_seen().get("transforms"),
        points=points,
        seen=None if data.seen is None else data.seen.numbers_seen(),
        factors=kind.factors,
        observed_inputs=kind.inputs,
        may_be_censored=kind.may_be_censored,
    )
    inputs = score.inputs()
    if block.draws is not None and len(block.draws) >= _LEAST_FOR_RANGE:
        draws = block.draws if block.seen is None else block.draws[:, block.seen]
        inputs["coverage range"] = tuple(coverage_range(draws).tolist())
    return evaluation, inputs, block, density
