"""``summarize``: what a posterior adds to a trained network, on test data.

Every row of the table is a mixture of S predictions, of classes or Normals: S = 1 for the network
alone, the draws of a Laplace approximation, the members of an ensemble. A number has two errors,
which add up as squares. The one over the test points is that of 200 bootstrap samples of them, the
same for all rows, which makes differences paired. The one over the draws is that of the grouped
jackknife; the members of an ensemble are no draws that could be others.

Source: Guo et al. (2017), On calibration of modern neural networks (temperature scaling); Daxberger
et al. (2021), Laplace redux; Lakshminarayanan et al. (2017), Simple and scalable predictive
uncertainty estimation using deep ensembles.
"""

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pyro.nn import PyroModule, PyroParam
from scipy.special import ndtri
from torch import Tensor, nn

from pyro_bdl import metrics, models, priors
from pyro_bdl.comparison import scores
from pyro_bdl.comparison.columns import Column, listed, to_text, with_error
from pyro_bdl.comparison.metric import CLASSES
from pyro_bdl.comparison.observe import observe
from pyro_bdl.comparison.setting import Setting
from pyro_bdl.comparison.table import NAME
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.point import AutoMAP
from pyro_bdl.metrics.temperature import best_temperature, tempered
from pyro_bdl.metrics.uncertainty import Uncertainty, entropy_parts, variance_parts
from pyro_bdl.nn.bayesian import bayesianize
from pyro_bdl.predictive.predictor import predictor
from pyro_bdl.program.batches import Batches, leading_size
from pyro_bdl.program.linear_ops.probabilities import Probabilities
from pyro_bdl.utils.jackknife import enlarged, jackknife_error, number_of_groups, without_each
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 100
_RESAMPLES = 200
_WRONG = 0.05  # how often one of all differences is called one by chance
_NOISES = (1.0, 0.8, 0.6, 0.4)  # of the network's error on held-out rows
_PAIRS = 8  # of draws beside each draw, for CRPS
_SECONDS = Column("seconds", "seconds", "", "To fit and predict, after the network's own training.")
_OF_OTHER = ("auroc", "auroc_epistemic")
_SHARES = ("accuracy", "coverage", *_OF_OTHER)
_LAPLACE: Mapping[str, Mapping[str, Any]] = {"Laplace": {}, "last layer": {"subset": "last-layer"}}


@dataclass(frozen=True)
class Summary:
    """Result of ``summarize``; print it for the answer and the table.

    :param answer: whether a posterior is worth it, said only beyond the errors.
    :param table: a row for each method: numbers by key, and their standard errors under ``key_se``.
    :param columns: title and meaning of each number.
    :param posteriors: name of a row to its program and posterior, as ``compare`` takes them.
    """

    answer: str
    table: "pd.DataFrame"
    columns: tuple[Column, ...]
    posteriors: Mapping[str, tuple[Callable, Any]]

    def __str__(self) -> str:
        rows = [{"posterior": name, **row.to_dict()} for name, row in self.table.iterrows()]
        table = to_text(rows, [replace(NAME, title=""), *self.columns], _WIDTH)
        return f"{textwrap.fill(self.answer, _WIDTH, break_on_hyphens=False)}\n\n{table}"

    __repr__ = __str__


def summarize(
    net_or_model: Any,
    train: Any,
    *,
    held_out: tuple[Any, Any],
    test: tuple[Any, Any],
    other: Any = None,
    ensemble: Sequence[Callable] = (),
    laplace: Mapping[str, Mapping[str, Any]] | None = None,
    weight_decay: float = 1e-4,
    num_samples: int = 100,
    seed: int = 0,
) -> Summary:
    """Compare a trained network's own predictions with those of posteriors around it.

    The rows are the network (softmax, or a Normal around its output), the same after temperature
    scaling on the held-out rows, Laplace approximations whose width the held-out rows choose, and
    an ensemble. Of a regression network the noise is the root mean square error on the held-out
    rows; for a posterior they choose noise and width together.

    Example::

        >>> x = torch.randn(300, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> net = torch.nn.Linear(2, 2)  # trained
        >>> held_out, test = (x[100:200], y[100:200]), (x[200:], y[200:])
        >>> summary = bdl.summarize(net, (x[:100], y[:100]), held_out=held_out, test=test)
        >>> list(summary.table.index)
        ['softmax', 'temperature scaling', 'Laplace', 'last layer']

    :param net_or_model: a torch network of class logits (N, C) or of as many numbers as targets; or
        a program around one that observes classes or Normals, such as
        ``models.HeteroscedasticRegression(bdl.bayesianize(net))``.
    :param train: ``(x, y)`` or batches of them, to which the posteriors are fitted.
    :param held_out: ``(x, y)`` that the network was not trained on, some hundreds of rows.
    :param test: ``(x, y)``, the rows of the scores.
    :param other: inputs unlike the data, which uncertainty is to tell from the test inputs.
    :param ensemble: more networks, or programs, trained as the first from other starts.
    :param laplace: name to options of ``AutoLaplaceGGN``; by default all weights, the last layer.
    :param weight_decay: of a network's training, which is the prior; see
        ``priors.Normal.from_weight_decay``.
    :param num_samples: draws of each posterior.
    :raises ArgumentError: for a network that ends in softmax or sigmoid, or whose outputs do not
        say what is observed.
    :raises UnsupportedProgramError: for a program with latents beside a network's weights, with
        masks, or with other observations.
    :raises ValueError: for data that do not fit.
    """
    batches = Batches(train)
    first_args, _ = batches.first()
    rows = sum(leading_size(batch) for batch in batches)
    whole = batches.whole is not None  # then the rows of a batch are all there are
    is_network = isinstance(net_or_model, nn.Module) and not isinstance(net_or_model, PyroModule)
    noise = None

    def program(net: Any, noise: float | None = None) -> Any:
        if not is_network:
            return net
        prior = priors.Normal.from_weight_decay(weight_decay, rows)
        return _program(net, first_args, prior, noise, num_data=None if whole else rows)

    if is_network and isinstance(program(net_or_model), models.Regression):
        noise = _held_out_error(net_or_model, held_out)
    started = time.perf_counter()
    model = program(net_or_model, noise)
    read = _Reader(first_args, test, other, num_samples, seed)
    point = read(model, AutoMAP(model).prototype(*first_args))
    name = "softmax" if read.task == CLASSES else "network"
    predicted = {name: replace(point, seconds=time.perf_counter() - started)}
    if noise is None:
        started = time.perf_counter()
        of_held_out = _Reader(first_args, held_out, None, num_samples, seed)
        scaled = point.tempered(of_held_out(model, AutoMAP(model).prototype(*first_args)))
        predicted["temperature scaling"] = replace(scaled, seconds=time.perf_counter() - started)
    cheap = tuple(predicted)
    posteriors: dict[str, tuple[Callable, Any]] = {}
    for name, options in (_LAPLACE if laplace is None else laplace).items():
        started = time.perf_counter()
        own = program(net_or_model, noise)
        posterior = AutoLaplaceGGN(own, **options).laplace_approximation(
            train, held_out=held_out, progress=False
        )
        if noise is not None:
            _fit_noise(own, posterior, noise, held_out)
        posteriors[name] = own, posterior
        predicted[name] = read(own, posterior)
        predicted[name] = replace(predicted[name], seconds=time.perf_counter() - started)
    if ensemble:
        started = time.perf_counter()
        members = [program(member, noise) for member in ensemble]
        found = [point, *(read(m, AutoMAP(m).prototype(*first_args)) for m in members)]
        several = replace(_joined(found, 0), seconds=time.perf_counter() - started)
        predicted[f"ensemble of {len(found)}"] = several
    numbers = {name: of.numbers() for name, of in predicted.items()}
    return _summary(numbers, predicted, cheap, posteriors, has_other=other is not None)


# -------------------------------------------------------------------------------- programs


def _program(
    net: nn.Module, args: tuple, prior: Any, noise: float | None, *, num_data: int | None
) -> Any:
    """The program of a plain network, by its output and its targets.

    :raises ArgumentError: where these do not say what is observed.
    """
    *inputs, y = args
    with torch.no_grad(), evaluation_mode(net), Probabilities() as seen:
        output = net(*inputs)
    if not isinstance(output, Tensor):
        raise ArgumentError(
            f"the network returns a {type(output).__name__}: pass a program that says which tensor "
            "is meant, as models.Classification(bdl.bayesianize(net), output=...)"
        )
    end = seen.name(output)
    if end is not None:
        raise ArgumentError(
            f"the network ends in {end}, and summarize needs what goes into it (logits): remove "
            "that layer, whose parameters are none, and pass the rest of the network"
        )
    bnn = bayesianize(net, prior)
    if not y.is_floating_point() and output.dim() == y.dim() + 1 and y.dim() == 1:
        return models.Classification(bnn, num_data=num_data)
    if y.is_floating_point() and output.numel() == y.numel():
        value = torch.tensor(
            1.0 if noise is None else noise, dtype=output.dtype, device=output.device
        )
        return models.Regression(bnn, noise=PyroParam(value, _POSITIVE), num_data=num_data)
    raise ArgumentError(
        f"outputs of shape {tuple(output.shape)} for targets of shape {tuple(y.shape)} "
        f"({str(y.dtype).removeprefix('torch.')}) are neither class logits (N, C) with integer "
        "targets (N,) nor as many numbers as targets: pass a program that says what is observed, "
        "such as models.HeteroscedasticRegression(bdl.bayesianize(net)) or BinaryClassification"
    )


_POSITIVE = torch.distributions.constraints.positive


@torch.no_grad()
def _held_out_error(net: nn.Module, held_out: tuple) -> float:
    """Root mean square error on the held-out rows."""
    *inputs, y = held_out
    with evaluation_mode(net):
        error = net(*inputs).reshape(y.shape) - y
    return float(double(error).square().mean().sqrt())


def _fit_noise(model: Any, posterior: Any, noise: float, held_out: tuple) -> None:
    """Choose the noise under which, at its best width, held-out rows are most probable.

    The network's errors on these rows have a noise and an error of the function in them; with the
    first in the program alone, a posterior can only add to what is there already.
    """
    best = (-math.inf, noise)
    for share in _NOISES:
        _set_noise(model, posterior, share * noise)
        found = posterior.fit_width(held_out).held_out
        of_network = -math.log(share) - 0.5 / share**2  # nats of each number, but for a constant
        numbers = held_out[-1].numel() / leading_size(held_out)
        best = max(best, (numbers * of_network + found.helps * found.gain, share * noise))
    _set_noise(model, posterior, best[1])
    posterior.fit_width(held_out)


def _set_noise(model: Any, posterior: Any, noise: float) -> None:
    model.network.noise = torch.as_tensor(noise, device="cpu").to(posterior.loc)
    posterior.refresh()


# ------------------------------------------------------------------------------ predictions


@dataclass(frozen=True)
class _Predicted:
    """A mixture of S predictions of the test rows.

    :param mean: class probabilities (S, N, C), or means (S, N, D).
    :param variance: of Normals, (S, N, D); None of classes.
    :param y: class numbers (N,), or numbers (N, D).
    :param other: the uncertainty at other inputs by draws, a function of the numbers of the draws.
    :param are_draws: whether the S are draws, which could be others.
    """

    mean: Tensor
    variance: Tensor | None
    y: Tensor
    other: "_Predicted | None" = None
    are_draws: bool = False
    seconds: float = math.nan

    def tempered(self, held_out: "_Predicted") -> "_Predicted":
        """The same after temperature scaling by predictions of held-out rows."""
        mean, variance = held_out.mean[0], held_out.variance
        logs = double(mean).log() if variance is None else mean
        T, _ = best_temperature(logs, None if variance is None else variance[0], held_out.y)
        other = None if self.other is None else self.other._at_temperature(T)
        return replace(self._at_temperature(T), other=other)

    def _at_temperature(self, T: float) -> "_Predicted":
        if self.variance is None:
            return replace(self, mean=tempered(self.mean, T))
        return replace(self, variance=T * self.variance)

    def at(self, draws: Tensor) -> "_Predicted":
        """The same of some of the draws."""
        variance = None if self.variance is None else self.variance[draws]
        other = None if self.other is None else self.other.at(draws)
        return replace(self, mean=self.mean[draws], variance=variance, other=other)

    def uncertainty(self) -> Uncertainty:
        """Of each row, (N,) both."""
        if self.variance is None:
            return entropy_parts(self.mean)
        parts = variance_parts(self.mean, self.variance)
        return Uncertainty(parts.aleatoric.sum(-1), parts.epistemic.sum(-1))

    def values(self) -> dict[str, Tensor]:
        """What the numbers are made of, at each test row."""
        values: dict[str, Tensor] = {}
        if self.variance is None:
            p = double(self.mean).mean(0)
            chosen = p.gather(1, self.y[:, None])[:, 0]
            values |= {"p": p, "y": self.y, "accuracy": double(p.argmax(1) == self.y)}
            values["nlpd"] = -chosen.clamp_min(torch.finfo(p.dtype).tiny).log()
        else:
            mean, sd, y = double(self.mean), double(self.variance).sqrt(), double(self.y)
            z = (y - mean) / sd
            density = -0.5 * z.square() - sd.log() - 0.5 * math.log(2 * math.pi)
            values["nlpd"] = math.log(len(mean)) - density.sum(-1).logsumexp(0)
            values["rmse"] = (y - mean.mean(0)).square().mean(-1)
            inside = (2 * torch.special.ndtr(z).mean(0) - 1).abs() <= 0.9
            values["coverage"] = double(inside).mean(-1)
            values["crps"] = crps_of_normals(mean, sd, y).mean(-1)
        values["auroc"], values["auroc_epistemic"] = _uncertainties(self)
        return values

    def numbers(self) -> "_Numbers":
        """The numbers with their errors."""
        noise = torch.Generator("cpu").manual_seed(0)
        count = len(self.y)
        has_draws = len(self.mean) > 1
        other = 0 if self.other is None else self.other.mean.shape[1]
        chosen = [
            (torch.randint(count, (count,), generator=noise, device="cpu"),
             torch.randint(other, (other,), generator=noise, device="cpu") if other else None)
            for _ in range(_RESAMPLES)
        ]  # fmt: skip
        values = self._both_values()
        found = _reduced(*values, has_draws=has_draws)
        again = [_reduced(*_resampled(values, rows), has_draws=has_draws) for rows in chosen]
        groups: list[dict[str, float]] = []
        if self.are_draws and (number := number_of_groups(len(self.mean))):
            numbers = torch.arange(len(self.mean), device=self.mean.device)
            views = without_each(numbers, number)
            groups = [
                _reduced(*self.at(view)._both_values(), has_draws=has_draws) for view in views
            ]
        by_draws = {
            key: double(torch.tensor([g[key] for g in groups], device="cpu")) for key in found
        }
        by_rows = {
            key: double(torch.tensor([a[key] for a in again], device="cpu")) for key in found
        }
        return _Numbers(
            found, by_rows, by_draws, count, other, self.are_draws,
        )  # fmt: skip

    def _both_values(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        of_other = {}
        if self.other is not None:
            of_other = dict(zip(_OF_OTHER, _uncertainties(self.other), strict=True))
        here = {name: value.cpu() for name, value in self.values().items()}
        return here, {name: value.cpu() for name, value in of_other.items()}


def _uncertainties(predicted: _Predicted) -> tuple[Tensor, Tensor]:
    parts = predicted.uncertainty()
    return parts.total, parts.epistemic


def _resampled(values: tuple[dict, dict], rows: tuple[Tensor, Tensor | None]) -> tuple[dict, dict]:
    here, there = (
        {name: value[chosen] for name, value in part.items()}
        for part, chosen in zip(values, rows, strict=True)
    )
    return here, there


def _reduced(
    here: Mapping[str, Tensor], there: Mapping[str, Tensor], *, has_draws: bool
) -> dict[str, float]:
    """The numbers by key, in the order of the columns."""
    found: dict[str, Tensor] = {}
    for key in ("accuracy", "rmse", "nlpd", "crps", "coverage"):
        if key in here:
            mean = here[key].mean()
            found[key] = mean.sqrt() if key == "rmse" else mean
    if "p" in here:
        found["ece"] = metrics.expected_calibration_error(here["p"], here["y"])
    for key in _OF_OTHER[: 1 + has_draws] if there else ():
        found[key] = metrics.auroc(here[key], there[key])
    return {key: float(value) for key, value in found.items()}


def crps_of_normals(mean: Tensor, sd: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of a mixture of S Normals, E|Y - y| - E|Y - Y'| / 2.

    Both expectations are in closed form for each pair of components; of these each is paired with
    itself and with up to 8 others.

    :param mean: ``(S, ...)``; ``sd`` likewise; ``y`` is ``(...)``.

    Source: Grimit et al. (2006), The continuous ranked probability score for circular variables
    and its application to mesoscale forecast ensemble verification, eq. 5.
    """
    count = len(mean)
    own = _absolute(torch.zeros_like(mean), math.sqrt(2) * sd).mean(0)
    shifts = range(1, min(count - 1, _PAIRS) + 1)
    others = [
        _absolute(mean - mean.roll(k, 0), (sd.square() + sd.roll(k, 0).square()).sqrt()).mean(0)
        for k in shifts
    ]
    spread = own / count
    if others:
        spread = spread + (1 - 1 / count) * torch.stack(others).mean(0)
    return _absolute(y - mean, sd).mean(0) - 0.5 * spread


def _absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """E|X| of a Normal."""
    z = mean / sd
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return mean * (2 * torch.special.ndtr(z) - 1) + 2 * sd * density


class _Reader:
    """The predictions of programs at the test rows and at other inputs.

    :param first: a few of the training data, for guides.
    """

    def __init__(self, first: tuple, test: tuple, other: Any, draws: int, seed: int) -> None:
        self.first, self.test, self.other = first, test, other
        self.draws, self.seed, self.task = draws, seed, ""

    @torch.no_grad()
    def __call__(self, model: Callable, posterior: Any) -> _Predicted:
        with seeded(self.seed):
            setting = Setting.read(
                model, posterior, test=self.test, train=None, ood=self.other, units=(1.0, 0.0),
                num_samples=self.draws, seed=self.seed, batch_norm_data=None, progress=False,
            )  # fmt: skip
            kind = setting.kind
            self.task = kind.task
            _check(setting)
            is_point = isinstance(posterior, AutoMAP)
            count = 1 if is_point else self.draws
            predictive = predictor(
                model, posterior, count, args=setting.test[:-1], seed=self.seed,
                unknown=kind.unknown, latents=kind.latents,
            )  # fmt: skip
            classes = int(setting.y.max()) + 1 if kind.task == CLASSES else 1
            here = [
                _predicted(observe(predictive, kind, args, setting.y[rows]), kind.task)
                for args, rows in kind.batches(setting.test, count, classes)
            ]
            found = replace(_joined(here, 1), are_draws=not is_point)
            if setting.ood is None:
                return found
            there = observe(predictive, kind, setting.ood, None)
            return replace(found, other=_predicted(there, kind.task))


def _check(setting: Setting) -> None:
    kind = setting.kind
    if not kind.has_rows_of_one or not (kind.task == CLASSES or kind.is_normal):
        raise UnsupportedProgramError(
            "summarize is for programs that observe one class, or Normal numbers, in each row, and "
            f"this one observes {', '.join(kind.sites.values())}: compare scores others"
        )
    if setting.seen is not None:
        raise UnsupportedProgramError(
            "masks leave out some of the test targets: leave out these rows, or call compare"
        )
    if kind.named:
        raise UnsupportedProgramError(
            f"the program has latents that are no weights ({', '.join(map(repr, kind.named))}), "
            "which no trained network has values for: give them numbers or PyroParams, or fit a "
            "guide and call compare"
        )


def _predicted(block: Any, task: str) -> _Predicted:
    if task == CLASSES:
        y = block.mean.new_zeros(block.mean.shape[1]).long() if block.y is None else block.y
        return _Predicted(block.mean, None, y)
    rows = (*block.mean.shape[:2], -1)
    y = block.mean[0] if block.y is None else block.y
    return _Predicted(
        block.mean.reshape(rows), block.noise.reshape(rows), y.reshape(len(y), -1)
    )  # fmt: skip


def _joined(parts: Sequence[_Predicted], axis: int) -> _Predicted:
    """Predictions of several batches (axis 1), or of several networks for the same rows (0)."""
    first = parts[0]

    def together(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values, axis)

    y = torch.cat([part.y for part in parts]) if axis else first.y
    other = None if first.other is None else _joined([p.other for p in parts if p.other], axis)
    return _Predicted(together("mean"), together("variance"), y, other)


# ---------------------------------------------------------------------------------- answer


@dataclass(frozen=True)
class _Numbers:
    """Numbers by key, the same of bootstrap samples of the rows, and without groups of draws."""

    values: Mapping[str, float]
    resampled: Mapping[str, Tensor]
    groups: Mapping[str, Tensor]
    rows: int
    others: int
    are_draws: bool

    def at_an_end(self, key: str) -> float:
        """The error of a share that is 0 or 1, where all bootstrap samples agree; 0 of others.

        It is that of Agresti & Coull (1998), with two rows of each kind added.
        """
        if key not in _SHARES or 0 < self.values[key] < 1:
            return 0.0
        rows = 4 + (min(self.rows, self.others) if key in _OF_OTHER else self.rows)
        return math.sqrt(2 * (rows - 2)) / rows**1.5

    def over_draws(self, key: str) -> float:
        """The standard error over the draws: 0 without draws, NaN of too few."""
        if not self.are_draws:
            return 0.0
        groups = self.groups[key]
        return float(jackknife_error(groups)) if len(groups) else math.nan

    def error(self, key: str) -> float:
        """Over rows and draws."""
        rows = math.hypot(float(self.resampled[key].std()), self.at_an_end(key))
        return math.hypot(rows, self.over_draws(key))

    def gain(self, key: str, rival: "_Numbers", its: str, limit: float) -> tuple[float, float]:
        """A rival's number minus this one's, and its error, so enlarged that ``limit`` of it are as
        rare as of a Normal; the error is infinite if that over the draws is unknown."""
        gap = rival.values[its] - self.values[key]
        sampled = float((rival.resampled[its] - self.resampled[key]).std())
        rows = math.hypot(sampled, self.at_an_end(key), rival.at_an_end(its))
        draws = self.over_draws(key)
        parts = (rows, self.rows - 1), (draws, len(self.groups[key]) - 1)
        if math.isnan(draws):
            return gap, math.inf
        return gap, math.hypot(*(error for error, _ in parts)) * enlarged(limit, *parts)


def _summary(
    numbers: Mapping[str, _Numbers], predicted: Mapping[str, _Predicted],
    cheap: tuple[str, ...], posteriors: Mapping[str, tuple[Callable, Any]], *, has_other: bool,
) -> Summary:  # fmt: skip
    import pandas as pd

    rows = {
        name: {
            **of.values, **{f"{key}_se": of.error(key) for key in of.values},
            "seconds": predicted[name].seconds,
        }
        for name, of in numbers.items()
    }  # fmt: skip
    keys = {key for of in numbers.values() for key in of.values}
    columns = [
        replace(metric.column(), group="", error=f"{metric.key}_se")
        for metric in scores.SCORES
        if metric.key in keys and metric.task in (None, _task(predicted))
    ]
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("posterior")
    answer = _answer(numbers, cheap, has_other=has_other)
    return Summary(answer, table, (*columns, _SECONDS), posteriors)


def _task(predicted: Mapping[str, _Predicted]) -> str:
    first = next(iter(predicted.values()))
    return CLASSES if first.variance is None else "regression"


def _answer(numbers: Mapping[str, _Numbers], cheap: tuple[str, ...], *, has_other: bool) -> str:
    """Sentences on each posterior, with what is beyond the errors.

    A difference counts if it is beyond z errors from each of the network's own predictions, with z
    so large that of all the differences one is called so by chance in 5 % of the cases.
    """
    others = [name for name in numbers if name not in cheap]
    questions = max(1, len(others) * (1 + 2 * has_other))
    limit = float(ndtri(1 - _WRONG / (2 * questions)))
    better, worse, apart = [], [], []
    for name in others:
        own = numbers[name]
        gains = [own.gain("nlpd", numbers[rival], "nlpd", limit) for rival in cheap]
        if all(gain > limit * error for gain, error in gains):
            better.append(f"{name} (NLPD lower by {with_error(*min(gains))})")
        elif gains[0][0] < -limit * gains[0][1]:
            worse.append(f"{name} (NLPD higher by {with_error(-gains[0][0], gains[0][1])})")
        found = []
        for key in [key for key in _OF_OTHER if key in own.values]:
            gains = [own.gain(key, numbers[rival], _OF_OTHER[0], limit) for rival in cheap]
            separates = own.values[key] - limit * own.error(key) > 0.5
            if separates and all(-gain > limit * error for gain, error in gains):
                gain, error = max(gains)
                by = ", by the disagreement of its draws" if key == _OF_OTHER[1] else ""
                words = f"{name} (AUROC higher by {with_error(-gain, error)}{by})"
                found.append((-gain, words))
        apart += [max(found)[1]] if found else []
    first = numbers[cheap[0]]
    what = "probabilities" if "accuracy" in first.values else "predictive densities"
    beside = listed([name.replace("network", "the network") for name in cheap])
    text = f"On {first.rows} test rows {_who(better, 'has', 'have')} better {what} than {beside}."
    if worse:
        text += f" {_who(worse, 'has', 'have')} worse ones than the network alone."
    if not has_other:
        return f"{text} Inputs unlike the data were not passed, and nothing is said of these."
    who = _who(apart, "separates", "separate")
    text += f" {who[0].upper()}{who[1:]} other inputs from test inputs better than the network."
    if not (better or apart):
        text += " By these rows the network alone is enough."
    return text


def _who(names: Sequence[str], one: str, several: str) -> str:
    """The subject of a sentence, with its verb."""
    if not names:
        return f"no posterior {one}"
    return f"{listed(names)} {one if len(names) == 1 else several}"
