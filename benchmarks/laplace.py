"""Laplace approximations against laplace-torch, on the same trained networks and data.

LeNet-5 (61 706 weights) and a 784-100-100-10 MLP on images of digits: fits with diagonal and
Kronecker-factored curvature, linearised predictions under both, and how far the results lie
apart; full curvature of a small network too. Then what laplace-torch cannot hold, against bounds:
a last layer of 1000 classes, a full matrix of 10 000 weights against the one matrix product that
it needs, and a network of ResNet-18's size against its own forward and backward passes.

laplace-torch wants another torch, so it goes into a folder of its own, without dependencies::

    pip install --no-deps --target PEER laplace-torch==0.3 curvlinops-for-pytorch==3.0.1 \
        asdfghjkl==0.1a4 backpack-for-pytorch unfoldNd einops einconv linear_operator jaxtyping \
        wadler-lindig torchmetrics lightning-utilities
    python benchmarks/laplace.py --peer PEER --data mnist.npz

Without it only pyro_bdl runs. ``--data`` takes an .npz with ``x_train`` (N, 28, 28) and
``y_train`` (N,), such as Keras' mnist.npz; by default scikit-learn's digits are enlarged.
Memory is the peak of a process of its own, above its start; laplace-torch's grows with the square
of its batches, whose sizes are options. Differences are relative to the
largest entry, between fits in float64 to fewer images.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from networks import resnet
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.program.subset import Subset

FOLDER = Path(__file__).resolve().parent


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp(inputs: int = 784, hidden: int = 100) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


NETS = {"LeNet": lenet, "MLP": mlp, "small": lambda: mlp(hidden=2)}
CASES = ("LeNet:diag", "LeNet:kron", "MLP:diag", "MLP:kron", "small:full")


def images(path: str | None, count: int) -> tuple[Tensor, Tensor, str]:
    """Images (count, 1, 28, 28), their classes, and where they are from."""
    if path:
        with np.load(path) as data:
            x, y = data["x_train"][:count] / 255.0, data["y_train"][:count]
        return torch.tensor(x).float()[:, None], torch.tensor(y).long(), Path(path).name
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x / 16.0).float().reshape(-1, 1, 8, 8).repeat(-(-count // len(x)), 1, 1, 1)
    y = torch.tensor(y).long().repeat(-(-count // len(y)))
    x = nn.functional.interpolate(x[:count], size=28, mode="bilinear")
    return x, y[:count], "scikit-learn's digits, 8 x 8 enlarged"


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """To the neighborhood of the MAP under Normal(0, 1) weights."""
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (min(256, len(x)),))
        loss = len(x) * nn.functional.cross_entropy(net(x[rows]), y[rows])
        loss = loss + 0.5 * sum(p.square().sum() for p in net.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ------------------------------------------------------------------------------- both sides


class Ours:
    """pyro_bdl: the guide of a Laplace approximation around a network's own weights."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, options: Any) -> None:
        self.model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
        self.guide = bdl.guides.AutoLaplaceGGN(self.model).prototype(x, y)
        self.data = x, y

    def fit(self, structure: str) -> None:
        self.posterior = self.guide.laplace_approximation(self.data, structure=structure)
        self.predictive = bdl.LinearizedPredictive(self.model, self.posterior)

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities by the probit approximation of each class."""
        return self.predictive.probabilities(x, method="probit")["y"]

    def variances(self, x: Tensor) -> Tensor:
        """Of the logits, (N, 10)."""
        return self.predictive.parameter_moments(x)["y"].variance["logits"]

    def curvature(self) -> Tensor:
        """The diagonal, or all of a full matrix."""
        curvature = self.posterior.curvature
        return curvature.matrix if hasattr(curvature, "matrix") else curvature.diagonal()

    def evidence(self) -> Tensor:
        squares, logdet = self.posterior.loc.square().sum(), self.posterior.precision.logdet()
        return self.posterior.log_likelihood - 0.5 * (squares + logdet)


class Peer:
    """laplace-torch with its defaults, a prior precision of 1 among them."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, options: Any) -> None:
        from laplace import Laplace

        self.kind, self.net, self.parts = Laplace, net.eval(), options.predict_batch
        data = torch.utils.data.TensorDataset(x, y)
        self.loader = torch.utils.data.DataLoader(data, batch_size=options.batch)

    def fit(self, structure: str) -> None:
        self.laplace = self.kind(
            self.net, "classification", subset_of_weights="all", hessian_structure=structure
        )
        self.laplace.fit(self.loader)

    def predict(self, x: Tensor) -> Tensor:
        parts = x.split(self.parts)
        return torch.cat([self.laplace(x, pred_type="glm", link_approx="probit") for x in parts])

    def variances(self, x: Tensor) -> Tensor:
        return self.laplace._glm_predictive_distribution(x)[1].diagonal(dim1=-2, dim2=-1)

    def curvature(self) -> Tensor:
        hessian = self.laplace.H
        return hessian if isinstance(hessian, Tensor) else hessian.diag()

    def evidence(self) -> Tensor:
        return self.laplace.log_marginal_likelihood()


SIDES: dict[str, Any] = {"pyro_bdl": Ours, "laplace-torch": Peer}


def loaded(file: str, name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network and the data, from where ``main`` put them."""
    saved, net = torch.load(file), NETS[name]()
    net.load_state_dict(saved[name])
    return net, saved["x"], saved["y"]


def compare(name: str, structure: str, file: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of one network under one structure, and differences of the results."""
    net, x, y = loaded(file, name)
    new, label, results = x[: options.predict], f"{name} {structure}", {}
    sides = {key: SIDES[key](net, x, y, options) for key in options.sides}
    for what, calls in (
        ("fit", {key: lambda one=one: one.fit(structure) for key, one in sides.items()}),
        ("predict", {key: lambda one=one: one.predict(new) for key, one in sides.items()}),
    ):
        seconds = harness.in_turns(calls, options.repeats, slow=options.slow)
        memory = {
            key: harness.in_own_process(__file__, "--memory-of", file, key, name, structure, what)
            for key in sides
        }
        for key in sides:
            results[f"{label}, {what}: {key}, s"] = seconds[key]
            results[f"{label}, {what}: {key}, MB"] = memory[key]
        if "laplace-torch" in sides:
            results[f"{label}, {what}: ratio of times"] = (
                seconds["laplace-torch"] / seconds["pyro_bdl"]
            )
            results[f"{label}, {what}: ratio of memory"] = memory["laplace-torch"] / max(
                1.0, memory["pyro_bdl"]
            )
    if "laplace-torch" in sides:
        results |= differences(name, structure, file, options)
    return results


def differences(name: str, structure: str, file: str, options: argparse.Namespace) -> dict:
    """Between both sides, relative to the largest entry, in float64."""
    net, x, y = loaded(file, name)
    x, y = x[: options.compared].double(), y[: options.compared]
    ours, peer = (kind(net.double(), x, y, options) for kind in SIDES.values())
    ours.fit(structure)
    peer.fit(structure)
    new = x[:20]
    pairs = {
        "curvature": (ours.curvature(), peer.curvature()),
        "variances of logits": (ours.variances(new), peer.variances(new)),
        "probabilities": (ours.predict(new), peer.predict(new)),
        "log evidence": (ours.evidence(), peer.evidence()),
    }
    return {
        f"{name} {structure}, difference: {what}": float(
            (mine - other).abs().max() / other.abs().max()
        )
        for what, (mine, other) in pairs.items()
    }


def memory_of(
    file: str, key: str, name: str, structure: str, what: str, options: argparse.Namespace
) -> float:
    """Peak memory of a call above the start of this process, MB; predictions are after a fit to
    a few rows, since the size of the data does not matter to them."""
    net, x, y = loaded(file, name)
    few = slice(0, 64 if what == "predict" else len(x))
    one = SIDES[key](net, x[few], y[few], options)
    if what == "fit":
        return harness.memory_of(lambda: one.fit(structure))
    one.fit(structure)
    return harness.memory_of(lambda: one.predict(x[: options.predict]))


# ------------------------------------------------------------------------------- large ones


def last_layer(options: argparse.Namespace) -> dict[str, Any]:
    """Kronecker factors of the last layer of a classifier with many classes."""
    classes, features, count = options.classes, 512, options.rows
    net = nn.Sequential(nn.Linear(32, features), nn.Tanh(), nn.Linear(features, classes))
    x, y = torch.randn(count, 32), torch.randint(classes, (count,))
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = bdl.guides.AutoLaplaceGGN(model, subset="last-layer").prototype(x[:2], y[:2])
    times = [time.perf_counter()]

    def both() -> None:
        posterior = guide.laplace_approximation((x, y))
        times.append(time.perf_counter())
        bdl.LinearizedPredictive(model, posterior).probabilities(x[: options.predict])
        times.append(time.perf_counter())

    memory = harness.memory_of(both)
    label = f"last layer, {features} features, {classes} classes"
    return {
        f"{label}: fit to {count} rows, s": times[1] - times[0],
        f"{label}: predict {options.predict} rows, s": times[2] - times[1],
        f"{label}: both, MB": memory,
    }


def full(options: argparse.Namespace) -> dict[str, Any]:
    """A full matrix against J'J of its size."""
    size = options.full
    net = nn.Sequential(nn.Linear(98, size // 100), nn.Tanh(), nn.Linear(size // 100, 1))
    x, y = torch.randn(size, 98), torch.randn(size, 1)
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)), noise=1.0)
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    fit = fitting(model, guide, (x, y))
    weights = guide.require_layout().size
    memory = harness.memory_of(lambda: fit("full"))
    rows = torch.randn(size, weights)
    sides = {"fit": lambda: fit("full"), "product": lambda: rows.mT @ rows}
    seconds = harness.in_turns(sides, options.repeats, slow=options.slow)
    label = f"full matrix, {weights} weights, {size} rows"
    return {
        f"{label}: fit, s": seconds["fit"],
        f"{label}: J'J alone, s": seconds["product"],
        f"{label}: ratio of fit to J'J": seconds["fit"] / seconds["product"],
        f"{label}: fit, MB": memory,
    }


def large(options: argparse.Namespace) -> dict[str, Any]:
    """Kronecker factors of a ResNet-18 against forward and backward passes of it."""
    count = options.images
    net = resnet(options.width).eval()
    x, y = torch.randn(count, 3, 32, 32), torch.randint(10, (count,))
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x[:2], y[:2])
    fit = fitting(model, guide, (x, y))

    def passes() -> None:
        for part, classes in zip(x.split(16), y.split(16), strict=True):
            net.zero_grad()
            nn.functional.cross_entropy(net(part), classes).backward()

    memory = harness.memory_of(lambda: fit("kron"))
    sides = {"ggn": lambda: fit("kron"), "ggn-mc": lambda: fit("kron", "ggn-mc"), "passes": passes}
    seconds = harness.in_turns(sides, options.repeats, slow=options.slow)
    once = seconds["passes"]
    label = f"ResNet-18, {guide.require_layout().size} weights, {count} images"
    return {
        f"{label}: forward and backward, s per image": once / count,
        f"{label}: kron, s per image": seconds["ggn"] / count,
        f"{label}: kron from ggn-mc, s per image": seconds["ggn-mc"] / count,
        f"{label}: ratio of kron to passes, for each of 10 columns": seconds["ggn"] / once / 10,
        f"{label}: ratio of kron from ggn-mc to passes": seconds["ggn-mc"] / once,
        f"{label}: kron, MB": memory,
    }


def fitting(model: Any, guide: Any, data: tuple) -> Any:
    """The pass over the data alone, without the algebra that follows it."""
    at = ProgramAtPoint(model, Subset(guide.require_layout()), guide.location())

    def fit(structure: str, curvature: str = "ggn") -> Any:
        config = CurvatureConfig(structure, curvature)
        return fit_curvature(at, data, config)

    return fit


LARGE = {"last-layer": last_layer, "full": full, "resnet": large}


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--peer", help="the folder that holds laplace-torch")
    parser.add_argument("--data", help="an .npz with x_train and y_train")
    parser.add_argument("--digits", type=int, default=2000, help="images of digits (2000)")
    parser.add_argument("--predict", type=int, default=500, help="images predicted (500)")
    parser.add_argument("--compared", type=int, default=100, help="images of the comparison (100)")
    parser.add_argument("--batch", type=int, default=100, help="of laplace-torch's fits (100)")
    parser.add_argument("--predict-batch", type=int, default=50, help="of its predictions (50)")
    parser.add_argument("--steps", type=int, default=300, help="of training (300)")
    parser.add_argument("--slow", type=float, default=5.0, help="s of what is called only once (5)")
    parser.add_argument("--cases", nargs="*", default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--large", nargs="*", default=list(LARGE), help=f"of {', '.join(LARGE)}")
    parser.add_argument("--classes", type=int, default=1000, help="of the last layer (1000)")
    parser.add_argument("--rows", type=int, default=2000, help="of its data (2000)")
    parser.add_argument("--full", type=int, default=10_000, help="weights and rows (10 000)")
    parser.add_argument("--images", type=int, default=64, help="for the ResNet (64)")
    parser.add_argument("--width", type=int, default=64, help="of the ResNet (64)")
    parser.add_argument("--memory-of", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--only-large", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]  # our own name
    sys.path[:0] = [options.peer] if options.peer else []
    options.sides = [key for key in SIDES if key == "pyro_bdl" or find_spec("laplace")]
    if options.memory_of:
        print(json.dumps(memory_of(*options.memory_of, options)))
        return
    if options.only_large:
        print(json.dumps(LARGE[options.only_large](options)))
        return
    started = time.perf_counter()
    x, y, source = images(options.data, options.digits)
    results: dict[str, Any] = {"images": f"{len(x)} of {source}", "threads": options.threads}
    if len(options.sides) < 2:
        results["laplace-torch"] = "is not installed, see the docstring"
    with tempfile.TemporaryDirectory() as folder:
        saved: dict[str, Any] = {"x": x, "y": y}
        for name in {case.split(":")[0] for case in options.cases}:
            net = NETS[name]()
            train(net, x, y, options.steps)
            saved[name] = net.state_dict()
        file = f"{folder}/trained.pt"
        torch.save(saved, file)
        for case in options.cases:
            results |= compare(*case.split(":"), file, options)
    for name in options.large:
        results |= harness.in_own_process(__file__, "--only-large", name)
    results["seconds in all"] = time.perf_counter() - started
    harness.show("Laplace approximations against laplace-torch", results, options.json)


if __name__ == "__main__":
    main()
