"""Docstrings in reStructuredText as Markdown: references as links, blocks after "::", sources."""

import re
from textwrap import dedent

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)([\w.]+)`")
_SOURCE = re.compile(r"\n\n(Source: .*)\Z", flags=re.DOTALL)
_FIELD = re.compile(r"^:(?:param|raises|return|returns|var|warns|ivar)\b", flags=re.MULTILINE)
_BLOCK = re.compile(r"::(?=\n\s*\n)")
_LONE_BLOCK = re.compile(r"^[ \t]*::[ \t]*\n", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^    >>> .*\n(?:    .*(?:\n|\Z))*", flags=re.MULTILINE)
_TABLE_EDGE = re.compile(r"^ *=+(?: +=+)+ *$")


class PlainMarkdown(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is None:
            return
        text = markdown(source_first(obj.docstring.value.rstrip()), obj)
        if obj.is_class and any(str(base).endswith("NamedTuple") for base in obj.bases):
            text = text.replace(":param ", ":var ")  # fields, of which there is no signature
        obj.docstring.value = text


def source_first(text):
    """Return a docstring whose source stands before the parameters, not in the last one's words."""
    source, field = _SOURCE.search(text), _FIELD.search(text)
    if source is None or field is None or source.start() < field.start():
        return text
    text = text[: source.start()]
    return f"{text[: field.start()]}{source[1]}\n\n{text[field.start() :]}"


def markdown(text, obj):
    """Return a docstring with roles as links, "text::" as "text:", examples and tables as code."""
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
    return "\n".join(lines)


def _link(path, obj, *, short):
    """A reference as a link, where the site has the object, or as code."""
    try:
        target = obj.resolve(path)
    except griffe.NameResolutionError:
        target = path
    words = path.rpartition(".")[2] if short else path
    return f'<autoref identifier="{target}" optional><code>{words}</code></autoref>'
