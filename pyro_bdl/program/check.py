"""The contract of a program, and errors that name the argument which breaks it.

Data are finite tensors among the arguments, of the weights' dtype; parameters are whole; at given
latents the program has one density, since all its random numbers come from sample statements that
are seen. ``Program.check`` checks it where a sampler or an approximation first meets a program.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.utils.module_state import Modules, modules_in_sight
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.trees import entries_of, tensors_in
from pyro_bdl.utils.validation import check_finite_tensor, require

TENSORS_NEEDED = "the program computes with tensors: pass torch.as_tensor(...) of it"

# ------------------------------------------------------------------------------------ arguments


def named_arguments(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the program's parameter names, or by "argument 0" etc. if it has no
    names."""
    try:
        signature = _signature(function)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            start = len(args) - len(value)
            named |= {f"argument {start + i}": part for i, part in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return by_entry(named)


def _signature(function: Callable) -> inspect.Signature:
    program = without_handlers(function)
    return inspect.signature(program.forward if isinstance(program, nn.Module) else program)


def by_entry(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, nested ones entry by entry: ``x['ids']``, ``x[0]``."""
    return {
        key: part for name, value in named.items() for key, part in entries_of(name, value).items()
    }


def require_program(model: Any) -> None:
    """Check that a program can be called, and is no class of programs.

    :raises TypeError: otherwise.
    """
    if isinstance(model, type):
        raise ArgumentError(f"the program is the class {model.__name__}: make one of it")
    require(model, Callable, "the program must be a function or a module")


def without_handlers(function: Any) -> Any:
    """The program without handlers of Pyro and of this package, which accept any arguments."""
    if isinstance(function, functools.partial) and any(
        isinstance(value, Messenger) for value in function.args[:1]
    ):
        return without_handlers(function.args[-1])
    if "__wrapped__" in getattr(function, "__dict__", {}):
        return without_handlers(function.__wrapped__)
    if isinstance(function, nn.Module) and callable(getattr(function, "model", None)):
        parameters = inspect.signature(function.forward).parameters.values()
        kinds = [parameter.kind for parameter in parameters]
        if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
            return without_handlers(function.model)
    return function


def kind_of(value: Any) -> str:
    """The type of an argument, for messages."""
    if isinstance(value, list):
        return "list of numbers"
    return f"{type(value).__module__.partition('.')[0]} {type(value).__name__}"


def explain(error: Exception, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise an error that names the argument a run cannot use. If there is none, add a note to a
    RuntimeError, as of a wrong shape, that says what tensors the run had.

    :param error: the error that a run of the program raised.
    :param function: the program, also under handlers. Its weights are those of the modules that
        the open contexts of ``module_state`` have met.
    :raises ArgumentError: if an argument is an array, a table or a list instead of a tensor, or has
        another floating dtype than the weights.
    """
    if isinstance(error, ArgumentError):
        return
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        names: Any = ()
        with suppress(TypeError, ValueError):  # for a program without a signature
            names = _signature(function).parameters.keys()
        if args[0] and args[0].keys() <= set(names):
            raise ArgumentError(
                f"the argument is a {type(args[0]).__name__} of the program's own arguments "
                f"({', '.join(args[0])}): pass the values, or a list of it, [batch]"
            ) from error
    named = named_arguments(function, args, kwargs)
    for name, value in named.items():
        reason = _why_unusable(name, value, function, about_tensors=isinstance(error, RuntimeError))
        if reason is not None:
            text = (str(error).strip().splitlines() or [""])[0]
            raise ArgumentError(f"{reason} ({type(error).__name__}: {text})") from error
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if isinstance(error, RuntimeError) and tensors and not hasattr(error, "__notes__"):
        shown = (f"{n} {t.dtype} {tuple(t.shape)} on {t.device}" for n, t in tensors.items())
        advice = ": integers are for indices and labels, pass .float() of those that are numbers"
        floating = all(tensor.is_floating_point() for tensor in tensors.values())
        error.add_note(f"the program ran with {', '.join(shown)}{'' if floating else advice}")


def _why_unusable(name: str, value: Any, function: Callable, *, about_tensors: bool) -> str | None:
    """Return why a program may be unable to use an argument; None where nothing is unusual."""
    if not isinstance(value, Tensor):
        unusual = not about_tensors and _is_array(value)
        return f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}" if unusual else None
    if not about_tensors:
        return None
    tensors = chain.from_iterable(
        (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for module in Modules(without_handlers(function), modules_in_sight())
    )
    weights = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), value.dtype)
    if value.is_floating_point() and value.dtype != weights:
        return (
            f"{name} has dtype {value.dtype}, and the weights have {weights}: pass "
            f"{name}.to({weights}), or give the network weights of {value.dtype}"
        )
    return None


def _is_array(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, int | float) or _is_array(v) for v in value)
    return not isinstance(value, Tensor | torch.Size) and hasattr(value, "__array__")


def check_finite(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Check that arguments are finite; additive attention masks of zeros and -inf are accepted.

    :raises ValueError: if a tensor is not finite; the error names argument, rows and columns.
    """
    for name, value in named_arguments(model, args, kwargs).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            missing = takes_missing(model, name)
            check_finite_tensor(name, value, masks=True, missing=missing)


def takes_missing(model: Any, name: str) -> bool:
    """Return whether a program declares that NaN in an argument is what was not observed."""
    require_program(model)
    return getattr(without_handlers(model), "takes_missing", lambda name: False)(name)


def refuse_sparse(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse sparse tensors.

    :raises ArgumentError: naming the argument.
    """
    for name, value in named_arguments(model, args, kwargs).items():
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise ArgumentError(
                f"{name} is sparse, and densities of rows are of dense tensors: pass "
                f"{name}.to_dense()"
            )


def check_finite_batches(
    model: Callable, batches: Iterable[tuple[tuple, Mapping[str, Any]]]
) -> None:
    """Check that the arguments of all batches are finite.

    :raises ValueError: as ``check_finite``; the error names the batch too.
    """
    for number, (args, kwargs) in enumerate(batches):
        try:
            check_finite(model, args, kwargs)
        except ValueError as error:
            raise ValueError(f"batch {number} (counted from 0, as rows are): {error}") from None


# --------------------------------------------------------------------- parameters and randomness


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Refuse parameters of FSDP and other sharded tensors (``DTensor``).

    :raises UnsupportedProgramError: naming the parameter.
    """
    for module in modules:
        wrapped = type(module).__name__ == "FullyShardedDataParallel"
        for name, parameter in module.named_parameters(recurse=False):
            if wrapped or hasattr(parameter, "device_mesh"):  # a DTensor's
                raise UnsupportedProgramError(
                    f"the parameter '{name}' of {type(module).__name__} is sharded over processes "
                    "(FSDP or DTensor), and a posterior needs whole weights: leave the network "
                    "whole and train on several processes by "
                    "pyro_bdl.distributed.DataParallel_ELBO, or if it does not fit, give a prior "
                    "to few of its weights (bdl.nn.lora, AutoLastLayer)"
                )


def check_module(module: nn.Module) -> None:
    """Check that a module's parameters are whole, and a network the one that was given priors.

    :raises UnsupportedProgramError: otherwise.
    """
    refuse_sharded([module])
    if isinstance(module, SampledNetwork):
        module.check_layers()


# ------------------------------------------------------------------------------------- whole data


_ALL_ROWS = "predict with a program without subsample_size, which takes all rows"


class WholeData(OneThread):
    """Handler that refuses plates that choose rows of the arguments at random.

    Such a plate chooses other rows in each run, so that results for different draws of the latents
    would be for different data. A subsampled plate chooses rows if an argument has as many rows as
    the plate's full size. Otherwise it only scales the data that it is given.

    :param args: the program's arguments.
    :param kwargs: the program's keyword arguments.
    :param advice: the advice in the error.
    :raises UnsupportedProgramError: inside the context, for such a plate.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        advice: str = _ALL_ROWS,
    ) -> None:
        super().__init__()
        self.advice = advice
        tensors = tensors_in((args, dict(kwargs)))
        self.rows = [len(tensor) for tensor in tensors if tensor.dim()]

    def _pyro_sample(self, msg: Any) -> None:
        plate = msg["fn"]
        if not site_is_subsample(msg) or msg["value"] is not None:
            return
        chosen = plate.size if plate.subsample_size is None else plate.subsample_size
        if chosen < plate.size and plate.size in self.rows:
            raise UnsupportedProgramError(
                f"the plate '{msg['name']}' picks {chosen} of the {plate.size} rows at random in "
                f"each run: {self.advice}"
            )


def on_whole_data(model: Callable, *, advice: str = _ALL_ROWS) -> Callable:
    """The program with each run under :class:`WholeData`."""

    require_program(model)

    @functools.wraps(model, updated=())
    def program(*args: Any, **kwargs: Any) -> Any:
        with WholeData(args, kwargs, advice=advice):
            return model(*args, **kwargs)

    return program
