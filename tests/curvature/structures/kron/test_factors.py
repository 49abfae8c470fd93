"""Sums of outer products, stored as their vectors or as a matrix, and their eigenpairs."""

import copy

import pytest
import torch
from helpers import second_device

from pyro_bdl.curvature.structures.kron.factors import KroneckerFactor, Outer, decompose, outer
from pyro_bdl.utils import memory

GROUPS, SIZE = 2, 8


def made(count, start=0, device="cpu"):
    """A factor of batches of one or two vectors, and what it adds up to."""
    torch.manual_seed(start)
    x = second_device.moved(torch.randn(count, 1, GROUPS, SIZE), torch.device(device))
    factor = KroneckerFactor(GROUPS, SIZE, x.new_empty(0), "w")
    for part in x.split([1] + [2] * (count // 2) if count % 2 else 2):
        factor.add(outer(part))
    return factor, torch.einsum("ntgi,ntgj->gij", x, x)


def recomposed(factor):
    values, vectors = factor.values, factor.vectors
    eye = torch.eye(vectors.shape[2]).to(vectors).expand(GROUPS, -1, -1)
    torch.testing.assert_close(vectors.mT @ vectors, eye)
    return (vectors * values[:, None]) @ vectors.mT


@pytest.mark.parametrize("count", [1, 3, 4, 5, 20])
def test_eigenvectors_of_what_the_vectors_span(count):
    """X'X and X X' have the same nonzero eigenvalues (singular value decomposition)."""
    factor, expected = made(count)
    assert (factor.matrix is None) == (count <= SIZE // 2)
    factor.decompose()
    torch.testing.assert_close(recomposed(factor), expected)
    assert factor.vectors.shape[2] == (count if count <= SIZE // 2 else SIZE)
    assert not factor.rows and factor.matrix is None  # one form at a time
    factor.complete()  # with directions of eigenvalue zero
    assert factor.vectors.shape[2] == SIZE
    torch.testing.assert_close(recomposed(factor), expected)


@pytest.mark.parametrize("counts", [(1, 2), (3, 3), (2, 9), (9, 2), (9, 9)])
def test_sums_of_sums(counts):
    (earlier, one), (later, two) = made(counts[0]), made(counts[1], start=1)
    earlier.decompose()
    later.add_decomposed(earlier)
    assert (later.matrix is None) == (sum(counts) <= SIZE // 2)
    later.scale(0.5)
    later.decompose()
    torch.testing.assert_close(recomposed(later), 0.5 * (one + two))
    torch.testing.assert_close(recomposed(earlier), one)


def test_positions_and_totals():
    x = torch.randn(3, 6, GROUPS, SIZE)
    for given in (x, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)):
        expected = torch.einsum("ntgi,ntgj->gij", x, x)
        torch.testing.assert_close(outer(given).total(), expected)
        for vectors in (outer(given), Outer(None, lambda expected=expected: expected)):
            factor = KroneckerFactor(GROUPS, SIZE, x, "w")
            factor.add(vectors)
            factor.add(vectors)
            torch.testing.assert_close(factor.as_matrix(), 2 * expected)


def test_equal_factors_share_their_eigenpairs():
    (first, _), (second, expected), (third, _) = made(3), made(3, start=1), made(5)
    fourth = copy.deepcopy(second)
    decompose([first, second, third, fourth])
    assert fourth.vectors is second.vectors and first.vectors is not second.vectors
    torch.testing.assert_close(recomposed(fourth), expected)


@pytest.mark.parametrize("double_up_to", [1024, 0])
def test_small_eigenvalues_in_float32(double_up_to):
    """The vectors determine them; in the float32 sum they are lost in rounding."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 4))[0] for size in (4, SIZE))
    x = (left @ torch.diag(torch.tensor([1e2, 1.0, 1.0, 1e-2])) @ right.T).float()
    factor = KroneckerFactor(1, SIZE, x, "w")
    factor.add(outer(x[:, None, None]))
    factor.decompose(double_up_to=double_up_to)
    exact = torch.linalg.svdvals(x.double()).square().flip(0)
    torch.testing.assert_close(factor.values[0].double(), exact, rtol=1e-2, atol=0)
    of_sum = torch.linalg.eigvalsh(x.T @ x)[-4:].double()
    assert abs(of_sum[0] / exact[0] - 1.0) > 0.5


def test_on_another_device(device):
    factor, expected = made(3, device=device)
    factor.decompose()
    torch.testing.assert_close(recomposed(factor), expected)


def test_a_matrix_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    """Three vectors of 3000 numbers fit; their matrix, 36 MB, and its decomposition do not."""
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**8)
    factor = KroneckerFactor(1, 3000, torch.empty(0, dtype=torch.float32), "weight")
    factor.add(outer(torch.randn(3, 1, 1, 3000, dtype=torch.float32)))
    with pytest.raises(MemoryError, match=r"factor of 3,000 x 3,000 numbers of the site 'weight'"):
        factor.as_matrix()
    monkeypatch.setattr(memory, "available_memory", lambda device: 2 * 10**8)
    assert factor.as_matrix().shape == (1, 3000, 3000)
