"""One policy for progress bars, and the package's logger.

Bars are shown in terminals and notebooks, and not where the output goes to a file. An argument
``progress`` is None for this policy, or True or False.
"""

import logging
import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger("pyro_bdl")
logger.addHandler(logging.NullHandler())

T = TypeVar("T")


def is_silent(progress: bool | None) -> bool:
    """Return whether a bar is hidden, the argument ``disable`` of tqdm.

    :param progress: True or False to show it or not; None to show it in terminals and notebooks.
    """
    if progress is not None:
        return not progress
    return not ("ipykernel" in sys.modules or _is_terminal(sys.stderr))


def progress_bar(
    parts: Iterable[T],
    description: str,
    progress: bool | None = None,
    *,
    total: int | None = None,
) -> Iterable[T]:
    """The same parts, with a bar after a second.

    :param progress: see :func:`is_silent`.
    :param total: their number, where they have no length.
    """
    hide = is_silent(progress)
    return tqdm(parts, desc=description, total=total, leave=False, delay=1, disable=hide)


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False
