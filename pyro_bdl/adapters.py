"""Low-rank adapters: few weights beside the linear layers of a network that is fixed.

Source: Hu et al. (2022), LoRA: low-rank adaptation of large language models.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.utils.names import Names, chooser
from pyro_bdl.utils.validation import real_number, require, whole_number

_SHOWN = 4  # names in a message


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter: z = W x + b + (alpha / r) B A x.

    ``lora_A`` (r, in) starts as a linear layer does, ``lora_B`` (out, r) at zero, so that the layer
    starts as it was.

    :param base: the layer: ``nn.Linear``, or the ``Conv1D`` of transformers' GPT-2.
    :param rank: r.
    :param alpha: in units of r; r by default.
    """

    def __init__(self, base: nn.Module, rank: int, *, alpha: float | None = None) -> None:
        super().__init__()
        self.base = base
        self.rank = whole_number(rank, "rank")
        self.scale = 1.0 if alpha is None else real_number(alpha, "alpha") / self.rank
        weight: Any = base.weight
        self.out_features, self.in_features = weight.mT.shape if _is_turned(base) else weight.shape
        self.lora_A = nn.Parameter(weight.new_empty(self.rank, self.in_features))
        self.lora_B = nn.Parameter(weight.new_empty(self.out_features, self.rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A anew, and set B to zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    @property
    def weight(self) -> Tensor:
        """W + (alpha / r) B A, for modules that read their layers' weights."""
        change = self.scale * (self.lora_B @ self.lora_A)
        weight: Any = self.base.weight
        return weight + (change.mT if _is_turned(self.base) else change)

    @property
    def bias(self) -> Any:
        return self.base.bias

    def merged(self) -> nn.Module:
        """The plain layer with the same outputs; the adapter's own layer is not changed."""
        weight: Any = self.base.weight
        result = copy.copy(self.base)
        result._parameters = dict(self.base._parameters)
        result._buffers = dict(self.base._buffers)
        result.weight = nn.Parameter(self.weight.detach(), requires_grad=weight.requires_grad)
        return result


def lora(
    net: nn.Module, rank: int, targets: Names = "*", *, alpha: float | None = None
) -> nn.Module:
    """A copy of a network with low-rank adapters beside the linear layers that are chosen.

    The adapters ``<layer>.lora_A`` and ``<layer>.lora_B`` require gradients; all other parameters
    are frozen, so that ``bayesianize`` of the copy puts priors on the adapters alone. To have other
    parts too, as a new head, call ``requires_grad_()`` on them before ``bayesianize``. The layer
    itself is ``<layer>.base``. A layer that the network holds in several places has one adapter.

    :param net: any network; it is not changed.
    :param rank: r, the rows of A.
    :param targets: which linear layers (``nn.Linear``, ``Conv1D`` of transformers' GPT-2) get an
        adapter: a pattern of their names (shell wildcards), such as "*.query", several patterns, or
        a function of the name that returns True or False. All by default.
    :param alpha: the adapters count alpha / r times; r by default.
    :raises ValueError: where no linear layer is chosen.
    :raises TypeError: for a network of ``bayesianize``.
    """

    def adapted(layer: nn.Module) -> nn.Module:
        return LoRA(layer, rank, alpha=alpha).train(layer.training)

    return with_layers(net, targets, adapted, _is_linear, kind="linear", frozen=True)


def with_layers(
    net: nn.Module,
    targets: Names,
    change: Callable[[nn.Module], nn.Module],
    takes: Callable[[nn.Module], bool],
    *,
    kind: str,
    frozen: bool = False,
) -> nn.Module:
    """A copy of a network with other modules in the place of chosen layers.

    :param change: makes the module from the layer, which it may hold.
    :param takes: whether a module is a layer that can be chosen; ``kind`` is a word for these.
    :param frozen: whether the copy's parameters are frozen before.
    """
    require(net, nn.Module, "net must be a torch.nn.Module")
    if any(isinstance(part, SampledNetwork) for part in net.modules()):
        raise TypeError(
            "the network is one of bayesianize: change its layers first, and call bayesianize then"
        )
    result = copy.deepcopy(net)
    if frozen:
        result.requires_grad_(False)
    layers = {name: part for name, part in _outermost(result).items() if takes(part)}
    chosen = chooser(targets, "targets")
    taken = dict.fromkeys(part for name, part in layers.items() if chosen(name))
    if not taken:
        known = ", ".join(map(repr, list(layers)[:_SHOWN]))
        raise ValueError(
            f"targets chooses none of the network's {len(layers)} {kind} layers"
            + (f", such as {known}" if layers else "")
        )
    return replaced(result, {layer: change(layer) for layer in taken})


def merged(net: nn.Module) -> nn.Module:
    """A copy of a network in which each adapter of ``lora`` is added to its layer's weight.

    It has the layers and the names that the network had before ``lora``, and the same outputs. Of a
    network of ``bayesianize`` pass its ``net``; the adapters are then those where guides start.
    """
    result = copy.deepcopy(net)
    adapters = [part for part in result.modules() if isinstance(part, LoRA)]
    return replaced(result, {part: part.merged() for part in adapters})


def _outermost(net: nn.Module) -> dict[str, nn.Module]:
    """The modules of a network by all of their names, without those inside of adapters."""
    modules = dict(net.named_modules(remove_duplicate=False))
    inside = {id(part) for m in modules.values() if isinstance(m, LoRA) for part in m.modules()}
    return {name: m for name, m in modules.items() if id(m) not in inside}


def replaced(net: nn.Module, changes: Any) -> nn.Module:
    if net in changes:
        return changes[net]
    for part in list(net.modules()):
        if part in changes.values():
            continue
        for key, child in part._modules.items():
            if child in changes:
                part._modules[key] = changes[child]
    return net


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_turned(module)


def _is_turned(module: nn.Module) -> bool:
    """Return whether a layer is the ``Conv1D`` of transformers, z = x W + b with W (in, out)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"
