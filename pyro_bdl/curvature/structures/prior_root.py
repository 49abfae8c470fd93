"""A root of the prior precision."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_bdl.curvature.prior import PriorPrecision


class PriorRoot:
    """A matrix R with Lambda = R R', the prior precision, in float64.

    R is diagonal but for the numbers whose priors are coupled, where it is a Cholesky factor L.

    :param prior: Lambda.
    :param parts: the slices of the sites, to name one in errors.
    :param purpose: the words before "inverts the prior precision" in errors.
    :raises ValueError: if the prior precision has no inverse, or is indefinite.
    """

    def __init__(self, prior: PriorPrecision, parts: Mapping[str, slice], purpose: str) -> None:
        diagonal = prior.diagonal.double()
        if not (diagonal > 0).all():
            lowest = int(diagonal.detach().argmin())
            site = next(name for name, part in parts.items() if part.start <= lowest < part.stop)
            raise ValueError(
                f"{purpose} inverts the prior precision, which is {float(diagonal[lowest]):.3g} at "
                f"site '{site}': give this site a prior with a finite variance, or use "
                'structure="full"'
            )
        self.scale, self.indices = diagonal.sqrt(), prior.indices
        if prior.indices is None or prior.dense is None:
            self.indices = None
            return
        self.tril, failed = torch.linalg.cholesky_ex(prior.dense.double())
        if failed:
            sites = [
                name for name, part in parts.items()
                if ((prior.indices >= part.start) & (prior.indices < part.stop)).any()
            ]  # fmt: skip
            raise ValueError(
                f"{purpose} inverts the prior precision, which is indefinite over the sites "
                f"{', '.join(sites)}, as under a hyperprior: leave the hyperparameter's site out "
                'of the subset, or use structure="full"'
            )

    def log_det(self) -> Tensor:
        """Return log det Lambda."""
        if self.indices is None:
            return 2.0 * self.scale.log().sum()
        own = self.scale.log().index_fill(0, self.indices, 0.0).sum()
        return 2.0 * (own + self.tril.diagonal().log().sum())

    def solve(self, x: Tensor) -> Tensor:
        """Return R^-1 x for x (..., p)."""
        return self._replaced(
            x / self.scale,
            lambda tril: torch.linalg.solve_triangular(tril, self._inside(x), upper=False),
        )

    def solve_transposed(self, x: Tensor) -> Tensor:
        """Return R^-T x for x (..., p)."""
        return self._replaced(
            x / self.scale,
            lambda tril: torch.linalg.solve_triangular(tril.mT, self._inside(x), upper=True),
        )

    def times(self, x: Tensor) -> Tensor:
        """Return R x for x (..., p)."""
        return self._replaced(x * self.scale, lambda tril: tril @ self._inside(x))

    def transposed_times(self, x: Tensor) -> Tensor:
        """Return R' x for x (..., p)."""
        return self._replaced(x * self.scale, lambda tril: tril.mT @ self._inside(x))

    def _inside(self, x: Tensor) -> Tensor:
        """The coupled numbers of x (..., p) as columns (r, N)."""
        return x[..., self.indices].reshape(-1, len(self.tril)).mT

    def _replaced(self, x: Tensor, columns: Callable[[Tensor], Tensor]) -> Tensor:
        if self.indices is None:
            return x
        inside = columns(self.tril).mT.reshape(*x.shape[:-1], len(self.tril))
        return x.index_copy(-1, self.indices, inside)
