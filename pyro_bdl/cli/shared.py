"""Code that the subcommands share: bad input, messages and threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyro_bdl.utils.progress import logger

# Below this many numbers a step is not faster on several threads. On busy cores it is many times
# slower, since the threads wait for each other.
_WORTH_THREADS = 2**19


class BadInput(Exception):
    """Invalid input; the message says why and what to do."""


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn errors of the options and the data into ``BadInput``, with one line of text."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInput(" ".join(str(error).split())) from error


def say(text: str) -> None:
    """Give a message to the logger, which the command prints on stderr."""
    logger.warning(text)


@contextmanager
def limited_threads(numbers: int) -> Iterator[None]:
    """One thread of torch for steps with few numbers, the usual number for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if numbers < _WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
