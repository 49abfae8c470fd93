"""Draws of a Laplace approximation underfit, its linearized model does not: five sets, with NUTS.

    python benchmarks/published_draws.py --data DATA/uci_class_immer --quick
    python benchmarks/published_draws.py --data DATA/uci_class_immer --rows rows.jsonl

Immer et al. (2021, "Improving predictions of Bayesian neural nets via local linearization") found
that draws of the weights from a Gauss-Newton posterior predict badly through the network and well
through its linearization, and that the prior's scale must be tuned. The protocol is the one of the
tables of Scannell et al. (2024, github AaltoML/sfr-experiments): two hidden layers of 50 tanh, 70,
15 and 15 % of the rows for training, validation and test, Adam at 1e-4, early stopping. What they
lack is a judge: NUTS on the same program, the fixed prior N(0, 1) on all weights. Printed are the
test NLPD and the total variation from NUTS's class probabilities, in NUTS's own row between its two
chains, with standard errors over splits.

The networks are trained to the mode of the program's own posterior; two of the sets come split in
halves, which are joined first. ``--data`` is the folder ``data`` of github
aleximmer/BNN-predictions (australian_presplit, breast_cancer_scale_presplit, glass, ...).
"""

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyro
import torch
from images import Part, best_scale, log_loss, mean_and_error
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning

SETS = {
    "australian": "australian_presplit",
    "breast cancer": "breast_cancer_scale_presplit",
    "glass": "glass",
    "ionosphere": "ionosphere",
    "vehicle": "vehicle",
}
PUBLISHED = {  # test NLPD, five splits; "held-out" is their tuning on the validation part
    "MAP": (0.33, 0.10, 0.94, 0.33, 0.35),
    "draws, fixed prior": (0.71, 0.73, 1.79, 0.70, 1.39),
    "linearized, fixed prior": (0.41, 0.36, 1.65, 0.34, 1.52),
    "linearized, held-out prior": (0.33, 0.10, 0.92, 0.32, 0.35),
}
SCALES = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 3))
Probabilities = Callable[[Tensor], Tensor]


def read(folder: Path) -> tuple[Any, Any]:
    """Rows and classes of one set, (N, D) and (N,)."""
    if folder.name.endswith("presplit"):
        parts = [
            np.concatenate([np.loadtxt(file) for file in sorted(folder.glob(name))])
            for name in ("*_X_*.csv", "*_y_*.csv")
        ]
        return parts[0], parts[1].astype(int)
    if folder.name == "ionosphere":
        rows = np.loadtxt(folder / "ionosphere.data", delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(int)
    return np.loadtxt(folder / "X.txt"), np.loadtxt(folder / "Y.txt").astype(int)


def split(x: Any, y: Any, seed: int) -> tuple[Part, Part, Part, int]:
    """Training, validation and test rows, standardized by the training rows, and the classes."""
    order = np.random.default_rng(seed).permutation(len(x))
    ends = [0, int(0.7 * len(x)), int(0.85 * len(x)), len(x)]
    mean, sd = x[order[: ends[1]]].mean(0), x[order[: ends[1]]].std(0)
    scaled = torch.tensor((x - mean) / np.where(sd > 0, sd, 1.0), dtype=torch.float64)
    classes = np.unique(y)
    targets = torch.tensor(np.searchsorted(classes, y))
    parts = [order[a:b] for a, b in itertools.pairwise(ends)]
    return *(Part(scaled[rows], targets[rows]) for rows in parts), len(classes)


def network_of(inputs: int, classes: int, width: int) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, classes)).double()


def trained(seed: int, train: Part, valid: Part, classes: int, options: Any) -> nn.Module:
    """The network at the mode of the posterior under N(0, 1), or where validation stopped it."""
    torch.manual_seed(seed)
    network = network_of(train.x.shape[1], classes, options.width)
    optimizer = torch.optim.Adam(network.parameters(), options.rate)
    best, kept, waited = float("inf"), network.state_dict(), 0
    for step in range(options.steps):
        rows = torch.randperm(len(train.x))[:128]
        squares = sum(weight.square().sum() for weight in network.parameters())
        loss = nn.functional.cross_entropy(network(train.x[rows]), train.y[rows])
        optimizer.zero_grad()
        (loss + 0.5 * squares / len(train.x)).backward()
        optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                held = float(nn.functional.cross_entropy(network(valid.x), valid.y))
            waited = 0 if held < best else waited + 1
            if held < best:
                best, kept = held, {k: v.clone() for k, v in network.state_dict().items()}
            if waited == options.patience:
                break
    network.load_state_dict(kept)
    return network.eval()


def program(network: nn.Module, size: int, prior: Any) -> Any:
    return bdl.models.Classification(bdl.bayesianize(network, prior), num_data=size)


def methods(
    network: nn.Module, train: Part, valid: Part, seed: int, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Probabilities]]]:
    fixed = program(network, len(train.x), priors.Normal(1.0))

    def laplace(prior: Any) -> tuple[Any, Any]:
        model = program(network, len(train.x), prior)
        guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
        return model, guide.laplace_approximation(train)

    def linearized(model: Any, posterior: Any) -> Probabilities:
        predictive = bdl.LinearizedPredictive(model, posterior, num_samples=options.draws)
        return lambda x: predictive.probabilities(x, method="monte-carlo")["y"]

    def draws() -> Probabilities:
        predictive = bdl.Predictive(*laplace(priors.Normal(1.0)), num_samples=options.draws)
        return lambda x: predictive.mean(x)["y"].mean(0)

    def by_evidence() -> Probabilities:
        model, posterior = laplace(priors.learnable(priors.Normal(1.0)))
        bdl.evidence.maximize(posterior, linearized=False, progress=False)
        return linearized(model, posterior)

    def by_held_out() -> Probabilities:
        model, posterior = laplace(priors.learnable(priors.Normal(1.0)))
        best_scale(model, posterior, valid, SCALES)
        return linearized(model, posterior)

    def nuts() -> Probabilities:
        kernel = bdl.mcmc.NUTS(max_tree_depth=options.depth)
        samples = bdl.mcmc.sample(
            fixed, *train, kernel=kernel, num_warmup=options.warmup, num_samples=options.chain,
            num_chains=2, seed=seed, progress=False,
        )  # fmt: skip
        predictive = bdl.Predictive(fixed, samples)
        return lambda x: predictive.mean(x)["y"].unflatten(0, (2, -1)).mean(1)  # of each chain

    yield "NUTS", nuts
    yield "MAP", lambda: torch.no_grad()(lambda x: network(x).softmax(-1))
    yield "draws, fixed prior", draws
    yield "linearized, fixed prior", lambda: linearized(*laplace(priors.Normal(1.0)))
    yield "linearized, evidence's prior", by_evidence
    yield "linearized, held-out prior", by_held_out


def measured(name: str, seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each method on one split."""
    *parts, classes = split(*read(options.data / SETS[name]), seed)
    train, valid, test = parts
    network = trained(seed, train, valid, classes, options)
    reference = None
    for method, fit in methods(network, train, valid, seed, options):
        pyro.set_rng_seed(seed)
        start = time.process_time()
        found = fit()(test.x).detach()
        if reference is None:
            distance = total_variation(*found)
            found = reference = found.mean(0)
        else:
            distance = total_variation(found, reference)
        yield {
            "set": name, "seed": seed, "method": method, "NLPD": log_loss(found, test.y),
            "from NUTS": distance, "seconds": time.process_time() - start,
        }  # fmt: skip


def total_variation(one: Tensor, other: Tensor) -> float:
    return float(0.5 * (one - other).abs().sum(-1).mean())


def table(done: list[dict[str, Any]]) -> dict[str, Any]:
    """For every set and method, mean and standard error of both measures, and what is published."""
    found: dict[str, Any] = {}
    for number, name in enumerate(SETS):
        for method in dict.fromkeys(row["method"] for row in done):
            mine = [row for row in done if (row["set"], row["method"]) == (name, method)]
            if mine:
                kept = ("NLPD", "from NUTS", "seconds")
                entry = mean_and_error([{key: row[key] for key in kept} for row in mine])
                if method in PUBLISHED:
                    entry["published NLPD"] = PUBLISHED[method][number]
                found.setdefault(name, {})[method] = entry
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the five sets")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    sizes = {
        "seeds": (5, 2, "splits"),
        "width": (50, 20, "of the hidden layers"),
        "steps": (20_000, 1000, "of training, at most"),
        "patience": (40, 10, "checks of 50 steps without gain on the validation rows"),
        "rate": (1e-4, 1e-3, "of Adam"),
        "draws": (500, 100, "for predictions"),
        "warmup": (300, 100, "steps of NUTS"),
        "chain": (300, 100, "draws of each of two chains"),
        "depth": (8, 6, "of its trees, at most"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["set"], row["seed"]) for row in done}
    for name in options.sets:
        for seed in range(options.seeds):
            if (name, seed) in known:
                continue
            new = list(measured(name, seed, options))
            harness.write_rows(options.rows, new)
            done += new
            if not options.json:
                print(*map(json.dumps, new), sep="\n", flush=True)
    found = table(done)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "sets": found}))
        return
    print(harness.machine())
    for name, entries in found.items():
        print(f"{name:32}{'NLPD':>16}{'from NUTS':>18}  seconds  published")
        for method, entry in entries.items():
            parts = [f"{entry[key][0]:.3f} ± {entry[key][1]:.3f}" for key in ("NLPD", "from NUTS")]
            seconds, published = entry["seconds"][0], entry.get("published NLPD", "")
            print(f"  {method:30}{parts[0]:>16}{parts[1]:>18}{seconds:9.1f}  {published}")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # stopped early, so at no mode
        main()
