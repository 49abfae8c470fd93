"""Linear algebra: products x' x at half the cost, and Cholesky factors with reported jitter."""

import torch
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.precision import double

_HALVED_FROM = 256
_DOUBLE_UP_TO = 4096  # rows; larger matrices are summed and factorized in their own dtype


def widened(x: Tensor, size: int) -> Tensor:
    """Return ``x`` in float64 if matrices of ``size`` rows are summed and factorized in it.

    A sum in float32 fills a matrix's null space with 1e-7 of its largest eigenvalue.
    """
    return double(x) if size <= _DOUBLE_UP_TO else x


def products(x: Tensor) -> Tensor:
    """Return x' x for x (..., rows, m). If m is large, only the half above the diagonal is
    multiplied."""
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
    """Add x' x to ``matrix`` in place for x (rows, m); needs a quarter of the matrix as extra
    memory."""
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


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """The lower Cholesky factor, computed in float64 if the matrix is small enough.

    Jitter is added to the diagonal only after a failure; a warning reports its size. Inside a trace
    or ``vmap``, where no value can be read, a failure gives NaN.

    :param matrix: symmetric, (n, n).
    :param what: a name for the matrix in errors and warnings.
    :raises ValueError: if even large jitter does not help, or entries are not finite.
    """
    matrix = widened(matrix, len(matrix))
    factor, info = torch.linalg.cholesky_ex(matrix)
    if is_transformed():
        return torch.where(info == 0, factor, torch.nan)
    if not info:
        return factor
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{what} holds NaN or infinity: the network's output overflows somewhere")
    scale = matrix.diagonal().detach().abs().mean().clamp(min=1e-30)
    jitter = 10 * torch.finfo(matrix.dtype).eps
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    while jitter <= 1e-2:
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * scale * eye)
        if not info:
            warn(
                f"{what} is not positive definite in {str(matrix.dtype).removeprefix('torch.')}: "
                f"{float(jitter * scale):.3g} was added to its diagonal "
                f"({jitter:.0e} of the diagonal's mean)",
                "jitter",
            )
            return factor
        jitter *= 10
    lowest = torch.linalg.eigvalsh(matrix)[0]
    raise ValueError(
        f"{what} is not positive definite (lowest eigenvalue {float(lowest):.3g}): train longer "
        "until the MAP is a maximum, or use the Gauss-Newton curvature, which cannot be "
        'indefinite; where a hierarchical prior is the cause, structure="kron" or "diag", which '
        "ignore how its scales and weights are coupled"
    )
