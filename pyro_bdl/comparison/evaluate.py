"""``evaluate``: the scores, function draws and diagnostics of one posterior on test data."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import metrics
from pyro_bdl.comparison import leave_one_out
from pyro_bdl.comparison.convergence import convergence, divergences, efficiency
from pyro_bdl.comparison.costs import Costs, determined
from pyro_bdl.comparison.data import check_rows, checked, thinned
from pyro_bdl.comparison.k_fold import KFold
from pyro_bdl.comparison.kind import Kind, read_kind, stated_num_data, without_targets
from pyro_bdl.comparison.leave_one_out import LeftOut
from pyro_bdl.comparison.metric import PointScores, measure
from pyro_bdl.comparison.observe import Block, check_draws, known_block, observe
from pyro_bdl.comparison.predictive_draws import PredictiveDraws
from pyro_bdl.comparison.regions import regions
from pyro_bdl.comparison.scores import SCORES, Score
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides.draws import as_posterior, samples_of_program, to_samples
from pyro_bdl.predictive.linearized import UNKNOWN, LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.batches import leading_size, taken
from pyro_bdl.samples import Samples
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.tensor_file import load_tree, save_tree
from pyro_bdl.utils.trees import tree_map

# The largest number of test points at which draws are kept, and of numbers kept in total.
_POINTS = 1000
_NUMBERS = 2**24
_LEAST_FOR_RANGE = 40
_OF_WEIGHTS = 2**20  # sets the seed of a linear model's weights apart from that of the noise
_FILE = "Evaluation"


@dataclass(frozen=True)
class Evaluation:
    """One posterior at the test inputs; numbers are in the target's units.

    :param task: ``"regression"`` or ``"classification"``.
    :param rows: the number of test points.
    :param places: the kept test points among them, counted from 0.
    :param inputs: the kept test points.
    :param y: their targets.
    :param regions: which of them are near, between and beyond the training inputs, bool ``(N,)``.
    :param chains: number of Markov chains, whose draws follow each other; 1 for a guide.
    :param function: ``(S, N, ...)``, draws of f or of the observation's mean, or of class
        probabilities, at the kept points.
    :param mean: ``(N, ...)``, the mean prediction, or the mean class probabilities, at all points.
    :param predictions: ``(S, N)``, draws of the target, including noise, at the kept points; None
        for classes.
    :param expected: ``(S, N, ...)``, E[y | draw] at the kept points; for regression.
    :param noise: ``(S, N, ...)``, Var[y | draw] at the kept points; for regression.
    :param pit: the probability integral transforms of all test targets; for regression.
    :param scores: the numbers that need no reference, by key.
    :param points: the scores that are means over all test points, with their errors.
    :param loo: leave-one-out on the training data, if these are given, or cross-validation.
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

    @property
    def effective(self) -> float:
        """The number of effective draws: the median ESS of chains; NaN if it is unknown."""
        return float(self.scores.get("ess_median", len(self.function)))

    def uncertainty(self) -> metrics.Uncertainty | None:
        """Aleatoric and epistemic entropy or variance at the kept points."""
        if self.task == "classification":
            return metrics.entropy_parts(self.function)
        if self.expected is None or self.noise is None:
            return None
        return metrics.variance_parts(self.expected, self.noise)

    def halves(self) -> tuple["Evaluation", "Evaluation"]:
        """Two halves: half of the chains and the other half, or both ends of a single chain."""
        parts: dict[str, Any] = {
            name: metrics.halves(value, chains=self.chains)
            for name in ("function", "expected", "noise")
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
            state["loo"] = leave_one_out.state_of(self.loo)
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
            state["loo"] = leave_one_out.of_state(state["loo"])
        return cls(**state)


def evaluate(
    model: Callable,
    posterior: Any,
    *test: Any,
    train: tuple[Any, ...] | None = None,
    ood: Any = None,
    num_samples: int = 1000,
    batch_norm_data: Any = None,
    costs: Costs | None = None,
    left_out: KFold | None = None,
    units: tuple[float, float] = (1.0, 0.0),
    seed: int = 0,
    progress: bool | None = None,
) -> Evaluation:
    """Score one posterior of a program on test data, with the draws that distances need.

    The arguments are those of :func:`pyro_bdl.compare`, for one posterior.

    :param costs: time and memory of the fit, ELBO and evidence, if known.
    :param left_out: the result of ``k_fold``, in place of PSIS-LOO.
    :raises TypeError: for a value that is not a posterior, or data that are not tensors.
    :raises UnusableDrawsError: if draws, or their predictions, are NaN or infinite.
    :raises ValueError: for no observed site, a posterior of another program (the error lists the
        sites that do not match), or data that do not fit or are not finite.
    """
    setting = Setting.of(
        model, test, posterior, train=train, ood=ood, num_samples=num_samples,
        batch_norm_data=batch_norm_data, units=units, seed=seed, progress=progress,
    )  # fmt: skip
    return setting.evaluate(posterior, costs or Costs(), left_out)


@dataclass(frozen=True)
class Setting:
    """The program, the data and the options that posteriors are evaluated with.

    :param kind: what the program observes.
    :param test: the program's arguments.
    :param y: the numbers that it observes.
    :param ood: out-of-distribution inputs as the program's arguments.
    """

    model: Callable
    kind: Kind
    test: tuple
    y: Tensor
    train: tuple | None
    ood: tuple | None
    num_samples: int
    batch_norm_data: Any
    units: tuple[float, float]
    seed: int
    progress: bool | None

    @classmethod
    def of(
        cls, model: Callable, test: tuple, posterior: Any, *, train: Any, ood: Any,
        num_samples: int, units: tuple[float, float], seed: int, **options: Any,
    ) -> "Setting":  # fmt: skip
        """Check the data and read the program.

        :param posterior: one that gives values to latents with an improper prior.
        """
        args = checked("test", test)
        known = None if train is None else checked("train", train, count=len(args))
        elsewhere = None
        if ood is not None:
            ood = (ood,) if isinstance(ood, Tensor | Mapping) else ood
            elsewhere = thinned(checked("ood", ood, count=len(args) - 1), _POINTS)
        if num_samples < 2:
            raise ValueError(f"num_samples must be at least 2, got {num_samples}")
        if not (all(map(math.isfinite, units)) and units[0] > 0):
            raise ValueError(f"units must be (scale, shift) with a positive scale, got {units}")
        with seeded(seed):
            try:
                kind = read_kind(model, args, posterior)
            except (ValueError, RuntimeError, IndexError):
                check_rows("test", args)
                raise
            if kind.is_last:  # only of several sites there may be different numbers of rows
                check_rows("test", args)
            if not kind.is_last and (ood is not None or tuple(units) != (1, 0)):
                raise ValueError(
                    "ood and units are for programs that observe the last argument at one site, "
                    f"and this one has the data of {', '.join(map(repr, kind.sites))}"
                )
            if known is not None and kind.by_rows:
                check_rows("train", known)
            y = kind.targets(model, args, posterior)
        if elsewhere is not None:
            count = leading_size(elsewhere) if kind.needs_targets else None
            last = None if count is None else y[:1].expand(count, *y.shape[1:])
            elsewhere = (*elsewhere, last)
        return cls(
            model, kind, args, y, known, elsewhere, num_samples, units=units, seed=seed, **options
        )

    def recognized(self, posterior: Any) -> Any:
        """A guide, ``Samples`` or ``PredictiveDraws`` from any object that is a posterior."""
        if isinstance(posterior, PredictiveDraws):
            return posterior
        size = stated_num_data(self.model)
        rows = self.test if size is None else taken(self.test, slice(0, size))
        return as_posterior(posterior, self.model, rows)

    def evaluate(self, posterior: Any, costs: Costs, left_out: KFold | None) -> Evaluation:
        """The evaluation of one posterior; it starts from the seed, whatever came before."""
        with seeded(self.seed), torch.no_grad():
            posterior = self.recognized(posterior)
            if isinstance(posterior, PredictiveDraws):
                found = self._of_known(posterior)
            else:
                found = self._of_posterior(posterior, left_out)
        scores = costs.scores(posterior) | determined(posterior) | dict(found.scores)
        if left_out is not None:
            found = replace(found, loo=left_out)
            scores |= leave_one_out.scores_of(left_out, "")
        return replace(found, scores=scores | efficiency(posterior, scores))

    def _of_known(self, known: PredictiveDraws) -> Evaluation:
        if known.function.shape[1] != len(self.y):
            raise ValueError(
                f"it holds predictions at {known.function.shape[1]} points, but there are "
                f"{len(self.y)} test inputs"
            )
        found, _ = self._scored([known_block(self.kind, known, self.y)], known.chains)
        scores = dict(found.scores)
        if known.chains > 1:
            scores |= convergence(found.function, known.chains)
        return replace(found, scores=scores)

    def _of_posterior(self, posterior: Any, left_out: KFold | None) -> Evaluation:
        kind, model = self.kind, self.model
        linear = is_linear(posterior)  # a Gauss-Newton posterior belongs to the linear model
        if linear and not kind.linear:
            said_of = UNKNOWN.format(
                kind=" and ".join(sorted(set(kind.sites.values()))), posterior="the posterior"
            )
            warnings.warn(said_of, BdlWarning, stacklevel=3)
            linear = False
        started = time.perf_counter()
        samples = self._draws(posterior, 1 if linear else self.num_samples)
        seconds = time.perf_counter() - started
        for site, values in samples.flat().items():
            check_draws(f"values of the site {site!r}", ~values.isfinite())
        predictive: Any
        if linear:
            seed, count = self.seed + _OF_WEIGHTS, self.num_samples
            predictive = LinearizedPredictive(model, posterior, count, seed=seed)
        else:
            predictive = Predictive(model, samples, batch_norm_data=self.batch_norm_data)
            count = samples.num_chains * samples.num_draws
        batches = shown(kind.batches(self.test, self.y, count), "scores", self.progress)

        def blocks() -> Iterator[Block]:
            nonlocal seconds
            for batch in batches:
                started = time.perf_counter()
                block = observe(predictive, kind, *batch)
                seconds += time.perf_counter() - started
                yield block

        found, joint = self._scored(blocks(), samples.num_chains)
        scores = {**found.scores, "draw_seconds": seconds / count}
        if self.ood is not None:
            block = observe(predictive, kind, self.ood, None).in_units(*self._units)
            there = replace(found, function=block.function, expected=block.mean, noise=block.noise)
            parts = found.uncertainty(), there.uncertainty()
            if None not in parts:
                scores |= measure(SCORES, kind.task, {"ood": parts})
        if isinstance(posterior, Samples):
            # noisy draws of the target always seem to mix
            fixed = kind.fixed_mean and joint is not None
            function: Any = joint if fixed else found.function
            scores |= divergences(posterior) | convergence(function, samples.num_chains)
        loo = None
        if self.train is not None and left_out is None:
            if kind.no_single:
                words = f"{kind.no_single}: no datum can be left out, and there is no elpd"
                warnings.warn(words, BdlWarning, stacklevel=3)
            else:
                loo, by = leave_one_out.leave_one_out(
                    model, kind, posterior, samples, predictive, self.train,
                    progress=self.progress,
                )  # fmt: skip
                scores |= leave_one_out.scores_of(loo, by)
        return replace(found, scores=scores, loo=loo)

    def _draws(self, posterior: Any, count: int) -> Samples:
        """Draws of a posterior, made once, so that all numbers are about the same draws."""
        samples = to_samples(posterior, count, *without_targets(self.test))
        if self.kind.latents is None:
            return samples
        return samples_of_program(self.kind.latents, posterior, samples)

    @property
    def _units(self) -> tuple[float, float]:
        return self.units if self.kind.task == "regression" else (1.0, 0.0)

    def _scored(self, blocks: Iterable[Block], chains: int) -> tuple[Evaluation, Tensor | None]:
        """The scores of all rows with the draws at some of them, and the last batch's density."""
        kind, rows = self.kind, len(self.y)
        scale, shift = self._units
        count = min(rows, _POINTS)
        places = torch.arange(count, device="cpu") * rows // count
        score, kept, density, start = Score(kind), [], None, 0
        for block in blocks:
            block = block.in_units(scale, shift)
            score.add(block)
            density = block.log_density
            inside = places[(places >= start) & (places < start + block.rows)] - start
            if len(inside):
                kept.append(block.at(inside.to(block.mean.device), chains, _NUMBERS // count))
            start += block.rows
        block = Block.joined(kept)
        on_device = places.to(self.y.device)
        inputs = taken(self.test[:-1], on_device) if kind.by_rows and len(self.test) > 1 else ()
        y = self.y[on_device]
        found = Evaluation(
            task=kind.task,
            rows=rows,
            places=places,
            inputs=inputs,
            y=y * scale + shift if kind.task == "regression" else y,
            regions=regions(inputs, self.train[:-1]) if self.train and inputs else {},
            chains=chains,
            function=block.function,
            mean=score.mean(),
            predictions=block.draws,
            expected=None if block.noise is None else block.mean,
            noise=block.noise,
            pit=score.pit(),
            points=score.points(),
        )
        parts: dict[str, tuple[Any, ...]] = {}
        if (uncertainty := found.uncertainty()) is not None:
            parts["uncertainty"] = (uncertainty,)
        if block.draws is not None and len(block.draws) >= _LEAST_FOR_RANGE:
            parts["coverage range"] = tuple(metrics.coverage_range(block.draws).tolist())
        return replace(found, scores=score.numbers(parts)), density
