"""Microcanonical samplers: Langevin dynamics at constant energy, with and without Metropolis."""
