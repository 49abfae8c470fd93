"""The command's posteriors against the shipped references: who is near NUTS, at what cost.

    python benchmarks/against_references.py                                   # all of both, hours
    python benchmarks/against_references.py --problems wine iris --guides map mean-field

For each problem and posterior: the share of the reference that it gives (1 is the reference, 0 a
point at the reference's mean; see ``Comparison.ranking``), its group, and the seconds of its fit.
"""

import json
import warnings

import torch
from harness import parser

import pyro_bdl as bdl
from pyro_bdl import posteriors


def against(name: str, guides: list[str], options: posteriors.Options) -> list[dict]:
    """One row for each posterior of a problem, in order; posteriors that fail are left out."""
    reference = bdl.references.load(name)
    data = reference.dataset
    torch.manual_seed(0)
    problem = posteriors.Problem(reference.program(), data.x_train, data.y_train)
    fits = []
    for guide in guides:
        try:
            fits.append(posteriors.fit(guide, problem, options))
        except Exception as error:  # one posterior's failure must not lose the others
            print(f"{name}, {guide}: {type(error).__name__}: {error}", flush=True)
    there = {fit.name: fit.posterior for fit in fits} | {"reference": reference.draws()}
    table = bdl.compare(
        problem.model, there, data.x_test, data.y_test, reference="reference",
        costs={fit.name: fit.costs for fit in fits}, target_scale=data.y_sd,
        target_shift=data.y_mean, progress=False,
    )  # fmt: skip
    return [
        {
            "problem": name, "posterior": row.posterior, "group": row.group,
            "share": round(row.share, 3), "error": round(row.error / table.ranking.point, 3),
            "seconds": round(row.seconds or 0.0, 1),
        }
        for row in table.ranking.rows
    ]  # fmt: skip


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--problems", nargs="+", default=list(bdl.references.names()))
    every = [entry.name for entry in posteriors.entries()]
    options.add_argument("--guides", nargs="+", default=every, help="default: all")
    options.add_argument("--steps", type=int, help="of each guide; default: its own")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    settings = posteriors.Options(steps=given.steps)
    rows = []
    for name in given.problems:
        found = against(name, given.guides, settings)
        rows += found
        for row in [] if given.json else found:
            print(
                f"{row['problem']:14s} {row['posterior']:20s} {row['group']:10s} "
                f"{row['share']:6.2f} ± {row['error']:.2f} {row['seconds']:8.1f} s",
                flush=True,
            )
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
