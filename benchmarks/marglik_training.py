"""Online evidence against cross-validation (Immer et al. 2021, "Scalable marginal likelihood").

    python benchmarks/marglik_training.py --data DATA --quick
    python benchmarks/marglik_training.py --data DATA

A perceptron and a convolutional network classify digits and clothes. "Cross-validation" trains one
network for each prior scale of a grid, chooses by held-out images, and trains again on all of them.
"evidence" trains once: after some epochs, every few epochs, a Laplace approximation with Kronecker
factors sets one prior scale for each layer. Both are then judged by the MAP's accuracy and mean log
likelihood of the test images. ``--data`` is a folder with ``mnist.npz`` and ``fashion_mnist.npz``
of the Keras layout.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from images import NETWORKS, Images, Part, mean_and_error, scores, with_error
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

PUBLISHED = {  # accuracy in percent and mean log likelihood: by cross-validation, by the evidence
    ("mnist", "MLP"): ((98.22, -0.061), (98.38, -0.053)),
    ("mnist", "CNN"): ((99.40, -0.017), (99.46, -0.016)),
    ("fashion_mnist", "MLP"): ((88.09, -0.347), (89.83, -0.305)),
    ("fashion_mnist", "CNN"): ((91.39, -0.258), (92.06, -0.233)),
}
GRID = (0.02, 0.05, 0.1, 0.2, 0.5)  # prior sd


def joined(data: Images) -> Part:
    pairs = zip(data.train, data.held_out, strict=True)
    return Part(*(torch.cat(pair) for pair in pairs))


def program(name: str, prior: Any, count: int, options: argparse.Namespace) -> Any:
    network = bdl.bayesianize(NETWORKS[name](options.width), prior)
    return bdl.models.Classification(network, num_data=count)


def probabilities(model: Any, guide: Any) -> Callable[[Tensor], Tensor]:
    predictive = bdl.Predictive(model, guide, num_samples=1)
    return lambda x: predictive.mean(x)["y"][0]


def fitted(name: str, prior: Any, part: Part, options: argparse.Namespace) -> tuple[Any, Any]:
    model = program(name, prior, len(part.x), options)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    steps = max(1, options.epochs * len(part.x) // options.batch)
    train(model, guide, *part, steps=steps, learning_rate=1e-3, batch_size=options.batch)
    return model, guide


def by_validation(name: str, data: Images, options: argparse.Namespace) -> tuple[Any, Any, dict]:
    best = (math.inf, GRID[0])
    for scale in GRID:
        model, guide = fitted(name, priors.Normal(scale), data.train, options)
        found = probabilities(model, guide)(data.held_out.x)
        loss = float(torch.nn.functional.nll_loss(found.clamp(min=1e-12).log(), data.held_out.y))
        best = min(best, (loss, scale))
    model, guide = fitted(name, priors.Normal(best[1]), joined(data), options)
    return model, guide, {"prior sd": best[1]}


def by_evidence(name: str, data: Images, options: argparse.Namespace) -> tuple[Any, Any, dict]:
    part = joined(data)
    scale = PyroParam(torch.tensor(0.1), constraint=constraints.positive)
    model = program(name, priors.PerLayer(priors.Normal(scale)), len(part.x), options)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    batches = list(zip(part.x.split(500), part.y.split(500), strict=True))
    guide.prototype(*batches[0])
    online = bdl.evidence.MarginalLikelihoodTraining(
        guide, batches, every=options.every, burn_in=options.burn_in, patience=None,
        linearized=False,
    )  # fmt: skip
    optimizer = torch.optim.Adam(guide.parameters(), lr=1e-3)
    loss = bdl.elbo.TemperedTraceMeanField_ELBO()
    per_epoch = max(1, len(part.x) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * per_epoch)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(part.x)).split(options.batch)[:per_epoch]:
            optimizer.zero_grad()
            loss.differentiable_loss(model, guide, part.x[rows], part.y[rows]).backward()
            optimizer.step()
            schedule.step()
        online.step()
    found = bdl.evidence.hyperparameters(guide.laplace_approximation(batches))
    shown = {key: float(value) for key, value in found.items()}
    return model, guide, {"log evidence": online.history[-1][1].log_evidence, **shown}


METHODS = {"cross-validation": by_validation, "evidence": by_evidence}


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--sets", nargs="*", default=["mnist", "fashion_mnist"], help="of images")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="MLP, CNN")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="by name; both")
    parser.add_argument("--every", type=int, default=5, help="epochs between its updates (5)")
    parser.add_argument("--batch", type=int, default=128, help="images in a step (128)")
    sizes = {
        "seeds": (5, 1, "trainings of each"),
        "train": (50000, 3000, "images"),
        "held_out": (10000, 600, "images"),
        "test": (10000, 1000, "images"),
        "epochs": (100, 15, "passes over the data"),
        "burn_in": (10, 5, "epochs before the evidence"),
        "width": (1.0, 0.25, "of the networks"),
    }
    options = harness.parse_sizes(parser, sizes)
    options.batch = min(options.batch, options.train)
    torch.set_num_threads(options.threads)
    results = []
    for kind in options.sets:
        data = Images(
            options.data, kind, train=options.train, test=options.test, held_out=options.held_out
        )
        for name in options.networks:
            for number, (method, function) in enumerate(METHODS.items()):
                if method in options.methods:
                    results.append(row(kind, name, method, number, function, data, options))
    if options.json:
        print(json.dumps({"machine": harness.machine(), "rows": results}))


def row(
    kind: str, name: str, method: str, number: int, function: Callable, data: Images, options: Any
) -> dict[str, Any]:
    """Scores of one method over the seeds, and what was published."""
    found, facts, start = [], {}, time.perf_counter()
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
            model, guide, facts = function(name, data, options)
        found.append(scores(probabilities(model, guide), data))
    averages = mean_and_error(found)
    published = PUBLISHED[kind, name][number]
    seconds = time.perf_counter() - start
    if not options.json:
        accuracy = with_error(*averages["accuracy"], 4)
        loss = with_error(*averages["NLL"])
        print(
            f"{kind:14}{name:4} {method:17} accuracy {accuracy} (published "
            f"{published[0] / 100:.4f})  NLL {loss} (published {-published[1]})  {seconds:.0f} s  "
            + ", ".join(f"{key} {value:.3g}" for key, value in facts.items()),
            flush=True,
        )
    return {
        "set": kind, "network": name, "method": method, "published": published,
        "scores": averages, "facts": facts, "seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
