"""Data sets for the command and the tutorials."""

from pyro_bdl.data.csv import load_csv
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.data.examples import two_clusters

__all__ = ["Dataset", "load_csv", "two_clusters"]
