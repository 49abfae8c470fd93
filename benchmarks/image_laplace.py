"""The linearized Laplace approximation of a network for clothes (Immer et al. 2021, table 3).

    python benchmarks/image_laplace.py --data DATA --quick
    python benchmarks/image_laplace.py --data DATA

Three convolutions and three dense layers are trained to the MAP on Fashion-MNIST; then Kronecker
factors (the Gauss-Newton matrix) give the posterior. The rows: the MAP; the network at draws of the
posterior; the linearized predictive, with the prior's scale by held-out images (as published), and
by the evidence, one scale for each layer, evaluated at the trained weights and (without --quick,
since it takes hundreds of passes over the data) at the linear optimum. Out of distribution are the
digits of MNIST, told by the predictive entropy. ``--data`` is a folder with ``mnist.npz`` and
``fashion_mnist.npz`` of the Keras layout.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from images import (
    Images,
    best_scale,
    convolutional,
    entropy,
    mean_and_error,
    predicted,
    scores_of,
    seeds_of,
    with_error,
)
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.nn import with_prior
from pyro_bdl.training import train

PUBLISHED = {  # mean and standard error; the evidence was not used there
    "MAP": {"accuracy": 0.9139, "NLL": 0.258, "ECE": 0.017, "OOD-AUROC": 0.864},
    "network at draws": {"accuracy": 0.8442, "NLL": 0.942, "ECE": 0.411, "OOD-AUROC": 0.945},
    "linearized, validation": {"accuracy": 0.9225, "NLL": 0.244, "ECE": 0.012, "OOD-AUROC": 0.955},
}
GRID = tuple(10.0 ** (exponent / 4) for exponent in range(-8, 1))


def approximation(
    model: Any, guide: Any, batches: list[tuple[Tensor, Tensor]], *, layers: bool
) -> tuple[Any, Any]:
    """The program with a prior scale that can be set, for every layer if asked, and the posterior
    at the guide's point."""
    scale = priors.learnable(model.network.prior)
    free = with_prior(model, priors.PerLayer(scale) if layers else scale)
    same = bdl.guides.AutoLaplaceGGN(
        free, structure="kron", init_loc_fn=init_to_value(values=guide.median())
    )
    return free, same.laplace_approximation(batches)


Row = tuple[str, Callable[[Tensor], Tensor], dict[str, float], float]


def rows(seed: int, data: Images, options: argparse.Namespace) -> Iterator[Row]:
    """Name, class probabilities, facts and seconds of each row, for one training."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    network = bdl.bayesianize(convolutional(options.width), priors.Normal(options.prior))
    model = bdl.models.Classification(network, num_data=len(data.train.x))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    batch = min(options.batch, len(data.train.x))
    train(
        model, guide, *data.train, steps=max(1, options.epochs * len(data.train.x) // batch),
        learning_rate=options.learning_rate, batch_size=batch, elbo=bdl.elbo.CompiledELBO(),
        progress=None if options.json else f"seed {seed}: MAP",
    )  # fmt: skip
    point = bdl.Predictive(model, guide, num_samples=1)
    yield "MAP", lambda x: point.mean(x)["y"][0], {}, time.perf_counter() - start

    start = time.perf_counter()
    batches = list(zip(data.train.x.split(500), data.train.y.split(500), strict=True))
    one, posterior = approximation(model, guide, batches, layers=False)
    scale = best_scale(one, posterior, data.held_out, GRID)
    linearized = bdl.LinearizedPredictive(one, posterior)
    made = time.perf_counter() - start
    drawn = bdl.Predictive(one, posterior, num_samples=options.draws)
    yield "network at draws", lambda x: drawn.mean(x)["y"].mean(0), {}, made
    facts = {"prior sd": scale}
    yield "linearized, validation", lambda x: linearized.probabilities(x)["y"], facts, made

    points = {"trained weights": False} | ({} if options.quick else {"linear optimum": True})
    for where, at_optimum in points.items():
        start = time.perf_counter()
        layers, posterior = approximation(model, guide, batches, layers=True)
        found = bdl.evidence.maximize(posterior, linearized=at_optimum)
        evident = bdl.LinearizedPredictive(layers, posterior)
        made = time.perf_counter() - start
        facts = {"gamma": found.gamma}
        label = f"linearized, evidence at {where}"
        yield label, lambda x, p=evident: p.probabilities(x)["y"], facts, made


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    names = ["accuracy", "NLL", "ECE", "OOD-AUROC"]
    lines = [" " * 40 + "".join(f"{name:>18}" for name in names)]
    for label, entries in found.items():
        averages = mean_and_error([{name: row[name] for name in names} for row in entries])
        cells = [with_error(*pair) for pair in averages.values()]
        lines.append(f"{label:40}" + "".join(f"{cell:>18}" for cell in cells))
        if label in PUBLISHED:
            known = [f"{PUBLISHED[label][name]:.3f}" for name in names]
            lines.append(f"{'  published':40}" + "".join(f"{cell:>18}" for cell in known))
    return lines


def figure(entropies: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    """How many test images and images from elsewhere have each predictive entropy."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2.8 * len(entropies), 2.8), layout="constrained")
    axes = drawn.subplots(1, len(entropies), squeeze=False, sharey=True, sharex=True)[0]
    for ax, (label, pair) in zip(axes, entropies.items(), strict=True):
        for values, name in zip(pair, ("clothes", "digits"), strict=True):
            ax.hist(
                values.numpy(), bins=30, range=(0.0, 2.303), alpha=0.6, density=True, label=name
            )
        ax.set_title(label.replace("evidence at", "evidence,\n"), fontsize=9)
    axes[0].set_ylabel("density")
    axes[0].legend()
    drawn.supxlabel("predictive entropy, nats")
    drawn.savefig(path, dpi=100)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--draws", type=int, default=50, help="of weights (50)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the seeds (0)")
    parser.add_argument("--figure", type=Path, help="write the first seed's entropies there")
    sizes = {
        "seeds": (5, 2, "trainings"),
        "train": (55000, 5000, "images"),
        "held_out": (5000, 500, "images"),
        "test": (10000, 1000, "images of each set"),
        "epochs": (100, 20, "passes over the data"),
        "batch": (128, 64, "images in a step"),
        "learning_rate": (1e-3, 2e-3, "of Adam, at the start"),
        "prior": (0.1, 0.3, "sd of the training's prior"),
        "width": (1.0, 0.25, "of the network"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    data = Images(
        options.data, "fashion_mnist",
        train=options.train, test=options.test, held_out=options.held_out,
    )  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {}
    entropies: dict[str, tuple[Tensor, Tensor]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
        for seed in seeds_of(options):
            for label, probabilities, facts, seconds in rows(seed, data, options):
                here, other = predicted(probabilities, data)
                row = scores_of(here, other, data.test.y) | facts
                entropies.setdefault(label, (entropy(here), entropy(other)))
                found.setdefault(label, []).append(row | {"seconds": seconds})
                if not options.json:
                    shown = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
                    print(f"seed {seed}, {label} ({seconds:.0f} s): {shown}", flush=True)
    if options.figure:
        figure(entropies, options.figure)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "rows": found, "published": PUBLISHED}))
        return
    print(f"{harness.machine()}; {options.train} images, width {options.width}")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
