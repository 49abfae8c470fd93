"""The built-in problems of ``pyro-bdl compare --example``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.data.dataset import Dataset, prepare, rows_of_fold
from pyro_bdl.utils.random_state import checked_seed
from pyro_bdl.utils.validation import real_number, whole_number


@dataclass(frozen=True)
class Example:
    """A built-in problem.

    :param description: one line for help texts.
    :param load: ``load(test_fraction=, seed=, fold=)`` returns the data; see ``prepare``.
    :param gain: the prior's gain, see ``priors.FanIn``.
    """

    description: str
    load: Callable[..., Dataset]
    gain: float = 1.0


def two_clusters(n: int = 100, seed: int = 0, *, noise: float = 0.1) -> Dataset:
    """One feature in two clusters with a gap between them, y = cos(4 x + 0.8) + noise.

    Half of the inputs are uniform on [-1, -0.7], half on [0.5, 1]. The test inputs are 200 evenly
    spaced points on [-1.5, 1.5]. Nothing is standardized.

    Example::

        >>> data = bdl.data.two_clusters(n=50)
        >>> data
        <Dataset of 'y': regression, 1 features, 50 training and 200 test rows>
        >>> data.x_train.shape, data.y_train.shape
        (torch.Size([50, 1]), torch.Size([50]))

    :param n: number of training points, at least 2.
    :param seed: seed of the inputs and the noise.
    :param noise: sd of the noise on the training and the test targets.
    :raises ValueError: if ``n`` is smaller than 2.

    Source: Foong et al. (2019), "In-between" uncertainty in Bayesian neural networks, section 4.
    """
    n, noise = whole_number(n, "n", least=2), real_number(noise, "noise", "[0, inf)")
    generator = torch.Generator().manual_seed(checked_seed(seed))
    left = -1 + 0.3 * torch.rand(n // 2, 1, generator=generator, device="cpu")
    right = 0.5 + 0.5 * torch.rand(n - n // 2, 1, generator=generator, device="cpu")
    x_test = torch.linspace(-1.5, 1.5, 200, device="cpu")[:, None]

    def targets(x: Tensor) -> Tensor:
        standard = torch.randn(len(x), generator=generator, device="cpu")
        return torch.cos(4 * x + 0.8).squeeze(-1) + noise * standard

    return _simulated(torch.cat([left, right]), x_test, targets, "y", "regression", seed)


def _counts(seed: int) -> Dataset:
    """Counts with a rate of exp(1.5 + sin(4 x)) at 120 inputs in two clusters."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(120, 1, generator=generator, device="cpu")
    x = torch.where(share < 0.5, -1.5 + 2 * share, 0.5 + 2 * (share - 0.5))
    grid = torch.linspace(-2, 2, 160, device="cpu")[:, None]

    def targets(x: Tensor) -> Tensor:
        return torch.poisson((1.5 + torch.sin(4 * x)).exp(), generator=generator).squeeze(-1)

    return _simulated(x, grid, targets, "count", "count", seed)


def _simulated(
    x: Tensor, grid: Tensor, targets: Callable[[Tensor], Tensor], name: str, task: str, seed: int
) -> Dataset:
    return Dataset(
        x, targets(x), grid, targets(grid), ("x",), name, task,
        source=f"two clusters with a gap between them, simulated with seed {seed}",
        split=f"the test inputs are a grid on [{grid.min():g}, {grid.max():g}]",
    )  # fmt: skip


def _by_seed(simulate: Callable[[int], Dataset]) -> Callable[..., Dataset]:
    """The ``load`` of a simulated problem, whose folds are of its training rows."""

    def load(*, seed: int = 0, fold: tuple[int, int] | None = None, **_: Any) -> Dataset:
        data = simulate(seed)
        if fold is None:
            return data
        labels = np.zeros(len(data.y_train))
        test = torch.as_tensor(rows_of_fold(labels, fold, seed), device="cpu")
        return replace(
            data, x_train=data.x_train[~test], y_train=data.y_train[~test],
            x_test=data.x_train[test], y_test=data.y_train[test],
            split=f"fold {fold[0] + 1} of {fold[1]} of the training rows",
        )  # fmt: skip

    return load


def _diabetes(**options: Any) -> Dataset:
    """442 patients, 10 features, disease progression after a year.

    Source: Efron, Hastie, Johnstone, Tibshirani (2004), Least angle regression.
    """
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    made = prepare(
        bunch.data, bunch.target, feature_names=tuple(bunch.feature_names),
        target_name="disease progression", task="regression", **options,
    )  # fmt: skip
    return replace(made, source="scikit-learn's diabetes data")


def _breast_cancer(**options: Any) -> Dataset:
    """569 tumors, 30 features of their cells, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    made = prepare(
        bunch.data, bunch.target_names[bunch.target],
        feature_names=tuple(map(str, bunch.feature_names)), target_name="diagnosis", **options,
    )  # fmt: skip
    return replace(made, source="scikit-learn's breast cancer data")


EXAMPLES = {
    "in-between": Example(
        "one feature, two clusters of data with a gap between them (Foong et al. 2019)",
        _by_seed(lambda seed: two_clusters(40, seed, noise=0.2)),
        gain=4.0,  # whose functions vary as fast as the true one
    ),
    "diabetes": Example("442 patients, 10 features, disease progression", _diabetes),
    "breast-cancer": Example("569 tumors, 30 features, two classes", _breast_cancer),
    "counts": Example("one feature, counts in two clusters", _by_seed(_counts), gain=2.0),
}
