"""Code that the subcommands share: bad input, messages, threads, and the network of a data set."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pyro_bdl import models
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.nn import bayesianize
from pyro_bdl.priors import FanIn

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
    """Print a message on stderr."""
    print(f"pyro-bdl: {text}", file=sys.stderr)


@contextmanager
def limited_threads(numbers: int) -> Iterator[None]:
    """One thread of torch for steps with few numbers, the usual number for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if numbers < _WORTH_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def network(data: Dataset, hidden: list[int], activation: Callable[[], nn.Module]) -> nn.Module:
    """The program of a network with these hidden layers, for a data set's task."""
    outputs = len(data.class_names) if data.task == "classification" else 1
    sizes = [data.x_train.shape[1], *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    net = bayesianize(nn.Sequential(*layers, nn.Linear(sizes[-1], outputs)), FanIn(1.0))
    kind = models.Classification if data.task == "classification" else models.Regression
    return kind(net, num_data=len(data.x_train))
