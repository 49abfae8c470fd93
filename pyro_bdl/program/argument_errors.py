"""Errors of a program that its arguments explain: arrays that are no tensors, and other dtypes."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_bdl.errors import ArgumentError

_SAYS_DTYPE = ("dtype", "scalar type", "Input type")


def explain(error: Exception, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Return where the arguments do not explain the error.

    :param error: what a run of the program raised.
    :param function: the program, also under handlers.
    :raises ArgumentError: naming the arguments that are arrays, tables or lists in place of
        tensors, or the dtypes of the tensors where the error is of dtypes.
    """
    if isinstance(error, ArgumentError):
        return
    given = named_arguments(function, args, kwargs)
    if isinstance(error, TypeError | AttributeError):
        arrays = [f"{n} is a {_kind(v)}" for n, v in given.items() if _is_array(v)]
        if arrays:
            raise ArgumentError(
                f"the program could not compute with its arguments ({', '.join(arrays)}): pass "
                f"tensors, such as torch.as_tensor(...), of the network's dtype"
            ) from error
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _SAYS_DTYPE):
        tensors = [
            f"{n} is {str(v.dtype).removeprefix('torch.')}"
            for n, v in given.items()
            if isinstance(v, Tensor)
        ]
        if tensors:
            raise ArgumentError(
                f"the arguments ({', '.join(tensors)}) are not of the dtype that the program "
                f"computes in ({str(error).splitlines()[0]}): convert them with .to(dtype), or the "
                f"network with .float() or .double()"
            ) from error


def named_arguments(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that the program gives them; "argument 0" where it gives none."""
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
    return named


def _without_handlers(function: Any) -> Any:
    """The program under handlers of Pyro and of this package, which take any arguments."""
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


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "list of numbers"
    return f"{type(value).__module__.split('.')[0]} {type(value).__name__}"
