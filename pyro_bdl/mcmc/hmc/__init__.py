"""HMC and NUTS, on Pyro or on NumPyro."""
