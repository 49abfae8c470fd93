"""The predictions of a posterior for a batch, by one run of the network at each draw, or from
predictions that are known without one."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.kind import Kind, Seen, check_fit, class_probabilities
from pyro_bdl.comparison.metric import evenly
from pyro_bdl.diagnostics.loo import log_mean_exp
from pyro_bdl.errors import UnusableDrawsError
from pyro_bdl.metrics.uncertainty import Uncertainty, entropy_parts, variance_parts
from pyro_bdl.predictive.observations import ClosedPredictions
from pyro_bdl.program.batches import leading_size
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tree_map
from pyro_bdl.utils.validation import check_finite_tensor, require_tensors

_AT_DRAWS = ("mean", "function", "noise", "draws")  # whose first axis is that of the draws
_BEHIND = (*_AT_DRAWS, "bounds")  # whose second axis is that of the rows


@dataclass(frozen=True)
class Block:
    """Predictions of a posterior for some rows at S draws; rows of which nothing was seen are left
    out.

    :param rows: n.
    :param mean: E[y | w_s], ``(S, n, ...)``; for classes the probabilities ``(S, m, C)``, with
        several points for each row if it holds several labels.
    :param function: draws of the site f, or of the mean, as ``mean``.
    :param y: the targets, ``(n, ...)``, or class numbers ``(m,)``; None where classes and other
        numbers stand in one mean, whose scores are then left out, and without targets.
    :param noise: Var[y | w_s], as ``mean``; None for classes.
    :param draws: y ~ p(y | w_s), ``(S, n, ...)``; None for classes.
    :param log_density: log p(y_n | w_s) in nats, ``(S, K)``; K = 1 for a joint one.
    :param closed: mean, variance and log p(y_n) in closed form, if there is one.
    :param seen: which targets were seen, as ``y``; None where all were.
    :param counts: how many numbers of each datum were seen, ``(K,)``; None where all were.
    :param owners: the row of each datum, ``(K,)``; None where each row has equally many.
    :param log_mean: of classes the log of the mean probabilities over the draws, ``(m, C)``, in
        float64; from log probabilities, which do not underflow.
    :param bounds: of censored targets the two ends between which each is known to lie, ``(2, n)``.
    """

    rows: int
    mean: Tensor
    function: Tensor
    y: Tensor | None
    noise: Tensor | None = None
    draws: Tensor | None = None
    log_density: Tensor | None = None
    closed: ClosedPredictions | None = None
    seen: Tensor | None = None
    counts: Tensor | None = None
    owners: Tensor | None = None
    log_mean: Tensor | None = None
    bounds: Tensor | None = None

    def _map(
        self, function: Callable[[Tensor, int], Tensor], names: Iterable[str]
    ) -> dict[str, Any]:
        """A function of each known field and of its axis of rows, 0 or 1 behind the draws."""
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {name: function(value, int(name in _BEHIND)) for name, value in known.items()}

    def counted(self, seen: Seen | None) -> "Block":
        """The predictions for the rows and data of which something was seen."""
        if seen is None:
            return self
        device = self.mean.device
        rows, counts = seen.of_rows().to(device), seen.counts.to(device)

        def part(values: Tensor, start: int) -> Tensor:
            """The counted rows along an axis; of labels each row holds several points."""
            points = rows.repeat_interleave(values.shape[start] // len(rows))
            return values.movedim(start, 0)[points].movedim(0, start)

        cells, closed, density = seen.numbers.to(device), self.closed, self.log_density
        owners = None
        if len(counts) % seen.rows == 0:  # else one density is of several rows
            owners = (counts.reshape(seen.rows, -1)[rows] > 0).nonzero()[:, 0]
        if self.y is not None:
            cells = part(cells.reshape(self.y.shape), 0)
        if closed is not None:
            known = closed.log_density
            known = None if known is None else known[counts > 0]
            closed = ClosedPredictions(part(closed.mean, 0), part(closed.variance, 0), known)
        return replace(
            self, **self._map(part, (*_BEHIND, "y", "log_mean")), rows=int(rows.sum()),
            log_density=None if density is None else density[:, counts > 0],
            closed=closed, seen=cells, counts=counts[counts > 0],
            owners=owners,
        )  # fmt: skip

    @property
    def draw_numbers(self) -> Tensor:
        """0 ... S - 1."""
        return torch.arange(len(self.mean), device=self.mean.device)

    def at_draws(self, numbers: Tensor) -> "Block":
        """The predictions of the targets at some of the draws."""
        some = self._map(lambda value, _: value[numbers], ("mean", "noise", "draws", "log_density"))
        if self.log_mean is not None:
            mean = double(some["mean"]).mean(0)
            some["log_mean"] = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        return replace(self, **some)

    def at(self, rows: Tensor, chains: int, most: int) -> "Block":
        """Draws at some of the rows, without targets and densities, but with what was seen.

        :param chains: the number of chains, whose draws follow each other.
        :param most: draws of which more are thinned, equally many from each chain.
        """

        def part(values: Tensor, start: int) -> Tensor:
            values = evenly(values, chains, most) if start else values
            points = values.movedim(start, 0).unflatten(0, (self.rows, -1))[rows]
            return points.flatten(0, 1).movedim(0, start)

        names = _AT_DRAWS if self.y is None else (*_AT_DRAWS, "seen")
        return Block(len(rows), y=None, **self._map(part, names))

    @staticmethod
    def joined(blocks: "Sequence[Block]") -> "Block":
        """The draws of several blocks at all of their rows."""

        def together(name: str) -> Any:
            return torch.cat([getattr(block, name) for block in blocks], int(name in _AT_DRAWS))

        names = [n for n in (*_AT_DRAWS, "seen") if getattr(blocks[0], n) is not None]
        rows = sum(block.rows for block in blocks)
        return Block(rows, y=None, **{name: together(name) for name in names})

    def uncertainty(self, task: str) -> Uncertainty | None:
        """Aleatoric and epistemic entropy or variance; None if the noise is unknown."""
        if task == "classification":
            return entropy_parts(self.mean)
        return None if self.noise is None else variance_parts(self.mean, self.noise)

    def on(self, device: torch.device) -> "Block":
        """The predictions on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Block(**tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, values))

    def in_units(self, scale: float, shift: float, *, is_log: bool = False) -> "Block":
        """The predictions of ``y * scale + shift``; the density is smaller by log(scale) for each
        number of a target that was seen, while of a limit it is a probability.

        :param is_log: whether the function is of log y.
        """

        def moved(values: Tensor, _: int = 0) -> Tensor:
            return values * scale + shift

        def in_own(density: Tensor | None) -> Tensor | None:
            """A density in nats of the new units, whose last axis is that of the data."""
            if density is None or self.y is None:
                return density
            numbers: Any = self.y.numel() / density.shape[-1]
            numbers = numbers if self.counts is None else self.counts
            if self.bounds is not None:
                numbers = numbers * (self.bounds[0] == self.bounds[1])
            return double(density) - math.log(scale) * numbers

        noise, closed = None if self.noise is None else self.noise * scale**2, self.closed
        if closed is not None:
            of_targets = in_own(closed.log_density)
            closed = ClosedPredictions(moved(closed.mean), closed.variance * scale**2, of_targets)
        values = self._map(moved, ("mean", "function", "y", "draws", "bounds"))
        if is_log:
            values["function"] = self.function + math.log(scale)
        density = in_own(self.log_density)
        return replace(self, **values, noise=noise, log_density=density, closed=closed)


def observe(
    predictive: Any, kind: Kind, args: tuple, y: Tensor | None, seen: Seen | None = None,
    bounds: Tensor | None = None,
) -> Block:  # fmt: skip
    """Predictions for a batch, by one run of the network at each draw.

    :param predictive: at fixed draws.
    :param kind: what its program observes.
    :param args: the program's arguments, with or without targets.
    :param y: the targets, as ``Kind.targets`` gives them; None without.
    :param seen: what was seen of them, as ``Kind.seen`` gives it; ``bounds`` as ``observed`` does.
    :raises ValueError: for targets that do not fit the predictions.
    :raises UnusableDrawsError: for predictions that are NaN.
    """
    return replace(_observed(predictive, kind, args, y), bounds=bounds).counted(seen)


def _observed(predictive: Any, kind: Kind, args: tuple, y: Tensor | None) -> Block:
    sites, deterministic = predictive.observe(*args)
    means = {name: sites[name].mean for name in kind.sites}
    density = None
    if y is not None:
        density = kind.densities({name: sites[name].log_density for name in kind.sites})
        check_draws("log likelihoods", density.isnan())
    if kind.task == "classification":
        p = kind.probabilities(means)
        check_draws("class probabilities", ~p.isfinite())
        rows = leading_size(args) if kind.by_rows else p.shape[1]
        logs = {name: sites[name].log_mean for name in kind.sites}
        of_draws = kind.log_probabilities(logs) if None not in logs.values() else double(p).log()
        labels = None if y is None else class_labels(y, p[0])
        log_mean = log_mean_exp(double(of_draws).movedim(0, -1))
        return Block(rows, p, p, labels, log_density=density, log_mean=log_mean)
    mean = kind.numbers(means)
    if kind.mixed:
        return Block(mean.shape[1], mean, mean, None, log_density=density)
    if y is not None:
        y = _fitting(y, mean[0])
    draws = kind.numbers({name: sites[name].draws for name in kind.sites})
    check_draws("predictions", draws.isnan())
    function = deterministic.get("f") if kind.has_rows_of_one else None
    if function is None or function.shape[1:2] != mean.shape[1:2]:
        function = draws if kind.fixed_mean else mean
    bad = ~function.isfinite()
    check_draws("functions", bad & ~bad.all(0))  # all bad: there is no mean
    noise = kind.numbers({name: sites[name].variance for name in kind.sites})
    closed = _closed_form(predictive, kind, args, mean[0], with_targets=y is not None)
    return Block(mean.shape[1], mean, function, y, noise, draws, density, closed)


def _closed_form(
    predictive: Any, kind: Kind, args: tuple, like: Tensor, *, with_targets: bool
) -> ClosedPredictions | None:
    """Predictions in closed form where all sites have one.

    :param like: the mean at one draw, for the shape.
    """
    if not kind.is_normal:
        return None
    sites = predictive.closed_predictions(*args)
    if kind.sites.keys() - sites.keys():
        return None
    mean, variance = (
        kind.numbers({name: getattr(sites[name], part)[None] for name in kind.sites})[0]
        for part in ("mean", "variance")
    )
    density, known = None, [sites[name].log_density for name in kind.sites]
    if with_targets:
        values = {n: v[None] for n, v in zip(kind.sites, known, strict=True) if v is not None}
        density = kind.densities(values)[0] if len(values) == len(known) else None
    return ClosedPredictions(mean.reshape(like.shape), variance.reshape(like.shape), density)


@dataclass(frozen=True)
class PredictiveDraws:
    """An exact or published posterior of which only predictions at the test inputs are known.

    It can be one of the posteriors of ``compare``, also the reference::

        compare(model, {"vi": guide, "exact": PredictiveDraws(f)}, x, y, reference="exact")

    :param function: ``(S, N, ...)``, S draws at the N test inputs. For regression they are draws of
        the site ``f``, or of the observation's mean if the program has no such site, in the units
        of the program's target. For classification they are probabilities ``(S, N, C)``; for two
        classes ``(S, N)``, of the second class, is accepted too.
    :param targets: ``(S, N, ...)``, draws of a regression target, including noise, if known; needed
        for CRPS, coverage and the predictive distribution.
    :param log_likelihood: ``(S, N)``, log p(y_n | draw) of a regression, if known; needed for NLPD.
    :param chains: number of Markov chains of equal length, whose draws follow each other; 1 for
        independent draws, which get no R-hat.
    :raises TypeError: for a value that is not a tensor.
    :raises ValueError: for fewer than 2 draws, different numbers of draws, numbers that are not
        finite, or a number of draws that ``chains`` does not divide.
    """

    function: Tensor
    targets: Tensor | None = None
    log_likelihood: Tensor | None = None
    chains: int = 1

    def __repr__(self) -> str:
        shape = tuple(self.function.shape)
        return f"<PredictiveDraws: {shape[0]} draws of {self.chains} chains, function {shape}>"

    def __post_init__(self) -> None:
        for name in ("function", "targets", "log_likelihood"):
            value: Any = getattr(self, name)
            if value is None and name != "function":
                continue
            require_tensors(**{name: value})
            if value.dim() < 2 or len(value) < 2:
                raise ValueError(
                    f"{name} must be of shape (draws, points, ...) with at least 2 draws, got "
                    f"{tuple(value.shape)}"
                )
            if value.shape[:2] != self.function.shape[:2]:
                raise ValueError(
                    f"{name} has (draws, points) {tuple(value.shape[:2])}, but function "
                    f"{tuple(self.function.shape[:2])}"
                )
            check_finite_tensor(name, value)
        if self.chains < 1 or len(self.function) % self.chains:
            raise ValueError(
                f"chains={self.chains} does not divide the {len(self.function)} draws: all chains "
                "must be of one length"
            )

    def to(self, device: torch.device | str) -> "PredictiveDraws":
        """The same draws on another device."""
        names = ("function", "targets", "log_likelihood")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in known.items()})


def known_block(kind: Kind, known: PredictiveDraws, y: Tensor) -> Block:
    """Predictions that come without a posterior, as far as they are known."""
    p = known.function
    if p.shape[1] != len(y):
        raise ValueError(
            f"it holds predictions at {p.shape[1]} points, but there are {len(y)} test inputs"
        )
    if kind.task == "classification":
        if p[0].numel() == y.numel() and set(kind.sites.values()) == {"Bernoulli"}:
            p = class_probabilities("Bernoulli", p)
        if p.dim() != 3 or bool(((p.sum(-1) - 1).abs() > 1e-3).any()):
            raise ValueError(
                "it must hold class probabilities (draws, points, classes) that sum to 1, got "
                f"shape {tuple(known.function.shape)}"
            )
        labels = class_labels(y, p[0])
        of_labels = double(p).gather(-1, labels.expand(len(p), -1)[..., None])[..., 0]
        rows, log_mean = known.function.shape[1], double(p).mean(0).log()
        return Block(rows, p, p, labels, log_density=of_labels.log(), log_mean=log_mean)
    mean = p if known.targets is None else known.targets
    density = None if known.log_likelihood is None else known.log_likelihood.flatten(1)
    y = _fitting(y, mean[0])
    return Block(len(y), mean, p, y, draws=known.targets, log_density=density)


def log_densities(predictive: Any, kind: Kind, args: tuple, seen: Seen | None = None) -> Tensor:
    """log p(y_n | w_s) in nats of the data that were seen, ``(S, K)``.

    :param seen: what was seen of them, as ``Kind.seen`` gives it.
    :raises UnusableDrawsError: if a value is NaN.
    """
    densities = kind.densities(predictive.log_likelihood(*args))
    check_draws("log likelihoods", densities.isnan())
    return densities if seen is None else densities[:, (seen.counts > 0).to(densities.device)]


def check_draws(name: str, bad: Tensor) -> None:
    """Check that all draws can be used.

    :param name: name of the values, for the message.
    :param bad: bool ``(S, ...)``, true at values that cannot be used.
    :raises UnusableDrawsError: if there is such a value, with the number of such draws.
    """
    draws = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
    if draws:
        raise UnusableDrawsError(
            f"{len(draws)} of {len(bad)} draws (the first is number {draws[0]}, counted from 0) "
            f"have {name} that are NaN or infinite: leave these draws out, or fit it again"
        )


def class_labels(y: Tensor, probabilities: Tensor) -> Tensor:
    """Targets as one class number for each row of probabilities ``(N, C)``.

    :param y: class numbers or one-hot rows.
    """
    if y.numel() == probabilities.numel() and y.shape[-1:] == probabilities.shape[-1:]:
        y = y.argmax(-1)
    return y.reshape(-1).long()


def _fitting(y: Tensor, mean: Tensor) -> Tensor:
    check_fit(y, mean.shape)
    return y.reshape(mean.shape)
