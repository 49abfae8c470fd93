"""Which images to label next: a posterior's information against a random choice.

    python benchmarks/active_learning.py --data DATA --quick
    python benchmarks/active_learning.py --data DATA --rows rows.jsonl --figure curve.png

Training starts from two labels of each class, and --rounds times --size more are labeled, chosen
among --pool images: at random, by the largest BALD, by draws without replacement whose probability
is proportional to BALD (Kirsch et al. 2023), by BatchBALD, or by EPIG about other images of the
pool; in each round --candidates of those without a label are looked at. The images are averaged
over 2 x 2 pixels. The posterior is trained anew in each round: "dropout" is MC dropout on a network
with two convolutions, "ensemble" an ensemble of --members perceptrons 196-64-10, each with a prior
mean that is drawn from the prior, since of twenty labels the mode around zero says nothing.

Printed is the accuracy and the NLL on test images after each round, with standard errors over
seeds, all of which start from the same labels for all choices; the labels that each choice needs
for the accuracy that random ones reach with all of theirs; and what was chosen: the entropy of its
classes (at most log 10 = 2.30), its length as a vector and its distance from the nearest other
image of the pool, both over the mean of the pool.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import pyro
import torch
from images import OTHER, Images, log_loss
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import acquisition, metrics
from pyro_bdl.training import train

CHOICES = ("random", "BALD", "BALD, drawn", "BatchBALD", "EPIG")


def dropout(x: Tensor, y: Tensor, options: argparse.Namespace) -> Any:
    """MC dropout with the rates of Gal et al. (2017), by ordinary layers: they drop other units for
    each row of a batch in training, and the same units for all images in a draw."""
    features = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    first, last = nn.Linear(288, 64), nn.Linear(64, 10)
    network = nn.Sequential(
        features, nn.Dropout(0.25), first, nn.ReLU(), nn.Dropout(0.5), last
    ).train()
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, weight_decay=1e-3)
    for _ in range(options.steps):
        rows = torch.randint(len(x), (min(64, len(x)),))
        loss = nn.functional.cross_entropy(network(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    into, out = (
        nn.functional.dropout(torch.ones(options.draws, 1, size), rate)
        for size, rate in ((288, 0.25), (64, 0.5))
    )
    return torch.no_grad()(
        lambda images: last(out * first(into * features(images)).relu()).softmax(-1)
    )


def ensemble(x: Tensor, y: Tensor, options: argparse.Namespace) -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
    model = bdl.models.Classification(bdl.bayesianize(network, bdl.priors.FanIn(2**0.5)))
    guide = bdl.guides.AutoEnsemble(model, size=options.members, anchored=True)
    train(model, guide, x, y, steps=options.steps, learning_rate=3e-3, progress=False)
    predictive = bdl.Predictive(model, guide, num_samples=options.members)
    return lambda images: predictive.mean(images)["y"]


# Draws of class probabilities (S, N, C), as a function of images.
POSTERIORS = {"dropout": dropout, "ensemble": ensemble}


def chosen(choice: str, predict: Any, pool: Tensor, size: int, random: torch.Generator) -> Tensor:
    """Positions in the pool of the images to label."""
    if choice == "random":
        return torch.randperm(len(pool), generator=random)[:size]
    p = predict(pool)
    if choice == "BatchBALD":
        return acquisition.batch_bald(p, size, num_configurations=200).rows
    if choice == "BALD, drawn":
        return acquisition.bald(p).multinomial(size, generator=random)
    if choice == "BALD":
        return acquisition.bald(p).topk(size).indices
    some = torch.randperm(len(pool), generator=random)[:200]
    return acquisition.epig(p, p[:, some]).topk(size).indices


def run(
    posterior: str, choice: str, seed: int, data: Images, options: argparse.Namespace
) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    x, y = data.train
    order = torch.randperm(len(x), generator=random)
    first = torch.cat([order[y[order] == number][:2] for number in range(10)])
    free = order[~torch.isin(order, first)]
    labeled, accuracy, nll = first, [], []
    start = time.process_time()
    for number in range(options.rounds + 1):
        pyro.set_rng_seed(seed)
        predict = POSTERIORS[posterior](x[labeled], y[labeled], options)
        found = torch.cat([predict(part).mean(0) for part in data.test.x.split(1000)]).double()
        accuracy.append(float(metrics.accuracy(found, data.test.y)))
        nll.append(log_loss(found, data.test.y))
        if number < options.rounds:
            seen = free[torch.randperm(len(free), generator=random)[: options.candidates]]
            new = seen[chosen(choice, predict, x[seen], options.size, random)]
            labeled = torch.cat([labeled, new])
            free = free[~torch.isin(free, new)]
    seconds = time.process_time() - start
    new, lengths = labeled[len(first) :], x.flatten(1).norm(dim=1)
    any_image = torch.arange(0, len(x), max(1, len(x) // 500))
    classes = y[new].bincount(minlength=10)
    return {
        "set": data.name, "posterior": posterior, "choice": choice, "seed": seed,
        "accuracy": accuracy, "NLL": nll, "classes": classes.tolist(),
        "class entropy": float(torch.special.entr(classes / classes.sum()).sum()),
        "length": float(lengths[new].mean() / lengths.mean()),
        "isolation": float(nearest(x, new).mean() / nearest(x, any_image).mean()),
        "seconds": seconds,
    }  # fmt: skip


def nearest(x: Tensor, rows: Tensor) -> Tensor:
    """Distances of some images from the nearest other one."""
    distances = torch.cdist(x[rows].flatten(1), x.flatten(1))
    return distances.scatter(1, rows[:, None], torch.inf).amin(1)


def table(done: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Means and standard errors by the number of labels, and labels needed for random's end."""
    found: dict[str, Any] = {}
    for choice in CHOICES:
        mine = [row for row in done if row["choice"] == choice]
        if not mine:
            continue
        entry: dict[str, Any] = {"seeds": len(mine)}
        for name in ("accuracy", "NLL"):
            entry[name], entry[f"{name} error"] = harness.curve_over_seeds(mine, name)
        for name in ("class entropy", "length", "isolation", "seconds"):
            entry[name] = statistics.mean(row.get(name, math.nan) for row in mine)
        found[choice] = entry
    if "random" in found:
        goal = found["random"]["accuracy"][-1]
        base = {row["seed"]: row["accuracy"][-1] for row in done if row["choice"] == "random"}
        for choice, entry in found.items():
            reached = [k for k, value in enumerate(entry["accuracy"]) if value >= goal]
            entry["labels for random's accuracy"] = (
                20 + options.size * reached[0] if reached else None
            )
            gains = [
                {"gain": [row["accuracy"][-1] - base[row["seed"]]]}
                for row in done
                if row["choice"] == choice and row["seed"] in base
            ]
            mean, error = harness.curve_over_seeds(gains, "gain")
            entry["gain over random"] = [mean[0], error[0]]  # paired by seed
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--figure", type=Path, help="where to draw the accuracy by labels")
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--sets", nargs="+", choices=list(OTHER), default=list(OTHER))
    parser.add_argument(
        "--posteriors", nargs="+", choices=list(POSTERIORS), default=list(POSTERIORS)
    )
    sizes = {
        "seeds": (3, 2, "of networks and first labels"),
        "pool": (10_000, 500, "images to choose from"),
        "candidates": (2000, 200, "of these that are looked at in each round"),
        "test": (2000, 200, "test images"),
        "rounds": (7, 2, "of labeling"),
        "size": (20, 5, "labels in a round"),
        "members": (10, 4, "of the ensemble"),
        "draws": (100, 4, "of dropout"),
        "steps": (250, 50, "of training in each round"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["set"], row["posterior"], row["choice"], row["seed"]) for row in done}
    for seed, name in itertools.product(range(options.seeds), options.sets):
        data = Images(options.data, name, train=options.pool, test=options.test, pooled=True)
        for posterior, choice in itertools.product(options.posteriors, options.choices):
            if (name, posterior, choice, seed) not in known:
                row = run(posterior, choice, seed, data, options)
                harness.write_rows(options.rows, [row])
                done.append(row)
                if not options.json:
                    print(json.dumps(row), flush=True)
    found = {}
    for name, posterior in dict.fromkeys((row["set"], row["posterior"]) for row in done):
        mine = [row for row in done if (row["set"], row["posterior"]) == (name, posterior)]
        found[f"{name}, {posterior}"] = table(mine, options)
    if options.figure:
        labels = [20 + options.size * number for number in range(options.rounds + 1)]
        panels = {
            title: {c: (labels, e["accuracy"], e["accuracy error"]) for c, e in entries.items()}
            for title, entries in found.items()
        }
        harness.draw_curves(options.figure, panels, "labels", "accuracy on test images")
    if options.json:
        print(json.dumps({"machine": harness.machine(), "choices": found}))
        return
    print(harness.machine())
    for title, entries in found.items():
        print(title)
        for choice, entry in entries.items():
            ends = [
                f"{entry[name][-1]:.3f} ± {entry[f'{name} error'][-1]:.3f}"
                for name in ("accuracy", "NLL")
            ]
            gain = "{:+.3f} ± {:.3f}".format(*entry.get("gain over random", (0.0, 0.0)))
            needed = entry.get("labels for random's accuracy")
            print(f"  {choice:12}accuracy {ends[0]} ({gain}), NLL {ends[1]}; random's accuracy by "
                  f"{needed} labels; classes {entry['class entropy']:.2f}, length "
                  f"{entry['length']:.2f}, isolation {entry['isolation']:.2f}, "
                  f"{entry['seconds']:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
