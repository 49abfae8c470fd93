"""Run notebooks and keep their outputs: ``python docs/notebooks.py tutorials/laplace.ipynb ...``.

Figures get a palette of 256 colors, with which they take about a third of the space.
"""

import base64
import sys
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image


def with_palette(figure):
    """Return a PNG in base64 with a palette."""
    image = Image.open(BytesIO(base64.b64decode(figure))).convert("RGB")
    file = BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def run(path):
    """Run a notebook and write it."""
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": path.parent}}
    options = {"coalesce_streams": True, "record_timing": False}
    NotebookClient(notebook, timeout=300, resources=place, **options).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Progress bars that have ended leave blanks behind.
            cell.outputs = [value for value in cell.outputs if value.get("text", "-").strip()]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = with_palette(output.data["image/png"])
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, flush=True)
        run(Path(name))
