"""Cold posteriors: the test NLL of four kinds of posterior against the temperature T.

    python benchmarks/cold_posteriors.py --quick --data mnist.npz --figure cold.png

The target is p(w | y)^(1/T), likelihood and prior both raised to 1/T (Wenzel et al. 2020), for a
network of one hidden layer on digits of 7 x 7 pixels: NUTS, SGHMC in minibatches, mean-field with
T weighing the entropy, and a linearized Laplace approximation. With data augmentation every image
is also shifted by one of its 28 pixels to each of four sides, and a datum's log likelihood is the
mean over these five, so that all methods have one target again. ``cold posterior effect`` is the
test NLL at T = 1 less the lowest over T; Izmailov et al. (2021) find none without augmentation.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.plots import temperature_curves
from pyro_bdl.training import train

SHIFTS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))  # of the 28 x 28 pixels
QUICK = {"rows": 300, "tests": 1000, "hidden": 10, "steps": 800, "draws": 60, "depth": 5}
FULL = {"rows": 2000, "tests": 10_000, "hidden": 50, "steps": 20_000, "draws": 1000, "depth": 10}


class Problem:
    """Data and program, with or without augmentation."""

    def __init__(self, options: argparse.Namespace, augmented: bool) -> None:
        with np.load(options.data) as file:
            images = torch.from_numpy(file["x_train"][: options.rows])
            test = torch.from_numpy(file["x_test"][: options.tests])
            self.y = torch.from_numpy(file["y_train"][: options.rows].astype(np.int64))
            self.y_test = torch.from_numpy(file["y_test"][: options.tests].astype(np.int64))
        copies = SHIFTS if augmented else SHIFTS[:1]
        x = self._small(images)
        mean, sd = x.mean(), x.std()
        moved = [self._small(torch.roll(images, shift, (-2, -1))) for shift in copies]
        self.x = ((torch.cat(moved) - mean) / sd).flatten(1)
        self.y = self.y.repeat(len(copies))
        self.x_test = ((self._small(test) - mean) / sd).flatten(1)
        net = nn.Sequential(nn.Linear(49, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 10))
        prior = bdl.priors.FanIn(math.sqrt(2.0))
        self.plain = bdl.models.Classification(bdl.bayesianize(net, prior), num_data=len(self.x))
        # The mean over the copies of a datum: likelihood^(1 / copies), the prior as it is.
        self.model = bdl.handlers.temper(self.plain, float(len(copies)))

    @staticmethod
    def _small(images: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(images[:, None].float() / 255, 4)[:, 0]

    def nll(self, posterior: Any, draws: int) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            row = bdl.compare(
                self.plain, {"": posterior}, self.x_test, self.y_test, reference=None,
                num_samples=draws,
            ).table.iloc[0]  # fmt: skip
        return float(row["nlpd"])


def nuts(problem: Problem, temperature: float, options: argparse.Namespace) -> Any:
    return bdl.mcmc.sample(
        bdl.handlers.cold(problem.model, temperature), problem.x, problem.y,
        num_warmup=options.draws, num_samples=options.draws, num_chains=1,
        kernel=bdl.mcmc.NUTS(max_tree_depth=options.depth), init="network", progress=False,
    )  # fmt: skip


def sghmc(problem: Problem, temperature: float, options: argparse.Namespace) -> Any:
    thinning = max(1, options.steps // options.draws)
    kernel = bdl.mcmc.SGHMC(
        step_size=1e-4, friction=0.05, thinning=thinning, temperature=temperature
    )
    thinning = max(1, options.steps // options.draws)
    kernel = bdl.mcmc.SGHMC(
        step_size=1e-4, friction=0.05, thinning=thinning, temperature=temperature
    )
    return bdl.mcmc.sgmcmc(
        problem.model, (problem.x, problem.y), kernel=kernel, init="network", progress=False,
        batch_size=len(problem.x) // 3, num_warmup=options.steps, num_samples=options.draws,
    )  # fmt: skip


def mean_field(problem: Problem, temperature: float, options: argparse.Namespace) -> Any:
    guide = bdl.guides.AutoMeanField(problem.model)
    elbo = TemperedTraceMeanField_ELBO(cold_temperature=temperature, num_particles=4)
    train(
        problem.model, guide, problem.x, problem.y, steps=options.steps, learning_rate=0.02,
        elbo=elbo, batch_size=len(problem.x),
    )  # fmt: skip
    return guide


def laplace(problem: Problem, temperature: float, options: argparse.Namespace) -> Any:
    """The mode does not move with T; the precision of the Gaussian is divided by T."""
    model = bdl.handlers.cold(problem.model, temperature)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    train(
        model, guide, problem.x, problem.y, steps=options.steps, learning_rate=0.02,
        batch_size=len(problem.x),
    )  # fmt: skip
    return guide.laplace_approximation((problem.x, problem.y))


METHODS: dict[str, Callable[[Problem, float, argparse.Namespace], Any]] = {
    "NUTS": nuts,
    "SGHMC": sghmc,
    "mean-field": mean_field,
    "Laplace, linearized": laplace,
}


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz of the Keras layout")
    parser.add_argument("--figure", type=Path)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes; the default")
    size.add_argument("--full", action="store_true", help="hours")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--augmentation", nargs="+", choices=("without", "with"), default=["without", "with"]
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0])
    for name in QUICK:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, value in (FULL if options.full else QUICK).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    results: dict[str, Any] = {}
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    work = [
        (kind == "with", method, temperature)
        for kind in options.augmentation
        for method in options.methods
        for temperature in options.temperatures
    ]
    for augmented, name, temperature in tqdm(work, desc="posteriors"):
        torch.manual_seed(0)
        problem = Problem(options, augmented)
        value = problem.nll(METHODS[name](problem, temperature, options), options.draws)
        panel = "test NLL, augmented" if augmented else "test NLL"
        at, values = panels.setdefault(panel, {}).setdefault(name, ([], []))
        at.append(temperature)
        values.append(value)
        results[f"{panel}: {name}, T = {temperature:g}"] = value
    for panel, curves in panels.items():
        for name, (at, values) in curves.items():
            if 1.0 in at:
                effect = values[at.index(1.0)] - min(values)
                results[f"{panel}: {name}, cold posterior effect"] = effect
                results[f"{panel}: {name}, T of the lowest NLL"] = at[values.index(min(values))]
    if options.figure:
        figure = temperature_curves(panels, label="temperature T")
        figure.savefig(options.figure, dpi=150)
    harness.show("cold posteriors", results, options.json)


if __name__ == "__main__":
    main()
