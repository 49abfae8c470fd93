"""Which images to label next: a posterior's information against a random choice.

    python benchmarks/active_learning.py --data DATA --quick
    python benchmarks/active_learning.py --data DATA --rows rows.jsonl

A network 784-64-10 for clothes (Fashion-MNIST) starts from two labels of each class, and --rounds
times --size more are labeled, chosen among --pool images: at random, by BALD one by one, by
BatchBALD, or by EPIG about other images of the pool. The posterior is an ensemble of --members
networks, trained anew in each round, each with a prior mean that is drawn from the prior: of twenty
labels the mode around zero is a network that says nothing. Printed is the accuracy and the NLL on
test images after each round, with standard errors over seeds, all of which start from the same
labels for all choices; and the labels that each choice needs for the accuracy that random ones
reach with all of theirs.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import harness
import torch
from images import Images, log_loss
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import acquisition, metrics
from pyro_bdl.training import train

CHOICES = ("random", "BALD", "BatchBALD", "EPIG")


def members(x: Tensor, y: Tensor, options: argparse.Namespace) -> Any:
    """Draws of class probabilities, as a function of images."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model = bdl.models.Classification(bdl.bayesianize(network, bdl.priors.FanIn(2**0.5)))
    guide = bdl.guides.AutoEnsemble(model, size=options.members, anchored=True)
    train(model, guide, x, y, steps=options.steps, learning_rate=3e-3, progress=False)
    predictive = bdl.Predictive(model, guide, num_samples=options.members)
    return lambda images: predictive.mean(images)["y"]


def chosen(choice: str, predict: Any, pool: Tensor, size: int, random: torch.Generator) -> Tensor:
    """Positions in the pool of the images to label."""
    if choice == "random":
        return torch.randperm(len(pool), generator=random)[:size]
    p = predict(pool)
    if choice == "BatchBALD":
        return acquisition.batch_bald(p, size, num_configurations=1000).rows
    if choice == "BALD":
        return acquisition.bald(p).topk(size).indices
    some = torch.randperm(len(pool), generator=random)[:200]
    return acquisition.epig(p, p[:, some]).topk(size).indices


def run(choice: str, seed: int, data: Images, options: argparse.Namespace) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    x, y = data.train
    order = torch.randperm(len(x), generator=random)
    first = torch.cat([order[y[order] == number][:2] for number in range(10)])
    free = order[~torch.isin(order, first)]
    labeled, accuracy, nll = first, [], []
    start = time.process_time()
    for number in range(options.rounds + 1):
        torch.manual_seed(seed)
        predict = members(x[labeled], y[labeled], options)
        found = torch.cat([predict(part).mean(0) for part in data.test.x.split(1000)]).double()
        accuracy.append(float(metrics.accuracy(found, data.test.y)))
        nll.append(log_loss(found, data.test.y))
        if number < options.rounds:
            rows = chosen(choice, predict, x[free], options.size, random)
            labeled = torch.cat([labeled, free[rows]])
            left = torch.ones(len(free), dtype=torch.bool)
            left[rows] = False
            free = free[left]
    seconds = time.process_time() - start
    return {"choice": choice, "seed": seed, "accuracy": accuracy, "NLL": nll, "seconds": seconds}


def table(done: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Means and standard errors by the number of labels, and labels needed for random's end."""
    found: dict[str, Any] = {}
    for choice in CHOICES:
        mine = [row for row in done if row["choice"] == choice]
        if not mine:
            continue
        entry: dict[str, Any] = {}
        for name in ("accuracy", "NLL"):
            entry[name], entry[f"{name} error"] = harness.curve_over_seeds(mine, name)
        found[choice] = entry
    if "random" in found:
        goal = found["random"]["accuracy"][-1]
        for entry in found.values():
            reached = [k for k, value in enumerate(entry["accuracy"]) if value >= goal]
            entry["labels for random's accuracy"] = (
                20 + options.size * reached[0] if reached else None
            )
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--figure", type=Path, help="where to draw the accuracy by labels")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    sizes = {
        "seeds": (5, 2, "of networks and first labels"),
        "pool": (10_000, 500, "images to choose from"),
        "test": (5000, 200, "test images"),
        "rounds": (14, 2, "of labeling"),
        "size": (20, 5, "labels in a round"),
        "members": (10, 4, "of the ensemble"),
        "steps": (600, 50, "of training in each round"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    data = Images(options.data, "fashion_mnist", train=options.pool, test=options.test)
    done = harness.read_rows(options.rows)
    known = {(row["choice"], row["seed"]) for row in done}
    for seed in range(options.seeds):
        for choice in options.choices:
            if (choice, seed) not in known:
                row = run(choice, seed, data, options)
                harness.write_rows(options.rows, [row])
                done.append(row)
                if not options.json:
                    print(json.dumps(row), flush=True)
    found = table(done, options)
    if options.figure:
        labels = [20 + options.size * number for number in range(options.rounds + 1)]
        curves = {c: (labels, e["accuracy"], e["accuracy error"]) for c, e in found.items()}
        harness.draw_curves(options.figure, curves, "labels", "accuracy on test images")
    if options.json:
        print(json.dumps({"machine": harness.machine(), "choices": found}))
        return
    print(harness.machine())
    for choice, entry in found.items():
        ends = [f"{entry[name][-1]:.3f} ± {entry[f'{name} error'][-1]:.3f}"
                for name in ("accuracy", "NLL")]  # fmt: skip
        needed = entry.get("labels for random's accuracy")
        print(f"{choice:12}accuracy {ends[0]}, NLL {ends[1]}; random's accuracy by {needed} labels")


if __name__ == "__main__":
    main()
