"""Bars for long loops: in terminals and notebooks, after a second; none in files."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def shown(items: Iterable[T], description: str, progress: bool = True) -> Iterable[T]:
    """The items, with a bar for those who wait longer than a second.

    :param description: what is being done, in a few words.
    :param progress: False for no bar; with True there is one unless stderr is a file.
    """
    return tqdm(items, desc=description, disable=None if progress else True, leave=False, delay=1)
