"""Conjugate gradients for several right-hand sides at once, and the quadrature that they give."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    """The solutions of H x = b for S right-hand sides.

    :param x: (S, p).
    :param sizes: the steps' sizes alpha, (steps, S), zero once a side has ended.
    :param ratios: beta, the ratios of successive squared residuals, (steps, S).
    :param residuals: relative residuals at the end, (S,).
    """

    x: Tensor
    sizes: Tensor
    ratios: Tensor
    residuals: Tensor


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    diagonal: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float,
    steps: int,
) -> Solution:
    """Solve H x = b for a positive definite H.

    A side ends where its residual, in the norm of the preconditioner's inverse, is this fraction of
    the right-hand side's.

    :param times: a function of vectors (m, p) that returns H times each.
    :param right: b, (S, p).
    :param diagonal: the preconditioner, a positive diagonal (p,).
    :param start: where x starts, (S, p); zero by default.
    :param steps: at most so many steps.
    """
    norms = _dots(right, right / diagonal)
    if start is None:
        x, residual = torch.zeros_like(right), right.clone()
    else:
        x, residual = start.clone(), right - times(start)
    conditioned = residual / diagonal
    direction, length = conditioned.clone(), _dots(residual, conditioned)
    sizes, ratios = [], []
    for _ in range(steps):
        (going,) = (length > tolerance**2 * norms).nonzero(as_tuple=True)
        if not len(going):
            break
        along = direction[going]
        curved = times(along)
        size = length[going] / _dots(along, curved)
        step = size.to(x)[:, None]
        x[going] += step * along
        residual[going] -= step * curved
        conditioned = residual[going] / diagonal
        after = _dots(residual[going], conditioned)
        ratio = after / length[going]
        direction[going] = conditioned + ratio.to(x)[:, None] * along
        length[going] = after
        sizes.append(torch.zeros_like(length).index_copy(0, going, size))
        ratios.append(torch.zeros_like(length).index_copy(0, going, ratio))
    none = length.new_zeros(0, len(right))
    return Solution(
        x,
        torch.stack(sizes) if sizes else none,
        torch.stack(ratios) if ratios else none,
        (length / norms.clamp(min=torch.finfo(norms.dtype).tiny)).sqrt(),
    )


def lanczos_quadrature(solution: Solution, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return e_1' f(T) e_1 for every right-hand side, (S,).

    T is the Lanczos matrix of M = D^-1/2 H D^-1/2 and z = D^-1/2 b, from the coefficients of
    conjugate gradients that started at zero, with D the preconditioner. Times z' z it estimates
    z' f(M) z (Golub & Meurant 2010, chapter 4; Saad 2003, section 6.7.3).

    :param function: of eigenvalues.
    """
    found = []
    for sizes, ratios in zip(solution.sizes.mT, solution.ratios.mT, strict=True):
        count = int((sizes != 0).sum())
        sizes, ratios = sizes[:count], ratios[:count]
        diagonal = 1.0 / sizes
        diagonal[1:] += ratios[:-1] / sizes[:-1]
        beside = ratios[:-1].sqrt() / sizes[:-1]
        matrix = diagonal.diag() + beside.diag(1) + beside.diag(-1)
        values, vectors = torch.linalg.eigh(matrix)
        found.append(vectors[0].square() @ function(values.clamp(min=values[-1] * 1e-15)))
    return torch.stack(found)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows, in float64."""
    return torch.einsum("sp,sp->s", a.double(), b.double())
