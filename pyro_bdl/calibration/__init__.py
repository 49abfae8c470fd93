"""Simulation-based calibration."""

from pyro_bdl.calibration.simulation import Calibration, simulation_based_calibration

__all__ = ["Calibration", "simulation_based_calibration"]
