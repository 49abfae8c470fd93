"""``subnetwork.py --task rotated-mnist``: images that are turned, or corrupted, more and more.

A ResNet of 77 418 weights with group normalization is trained on upright images and tested on
the same test images at angles from 0 to 180 degrees (Daxberger et al. 2021, section 6.3), and
with noise, blur or less contrast at five strengths (``corruptions.py``). All posteriors share one
prior, Normal(0, 0.1^2); MAP, SWAG, VOGN and the Laplace approximations start from one trained
network. With ``--tune`` each Laplace approximation takes the prior scale that predicts
held-out upright images best. Laplace predicts linearised, by the probit approximation; the rest
by the mean over draws. A step of MC dropout averages over four draws, since all images of a batch
share the mask of a draw. ``--data`` takes an .npz with ``x_train`` (N, 28, 28), ``y_train`` (N,),
``x_test`` and ``y_test``, such as Keras' mnist.npz or fashion_mnist.npz.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corruptions import corrupt
from harness import read_rows, write_rows
from images import Part, best_scale
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import metrics
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import selectors
from pyro_bdl.nn import with_prior
from pyro_bdl.optim import VOGN, GaussNewton_ELBO
from pyro_bdl.training import collect_swag, train

SCORES = ("accuracy", "log likelihood", "ECE", "Brier")
GRID = (0.003, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2)
SHIFTS = ("angle", "noise", "blur", "contrast")
MAP = "MAP"
Probabilities = Callable[[Tensor], Tensor]


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rotated-mnist")
    group.add_argument("--data", help="file of the images")
    group.add_argument("--train-size", type=int, default=2000, help="images (2000)")
    group.add_argument("--test-size", type=int, default=250, help="images, at every strength (250)")
    group.add_argument("--tune", action="store_true", help="Laplace's prior on held-out images")
    group.add_argument("--held-out", type=int, default=500, help="images for --tune (500)")
    group.add_argument("--epochs", type=int, default=20, help="passes over the data (20)")
    group.add_argument("--angle-step", type=int, default=30, help="degrees (30)")
    group.add_argument(
        "--sizes", type=float, nargs="+", default=[0.002, 0.01, 0.05], help="shares of the weights"
    )
    group.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    group.add_argument("--shifts", nargs="+", choices=SHIFTS, default=list(SHIFTS), help="(all)")
    group.add_argument("--swag-rate", type=float, default=1e-4, help="of SWAG's SGD (1e-4)")
    group.add_argument(
        "--vogn-temperatures", type=float, nargs="+", default=[1.0, 0.1], help="of its bounds"
    )
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
    """Training and held-out images, test images by shift and its strength, and programs."""

    def __init__(self, options: argparse.Namespace) -> None:
        from scipy.ndimage import rotate

        with np.load(options.data) as data:
            x, y = data["x_train"] / np.float32(255), data["y_train"].astype(np.int64)
            test = data["x_test"][: options.test_size] / np.float32(255)
            self.y_test = torch.tensor(data["y_test"][: options.test_size].astype(np.int64))
        count = options.train_size
        self.x, self.y = torch.tensor(x[:count])[:, None], torch.tensor(y[:count])
        held = slice(count, count + options.held_out)
        self.held_out = Part(torch.tensor(x[held])[:, None], torch.tensor(y[held]))

        def shifted(shift: str, strength: int) -> Tensor:
            if shift == "angle":
                turned = rotate(test, strength, axes=(2, 1), reshape=False, order=1)
                return torch.tensor(turned)[:, None]
            return corrupt(torch.tensor(test)[:, None], shift, strength)

        strengths = dict.fromkeys(SHIFTS, range(1, 6)) | {
            "angle": range(0, 181, options.angle_step)
        }
        self.tests = {
            (shift, strength): shifted(shift, strength)
            for shift in options.shifts
            for strength in strengths[shift]
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
        facts["prior scale"] = best_scale(model, posterior, problem.held_out, GRID)
    predictive = bdl.LinearizedPredictive(model, posterior)
    return (lambda x: predictive.probabilities(x)["y"]), facts


def posteriors(
    problem: Problem, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], tuple[Probabilities, dict[str, Any]]]]]:
    """Name of each posterior, and the function that makes its class probabilities and facts."""
    draws = options.predictive_draws
    model, data = problem.program(), (problem.x, problem.y)
    point = problem.trained(bdl.guides.AutoSubnetwork(model), model, MAP, options)
    start = init_to_value(values=point.median())

    @functools.cache
    def swag() -> Any:
        moving = bdl.guides.AutoSWAG(model, init_loc_fn=start).prototype(*data)
        collect_swag(
            model, moving, *data, snapshots=30, every=problem.steps // 40 + 1,
            learning_rate=options.swag_rate,
        )  # fmt: skip
        return moving.swag_approximation()

    def diagonal() -> tuple[Probabilities, dict[str, Any]]:
        free = with_prior(model, bdl.priors.learnable)  # so that the scale can be chosen afterwards
        plain = bdl.guides.AutoLaplaceGGN(free, structure="diag", init_loc_fn=start)
        return laplace(problem, plain.laplace_approximation(data), free, options)

    def subnetwork(select: Any, size: float | None) -> tuple[Probabilities, dict[str, Any]]:
        free = with_prior(model, bdl.priors.learnable)
        some = bdl.guides.AutoSubnetwork(free, select=select(), init_loc_fn=start)
        return laplace(problem, some.laplace_approximation(data, size=size), free, options)

    def vogn(eta: float) -> tuple[Probabilities, dict[str, Any]]:
        # behind a normalization weights are small (root mean square 0.013): noise of sd 0.03, or
        # long steps, would undo the training
        guide = bdl.guides.AutoMeanField(model, init_loc_fn=start, init_scale=0.003)
        guide.prototype(*data)
        problem.trained(
            guide, model, "VOGN", options, elbo=GaussNewton_ELBO(temperature=eta),
            optimizer=VOGN(guide, lr=0.01),
        )  # fmt: skip
        return drawn(model, guide, draws), {"draws": draws}

    def dropout() -> tuple[Probabilities, dict[str, Any]]:
        own = problem.program()
        guide = bdl.guides.AutoMCDropout(own)
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=4)
        problem.trained(guide, own, "MC dropout", options, elbo=elbo)
        return drawn(own, guide, draws), {"draws": draws}

    def ensemble() -> tuple[Probabilities, dict[str, Any]]:
        own, members = problem.program(), options.members
        guide = bdl.guides.AutoEnsemble(own, size=members)
        problem.trained(guide, own, "ensemble", options)
        return drawn(own, guide, members), {"members": members}

    yield MAP, lambda: (drawn(model, point, 1), {})
    yield "SWAG", lambda: (drawn(model, swag(), draws), {"draws": draws})
    yield "diagonal Laplace", diagonal
    chosen = {
        "variance of SWAG": lambda: selectors.LargestVariance(swag()),
        "predictive variance": selectors.LargestPredictiveVariance,
    }
    for size in options.sizes:
        for name, select in chosen.items():
            yield f"subnetwork, {size:.2g} by {name}", functools.partial(subnetwork, select, size)
    yield "last layer", lambda: subnetwork(lambda: selectors.Sites("last-layer"), None)
    yield "ensemble", ensemble
    yield "MC dropout", dropout
    for eta in options.vogn_temperatures:
        yield f"VOGN, temperature {eta:g}", functools.partial(vogn, eta)


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
    """The scores of every posterior, by shift and strength."""
    if options.data is None:
        raise SystemExit("--task rotated-mnist needs --data, a file such as Keras' mnist.npz")
    torch.manual_seed(0)
    problem = Problem(options)
    table = {row.pop("posterior"): row for row in read_rows(options.rows)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
        started = time.process_time()
        for name, fit in posteriors(problem, options):
            if name in table:
                continue
            predict, facts = fit()
            made = time.process_time()
            found: dict[str, dict[str, tuple[float, ...]]] = {}
            for (shift, strength), x in problem.tests.items():
                found.setdefault(shift, {})[str(strength)] = scores(predict(x), problem.y_test)
            facts |= {"CPU s, fit": made - started, "CPU s, predict": time.process_time() - made}
            table[name] = {"facts": facts, "scores": found}
            write_rows(options.rows, [{"posterior": name, **table[name]}])
            if not options.json:
                show_one(name, table[name])
            started = time.process_time()
    first = network()
    results = {
        "network": f"ResNet, {sum(p.numel() for p in first.parameters())} weights",
        "images": f"{len(problem.x)} to train, {len(problem.y_test)} to test at each strength",
        "columns": SCORES,
        "posteriors": table,
    }
    return results, None


def show_one(name: str, entry: dict[str, Any]) -> None:
    facts = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in entry["facts"].items()
    )
    print(f"{name} ({facts})", flush=True)


def show(results: dict[str, Any]) -> None:
    """Each score of all posteriors, by shift and strength."""
    table = results["posteriors"]
    print(f"{results['network']}, {results['images']}; log likelihoods are means in nats")
    shifts = next(iter(table.values()))["scores"]
    for shift, strengths in shifts.items():
        for number, score in enumerate(SCORES):
            print(f"{shift + ': ' + score:<42}" + "".join(f"{level:>7}" for level in strengths))
            for name, entry in table.items():
                values = entry["scores"][shift].values()
                print(f"  {name:<40}" + "".join(f"{row[number]:>7.2f}" for row in values))


def figure(results: dict[str, Any], extra: None, path: str) -> None:
    """Each score against the strength of each shift."""
    from matplotlib.figure import Figure

    table = results["posteriors"]
    shifts = list(next(iter(table.values()))["scores"])
    drawn = Figure(figsize=(4 * len(shifts), 10), layout="constrained")
    axes = drawn.subplots(len(SCORES), len(shifts), squeeze=False, sharey="row", sharex="col")
    for number, score in enumerate(SCORES):
        for ax, shift in zip(axes[number], shifts, strict=True):
            for line, (name, entry) in enumerate(table.items()):
                values = entry["scores"][shift]
                strengths = [float(level) for level in values]
                style = {"color": f"C{line % 10}", "ls": "-" if line < 10 else "--"}
                ax.plot(
                    strengths,
                    [row[number] for row in values.values()],
                    marker=".",
                    label=name,
                    **style,
                )
        axes[number, 0].set_ylabel(score)
    for ax, shift in zip(axes[-1], shifts, strict=True):
        ax.set_xlabel("degrees" if shift == "angle" else f"{shift}, strength")
    labels = axes[0, 0].get_legend_handles_labels()
    drawn.legend(*labels, loc="outside lower center", ncols=4)
    drawn.savefig(path, dpi=100)
