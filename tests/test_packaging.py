"""What the package asks for, said in the same way wherever it is said."""

import configparser
import re
from pathlib import Path

import pyro_bdl

ROOT = Path(__file__).parent.parent
CONDA = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    recipe = (ROOT / "conda" / "meta.yaml").read_text()
    assert re.search(r'set version = "(.+)"', recipe)[1] == pyro_bdl.__version__
    run = re.search(r"\n  run:\n(.*?)\n\n", recipe, flags=re.DOTALL)[1]
    lines = [line.removeprefix("    - ").replace(" ", "") for line in run.splitlines()]
    names = [re.match(r"[\w-]+", line)[0] for line in lines]
    asked = {CONDA.get(n, n) + line.removeprefix(n) for n, line in zip(names, lines, strict=True)}
    required = set(config["options"]["install_requires"].split())
    assert asked == required | {f"python{config['options']['python_requires']}"}
