"""Simulation-based calibration."""

from pyro_bdl.calibration.simulation import (
    Calibration,
    default_quantities,
    simulate,
    simulation_based_calibration,
)

__all__ = ["Calibration", "default_quantities", "simulate", "simulation_based_calibration"]
