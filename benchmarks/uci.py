"""Test log likelihoods of Laplace approximations on UCI regression sets, standard and gap splits.

A network with one hidden layer of 50 ReLU units, per-layer prior scales and the noise by the
evidence during training (full Gauss-Newton), against the best deterministic fit: the same network
as MAP, its prior scale and noise chosen on a tenth of the training data and trained again on all
of it. From the same trained weights the table also shows the point prediction at the evidence's
noise, the Kronecker-factored posterior, both posteriors with the noise set to the root mean square
residual at the end (the evidence counts a parameter as used up in each direction of the
linearised network, though training has not used all of them, and so finds more noise), and the
full posterior without linearization (the network at draws), which is known to fail.

    python benchmarks/uci.py --data uci --splits 5

``--data`` is a folder with ``standard/NAME/data/data.txt`` and its index files, and
``gap/NAME/data/`` with index files, as github.com/cambridge-mlg/DUN has them. Log likelihoods are
means over test data in nats, of the target in its own units; "worst" is the lowest over splits.
"""

import json
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from harness import parser
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

SETS = ("boston", "concrete", "energy", "power", "protein")
GRID = (0.1, 0.3, 1.0, 3.0)
METHODS = {
    "deterministic": "MAP, prior scale and noise by validation",
    "map": "MAP, prior scales and noise by the evidence",
    "laplace-full": "linearised Laplace, full",
    "laplace-kron": "linearised Laplace, Kronecker",
    "laplace-full-ml": "the same two, noise by maximum likelihood: full",
    "laplace-kron-ml": "    and Kronecker",
    "laplace-sampled": "Laplace, full, not linearised",
}
_FULL_BATCH = 2048
_BATCH = 256


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


def train(
    model: Any, guide: Any, x: Tensor, y: Tensor, steps: int, online: Any = None, every: int = 0
) -> None:
    """Adam on the guide's parameters alone; the rate falls to zero unless ``online`` is there."""
    guide.prototype(x[:2], y[:2])
    elbo = bdl.elbo.TemperedTrace_ELBO()
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        rows: Any = slice(None) if len(x) <= _FULL_BATCH else torch.randint(len(x), (_BATCH,))
        loss = elbo.differentiable_loss(model, guide, x[rows], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if online is None:
            schedule.step()
        elif (step + 1) % every == 0 and not online.step():
            break


def gaussian(mean: Tensor, sd: Tensor | float, y: Tensor) -> Tensor:
    return torch.distributions.Normal(mean, sd).log_prob(y)


@torch.no_grad()
def point(model: Any, guide: Any, x: Tensor) -> Tensor:
    return bdl.Predictive(model, guide, num_samples=1)(x)["f"][0]


def deterministic(split: Split, steps: int) -> Tensor:
    """Log likelihoods of the test data under the best deterministic fit."""
    order = torch.randperm(len(split.x))
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]

    def fitted(scale: float, noise: float, rows: Tensor, steps: int) -> tuple[Any, Any]:
        bnn = bdl.bayesianize(network(split.x.shape[1]), bdl.priors.Normal(scale))
        model = bdl.models.Regression(bnn, noise=noise, num_data=len(rows))
        guide = bdl.guides.AutoLaplaceGGN(model)
        train(model, guide, split.x[rows], split.y[rows], steps)
        return model, guide

    best = (-math.inf, 1.0, 1.0)
    for scale in GRID:
        noise = 0.3
        for _ in range(2):  # the noise also weighs the prior: fit with it once more
            model, guide = fitted(scale, noise, kept, steps // 2)
            error = point(model, guide, split.x[held]) - split.y[held]
            noise = max(1e-3, error.square().mean().sqrt().item())
        score = gaussian(torch.zeros_like(error), noise, error).mean().item()
        best = max(best, (score, scale, noise))
    _, scale, noise = best
    model, guide = fitted(scale, noise, torch.arange(len(split.x)), steps)
    return gaussian(point(model, guide, split.x_test), noise, split.y_test)


def laplace(split: Split, steps: int) -> dict[str, Tensor]:
    """Log likelihoods of the test data under each posterior around one trained network."""
    prior = bdl.priors.PerLayer(bdl.priors.Normal(positive(1.0)))
    bnn = bdl.bayesianize(network(split.x.shape[1]), prior)
    model = bdl.models.Regression(bnn, noise=positive(0.5), num_data=len(split.x))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    data = (split.x, split.y)
    online = bdl.evidence.MarginalLikelihoodTraining(
        guide, data, every=1, burn_in=2, patience=None, steps=5
    )
    every = max(1, steps // 20)
    train(model, guide, *data, steps, online, every)
    train(model, guide, *data, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a ReLU network is seldom at its maximum
        posterior = guide.laplace_approximation(data)
        bdl.evidence.maximize(posterior)
        kron = guide.laplace_approximation(data, structure="kron")
    test = (split.x_test, split.y_test)
    noise = next(v for k, v in posterior._read().parameters.items() if "noise" in k).value.item()
    sampled = bdl.Predictive(model, posterior, num_samples=200).log_likelihood(*test)["y"]
    found = {
        "map": gaussian(point(model, guide, split.x_test), noise, split.y_test),
        "laplace-full": bdl.LinearizedPredictive(model, posterior).log_density(*test)["y"],
        "laplace-kron": bdl.LinearizedPredictive(model, kron).log_density(*test)["y"],
        "laplace-sampled": sampled.logsumexp(0) - math.log(len(sampled)),
    }
    parameter = next(p for name, p in posterior._read().parameters.items() if "noise" in name)
    residual = posterior.squares * posterior.noise_factor / posterior.cells
    parameter.set(parameter.value.detach() * residual.sqrt())
    for key, changed in (("laplace-full-ml", posterior), ("laplace-kron-ml", kron)):
        changed.refresh()
        found[key] = bdl.LinearizedPredictive(model, changed).log_density(*test)["y"]
    return found


def run(folder: Path, kind: str, name: str, number: int, steps: int) -> dict[str, float]:
    """Mean test log likelihood by method, of the target in its own units."""
    pyro.clear_param_store()
    pyro.set_rng_seed(number)
    split = Split(folder, kind, name, number)
    found = laplace(split, steps) | {"deterministic": deterministic(split, steps)}
    return {key: value.mean().item() - math.log(split.y_sd) for key, value in found.items()}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    arguments.add_argument("--splits", type=int, default=5, help="of each set (default 5)")
    arguments.add_argument("--sets", default=",".join(SETS), help="default: %(default)s")
    arguments.add_argument("--kinds", default="standard,gap", help="default: %(default)s")
    arguments.add_argument("--steps", type=int, default=2500, help="of each training")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for kind in options.kinds.split(","):
        for name in options.sets.split(","):
            numbers = distinct(options.data, kind, name)[: options.splits]
            bar = tqdm(numbers, desc=f"{kind} {name}", disable=options.json)
            results.setdefault(kind, {})[name] = [
                run(options.data, kind, name, number, options.steps) for number in bar
            ]
            if not options.json:
                show(kind, name, results[kind][name])
    if options.json:
        print(json.dumps(results))


def show(kind: str, name: str, rows: list[dict[str, float]]) -> None:
    print(f"{kind} {name}, {len(rows)} splits: mean test log likelihood, standard error, worst")
    for key, title in METHODS.items():
        values = [row[key] for row in rows]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        mean = statistics.fmean(values)
        print(f"  {title:<45} {mean:#11.4g} {error:#8.2g} {min(values):#11.4g}", flush=True)


if __name__ == "__main__":
    main()
