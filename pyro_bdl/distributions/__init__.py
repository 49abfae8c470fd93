"""Distributions that Pyro lacks; helpers that split distributions into tensors and copy them."""
