"""Names: chosen by patterns, of a module's attributes that are elsewhere, and those that a later
release removes."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar

Names = str | Sequence[str] | Callable[[str], bool]


def chooser(names: Names, argument: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name is chosen.

    :param names: a pattern (shell wildcards), several of which one must match, or such a function.
    :param argument: for the message.
    :raises TypeError: for anything else.
    """
    if callable(names):
        return names
    patterns = (names,) if isinstance(names, str) else names
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"{argument} must be a pattern of names such as '*.weight', several of them, or a "
            f"function of a name, got {type(names).__name__}"
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def attributes_elsewhere(module: str, **homes: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for names that other modules hold, imported at their first use.

    :param module: the module's name, for the message.
    :param homes: name -> the module that holds it, or the module itself.
    """

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = import_module(homes[name])
        return home if homes[name] == f"{module}.{name}" else getattr(home, name)

    return attribute


Named = TypeVar("Named", bound=Callable[..., Any])


def deprecated(*, since: str, until: str, instead: str) -> Callable[[Named], Named]:
    """Mark a function, or a class, that warns when it is called and goes with a later release.

    A name stays for one release with the warning: a test fails if it is still there at ``until``.

    :param since: the release that warns first.
    :param until: the release that lacks it, at least the one after ``since``.
    :param instead: what to call in its place.
    """

    def marked(named: Named) -> Named:
        message = (
            f"{named.__qualname__} is deprecated since pyro_bdl {since} and leaves with {until}: "
            f"use {instead}"
        )

        def warning(function: Callable[..., Any]) -> Any:
            @functools.wraps(function)
            def warned(*args: Any, **kwargs: Any) -> Any:
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                return function(*args, **kwargs)

            return warned

        result: Any = named
        if inspect.isclass(named):
            result.__init__ = warning(named.__init__)
        else:
            result = warning(named)
        result.__deprecated__, result.__leaves_with__ = message, until
        return result

    return marked
