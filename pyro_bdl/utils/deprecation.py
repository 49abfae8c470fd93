"""Names that a later release removes."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

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
