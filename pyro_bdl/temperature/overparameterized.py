"""The temperature that keeps likelihood and KL in balance as a network becomes wider."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.recognize import AffineOp, recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, leave_open, record
from pyro_bdl.utils.autograd import leaves_behind
from pyro_bdl.utils.validation import check_temperature, whole_number

_BY_HAND = "give the numbers: overparameterized(tau, num_data=p, num_neurons=N)"


def overparameterized(
    tau: float,
    model: Callable | int | None = None,
    *args: Any,
    num_data: int | None = None,
    num_neurons: int | None = None,
    **kwargs: Any,
) -> float:
    """The temperature eta = tau p / N for p data and N neurons (Huix et al. 2022).

    It keeps likelihood and KL in balance as the layer becomes wider.

    :param tau: the temperature per neuron and datum.
    :param model: a Pyro program, from which p and N are read; or a ``Program``. For
        ``overparameterized(tau, p, N)`` it is p.
    :param args: the program's arguments, targets included. A ready-made program that states its
        ``num_data`` needs none; its neurons are then the outputs of its linear and convolutional
        layers, except the last of them.
    :param num_data: p, in the place of the program's.
    :param num_neurons: N, in the place of the program's.
    :raises ValueError: for a tau that is not positive, or numbers that cannot be read.
    :raises UnsupportedProgramError: for a program without hidden neurons.
    """
    check_temperature(tau, "tau")
    if model is not None and not callable(model) and not isinstance(model, Program):
        num_data = model
        num_neurons = args[0] if args else num_neurons
    elif model is not None and (num_data is None or num_neurons is None):
        p, neurons = size_of(model, *args, **kwargs)
        num_data = p if num_data is None else num_data
        num_neurons = neurons if num_neurons is None else num_neurons
    p = whole_number(num_data, "num_data")
    return tau * p / whole_number(num_neurons, "num_neurons")


def size_of(model: Callable | Program, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """The number of data p and the number of hidden neurons N of a program.

    p counts the rows of all observed sites, scaled up by their plates. N counts the outputs of
    every product, convolution and embedding with a latent weight whose output enters another one;
    weights that are used several times count once.

    :param model: a Pyro program, or a ``Program``.
    :param args: its arguments; see :func:`overparameterized`.
    :raises ValueError: without arguments, for a program that does not state its ``num_data``.
    :raises UnsupportedProgramError: for a program without hidden neurons.
    """
    if isinstance(model, Program):
        program = model
    elif isinstance(model, nn.Module) and not args and not kwargs:
        return _stated(model)
    else:
        program = Program(model, *args, **kwargs)
    leaves = {name: v.detach().clone().requires_grad_() for name, v in program.initial.items()}
    drop = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda packed: packed)
    with torch.enable_grad(), drop, _Products(leaves) as products:
        run = record(program.model, leaves, program.args, program.kwargs, draw=leave_open)
    count = products.hidden_units(leaves)
    if not count:
        raise UnsupportedProgramError(
            "the program has no hidden neurons: no product with a latent weight enters another "
            f"one; {_BY_HAND}"
        )
    return _data(run), count


def _data(run: Run) -> int:
    sites = [site for site in run.observed.values() if site.value is not None]
    if not sites:
        raise ValueError(
            f"the program observes nothing: pass its targets among the arguments, or {_BY_HAND}"
        )
    return round(sum(num_data(site) * site.subsampling for site in sites))


def _stated(model: nn.Module) -> tuple[int, int]:
    p = getattr(model, "num_data", None)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | _ConvNd)]
    if p is None:
        raise ValueError(
            "the program does not state its num_data: pass its arguments, "
            f"overparameterized(tau, model, x, y), or {_BY_HAND}"
        )
    if len(layers) < 2:
        raise UnsupportedProgramError(f"the program has no hidden layer; {_BY_HAND}")
    return p, sum(_outputs(layer) for layer in layers[:-1])


def _outputs(layer: nn.Linear | _ConvNd) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


class _Products(Tracker):
    """Tracker that records the products of a program with its latents."""

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.found: list[tuple[Tag, AffineOp]] = []

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        op = recognize(func, args, kwargs, self.is_latent)
        weight = None if op is None else self.tag(op.weight)
        if op is not None and weight is not None and op.kind in _UNITS:
            self.found.append((weight, op))
        return func(*args, **kwargs)

    def hidden_units(self, leaves: Mapping[str, Tensor]) -> int:
        """The number of outputs of all products that enter another product."""
        names = {id(leaf): name for name, leaf in leaves.items()}
        behind: set[str] = set()
        for _, op in self.found:
            if isinstance(op.inputs, Tensor):
                behind |= {names[id(t)] for t in leaves_behind(op.inputs) if id(t) in names}
        units = {}
        for weight, op in self.found:
            if weight.site in behind:
                first = int(weight.index().flatten()[0])  # tells apart the parts of one site
                units[weight.site, first] = _UNITS[op.kind](op)
        return sum(units.values())


_UNITS: dict[str, Callable[[AffineOp], int]] = {
    "product": lambda op: len(op.as_matrix(op.weight)),
    "convolution": lambda op: len(op.weight),
    "transposed convolution": lambda op: op.weight.shape[1] * op.settings.get("groups", 1),
    "embedding": lambda op: op.weight.shape[1],
}
