"""Run notebooks and keep their outputs: ``python docs/notebooks.py tutorials/laplace.ipynb ...``.

Figures get a palette of 256 colors, with which they take about a third of the space. Where the
notebook is larger than ``tests/test_tutorials.py`` allows, they get one of 64, or of 32.
"""

import base64
import re
import sys
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

SIZE = 300_000
# The file and the line of a warning, in front of it, and the line's text, after it
PLACE = re.compile(r"^\S+:\d+: (\w*Warning: .*\n)(?:  .*\n)?", re.MULTILINE)


def with_palette(figure, colors):
    """Return a PNG in base64 with a palette of so many colors."""
    image = Image.open(BytesIO(base64.b64decode(figure))).convert("RGB")
    file = BytesIO()
    image.quantize(colors, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run(path):
    """Run a notebook and write it."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": path.parent}}
    options = {"coalesce_streams": True, "record_timing": False}
    NotebookClient(notebook, timeout=300, resources=place, **options).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for value in cell.outputs:
                if "text" in value:
                    value.text = PLACE.sub(r"\1", value.text)
            # Progress bars that have ended leave blanks behind.
            cell.outputs = [value for value in cell.outputs if value.get("text", "-").strip()]
    write(notebook, path)


def write(notebook, path):
    """Write a notebook, its figures in as many colors as there is space for."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    figures = [o.data for o in outputs if "image/png" in o.get("data", {})]
    for colors in (256, 64, 32):
        for figure in figures:
            figure["image/png"] = with_palette(figure["image/png"], colors)
        nbformat.write(notebook, path)
        if path.stat().st_size < SIZE:
            break


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, flush=True)
        run(Path(name))
