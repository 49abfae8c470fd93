"""Every code block of the README and of the site runs, and the site names every public name.

The Python blocks of a page run from top to bottom in one namespace, as a reader would run them. The
line ``<!-- slow -->`` before a block leaves it and the blocks after it out of the default run.
``<!-- another library -->`` before a block says that its code is not ours. Blocks in other
languages are commands or output.
"""

import re
from pathlib import Path

import matplotlib
import pytest

import pyro_bdl as bdl

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "pages"
PAGES = {path.relative_to(ROOT): path for path in [ROOT / "README.md", *sorted(SITE.rglob("*.md"))]}
_BLOCK = re.compile(
    r"^(?P<mark><!-- *(?:slow|another library) *-->\n)?(?P<indent> *)```(?P<language>\w*)\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
_REFERENCE = re.compile(r"^::: (pyro_bdl\S*)", flags=re.MULTILINE)


def blocks(path):
    """The Python blocks of ours: line number, code, and whether the block is slow."""
    text = path.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        mark = block["mark"] or ""
        if block["language"] != "python" or "another" in mark:
            continue
        start = text.count("\n", 0, block.start("code"))
        indent = len(block["indent"])
        code = "\n".join(line[indent:] for line in block["code"].splitlines())
        found.append((start, code, "slow" in mark))
    return found


def run(path, folder, monkeypatch, *, slow):
    monkeypatch.chdir(folder)
    matplotlib.use("Agg")
    namespace = {"__name__": "__main__"}
    for line, code, is_slow in blocks(path):
        if is_slow and not slow:
            return
        exec(compile("\n" * line + code, str(path), "exec"), namespace)


WITH_CODE = [name for name, path in PAGES.items() if blocks(path)]
FAST = [name for name in WITH_CODE if not blocks(PAGES[name])[0][2]]
SLOW = [name for name in WITH_CODE if any(slow for *_, slow in blocks(PAGES[name]))]


@pytest.mark.parametrize("name", FAST, ids=str)
def test_blocks_run(name, tmp_path, monkeypatch):
    run(PAGES[name], tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW, ids=str)
def test_slow_blocks_run(name, tmp_path, monkeypatch):
    run(PAGES[name], tmp_path, monkeypatch, slow=True)


def test_the_reference_has_every_public_name():
    pages = (SITE / "reference").glob("*.md")
    found = {name for page in pages for name in _REFERENCE.findall(page.read_text("utf-8"))}
    names = {f"pyro_bdl.{name}" for name in bdl.__all__ if name != "__version__"}
    assert found - names == {"pyro_bdl.errors", "pyro_bdl.init", "pyro_bdl.training"}
    assert names <= found


def test_the_site_lists_every_page():
    listed = set(re.findall(r"([\w/]+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(path.relative_to(SITE)) for path in SITE.rglob("*.md")} <= listed
