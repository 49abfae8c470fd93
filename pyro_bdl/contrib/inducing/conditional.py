"""The posterior of a linear regression on pseudo-data, under a standard Normal prior."""

from functools import cached_property

import torch
from torch import Tensor


class Conditional:
    """Q(b) of columns b_o ~ N(0, I) given pseudo-data r_o = A b_o + N(0, I), over groups.

    Q(b_o) = N(C A' r_o, C) with C = (I + A'A)^-1. The smaller of I + A'A and I + AA' is factored.

    :param rows: A, (groups, rows, columns).
    :param targets: r, (groups, rows, outputs).
    """

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets
        self.by_rows = rows.shape[-2] < rows.shape[-1]
        gram = rows @ rows.mT if self.by_rows else rows.mT @ rows
        self.one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        self.factor = torch.linalg.cholesky(gram + self.one)

    def _solved(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right, self.factor)

    @cached_property
    def mean(self) -> Tensor:
        """E[b], (groups, columns, outputs)."""
        if self.by_rows:
            return self.rows.mT @ self._solved(self.targets)
        return self._solved(self.rows.mT @ self.targets)

    def draw(self, noise: Tensor, pseudo_noise: Tensor) -> Tensor:
        """b, (groups, columns, outputs), from Normal numbers of the shapes of b and, with fewer
        rows than columns, of r: b = e + A' (I + AA')^-1 (r - A e - e'), by Matheron's rule."""
        if self.by_rows:
            misfit = self.targets - self.rows @ noise - pseudo_noise.view_as(self.targets)
            return noise + self.rows.mT @ self._solved(misfit)
        offset = torch.linalg.solve_triangular(self.factor.mT, noise, upper=True)
        return self.mean + offset

    def log_ratio(self, b: Tensor) -> Tensor:
        """log Q(b) - log N(b; 0, I), a scalar: by Bayes' rule the pseudo-data's log likelihood
        minus their log evidence."""
        best = (self.targets - self.rows @ self.mean).square().sum() + self.mean.square().sum()
        misfit = (self.targets - self.rows @ b).square().sum()
        return 0.5 * (best - misfit) + self._half_log_det()

    def kl(self) -> Tensor:
        """KL(Q || N(0, I)), a scalar."""
        inverse = torch.linalg.solve_triangular(self.factor, self.one, upper=False)
        trace = inverse.square().sum() - self.factor.shape[:-1].numel()
        moved = self.targets.shape[-1] * trace + self.mean.square().sum()
        return 0.5 * moved + self._half_log_det()

    def _half_log_det(self) -> Tensor:
        logs = self.factor.diagonal(dim1=-2, dim2=-1).log().sum()
        return self.targets.shape[-1] * logs
