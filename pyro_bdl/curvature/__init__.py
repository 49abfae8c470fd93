"""Curvature of a program's log likelihood: the structures of the Gaussian posterior that it gives
with a prior."""

from pyro_bdl.curvature.structures import (
    EKFAC,
    Diagonal,
    Full,
    Kernel,
    Kron,
    LowRank,
    Samples,
)

__all__ = ["EKFAC", "Diagonal", "Full", "Kernel", "Kron", "LowRank", "Samples"]
