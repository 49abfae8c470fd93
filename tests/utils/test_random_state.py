"""Random numbers at a seed, after which the caller draws what it would have drawn."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from pyro_bdl.utils.random_state import (
    own_randomness,
    random_states,
    seeded,
    set_random_states,
    set_torch_states,
    torch_states,
)


def drawn():
    return torch.randn(3).tolist(), random.random(), np.random.rand(2).tolist()


def states():
    torchs, (kind, numbers, *rest) = torch.get_rng_state(), np.random.get_state()
    return torchs.tolist(), random.getstate(), kind, numbers.tolist(), rest


@pytest.mark.parametrize("fails", [False, True])
def test_numbers_of_a_seed_leave_the_caller_s_state(fails):
    before, found = states(), []
    for _ in range(2):
        with suppress(ZeroDivisionError), seeded(7):
            with seeded(0):
                drawn()
            found.append(drawn())
            assert not fails or 1 / 0
    assert states() == before
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert found == 2 * [drawn()]
    with seeded(2**40):  # more than numpy takes
        assert drawn() != drawn()


def test_own_numbers_are_those_that_the_caller_draws_next():
    with own_randomness():
        found = drawn()
    assert found == drawn()


def test_generators_go_on_from_stored_states():
    stored, torchs = random_states(), torch_states()
    expected = drawn()
    set_random_states(stored)
    assert drawn() == expected
    set_torch_states(torchs | {"cuda:9": torchs["cpu"]})  # a device that is not here
    assert drawn()[0] == expected[0]
