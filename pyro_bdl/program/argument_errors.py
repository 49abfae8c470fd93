"""Errors of a program that are caused by its arguments, such as arrays or wrong dtypes."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_bdl.errors import ArgumentError

TENSORS_NEEDED = "the program computes with tensors: pass torch.as_tensor(...) of it"


def explain(error: Exception, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raise an error that names the argument that caused an error; return if no argument did.

    :param error: the error that a run of the program raised.
    :param function: the program, also under handlers.
    :raises ArgumentError: if an argument is an array, a table or a list instead of a tensor, has
        another dtype than the weights, is sparse, or was made in inference mode.
    """
    if isinstance(error, ArgumentError):
        return
    reason = _unusual(named_arguments(function, args, kwargs), error)
    if reason is not None:
        text = (str(error).strip().splitlines() or [""])[0]
        raise ArgumentError(f"{reason} ({type(error).__name__}: {text})") from error


@contextmanager
def explained(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Apply ``explain`` to errors inside the context.

    :raises ArgumentError: see ``explain``.
    """
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        explain(error, function, args, kwargs)
        raise


def named_arguments(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the program's parameter names, or by "argument 0" etc. if it has no
    names."""
    program = _without_handlers(function)
    called = program.forward if isinstance(program, nn.Module) else program
    try:
        signature = inspect.signature(called)
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


def by_entry(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, a mapping of tensors entry by entry: ``x['ids']``."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if isinstance(value, Mapping):
            found |= by_entry({f"{name}[{key!r}]": part for key, part in value.items()})
        else:
            found[name] = value
    return found


def _without_handlers(function: Any) -> Any:
    """The program without handlers of Pyro and of this package, which accept any arguments."""
    while True:
        if (
            isinstance(function, functools.partial)
            and function.args
            and isinstance(function.args[0], Messenger)
        ):
            function = function.args[-1]
        elif "__wrapped__" in getattr(function, "__dict__", {}):
            function = function.__wrapped__
        elif isinstance(function, nn.Module) and _takes_anything(function.forward):
            inner = getattr(function, "model", None)
            if not callable(inner):
                return function
            function = inner
        else:
            return function


def _takes_anything(function: Callable) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _is_array(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, int | float) or _is_array(v) for v in value)
    return not isinstance(value, Tensor | torch.Size) and hasattr(value, "__array__")


def kind_of(value: Any) -> str:
    """The type of an argument, for messages."""
    if isinstance(value, list):
        return "list of numbers"
    return f"{type(value).__module__.partition('.')[0]} {type(value).__name__}"


def _unusual(arguments: Mapping[str, Any], error: Exception) -> str | None:
    """The message for an argument that caused an error; None if no argument did."""
    text = str(error).lower()
    others = {} if isinstance(error, RuntimeError) else arguments  # concerns tensors
    for name, value in others.items():
        if _is_array(value):
            return f"{name} is a {kind_of(value)}: {TENSORS_NEEDED}"
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.is_inference() and "inference" in text:
            return (
                f"{name} was made under torch.inference_mode() and takes no gradients: pass "
                f"{name}.clone()"
            )
        if value.layout is not torch.strided and ("sparse" in text or "layout" in text):
            return f"{name} is sparse, which the program cannot take: pass {name}.to_dense()"
    weights = _dtype_of_called(error) if "dtype" in text or "scalar type" in text else None
    differing = {n: v.dtype for n, v in tensors.items() if v.dtype != weights}
    floats = {n: dtype for n, dtype in differing.items() if dtype.is_floating_point}
    for name, dtype in (floats or differing).items() if weights is not None else ():
        other = f", or give the network weights of {dtype}" if floats else ""
        return (
            f"{name} has dtype {dtype}, and the weights have {weights}: pass {name}.to({weights})"
            + other
        )
    return None


def _dtype_of_called(error: BaseException) -> torch.dtype | None:
    """The dtype of the innermost module in whose call an error was raised."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            found = next((t.dtype for t in own if t.is_floating_point()), found)
    return found
