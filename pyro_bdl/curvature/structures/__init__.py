"""Curvature structures and the Gaussians that each makes with a prior."""
