"""Jacobians of a batch in the latents, kept as the factors that back-propagation gives."""
