"""Rank-one factors against MAP, MC dropout and an ensemble of four, at the same steps.

    python benchmarks/rank_one.py --threads 1 --data .          # mnist.npz, fashion_mnist.npz

A small convolutional network on clothes: accuracy, negative log likelihood and calibration error on
test images and on the same with noise, blur and less contrast (means of the strengths 1 to 5), the
AUROC of the predictive entropy between clothes and digits, the bytes of what is trained and kept,
and the processor seconds of the training. "rank-one" is mean-field over the factors, "of four" an
ensemble of four sets of them (BatchEnsemble), "mixture" one of four mean-fields. Each number is a
mean over ``--seeds`` trainings; ``_sd`` after its name is the sd over these.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import images
import pyro
import torch
from corruptions import CORRUPTIONS, corrupt
from harness import parse_sizes, parser, set_device, show
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.guides import AutoEnsemble, AutoMAP, AutoMCDropout, AutoMeanField, MixtureGuide
from pyro_bdl.init import init_afresh

STRENGTHS = range(1, 6)
Sides = dict[str, tuple[float | None, Callable[[Any, tuple], Any], int]]


def network(width: int) -> nn.Module:
    """Two convolutions and two dense layers, 27 690 weights at width 8."""
    return nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(50 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10),
    )  # fmt: skip


def mixture(model: Any, batch: tuple, size: int) -> MixtureGuide:
    members = [AutoMeanField(model, init_loc_fn=init_afresh) for _ in range(size)]
    return MixtureGuide([member.prototype(*batch) for member in members])


def sides(size: int) -> Sides:
    """The scale of the factors' prior (None for a network without them), the guide, and the draws
    of a step."""
    return {
        "MAP": (None, lambda model, batch: AutoMAP(model), 1),
        "MC dropout": (None, lambda model, batch: AutoMCDropout(model, p=0.1), 1),
        "ensemble": (None, lambda model, batch: AutoEnsemble(model, size=size), size),
        "rank-one": (0.1, lambda model, batch: AutoMeanField(model), 1),
        "rank-one, of four": (0.5, lambda model, batch: AutoEnsemble(model, size=size), size),
        "rank-one, mixture": (0.5, partial(mixture, size=size), size),
    }


def fitted(side: tuple, net: Any, data: images.Images, options: Any) -> tuple[Any, Any, float]:
    """The program, its trained guide and the processor seconds."""
    scale, make, particles = side
    prior = bdl.priors.FanIn(2**0.5)
    if scale is None:
        sampled = bdl.bayesianize(net, prior)
    else:
        sampled = bdl.nn.rank_one(net, scale, prior=prior)
    model = bdl.models.Classification(sampled, num_data=len(data.train.x))
    guide = make(model, (data.train.x[:2], data.train.y[:2]))
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=particles)
    before = time.process_time()
    bdl.training.train(
        model, guide, *data.train, steps=options.steps, batch_size=options.batch, elbo=elbo,
        learning_rate=options.rate,
    )  # fmt: skip
    return model, guide, time.process_time() - before


def scored(model: Any, guide: Any, data: images.Images, draws: int) -> dict[str, float]:
    """Scores on test images, and their means over strengths for each kind of shift."""
    samples = guide.sample_latents(draws)

    def probabilities(x: Tensor) -> Tensor:
        return bdl.Predictive(model, samples)(x)["f"].softmax(-1).mean(0)

    result, y = images.scores(probabilities, data), data.test.y
    other = images.over(probabilities, data.elsewhere)
    low, high = float(data.train.x.min()), float(data.train.x.max())
    for kind in CORRUPTIONS:
        generator = torch.Generator(data.test.x.device).manual_seed(0)
        rows = []
        for strength in STRENGTHS:
            x = corrupt(
                data.test.x.clamp(low, high), kind, strength, generator=generator,
                value_range=(low, high),
            )  # fmt: skip
            rows.append(images.scores_of(images.over(probabilities, x), other, y))
        for name in ("accuracy", "NLL", "ECE"):
            result[f"{kind}, {name}"] = sum(row[name] for row in rows) / len(rows)
    return result


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, default=Path("."), help="folder of the two files")
    options.add_argument("--device", default="cpu")
    sizes = {
        "train": (8000, 200, "training images"),
        "test": (1000, 100, "test images, and digits"),
        "steps": (1000, 4, "of each side"),
        "batch": (64, 32, "images of a step"),
        "width": (8, 2, "of the network"),
        "members": (4, 2, "of the ensembles and the mixture"),
        "draws": (16, 4, "for a prediction, where draws are not members"),
        "seeds": (3, 1, "trainings of each side"),
        "rate": (3e-3, 3e-3, "learning rate"),
    }
    chosen = parse_sizes(options, sizes)
    torch.set_num_threads(chosen.threads)
    set_device(chosen.device)
    warnings.simplefilter("ignore")
    data = images.Images(chosen.data, "fashion_mnist", train=chosen.train, test=chosen.test)
    results: dict[str, Any] = {}
    for name, side in sides(chosen.members).items():
        rows = []
        for seed in range(chosen.seeds):
            pyro.clear_param_store()
            pyro.set_rng_seed(seed)
            model, guide, seconds = fitted(side, network(chosen.width), data, chosen)
            trained = [*guide.parameters(), *model.parameters()]
            points = name in ("MAP", "ensemble", "rank-one, of four")
            draws = guide.num_members if points else chosen.draws
            rows.append(
                scored(model, guide, data, draws)
                | {"bytes": sum(p.numel() * p.element_size() for p in trained), "s": seconds}
            )
        for key in rows[0]:
            values = torch.tensor([row[key] for row in rows], dtype=torch.float64, device="cpu")
            results[f"{name}: {key}"] = float(values.mean())
            if len(rows) > 1:
                results[f"{name}: {key}_sd"] = float(values.std())
        if not chosen.json:
            print(name, {k: round(v, 3) for k, v in rows[0].items()}, flush=True)
    show("rank-one factors", results, chosen.json)


if __name__ == "__main__":
    main()
