"""Pages of the site that are files elsewhere in the repository, and formulas as MathML.

The notebooks, the examples, the benchmarks, CONTRIBUTING and CHANGELOG are read where they are: the
site has no copies of them. The gallery is the first figure of each notebook.
"""

import ast
import base64
import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
COPIES = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "internals.md",
    "CHANGELOG.md": "changes.md",
}
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
_TERMINAL_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files, config):
    """Add the pages and figures that are made from files outside the folder of pages."""
    for source, name in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](../docs/pages/", "](")
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "benchmarks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", content=path.read_bytes()))
    for path in sorted((ROOT / "tutorials").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"tutorials/{path.name}", content=text))
    gallery = ["# Gallery", "The first figure of each notebook."]
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        text, figures = notebook_page(path)
        gallery.append(_shown(path.stem, text))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, content in figures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    files.append(File.generated(config, "gallery.md", content="\n\n".join(gallery)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    return files


def examples_page():
    """Return the scripts of the folder of examples as Markdown."""
    blocks = ["# Examples", "Scripts to copy and change, from the folder `examples`."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        first = ast.get_docstring(ast.parse(source)).partition("\n")[0]
        blocks += [f"## {path.name}", first, _fenced(source.rstrip(), "python")]
    return "\n\n".join(blocks)


def _shown(name, text):
    """The heading of a notebook with a link, and its first figure."""
    heading = re.search(r"^# +(.+)$", text, flags=re.MULTILINE)[1]
    alternative, figure = re.search(r"^!\[(.*?)\]\((.+?)\)$", text, flags=re.MULTILINE).groups()
    page = f"tutorials/{name}.md"
    return f"## [{heading}]({page})\n\n[![{alternative}](tutorials/{figure})]({page})"


def notebook_page(path):
    """Return a notebook as Markdown, and its figures by name."""
    blocks, figures, heading = [], {}, path.stem
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source.replace("](../docs/pages/", "](../"))
            found = re.findall(r"^#+ +(.+)$", source, flags=re.MULTILINE)
            heading = found[-1] if found else heading
            continue
        blocks.append(_fenced(source, "python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(figures) + 1}.png"
                figures[name] = base64.b64decode("".join(data["image/png"]))
                blocks.append(f"![Figure of the section “{heading}”]({name})")
            elif "text/html" in data:
                blocks.append(f"<div>\n{''.join(data['text/html'])}\n</div>")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                blocks.append(_fenced(_TERMINAL_COLOR.sub("", text), "text"))
    blocks.append(f"*This page is the notebook `tutorials/{path.name}` with its outputs.*")
    return "\n\n".join(blocks), figures


def _fenced(text, language):
    return f"~~~~{language}\n{text}\n~~~~"


def on_page_content(content, page, config, files):
    """Write the formulas as MathML, which browsers show without a script."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found):
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]).strip(), display=display)
