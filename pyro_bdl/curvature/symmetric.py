"""Matrices x'x, of which one half is multiplied and the other copied."""

from torch import Tensor

_HALVED_FROM = 256


def products(x: Tensor) -> Tensor:
    """x' x for x (..., rows, m); of a large one the half above the diagonal is multiplied."""
    size = x.shape[-1]
    if size < _HALVED_FROM:
        return x.mT @ x
    left, right = x.tensor_split(2, -1)
    half = left.shape[-1]
    result = x.new_empty(*x.shape[:-2], size, size)
    result[..., :half, :half] = products(left)
    result[..., half:, half:] = products(right)
    result[..., :half, half:] = cross = left.mT @ right
    result[..., half:, :half] = cross.mT
    return result


def add_products(matrix: Tensor, x: Tensor) -> None:
    """matrix += x' x in place for x (rows, m), with a quarter of the matrix beside it."""
    if len(matrix) < _HALVED_FROM:
        matrix += x.mT @ x
        return
    half = len(matrix) // 2
    left, right = x[:, :half], x[:, half:]
    add_products(matrix[:half, :half], left)
    add_products(matrix[half:, half:], right)
    cross = left.mT @ right
    matrix[:half, half:] += cross
    matrix[half:, :half] += cross.mT
