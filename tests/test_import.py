"""Modules that are loaded when they are first needed, not with the package."""

import json
import subprocess
import sys

LATER = {
    "jax", "numpyro", "blackjax", "matplotlib", "xarray", "arviz", "pandas", "sklearn",
    "scipy.stats", "scipy.optimize", "torch._dynamo", "torch._inductor",
}  # fmt: skip
COUNT = """
import json, sys
import pyro
before = set(sys.modules)
import pyro_bdl
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_the_import_loads_little_beside_pyro():
    """At most 200 modules of others, and none of the large packages."""
    run = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    loaded = json.loads(run.stdout)
    assert not LATER.intersection(loaded)
    assert sum(name.split(".")[0] != "pyro_bdl" for name in loaded) < 200
