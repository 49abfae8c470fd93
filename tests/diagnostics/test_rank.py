"""Ranks, folded ranks, order statistics."""

import numpy as np
import pytest
import torch
from scipy.stats import norm, rankdata

from pyro_bdl.diagnostics.rank import (
    average_ranks,
    folded,
    largest,
    normal_scores,
    ordered,
    quantile_of_sorted,
)


def inputs(shape):
    rng = np.random.default_rng(3)
    yield rng.standard_normal(shape)
    yield rng.integers(0, 3, shape).astype(float)
    yield np.ones(shape)
    yield np.round(rng.standard_cauchy(shape), 1)


@pytest.mark.parametrize("shape", [(1, 7), (3, 9), (4, 1), (5, 200)])
def test_ranks_with_ties(shape):
    """z = Phi^-1((r - 3/8) / (n + 1/4)) with average ranks (Vehtari et al. 2021, section 4.1)."""
    for x in inputs(shape):
        expected = rankdata(x, axis=-1)
        given = ordered(torch.from_numpy(x))
        np.testing.assert_array_equal(average_ranks(given).numpy(), expected)
        scores = norm.ppf((expected - 3 / 8) / (shape[-1] + 1 / 4))
        np.testing.assert_allclose(normal_scores(given).numpy(), scores, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shape", [(3, 9), (4, 10), (5, 200)])
def test_ranks_of_distances_from_the_median(shape):
    """Folded draws |x - median| (Vehtari et al. 2021)."""
    for x in inputs(shape):
        distances = np.abs(x - np.median(x, axis=-1, keepdims=True))
        found = folded(ordered(torch.from_numpy(x)))
        np.testing.assert_array_equal(found.values.numpy(), np.sort(distances, -1))
        np.testing.assert_array_equal(average_ranks(found).numpy(), rankdata(distances, axis=-1))


@pytest.mark.parametrize("count", [1, 4, 199])
def test_largest(count):
    for x in inputs((5, 200)):
        found = largest(torch.from_numpy(x), count)
        np.testing.assert_array_equal(found.values.numpy(), np.sort(x, -1)[:, -count:])
        at_places = np.take_along_axis(x, found.places.numpy(), -1)
        np.testing.assert_array_equal(at_places, found.values.numpy())
        assert all(len(set(row.tolist())) == count for row in found.places)


@pytest.mark.parametrize("level", [0, 0.05, 0.3, 0.5, 0.95, 1])
@pytest.mark.parametrize("n", [1, 2, 9, 400])
def test_quantiles_are_those_of_numpy_to_the_last_digit(n, level):
    for x in inputs((3, n)):
        in_order = torch.from_numpy(np.sort(x, -1))
        new = quantile_of_sorted(in_order, level)
        np.testing.assert_array_equal(new.numpy(), np.quantile(x, level, axis=-1))
