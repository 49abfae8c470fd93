"""Posteriors of ResNet-20 on CIFAR-10 against the published chains of HMC.

    python benchmarks/published_hmc.py --data DATA --quick
    python benchmarks/published_hmc.py --data DATA --device cuda
    python benchmarks/published_hmc.py --data DATA --train 10000 --width 8 --epochs 5 --snapshots 5

Izmailov et al. (2021, "What are Bayesian neural network posteriors really like?") ran three chains
of full-batch HMC on ResNet-20 with filter response normalization and swish, prior N(0, 1/5), no
augmentation, and published its class probabilities of test images (github
izmailovpavel/neurips_bdl_starter_kit): accuracy .9144 and NLL .2773 on all 10 000. The program here
has that network and that prior. Agreement is the share of test images whose likeliest class is
HMC's; total variation is half the sum of the absolute differences of the probabilities, averaged.

``--data`` is a folder with ``cifar10_train.npz`` and ``cifar10_test.npz``: JPEG copies of the
images (``jpeg``, ``offsets``, ``labels``), which are not the raw pixels that HMC saw, and HMC's
probabilities of the first 5000 test images (``hmc_probs``). With less than 50 000 images, width 16
and --epochs 200 it is a shortened run, and says so. Seconds are of the processor, or by the clock
with a device. Kronecker factors of all weights are of one drawn label an image ("ggn-mc").
"""

import argparse
import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import pyro
import torch
from images import log_loss
from networks import resnet20_frn
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import metrics
from pyro_bdl.errors import BdlWarning
from pyro_bdl.references import published
from pyro_bdl.training import collect_swag, train

FULL = (50_000, 16, 200)
PRIOR = bdl.priors.Normal(0.2**0.5)
Probabilities = Callable[[Tensor], Tensor]


class Data(NamedTuple):
    x: Tensor
    y: Tensor
    new: Tensor
    targets: Tensor
    hmc: Tensor  # class probabilities of the test images


def read(options: argparse.Namespace) -> Data:
    """Training images in random order and test images in CIFAR-10's own, scaled alike."""
    with np.load(options.data / "cifar10_train.npz") as file:
        rows = np.random.default_rng(0).permutation(len(file["labels"]))[: options.train]
        x, y = published.images(file, rows)
    reference = bdl.references.load("cifar10-hmc", options.data / "cifar10_test.npz")
    count = options.test
    new, targets = reference.dataset.x_test[:count], reference.dataset.y_test[:count]
    mean, sd = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    hmc = reference.function[0, : options.test].double()
    parts = (x - mean) / sd, y, (new - mean) / sd, targets, hmc
    return Data(*(part.to(options.device) for part in parts))


class Fits:
    """The program, whose network is first trained to its MAP, and posteriors around it."""

    def __init__(self, data: Data, options: argparse.Namespace) -> None:
        self.data, self.options = data, options
        self.steps = max(1, options.epochs * len(data.x) // options.batch)
        self.networks: list[nn.Module] = []

    def program(self, network: nn.Module) -> Any:
        return bdl.models.Classification(bdl.bayesianize(network, PRIOR), num_data=len(self.data.x))

    def trained(self, model: Any, guide: Any, *, optimizer: Any = None) -> Any:
        guide.prototype(self.data.x[:2], self.data.y[:2])
        train(
            model, guide, self.data.x, self.data.y, steps=self.steps, learning_rate=3e-3,
            batch_size=self.options.batch, optimizer=optimizer and optimizer(guide), progress=None,
            backend=self.options.backend,
        )  # fmt: skip
        return guide

    def member(self, seed: int) -> nn.Module:
        """A network at the mode of the program's posterior, from another start."""
        while len(self.networks) <= seed:
            torch.manual_seed(len(self.networks))
            network = resnet20_frn(self.options.width).to(self.options.device)
            model = self.program(network)
            point = self.trained(model, bdl.guides.AutoMAP(model)).median()
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    parameter.copy_(point[name])
            self.networks.append(network.eval())
        return self.networks[seed]

    def drawn(self, model: Any, posterior: Any) -> Probabilities:
        predictive = bdl.Predictive(model, posterior, num_samples=self.options.draws)
        return lambda x: predictive.mean(x)["y"].mean(0)

    def point(self) -> Probabilities:
        network = self.member(0)
        return torch.no_grad()(lambda x: network(x).softmax(-1))

    def ensemble(self) -> Probabilities:
        members = [self.member(seed) for seed in range(self.options.members)]
        return torch.no_grad()(
            lambda x: torch.stack([network(x).softmax(-1) for network in members]).mean(0)
        )

    def laplace(self, subset: Any) -> Probabilities:
        model = self.program(self.member(0))
        size = self.options.batch
        batches = list(zip(self.data.x.split(size), self.data.y.split(size), strict=True))
        guide = bdl.guides.AutoLaplaceGGN(
            model, structure="kron", subset=subset, curvature="ggn" if subset else "ggn-mc"
        )
        predictive = bdl.LinearizedPredictive(model, guide.laplace_approximation(batches))
        return lambda x: predictive.probabilities(x)["y"]

    def swag(self) -> Probabilities:
        model = self.program(self.member(0))
        guide = bdl.guides.AutoSWAG(model).prototype(self.data.x[:2], self.data.y[:2])
        collect_swag(
            model, guide, self.data.x, self.data.y, snapshots=self.options.snapshots,
            batch_size=self.options.batch, backend=self.options.backend,
        )  # fmt: skip
        rank = min(20, self.options.snapshots)
        return self.drawn(model, guide.swag_approximation(rank=rank))

    def dropout(self) -> Probabilities:
        model = self.program(resnet20_frn(self.options.width).to(self.options.device))
        return self.drawn(model, self.trained(model, bdl.guides.AutoMCDropout(model, p=0.1)))

    def ivon(self) -> Probabilities:
        model = self.program(resnet20_frn(self.options.width).to(self.options.device))
        guide = bdl.guides.AutoMeanField(model)
        make = functools.partial(bdl.optim.IVON, lr=0.1)
        return self.drawn(model, self.trained(model, guide, optimizer=make))


METHODS: dict[str, Callable[[Fits], Probabilities]] = {
    "MAP": Fits.point,
    "last layer, kron": lambda fits: fits.laplace("last-layer"),
    "all weights, kron": lambda fits: fits.laplace(None),
    "SWAG": Fits.swag,
    "MC dropout, p = 0.1": Fits.dropout,
    "IVON": Fits.ivon,
    "ensemble": Fits.ensemble,
}


def measured(found: Tensor, data: Data) -> dict[str, float]:
    """Scores on the test images, with HMC's probabilities beside; errors are over images."""
    hmc, y = data.hmc, data.targets
    same = (found.argmax(1) == hmc.argmax(1)).double()
    apart = 0.5 * (found - hmc).abs().sum(1)
    return {
        "accuracy": float(metrics.accuracy(found, y)),
        "NLL": log_loss(found, y),
        "ECE": float(metrics.expected_calibration_error(found, y)),
        "agreement": float(same.mean()), "agreement error": float(same.std() / len(y) ** 0.5),
        "total variation": float(apart.mean()),
        "total variation error": float(apart.std() / len(y) ** 0.5),
    }  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="torch", choices=["torch", "jax"], help="of trainings")
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    sizes = {
        "train": (50_000, 200, "training images"),
        "test": (5000, 100, "test images"),
        "width": (16, 2, "of the network"),
        "epochs": (200, 1, "passes over the data in each training"),
        "batch": (100, 50, "images of a step"),
        "members": (5, 2, "of the ensemble"),
        "snapshots": (20, 2, "of SWAG, one in each pass over the data"),
        "draws": (30, 3, "for predictions"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    whole = (options.train, options.width, options.epochs) == FULL
    data = read(options)
    fits = Fits(data, options)
    rows = {"HMC": measured(data.hmc, data)}
    if not options.json:
        print(harness.machine(), "" if whole else "A SHORTENED RUN", flush=True)
        print(f"{'':22}{'accuracy':>9}{'NLL':>9}{'ECE':>8}{'agreement':>12}{'TV':>9}{'s':>8}")
    for name in ["HMC", *options.only]:
        if name != "HMC":
            pyro.set_rng_seed(0)
            clock = time.process_time if options.device == "cpu" else time.perf_counter
            start = clock()
            probabilities = METHODS[name](fits)
            found = torch.cat([probabilities(x).detach().double() for x in data.new.split(250)])
            rows[name] = measured(found, data) | {"seconds": clock() - start}
        if not options.json:
            row = rows[name]
            print(
                f"{name:22}{row['accuracy']:9.4f}{row['NLL']:9.4f}{row['ECE']:8.3f}"
                f"{row['agreement']:12.4f}{row['total variation']:9.4f}"
                f"{row.get('seconds', 0.0):8.0f}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"machine": harness.machine(), "shortened": not whole, "rows": rows}))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        main()
