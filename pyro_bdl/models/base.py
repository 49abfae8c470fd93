"""``ObservationModel``: the network, the plate and the checks that all programs share."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.errors import warn
from pyro_bdl.program.batches import as_dicts, leading_size
from pyro_bdl.program.gaussian_prior import TaskPrior
from pyro_bdl.program.linear_ops.tracker import Probabilities
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.trace import prior_factor
from pyro_bdl.scales import Hyperprior, Scale, checked, hyperparameter, on_device
from pyro_bdl.utils.precision import to_full_precision
from pyro_bdl.utils.validation import require, whole_number

Output = str | int | Callable[[Any], Tensor] | None
Scales = Scale | Tensor | Sequence[float]


class ObservationModel(TaskPrior, OwnParameters):
    """Base class of the programs: network, plate and checks; a subclass defines p(y | f).

    :param network: a module of ``bayesianize``, or any module that samples its weights; none for a
        head of ``MultiOutput``.
    :param num_data: N, the number of data that the posterior is about, where the program is
        called with minibatches: their log likelihood then counts N / B times.
    :param output: of a network whose output is no tensor, which tensor of it is f(x): an attribute
        or a key ("logits", "last_hidden_state"), a place in a tuple, or a function of the output.
    :param missing_targets: whether NaN in y is a number that was not observed, which counts
        nowhere, as what ``obs_mask`` leaves out. Otherwise NaN is refused.
    :raises ValueError: for a ``num_data`` that is not a whole number of at least 1.
    """

    _head: str | None = None  # the name of a head of MultiOutput
    _takes_logits = False
    _was_called = False

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.num_data = None if num_data is None else whole_number(num_data, "num_data")
        self.output, self.missing_targets = output, missing_targets

    def likelihood(self, output: Tensor) -> Distribution:
        """Return p(y | f) with batch shape (N,) for outputs of shape (N, ...)."""
        raise NotImplementedError

    def observation_shape(self, output: Tensor) -> torch.Size:
        """Return the shape of the targets for outputs of shape (N, ...)."""
        return output.shape

    def forward(self, x: Any = None, y: Any = None, **inputs: Any) -> Any:
        """Observe or sample the targets.

        :param x: the network's inputs: a tensor (N, ...), or a dict of keywords of a network that
            takes them; a network that takes a dict as such gets it as it is.
        :param y: the targets (N, ...).
        :param inputs: more keywords of the network.
        """
        network = self.network
        if network is None:
            raise TypeError(
                f"{type(self).__name__} has no network: pass it, or make this a head of MultiOutput"
            )
        seen = None
        if not self._was_called:
            self._was_called, seen = True, Probabilities()
        with self._under_task_prior():
            with nullcontext() if seen is None else seen:
                found = _called(network, x, inputs)
            return self._observe(found, y, (x, inputs), seen)

    def _observe(self, found: Any, y: Any, inputs: Any, seen: "Probabilities | None") -> Any:
        return self._sampled({"y": (self, selected(found, self.output), y)}, inputs, seen)["y"]

    def _sampled(
        self,
        heads: "Mapping[str, tuple[ObservationModel, Any, Any]]",
        inputs: Any,
        seen: "Probabilities | None",
    ) -> dict[str, Any]:
        """Observe or sample the targets of each site, given its program, f(x) and targets.

        :param inputs: of the network; ``seen`` what it computed, in the first call.
        """
        outputs: dict[str, Tensor] = {}
        for site, (head, output, _) in heads.items():
            end = None if seen is None or not head._takes_logits else seen.name(output)
            if end is not None:
                warn(
                    f"the network's outputs for {head._targets_name} are probabilities (its last "
                    f"operation is {end}), but {type(head).__name__} takes logits, "
                    "of which it computes the probabilities itself: remove that layer",
                    "probabilities-as-logits",
                )
            if isinstance(output, Tensor) and not output.dim():
                rows = leading_size(inputs)
                if rows != 1:
                    raise ValueError(
                        f"the network's output is a single number for {rows} rows: return one for "
                        "each row, (N,) or (N, targets)"
                    )
                output = output[None]  # a network that ends in squeeze(), at one row
            outputs[site] = output = to_full_precision(without_single_column(output))
            batch = output.shape[0]
            if not batch:
                raise ValueError("the batch has no rows: pass at least one datum")
            if batch != next(iter(outputs.values())).shape[0]:
                counts = {name: value.shape[0] for name, value in outputs.items()}
                raise ValueError(
                    f"the outputs of the network have different numbers of rows: {counts}"
                )
        likelihoods: dict[str, Any] = {}  # Distribution, which Pyro extends
        targets, size = {}, batch
        for site, (head, _, y) in heads.items():
            if y is not None:
                targets[site] = head._checked_targets(outputs[site], y)
                size = self._plate_size(batch)
            likelihoods[site] = head.likelihood(outputs[site])
            if site in targets:
                both = likelihoods[site], targets[site]
                likelihoods[site], targets[site] = head._as_observed(*both)
        device = outputs[site].device
        with pyro.plate("data", size, subsample=torch.arange(batch, device=device)):
            return {
                site: pyro.sample(site, likelihood, obs=targets.get(site))
                for site, likelihood in likelihoods.items()
            }

    def _plate_size(self, batch: int) -> int:
        if self.num_data is None:
            return batch
        if self.num_data < batch:
            raise ValueError(
                f"num_data is {self.num_data}, but the batch has {batch} rows: num_data is the "
                "number of all training data"
            )
        return self.num_data

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        expected = self.observation_shape(output)
        given, y = y, without_single_column(y)
        if given.shape == expected:  # such as the classes of sequences of length 1
            return given
        if y.shape != expected:
            raise ValueError(
                f"{self._targets_name} has shape {tuple(y.shape)}, but the network's output "
                f"{tuple(output.shape)} asks for targets of shape {tuple(expected)}"
            )
        return y

    def _as_observed(self, likelihood: Any, y: Tensor) -> tuple[Any, Tensor]:
        """The distribution of checked targets, and the values that it observes."""
        return _where_seen(likelihood, y) if self.missing_targets else (likelihood, y)

    def takes_missing(self, argument: str) -> bool:
        """Return whether NaN in an argument of this name is a number that was not observed."""
        return self.missing_targets and argument == self._targets_name

    @property
    def _targets_name(self) -> str:
        return "y" if self._head is None else f"y[{self._head!r}]"

    def _site(self, name: str) -> str:
        """The name of a site of this program, or of this head."""
        return name if self._head is None else f"{self._head}.{name}"

    def record(self, output: Tensor) -> Tensor:
        """Return the output, named as the function f that predictions and comparisons are of."""
        return pyro.deterministic(self._site("f"), output)

    def _declare(self, name: str, value: Scales) -> None:
        """Keep a hyperparameter: a number, several, a PyroParam, or a distribution to sample."""
        if isinstance(value, Tensor) or _are_numbers(value):
            numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
            if not bool((numbers.isfinite() & (numbers > 0)).all()):
                raise ValueError(f"{name} must be positive finite numbers, got {value}")
            self.register_buffer(name, numbers.to(floating(self.network)))
            return
        value = checked(value, name)  # type: ignore[arg-type]
        if isinstance(value, Hyperprior):
            setattr(self, f"_{name}", value)
            value = value.parameter
        if isinstance(value, PyroParam):
            own = self if self.network is None else self.network
            setattr(self, name, on_device(own, value))
        elif isinstance(value, Distribution) and value.batch_shape:
            joint: Any = value
            setattr(self, f"_{name}", joint.to_event(len(value.batch_shape)))
        else:
            setattr(self, f"_{name}", value)

    def _hyperparameter(self, name: str, like: Tensor) -> Tensor:
        """The present value: of a single number (), of one for each target (targets,)."""
        if name in self._pyro_params or name in self._buffers:
            value = getattr(self, name)
            hyperprior = getattr(self, f"_{name}", None)
            if isinstance(hyperprior, Hyperprior):
                prior_factor(f"{self._site(name)}.hyperprior", hyperprior.log_prob(value))
            value = value.to(like)
        else:
            value = hyperparameter(getattr(self, f"_{name}"), self._site(name), like)
        if value.dim() and value.shape[-1] not in (1, like.shape[-1]):
            raise ValueError(
                f"{self._site(name)} holds {value.shape[-1]} numbers, but there are "
                f"{like.shape[-1]} targets: give one number for each, or one for all"
            )
        return value


def _where_seen(likelihood: Any, y: Tensor) -> tuple[Distribution, Tensor]:
    """A likelihood in which targets that are NaN are masked, and targets without NaN."""
    seen, numbers = ~y.isnan(), len(likelihood.event_shape)
    base = likelihood.base_dist if numbers else likelihood
    anything = 0.0 if base.support.is_discrete else 0.5  # in the support
    return base.mask(seen).to_event(numbers), torch.where(seen, y, anything)


def _called(network: nn.Module, x: Any, inputs: Mapping[str, Any]) -> Any:
    """The network's output, a mapping being its keywords where it takes them."""
    if x is None and not inputs:
        raise TypeError("the program needs the network's inputs: pass x, or its keywords")
    if isinstance(x, Mapping):
        x = as_dicts(x)
        if _takes(network, {**x, **inputs}):
            return network(**x, **inputs)
    return network(**inputs) if x is None else network(x, **inputs)


def _takes(network: nn.Module, keywords: Mapping[str, Any]) -> bool:
    while isinstance(network, SampledNetwork):
        network = network.network
    try:
        inspect.signature(network.forward).bind(**keywords)
    except TypeError:
        return False
    return True


def selected(found: Any, output: Output) -> Any:
    """The tensor of a network's output that is f(x).

    :raises TypeError: where ``output`` names no tensor in it.
    """
    if callable(output):
        return output(found)
    if output is None and isinstance(found, Tensor):
        return found
    entry = "logits" if output is None else output
    try:
        if isinstance(entry, int) or isinstance(found, Mapping):
            value = found[entry]
        else:
            value = getattr(found, entry)
    except (AttributeError, IndexError, KeyError, TypeError):
        value = None
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the network's output is a {type(found).__name__} without a tensor {entry!r}: say by "
            "output= which of its tensors is f(x), as in output='last_hidden_state', output=0 or "
            "output=lambda found: found.mean"
        )
    return value


def floating(network: nn.Module | None) -> Tensor:
    """Some tensor of the dtype and on the device of a network's weights."""
    if network is None:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    tensors = chain(network.parameters(), network.buffers())
    found = (tensor for tensor in tensors if tensor.is_floating_point())
    return next(found, torch.empty(0, device="cpu"))


def _are_numbers(value: Any) -> bool:
    is_sequence = isinstance(value, Sequence) and len(value) > 0
    return is_sequence and all(isinstance(number, int | float) for number in value)


def without_single_column(value: Any) -> Tensor:
    require(value, Tensor, "expected a tensor")
    return value.squeeze(-1) if value.dim() > 1 and value.shape[-1] == 1 else value


def halves(program: ObservationModel, output: Tensor) -> tuple[Tensor, Tensor]:
    if output.dim() < 2 or output.shape[-1] % 2:
        raise ValueError(
            f"{type(program).__name__} needs a network with two outputs per target, got output "
            f"shape {tuple(output.shape)}"
        )
    first, second = output.chunk(2, -1)
    return without_single_column(first), without_single_column(second)
