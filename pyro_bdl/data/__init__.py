"""Data sets for the command and the tutorials."""

from pyro_bdl.data.dataset import Dataset, load_csv, load_default, prepare, two_clusters

__all__ = ["Dataset", "load_csv", "load_default", "prepare", "two_clusters"]
