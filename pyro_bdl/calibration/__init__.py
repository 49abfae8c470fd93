"""Simulation-based calibration of inference, and calibration of predictions."""

from pyro_bdl.calibration.simulation import Calibration, simulation_based_calibration
from pyro_bdl.calibration.temperature import temperature_scaling

__all__ = ["Calibration", "simulation_based_calibration", "temperature_scaling"]
