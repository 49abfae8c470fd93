"""Trained networks as programs and as posteriors: a plain one as a program, several in equal parts,
and one at a temperature."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl import models
from pyro_bdl.distributions.moments import log_probabilities
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.handlers import WithHandler
from pyro_bdl.nn.bayesian import bayesianize
from pyro_bdl.predictive.observations import ClosedPredictions, Predictions, SitePredictions
from pyro_bdl.predictive.predictor import predictor
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.linear_ops.tracker import Probabilities
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.precision import double

_NOISES = (1.0, 0.8, 0.6, 0.4)  # of the network's error on held-out rows


def program_of(
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
        return models.Regression(
            bnn, noise=PyroParam(value, dist.constraints.positive), num_data=num_data
        )
    raise ArgumentError(
        f"outputs of shape {tuple(output.shape)} for targets of shape {tuple(y.shape)} "
        f"({str(y.dtype).removeprefix('torch.')}) are neither class logits (N, C) with integer "
        "targets (N,) nor as many numbers as targets: pass a program that says what is observed, "
        "such as models.HeteroscedasticRegression(bdl.bayesianize(net)) or BinaryClassification"
    )


@torch.no_grad()
def held_out_error(net: nn.Module, held_out: tuple) -> float:
    """Root mean square error on the held-out rows."""
    *inputs, y = held_out
    with evaluation_mode(net):
        error = net(*inputs).reshape(y.shape) - y
    return float(double(error).square().mean().sqrt())


def fit_noise(model: Any, posterior: Any, noise: float, held_out: tuple) -> None:
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


@dataclass(frozen=True)
class Members:
    """Trained networks as one posterior, a mixture in equal parts. They are the whole of it: there
    are no draws that could be others.

    :param members: the program of each, and its guide at a point.
    """

    members: Sequence[tuple[Callable, Any]]

    def predictor(self, args: tuple, seed: int) -> "MembersPredictive":
        """Their predictions, for a program's arguments."""
        return MembersPredictive(
            [predictor(model, point, 1, args=args, seed=seed) for model, point in self.members]
        )


class MembersPredictive:
    """The predictions of several programs as those of one program at several draws."""

    samples = None

    def __init__(self, predictives: Sequence[Predictions]) -> None:
        self.predictives = predictives

    def observe(self, *args: Any) -> tuple[dict[str, SitePredictions], dict[str, Tensor]]:
        """The predictions of each observed site, as of ``Predictions``; no deterministic sites.

        :raises ArgumentError: for members that predict other sites or shapes.
        """
        found = [predictive.observe(*args)[0] for predictive in self.predictives]
        shapes = [{name: tuple(site.mean.shape[1:]) for name, site in s.items()} for s in found]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ArgumentError(
                    f"network {number} of the ensemble predicts {shape}, and the first one "
                    f"{shapes[0]}: all must predict the same targets"
                )
        sites = {name: [of_member[name] for of_member in found] for name in found[0]}
        return {name: SitePredictions(*map(_joined, *parts)) for name, parts in sites.items()}, {}

    def closed_predictions(self, *args: Any) -> dict[str, ClosedPredictions]:
        """None: a mixture has no closed form."""
        return {}


def _joined(*parts: Tensor | None) -> Any:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def at_temperature(model: Callable, temperature: float, sites: Collection[str]) -> nn.Module:
    """The program whose observations are those of a network after temperature scaling: logits
    divided by T, or T times the variance of a Normal.

    It is temperature scaling of a posterior that is a point; that of others is not this one at each
    draw.

    :param sites: names of the observed sites.
    :raises UnsupportedProgramError: when it runs, for other observations.
    """
    return WithHandler(model, _AtTemperature(temperature, sites))


class _AtTemperature(OneThread):
    def __init__(self, temperature: float, sites: Collection[str]) -> None:
        super().__init__()
        self.temperature, self.sites = temperature, sites

    def _process_message(self, msg: Any) -> None:
        self.check_thread(msg)
        if msg["type"] == "sample" and msg["name"] in self.sites:
            scaled = _scaled(base_distribution(msg["fn"], through_masks=False), self.temperature)
            msg["fn"] = scaled.to_event(len(msg["fn"].event_shape) - len(scaled.event_shape))


def _scaled(base: Any, temperature: float) -> Any:
    if isinstance(base, torch.distributions.Normal):
        return dist.Normal(base.loc, math.sqrt(temperature) * base.scale)
    if isinstance(base, torch.distributions.Bernoulli):
        return dist.Bernoulli(logits=base.logits / temperature)
    logits = log_probabilities(base)
    if logits is None:
        raise UnsupportedProgramError(
            f"temperature scaling is of classes and Normals, not of {type(base).__name__}"
        )
    one_hot = isinstance(base, torch.distributions.OneHotCategorical)
    kind = dist.OneHotCategorical if one_hot else dist.Categorical
    return kind(logits=(logits / temperature).to(base.probs))
