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

reveal_type(bdl.Costs(seconds=1.0).seconds)
reveal_type(bdl.priors.Normal(1.0))
bdl.priors.Normal(scales=2.0)
"""
CHECKERS = {  # basedpyright is pyright with its own Node.js
    "mypy": ["--no-incremental", "--python-executable"],
    "basedpyright": ["--pythonpath"],
}


@pytest.fixture
def project(tmp_path):
    """A folder with a project, and an environment with the package alone."""
    venv.create(tmp_path / "env", with_pip=False)
    folder = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    shutil.copytree(PACKAGE, Path(folder) / "pyro_bdl")
    (tmp_path / "project.py").write_text(PROJECT)
    return tmp_path, Path(folder) / "pyro_bdl"


def told(checker, folder):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = str(folder / "env" / "bin" / "python")
    command = [sys.executable, "-m", checker, *CHECKERS[checker], python, "project.py"]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, **options).stdout


@pytest.mark.slow
def test_mypy_sees_the_types(project):
    pytest.importorskip("mypy")
    folder, package = project
    found = told("mypy", folder)
    assert '"float | None"' in found or '"Union[builtins.float, None]"' in found, found
    assert "pyro_bdl.priors.Normal" in found
    assert 'Unexpected keyword argument "scales"' in found
    (package / "py.typed").unlink()
    assert "py.typed" in told("mypy", folder)  # without the marker no type is seen


@pytest.mark.slow
def test_pyright_sees_the_types(project):
    pytest.importorskip("basedpyright")
    folder, _ = project
    found = told("basedpyright", folder)
    assert 'Type of "bdl.Costs(seconds=1).seconds" is "float | None"' in found, found
    assert 'Type of "bdl.priors.Normal(1)" is "Normal"' in found
    assert 'No parameter named "scales"' in found
