"""Finite discrete latents, summed out of a run of a program exactly."""
