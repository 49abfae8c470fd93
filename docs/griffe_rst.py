"""Docstrings in reStructuredText as Markdown: cross references, and blocks after "::"."""

import re

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([\w.]+)`")
_BLOCK = re.compile(r"::(?=\n\s*\n)")
_LONE_BLOCK = re.compile(r"^[ \t]*::[ \t]*\n", flags=re.MULTILINE)
_TABLE_EDGE = re.compile(r"^ *=+(?: +=+)+ *$")


class PlainMarkdown(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is None:
            return
        text = markdown(obj.docstring.value)
        if obj.is_class and any(str(base).endswith("NamedTuple") for base in obj.bases):
            text = text.replace(":param ", ":var ")  # fields, of which there is no signature
        obj.docstring.value = text


def markdown(text):
    """Return a docstring with roles as code, "text::" as "text:", and tables in a code block."""
    text = _ROLE.sub(r"``\1``", text)
    text = _LONE_BLOCK.sub("", text)
    text = _BLOCK.sub(":", text)
    lines, edges = [], 0
    for line in text.splitlines():
        edge = bool(_TABLE_EDGE.match(line))
        edges += edge
        inside = edge or edges % 2 == 1
        lines.append(f"    {line}" if inside else line)
    return "\n".join(lines)
