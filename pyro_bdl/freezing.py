"""A posterior's predictions as a plain ``nn.Module``, for serving."""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.moments import observation_kind, observation_moments
from pyro_bdl.distributions.parameters import (
    unconstrained_parameters,
    with_unconstrained,
)
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.guides.draws import as_posterior, check_posterior, latent_draws
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.linearized import is_linear
from pyro_bdl.predictive.observations import PredictiveMoments
from pyro_bdl.program.batches import NOT_ON_SOME
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.trace import (
    Site,
    placeholder_for_any,
    placeholder_for_observed,
    record,
    uses_of_placeholders,
)
from pyro_bdl.program.vmap import is_shared, map_draws
from pyro_bdl.tracing.graph import is_random, lift
from pyro_bdl.tracing.trace import NotTraceable, outside_tensors
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.validation import whole_number

_CLASSES = ("Bernoulli", "Categorical", "OneHotCategorical")
_SQUEEZE = (
    "write squeeze(-1) in place of squeeze(), which takes the axis of one row too, and do not "
    "branch on the number of rows"
)
_NUMBERS_AT_ONCE = 2**20  # in draws that are made at a time
_PLACES = ("constants", "center", "draws")

_Weights = dict[str, Tensor]
_Observed = Callable[[_Weights, tuple], Distribution]  # of latents and data


class _Parts(NamedTuple):
    """The parts of a frozen program.

    :param at_draw: y's distribution, given both kinds of weights and the data.
    :param run: the same without draws: the run of the program that it rests on.
    :param center: weights that all draws share.
    :param varying: weights of each draw, (K, ...).
    :param latents: draws of the latents, to be checked.
    """

    at_draw: Callable[[_Weights, _Weights, tuple], Distribution]
    run: Callable[[tuple], Distribution]
    center: _Weights
    varying: _Weights
    latents: _Weights


class _Unscaled(OneThread):
    """Handler that takes the scales off sample statements: no distribution depends on them, and
    those of plates are quotients of numbers of rows."""

    def _pyro_sample(self, msg: Any) -> None:
        msg["scale"] = 1.0


class Frozen(nn.Module):
    """A predictive distribution at K draws of the weights, without Pyro; made by ``freeze``.

    ``frozen(x)`` returns E[y | x] and its standard deviation with noise, each ``(N, ...)``; for
    classes the probabilities, (N, C) or of y = 1 (N,). Any number of rows is right. What differs
    between the draws, the other weights and the constants of the network are buffers, and thus in
    ``state_dict``: ``draws.0``, ``draws.1``, ..., and ``center`` and ``constants``; ``sites`` has
    their names.

    :param graph: returns means and variances of y, (K, N, ...), from the weights and the data.
    :param weights: its other arguments by place and name: those of the first place come after the
        data, the others before.
    :param classes: whether y is a class.
    """

    def __init__(
        self, graph: nn.Module, weights: dict[str, dict[str, Tensor]], *, classes: bool
    ) -> None:
        super().__init__()
        self.graph, self.classes = graph, classes
        self.sites = {place: tuple(values) for place, values in weights.items()}
        for place, values in weights.items():
            part = nn.Module()
            for number, tensor in enumerate(values.values()):
                part.register_buffer(str(number), tensor)
            self.add_module(place, part)

    def at_draws(self, x: Tensor, *others: Tensor) -> PredictiveMoments:
        """E[y | w_k, x] and Var[y | w_k, x] of each draw, (K, N, ...)."""
        constants, *weights = ([*getattr(self, place).buffers()] for place in self.sites)
        return PredictiveMoments(*self.graph(*chain(*weights), x, *others, *constants))

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        """Mean and standard deviation, or class probabilities."""
        mean, variance = self.at_draws(x, *others).over_draws()
        return mean if self.classes else (mean, variance.sqrt())


def freeze(
    model: Callable, posterior: Any, *args: Tensor, draws: int = 50, site: str | None = None
) -> Frozen:
    """Return the predictions of a posterior as a module for ``torch.export``, ONNX and
    ``torch.compile``, which needs no Pyro::

        frozen = bdl.freeze(model, guide, x, draws=50)
        mean, sd = frozen(x_new)
        torch.export.export(frozen, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))

    The network runs at each draw, from the first weights on that differ between them. A Laplace
    approximation is linearized, f(x; u*) + J (u_k - u*); its draws are shifted and scaled to mean
    u* and the right variance, so that the mean of a Normal is exact. That no operator depends on
    the number of rows is proved, and compared for one row.

    :param args: the program's arguments without targets, tensors with rows in front; one row does.
        The result stays on their device.
    :param draws: K; sds have a relative error of 1 / sqrt(2 K).
    :param site: the observed site; by default the only one.
    :raises UnsupportedProgramError: for a program whose operators depend on values or on the number
        of rows, several observed sites without ``site``, or a mixture of Laplace approximations.
    """
    count = whole_number(draws, "draws")
    _check_rows(args)
    posterior = as_posterior(posterior, model, args, {})
    if is_linear(posterior) and isinstance(posterior, MixtureGuide):
        raise UnsupportedProgramError(
            "each member of a mixture of Laplace approximations has a linear model of its own: "
            "freeze the members, and average their predictions by the mixture's weights"
        )
    program = on_whole_data(model)
    with (
        OneThread(),  # torch's tracing has one state for all threads, as Pyro has
        torch.no_grad(),
        evaluation_mode(model, posterior),
        preserved_buffers(model),
    ):

        def unscaled(*data: Tensor) -> Any:
            with _Unscaled():
                return program(*data)

        def observed(values: _Weights, data: tuple) -> Distribution:
            found = record(unscaled, values, data, {}, draw=leave).observed
            return _only(found, site).distribution

        parts = _linearized if isinstance(posterior, LaplaceGuide) else _at_network
        at_draw, run, center, varying, latents = parts(posterior, count, observed, args)
        check_posterior(program, posterior, latents, args, {})
        first = {name: value[0] for name, value in latents.items()}
        known = record(unscaled, first, args, {}, draw=placeholder_for_observed)
        used = uses_of_placeholders(known, unscaled, first, args, {})
        if site in used:
            raise UnsupportedProgramError(
                f"the site '{site}' depends on the value of the site '{used[site]}', which a "
                "frozen network does not draw: take Predictive"
            )
        # of discrete sites that are summed out the supports are read
        leave = placeholder_for_any if known.discrete is None else placeholder_for_observed
        classes = observation_kind(run(args)) in _CLASSES

        def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            numbers, data = tensors[: len(weights)], tensors[len(weights) :]
            fixed = dict(zip(center, numbers, strict=False))
            draws = dict(zip(varying, numbers[len(center) :], strict=True))
            if not varying:
                mean, variance = observation_moments(at_draw(fixed, {}, data))
                return mean.expand(count, *mean.shape), variance.expand(count, *variance.shape)
            return map_draws(lambda draw: observation_moments(at_draw(fixed, draw, data)), draws)

        # torch's symbolic shapes take long to import
        from pyro_bdl.tracing.any_rows import require_any_rows, trace_rows

        weights = [*center.values(), *varying.values()]
        try:
            graph = trace_rows(function, weights, args)
            if any(map(is_random, graph.graph.nodes)):
                raise NotTraceable(
                    "it draws random numbers when it predicts: its moments have no closed form, or "
                    "a layer is random in evaluation mode"
                )
            require_any_rows(lambda *data: observation_moments(run(data)), args)
            _check_one_row(graph, function, weights, args)
        except NotTraceable as error:
            raise UnsupportedProgramError(f"the program cannot be frozen, since {error}") from error
        found = lift(graph.graph, outside_tensors(graph)).values()
        constants = {f"constant_{n}": tensor.detach().clone() for n, tensor in enumerate(found)}
    plain = fx.GraphModule(nn.Module(), graph.graph)
    values = dict(zip(_PLACES, (constants, center, varying), strict=True))
    return Frozen(plain, values, classes=classes).eval()


def _check_rows(args: tuple) -> None:
    """Check that the examples are tensors with the same number of rows."""
    for number, value in enumerate(args):
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"freeze takes the program's arguments as tensors, got {type(value).__name__} as "
                f"number {number + 1}: write a program of tensors alone around it"
            )
    if not args or not all(value.dim() and len(value) == len(args[0]) > 0 for value in args):
        raise ArgumentError(
            "freeze needs the program's arguments without targets, tensors with one row in front "
            f"or more and as many in each, got {[tuple(value.shape) for value in args]}: "
            "freeze(model, posterior, x[:1])"
        )


def _check_one_row(
    graph: fx.GraphModule, function: Callable, weights: list[Tensor], args: tuple
) -> None:
    """Check that the graph of several rows is that of one, where lengths of one may be special.

    :raises NotTraceable: if their numbers differ.
    """

    row = [value[:1] for value in args]
    try:
        expected = function(*weights, *row)
    except NOT_ON_SOME as error:
        raise NotTraceable(f"it fails with one row ({error}): {_SQUEEZE}") from error
    found = graph(*weights, *row)
    for value, other in zip(found, expected, strict=True):
        size = other.abs().amax() if other.isfinite().all() else 1.0
        same = value.shape == other.shape
        if not (same and torch.allclose(value / size, other / size, 1e-3, 1e-3, equal_nan=True)):
            raise NotTraceable(
                f"its operators depend on the number of rows, which is special if it is one: "
                f"{_SQUEEZE}"
            )


def _only(sites: dict[str, Site], name: str | None) -> Site:
    if name is not None and name in sites:
        return sites[name]
    if name is not None or len(sites) != 1:
        raise UnsupportedProgramError(
            f"freeze needs one observed site{'' if name is None else f', and {name!r} is none'}; "
            f'the program has {", ".join(sites) or "none"}: name it by site="..."'
        )
    return next(iter(sites.values()))


def _at_network(posterior: Any, count: int, observed: _Observed, args: tuple) -> _Parts:
    """The program at draws of its latents."""
    latents = latent_draws(posterior, count, *args)
    first = {name: value[0] for name, value in latents.items()}
    shared = {name for name, value in latents.items() if is_shared(value)}
    center = {name: v[0].clone() for name, v in latents.items() if name in shared}
    varying = {name: v.clone() for name, v in latents.items() if name not in shared}
    return _Parts(
        lambda fixed, draw, data: observed(fixed | draw, data),
        lambda data: observed(first, data),
        center,
        varying,
        latents,
    )


def _offsets(guide: LaplaceGuide, count: int) -> _Weights:
    """K offsets of the sites in the subset, (K, *shape), with mean zero and the right variances."""
    subset, loc = guide.subset, guide.location()
    at_once = max(1, _NUMBERS_AT_ONCE // subset.size) if guide.independent_draws else count
    result: _Weights = {}
    for start in range(0, count, at_once):
        values = guide.precision.sample(min(at_once, count - start)).to(loc)
        for name, part in subset.by_site(torch.zeros_like(loc), values).items():
            if not start:
                result[name] = part.new_empty(count, *part.shape[1:])
            result[name][start : start + len(part)] = part
    if count > 1:
        for value in result.values():
            value -= value.mean(0)
            value *= (count / (count - 1)) ** 0.5
    return result


def _linearized(guide: LaplaceGuide, count: int, observed: _Observed, args: tuple) -> _Parts:
    """The unconstrained parameters of y's distribution as linear functions of offsets u_k - u* of
    the subset."""
    subset, loc = guide.subset, guide.location()
    layout = subset.layout
    center = {name: value.clone() for name, value in layout.unflatten(loc).items()}
    offsets = _offsets(guide, count)

    def at_draw(fixed: _Weights, slopes: _Weights, data: tuple) -> Distribution:
        seen = []

        def parameters(moving: _Weights) -> _Weights:
            seen.append(observed(layout.to_supports(fixed | moving), data))
            return unconstrained_parameters(seen[-1])

        start = {name: fixed[name] for name in subset.parts}
        # PyTorch declares a third result, which only has_aux=True gives
        found, change = torch.func.jvp(parameters, (start,), (slopes,))  # type: ignore[misc]
        moved = {name: value + change[name] for name, value in found.items()}
        return with_unconstrained(seen[-1], moved)

    latents = layout.to_supports(center)

    def run(data: tuple) -> Distribution:
        found = observed(latents, data)
        return with_unconstrained(found, unconstrained_parameters(found))

    draw = {name: value[None] for name, value in latents.items()}
    return _Parts(at_draw, run, center, offsets, draw)
