"""The code blocks of the pages, and their outputs, which the site shows below them.

``python docs/blocks.py [PAGE ...]`` runs the Python blocks of pages from top to bottom in one
namespace, as a reader would run them, and writes what a block prints and draws into
``docs/outputs``. A page has outputs if it holds ``<!-- outputs -->``. An output belongs to the
exact code of its block, so that a page never shows one of other code; the tests tell which pages
have to be run again.

The line ``<!-- slow -->`` before a block leaves it and the blocks after it out of the default
tests. ``<!-- another library: NAME -->`` says that a block's code is of that library, and
``<!-- not run -->`` leaves it out.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import textwrap
import warnings
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"
OUTPUTS = ROOT / "docs" / "outputs"
MARK = "<!-- outputs -->"
BLOCK = re.compile(
    r"^(?P<mark><!-- *(?:slow|not run|another library(?:: [\w-]+)?) *-->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
_WIDTH = 100  # characters of an output that fit on the site


class Block(NamedTuple):
    """A Python block: the number of its first line, its code, its mark without the arrows."""

    line: int
    code: str
    mark: str

    @property
    def key(self):
        """A short hash of the code."""
        return hashlib.sha256(self.code.encode()).hexdigest()[:12]


def python_blocks(text):
    """Return the Python blocks of a page."""
    return [_block(match, text) for match in BLOCK.finditer(text) if match["language"] == "python"]


def _block(match, text):
    indent = len(match["indent"])
    code = "\n".join(line[indent:] for line in match["code"].splitlines())
    line = text.count("\n", 0, match.start("code"))
    return Block(line, code, (match["mark"] or "").strip("<!-> \n"))


def ours(block):
    """Return whether a block is code of this package that is run."""
    return not block.mark.startswith(("another", "not run"))


def run(path, block, namespace):
    """Run one block with line numbers of its page."""
    exec(compile("\n" * block.line + block.code, str(path), "exec"), namespace)


def outputs_of(name):
    """Return the outputs of a page by the key of their block: {"text": ..., "figures": [...]}."""
    path = OUTPUTS / f"{Path(name).with_suffix('.json')}"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def with_outputs(text, name):
    """Return a page with the output of each block below it, if the page has outputs."""
    if MARK not in text:
        return text
    outputs = outputs_of(name)
    up = "../" * (len(Path(name).parts) - 1)

    def shown(match):
        if match["language"] != "python" or (match["mark"] or "").startswith("<!-- another"):
            return match[0]
        output = outputs.get(_block(match, text).key, {})
        parts = [match[0]]
        if output.get("text"):
            parts.append(f"~~~~{{.text .output}}\n{folded(output['text'])}\n~~~~")
        parts += [
            f"![Figure of the code above]({up}outputs/{file})" for file in output.get("figures", ())
        ]
        return "\n\n".join(parts)

    return BLOCK.sub(shown, text.replace(MARK, ""))


def folded(text):
    """Return an output with its long sentences in lines that fit; tables stay as they are."""
    lines = []
    for line in text.split("\n"):
        is_prose = len(line) > _WIDTH and "  " not in line.strip()
        indent = " " * (len(line) - len(line.lstrip()))
        fit = textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        lines += fit if is_prose else [line]
    return "\n".join(lines)


def new_figures(namespace, drawn):
    """Return the figures that a block has left behind, and add them to ``drawn``."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    figures = [value for value in namespace.values() if isinstance(value, Figure)]
    figures += [pyplot.figure(number) for number in pyplot.get_fignums()]
    new = {id(value): value for value in figures if not any(value is old for old in drawn)}
    drawn += new.values()
    return list(new.values())


def write_outputs(name):
    """Run a page and write its outputs; figures of the page that it no longer draws go."""
    import matplotlib

    matplotlib.use("Agg")
    import torch
    from matplotlib import pyplot

    pyplot.close("all")
    pyplot.rcdefaults()
    pyplot.rcParams.update(
        {"svg.hashsalt": name, "svg.fonttype": "none", "figure.figsize": (6.4, 3.6)}
    )
    path, stem = PAGES / name, str(Path(name).with_suffix("")).replace("/", "_")
    for old in OUTPUTS.glob(f"{stem}_*.svg"):
        old.unlink()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    outputs, namespace, count, drawn = {}, {"__name__": "__main__"}, 0, []
    with tempfile.TemporaryDirectory() as folder, chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for block in python_blocks(path.read_text(encoding="utf-8")):
            if not ours(block):
                continue
            printed, figures = StringIO(), []
            with redirect_stdout(printed):
                run(path, block, namespace)
            for figure in new_figures(namespace, drawn):
                count += 1
                figures.append(f"{stem}_{count}.svg")
                metadata = {"Date": None}
                figure.savefig(OUTPUTS / figures[-1], bbox_inches="tight", metadata=metadata)
            if printed.getvalue().strip() or figures:
                outputs[block.key] = {"text": printed.getvalue().rstrip(), "figures": figures}
    target = OUTPUTS / f"{Path(name).with_suffix('.json')}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(outputs, indent=1) + "\n", encoding="utf-8")


def pages_with_outputs():
    """Return the names of the pages that show outputs."""
    every = sorted(PAGES.rglob("*.md"))
    return [str(path.relative_to(PAGES)) for path in every if MARK in path.read_text("utf-8")]


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    for page in sys.argv[1:] or pages_with_outputs():
        print(page, flush=True)
        write_outputs(page)
