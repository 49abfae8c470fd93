"""Temperatures: schedules over training steps, the scaling with a network's width, and sweeps.

A schedule is a callable ``step -> temperature``.
"""

from pyro_bdl.temperature.overparameterized import overparameterized
from pyro_bdl.temperature.schedules import Schedule, constant, cosine, cyclical, linear

__all__ = ["Schedule", "constant", "cosine", "cyclical", "linear", "overparameterized"]
