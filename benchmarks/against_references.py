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
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from harness import parser

import pyro_bdl as bdl
from pyro_bdl import posteriors

Row = dict[str, Any]


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
    """Draw share against processor time, one panel for each problem."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    from pyro_bdl import plots

    known = [row for row in rows if "failed" not in row]
    problems = list(dict.fromkeys(row["problem"] for row in known))
    looks = plots.styles(list(dict.fromkeys(row["posterior"] for row in known)))
    lines = 1 if len(problems) < 4 else 2
    across = -(-len(problems) // lines)
    figure, axes = pyplot.subplots(
        lines, across, figsize=(3.8 * across, 2.9 * lines + 1.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, problem in zip(axes.flat, problems, strict=False):
        for row in known:
            if row["problem"] == problem:
                place = (row["processor"], max(-0.1, row["share"]))
                axis.plot(*place, linestyle="none", **looks[row["posterior"]])
        axis.axhline(1, color="0.7", linewidth=0.8, zorder=0)
        axis.axhline(0.5, color="0.7", linewidth=0.8, linestyle=":", zorder=0)
        axis.set(xscale="log", title=problem, xlabel="processor time [s]", ylim=(-0.15, 1.05))
        axis.xaxis.set_major_locator(FixedLocator([1, 3, 10, 30, 100, 300, 1000]))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
    for axis in axes.flat[len(problems) :]:
        axis.axis("off")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of NUTS")
    marks = [pyplot.Line2D([], [], linestyle="none", label=name, **looks[name]) for name in looks]
    figure.legend(
        handles=marks,
        loc="outside lower center",
        fontsize="small",
        ncols=max(2, 3 * across // 2),
        frameon=False,
    )
    figure.savefig(path, dpi=100)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--problems", nargs="+", default=list(bdl.references.names()))
    every = [entry.name for entry in posteriors.entries()]
    options.add_argument("--guides", nargs="+", default=every, help="default: all")
    options.add_argument("--steps", type=int, help="of each guide; default: its own")
    options.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    options.add_argument("--picture", metavar="FILE", help="draw share against cost")
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
