"""The first numbers of every guide and kernel at a fixed seed, in a file with each release.

``PYRO_BDL_WRITE_DRAWS=1 pytest -m "slow or not slow" -k numbers_of_this_release`` writes them.
"""

import json
import os
from pathlib import Path

import jax
import pytest
import torch

FILE = Path(__file__).parent.parent / "reference_draws.json"
WRITES = os.environ.get("PYRO_BDL_WRITE_DRAWS") == "1"
RELEASES = {
    library.__name__: ".".join(library.__version__.split(".")[:2]) for library in (torch, jax)
}


def check(name, draws, libraries=("torch",)):
    """Compare the last draws of all sites with the file; another release of a library may draw
    other numbers."""
    last = [value.reshape(len(value), -1)[-1, :4] for value in draws.values()]
    numbers = [float(f"{number:.9g}") for number in torch.cat(last).tolist()]
    stored = json.loads(FILE.read_text())
    if WRITES:
        if stored["releases"] != RELEASES:
            stored = {"releases": RELEASES, "draws": {}}
        stored["draws"] = dict(sorted({**stored["draws"], name: numbers}.items()))
        lines = ",\n".join(f"  {json.dumps(n)}: {v}" for n, v in stored["draws"].items())
        head = json.dumps(stored["releases"])
        FILE.write_text(f'{{"releases": {head}, "draws": {{\n{lines}\n}}}}\n')
        return
    for library in libraries:
        if stored["releases"][library] != RELEASES[library]:
            pytest.skip(f"the draws were written under {library} {stored['releases'][library]}")
    expected = stored["draws"].get(name, [])
    assert numbers == pytest.approx(expected, rel=1e-6, abs=1e-9), (
        f"{name} draws {numbers} at the seed at which it drew {expected}: if this is meant, name "
        "it in the changelog and write the file again by PYRO_BDL_WRITE_DRAWS=1"
    )
