"""Temperatures: schedules over training steps, the scaling with a network's width, and sweeps.

A schedule is a callable ``step -> temperature``.
"""

from pyro_bdl.temperature.overparameterized import overparameterized, size_of
from pyro_bdl.temperature.result import Sweep
from pyro_bdl.temperature.schedules import Schedule, constant, cosine, cyclical, linear
from pyro_bdl.temperature.sweep import sweep

__all__ = [
    "Schedule",
    "Sweep",
    "constant",
    "cosine",
    "cyclical",
    "linear",
    "overparameterized",
    "size_of",
    "sweep",
]
