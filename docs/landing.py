"""Draw the picture of the first page from the code of that page: ``python docs/landing.py``."""

from blocks import PAGES, ours, python_blocks, run
from matplotlib import pyplot

import pyro_bdl as bdl
from pyro_bdl import plots


def main():
    page, namespace = PAGES / "index.md", {"__name__": "__main__"}
    for block in python_blocks(page.read_text(encoding="utf-8")):
        if ours(block):
            run(page, block, namespace)
    model, posteriors, data = (namespace[name] for name in ("model", "posteriors", "data"))
    linearized = bdl.LinearizedPredictive(model, posteriors["Laplace"], 1000)
    functions = {
        "NUTS": bdl.Predictive(model, posteriors["nuts"], 1000)(data.x_test)["f"],
        "Laplace follows it": linearized(data.x_test)["f"],
        "mean-field does not": bdl.Predictive(model, posteriors["mean-field"], 1000)(data.x_test)[
            "f"
        ],
    }
    draw(data, functions).savefig(
        PAGES / "assets" / "landing.svg", bbox_inches="tight", metadata={"Date": None}
    )


def draw(data, functions):
    """Return three panels, each with the interval of NUTS as dotted lines."""
    plots.use_style()
    pyplot.rcParams["svg.hashsalt"] = "landing"
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
    x = data.x_test[:, 0]
    below, above = (
        functions["NUTS"].double().quantile(functions["NUTS"].new_tensor([0.05, 0.95]).double(), 0)
    )
    for panel, color, (title, f) in zip(
        panels, ("#4a4e57", "#0072b2", "#d55e00"), functions.items(), strict=True
    ):
        low, high = f.double().quantile(f.new_tensor([0.05, 0.95]).double(), 0)
        panel.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        panel.plot(x, f.mean(0), color=color, linewidth=2)
        panel.plot(x, below, ":", x, above, ":", color="#33363d", linewidth=1)
        panel.plot(data.x_train[:, 0], data.y_train, ".", color="#33363d", markersize=3)
        panel.set_title(title, loc="left", fontweight="bold")
        panel.set_ylim(-2.5, 2.5)
    return figure


if __name__ == "__main__":
    main()
