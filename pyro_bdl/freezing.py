"""A posterior's predictions as a plain ``nn.Module``, for serving."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.moments import observation_kind, observation_moments
from pyro_bdl.distributions.parameters import (
    unconstrained_parameters,
    with_unconstrained,
)
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import as_posterior, check_posterior, latent_draws
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.linearized import is_linear
from pyro_bdl.predictive.observations import PredictiveMoments
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.trace import Site, leave_open, record
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.tracing.any_rows import trace_rows
from pyro_bdl.tracing.graph import is_random
from pyro_bdl.tracing.trace import NotTraceable, tensor_of
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.validation import whole_number

_CLASSES = ("Bernoulli", "Categorical", "OneHotCategorical")


_Observed = Callable[[dict[str, Tensor], tuple], Distribution]  # of latents and data
_MomentsAtDraw = Callable[[dict[str, Tensor], tuple], tuple[Tensor, Tensor]]


class Frozen(nn.Module):
    """A predictive distribution at K draws of the weights, without Pyro; made by ``freeze``.

    ``frozen(x)`` returns E[y | x] and its standard deviation with noise, each ``(N, ...)``; for
    classes the probabilities, (N, C) or of y = 1 (N,). Any number of rows is right. Draws of the
    weights and the constants of the network are buffers, and thus in ``state_dict``.

    :param graph: returns means and variances of y, (K, N, ...), from the weights and the data.
    :param weights: its first arguments, by name.
    :param classes: whether y is a class.
    """

    def __init__(self, graph: nn.Module, weights: dict[str, Tensor], *, classes: bool) -> None:
        super().__init__()
        self.graph, self.classes = graph, classes
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "__"), tensor.clone())

    def at_draws(self, x: Tensor, *others: Tensor) -> PredictiveMoments:
        """E[y | w_k, x] and Var[y | w_k, x] of each draw, (K, N, ...)."""
        weights = (value for _, value in self.named_buffers(recurse=False))
        return PredictiveMoments(*self.graph(*weights, x, *others))

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

    The network runs at each draw. A Laplace approximation is linearized, f(x; u*) + J (u_k - u*);
    its draws are shifted and scaled to mean u* and the right variance, so that the mean of a Normal
    is exact.

    :param args: the program's arguments without targets, tensors with rows in front; one row does.
        The result stays on their device.
    :param draws: K; sds have a relative error of 1 / sqrt(2 K).
    :param site: the observed site; by default the only one.
    :raises UnsupportedProgramError: for a program whose operators depend on values or on the number
        of rows, several observed sites without ``site``, or a mixture of Laplace approximations.
    """
    count = whole_number(draws, "draws")
    leading_size(args)
    posterior = as_posterior(posterior, model, args, {})
    if is_linear(posterior) and isinstance(posterior, MixtureGuide):
        raise UnsupportedProgramError(
            "each member of a mixture of Laplace approximations has a linear model of its own: "
            "freeze the members, and average their predictions by the mixture's weights"
        )
    program = on_whole_data(model)
    with torch.no_grad(), evaluation_mode(model, posterior):
        latents = latent_draws(posterior, count, *args)
        check_posterior(program, posterior, latents, args, {})

        def observed(values: dict[str, Tensor], data: tuple) -> Distribution:
            run = record(program, values, data, {}, draw=leave_open)
            return _only(run.observed, site).distribution

        first = observed({name: value[0] for name, value in latents.items()}, args)
        classes = observation_kind(first) in _CLASSES
        if isinstance(posterior, LaplaceGuide):
            moments, weights = _linearized(posterior, latents, observed)
        else:
            moments, weights = _at_network(observed), latents

        def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            values, data = tensors[: len(weights)], tensors[len(weights) :]
            named = dict(zip(weights, values, strict=True))
            return map_draws(lambda draw: moments(draw, data), named)

        try:
            graph = trace_rows(function, list(weights.values()), args)
        except NotTraceable as error:
            raise UnsupportedProgramError(f"the program cannot be frozen, since {error}") from error
        if any(map(is_random, graph.graph.nodes)):
            raise UnsupportedProgramError(
                "the program cannot be frozen, since it draws random numbers when it predicts: its "
                "moments have no closed form, or a layer is random in evaluation mode"
            )
        constants = _constants_as_arguments(graph)
    plain = fx.GraphModule(nn.Module(), graph.graph)
    return Frozen(plain, constants | weights, classes=classes).eval()


def _constants_as_arguments(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Make the tensors that are no arguments of a graph its first arguments, and return them."""
    constants: dict[str, Tensor] = {}
    places: dict[str, fx.Node] = {}
    first = next(iter(graph.graph.nodes))
    for node in list(graph.graph.find_nodes(op="get_attr")):
        target = str(node.target)
        if target not in places:
            name = f"constant_{len(places)}"
            constants[name] = tensor_of(graph, node).detach().clone()
            with graph.graph.inserting_before(first):
                places[target] = graph.graph.placeholder(name)
        node.replace_all_uses_with(places[target])
        graph.graph.erase_node(node)
    return constants


def _only(sites: dict[str, Site], name: str | None) -> Site:
    if name is not None and name in sites:
        return sites[name]
    if name is not None or len(sites) != 1:
        raise UnsupportedProgramError(
            f"freeze needs one observed site, the program has {', '.join(sites) or 'none'}: "
            'name it by site="..."'
        )
    return next(iter(sites.values()))


def _at_network(observed: _Observed) -> _MomentsAtDraw:
    """The moments of y at a draw of the latents."""
    return lambda draw, data: observation_moments(observed(draw, data))


def _linearized(
    guide: LaplaceGuide, latents: dict[str, Tensor], observed: _Observed
) -> tuple[_MomentsAtDraw, dict[str, Tensor]]:
    """The moments of y with its distribution's unconstrained parameters linear in the latents, and
    the offsets u_k - u*."""
    layout, center = guide.require_layout(), guide.location()
    offsets = layout.unconstrain(latents) - center
    count = len(offsets)
    if count > 1:
        offsets = (offsets - offsets.mean(0)) * (count / (count - 1)) ** 0.5

    def moments(draw: dict[str, Tensor], data: tuple) -> tuple[Tensor, Tensor]:
        seen = []

        def parameters(vector: Tensor) -> dict[str, Tensor]:
            seen.append(observed(layout.constrain(vector)[0], data))
            return unconstrained_parameters(seen[-1])

        # PyTorch declares a third result, which only has_aux=True gives
        values, slopes = torch.func.jvp(parameters, (center,), (draw["offset"],))  # type: ignore[misc]
        moved = {name: value + slopes[name] for name, value in values.items()}
        return observation_moments(with_unconstrained(seen[-1], moved))

    return moments, {"offset": offsets}
