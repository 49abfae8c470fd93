"""``subnetwork.py --task rotated-mnist``: digits that are turned further and further.

A ResNet of 77 418 weights with group normalization is trained on upright digits and tested on
the same test digits at angles from 0 to 180 degrees (Daxberger et al. 2021, section 6.3). All
posteriors share one prior, Normal(0, 0.1^2); MAP, SWAG and the Laplace approximations share one
trained network. With ``--tune`` each Laplace approximation takes the prior scale that predicts
held-out upright digits best. Laplace predicts linearised, by the probit approximation; the rest
by the mean over draws. A step of MC dropout averages over four draws, since all digits of a batch
share the mask of a draw. ``--data`` takes an .npz with ``x_train`` (N, 28, 28), ``y_train`` (N,),
``x_test`` and ``y_test``, such as Keras' mnist.npz.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import metrics
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import selectors
from pyro_bdl.nn import with_learnable_prior
from pyro_bdl.training import collect_swag, train

SCORES = ("accuracy", "log likelihood", "ECE", "Brier")
GRID = (0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2)
MAP = "MAP"
Probabilities = Callable[[Tensor], Tensor]


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rotated-mnist")
    group.add_argument("--data", help="file of the digits")
    group.add_argument("--train-size", type=int, default=2000, help="digits (2000)")
    group.add_argument("--test-size", type=int, default=250, help="digits, at every angle (250)")
    group.add_argument("--tune", action="store_true", help="Laplace's prior on held-out digits")
    group.add_argument("--held-out", type=int, default=500, help="digits for --tune (500)")
    group.add_argument("--epochs", type=int, default=20, help="passes over the data (20)")
    group.add_argument("--angle-step", type=int, default=30, help="degrees (30)")
    group.add_argument("--size", type=float, default=0.01, help="share of the weights (0.01)")
    group.add_argument("--swag-rate", type=float, default=1e-4, help="of SWAG's SGD (1e-4)")
    group.add_argument("--members", type=int, default=5, help="of the ensemble (5)")
    group.add_argument("--predictive-draws", type=int, default=30, help="of weights (30)")


class Block(nn.Module):
    """Two convolutions around a short cut, each behind a group normalization."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.GroupNorm(8, n, affine=False) for n in (into, out))
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        self.short = nn.Conv2d(into, out, 1, stride) if into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.norm1(x).relu())
        return self.short(x) + self.conv2(self.norm2(y).relu())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.GroupNorm(8, 64, affine=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


class Problem:
    """Training, held-out and turned test digits, and programs for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from scipy.ndimage import rotate

        with np.load(options.data) as data:
            x, y = data["x_train"] / np.float32(255), data["y_train"].astype(np.int64)
            test = data["x_test"][: options.test_size] / np.float32(255)
            self.y_test = torch.tensor(data["y_test"][: options.test_size].astype(np.int64))
        count = options.train_size
        self.x, self.y = torch.tensor(x[:count])[:, None], torch.tensor(y[:count])
        held = slice(count, count + options.held_out)
        self.held_out = torch.tensor(x[held])[:, None], torch.tensor(y[held])
        self.turned = {
            angle: torch.tensor(rotate(test, angle, axes=(2, 1), reshape=False, order=1))[:, None]
            for angle in range(0, 181, options.angle_step)
        }
        self.batch = min(128, count)
        self.steps = max(1, options.epochs * count // self.batch)

    def program(self) -> Any:
        bnn = bdl.bayesianize(network(), bdl.priors.Normal(0.1))
        return bdl.models.Classification(bnn, num_data=len(self.x))

    def trained(self, guide: Any, model: Any, name: str, options: Any, **changes: Any) -> Any:
        train(
            model, guide, self.x, self.y, steps=self.steps, learning_rate=3e-3,
            batch_size=self.batch, progress=None if options.json else name, **changes,
        )  # fmt: skip
        return guide


def drawn(model: Any, guide: Any, num_samples: int) -> Probabilities:
    predictive = bdl.Predictive(model, guide, num_samples=num_samples)
    return lambda x: predictive.mean(x)["y"].mean(0)


def laplace(
    problem: Problem, posterior: Any, model: Any, options: argparse.Namespace
) -> tuple[Probabilities, dict[str, Any]]:
    """Linearized predictions, at the prior scale that predicts held-out digits best if asked."""
    facts = {"weights": posterior.subset.size}
    if options.tune:
        grid = bdl.evidence.tune_on_validation(posterior, *problem.held_out, values=GRID)
        facts["prior scale"] = grid.best
    predictive = bdl.LinearizedPredictive(model, posterior)
    return (lambda x: predictive.probabilities(x)["y"]), facts


def posteriors(
    problem: Problem, options: argparse.Namespace
) -> Iterator[tuple[str, Probabilities, dict[str, Any]]]:
    """Name, class probabilities of images, and facts of each posterior."""
    draws = options.predictive_draws
    model = problem.program()
    guide = problem.trained(bdl.guides.AutoSubnetwork(model), model, MAP, options)
    yield MAP, drawn(model, guide, 1), {}

    start, data = init_to_value(values=guide.median()), (problem.x, problem.y)
    moving = bdl.guides.AutoSWAG(model, init_loc_fn=start).prototype(*data)
    collect_swag(
        model, moving, *data, snapshots=30, every=problem.steps // 40 + 1,
        learning_rate=options.swag_rate,
    )  # fmt: skip
    swag = moving.swag_approximation()
    yield "SWAG", drawn(model, swag, draws), {"draws": draws}

    free = with_learnable_prior(model)  # so that the scale can be chosen afterwards
    plain = bdl.guides.AutoLaplaceGGN(free, structure="diag", init_loc_fn=start)
    posterior = plain.laplace_approximation(data)
    yield "diagonal Laplace", *laplace(problem, posterior, free, options)

    for name, select in {
        "subnetwork, variance of SWAG": selectors.LargestVariance(swag),
        "subnetwork, predictive variance": selectors.LargestPredictiveVariance(),
        "subnetwork, last layer": selectors.LastLayer(),
    }.items():
        free = with_learnable_prior(model)
        some = bdl.guides.AutoSubnetwork(free, select=select, init_loc_fn=start)
        size = options.size if select.needs_size else None
        posterior = some.laplace_approximation(data, size=size)
        yield name, *laplace(problem, posterior, free, options)

    model = problem.program()
    guide = bdl.guides.AutoMCDropout(model)
    problem.trained(guide, model, "MC dropout", options, num_particles=4)
    yield "MC dropout", drawn(model, guide, draws), {"draws": draws}

    model, members = problem.program(), options.members
    guide = bdl.guides.AutoEnsemble(model, size=members)
    problem.trained(guide, model, "ensemble", options, num_particles=members)
    yield "ensemble", drawn(model, guide, members), {"members": members}


def scores(probabilities: Tensor, y: Tensor) -> tuple[float, ...]:
    """Scores in the order of ``SCORES``."""
    known = probabilities.gather(1, y[:, None]).clamp(min=1e-12)
    return (
        metrics.accuracy(probabilities, y).item(),
        known.log().mean().item(),
        metrics.expected_calibration_error(probabilities, y).item(),
        metrics.brier(probabilities, y).item(),
    )


def run(options: argparse.Namespace) -> tuple[dict[str, Any], None]:
    """The scores of every posterior at every angle."""
    if options.data is None:
        raise SystemExit("--task rotated-mnist needs --data, a file such as Keras' mnist.npz")
    torch.manual_seed(0)
    problem, table = Problem(options), {}
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
        for name, predict, facts in posteriors(problem, options):
            made = time.process_time()
            found = {
                angle: scores(predict(x), problem.y_test) for angle, x in problem.turned.items()
            }
            facts |= {"CPU s, fit": made - started, "CPU s, predict": time.process_time() - made}
            table[name] = {"facts": facts, "scores": found}
            if not options.json:
                show_one(name, table[name])
            started = time.process_time()
    first = network()
    results = {
        "network": f"ResNet, {sum(p.numel() for p in first.parameters())} weights",
        "digits": f"{len(problem.x)} to train, {len(problem.y_test)} to test at each angle",
        "columns": SCORES,
        "posteriors": table,
    }
    return results, None


def show_one(name: str, entry: dict[str, Any]) -> None:
    facts = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in entry["facts"].items()
    )
    print(f"{name} ({facts})")
    angles = entry["scores"]
    print("  angle          " + " ".join(f"{angle:>7}" for angle in angles))
    for number, score in enumerate(SCORES):
        print(f"  {score:<14} " + " ".join(f"{row[number]:>7.3f}" for row in angles.values()))


def show(results: dict[str, Any]) -> None:
    """Log likelihoods side by side; the other scores were printed on the way."""
    table = results["posteriors"]
    print(f"{results['network']}, {results['digits']}; mean log likelihood in nats by angle")
    angles = next(iter(table.values()))["scores"]
    print(f"  {'':<32} " + " ".join(f"{angle:>6}" for angle in angles))
    for name, entry in table.items():
        row = " ".join(f"{values[1]:>6.2f}" for values in entry["scores"].values())
        print(f"  {name:<32} {row}")


def figure(results: dict[str, Any], extra: None, path: str) -> None:
    """Each score against the angle."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 7), layout="constrained")
    for number, (ax, score) in enumerate(zip(drawn.subplots(2, 2).flat, SCORES, strict=True)):
        for name, entry in results["posteriors"].items():
            angles = list(entry["scores"])
            ax.plot(angles, [entry["scores"][a][number] for a in angles], ".-", label=name)
        ax.set(xlabel="degrees", ylabel=score)
    drawn.axes[0].legend(fontsize=8)
    drawn.savefig(path, dpi=120)
