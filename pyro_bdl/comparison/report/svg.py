"""Figures and markers as SVG inside the page: its fonts, its colors in light and dark."""

import io
import re
from collections.abc import Mapping
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path

from pyro_bdl.plots.style import DARK

_COLORS = re.compile("|".join(DARK))
_IDS = re.compile(r'(?<=\sid=")|(?<=href="#)|(?<=url\(#)')
_NOT_USED = re.compile(
    r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|font-family:[^;\"]*;?\s?", re.S
)
_COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def inline(figure: Figure, key: str, label: str) -> str:
    """The figure as an ``<svg>`` element; the same figure and key give the same text.

    Text takes the page's font. Each color of ``plots.style.DARK`` is a CSS variable, see
    ``dark_colors``.

    :param key: a prefix of the element's ids that no other figure of the page has.
    :param label: the alternative text.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pyro_bdl", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue().decode("utf-8")
    text = _NOT_USED.sub("", text[text.index("<svg") :])
    text = _COLORS.sub(lambda found: f"var(--{found[0][1:]}, {found[0]})", text)
    text = _IDS.sub(f"{key}-", text).replace("xlink:href", "href")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    start = f'<svg {box[0]} role="img" aria-label="{escape(label)}">'
    return start + re.sub(r"\s*\n\s*", "\n", text[text.index(">") + 1 :]).strip()


def marker(look: Mapping[str, Any] | None) -> str:
    """A posterior's marker as an ``<svg>`` of the size of a letter; an empty text for None.

    :param look: its color and marker, from ``plots.styles``.
    """
    if look is None:
        return ""
    style = MarkerStyle(look["marker"])
    path = style.get_path().transformed(style.get_transform())
    path = path.transformed(matplotlib.transforms.Affine2D().scale(1, -1))
    reach = max(0.5, float(np.abs(path.vertices).max())) * 1.15
    parts = []
    for points, code in path.iter_segments(curves=True):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
        else:
            numbers = " ".join(f"{value:.3g}" for value in points)
            parts.append(f"{_COMMANDS[Path.code_type(code)]}{numbers}")
    color = f"var(--{look['color'][1:]}, {look['color']})"
    return (
        f'<svg class="mark" viewBox="{-reach:.3g} {-reach:.3g} {2 * reach:.3g} {2 * reach:.3g}" '
        f'aria-hidden="true"><path d="{"".join(parts)}" style="fill: {color}"/></svg>'
    )


def dark_colors() -> str:
    """The CSS variables of the figures' colors on a dark page."""
    return " ".join(f"--{light[1:]}: {dark};" for light, dark in DARK.items())
