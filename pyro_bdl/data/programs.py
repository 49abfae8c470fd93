"""The program of a data set: a network, its prior, and the likelihood of the task."""

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from pyro_bdl import models
from pyro_bdl.data.dataset import Dataset, quoted
from pyro_bdl.nn import bayesianize
from pyro_bdl.priors import FanIn
from pyro_bdl.utils.memory import available_memory

Activation = Literal["tanh", "relu", "silu"]
Noise = Literal["normal", "heteroscedastic", "robust"]
_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_PRIOR = {"prior of the noise": "HalfNormal(1), in sds of the target"}
# The observation model, by the task or, of a regression, by its noise: outputs, and it in words.
MODELS: dict[str, tuple[type[models.ObservationModel], dict[str, str]]] = {
    "classification": (models.Classification, {"likelihood": "y ~ Categorical(softmax(f(x)))"}),
    "count": (models.PoissonRegression, {"likelihood": "y ~ Poisson(exp(f(x)))"}),
    "normal": (models.Regression, {"likelihood": "y ~ Normal(f(x), noise^2)", **_PRIOR}),
    "heteroscedastic": (
        models.HeteroscedasticRegression,
        {"likelihood": "y ~ Normal(f(x), s(x)^2), s(x) = softplus of a second output"},
    ),
    "robust": (models.StudentTRegression, {"likelihood": "y ~ StudentT(4, f(x), noise)", **_PRIOR}),
}
_COPIES = 10  # of the weights during a fit: parameters, gradients, moments of Adam, draws


def perceptron(
    sizes: Sequence[int], activation: str, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Linear layers between the sizes, with an activation between them.

    :param activation: "tanh", "relu" or "silu".
    :param dtype: of the weights; by default torch's default.
    :raises ValueError: for another activation.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {quoted(_ACTIVATIONS)}, got {activation!r}")
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=dtype), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def program(
    data: Dataset,
    hidden: Sequence[int],
    activation: str = "tanh",
    *,
    noise: str = "normal",
    gain: float = 1.0,
) -> tuple[nn.Module, dict[str, str]]:
    """The program, and its parts in words.

    :param hidden: units of each hidden layer.
    :param activation: "tanh", "relu" or "silu".
    :param noise: of a regression: "normal", a common sd; "heteroscedastic", a sd for each input
        from the network; "robust", Student-t noise with 4 degrees of freedom.
    :param gain: of the prior ``FanIn``.
    :raises ValueError: for the noise of another task, and for a network whose copies during a fit,
        with the units of all training rows, exceed the free memory.
    """
    if noise != "normal" and data.task != "regression":
        raise ValueError(f"--noise is of use for a regression only, and this is a {data.task}")
    model, words = MODELS[noise if data.task == "regression" else data.task]
    outputs = 2 if noise == "heteroscedastic" else max(1, len(data.class_names))
    rows, features = data.x_train.shape
    sizes = [features, *hidden, outputs]
    layers = list(itertools.pairwise(sizes))
    weights = sum((before + 1) * after for before, after in layers)
    needed = data.x_train.element_size() * (_COPIES * weights + rows * sum(hidden))
    free = available_memory(data.x_train.device)
    if free is not None and needed > free:
        raise ValueError(
            f"--hidden {','.join(map(str, hidden))}: a network of {weights:,} weights needs about "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; choose fewer units"
        )
    between = f", {_ACTIVATIONS[activation].__name__}, "
    parts = {
        **words,
        "network": between.join(f"Linear({before}, {after})" for before, after in layers),
        "weights": str(weights),
        "prior of the weights": f"FanIn({gain:g}): Normal(0, {gain:g}^2 / inputs of the layer); of "
        f"biases Normal(0, {gain:g}^2)",
    }
    return model(bayesianize(perceptron(sizes, activation), FanIn(gain)), num_data=rows), parts
