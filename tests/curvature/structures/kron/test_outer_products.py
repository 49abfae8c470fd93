"""Sums of outer products, kept as their vectors or as a matrix."""

import copy

import pytest
import torch

from pyro_bdl.curvature.structures.kron import outer_products
from pyro_bdl.curvature.structures.kron.outer_products import (
    OuterProductSum,
    OuterVectors,
    decompose,
)

GROUPS, SIZE = 2, 8


def made(count, start=0):
    """Sums over batches of one or two vectors, and what they add up to."""
    torch.manual_seed(start)
    sums, x = OuterProductSum(GROUPS, SIZE, torch.empty(0)), torch.randn(count, 1, GROUPS, SIZE)
    for part in x.split([1] + [2] * (count // 2) if count % 2 else 2):
        sums.add(OuterVectors(part))
    return sums, torch.einsum("ntgi,ntgj->gij", x, x)


def recomposed(sums):
    values, vectors = sums.eigen()
    eye = torch.eye(vectors.shape[2]).expand(GROUPS, -1, -1)
    torch.testing.assert_close(vectors.mT @ vectors, eye)
    return (vectors * values[:, None]) @ vectors.mT


@pytest.mark.parametrize("count", [1, 3, 4, 5, 20])
def test_eigenvectors_of_what_the_vectors_span(count):
    """X'X and X X' have the same nonzero eigenvalues (singular value decomposition)."""
    sums, expected = made(count)
    assert (sums.rows is not None) == (count <= SIZE // 2)
    torch.testing.assert_close(sums.dense(), expected)
    torch.testing.assert_close(recomposed(sums), expected)
    assert sums.vectors.shape[2] == (count if count <= SIZE // 2 else SIZE)
    assert sums.rows is None and sums.matrix is None  # one form at a time
    torch.testing.assert_close(sums.dense(), expected)


def test_vectors_that_depend_on_each_other():
    """Directions of eigenvalue zero are still orthonormal."""
    sums = OuterProductSum(1, SIZE, torch.empty(0))
    x = torch.randn(SIZE)
    sums.add(OuterVectors(torch.stack([x, x, 0 * x])[:, None, None]))
    values, vectors = sums.eigen()
    torch.testing.assert_close(vectors[0].T @ vectors[0], torch.eye(3))
    torch.testing.assert_close(values[0], torch.stack([0 * x[0], 0 * x[0], 2 * x.square().sum()]))


@pytest.mark.parametrize("counts", [(1, 2), (3, 3), (2, 9), (9, 2), (9, 9)])
@pytest.mark.parametrize("decomposed", ["neither", "first", "second", "both"])
def test_sums_of_sums(counts, decomposed):
    (first, one), (second, two) = made(counts[0]), made(counts[1], start=1)
    if decomposed in ("first", "both"):
        first.eigen()
    if decomposed in ("second", "both"):
        second.eigen()
    first.merge(second)
    torch.testing.assert_close(first.dense(), one + two)
    torch.testing.assert_close(second.dense(), two)
    assert (first.rows is not None) == (sum(counts) <= SIZE // 2)
    first.scale(0.5)
    torch.testing.assert_close(recomposed(first), 0.5 * (one + two))


def test_positions_and_totals():
    x = torch.randn(3, 6, GROUPS, SIZE)
    for given in (x, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)):
        expected = torch.einsum("ntgi,ntgj->gij", x, x)
        torch.testing.assert_close(OuterVectors(given).total, expected)
        for vectors in (
            OuterVectors(given),
            OuterVectors(given, reused=True),
            OuterVectors(total=expected),
        ):
            sums = OuterProductSum(GROUPS, SIZE, x)
            sums.add(vectors)
            sums.add(vectors)
            torch.testing.assert_close(sums.dense(), 2 * expected)


def test_more_directions():
    """Added directions have eigenvalue zero: those that another sum spans, or all."""
    (first, expected), (second, other) = made(2), made(1, start=1)
    first.extend(second)
    assert first.vectors.shape[2] == 3
    torch.testing.assert_close(recomposed(first), expected)
    inside = first.vectors @ first.vectors.mT
    torch.testing.assert_close(inside @ other, other)
    first.complete()
    assert first.vectors.shape[2] == SIZE
    torch.testing.assert_close(recomposed(first), expected)
    full, expected = made(9)
    full.extend(second)
    torch.testing.assert_close(recomposed(full), expected)


def test_equal_sums_share_what_they_are_decomposed_into():
    (first, _), (second, expected), (third, _) = made(3), made(3, start=1), made(5)
    fourth = copy.deepcopy(second)
    decompose([first, second, third, fourth])
    assert fourth.vectors is second.vectors and first.vectors is not second.vectors
    fourth.merge(third)  # which leaves the other as it is
    torch.testing.assert_close(recomposed(second), expected)


@pytest.mark.parametrize("double_up_to", [1024, 0])
def test_small_eigenvalues_in_float32(double_up_to):
    """The vectors determine them; in the float32 sum they are lost in rounding."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 4))[0] for size in (4, SIZE))
    x = (left @ torch.diag(torch.tensor([1e2, 1.0, 1.0, 1e-2])) @ right.T).float()
    sums = OuterProductSum(1, SIZE, x)
    sums.add(OuterVectors(x[:, None, None]))
    exact = torch.linalg.svdvals(x.double()).square().flip(0)
    found = sums.eigen(double_up_to=double_up_to)[0][0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0)
    of_sum = torch.linalg.eigvalsh(x.T @ x)[-4:].double()
    assert abs(of_sum[0] / exact[0] - 1.0) > 0.5


def test_on_another_device(device):
    sums = OuterProductSum(GROUPS, SIZE, torch.empty(0, device=device))
    x = torch.randn(3, 1, GROUPS, SIZE, device=device)
    sums.add(OuterVectors(x))
    values, vectors = sums.eigen()
    expected = torch.einsum("ntgi,ntgj->gij", x, x)
    torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, expected)


def test_a_matrix_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    """Three vectors of 3000 numbers fit; their matrix, 36 MB, and its decomposition do not."""
    monkeypatch.setattr(outer_products, "available_memory", lambda device: 10**8)
    sums = OuterProductSum(1, 3000, torch.empty(0, dtype=torch.float32), site="weight")
    sums.add(OuterVectors(torch.randn(3, 1, 1, 3000, dtype=torch.float32)))
    with pytest.raises(MemoryError, match=r"factor of 3,000 x 3,000 numbers of the site 'weight'"):
        sums.as_matrix()
    monkeypatch.setattr(outer_products, "available_memory", lambda device: 2 * 10**8)
    assert sums.as_matrix().shape == (1, 3000, 3000)
    assert outer_products.memory_of_decomposition(3000, 4) == 4 * 4 * 3000**2
