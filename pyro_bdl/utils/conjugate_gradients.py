"""Conjugate gradients for several right-hand sides at once, and the quadrature that they give."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_bdl.utils.precision import double, working_dtype


class Solution(NamedTuple):
    """The solutions of H x = b for S right-hand sides.

    :param x: (S, p).
    :param sizes: the steps' sizes alpha, (steps, S), zero once a side has ended.
    :param ratios: beta, the ratios of successive squared residuals, (steps, S).
    :param converged: whether every side ended before the last step.
    """

    x: Tensor
    sizes: Tensor
    ratios: Tensor
    converged: bool


def conjugate_gradients(
    times: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    diagonal: Tensor,
    *,
    start: Tensor | None = None,
    limit: float | Tensor,
    steps: int,
) -> Solution:
    """Solve H x = b for a positive definite H.

    A side ends where the norm (r' D^-1 r)^1/2 of its residual r is below the limit, with D the
    preconditioner; where H - D is positive semi-definite, this bounds the error e of x in
    (e' H e)^1/2. It ends as well where r is 10 times the rounding of the first residual, each entry
    in units of the root of H's diagonal, since products are not known beyond.

    :param times: a function of vectors (m, p) that returns H times each.
    :param right: b, (S, p).
    :param precondition: a function of vectors (m, p) that returns D^-1 times each.
    :param diagonal: H's diagonal, about, (p,).
    :param start: where x starts, (S, p); zero by default.
    :param limit: of the residuals' norms, a number or (S,).
    :param steps: at most so many steps.
    :raises FloatingPointError: if a product is not finite.
    """
    if start is None:
        x, residual = torch.zeros_like(right), right.clone()
    else:
        x, residual = start.clone(), right - times(start)
    conditioned = precondition(residual)
    direction, length = conditioned.clone(), _dots(residual, conditioned)
    limits = torch.as_tensor(limit, dtype=length.dtype, device=length.device).square()
    rounding = (10 * torch.finfo(right.dtype).eps) ** 2 * _dots(residual, residual / diagonal)
    going = torch.arange(len(right), device=right.device)
    sizes, ratios = [], []
    for _ in range(steps):
        if not torch.isfinite(length).all():
            raise FloatingPointError("a product with the matrix is not finite")
        known = _dots(residual, residual / diagonal) > rounding
        (going,) = ((length > limits) & known).nonzero(as_tuple=True)
        if not len(going):
            break
        along = direction[going]
        curved = times(along)
        size = length[going] / _dots(along, curved)
        step = size.to(x)[:, None]
        x[going] += step * along
        residual[going] -= step * curved
        conditioned = precondition(residual[going])
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
        not len(going),
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
        sizes, ratios = double(sizes[:count]), double(ratios[:count])
        diagonal = 1.0 / sizes
        diagonal[1:] += ratios[:-1] / sizes[:-1]
        beside = ratios[:-1].sqrt() / sizes[:-1]
        matrix = diagonal.diag() + beside.diag(1) + beside.diag(-1)
        values, vectors = torch.linalg.eigh(matrix)
        found.append(vectors[0].square() @ function(values.clamp(min=values[-1] * 1e-15)))
    return torch.stack(found)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows, in the working dtype."""
    dtype = working_dtype(a.device)
    return torch.einsum("sp,sp->s", a.to(dtype), b.to(dtype))
