"""Evidence in networks with normalization layers (Antoran et al. 2022, table 1).

    python benchmarks/normalised_evidence.py --data DATA --quick
    python benchmarks/normalised_evidence.py --data DATA

Small networks for MNIST: a transformer, a convolutional network, and residual networks with batch
normalization, with none, and with the Fixup initialization in its place. For each, the evidence of
the full Gauss-Newton matrix is maximized at the trained weights and at the optimum of the
linearized model (recommendation 1), with one prior precision and with one for each normalized group
(recommendation 2); networks without normalization have one group only. The figures are negative log
likelihoods of test images under the linearized predictive, and of the trained network itself
("MAP"). "NLL" is by the default of ``probabilities``, the probit approximation of each class
against the others; beside it Monte Carlo and that of each class by itself, which is far too unsure
where all outputs move together.
``--data`` is a folder with ``mnist.npz`` and ``fashion_mnist.npz`` of the Keras layout.
"""

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from images import Images, log_loss, mean_and_error, over, seeds_of, with_error
from pyro.infer.autoguide.initialization import init_to_value
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.nn import with_prior
from pyro_bdl.training import train


class Transformer(nn.Module):
    """One block of self-attention over 16 patches of 7 x 7 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Linear(49, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.classes = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(-2, 7, 7).unfold(-2, 7, 7).flatten(-2).flatten(1, -2)
        x = self.patches(patches) + self.positions
        query, key, value = self.into(self.norm1(x)).chunk(3, -1)
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(weights @ value)
        x = x + self.down(self.up(self.norm2(x)).relu())
        return self.classes(self.norm3(x).mean(1))


def convolutional(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((1, width), (width, width), (width, 2 * width)):
        layers += [nn.Conv2d(into, out, 3, 2, 1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10))


class Block(nn.Module):
    """Two convolutions around a short cut, with a scale in the place of the normalizations."""

    def __init__(self, width: int, norm: bool, fixup: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, 1, 1, bias=not norm)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=not norm)
        self.norm1, self.norm2 = (
            nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(())) if fixup else 1.0
        if fixup:  # Zhang et al. 2019: the last layer of a branch starts at zero
            nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (x + self.scale * y).relu()


def residual(width: int, *, norm: bool = False, fixup: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 5, 2, 2), Block(width, norm, fixup), nn.MaxPool2d(2),
        Block(width, norm, fixup), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


NETWORKS = {
    "transformer": lambda width: Transformer(2 * width),
    "CNN": convolutional,
    "ResNet": lambda width: residual(width, norm=True),
    "ResNet without normalization": residual,
    "Fixup ResNet": lambda width: residual(width, fixup=True),
}


def learned() -> priors.Prior:
    return priors.Normal(PyroParam(torch.tensor(0.3), constraint=constraints.positive))


def loss(probabilities: Callable[[Tensor], Tensor], data: Images) -> float:
    """Negative log likelihood of the test images."""
    return log_loss(over(probabilities, data.test.x), data.test.y)


def measure(name: str, seed: int, data: Images, options: Any) -> dict[str, dict[str, float]]:
    """ "one precision, trained weights" and so on -> negative log likelihood and evidence."""
    torch.manual_seed(seed)
    network = NETWORKS[name](options.width)
    few = data.train.x[:32]
    bnn = bdl.bayesianize(network, priors.Normal(0.3))
    model = bdl.models.Classification(bnn, num_data=len(data.train.x))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    train(
        model, guide, *data.train, steps=options.steps, learning_rate=3e-3,
        batch_size=min(100, len(data.train.x)), elbo=bdl.elbo.CompiledELBO(),
        progress=None if options.json else f"{name}, seed {seed}",
    )  # fmt: skip
    point = bdl.Predictive(model, guide, num_samples=1)
    found = {"MAP": {"NLL": loss(lambda x: point.mean(x)["y"][0], data)}}
    chosen: dict[str, priors.Prior] = {"one precision": learned()}
    grouped = priors.PerNormalizedGroup(learned(), network, few)
    if grouped.groups:
        chosen["one per group"] = grouped
    for number, prior in chosen.items():
        for point, linearized in {"trained weights": False, "linear optimum": True}.items():
            same = with_prior(model, prior)
            start = init_to_value(values=guide.median())
            anew = bdl.guides.AutoLaplaceGGN(same, structure="full", init_loc_fn=start)
            posterior = anew.laplace_approximation(data.train)
            evidence = bdl.evidence.maximize(
                posterior, linearized=linearized, steps=options.updates, tolerance=1e-3
            )
            predictive = bdl.LinearizedPredictive(same, posterior, num_samples=options.draws)

            def by(method: str, p: Any = predictive) -> float:
                return loss(lambda x: p.probabilities(x, method=method)["y"], data)

            found[f"{number}, {point}"] = {
                "NLL": by("centered-probit"), "by Monte Carlo": by("monte-carlo"),
                "by class": by("probit"), "log evidence": evidence.log_evidence,
                "gamma": evidence.gamma,
            }  # fmt: skip
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="by name; all")
    parser.add_argument("--draws", type=int, default=300, help="of the outputs (300)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the seeds (0)")
    sizes = {
        "seeds": (5, 2, "trainings"),
        "train": (5000, 500, "images"),
        "test": (10000, 1000, "images"),
        "steps": (5000, 2000, "of the training"),
        "updates": (100, 15, "of the precisions, at most"),
        "width": (8, 4, "of the networks"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    data = Images(options.data, "mnist", train=options.train, test=options.test)
    results: dict[str, Any] = {}
    for name in options.networks:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
            runs = [measure(name, seed, data, options) for seed in seeds_of(options)]
        results[name] = {key: mean_and_error([run[key] for run in runs]) for key in runs[0]}
        if not options.json:
            size = sum(p.numel() for p in NETWORKS[name](options.width).parameters())
            print(f"{name}, {size} weights, {time.perf_counter() - start:.0f} s")
            for key, entry in results[name].items():
                shown = "  ".join(f"{k} {with_error(*pair)}" for k, pair in entry.items())
                print(f"  {key:32} {shown}", flush=True)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "networks": results}))


if __name__ == "__main__":
    main()
