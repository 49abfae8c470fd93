"""Priors under the evidence against NUTS, on UCI's gap and standard splits.

The network of ``uci.py`` under the command's program: fan-in scaled weights, noise HalfNormal(1).
NUTS samples that program. Linearized Laplace approximations of it, or of programs that leave more
to the evidence, are trained as the command does (``evidence.train_by_evidence``):

- "program": nothing is set by the evidence, the noise is a latent like the weights;
- "noise": the noise is set by the evidence, under its prior;
- "factor": a factor on top of fan-in is set by the evidence;
- "factor under a hyperprior": LogNormal(0, 0.3), and the noise as in "noise";
- "per layer": a scale for each layer, and the noise.

Where the evidence sets something, it does so at the optimum of the linearized model, and, in a
second row, at the trained weights. For every posterior: the mean test log likelihood, and the share
of NUTS's function that it gives, 1 - W / W0, with W the root mean square over the test inputs of
the 2-Wasserstein distance between Normals with the mean and sd of f, and W0 that of a point at
NUTS's means. Each member is a training of its own with its own hyperparameters; "mixture" weighs
all members alike.

    python benchmarks/uci_priors.py --data uci --sets energy --splits 2 3 4 --rows rows.jsonl

Each row is a line of the file of ``--rows`` as soon as it is known; a run that was killed goes on
with those that are missing. At the end there is one table of all rows.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pyro
import pyro.distributions as dist
import torch
import uci
from torch import Tensor

import pyro_bdl as bdl
from pyro_bdl import evidence, priors
from pyro_bdl.errors import BdlWarning


def _noise() -> priors.Hyperprior:
    return priors.Hyperprior(dist.HalfNormal(torch.tensor(1.0)))


def _hyperprior() -> priors.Hyperprior:
    return priors.Hyperprior(dist.LogNormal(torch.tensor(0.0), torch.tensor(0.3)))


PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "program": (lambda: priors.FanIn(1.0), lambda: dist.HalfNormal(1.0)),
    "noise": (lambda: priors.FanIn(1.0), _noise),
    "factor": (lambda: priors.FanIn(uci.positive(1.0)), lambda: dist.HalfNormal(1.0)),
    "factor under a hyperprior": (lambda: priors.FanIn(_hyperprior()), _noise),
    "per layer": (lambda: priors.PerLayer(priors.Normal(uci.positive(1.0))), _noise),
}
STRUCTURES = ("full", "kron")
POINTS = {"optimum": True, "weights": False}


class Found(NamedTuple):
    """A posterior at the test inputs.

    :param density: log densities of the targets, (N,).
    :param mean: of f, (N,).
    :param variance: of f, (N,).
    """

    density: Tensor
    mean: Tensor
    variance: Tensor


def program(name: str, split: uci.Split) -> Any:
    prior, noise = (make() for make in PROGRAMS[name])
    network = bdl.bayesianize(uci.network(split.x.shape[1]), prior)
    return bdl.models.Regression(network, noise=noise, num_data=len(split.x))


def nuts(split: uci.Split, options: argparse.Namespace) -> tuple[Found, dict[str, float]]:
    """NUTS, the log likelihood of the Normal with its moments, and the largest R-hat of f.

    Where the noise is far narrower than f, a mean over draws says how close the nearest draw comes.
    """
    model, test = program("program", split), (split.x_test, split.y_test)
    samples = bdl.mcmc.sample(
        model, split.x, split.y, num_warmup=options.warmup, num_samples=options.draws,
        kernel=bdl.mcmc.NUTS(max_tree_depth=options.depth), num_chains=2, seed=0, progress=False,
    )  # fmt: skip
    predictive = bdl.Predictive(model, samples)
    each = predictive.log_likelihood(*test)["y"]
    drawn = predictive(split.x_test)
    f, y = drawn["f"], drawn["y"]
    normal = torch.distributions.Normal(y.mean(0), y.std(0))
    facts = {
        "of its moments": normal.log_prob(split.y_test).mean().item() - math.log(split.y_sd),
        "R-hat": bdl.diagnostics.rhat(f.unflatten(0, (2, -1))).max().item(),
    }
    return Found(each.logsumexp(0) - math.log(len(each)), f.mean(0), f.var(0)), facts


def predicted(model: Any, posterior: Any, split: uci.Split) -> Found:
    predictive = bdl.LinearizedPredictive(model, posterior)
    f = predictive.parameter_moments(split.x_test, sites=["f"])["f"]
    density = predictive.log_density(split.x_test, split.y_test)["y"]
    return Found(density, f.mean, f.variance)


def member(
    name: str, split: uci.Split, seed: int, options: argparse.Namespace
) -> dict[tuple[str, str], Found]:
    """The posteriors around one training, by structure and by where the evidence is evaluated.

    The full structure's evidence acts between trainings; at the end each structure has its own.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, data = program(name, split), (split.x, split.y)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    evidence.train_by_evidence(model, guide, *data, steps=options.steps, rounds=options.rounds)
    found = {}
    for structure in STRUCTURES:
        posterior = guide.laplace_approximation(data, structure=structure)
        if not posterior.hyperparameters():
            found["", structure] = predicted(model, posterior, split)
            continue
        for point, linearized in POINTS.items():
            evidence.maximize(posterior, linearized=linearized, steps=40)
            found[point, structure] = predicted(model, posterior, split)
    return found


def mixture(members: list[Found]) -> Found:
    densities, means, variances = (torch.stack(values) for values in zip(*members, strict=True))
    mean = means.mean(0)
    spread = (means - mean).square()
    return Found(
        densities.logsumexp(0) - math.log(len(members)), mean, (variances + spread).mean(0)
    )


def share(found: Found, reference: Found) -> float:
    sd = reference.variance.sqrt()
    distance = (found.mean - reference.mean).square() + (found.variance.sqrt() - sd).square()
    return float(1.0 - (distance.mean() / sd.square().mean()).sqrt())


def rows_of(
    where: dict[str, Any], split: uci.Split, options: argparse.Namespace, known: set[tuple]
) -> list[dict[str, Any]]:
    """Rows of one split that are not known yet; each is written as soon as it is known."""
    todo = [name for name in options.programs if (*where.values(), name) not in known]
    if not todo:
        return []
    reference, facts = nuts(split, options)

    def scores(found: Found) -> dict[str, float]:
        nats = float(found.density.mean()) - math.log(split.y_sd)
        return {"log likelihood": nats, "share": share(found, reference)}

    rows = []
    for name in todo:
        runs = [member(name, split, m, options) for m in range(options.members)]
        for point, structure in runs[0]:
            members = [run[point, structure] for run in runs]
            rows.append(
                {
                    **where,
                    "program": name,
                    "structure": structure,
                    "point": point,
                    "members": [scores(found) for found in members],
                    "mixture": scores(mixture(members)),
                    "NUTS": scores(reference) | facts,
                }
            )
        harness.write_rows(options.rows, rows[-len(runs[0]) :])
    return rows


def average(values: list[float]) -> str:
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean:.2f} ± {error:.2f}" if math.isfinite(error) else f"{mean:.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each kind and set of splits, mean and standard error over splits (of the means
    over members), and of NUTS."""
    lines = []
    for kind, data in dict.fromkeys((row["kind"], row["set"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["set"]) == (kind, data)]
        splits = sorted({row["split"] for row in chosen})
        nuts = [
            next(r["NUTS"]["log likelihood"] for r in chosen if r["split"] == s) for s in splits
        ]
        lines += [
            f"\n{kind} {data}, splits {splits}; NUTS {average(nuts)}\n",
            "| set by the evidence | at | structure | log likelihood | sd over seeds | mixture "
            "| share of NUTS | mixture |",
            "|---" * 8 + "|",
        ]
        keys = dict.fromkeys((row["program"], row["point"], row["structure"]) for row in chosen)
        for key in keys:
            own = [r for r in chosen if (r["program"], r["point"], r["structure"]) == key]
            cells = []
            for score in ("log likelihood", "share"):
                each = [[one[score] for one in row["members"]] for row in own]
                cells.append(average([statistics.fmean(values) for values in each]))
                if score == "log likelihood" and len(each[0]) > 1:
                    cells.append(f"{statistics.fmean(map(statistics.stdev, each)):.2f}")
                elif score == "log likelihood":
                    cells.append("")
                cells.append(average([row["mixture"][score] for row in own]))
            lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", nargs="+", default=["energy"], help="default: energy")
    parser.add_argument("--kinds", nargs="+", default=["gap", "standard"], help="of splits; both")
    parser.add_argument("--splits", nargs="+", type=int, default=[2, 3, 4], help="(2 3 4)")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), help="default: all")
    parser.add_argument("--members", type=int, default=3, help="of each mixture (3)")
    parser.add_argument("--steps", type=int, default=2000, help="of the first training (2000)")
    parser.add_argument("--rounds", type=int, default=3, help="of training and evidence (3)")
    parser.add_argument("--warmup", type=int, default=400, help="of each chain of NUTS (400)")
    parser.add_argument("--draws", type=int, default=400, help="of each chain of NUTS (400)")
    parser.add_argument("--depth", type=int, default=8, help="of its trees (8)")
    parser.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = harness.read_rows(options.rows)
    known = {(row["kind"], row["set"], row["split"], row["program"]) for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a ReLU network is seldom at its maximum
        for data in options.sets:
            for number in options.splits:
                for kind in options.kinds:
                    split = uci.Split(options.data, kind, data, number)
                    where = {"kind": kind, "set": data, "split": number}
                    rows += rows_of(where, split, options, known)
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
