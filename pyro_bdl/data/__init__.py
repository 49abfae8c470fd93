"""Data sets for the command and the tutorials."""

from pyro_bdl.data.corruptions import corrupt
from pyro_bdl.data.dataset import Dataset, load_csv, load_default, prepare, two_clusters
from pyro_bdl.data.examples import EXAMPLES, Example

__all__ = [
    "EXAMPLES",
    "Dataset",
    "Example",
    "corrupt",
    "load_csv",
    "load_default",
    "prepare",
    "two_clusters",
]
