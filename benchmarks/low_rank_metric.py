"""Effective draws of NUTS and mclmc with a low-rank metric, beside the diagonal one.

    python benchmarks/low_rank_metric.py --quick
    python benchmarks/low_rank_metric.py --rows rows.jsonl

Programs: a linear regression whose posterior has deviations from 0.01 to 1 along 100 random axes
("normal"); groups with intercepts of their own and a network 4-16-1 ("hierarchy"); networks 8-16-1
and 8-50-50-1 ("deep"). Printed are the smallest and the median ESS, of f at 50 rows (of the
weights where there is no network) and of all latents, for 1000 gradients of the draws and for a
second of processor time of the draws alone, with standard errors over seeds; and the seconds before
them, of warm-up and compilation.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from images import mean_and_error
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import mcmc

Case = tuple[Callable, tuple[Any, ...]]


def tensors(*arrays: Any) -> tuple[Any, ...]:
    return tuple(
        torch.as_tensor(a).float() if a.dtype == float else torch.tensor(a) for a in arrays
    )


def normal(size: int = 100) -> Case:
    generator = np.random.default_rng(0)
    axes, _ = np.linalg.qr(generator.normal(size=(size, size)))
    precision = (axes * np.geomspace(1e4, 1, size)) @ axes.T - 0.9 * np.eye(size)
    x = np.linalg.cholesky(precision).T

    def model(x: Any, y: Any = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(size), 0.9**-0.5).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model, tensors(x, x @ generator.normal(size=size))


def hierarchy(groups: int = 20, rows: int = 400) -> Case:
    generator = np.random.default_rng(0)
    x, group = generator.normal(size=(rows, 4)), generator.integers(0, groups, rows)
    y = np.sin(x[:, 0] + x[:, 1]) + 0.7 * generator.normal(size=groups)[group]
    y = y + 0.2 * generator.normal(size=rows)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    bnn = bdl.bayesianize(net, bdl.priors.FanIn(1.0))

    def model(x: Any, group: Any, y: Any = None) -> Any:
        tau = pyro.sample("tau", dist.HalfNormal(x.new_ones(())))
        noise = pyro.sample("noise", dist.HalfNormal(x.new_ones(())))
        with pyro.plate("groups", groups):
            intercept = pyro.sample("intercept", dist.Normal(0.0, tau))
        f = pyro.deterministic("f", bnn(x).squeeze(-1) + intercept[group])
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    return model, tensors(x, group, y)


def network(*widths: int, rows: int = 200) -> Case:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 8))
    y = np.sin(x[:, 0] + x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + 0.1 * generator.normal(size=rows)
    sizes, layers = [8, *widths], []
    for wide, narrow in zip(sizes, widths, strict=False):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    bnn = bdl.bayesianize(nn.Sequential(*layers, nn.Linear(sizes[-1], 1)), bdl.priors.FanIn(1.0))
    return bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0)), tensors(x, y)


CASES: dict[str, Callable[[], Case]] = {
    "normal": normal,
    "hierarchy": hierarchy,
    "8-16-1": lambda: network(16),
    "deep": lambda: network(50, 50),
}


def run(case: str, name: str, low_rank: bool, seed: int, options: Any) -> dict[str, Any]:
    pyro.set_rng_seed(seed)
    model, data = CASES[case]()
    kernel: Any = {
        "nuts": mcmc.NUTS(max_tree_depth=options.depth, low_rank=low_rank),
        "mclmc": mcmc.MCLMC(thinning=10, low_rank=low_rank),
    }[name]
    setting: dict[str, Any] = {
        "kernel": kernel, "num_chains": options.chains, "progress": False,
        "init": "prior" if case == "normal" else "network",
    }  # fmt: skip
    start = time.process_time()
    samples = mcmc.sample(
        model, *data, seed=seed, num_warmup=options.warmup, num_samples=2, **setting
    )
    warmed = time.process_time()
    samples = samples.extend(options.draws)
    seconds = time.process_time() - warmed
    shape = samples.num_chains, samples.num_draws, -1
    latents = [value.reshape(shape).double() for value in samples.latents.values()]
    drawn = {"latents": torch.cat(latents, -1)}
    drawn["f"] = drawn["latents"]
    if case != "normal":
        f = bdl.Predictive(model, samples)(*(value[:50] for value in data[:-1]))["f"]
        drawn["f"] = f.reshape(shape).double()
    row = {"case": case, "kernel": name, "low rank": low_rank, "seed": seed, "seconds": seconds}
    row["warm-up"] = warmed - start
    row["gradients"] = int(samples.stats["num_steps"].sum())
    for key, values in drawn.items():
        ess = bdl.diagnostics.ess(values, kind="mean")
        row |= {f"min ESS of {key}": float(ess.min()), f"median ESS of {key}": float(ess.median())}
    return row


def table(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and error over seeds of ESS per 1000 gradients and per second."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in done:
        groups.setdefault((row["case"], row["kernel"], row["low rank"]), []).append(row)
    keys = [f"{kind} ESS of {of}" for of in ("f", "latents") for kind in ("min", "median")]
    units = {"gradients": 1e-3, "seconds": 1.0}
    result = []
    for (case, kernel, low_rank), rows in groups.items():
        rates = [
            {f"{key} / {unit}": row[key] / (scale * row[unit])
             for key in keys for unit, scale in units.items()} | {"warm-up": row["warm-up"]}
            for row in rows
        ]  # fmt: skip
        entry = {"case": case, "kernel": kernel, "low rank": low_rank}
        result.append(entry | mean_and_error(rates))
    return result


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--kernels", nargs="+", default=["nuts", "mclmc"])
    sizes = {
        "seeds": (3, 1, "of chains"),
        "chains": (2, 2, "of each run"),
        "warmup": (500, 20, "iterations of each chain"),
        "draws": (300, 10, "of each chain"),
        "depth": (10, 3, "of NUTS's trees"),
    }
    options: argparse.Namespace = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["case"], row["kernel"], row["low rank"], row["seed"]) for row in done}
    for case in options.cases or (["normal"] if options.quick else list(CASES)):
        for seed in range(options.seeds):
            for kernel in options.kernels:
                for low_rank in (False, True):
                    if (case, kernel, low_rank, seed) not in known:
                        row = run(case, kernel, low_rank, seed, options)
                        harness.write_rows(options.rows, [row])
                        done.append(row)
                        if not options.json:
                            print(json.dumps(row), flush=True)
    found = table(done)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "table": found}))
        return
    print(harness.machine())
    for entry in found:
        figures = ", ".join(
            f"{key} {value[0]:.3g} ± {value[1]:.2g}"
            for key, value in entry.items()
            if isinstance(value, tuple)
        )
        which = "low rank" if entry["low rank"] else "diagonal"
        print(f"{entry['case']}, {entry['kernel']}, {which}: {figures}")


if __name__ == "__main__":
    main()
