"""A project that uses the package sees its types, under mypy and pyright."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pyro_bdl"
PROJECT = """
import pyro_bdl as bdl

bdl.priors.Normal(scales=2.0)
"""
CHECKERS = {  # basedpyright is pyright with its own Node.js
    "mypy": (["--no-incremental", "--python-executable"], 'Unexpected keyword argument "scales"'),
    "basedpyright": (["--pythonpath"], 'No parameter named "scales"'),
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_sees_the_types(checker, tmp_path):
    """In an environment with the package alone."""
    pytest.importorskip(checker)
    options, words = CHECKERS[checker]
    venv.create(tmp_path / "env", with_pip=False)
    folder = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    shutil.copytree(PACKAGE, folder / "pyro_bdl")
    (tmp_path / "project.py").write_text(PROJECT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = str(tmp_path / "env" / "bin" / "python")
    command = [sys.executable, "-m", checker, *options, python, "project.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert words in result.stdout
