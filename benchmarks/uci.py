"""Test log likelihoods of posteriors on UCI regression sets, standard and gap splits.

A network with one hidden layer of 50 ReLU units under the command's program (weights of fan-in
scale, noise HalfNormal(1)) with posteriors of the command; the same with a scale for each layer
and the noise by the evidence; and the best deterministic fit, a MAP whose prior scale is chosen on
a tenth of the training data before it is trained again on all of it.

    python benchmarks/uci.py --data uci --sets yacht --splits 5 --seeds 2 --rows rows.jsonl

``--data`` is a folder with ``standard/NAME/data/data.txt`` and its index files, and
``gap/NAME/data/`` with index files, as github.com/cambridge-mlg/DUN has them. Splits with the same
rows count once; all splits of a set are trained at once. Log likelihoods are means over test data
in nats, of the target in its own units. The tables have the mean over splits (of each the mean over
seeds) and its standard error, the standard deviation over splits, that over seeds of one split
(root mean square over splits), and the lowest of all. A line of ``--rows`` is one run of one split;
a run that was killed goes on with those that are missing.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from harness import parser, read_rows, write_rows
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn
from uci_published import LOG_LIKELIHOOD

import pyro_bdl as bdl
from pyro_bdl import posteriors, priors
from pyro_bdl.errors import BdlWarning

SETS = ("boston", "concrete", "energy", "power", "protein")
GRID = (0.1, 0.3, 1.0, 3.0)
VALIDATED = "MAP, prior by validation"
# column: whether scales and noise are set by the evidence, and the posterior of the command
COLUMNS = {
    "MAP": (False, "map"),
    "mean-field": (False, "mean-field"),
    "MC dropout": (False, "mc-dropout"),
    "ensemble": (False, "ensemble"),
    "SWAG": (False, "swag"),
    "subnetwork": (False, "subnetwork"),
    "Laplace, last layer": (False, "laplace-last-layer"),
    "Laplace, full": (False, "laplace-full"),
    "Laplace, kron": (False, "laplace-kron"),
    "full, factor by evidence": (False, "laplace-evidence"),
    "full, layers by evidence": (True, "laplace-full"),
    "kron, layers by evidence": (True, "laplace-kron"),
}
_FULL_BATCH, _BATCH = 1024, 256  # of ``training.train``


class Split:
    """Standardized training and test data of one split."""

    def __init__(self, folder: Path, kind: str, name: str, number: int) -> None:
        standard = folder / "standard" / name / "data"
        table = np.loadtxt(standard / "data.txt")
        features = np.loadtxt(standard / "index_features.txt", dtype=int)
        target = int(np.loadtxt(standard / "index_target.txt"))
        where = folder / kind / name / "data"
        rows = {
            part: np.loadtxt(where / f"index_{part}_{number}.txt", dtype=int)
            for part in ("train", "test")
        }
        x, y = table[:, features], table[:, target]
        mean, sd = x[rows["train"]].mean(0), x[rows["train"]].std(0)
        x = (x - mean) / np.where(sd > 0, sd, 1.0)
        self.y_sd = float(y[rows["train"]].std())
        y = (y - y[rows["train"]].mean()) / self.y_sd
        tensors = {
            k: (torch.tensor(x[r]).float(), torch.tensor(y[r]).float()) for k, r in rows.items()
        }
        (self.x, self.y), (self.x_test, self.y_test) = tensors["train"], tensors["test"]


def distinct(folder: Path, kind: str, name: str) -> list[int]:
    """The numbers of the splits whose test rows no earlier split has; gap splits repeat."""
    files = (folder / kind / name / "data").glob("index_test_*.txt")
    found: dict[frozenset[int], int] = {}
    for number in sorted(int(file.stem.rpartition("_")[2]) for file in files):
        where = folder / kind / name / "data" / f"index_test_{number}.txt"
        found.setdefault(frozenset(np.loadtxt(where, dtype=int, ndmin=1).tolist()), number)
    return list(found.values())


def positive(value: float) -> PyroParam:
    return PyroParam(torch.tensor(value), constraint=constraints.positive)


def network(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 50), nn.ReLU(), nn.Linear(50, 1))


def program(split: Split, *, tuned: bool = False, scale: float | None = None) -> Any:
    """The command's program; with a scale for each layer, or one scale of all weights."""
    prior: priors.Prior = priors.FanIn(1.0) if scale is None else priors.Normal(scale)
    if tuned:
        prior = priors.PerLayer(priors.Normal(positive(1.0)))
    network_of = bdl.bayesianize(network(split.x.shape[1]), prior)
    noise = positive(0.5) if tuned else dist.HalfNormal(1.0)
    return bdl.models.Regression(network_of, noise=noise, num_data=len(split.x))


def fitted(
    name: str, programs: list[Any], data: list[tuple[Tensor, Tensor]], seed: int, options: Any
) -> list[Any]:
    """Posteriors of several data sets; more steps where a step sees a smaller part of the data."""
    problems = [posteriors.Problem(m, *d) for m, d in zip(programs, data, strict=True)]
    count = len(data[0][0])
    in_a_pass = 1.0 if count <= _FULL_BATCH else count / _BATCH
    steps = max(options.steps, round(options.passes * in_a_pass))
    settings = posteriors.Options(seed=seed, steps=steps)
    found = []
    for problem in problems:
        fit = posteriors.fit(name, problem, settings)
        if fit.interrupted:
            raise KeyboardInterrupt
        found.append(fit.posterior)
    return found


def log_likelihood(model: Any, posterior: Any, x: Tensor, y: Tensor) -> float:
    """The mean over the data; linearized, in closed form, for a Laplace approximation."""
    if isinstance(posterior, bdl.guides.LaplaceGuide):
        return bdl.LinearizedPredictive(model, posterior).log_density(x, y)["y"].mean().item()
    each = bdl.Predictive(model, posterior, num_samples=1000).log_likelihood(x, y)["y"]
    return (each.logsumexp(0) - math.log(len(each))).mean().item()


def validated(splits: list[Split], seed: int, options: Any) -> tuple[list[Any], list[Any]]:
    """Programs and MAPs with the prior scale that predicts a tenth of the training data best."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(split.x), generator=generator) for split in splits]
    parts = [(order[len(order) // 10 :], order[: len(order) // 10]) for order in orders]
    best = [(-math.inf, 0.0)] * len(splits)
    for scale in GRID:
        programs = [program(split, scale=scale) for split in splits]
        data = []
        for model, s, (kept, _) in zip(programs, splits, parts, strict=True):
            model.num_data = len(kept)
            data.append((s.x[kept], s.y[kept]))
        found = fitted("map", programs, data, seed, options)
        for i, (s, (_, held)) in enumerate(zip(splits, parts, strict=True)):
            score = log_likelihood(programs[i], found[i], s.x[held], s.y[held])
            best[i] = max(best[i], (score, scale))
    programs = [program(s, scale=scale) for s, (_, scale) in zip(splits, best, strict=True)]
    return programs, fitted("map", programs, [(s.x, s.y) for s in splits], seed, options)


def scores(column: str, splits: list[Split], seed: int, options: Any) -> list[float]:
    """The mean test log likelihood of each split, of the target in its own units."""
    if column == VALIDATED:
        programs, found = validated(splits, seed, options)
    else:
        tuned, name = COLUMNS[column]
        programs = [program(split, tuned=tuned) for split in splits]
        found = fitted(name, programs, [(s.x, s.y) for s in splits], seed, options)
    return [
        log_likelihood(model, posterior, split.x_test, split.y_test) - math.log(split.y_sd)
        for model, posterior, split in zip(programs, found, splits, strict=True)
    ]


def rows_of(kind: str, name: str, rows: list[dict[str, Any]], options: Any) -> None:
    """Add the rows of a set that are missing, all splits of a column and a seed at once."""
    numbers = distinct(options.data, kind, name)[: options.splits]
    for seed in range(options.seeds):
        for column in options.columns:
            where = {"kind": kind, "set": name, "column": column, "seed": seed}
            known = {row["split"] for row in rows if where.items() <= row.items()}
            missing = [number for number in numbers if number not in known]
            if not missing:
                continue
            splits = [Split(options.data, kind, name, number) for number in missing]
            started = time.process_time()
            found = scores(column, splits, seed, options)
            seconds = (time.process_time() - started) / len(splits)
            new = [
                {**where, "split": number, "log likelihood": value, "seconds": seconds}
                for number, value in zip(missing, found, strict=True)
            ]
            write_rows(options.rows, new)
            rows += new


def spread(each: list[list[float]]) -> dict[str, float]:
    """Mean over splits with its standard error, and the sds over splits and over seeds.

    :param each: for each split the values of its seeds.
    """
    means = [statistics.fmean(values) for values in each]
    over_splits = statistics.stdev(means) if len(means) > 1 else math.nan
    variances = [statistics.variance(values) for values in each if len(values) > 1]
    return {
        "mean": statistics.fmean(means),
        "standard error": over_splits / math.sqrt(len(means)),
        "sd over splits": over_splits,
        "sd over seeds": math.sqrt(statistics.fmean(variances)) if variances else math.nan,
    }


def shown(value: float) -> str:
    """Three significant digits, more of a large number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def table(kind: str, name: str, rows: list[dict[str, Any]]) -> str:
    """Markdown of one set: a line for each column, with the published figure on standard splits."""
    chosen = [row for row in rows if (row["kind"], row["set"]) == (kind, name)]
    splits = sorted({row["split"] for row in chosen})
    seeds = len({row["seed"] for row in chosen})
    lines = [
        f"\n{kind} {name}, splits {splits}, {seeds} seeds\n",
        "| | log likelihood | sd over splits | sd over seeds | lowest | published |",
        "|---" * 6 + "|",
    ]
    for column in dict.fromkeys(row["column"] for row in chosen):
        own = [row for row in chosen if row["column"] == column]
        each = [[r["log likelihood"] for r in own if r["split"] == s] for s in splits]
        mean, error, over_splits, over_seeds = spread([v for v in each if v]).values()
        lowest = min(row["log likelihood"] for row in own)
        public = LOG_LIKELIHOOD.get(column, {}).get(name) if kind == "standard" else None
        cells = (
            shown(mean) + (f" ± {shown(error)}" if len(splits) > 1 else ""),
            shown(over_splits) if len(splits) > 1 else "",
            shown(over_seeds) if seeds > 1 else "",
            shown(lowest),
            "" if public is None else " ± ".join(f"{v:.2f}" for v in public if v is not None),
        )
        lines.append(f"| {column} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean and standard error over splits of each column, a panel for each set.

    Rings are published figures. The axis of a panel with columns below -20 is logarithmic below -5.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["kind"], row["set"]) for row in rows))
    columns = [c for c in (VALIDATED, *COLUMNS) if any(row["column"] == c for row in rows)]
    wide = min(4, len(panels))
    drawn = Figure(figsize=(2.2 + 2.4 * wide, 3.2 * -(-len(panels) // wide)), layout="constrained")
    axes = drawn.subplots(-(-len(panels) // wide), wide, squeeze=False, sharey=True).flatten()
    for ax, (kind, name) in zip(axes, panels, strict=False):
        lowest = 0.0
        for height, column in enumerate(columns):
            wanted = {"kind": kind, "set": name, "column": column}
            own = [row for row in rows if wanted.items() <= row.items()]
            if not own:
                continue
            splits = sorted({row["split"] for row in own})
            each = [[r["log likelihood"] for r in own if r["split"] == s] for s in splits]
            mean, error, *_ = spread(each).values()
            bar = None if math.isnan(error) else error
            ax.errorbar(mean, height, xerr=bar, fmt="o", ms=4, color="C0")
            lowest = min(lowest, mean)
            public = LOG_LIKELIHOOD.get(column, {}).get(name) if kind == "standard" else None
            if public is not None:
                ax.plot(public[0], height, "o", mfc="none", mec="0.4", ms=8)
        if lowest < -20.0:
            ax.set_xscale("symlog", linthresh=5.0)
            ax.set_xticks([-1000, -100, -10, 0], ["-1000", "-100", "-10", "0"])
        ax.set_title(f"{kind} {name}", fontsize=9)
        ax.grid(axis="x", alpha=0.3)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    axes[0].set_yticks(range(len(columns)), columns)
    axes[0].invert_yaxis()
    drawn.supxlabel("test log likelihood, nats")
    drawn.savefig(path, dpi=100)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    columns = [VALIDATED, *COLUMNS]
    arguments.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    arguments.add_argument("--splits", type=int, default=20, help="of each set, at most (20)")
    arguments.add_argument("--seeds", type=int, default=2, help="of each split (2)")
    arguments.add_argument("--sets", nargs="+", default=SETS, help="default: %(default)s")
    arguments.add_argument("--kinds", nargs="+", default=("standard", "gap"), help="of splits")
    arguments.add_argument("--columns", nargs="+", choices=columns, default=columns)
    arguments.add_argument("--steps", type=int, default=2000, help="of each training, at least")
    arguments.add_argument("--passes", type=int, default=150, help="over the data, at least (150)")
    arguments.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    arguments.add_argument("--figure", type=Path, help="write the picture of all rows there")
    options: argparse.Namespace = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows = read_rows(options.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a ReLU network is seldom at its maximum
        for name in options.sets:
            for kind in options.kinds:
                rows_of(kind, name, rows, options)
                if not options.json:
                    print(table(kind, name, rows), flush=True)
    if options.figure:
        figure(rows, options.figure)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
