"""Online evidence against cross-validation (Immer et al. 2021, "Scalable marginal likelihood").

    python benchmarks/marglik_training.py --data DATA --quick
    python benchmarks/marglik_training.py --data DATA

A perceptron and a convolutional network classify digits and clothes. "cross-validation" trains one
network for each prior scale of a grid, chooses by held-out images, and trains again on all of them.
"evidence" trains once: after some epochs, every few epochs, a Laplace approximation with Kronecker
factors sets one prior scale for each layer; as published, the scales start from 1, and the weights
of the update with the best evidence are kept. They come from the midst of training: "trained on"
goes on from them at their scales, with a falling learning rate. All are judged by the MAP's
accuracy and mean log likelihood of the test images. ``--data`` is a folder with ``mnist.npz`` and
``fashion_mnist.npz`` of the Keras layout.
"""

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pyro
import torch
from images import NETWORKS, Images, Part, mean_and_error, scores, seeds_of, with_error
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning

PUBLISHED = {  # accuracy in percent and mean log likelihood: by cross-validation, by the evidence
    ("mnist", "MLP"): ((98.22, -0.061), (98.38, -0.053)),
    ("mnist", "CNN"): ((99.40, -0.017), (99.46, -0.016)),
    ("fashion_mnist", "MLP"): ((88.09, -0.347), (89.83, -0.305)),
    ("fashion_mnist", "CNN"): ((91.39, -0.258), (92.06, -0.233)),
}
GRID = (0.05, 0.1, 0.2, 0.5, 1.0)  # prior sd


def joined(data: Images) -> Part:
    pairs = zip(data.train, data.held_out, strict=True)
    return Part(*(torch.cat(pair) for pair in pairs))


def program(name: str, prior: Any, count: int, options: argparse.Namespace) -> Any:
    network = bdl.bayesianize(NETWORKS[name](options.width), prior)
    return bdl.models.Classification(network, num_data=count)


def probabilities(model: Any, guide: Any) -> Callable[[Tensor], Tensor]:
    predictive = bdl.Predictive(model, guide, num_samples=1)
    return lambda x: predictive.mean(x)["y"][0]


def started(name: str, prior: Any, part: Part, options: argparse.Namespace) -> tuple[Any, Any]:
    """A program and its guide, not yet trained."""
    model = program(name, prior, len(part.x), options)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    guide.prototype(part.x[: options.batch], part.y[: options.batch])
    return model, guide


def descend(
    model: Any, guide: Any, part: Part, epochs: int, options: argparse.Namespace,
    after_epoch: Callable[[], Any] = lambda: None,
) -> None:  # fmt: skip
    """Take Adam to the MAP, with a learning rate that falls along half a cosine."""
    loss = bdl.elbo.CompiledELBO()(model, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=1e-3)
    count = len(part.x)
    per_epoch = max(1, count // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for _ in range(epochs):
        for rows in torch.randperm(count).split(options.batch)[:per_epoch]:
            optimizer.zero_grad()
            loss(part.x[rows], part.y[rows]).backward()
            optimizer.step()
            schedule.step()
        after_epoch()


Row = tuple[str, Callable[[Tensor], Tensor], dict[str, float]]  # name, probabilities, facts


def by_validation(name: str, data: Images, options: argparse.Namespace) -> Iterator[Row]:
    best = (math.inf, GRID[0])
    for scale in GRID:
        model, guide = started(name, priors.Normal(scale), data.train, options)
        descend(model, guide, data.train, options.epochs, options)
        found = probabilities(model, guide)(data.held_out.x)
        loss = float(torch.nn.functional.nll_loss(found.clamp(min=1e-12).log(), data.held_out.y))
        best = min(best, (loss, scale))
    part = joined(data)
    model, guide = started(name, priors.Normal(best[1]), part, options)
    descend(model, guide, part, options.epochs, options)
    yield "cross-validation", probabilities(model, guide), {"prior sd": best[1]}


def by_evidence(name: str, data: Images, options: argparse.Namespace) -> Iterator[Row]:
    part = joined(data)
    scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
    model, guide = started(name, priors.PerLayer(priors.Normal(scale)), part, options)
    batches = list(zip(part.x.split(500), part.y.split(500), strict=True))
    updates: list[tuple[Any, dict[str, Tensor]]] = []
    epochs = itertools.count(1)

    def update() -> None:
        since = next(epochs) - options.burn_in
        if since > 0 and (since - 1) % options.every == 0:
            state = {key: value.clone() for key, value in guide.state_dict().items()}
            posterior = guide.laplace_approximation(batches)
            updates.append((bdl.evidence.maximize(posterior, linearized=False, steps=10), state))

    descend(model, guide, part, options.epochs, options, after_epoch=update)
    best, state = max(updates, key=lambda pair: pair[0].log_evidence)
    guide.load_state_dict(state)
    for key, value in best.hyperparameters.items():
        pyro.get_param_store()[key] = value
    scales = [float(value) for value in best.hyperparameters.values()]
    yield "evidence", probabilities(model, guide), {
        "log evidence": best.log_evidence, "smallest sd": min(scales), "largest sd": max(scales),
    }  # fmt: skip
    descend(model, guide, part, options.epochs // 2, options)
    yield "evidence, trained on", probabilities(model, guide), {}


METHODS = {"cross-validation": by_validation, "evidence": by_evidence}


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--sets", nargs="*", default=["mnist", "fashion_mnist"], help="of images")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="MLP, CNN")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="by name; both")
    parser.add_argument("--every", type=int, default=5, help="epochs between its updates (5)")
    parser.add_argument("--batch", type=int, default=128, help="images in a step (128)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the seeds (0)")
    sizes = {
        "seeds": (5, 2, "trainings of each"),
        "train": (50000, 4000, "images"),
        "held_out": (10000, 1000, "images"),
        "test": (10000, 5000, "images"),
        "epochs": (100, 40, "passes over the data"),
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
            for number, method in enumerate(METHODS):
                published = PUBLISHED[kind, name][number]
                if method in options.methods:
                    results += rows(kind, name, method, published, data, options)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "rows": results}))


def rows(
    kind: str, name: str, method: str, published: tuple[float, float], data: Images, options: Any
) -> list[dict[str, Any]]:
    """Scores of one method over the seeds, and what was published."""
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {}
    start = time.perf_counter()
    for seed in seeds_of(options):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
            for label, predicted, facts in METHODS[method](name, data, options):
                result = scores(predicted, data)
                found.setdefault(label, []).append((result, facts))
                if not options.json:
                    shown = (f"{key} {value:.4g}" for key, value in (result | facts).items())
                    print(f"{kind} {name}, seed {seed}, {label}: {', '.join(shown)}", flush=True)
    seconds = time.perf_counter() - start
    results = []
    for label, runs in found.items():
        averages = mean_and_error([result for result, _ in runs])
        if not options.json:
            accuracy, loss = with_error(*averages["accuracy"], 4), with_error(*averages["NLL"])
            print(
                f"{kind} {name} {label:20} accuracy {accuracy} (published {published[0] / 100:.4f})"
                f"  NLL {loss} (published {-published[1]})  {seconds:.0f} s for the method",
                flush=True,
            )
        results.append({
            "set": kind, "network": name, "method": label, "published": published,
            "scores": averages, "facts": [facts for _, facts in runs], "seconds": seconds,
        })  # fmt: skip
    return results


if __name__ == "__main__":
    main()
