"""Pages of the site that are made: of files elsewhere, one a class, with outputs and MathML.

The notebooks, the examples, the benchmarks, CONTRIBUTING and CHANGELOG are read where they are: the
site has no copies of them. The gallery is the first figure of each notebook. A page of the
reference about a module lists its classes, each of which has its own page, and holds its functions.
Outputs come from ``docs/outputs`` (``blocks.py`` writes them).
"""

import ast
import base64
import html
import inspect
import json
import posixpath
import re
import string
from importlib.util import find_spec
from pathlib import Path

from blocks import OUTPUTS, folded, with_outputs
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from latex2mathml.converter import convert
from mkdocs.structure.files import File
from names import INTERNAL, MODULE, identifier, modules, public, targets

ROOT = Path(__file__).parent.parent
COPIES = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "internals.md",
    "CHANGELOG.md": "changes.md",
}
_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>([,.;:)]?)', flags=re.DOTALL
)
_NAME = re.compile(r"(?<![\[`])`([A-Za-z_][\w.]*)`(?![`\]])")
_AS_THEY_ARE = ("changes.md", "internals.md", "gallery.md", "examples.md")
_FIGURE = re.compile(r"^!\[(.*?)\]\((.+?)\)(.*)$", flags=re.MULTILINE)
_QUESTION = re.compile(r"\*\*([^*]+\?)\*\*")
_PARAGRAPH, _TAG = re.compile(r"<p>(.*?)</p>", flags=re.DOTALL), re.compile(r"<[^>]+>")
_BARE_LETTER = re.compile(r"\\(mathcal|mathbb) +(\w)")
_IMAGE = re.compile(r'<img [^>]*src="([^"]+\.png)"[^>]*>')
_WIDTH = re.compile(r' width="(\d+)"')
_FITS_PHONE = 700  # pixels; figures that are wider scroll there
_COMMAND = re.compile(r"<code>[^<]*--[^<]*</code>")
_OPTION = re.compile(r"--[a-z][\w-]*")
_MATH = re.compile(r"<math .*?</math>", flags=re.DOTALL)
_MOST_BEFORE_FIGURE = 1500  # characters; the figure is shown at the top too if it comes later
_TERMINAL_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def on_config(config):
    """Give each module of the reference its classes below it in the navigation."""
    classes = {}
    for path, name in ((Path(name).parent, name) for name, _ in class_pages()):
        classes.setdefault(f"{path}.md", []).append({Path(name).stem: name})
    for section in config["nav"]:
        if pages := section.get("Reference"):
            pages[:] = [
                {Path(page).stem: [page, *classes[page]]} if page in classes else page
                for page in pages
            ]
    return config


def on_files(files, config):
    """Add the pages and figures that are made from files outside the folder of pages."""
    for source, name in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](../docs/pages/", "](")
        if name == "changes.md":  # it has every word, and would fill every search
            text = f"---\nsearch: {{exclude: true}}\n---\n\n{text}"
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "benchmarks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", content=path.read_bytes()))
    for path in sorted((ROOT / "tutorials").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"tutorials/{path.name}", content=text))
    gallery = [
        "# Gallery",
        "The first figure of each notebook, and the question that it answers.",
        '<div class="grid cards gallery" markdown>',
    ]
    for path in sorted((ROOT / "tutorials").glob("*.ipynb")):
        text, figures = notebook_page(path)
        text = f"---\nsearch: {{boost: 0.2}}\n---\n\n{text}"  # after tasks and the reference
        gallery.append(_shown(path.stem, text))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        files.append(File.generated(config, f"tutorials/{path.name}", content=path.read_bytes()))
        for name, content in figures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    gallery.append("</div>")
    files.append(File.generated(config, "gallery.md", content="\n\n".join(gallery)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    for path in sorted(OUTPUTS.glob("*.svg")):
        content = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"outputs/{path.name}", content=content))
    for name, content in class_pages():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Show outputs below their blocks, a module of the reference as a list of its classes, and the
    package's names in texts as links."""
    name = page.file.src_uri
    if name.startswith("reference/"):
        markdown = MODULE.sub(lambda match: module_listing(match[1], name), markdown)
    elif name not in _AS_THEY_ARE:
        markdown = with_names(markdown)
    return with_outputs(markdown, name)


def class_pages():
    """Yield the page of each class of each module that a page of the reference is about."""
    for path, module in modules():
        for name, value in public(module).items():
            if inspect.isclass(value):
                options = "    options:\n      heading_level: 1\n      inherited_members: true\n"
                if hidden := INTERNAL.get(module, "").split():
                    filters = ["!^_", "^__call__$", f"!^({'|'.join(hidden)})$"]
                    options += f"      filters: {json.dumps(filters)}\n"
                back = f"\n[All of `{module}`](../{path.name})\n"
                content = f"::: {module}.{name}\n{options}{back}"
                yield f"reference/{path.stem}/{name}.md", content


def module_listing(module, page):
    """Return a table of a module's classes with links, then its functions in full."""
    found, folder = public(module), Path(page).stem
    classes = sorted(name for name, value in found.items() if inspect.isclass(value))
    rows = [f"| [`{name}`]({folder}/{name}.md) | {_summary(found[name])} |" for name in classes]
    lines = ["| class | |", "|---|---|", *rows, ""] if rows else []
    routines = {name: value for name, value in found.items() if inspect.isroutine(value)}
    lines += [f"::: {identifier(module, *item)}\n" for item in routines.items()]
    return "\n".join(lines)


def with_names(markdown):
    """Return a page whose first mention of each public name is a link to it; headings, blocks of
    code and words that are links already stay."""
    known, seen, in_code, lines = targets(), set(), False, []

    def link(match):
        name = match[1].removeprefix("pyro_bdl.").removeprefix("bdl.").rpartition(".")
        owner = match[1].split(".")[-2:]  # a class and its method, or a module and its function
        key = next((k for k in (".".join(owner), name[2]) if k in known), None)
        if key is None or key in seen:
            return match[0]
        seen.add(key)
        return f'<autoref identifier="{known[key]}" optional><code>{match[1]}</code></autoref>'

    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith(("```", "~~~"))
        plain = in_code or line.startswith(("#", "    ", "```", "~~~", "[![", "!["))
        lines.append(line if plain else _NAME.sub(link, line))
    return "\n".join(lines)


def _summary(value):
    """The first paragraph of a docstring as Markdown."""
    words = " ".join(inspect.getdoc(value).partition("\n\n")[0].split())
    return words.replace("``", "`").replace("|", "\\|")


def examples_page():
    """Return the scripts of the folder of examples as Markdown."""
    blocks = ["# Examples", "Scripts to copy and change, from the folder `examples`."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        first = ast.get_docstring(ast.parse(source)).partition("\n")[0]
        blocks += [f"## {path.name}", first, _fenced(source.rstrip(), "python")]
    return "\n\n".join(blocks)


def _shown(name, text):
    """A card of a notebook: its first figure, its title as a link, its question in bold type."""
    heading = re.search(r"^# +(.+)$", text, flags=re.MULTILINE)[1]
    question = " ".join(_QUESTION.search(text)[1].split())
    alternative, figure, _ = _FIGURE.search(text).groups()
    page = f"tutorials/{name}.md"
    return (
        f"-   [![{alternative}](tutorials/{figure})]({page})\n\n"
        f"    **[{heading}]({page})**\n\n    {question[0].upper()}{question[1:]}"
    )


def notebook_page(path):
    """Return a notebook as Markdown, and its figures by name."""
    blocks, figures, heading = [], {}, path.stem
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace("](../docs/pages/", "](../").replace(".ipynb)", ".md)")
            blocks.append(source)
            found = re.findall(r"^#+ +(.+)$", source, flags=re.MULTILINE)
            heading = found[-1] if found else heading
            continue
        is_first = not any(block.startswith(("~~~~", "??? ")) for block in blocks)
        blocks.append(_folded(source) if is_first else _fenced(source, "python"))
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(figures) + 1}.png"
                figures[name] = base64.b64decode("".join(data["image/png"]))
                size = output["metadata"].get("image/png", {}).get("width")
                size = f"{{width={size}}}" if size else ""
                blocks.append(f"![Figure of the section “{heading}”]({name}){size}")
            elif "text/html" in data:
                blocks.append(f"<div>\n{''.join(data['text/html'])}\n</div>")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                blocks.append(_fenced(folded(_TERMINAL_COLOR.sub("", text)), "text"))
    blocks.append(f"*This page is the notebook [`{path.name}`]({path.name}) with its outputs.*")
    first = _first_figure(blocks)
    place = blocks.index(first)
    before = [block for block in blocks[:place] if block[0] != "?"]
    if len("".join(before)) > _MOST_BEFORE_FIGURE:
        if not any(block.startswith("#") for block in blocks[1:place]):
            del blocks[place]  # it would stand there again a screen further down
        blocks.insert(1, _FIGURE.sub(r"![The first figure of this page](\2)\3", first))
    return "\n\n".join(blocks), figures


def _first_figure(blocks):
    return next(block for block in blocks if "![" in block)


def _folded(source):
    """The imports and the set-up of a notebook, which open at a click."""
    code = _fenced(source, "python").replace("\n", "\n    ")
    return f'??? note "Imports and set-up"\n\n    {code}'


def _fenced(text, language):
    return f"~~~~{language}\n{text}\n~~~~"


def on_page_content(content, page, config, files):
    """Write the formulas as MathML, which browsers show without a script; keep options whole."""
    if first := _PARAGRAPH.search(content):
        words = html.unescape(_TAG.sub("", first[1]))
        sentence = re.split(r"(?<=\.) ", " ".join(words.split()))[0]
        found = {"title": page.title, "url": page.url, "first": sentence}
        config.setdefault("site_pages", []).append(found)
    whole = r'<span class="whole">\g<0></span>'
    content = _COMMAND.sub(lambda command: _OPTION.sub(whole, command[0]), content)
    if page.file.src_uri != "gallery.md":  # its figures are links to the large ones
        content = _IMAGE.sub(lambda image: _roomy(image, page, files), content)
    return _FORMULA.sub(_mathml, content)


def _roomy(image, page, files):
    """The tag of an image, of the class "roomy" if it is too wide for a phone."""
    tag, source = image[0], image[1]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), source))
    file = files.get_file_from_path(path)
    if given := _WIDTH.search(tag):
        width = int(given[1])
    else:
        width = int.from_bytes(file.content_bytes[16:20], "big")  # of the header of a PNG
    return tag.replace("<img ", '<img class="roomy" ') if width > _FITS_PHONE else tag


def _mathml(found):
    display = "block" if found[1] == "div" else "inline"
    formula = _BARE_LETTER.sub(r"\\\1{\2}", html.unescape(found[2]).strip())
    formula = convert(formula, display=display)
    return f'<span class="whole">{formula}{found[3]}</span>' if found[3] else formula


def on_post_build(config):
    """Write the font of the formulas, and the summaries for programs that read."""
    site = Path(config["site_dir"])
    (site / "api.txt").write_text("\n".join(api_summary()), encoding="utf-8")
    (site / "llms.txt").write_text("\n".join(page_list(config)), encoding="utf-8")
    write_font(site)


def api_summary():
    """Yield a line for each public name: its arguments and the first sentence about it."""
    for _, module in modules():
        yield f"\n{module}"
        for name, value in public(module).items():
            try:
                names = ", ".join(inspect.signature(value).parameters)
            except ValueError:  # an exception, of which there is no signature
                names = ""
            yield f"  {name}({names}): {_summary(value)}".replace("\\|", "|")


def page_list(config):
    """Yield the heading, the address and the first sentence of each page that has a text."""
    yield f"# {config['site_name']}\n\n> {config['site_description']}\n"
    yield "- [Every public name](api.txt): arguments, and a sentence about each\n"
    for page in sorted(config["site_pages"], key=lambda page: page["url"]):
        yield f"- [{page['title']}]({page['url']}): {page['first']}"


def write_font(site):
    """Write STIX Two Math with the signs that the formulas of the site need.

    Without a font of this kind braces and brackets do not stretch. Its license is the SIL Open
    Font License.
    """
    formulas = "".join(
        "".join(_MATH.findall(page.read_text("utf-8"))) for page in site.rglob("*.html")
    )
    font = TTFont(Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf")
    subsetter = Subsetter(Options(layout_features=["ssty"]))
    subsetter.populate(text=html.unescape(formulas) + string.printable + "⏞⏟√‖|")
    subsetter.subset(font)
    font.flavor = "woff"
    font.save(site / "assets" / "math.woff")
