"""The command's posteriors against the shipped references: who is near NUTS, where, at what cost.

    python benchmarks/against_references.py --rows rows.jsonl                 # all of both, hours
    python benchmarks/against_references.py --rows rows.jsonl --picture near_nuts.png
    python benchmarks/against_references.py --problems wine iris --guides map mean-field

For each problem and posterior: 1 - d / d_0, with d its distance to the reference and d_0 that of a
point at the reference's mean (1 is the reference, 0 such a point), its group, its function's sd
divided by the reference's, its NLPD minus the reference's, and the seconds of its fit, by the wall
clock and of processor time. Each row is a line of the file of ``--rows`` as soon as it is known; a
run that was killed goes on with those that are missing. At the end there is one table of all rows.
"""

import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import parser

import pyro_bdl as bdl
from pyro_bdl import posteriors

Row = dict[str, Any]

LEAST_DRAWN = -0.6  # share of NUTS


def against(name: str, guide: str, options: posteriors.Options) -> Row:
    """The row of one posterior of one problem; ``"failed"`` in it says why there are no numbers."""
    reference = bdl.references.load(name)
    data, row = reference.dataset, {"problem": name, "posterior": guide, "steps": options.steps}
    torch.manual_seed(0)
    problem = posteriors.Problem(reference.program(), data.x_train, data.y_train)
    before = time.process_time()
    try:
        fit = posteriors.fit(guide, problem, options)
        processor = time.process_time() - before
        table = bdl.compare(
            problem.model, {guide: fit.posterior, "reference": reference.draws()}, data.x_test,
            data.y_test, reference="reference", costs={guide: fit.costs},
            units=(data.y_sd, data.y_mean), progress=False,
        )  # fmt: skip
    except Exception as error:  # one posterior's failure must not lose the others
        return row | {"failed": f"{type(error).__name__}: {error}"}
    own, point = table.numbers()[guide], table.table.attrs["point"]
    return row | {
        "group": own["group"],
        "share": 1 - own["wasserstein"] / point,
        "error": own["wasserstein_se"] / point,
        "sd_ratio": own.get("sd_ratio"),
        "nlpd_diff": own.get("nlpd_diff"),
        "nlpd_diff_se": own.get("nlpd_diff_se"),
        "rhat": own.get("rhat"),
        "seconds": fit.costs.seconds,
        "processor": processor,
    }


def to_text(rows: list[Row]) -> str:
    """One table in Markdown: shares with their groups, a column for each problem, and the median
    processor time; the posteriors with the largest mean share first."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    marks = {"alike": " =", "usable": "", "undecided": " ?", "far": " far"}
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row["posterior"], {})[row["problem"]] = row
    lines = []
    for guide, found in sorted(cells.items(), key=lambda item: -mean_share(list(item[1].values()))):
        known = [row for row in found.values() if "failed" not in row]
        times = sorted(row["processor"] for row in known)
        shown = [
            f"{100 * row['share']:.0f} ± {100 * row['error']:.0f}{marks[row['group']]}"
            if (row := found.get(problem)) and "failed" not in row
            else "failed" if row else ""
            for problem in problems
        ]  # fmt: skip
        cost = f"{times[len(times) // 2]:.1f}" if times else ""
        lines.append(f"| {guide} | {' | '.join(shown)} | {cost} |")
    head = f"| share of NUTS, % | {' | '.join(problems)} | s, median |"
    return "\n".join([head, "|---" * (len(problems) + 2) + "|", *lines])


def mean_share(rows: list[Row]) -> float:
    """The mean share of some rows; what is worse than a point counts as a point."""
    found = [max(0.0, row["share"]) for row in rows if "failed" not in row]
    return sum(found) / max(1, len(found))


def picture(rows: list[Row], path: str) -> None:
    """Draw the shares of each posterior on all problems, the nearest at the top, with its median
    and the median processor time of its fit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found: dict[str, list[Row]] = {}
    for row in rows:
        if "failed" not in row:
            found.setdefault(row["posterior"], []).append(row)
    order = sorted(found, key=lambda name: -mean_share(found[name]))
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    marks = dict(zip(problems, "os^Dv*P", strict=False))
    figure, axis = pyplot.subplots(figsize=(8.0, 0.27 * len(order) + 1.6), layout="constrained")
    for line, name in enumerate(order):
        shares = [row["share"] for row in found[name]]
        for row in found[name]:
            inside = max(row["share"], LEAST_DRAWN)
            faint = inside > row["share"]  # farther to the left than is drawn
            axis.plot(
                inside, line, marks[row["problem"]], color="#0072b2", markersize=6,
                markerfacecolor="none" if faint else "#0072b2", alpha=0.75,
            )  # fmt: skip
        middle = max(LEAST_DRAWN, statistics.median(shares))
        axis.plot([middle, middle], [line - 0.35, line + 0.35], color="#d55e00", linewidth=2.5)
        seconds = statistics.median(row["processor"] for row in found[name])
        axis.annotate(
            f"{seconds:.1f} s", (1.01, line), xycoords=("axes fraction", "data"), va="center",
            fontsize="small",
        )  # fmt: skip
    for place, style in ((1.0, "-"), (0.5, ":"), (0.0, "-")):
        axis.axvline(place, color="0.7", linewidth=0.8, linestyle=style, zorder=0)
    axis.set(
        yticks=range(len(order)), yticklabels=order, ylim=(len(order) - 0.5, -0.5),
        xlim=(LEAST_DRAWN - 0.05, 1.05),
        xlabel="share of NUTS: 1 is NUTS, 0 a point at its mean (hollow: farther left)",
    )  # fmt: skip
    axis.grid(axis="y", color="0.93")
    axis.set_axisbelow(True)
    known = [
        pyplot.Line2D([], [], linestyle="none", marker=mark, color="#0072b2", label=problem)
        for problem, mark in marks.items()
    ]
    known.append(pyplot.Line2D([], [], color="#d55e00", linewidth=2.5, label="median"))
    figure.legend(handles=known, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--problems", nargs="+", default=list(bdl.references.names()))
    every = [entry.name for entry in posteriors.entries()]
    options.add_argument("--guides", nargs="+", default=every, help="default: all")
    options.add_argument("--steps", type=int, help="of each guide; default: its own")
    options.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    options.add_argument("--picture", metavar="FILE", help="draw the shares")
    options.add_argument("--quick", action="store_true", help="200 steps, short chains")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    settings = posteriors.Options(steps=given.steps)
    if given.quick:
        settings = posteriors.Options(steps=given.steps or 200, warmup=50, draws=50, rounds=1)
    rows: list[Row] = []
    if given.rows is not None and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    there = {(row["problem"], row["posterior"]) for row in rows}
    for name in given.problems:
        for guide in given.guides:
            if (name, guide) in there:
                continue
            row = against(name, guide, settings)
            rows.append(row)
            if given.rows is not None:
                with given.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if not given.json:
                said = row.get("failed") or (
                    f"{row['group']:10s} {row['share']:6.2f} ± {row['error']:.2f} "
                    f"{row['processor']:8.1f} s"
                )
                print(f"{name:14s} {guide:20s} {said}", flush=True)
    print(json.dumps(rows) if given.json else f"\n{to_text(rows)}")
    if given.picture:
        picture(rows, given.picture)


if __name__ == "__main__":
    main()
