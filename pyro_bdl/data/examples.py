"""The built-in problems of ``pyro-bdl compare --example``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pyro_bdl.data.dataset import Dataset, load_default, prepare, two_clusters

Split = tuple[int, int] | None


@dataclass(frozen=True)
class Example:
    """A built-in problem.

    :param name: its name for users.
    :param description: one line for help texts.
    :param load: ``load(test_fraction, seed, fold)`` returns the data.
    :param gain: the prior's gain, see ``priors.FanIn``.
    """

    name: str
    description: str
    load: Callable[[float, int, Split], Dataset]
    gain: float = 1.0


def _in_between(test_fraction: float, seed: int, fold: Split) -> Dataset:
    return two_clusters(40, seed, noise=0.2)


def _diabetes(test_fraction: float, seed: int, fold: Split) -> Dataset:
    return load_default(test_fraction=test_fraction, seed=seed, fold=fold)


def _breast_cancer(test_fraction: float, seed: int, fold: Split) -> Dataset:
    """569 tumors, 30 features of their cells, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    made = prepare(
        bunch.data,
        bunch.target_names[bunch.target],
        feature_names=tuple(map(str, bunch.feature_names)),
        target_name="diagnosis",
        task="classification",
        test_fraction=test_fraction,
        seed=seed,
        fold=fold,
    )
    return replace(made, source="scikit-learn's breast cancer data")


def _counts(test_fraction: float, seed: int, fold: Split) -> Dataset:
    """Counts with a rate of exp(1.5 + sin(4 x)) at 120 inputs in two clusters."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(120, 1, generator=generator, device="cpu")
    x = torch.where(share < 0.5, -1.5 + 2 * share, 0.5 + 2 * (share - 0.5))
    grid = torch.linspace(-2, 2, 160, device="cpu")[:, None]
    y, y_test = (
        torch.poisson((1.5 + torch.sin(4 * inputs)).exp(), generator=generator).squeeze(-1)
        for inputs in (x, grid)
    )
    return Dataset(
        x, y, grid, y_test, ("x",), "count", "count",
        source=f"counts in two clusters of inputs, simulated with seed {seed}",
        split="the test inputs are a grid on [-2, 2]",
    )  # fmt: skip


EXAMPLES = {
    example.name: example
    for example in (
        Example(
            "in-between",
            "one feature, two clusters of data with a gap between them (Foong et al. 2019)",
            _in_between,
            gain=4.0,  # whose functions vary as fast as the true one
        ),
        Example("diabetes", "442 patients, 10 features, disease progression", _diabetes),
        Example("breast-cancer", "569 tumors, 30 features, two classes", _breast_cancer),
        Example("counts", "one feature, counts in two clusters", _counts, gain=2.0),
    )
}
