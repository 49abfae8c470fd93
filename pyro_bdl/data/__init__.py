"""Data sets for the command and the tutorials."""

from pyro_bdl.data.csv import load_csv
from pyro_bdl.data.dataset import Dataset, prepare
from pyro_bdl.data.examples import EXAMPLES, two_clusters

__all__ = ["EXAMPLES", "Dataset", "load_csv", "prepare", "two_clusters"]
