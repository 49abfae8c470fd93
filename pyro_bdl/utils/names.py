"""Names chosen by patterns."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

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
