"""Every code block of the README and of the site runs, and the site names every public name.

``docs/blocks.py`` says which blocks run, and how. Code of another library runs in a namespace of
its own after the page's first block, where the library is installed; without a name it is not run.
"""

import ast
import re
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType

import blocks
import matplotlib
import pytest
from blocks import PAGES, ROOT

import pyro_bdl as bdl

NAMES = {
    path.relative_to(ROOT): path for path in [ROOT / "README.md", *sorted(PAGES.rglob("*.md"))]
}
_REFERENCE = re.compile(r"^::: (pyro_bdl\S*)", flags=re.MULTILINE)
BLOCKS = {name: blocks.python_blocks(path.read_text("utf-8")) for name, path in NAMES.items()}


def ours(name, *, slow=True):
    """The blocks of ours, up to the first slow one if slow ones do not count."""
    found = []
    for block in BLOCKS[name]:
        if block.mark == "slow" and not slow:
            break
        if blocks.ours(block):
            found.append(block)
    return found


def of_others(name):
    """The names of the other libraries whose code is run."""
    return [block.mark.split(": ")[1] for block in BLOCKS[name] if ": " in block.mark]


def run(name, found, folder, monkeypatch):
    monkeypatch.chdir(folder)
    matplotlib.use("Agg")
    namespace = {"__name__": "__main__"}
    with matplotlib.rc_context():
        for block in found:
            blocks.run(NAMES[name], block, namespace)


def _shorter(block):
    """The block with a tenth of its steps and draws, and at least ten: that it runs is tested, not
    how far it gets."""
    lengths = r"(\b(?:\w*steps|num_warmup|num_samples)=|\bin range\()(\d{2,})\b"
    code = re.sub(lengths, lambda found: f"{found[1]}{max(int(found[2]) // 10, 10)}", block.code)
    return block._replace(code=code)


FAST = [name for name in NAMES if ours(name, slow=False)]
SLOW = [name for name in NAMES if any(block.mark == "slow" for block in BLOCKS[name])]
OTHERS = [
    pytest.param(name, other, marks=pytest.mark.slow if other == "numpyro" else (), id=other)
    for name in NAMES
    for other in of_others(name)
]


@pytest.mark.parametrize("name", FAST, ids=str)
def test_blocks_run(name, tmp_path, monkeypatch):
    run(name, map(_shorter, ours(name, slow=False)), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW, ids=str)
def test_slow_blocks_run(name, tmp_path, monkeypatch):
    run(name, ours(name), tmp_path, monkeypatch)


@pytest.mark.parametrize("name, other", OTHERS)
def test_the_code_of_other_libraries_runs(name, other, tmp_path, monkeypatch):
    try:
        distribution(other)
    except PackageNotFoundError:
        pytest.skip(f"{other} is not installed")
    theirs = [block for block in BLOCKS[name] if block.mark.endswith(f": {other}")]
    run(name, [BLOCKS[name][0], *theirs], tmp_path, monkeypatch)


@pytest.mark.parametrize("page", blocks.pages_with_outputs())
def test_outputs_are_those_of_the_code(page):
    keys = {block.key for block in ours((PAGES / page).relative_to(ROOT))}
    assert blocks.outputs_of(page).keys() <= keys, f"run python docs/blocks.py {page}"


def test_the_reference_has_every_module():
    pages = (PAGES / "reference").glob("*.md")
    found = {name for page in pages for name in _REFERENCE.findall(page.read_text("utf-8"))}
    modules = {name for name in bdl.__all__ if isinstance(getattr(bdl, name), ModuleType)}
    assert {f"pyro_bdl.{name}" for name in modules} <= found
    assert {"pyro_bdl", "pyro_bdl.curvature", "pyro_bdl.errors"} <= found


def test_the_site_lists_every_page():
    listed = set(re.findall(r"([\w/]+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")} <= listed


def test_every_warning_has_its_section():
    page = (PAGES / "practical" / "warnings_and_errors.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"\{#([\w-]+)\}", page))
    topics = set()
    for path in (ROOT / "pyro_bdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warn":
                topics.add(ast.literal_eval(node.args[1]))
    assert len(topics) > 20 and topics <= sections
