import numpy as np
import pytest


@pytest.fixture
def table(tmp_path):
    """A file of 20 rows: a size and a price."""
    random = np.random.default_rng(0)
    rows = [f"{random.normal():.3f},{random.normal():.3f}" for _ in range(20)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["size,price", *rows]) + "\n")
    return path
