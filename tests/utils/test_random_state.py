"""Random numbers of one thread, which are those of torch's own generators."""

import random
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributions as dist
import torch.nn.functional as F

from pyro_bdl.utils.random_state import (
    everywhere,
    explicit,
    normal_like,
    own_randomness,
    permutation,
    process_seeded,
    seeded,
    uniform_like,
)


def _numbers():
    x = torch.ones(4)
    return [
        torch.randn(3),
        torch.rand(3),
        torch.randn_like(x),
        torch.rand_like(x),
        torch.randperm(5),
        torch.randint(5, (4,)),
        torch.randint(2, 5, (4,)),
        torch.bernoulli(0.5 * x),
        torch.empty(3).normal_(),
        torch.empty(2).exponential_(),
        F.dropout(x),
        torch.rrelu(-x, training=True),
        dist.Normal(0.0, 1.0).sample(),
        dist.Gamma(2.0, 3.0).rsample(),
        dist.Dirichlet(x).sample(),
        dist.Categorical(x).sample((4,)),
        dist.Poisson(3.0).sample(),
        dist.Binomial(3, 0.5).sample(),
        torch.nn.Linear(2, 2).weight.detach(),
        torch.vmap(lambda row: torch.randn_like(row) + torch.randn(2), randomness="different")(
            torch.ones(3, 2)
        ),
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_seeded_numbers_are_those_of_torch(nested):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = _numbers()
    state = torch.get_rng_state()
    if nested:
        with seeded(0):
            torch.randn(2)
            with seeded(3):
                found = _numbers()
    else:
        with seeded(3):
            found = _numbers()
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)


def test_own_numbers_are_those_that_the_caller_draws_next():
    with own_randomness():
        found = _numbers()
    assert all(map(torch.equal, found, _numbers()))


def test_other_threads_draw_what_they_would():
    begun, done = threading.Event(), threading.Event()
    found = []

    def draw():
        begun.wait(10)
        found.append(torch.randn(3))
        done.set()

    torch.manual_seed(1)
    expected = torch.randn(6)
    thread = threading.Thread(target=draw)
    thread.start()
    torch.manual_seed(1)
    with seeded(2):
        torch.randn(5)
        begun.set()
        assert done.wait(10)
        torch.randn(5)
    thread.join()
    torch.testing.assert_close(torch.cat([found[0], torch.randn(3)]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fails", [False, True])
def test_generators_of_the_process_are_put_back(fails):
    def drawn():
        return torch.randn(3).tolist(), random.random(), np.random.rand()

    def states():
        torchs, (kind, numbers, *rest) = torch.get_rng_state(), np.random.get_state()
        return torchs.tolist(), random.getstate(), kind, numbers.tolist(), rest

    before, found = states(), []
    for _ in range(2):
        with suppress(ZeroDivisionError), process_seeded(7, torch.device("cpu")):
            found.append(drawn())
            assert not fails or 1 / 0
    assert states() == before
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert found == 2 * [drawn()]


def test_explicit_numbers_go_on_where_seeded_ones_ended():
    like = torch.ones(3)
    with seeded(5) as generators:
        torch.randn(2)
        expected = normal_like(like), uniform_like(like), permutation(6, like.device), torch.rand(2)
    state = torch.get_rng_state()
    with seeded(5) as generators:
        torch.randn(2)
    with explicit(generators):
        found = [normal_like(like), uniform_like(like), permutation(6, like.device)]
        with everywhere():
            found.append(torch.rand(2))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)
    with everywhere():
        torch.rand(2)
    assert not torch.equal(torch.get_rng_state(), state)
