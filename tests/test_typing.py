"""A project that uses the package under mypy sees its types."""

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


@pytest.mark.slow
def test_a_project_sees_the_types(tmp_path):
    pytest.importorskip("mypy")
    venv.create(tmp_path / "env", with_pip=False)
    folder = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    shutil.copytree(PACKAGE, Path(folder) / "pyro_bdl")
    (tmp_path / "project.py").write_text(PROJECT)
    python = tmp_path / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def told():
        command = [sys.executable, "-m", "mypy", "--no-incremental", "project.py"]
        command += ["--python-executable", str(python)]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, **options).stdout

    found = told()
    assert '"float | None"' in found or '"Union[builtins.float, None]"' in found, found
    assert "pyro_bdl.priors.Normal" in found
    assert 'Unexpected keyword argument "scales"' in found
    (Path(folder) / "pyro_bdl" / "py.typed").unlink()
    assert "py.typed" in told()  # without the marker no type is seen
