"""Kronecker-factored Laplace approximations of wide networks against laplace-torch.

Four networks: many inputs (5000-50-1, fewer data than inputs), wide layers (64-512-512-1 and
32-2048-2048-1) and a convolutional one (3 x 32 x 32 images, 10 classes). For each: the fit, ten
gradient steps on the evidence in the prior's scale, and linearised predictions, in seconds of the
processor, so that other load on the machine counts little, and the peak of memory of each; how far
log evidence and predictive variances lie apart, relative to the largest entry (laplace-torch
factorizes in float32). Then, of pyro_bdl alone, variances and covariances of many outputs,
covariances and draws of many inputs jointly::

    python benchmarks/laplace_wide.py --peer PEER

The docstring of ``laplace.py`` says how to install laplace-torch; without it only pyro_bdl runs.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_bdl as bdl

FOLDER = Path(__file__).resolve().parent
STEPS = 10
MLPS = {"5000-50-1": 1000, "64-512-512-1": 2000, "32-2048-2048-1": 1000}  # and their data
CASES = (*MLPS, "CNN")
PHASES = ("fit", "evidence", "predict")


def problem(name: str, options: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with its first weights, and data."""
    torch.manual_seed(0)
    if name == "CNN":
        layers: list[nn.Module] = []
        for into, out in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))
        return net, torch.randn(options.images, 3, 32, 32), torch.randint(10, (options.images,))
    sizes = [int(size) for size in name.split("-")]
    layers = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), nn.Tanh()]
    x = torch.randn(MLPS[name], sizes[0])
    return nn.Sequential(*layers[:-1]), x, x[:, :1] + 0.3 * torch.randn(len(x), 1)


class Ours:
    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, options: Any) -> None:
        scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
        bnn = bdl.bayesianize(net, bdl.priors.Normal(scale))
        classes = not y.is_floating_point()
        self.model = (
            bdl.models.Classification(bnn) if classes else bdl.models.Regression(bnn, noise=1.0)
        )
        self.guide = bdl.guides.AutoLaplaceGGN(self.model, structure="kron").prototype(x, y)
        self.data = x, y

    def fit(self) -> None:
        self.posterior = self.guide.laplace_approximation(self.data)

    def evidence(self) -> None:
        bdl.evidence.maximize(  # at the weights, as laplace-torch does
            self.posterior, method="gradient", steps=STEPS, linearized=False
        )

    def predict(self, x: Tensor) -> Tensor:
        """Variances from the covariances of a datum's outputs, which laplace-torch forms too."""
        predictive = bdl.LinearizedPredictive(self.model, self.posterior)
        return predictive.parameter_covariance(x)["y"][1].diagonal(dim1=-2, dim2=-1)

    def log_evidence(self) -> Tensor:
        return bdl.evidence.log_marginal_likelihood(self.posterior).detach()


class Peer:
    """laplace-torch with a prior precision of 1."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, options: Any) -> None:
        from laplace import Laplace

        kind = "regression" if y.is_floating_point() else "classification"
        self.laplace = Laplace(net, kind, subset_of_weights="all", hessian_structure="kron")
        data = torch.utils.data.TensorDataset(x, y)
        self.loader = torch.utils.data.DataLoader(data, batch_size=options.batch)
        self.parts = options.predict_batch

    def fit(self) -> None:
        self.laplace.fit(self.loader)

    def evidence(self) -> None:
        self.laplace.optimize_prior_precision(method="marglik", n_steps=STEPS, lr=0.1)

    def predict(self, x: Tensor) -> Tensor:
        found = [self.laplace._glm_predictive_distribution(part)[1] for part in x.split(self.parts)]
        return torch.cat(found).diagonal(dim1=-2, dim2=-1).detach()

    def log_evidence(self) -> Tensor:
        return self.laplace.log_marginal_likelihood().detach()


SIDES: dict[str, Any] = {"pyro_bdl": Ours, "laplace-torch": Peer}


def measure(name: str, key: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of one side's phases, and what it found, in a process of its own."""
    net, x, y = problem(name, options)
    new = x[: options.predict]
    one = SIDES[key](net, x, y, options)
    found: dict[str, Any] = {}

    def timed(phase: str, call: Callable[[], Any]) -> None:
        times = []

        def run() -> None:
            times.append(seconds_of(call))

        found[f"{phase}, MB"] = harness.memory_of(run)
        while len(times) < options.repeats and sum(times) < options.slow:
            run()
        found[f"{phase}, s"] = min(times)

    timed("fit", one.fit)
    timed("predict", lambda: found.update(variances=one.predict(new).tolist()))
    found["log evidence"] = float(one.log_evidence())
    timed("evidence", one.evidence)
    return found


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    sides = {
        key: harness.in_own_process(__file__, "--measure", name, key)
        for key in options.sides
        if not (key == "laplace-torch" and name in options.without)
    }
    results: dict[str, Any] = {}
    for phase in PHASES:
        for unit in ("s", "MB"):
            values = {key: found[f"{phase}, {unit}"] for key, found in sides.items()}
            results |= {f"{name}, {phase}: {key}, {unit}": v for key, v in values.items()}
            if len(values) == 2:
                what = "times" if unit == "s" else "memory"
                ratio = values["laplace-torch"] / max(
                    values["pyro_bdl"], 1.0 if unit == "MB" else 0
                )
                results[f"{name}, {phase}: ratio of {what}"] = ratio
    if len(sides) == 2:
        ours, peer = sides.values()
        mine, theirs = (torch.tensor(found["variances"]).flatten() for found in (ours, peer))
        gap = (mine - theirs).abs().max() / theirs.abs().max()
        results[f"{name}, difference: predictive variances"] = float(gap)
        gap = abs(ours["log evidence"] / peer["log evidence"] - 1.0)
        results[f"{name}, difference: log evidence"] = gap
    return results


def outputs(options: argparse.Namespace) -> dict[str, Any]:
    """A classifier of many classes: variances of the outputs alone, and their covariances; and of
    one output the covariance of many inputs."""
    torch.manual_seed(0)
    classes, count = options.classes, options.predict
    x, y = torch.randn(2000, 32), torch.randint(classes, (2000,))
    net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, classes))
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron").prototype(x[:2], y[:2])
    predictive = bdl.LinearizedPredictive(model, guide.laplace_approximation((x, y)))
    results = {}
    for what, call in (
        ("variances", lambda: predictive.parameter_moments(x[:count])),
        ("covariances", lambda: predictive.parameter_covariance(x[:count])),
    ):
        label = f"{classes} classes, {what} for {count} inputs"
        results[f"{label}, MB"] = harness.memory_of(call)
        results[f"{label}, s"] = seconds_of(call)
    net, x, y = problem("5000-50-1", options)
    ours = Ours(net, x, y, options)
    ours.fit()
    predictive = bdl.LinearizedPredictive(ours.model, ours.posterior)
    for what, call in (
        ("covariance of 500 inputs", lambda: predictive.joint_parameter_covariance(x[:500])),
        ("100 draws at 500 inputs", lambda: predictive(x[:500])),
    ):
        results[f"5000-50-1, {what}, MB"] = harness.memory_of(call)
        results[f"5000-50-1, {what}, s"] = seconds_of(call)
    return results


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--peer", help="the folder that holds laplace-torch")
    parser.add_argument("--cases", nargs="*", default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--without", nargs="*", default=[], help="cases for pyro_bdl alone")
    parser.add_argument("--images", type=int, default=500, help="for the CNN (500)")
    parser.add_argument("--predict", type=int, default=100, help="inputs predicted (100)")
    parser.add_argument("--batch", type=int, default=100, help="of laplace-torch's fits (100)")
    parser.add_argument("--predict-batch", type=int, default=20, help="of its predictions (20)")
    parser.add_argument("--classes", type=int, default=100, help="of the classifier (100)")
    parser.add_argument("--slow", type=float, default=5.0, help="s of what is not repeated (5)")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only-outputs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]  # holds laplace.py
    sys.path[:0] = [options.peer] if options.peer else []
    options.sides = [key for key in SIDES if key == "pyro_bdl" or find_spec("laplace")]
    if options.measure:
        print(json.dumps(measure(*options.measure, options)))
        return
    if options.only_outputs:
        print(json.dumps(outputs(options)))
        return
    results: dict[str, Any] = {"threads": options.threads}
    for name in options.cases:
        results |= compare(name, options)
    results |= harness.in_own_process(__file__, "--only-outputs")
    harness.show("Wide Laplace approximations against laplace-torch", results, options.json)


if __name__ == "__main__":
    main()
