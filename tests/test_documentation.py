"""Every code block of the README and of the site runs, and the site names every public name.

The Python blocks of a page run from top to bottom in one namespace, as a reader would run them. The
line ``<!-- slow -->`` before a block leaves it and the blocks after it out of the default run.
``<!-- another library: NAME -->`` before a block says that its code is of that library: it runs in
a namespace of its own after the page's first block, where the library is installed. Without a name
it is not run. Blocks in other languages are commands or output.
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import matplotlib
import pytest

import pyro_bdl as bdl

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "pages"
PAGES = {path.relative_to(ROOT): path for path in [ROOT / "README.md", *sorted(SITE.rglob("*.md"))]}
_BLOCK = re.compile(
    r"^(?P<mark><!-- *(?:slow|another library(?:: [\w-]+)?) *-->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
_REFERENCE = re.compile(r"^::: (pyro_bdl\S*)", flags=re.MULTILINE)


def all_blocks(path):
    """The Python blocks: line number, code, and mark."""
    text = path.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        if block["language"] == "python":
            start = text.count("\n", 0, block.start("code"))
            indent = len(block["indent"])
            code = "\n".join(line[indent:] for line in block["code"].splitlines())
            yield start, code, (block["mark"] or "").strip("<!-> \n")


def blocks(path, *, slow=True):
    """The blocks of ours, up to the first slow one if slow ones do not count."""
    found = []
    for line, code, mark in all_blocks(path):
        if mark == "slow" and not slow:
            break
        if not mark.startswith("another"):
            found.append((line, code))
    return found


def of_others(path):
    """The names of the other libraries whose code is run."""
    return [mark.split(": ")[1] for *_, mark in all_blocks(path) if ": " in mark]


def run(path, found, folder, monkeypatch):
    monkeypatch.chdir(folder)
    matplotlib.use("Agg")
    namespace = {"__name__": "__main__"}
    for line, code in found:
        exec(compile("\n" * line + code, str(path), "exec"), namespace)


FAST = [name for name, path in PAGES.items() if blocks(path, slow=False)]
SLOW = [
    name for name, path in PAGES.items() if any(mark == "slow" for *_, mark in all_blocks(path))
]
OTHERS = [
    pytest.param(name, other, marks=pytest.mark.slow if other == "numpyro" else (), id=other)
    for name, path in PAGES.items()
    for other in of_others(path)
]


@pytest.mark.parametrize("name", FAST, ids=str)
def test_blocks_run(name, tmp_path, monkeypatch):
    run(PAGES[name], blocks(PAGES[name], slow=False), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW, ids=str)
def test_slow_blocks_run(name, tmp_path, monkeypatch):
    run(PAGES[name], blocks(PAGES[name]), tmp_path, monkeypatch)


@pytest.mark.parametrize("name, other", OTHERS)
def test_the_code_of_other_libraries_runs(name, other, tmp_path, monkeypatch):
    try:
        distribution(other)
    except PackageNotFoundError:
        pytest.skip(f"{other} is not installed")
    every = list(all_blocks(PAGES[name]))
    theirs = [block[:2] for block in every if block[2].endswith(f": {other}")]
    run(PAGES[name], [every[0][:2], *theirs], tmp_path, monkeypatch)


def test_the_reference_has_every_public_name():
    pages = (SITE / "reference").glob("*.md")
    found = {name for page in pages for name in _REFERENCE.findall(page.read_text("utf-8"))}
    names = {f"pyro_bdl.{name}" for name in bdl.__all__ if name != "__version__"}
    structures = {f"pyro_bdl.curvature.{kind}" for kind in bdl.curvature.__all__}
    assert {"pyro_bdl.errors"} <= found - names <= {"pyro_bdl.errors"} | structures
    assert names <= found


def test_the_site_lists_every_page():
    listed = set(re.findall(r"([\w/]+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(path.relative_to(SITE)) for path in SITE.rglob("*.md")} <= listed
