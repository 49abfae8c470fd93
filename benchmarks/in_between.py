"""In-between uncertainty: the sd of f between two clusters of data, relative to NUTS.

    python benchmarks/in_between.py --threads 1 --figure in_between.png

A 1-50-1 network with ReLUs on ``two_clusters``, with known noise. All posteriors belong to one
program, for which NUTS is the reference; Laplace approximations are linearised. For one hidden
layer Foong et al. (2020) prove of mean-field Normals that

    Var f(r) <= Var f(p) + Var f(q)    for p < 0 < q and |r| < min(|p|, |q|)

(theorem 1), and of dropout of hidden units that Var f is convex in x (theorem 2), which implies
it. ``of bound`` is the largest sd of f at such r over the square root of the right side, p and q
being the clusters' inner edges: no mean-field or dropout posterior can exceed 1. With two hidden
layers (``--hidden 50 50``) nothing forbids it, and the table shows what training finds.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from harness import machine, parser
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl import guides
from pyro_bdl.data import two_clusters
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

NOISE = 0.1
LEFT, RIGHT = (-1.0, -0.7), (0.5, 1.0)  # the clusters of ``two_clusters``
NUTS = "NUTS"
Band = tuple[Tensor, Tensor]  # mean and sd of f on the grid


class Problem:
    """The data, the program, and the inputs where its functions are looked at."""

    def __init__(self, options: argparse.Namespace) -> None:
        data = two_clusters(options.data_points, seed=0, noise=NOISE)
        self.x, self.y = data.x_train, data.y_train
        widths = [1, *options.hidden]
        hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        net = nn.Sequential(*hidden, nn.Linear(widths[-1], 1))
        bnn = bdl.bayesianize(net, bdl.priors.FanIn(options.gain))
        self.model = bdl.models.Regression(bnn, noise=NOISE, num_data=len(self.x))
        self.steps, self.function_draws = options.steps, options.function_draws
        at = torch.linspace(-1.5, 1.5, 301)
        self.grid = at[:, None]
        self.near = (at >= LEFT[0]) & (at <= LEFT[1]) | (at >= RIGHT[0]) & (at <= RIGHT[1])
        self.gap = (at > LEFT[1]) & (at < RIGHT[0])
        self.bounded = at.abs() < min(-LEFT[1], RIGHT[0])
        self.edges = [int((at - edge).abs().argmin()) for edge in (LEFT[1], RIGHT[0])]

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def trained(self, guide: Any, steps: float = 1, **settings: Any) -> Any:
        steps = max(1, round(steps * self.steps))
        train(self.model, guide, self.x, self.y, steps=steps, **settings)
        return guide

    def functions(self, posterior: Any, num_samples: int | None = None) -> Tensor:
        """Draws of f, (S, grid)."""
        return bdl.Predictive(self.model, posterior, num_samples)(self.grid)["f"]

    def sampled(self, guide: Any) -> Band:
        drawn = self.functions(guide, self.function_draws)
        return drawn.mean(0), drawn.std(0)

    def linearised(self, posterior: Any) -> Band:
        moments = bdl.LinearizedPredictive(self.model, posterior).parameter_moments(self.grid)["y"]
        return moments.mean["loc"], moments.variance["loc"].sqrt()

    def measures(self, sd: Tensor) -> dict[str, float]:
        """Mean sd between and on the clusters, and the largest share of theorem 1's bound."""
        bound = sd[self.edges].square().sum().sqrt()
        return {
            "gap": sd[self.gap].mean().item(),
            "near": sd[self.near].mean().item(),
            "of bound": (sd[self.bounded].max() / bound).item(),
        }


def reference(problem: Problem, options: argparse.Namespace) -> tuple[Band, dict[str, Any]]:
    """NUTS's band, and how its chains went."""
    started = time.process_time()
    samples = bdl.mcmc.sample(
        problem.model,
        *problem.data,
        num_chains=options.chains,
        num_warmup=options.warmup,
        num_samples=options.draws,
        kernel=bdl.mcmc.NUTS(max_tree_depth=options.depth),
        progress=not options.json,
    )
    drawn = problem.functions(samples)
    by_chain = drawn.unflatten(0, (samples.num_chains, -1))
    band = drawn.mean(0), drawn.std(0)
    facts = {
        "draws": len(drawn),
        "largest R-hat of f": bdl.diagnostics.rhat(by_chain).max().item(),
        "smallest ESS of f in the gap": bdl.diagnostics.ess(by_chain[..., problem.gap])
        .min()
        .item(),
        "divergences": int(samples.stats["diverging"].sum()),
        "sd in the gap": band[1][problem.gap].mean().item(),
        "sd on the clusters": band[1][problem.near].mean().item(),
        "CPU seconds": time.process_time() - started,
    }
    return band, facts


def posteriors(problem: Problem) -> Iterator[tuple[str, Band]]:
    """The bands of all posteriors, each from an initialization of its own."""
    model, data = problem.model, problem.data
    afresh = {"init_loc_fn": bdl.init.init_afresh}
    # these gradients are noisy: more steps than to a maximum, several draws in each
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO
    noisy: dict[str, Any] = {"steps": 2, "elbo": elbo(num_particles=4)}
    for name, guide, settings in (
        ("mean-field", guides.AutoMeanField(model, **afresh), {}),
        (
            "mean-field, local noise",
            guides.AutoMeanField(model, **afresh),
            {"elbo": elbo(num_particles=4, estimator="local_reparameterization")},
        ),
        ("low-rank", guides.AutoLowRank(model, rank=10, **afresh), {}),
        ("MC dropout", guides.AutoMCDropout(model, p=0.1, **afresh), {}),
        ("concrete dropout", guides.AutoMCDropout(model, learn_p=True, **afresh), {}),
    ):
        yield name, problem.sampled(problem.trained(guide, **(noisy | settings)))
    maximum = problem.trained(guides.AutoLaplaceGGN(model, **afresh))
    for structure in ("full", "kron"):
        posterior = maximum.laplace_approximation(data, structure=structure)
        yield f"Laplace, {structure}", problem.linearised(posterior)
    there = init_to_value(values=maximum.median())
    subnetwork = guides.AutoSubnetwork(model, size=0.1, init_loc_fn=there)
    yield "subnetwork, 10 %", problem.linearised(subnetwork.laplace_approximation(data))
    ensemble = problem.trained(guides.AutoEnsemble(model, size=10))
    yield "ensemble of 10", problem.sampled(ensemble)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Shares of NUTS's sd by posterior, and the bands of the first initialization."""
    started = time.process_time()
    torch.manual_seed(0)
    problem = Problem(options)
    bands: dict[str, Band] = {}
    bands[NUTS], facts = reference(problem, options)
    exact = problem.measures(bands[NUTS][1])
    found: dict[str, list[dict[str, float]]] = {NUTS: [exact]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # ReLU networks are seldom at their maximum
        for seed in tqdm(range(options.initializations), "initializations", disable=options.json):
            torch.manual_seed(seed)
            for name, band in posteriors(problem):
                bands.setdefault(name, band)
                found.setdefault(name, []).append(problem.measures(band[1]))
    results = {
        "network": "-".join(map(str, [1, *options.hidden, 1])),
        "NUTS": facts,
        "posteriors": {name: _summary(values, exact) for name, values in found.items()},
        "CPU seconds in all": time.process_time() - started,
    }
    return results, (problem, bands)


def _summary(values: list[dict[str, float]], exact: dict[str, float]) -> dict[str, Any]:
    """Means over initializations; the gap's share with its standard error."""
    gaps = [value["gap"] / exact["gap"] for value in values]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return {
        "ratio to NUTS in the gap": statistics.fmean(gaps),
        "standard error": error,
        "ratio to NUTS on the clusters": statistics.fmean(v["near"] for v in values)
        / exact["near"],
        "gap to clusters": statistics.fmean(v["gap"] / v["near"] for v in values),
        "of bound": statistics.fmean(v["of bound"] for v in values),
    }


def show(results: dict[str, Any]) -> None:
    print(f"In-between uncertainty: {results['network']}, ReLU")
    for name, value in results["NUTS"].items():
        print(f"  {name:<30} {value:.4g}")
    print("sd of f, means over initializations")
    heads = "gap/NUTS", "± error", "clusters/NUTS", "gap/clusters", "of bound"
    print(" " * 26, *(f"{head:>13}" for head in heads))
    for name, row in results["posteriors"].items():
        cells = ("" if value is None else f"{value:.3g}" for value in row.values())
        print(f"  {name:<24}", *(f"{cell:>13}" for cell in cells))
    print(f"  CPU seconds in all: {results['CPU seconds in all']:.0f}")


def figure(extra: Any, path: str) -> None:
    """Mean and two sd of f of each posterior, from the first initialization."""
    from matplotlib.figure import Figure

    problem, bands = extra
    columns, others = 3, [name for name in bands if name != NUTS]
    rows = math.ceil(len(others) / columns)
    drawn = Figure(figsize=(3.4 * columns, 2.3 * rows + 0.4), layout="constrained")
    axes = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    x, (exact_mean, exact) = problem.grid[:, 0], bands[NUTS]
    for ax, name in zip(axes.flat, others, strict=False):
        mean, sd = bands[name]
        band = ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, color="#56b4e9", alpha=0.6, lw=0)
        (line,) = ax.plot(x, mean, color="#0072b2", lw=1.5)
        for side in (-2, 2):
            (edge,) = ax.plot(x, exact_mean + side * exact, ":", color="#2b2f36", lw=1.2)
        (dots,) = ax.plot(problem.x[:, 0], problem.y, ".", color="#d55e00", ms=3)
        ax.set_title(name, loc="left", fontsize=11, fontweight="bold")
        ax.set(xlim=(-1.5, 1.5), ylim=(-3, 3))
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes.flat)[len(others) :]:
        ax.set_visible(False)
    drawn.legend(
        [(band, line), edge, dots],
        ["mean and two sd of f", "NUTS: two sd around its mean", "data"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    drawn.savefig(path, dpi=110)


def main() -> None:
    options_parser = parser(__doc__.splitlines()[0])
    add = options_parser.add_argument
    add("--hidden", type=int, nargs="+", default=[50], help="widths of hidden layers (50)")
    add("--gain", type=float, default=3.0, help="of the FanIn prior (3)")
    add("--data-points", type=int, default=100, help="of both clusters (100)")
    add("--initializations", type=int, default=3, help="to average over (3)")
    add("--steps", type=int, default=2000, help="of Adam to a maximum, twice that for VI (2000)")
    add("--function-draws", type=int, default=2000, help="of each guide, to measure sd (2000)")
    add("--chains", type=int, default=4, help="of NUTS (4)")
    add("--warmup", type=int, default=1000, help="of each chain (1000)")
    add("--draws", type=int, default=1000, help="of each chain (1000)")
    add("--depth", type=int, default=9, help="largest tree, 2^depth steps (9)")
    add("--figure", help="write a figure there, as .png or .pdf")
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    results, extra = run(options)
    results = {"benchmark": "in-between uncertainty", "machine": machine(), **results}
    if options.json:
        print(json.dumps(results))
    else:
        show(results)
    if options.figure:
        figure(extra, options.figure)


if __name__ == "__main__":
    main()
