"""Images of digits and clothes for the benchmarks, two networks for them, and their scores."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import metrics

OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}


class Part(NamedTuple):
    x: Tensor
    y: Tensor


class Images:
    """Images scaled to mean 0 and sd 1, (N, 1, 28, 28), and their classes.

    The images out of distribution are the first test images of the other set.

    :param folder: with ``mnist.npz`` and ``fashion_mnist.npz`` of the Keras layout.
    :param name: of the set, a key of `OTHER`.
    :param train: the number of images for training, without the ``held_out`` ones after them.
    :param pooled: averages of 2 x 2 pixels, (N, 1, 14, 14).
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        train: int,
        test: int,
        held_out: int = 0,
        pooled: bool = False,
    ) -> None:
        with np.load(folder / f"{name}.npz") as file:
            arrays = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
        with np.load(folder / f"{OTHER[name]}.npz") as file:
            elsewhere = file["x_test"][:test]
        pixels = torch.from_numpy(arrays["x_train"][:train]).float() / 255
        self.name = name
        self.mean, self.sd, self.pooled = pixels.mean(), pixels.std(), pooled
        held = slice(train, train + held_out)
        self.train = self._part(arrays["x_train"][:train], arrays["y_train"][:train])
        self.held_out = self._part(arrays["x_train"][held], arrays["y_train"][held])
        self.test = self._part(arrays["x_test"][:test], arrays["y_test"][:test])
        self.elsewhere = self._scaled(elsewhere)

    def _scaled(self, images: Any) -> Tensor:
        scaled = ((torch.from_numpy(images).float() / 255 - self.mean) / self.sd)[:, None]
        return nn.functional.avg_pool2d(scaled, 2) if self.pooled else scaled

    def _part(self, images: Any, classes: Any) -> Part:
        return Part(self._scaled(images), torch.from_numpy(classes.astype(np.int64)))


def convolutional(width: float = 1.0) -> nn.Module:
    """Three convolutions and three dense layers (564 330 weights at width 1)."""
    c1, c2, c3, d1, d2 = (max(2, int(width * size)) for size in (64, 96, 128, 512, 256))
    return nn.Sequential(
        nn.Conv2d(1, c1, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(c1, c2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(4 * c3, d1), nn.ReLU(), nn.Linear(d1, d2), nn.ReLU(), nn.Linear(d2, 10),
    )  # fmt: skip


def perceptron(width: float = 1.0) -> nn.Module:
    """Four hidden layers of 1024, 512, 256 and 128 units at width 1."""
    sizes = [784, *(max(2, int(width * size)) for size in (1024, 512, 256, 128))]
    layers: list[nn.Module] = [nn.Flatten()]
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


NETWORKS = {"MLP": perceptron, "CNN": convolutional}


def predicted(
    probabilities: Callable[[Tensor], Tensor], data: Images, *, rows: int = 500
) -> tuple[Tensor, Tensor]:
    """Class probabilities of the test images, and of the images from elsewhere, (N, K)."""
    return over(probabilities, data.test.x, rows), over(probabilities, data.elsewhere, rows)


def over(probabilities: Callable[[Tensor], Tensor], x: Tensor, rows: int = 500) -> Tensor:
    """Class probabilities of images, so many at a time, (N, K) in float64."""
    return torch.cat([probabilities(part).double() for part in x.split(rows)])


def log_loss(found: Tensor, y: Tensor) -> float:
    """Mean negative log likelihood of the classes."""
    return -float(found.gather(1, y[:, None]).clamp(min=1e-12).log().mean())


def best_scale(model: Any, posterior: Any, held_out: Part, values: Iterable[float]) -> float:
    """Set the prior's only scale to the value that predicts held-out images best; return it."""
    (name,) = posterior.hyperparameters()

    def density(value: float) -> float:
        pyro.get_param_store()[name] = torch.tensor(value)
        posterior.refresh()
        found = bdl.LinearizedPredictive(model, posterior).log_density(*held_out)
        return float(found["y"].mean())

    best = max(values, key=density)
    density(best)
    return best


def scores(probabilities: Callable[[Tensor], Tensor], data: Images) -> dict[str, float]:
    """The scores of predictions, see ``scores_of``."""
    return scores_of(*predicted(probabilities, data), data.test.y)


def scores_of(found: Tensor, other: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, negative log likelihood and calibration error of the test images, and the AUROC of
    the predictive entropy between them and images from elsewhere.

    :param found: of ``predicted``, with ``other``.
    :param y: classes of the test images.
    """
    return {
        "accuracy": float(metrics.accuracy(found, y)),
        "NLL": log_loss(found, y),
        "ECE": float(metrics.expected_calibration_error(found, y)),
        "OOD-AUROC": float(metrics.auroc(entropy(found), entropy(other))),
    }


def entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1)


def seeds_of(options: Namespace) -> range:
    """As many seeds as asked for, from the first: a long run can be made in parts."""
    return range(options.first_seed, options.first_seed + options.seeds)


def mean_and_error(rows: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Mean of every score over the seeds, and its standard error."""
    found = {}
    for name in rows[0]:
        values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        error = float(values.std() / len(rows) ** 0.5) if len(rows) > 1 else float("nan")
        found[name] = float(values.mean()), error
    return found


def with_error(mean: float, error: float, digits: int = 3) -> str:
    """ "0.914 ± 0.002", or the mean alone of one seed."""
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if math.isfinite(error) else "")
