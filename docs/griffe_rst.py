"""Docstrings in reStructuredText as Markdown: references and names as links, blocks after "::",
sources, warnings; and signatures with values in the place of a module's own constants."""

import re
from textwrap import dedent

import griffe
from names import linked, targets

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([\w.]+)`")
_SOURCE = re.compile(r"\n\n(Source: .*)\Z", flags=re.DOTALL)
_FIELD = re.compile(r"^:(?:param|raises|return|returns|var|warns|ivar)\b", flags=re.MULTILINE)
_WARNS = re.compile(r"^:warns (\w+): (.*(?:\n[ \t]+.*)*)\n?", flags=re.MULTILINE)
_CODE = re.compile(
    r"(```.*?```|``.+?``|`[^`\n]+`|<autoref.*?</autoref>|"
    r"(?<=\n\n) {4}[^\n]*(?:\n {4}[^\n]*|\n(?=\n {4}))*)",
    re.DOTALL,
)
_CONSTANT = re.compile(r"^_?[A-Z][A-Z0-9_]+$")
_BLOCK = re.compile(r"::(?=\n\s*\n)")
_LONE_BLOCK = re.compile(r"^[ \t]*::[ \t]*\n", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^    >>> .*\n(?:    .*(?:\n|\Z))*", flags=re.MULTILINE)
_TABLE_EDGE = re.compile(r"^ *=+(?: +=+)+ *$")


class PlainMarkdown(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is None:
            return
        text = markdown(warnings_first(source_first(obj.docstring.value.rstrip())), obj)
        if obj.is_class and any(str(base).endswith("NamedTuple") for base in obj.bases):
            text = text.replace(":param ", ":var ")  # fields, of which there is no signature
        obj.docstring.value = text

    def on_function(self, *, func, **kwargs):
        """Show the value of a default that is a constant of the module."""
        for parameter in func.parameters:
            if not _CONSTANT.match(name := str(parameter.default)):
                continue
            constant = func.module.members.get(name)
            if constant is not None and not constant.is_alias:
                parameter.default = str(constant.value)


def warnings_first(text):
    """Return a docstring whose ``:warns`` fields, which Griffe does not know, are a paragraph."""
    found, field = _WARNS.findall(text), _FIELD.search(text)
    if not found:
        return text
    text, start = _WARNS.sub("", text), field.start()
    said = "".join(f"Warns ``{kind}``: {' '.join(words.split())}\n\n" for kind, words in found)
    return f"{text[:start].rstrip()}\n\n{said}{text[start:]}"


def source_first(text):
    """Return a docstring whose source stands before the parameters, not in the last one's words."""
    source, field = _SOURCE.search(text), _FIELD.search(text)
    if source is None or field is None or source.start() < field.start():
        return text
    text = text[: source.start()]
    return f"{text[: field.start()]}{source[1]}\n\n{text[field.start() :]}"


def markdown(text, obj):
    """Return a docstring with roles and names as links, "text::" as "text:", examples and tables as
    code, and asterisks that are no emphasis."""
    text = _ROLE.sub(lambda match: _link(match[2], obj, short=bool(match[1])), text)
    text = _LONE_BLOCK.sub("", text)
    text = _BLOCK.sub(":", text)
    text = _EXAMPLE.sub(lambda match: f"```pycon\n{dedent(match[0]).rstrip()}\n```\n", text)
    lines, edges = [], 0
    for line in text.splitlines():
        edge = bool(_TABLE_EDGE.match(line))
        edges += edge
        inside = edge or edges % 2 == 1
        lines.append(f"    {line}" if inside else line)
    parts = _CODE.split("\n".join(lines))
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    parts[1::2] = [_named(part, obj) for part in parts[1::2]]
    return "".join(parts)


def _named(code, obj):
    """A name of the package in a docstring as a link, but for that of the object itself."""
    name = code.strip("`")
    own = {obj.name, getattr(obj.parent, "name", "")}
    return linked(code) if name in targets() and name not in own else code


def _link(path, obj, *, short):
    """A reference as a link, where the site has the object, or as code."""
    try:
        target = obj.resolve(path)
    except griffe.NameResolutionError:
        target = path
    words = path.rpartition(".")[2] if short else path
    return f'<autoref identifier="{target}" optional><code>{words}</code></autoref>'
