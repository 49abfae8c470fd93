"""The program of a data set: a network, its prior, and the likelihood of the task."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import nn

from pyro_bdl import models
from pyro_bdl.data.dataset import Dataset, quoted
from pyro_bdl.nn import bayesianize
from pyro_bdl.priors import FanIn
from pyro_bdl.utils.memory import available_memory
from pyro_bdl.utils.validation import one_of

Activation = Literal["tanh", "relu", "silu"]
Likelihood = Literal[
    "normal", "heteroscedastic", "student_t", "poisson", "negative_binomial",
    "zero_inflated_poisson", "zero_inflated_negative_binomial", "hurdle_poisson",
    "hurdle_negative_binomial", "beta", "categorical", "ordinal", "censored_normal",
    "censored_lognormal", "censored_weibull",
]  # fmt: skip
_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_PRIOR = {"prior of the noise": "HalfNormal(1), in sds of the target"}


class Kind(NamedTuple):
    """An observation model by its word.

    :param task: whose targets it takes.
    :param build: of the network with priors, the number of data and that of the classes.
    :param words: what it says of y, and its own priors.
    :param outputs: of the network; 0 for one for each class.
    """

    task: str
    build: Callable[[Any, int, int], models.ObservationModel]
    words: dict[str, str]
    outputs: int = 1


def _plain(model: Callable[..., models.ObservationModel], **options: Any) -> Callable[..., Any]:
    return lambda network, count, _: model(network, num_data=count, **options)


def _ordinal(network: Any, count: int, classes: int) -> models.ObservationModel:
    return models.OrdinalRegression(network, num_classes=classes, num_data=count)


_CENSORED = {
    "normal": "y ~ Normal(f(x), scale^2)",
    "lognormal": "log y ~ Normal(f(x), scale^2)",
    "weibull": "y ~ Weibull(exp(f(x)), 1 / scale)",
}
_COUNTS: dict[str, tuple[Any, str, dict[str, str]]] = {
    "poisson": (models.PoissonRegression, "Poisson(exp(f(x)))", {}),
    "negative_binomial": (
        models.NegativeBinomialRegression,
        "NB(mean m = exp(f(x)), variance m + (dispersion m)^2)",
        {"prior of the dispersion": "LogNormal(-0.7, 1)"},
    ),
}
_ZEROS: dict[str, tuple[str | None, str]] = {
    "": (None, ""),
    "zero_inflated_": ("inflated", " with probability 1 - g(x), else 0"),
    "hurdle_": ("hurdle", " given y > 0 with probability 1 - g(x), else 0"),
}
LIKELIHOODS: dict[str, Kind] = {
    "normal": Kind(
        "regression", _plain(models.Regression),
        {"likelihood": "y ~ Normal(f(x), noise^2)", **_PRIOR},
    ),
    "heteroscedastic": Kind(
        "regression", _plain(models.HeteroscedasticRegression),
        {"likelihood": "y ~ Normal(f(x), s(x)^2), s(x) = softplus of a second output"}, 2,
    ),
    "student_t": Kind(
        "regression", _plain(models.StudentTRegression),
        {"likelihood": "y ~ StudentT(4, f(x), noise)", **_PRIOR},
    ),
    "categorical": Kind(
        "classification", _plain(models.Classification),
        {"likelihood": "y ~ Categorical(softmax(f(x)))"}, 0,
    ),
    "ordinal": Kind(
        "classification", _ordinal,
        {"likelihood": "P(y <= k) = sigmoid(cutpoint_k - f(x))", "prior of the cut points":
         "the lowest one and the logs of the gaps ~ Normal around even shares, sd 1"},
    ),
    **{
        f"{word}{name}": Kind(
            "count", _plain(model, zeros=zeros),
            {"likelihood": f"y ~ {law}{says}", **words}, 1 if zeros is None else 2,
        )
        for name, (model, law, words) in _COUNTS.items()
        for word, (zeros, says) in _ZEROS.items()
    },
    "beta": Kind(
        "share", _plain(models.BetaRegression),
        {"likelihood": "y ~ Beta(mean m = sigmoid(f(x)), variance m (1 - m) / (1 + precision))",
         "prior of the precision": "LogNormal(2, 1)"},
    ),
    **{
        f"censored_{law}": Kind(
            "censored" if law == "normal" else "times", _plain(models.CensoredRegression, law=law),
            {"likelihood": f"{says}, known as the status says", "prior of the scale":
             "HalfNormal(1)" + (", in sds of the target" if law == "normal" else "")},
        )
        for law, says in _CENSORED.items()
    },
}  # fmt: skip
# The first of each task is its default.
DEFAULTS = {kind.task: name for name, kind in reversed(LIKELIHOODS.items())}
_COPIES = 10  # of the weights during a fit: parameters, gradients, moments of Adam, draws


def perceptron(
    sizes: Sequence[int], activation: str, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Linear layers between the sizes, with an activation between them.

    :param activation: "tanh", "relu" or "silu".
    :param dtype: of the weights; by default torch's default.
    :raises ValueError: for another activation.
    """
    one_of(activation, "activation", _ACTIVATIONS)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=dtype), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def program(
    data: Dataset,
    hidden: Sequence[int],
    activation: str = "tanh",
    *,
    likelihood: str | None = None,
    gain: float = 1.0,
) -> tuple[nn.Module, dict[str, str]]:
    """The program, and its parts in words.

    :param hidden: units of each hidden layer.
    :param activation: "tanh", "relu" or "silu".
    :param likelihood: a word of ``Likelihood``; by default "normal", a common sd, "categorical",
        "poisson", "beta", "censored_normal" or "censored_lognormal", by the task.
    :param gain: of the prior ``FanIn``.
    :raises ValueError: for the likelihood of another task; for a network whose copies during a
        fit, with the units of all training rows, exceed the free memory.
    """
    word = DEFAULTS[data.task] if likelihood is None else likelihood
    kind, classes = LIKELIHOODS[word], len(data.class_names)
    if kind.task != data.task:
        known = [name for name, other in LIKELIHOODS.items() if other.task == data.task]
        raise ValueError(
            f"likelihood: {word!r} is of a {kind.task}, and {data.target_name} is a {data.task}: "
            f"choose {quoted(known)} (--likelihood), or another task (--task)"
        )
    if word == "ordinal" and pd.to_numeric(pd.Series(data.class_names), errors="coerce").hasnans:
        raise ValueError(
            f"likelihood: 'ordinal' needs classes that are numbers, which have an order; "
            f"{data.target_name} has {quoted(data.class_names)}"
        )
    outputs = kind.outputs or classes
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
        **kind.words,
        "network": between.join(f"Linear({before}, {after})" for before, after in layers),
        "weights": str(weights),
        "prior of the weights": f"FanIn({gain:g}): Normal(0, {gain:g}^2 / inputs of the layer); of "
        f"biases Normal(0, {gain:g}^2)",
    }
    network = bayesianize(perceptron(sizes, activation), FanIn(gain))
    return kind.build(network, rows, classes), parts
