"""What the package asks for, said in the same way wherever it is said."""

import calendar
import configparser
import re
from pathlib import Path

import pyro_bdl
from pyro_bdl.citing import SOFTWARE

ROOT = Path(__file__).parent.parent
PAGE = "docs/pages/practical/faq.md"
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


def test_the_citations_have_the_version_and_one_date():
    citation = (ROOT / "CITATION.cff").read_text()
    year, month = re.search(
        r"^date-released: (\d{4})-(\d\d)-\d\d$", citation, re.MULTILINE
    ).groups()
    assert f"\nversion: {pyro_bdl.__version__}\n" in citation
    assert re.search(r"^authors:\n  - name: The pyro_bdl authors$", citation, re.MULTILINE)
    entry = re.search(r"@software\{.*?\n\}", (ROOT / PAGE).read_text(), re.DOTALL)[0]
    fields = dict(re.findall(r"^  (\w+) *= \{?(.*?)\}?,$", entry, re.MULTILINE))
    assert fields["version"] == pyro_bdl.__version__
    assert fields["year"] == year
    assert fields["month"] == calendar.month_abbr[int(month)].lower()
    assert f"({year})" in SOFTWARE and pyro_bdl.__version__ in SOFTWARE
