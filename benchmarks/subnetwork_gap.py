"""``subnetwork.py --task gap``: regression in one dimension with a gap between two clusters.

The network is 1-50-50-1 with ReLUs: 2600 weights (and 101 biases), as in Daxberger et al. 2021,
section 6.1. Its prior is Normal(0, 0.3^2) for all, under which functions have an sd of about one
at the data's inputs. Full NUTS is the reference. Every posterior of a part of the weights is full
Laplace over that part, linearised, around one MAP; the table holds means over several MAPs from
different initializations, since each has its own kinks.
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import selectors
from pyro_bdl.training import collect_swag, train

SIZES = (0.5, 0.03, 0.01)
NOISE = 0.1
CENTERS, HALF_WIDTH, GAP = (-1.0, 1.0), 0.3, 0.5
WASSERSTEIN, RANDOM, MEAN_FIELD = "variance, of SWAG", "random", "mean-field"
NUTS = "NUTS, all weights"
Bands = dict[str, tuple[Tensor, Tensor]]  # mean and sd of f on the grid


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gap")
    group.add_argument("--data-points", type=int, default=100, help="of both clusters (100)")
    group.add_argument("--prior-scale", type=float, default=0.3, help="of all weights (0.3)")
    group.add_argument("--initializations", type=int, default=5, help="MAPs to average over (5)")
    group.add_argument("--random", type=int, default=10, help="random subnetworks of each (10)")
    group.add_argument("--steps", type=int, default=3000, help="of Adam, MAP and mean-field (3000)")
    group.add_argument("--chains", type=int, default=4, help="of NUTS (4)")
    group.add_argument("--warmup", type=int, default=1000, help="of each chain (1000)")
    group.add_argument("--draws", type=int, default=1000, help="of each chain (1000)")
    group.add_argument("--depth", type=int, default=8, help="largest tree, 2^depth steps (8)")


class Problem:
    """The data, the program, and the inputs where its functions are looked at."""

    def __init__(self, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(0)
        half = options.data_points // 2
        offsets = HALF_WIDTH * (2 * torch.rand(2, half, generator=generator) - 1)
        self.x = (torch.tensor(CENTERS)[:, None] + offsets).reshape(-1, 1)
        clean = 0.5 * torch.sin(4 * self.x[:, 0]) + 0.3 * self.x[:, 0]
        self.y = clean + NOISE * torch.randn(len(clean), generator=generator)
        net = nn.Sequential(
            nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1)
        )
        bnn = bdl.bayesianize(net, bdl.priors.Normal(options.prior_scale))
        self.model = bdl.models.Regression(bnn, noise=NOISE, num_data=len(self.x))
        self.grid = torch.linspace(-1.8, 1.8, 145)[:, None]
        x = self.grid[:, 0]
        self.gap = x.abs() <= GAP
        self.near = (x.abs() - CENTERS[1]).abs() <= HALF_WIDTH

    def functions(self, posterior: Any, num_samples: int | None = None) -> Tensor:
        """Draws of f, (S, grid)."""
        return bdl.Predictive(self.model, posterior, num_samples=num_samples)(self.grid)["f"]

    def band(self, functions: Tensor) -> tuple[Tensor, Tensor]:
        return functions.mean(0), functions.std(0)

    def linearised(self, posterior: Any) -> tuple[Tensor, Tensor]:
        moments = bdl.LinearizedPredictive(self.model, posterior).parameter_moments(self.grid)["y"]
        return moments.mean["loc"], moments.variance["loc"].sqrt()


def reference(problem: Problem, options: argparse.Namespace) -> tuple[Tensor, dict[str, Any]]:
    """Functions of NUTS over all weights, and how its chains went."""
    started = time.process_time()
    samples = bdl.mcmc.sample(problem.model, problem.x, problem.y, **_chains(options))
    functions = problem.functions(samples)
    by_chain = functions.unflatten(0, (samples.num_chains, -1))
    facts = {
        "draws": len(functions),
        "largest R-hat of f": bdl.diagnostics.rhat(by_chain).max().item(),
        "smallest ESS of f in the gap": bdl.diagnostics.ess(by_chain[..., problem.gap])
        .min()
        .item(),
        "divergences": int(samples.stats["diverging"].sum()),
        "sd in the gap": functions.std(0)[problem.gap].mean().item(),
        "sd near the data": functions.std(0)[problem.near].mean().item(),
        "CPU seconds": time.process_time() - started,
    }
    return functions, facts


def _chains(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_chains": options.chains,
        "num_warmup": options.warmup,
        "num_samples": options.draws,
        "kernel": bdl.mcmc.NUTS(max_tree_depth=options.depth),
        "progress": not options.json,
    }


def maximum(problem: Problem, seed: int, steps: int) -> Any:
    """A guide at the MAP from a fresh initialization."""
    torch.manual_seed(seed)
    guide = bdl.guides.AutoSubnetwork(problem.model, init_loc_fn=bdl.init.init_afresh)
    train(problem.model, guide, problem.x, problem.y, steps=steps)
    return guide


def around(problem: Problem, guide: Any, kind: Callable, **options: Any) -> Any:
    """Another guide that starts at the MAP."""
    start = init_to_value(values=guide.median())
    return kind(problem.model, init_loc_fn=start, **options).prototype(problem.x, problem.y)


def swag(problem: Problem, guide: Any) -> Any:
    """Diagonal SWAG around the MAP."""
    at = around(problem, guide, bdl.guides.AutoSWAG, rank=0)
    collect_swag(problem.model, at, problem.x, problem.y, snapshots=100, learning_rate=1e-4)
    return at.swag_approximation()


def subnetworks(options: argparse.Namespace, mean_field: Any, moving: Any) -> dict[str, list[Any]]:
    """The selectors by name; several of one name are averaged."""
    return {
        WASSERSTEIN: [selectors.LargestVariance(moving)],
        "variance, of diagonal Laplace": [selectors.LargestVariance()],
        "variance, of mean-field": [selectors.LargestVariance(mean_field)],
        "predictive variance": [selectors.LargestPredictiveVariance()],
        "magnitude": [selectors.LargestMagnitude()],
        RANDOM: [selectors.Random(seed) for seed in range(options.random)],
    }


def posteriors(
    problem: Problem, seed: int, options: argparse.Namespace
) -> Iterator[tuple[tuple[str, float | None], list[tuple[Tensor, Tensor]]]]:
    """The bands of every posterior around one MAP, by name and size."""
    data = problem.x, problem.y
    guide = maximum(problem, seed, options.steps)
    mean_field = around(problem, guide, bdl.guides.AutoMeanField, init_scale=0.02)
    train(problem.model, mean_field, *data, steps=options.steps)
    moving = swag(problem, guide)
    torch.manual_seed(seed)
    yield (MEAN_FIELD, None), [problem.band(problem.functions(mean_field, 2000))]
    plain = around(problem, guide, bdl.guides.AutoLaplaceGGN)
    for structure in ("full", "diag"):
        posterior = plain.laplace_approximation(data, structure=structure)
        name = {"full": "full Laplace", "diag": "diagonal Laplace"}[structure]
        yield (name, None), [problem.linearised(posterior)]
    last = guide.laplace_approximation(data, select=selectors.Sites("last-layer"))
    yield ("last layer", last.subset.size), [problem.linearised(last)]
    found = subnetworks(options, mean_field, moving)
    for name, chosen in found.items():
        for size in SIZES:
            fitted = [guide.laplace_approximation(data, select=one, size=size) for one in chosen]
            yield (name, size), [problem.linearised(posterior) for posterior in fitted]
    if seed == 0:
        for size in SIZES[1:]:
            (select,) = found[WASSERSTEIN]
            subset = guide.laplace_approximation(data, select=select, size=size)
            samples = bdl.mcmc.sample(problem.model, *data, subset=subset, **_chains(options))
            yield ("NUTS, variance of SWAG", size), [problem.band(problem.functions(samples))]


def run(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Shares of NUTS's sd, by posterior and size, and the bands of the first MAP."""
    started = time.process_time()
    problem = Problem(options)
    functions, facts = reference(problem, options)
    shares: dict[tuple[str, float | None], dict[str, list[float]]] = {}
    first: Bands = {NUTS: problem.band(functions)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # ReLU networks are seldom at their maximum
        for seed in tqdm(range(options.initializations), "initializations", disable=options.json):
            for key, bands in posteriors(problem, seed, options):
                where = {"gap": problem.gap, "near": problem.near}
                for part, chosen in where.items():
                    sd = statistics.fmean(sd[chosen].mean().item() for _, sd in bands)
                    share = sd / first[NUTS][1][chosen].mean().item()
                    shares.setdefault(key, {}).setdefault(part, []).append(share)
                if seed == 0:
                    first[_label(*key)] = bands[0]
    results = {
        "network": f"1-50-50-1, {_count(problem)} numbers",
        "NUTS": facts,
        "share of NUTS's sd": [_row(*key, **values) for key, values in shares.items()],
        "claims": claims(shares),
        "CPU seconds in all": time.process_time() - started,
    }
    return results, (problem, first)


def _count(problem: Problem) -> int:
    return sum(p.numel() for p in problem.model.network.network.buffers())


def _row(name: str, size: float | None, gap: list[float], near: list[float]) -> dict[str, Any]:
    error = statistics.stdev(gap) / math.sqrt(len(gap)) if len(gap) > 1 else None
    means = {"gap": statistics.fmean(gap), "error": error, "near": statistics.fmean(near)}
    return {"posterior": name, "size": size, **means}


def claims(shares: dict[tuple[str, float | None], dict[str, list[float]]]) -> dict[str, str]:
    """The number of initializations in which the statements of the paper hold, by selector."""
    result = {}
    whole = shares[MEAN_FIELD, None]["gap"]
    names = dict.fromkeys(name for name, size in shares if size in SIZES and "NUTS" not in name)
    for name in names:
        if name == RANDOM:
            continue
        for size in SIZES:
            pairs = zip(shares[name, size]["gap"], shares[RANDOM, size]["gap"], strict=True)
            wins = [mine > random for mine, random in pairs]
            result[f"{name}, {size:.0%}: more than random"] = f"{sum(wins)} of {len(wins)}"
        pairs = zip(shares[name, SIZES[-1]]["gap"], whole, strict=True)
        wins = [mine > mean_field for mine, mean_field in pairs]
        result[f"{name}, {SIZES[-1]:.0%}: more than mean-field"] = f"{sum(wins)} of {len(wins)}"
    return result


def _label(name: str, size: float | None) -> str:
    if size is None:
        return name
    return f"{name}, {size:.0%}" if size < 1 else f"{name}, {size} weights"


def show(results: dict[str, Any]) -> None:
    print(f"Regression with a gap: {results['network']}")
    for name, value in results["NUTS"].items():
        print(f"  {name:<30} {value:.4g}")
    rows = results["share of NUTS's sd"]
    print("sd of f relative to NUTS, averaged over points and initializations")
    print(f"  {'posterior':<40} {'in the gap':>10} {'± error':>8} {'near the data':>14}")
    for row in rows:
        label = _label(row["posterior"], row["size"])
        error = "" if row["error"] is None else f"{row['error']:.1%}"
        print(f"  {label:<40} {row['gap']:>10.1%} {error:>8} {row['near']:>14.1%}")
    print("in how many initializations")
    for name, value in results["claims"].items():
        print(f"  {name:<60} {value}")
    print(f"  CPU seconds in all: {results['CPU seconds in all']:.0f}")


def figure(results: dict[str, Any], extra: Any, path: str) -> None:
    """Mean and two sd of the first MAP's posteriors."""
    from matplotlib.figure import Figure

    problem, bands = extra
    shown = [
        NUTS, MEAN_FIELD, "full Laplace", "diagonal Laplace",
        *(_label(WASSERSTEIN, size) for size in SIZES),
        *(_label(name, SIZES[-1]) for name in ("predictive variance", "magnitude", RANDOM)),
        _label("variance, of diagonal Laplace", SIZES[-1]), "NUTS, variance of SWAG, 3%",
    ]  # fmt: skip
    shown = [name for name in shown if name in bands]
    drawn = Figure(figsize=(12, 2.4 * math.ceil(len(shown) / 4)), layout="constrained")
    axes = drawn.subplots(math.ceil(len(shown) / 4), 4, sharex=True, sharey=True, squeeze=False)
    x = problem.grid[:, 0]
    for ax, name in zip(axes.flat, shown, strict=False):
        mean, sd = bands[name]
        ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, color="#56b4e9", alpha=0.5, lw=0)
        ax.plot(x, mean, color="#0072b2", lw=1.2)
        ax.plot(problem.x[:, 0], problem.y, ".", color="#2b2f36", ms=2)
        ax.set_title(name, fontsize=9)
        ax.set_ylim(-1.5, 1.5)
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    drawn.savefig(path, dpi=120)
