"""Kronecker-factored curvature (KFAC, EKFAC) and its Gaussians."""
