"""The program of a data set: a network, its prior, and the likelihood of the task."""

import itertools
from collections.abc import Sequence

from torch import nn

from pyro_bdl import models
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.nn import bayesianize
from pyro_bdl.priors import FanIn
from pyro_bdl.utils.memory import available_memory

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
NOISES = ("normal", "heteroscedastic", "robust")
_PRIOR = "HalfNormal(1), in sds of the target"
_COPIES = 10  # of the weights during a fit: parameters, gradients, moments of Adam, draws


def check_memory(data: Dataset, hidden: Sequence[int]) -> None:
    """Check that a fit's copies of the weights, and the units of all training rows, fit in memory.

    :raises ValueError: if the machine has less.
    """
    rows, features = data.x_train.shape
    sizes = [features, *hidden, max(1, len(data.class_names))]
    weights = sum((before + 1) * after for before, after in itertools.pairwise(sizes))
    needed = data.x_train.element_size() * (_COPIES * weights + rows * sum(hidden))
    free = available_memory(data.x_train.device)
    if free is not None and needed > free:
        raise ValueError(
            f"--hidden {','.join(map(str, hidden))}: a network of {weights:,} weights needs about "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; choose fewer units"
        )


def program(
    data: Dataset,
    hidden: Sequence[int],
    activation: str,
    *,
    noise: str = "normal",
    gain: float = 1.0,
) -> tuple[nn.Module, dict[str, str]]:
    """The program, and its parts in words.

    :param hidden: units of each hidden layer.
    :param activation: a name in ``ACTIVATIONS``.
    :param noise: one of ``NOISES``, for a regression: a common sd, a sd for each input from the
        network, or Student-t noise with 4 degrees of freedom.
    :param gain: of the prior ``FanIn``.
    """
    model: type[models.ObservationModel]
    outputs, parts = 1, {}
    if data.task == "classification":
        model, outputs = models.Classification, len(data.class_names)
        parts["likelihood"] = "y ~ Categorical(softmax(f(x)))"
    elif data.task == "count":
        model = models.PoissonRegression
        parts["likelihood"] = "y ~ Poisson(exp(f(x)))"
    elif noise == "heteroscedastic":
        model, outputs = models.HeteroscedasticRegression, 2
        parts["likelihood"] = "y ~ Normal(f(x), s(x)^2), s(x) = softplus of a second output"
    elif noise == "robust":
        model = models.StudentTRegression
        parts["likelihood"] = "y ~ StudentT(4, f(x), noise)"
        parts["prior of the noise"] = _PRIOR
    else:
        model = models.Regression
        parts["likelihood"] = "y ~ Normal(f(x), noise^2)"
        parts["prior of the noise"] = _PRIOR
    sizes = [data.x_train.shape[1], *hidden]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    layers.append(nn.Linear(sizes[-1], outputs))
    network = nn.Sequential(*layers)
    parts["network"] = ", ".join(
        f"Linear({layer.in_features}, {layer.out_features})"
        if isinstance(layer, nn.Linear)
        else type(layer).__name__
        for layer in layers
    )
    parts["weights"] = str(sum(weight.numel() for weight in network.parameters()))
    parts["prior of the weights"] = (
        f"FanIn({gain:g}): Normal(0, {gain:g}^2 / inputs of the layer); of biases "
        f"Normal(0, {gain:g}^2)"
    )
    return model(bayesianize(network, FanIn(gain)), num_data=len(data.x_train)), parts
