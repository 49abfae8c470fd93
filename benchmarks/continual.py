"""Ten tasks one after another: permuted MNIST by posteriors that become priors.

    python benchmarks/continual.py --data DATA --quick
    python benchmarks/continual.py --data DATA --rows rows.jsonl --figure continual.png

Each task is MNIST with its pixels in another fixed order, and its data are gone when the next one
begins. What is left of them is the posterior, which ``model.update_prior(posterior)`` makes the
prior of the next task (Nguyen et al. 2018, "Variational continual learning"; Ritter et al. 2018,
"Online structured Laplace approximations"). Compared are mean-field VI, Laplace with a diagonal and
with Kronecker factors around the MAP of each task, and training on, where each task starts at the
last one's weights and nothing is remembered. Printed is the mean accuracy on the test images of all
tasks so far, after each task; published at ten tasks, with networks of 100-100 units: 90 % for
variational continual learning without a coreset, 84 % for elastic weight consolidation, 86 % for
synaptic intelligence (Nguyen et al. 2018, section 6.1), trained for 100 passes of each task.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pyro
import torch
from images import Images
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train


class Task(NamedTuple):
    x: Tensor
    y: Tensor
    new: Tensor
    targets: Tensor


def tasks(options: argparse.Namespace, seed: int) -> list[Task]:
    data = Images(options.data, "mnist", train=options.train, test=options.test)
    x, new = (part.x.flatten(1) for part in (data.train, data.test))
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(784, generator=random) for _ in range(options.tasks)]
    return [Task(x[:, order], data.train.y, new[:, order], data.test.y) for order in orders]


def program(options: argparse.Namespace) -> Any:
    width = options.width
    network = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    bnn = bdl.bayesianize(network, bdl.priors.FanIn(2**0.5))
    return bdl.models.Classification(bnn, num_data=options.train)


def fitted(model: Any, guide: Any, task: Task, options: argparse.Namespace, steps: int) -> Any:
    guide.prototype(task.x[:2], task.y[:2])
    train(
        model, guide, task.x, task.y, steps=steps, learning_rate=options.rate,
        batch_size=options.batch, progress=None, backend="auto",
    )  # fmt: skip
    return guide


def mean_field(model: Any, task: Task, options: argparse.Namespace) -> Any:
    guide = bdl.guides.AutoMeanField(model, init_scale=0.01)
    return fitted(model, guide, task, options, 3 * options.steps)


def laplace(structure: str) -> Callable[..., Any]:
    def fit(model: Any, task: Task, options: argparse.Namespace) -> Any:
        guide = bdl.guides.AutoLaplaceGGN(model, structure=structure)
        fitted(model, guide, task, options, options.steps)
        some = slice(None, options.curvature)
        return guide.laplace_approximation((task.x[some], task.y[some]))

    return fit


TRAINED_ON = "training on"
METHODS: dict[str, Callable[..., Any]] = {
    "mean-field": mean_field,
    "Laplace, diagonal": laplace("diag"),
    "Laplace, kron": laplace("kron"),
}


def train_on(model: Any, task: Task, options: argparse.Namespace, last: Any) -> Any:
    start = {} if last is None else {"init_loc_fn": init_to_value(values=last.median())}
    return fitted(model, bdl.guides.AutoMAP(model, **start), task, options, options.steps)


def run(method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    pyro.set_rng_seed(seed)
    known = tasks(options, seed)
    model, guide = program(options), None
    accuracies = []
    start = time.process_time()
    for number, task in enumerate(known, 1):
        if method == TRAINED_ON:
            guide = train_on(model, task, options, guide)
        else:
            guide = METHODS[method](model, task, options)
            model.update_prior(guide)
        point = {name: value.detach()[None] for name, value in guide.median().items()}
        predictive = bdl.Predictive(model, point)
        right = [
            float((predictive.mean(old.new)["y"][0].argmax(1) == old.targets).float().mean())
            for old in known[:number]
        ]
        accuracies.append(statistics.mean(right))
    seconds = time.process_time() - start
    return {"method": method, "seed": seed, "accuracy": accuracies, "seconds": seconds}


def table(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean accuracy by the number of tasks, and its standard error over seeds."""
    found = {}
    for method in [*METHODS, TRAINED_ON]:
        mine = [row for row in done if row["method"] == method]
        if mine:
            accuracy, error = harness.curve_over_seeds(mine, "accuracy")
            found[method] = {
                "accuracy": accuracy, "error": error,
                "seconds": statistics.mean(row["seconds"] for row in mine),
            }  # fmt: skip
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--figure", type=Path, help="where to draw the accuracy by tasks")
    parser.add_argument("--only", nargs="+", choices=[*METHODS, TRAINED_ON])
    sizes = {
        "seeds": (3, 1, "orders of the pixels"),
        "tasks": (10, 3, "in turn"),
        "train": (60_000, 300, "training images"),
        "test": (10_000, 100, "test images of each task"),
        "width": (100, 10, "of both hidden layers"),
        "steps": (3000, 20, "of the MAP in each task; mean-field takes three times as many"),
        "batch": (256, 50, "images of a step"),
        "rate": (3e-3, 3e-3, "of Adam"),
        "curvature": (20_000, 100, "images of the Gauss-Newton matrix, of which N / n times it"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["method"], row["seed"]) for row in done}
    for seed in range(options.seeds):
        for method in options.only or [*METHODS, TRAINED_ON]:
            if (method, seed) not in known:
                row = run(method, seed, options)
                harness.write_rows(options.rows, [row])
                done.append(row)
                if not options.json:
                    print(json.dumps(row), flush=True)
    found = table(done)
    if options.figure:
        counts = range(1, options.tasks + 1)
        curves = {m: (counts, e["accuracy"], e["error"]) for m, e in found.items()}
        text = "mean accuracy on their test images"
        harness.draw_curves(options.figure, {"": curves}, "tasks so far", text)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "methods": found}))
        return
    print(harness.machine())
    for method, entry in found.items():
        ends = [f"{entry['accuracy'][k]:.3f} ± {entry['error'][k]:.3f}" for k in (0, -1)]
        print(f"{method:20}first task {ends[0]}, all {ends[1]}, {entry['seconds']:.0f} s")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        main()
