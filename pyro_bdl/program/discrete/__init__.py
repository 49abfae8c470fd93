"""Finite discrete latents, summed out of a run of a program exactly."""

from pyro_bdl.program.discrete.enumeration import Enumeration, why_not_enumerable
from pyro_bdl.program.discrete.summed_out import SummedOut, sum_out

__all__ = ["Enumeration", "SummedOut", "sum_out", "why_not_enumerable"]
