"""Programs of classes: of any number, of two, and of classes in an order."""

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.ordered_logistic import OrderedLogistic
from pyro_bdl.models.base import ObservationModel, Output, floating
from pyro_bdl.scales import hyperparameter
from pyro_bdl.utils.validation import whole_number


class Classification(ObservationModel):
    """y ~ Categorical(softmax(f(x))) for outputs (N, classes) and integer targets (N,).

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> model = bdl.models.Classification(bdl.bayesianize(net))
        >>> draws = bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))  # of the prior
        >>> draws["f"].shape, draws["y"].shape
        (torch.Size([10, 5, 3]), torch.Size([10, 5]))
    """

    _takes_logits = True

    def likelihood(self, output: Tensor) -> Distribution:
        shape = self.observation_shape(output)
        return dist.Categorical(logits=self.record(output)).to_event(len(shape) - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        if output.dim() < 2:
            raise ValueError(
                "Classification needs a network with one output per class, got output shape "
                f"{tuple(output.shape)}; for two classes and one output use BinaryClassification"
            )
        return output.shape[:-1]

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return _checked_classes(self, super()._checked_targets(output, y))


class BinaryClassification(ObservationModel):
    """y ~ Bernoulli(sigmoid(f(x))), y in {0, 1} as integers, booleans or floats.

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.BinaryClassification(bdl.bayesianize(net))
        >>> draws = bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))  # of the prior
        >>> draws["f"].shape, draws["y"].shape
        (torch.Size([10, 5]), torch.Size([10, 5]))
    """

    _takes_logits = True

    def likelihood(self, output: Tensor) -> Distribution:
        return dist.Bernoulli(logits=self.record(output)).to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class OrdinalRegression(ObservationModel):
    """Ordered classes by cumulative logits, P(y <= k) = sigmoid(c_k - f(x)) for y in 0 ... K - 1.

    The cut points c_0 < ... < c_(K-2) are the latent site ``cutpoints``. By default their prior has
    its medians where all classes are equally likely at f = 0: c_0 and the logarithms of the gaps
    are Normal with sd 1.

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.OrdinalRegression(bdl.bayesianize(net), num_classes=4)
        >>> bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))["y"].max() <= 3  # of the prior
        tensor(True)

    :param num_classes: K; as many as the cut points say where they are given.
    :param cutpoints: K - 1 increasing numbers, or a distribution of an ordered vector.
    :param missing_targets: let NaN be a class that was not observed; ``y`` then holds floats.
    :raises ValueError: without both, if they contradict, or for numbers that do not increase.

    Source: McCullagh (1980), Regression models for ordinal data.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        num_classes: int | None = None,
        *,
        cutpoints: Distribution | Tensor | Sequence[float] | None = None,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        if cutpoints is None:
            if num_classes is None:
                raise ValueError("OrdinalRegression needs num_classes, or the cutpoints")
            count = whole_number(num_classes, "num_classes", least=2)
            medians = torch.arange(1, count, dtype=torch.float64, device="cpu").div(count).logit()
            gaps = torch.cat([medians[:1], medians.diff().log()])
            self._cutpoints: Any = dist.TransformedDistribution(
                dist.Normal(gaps, 1.0).to_event(1), dist.transforms.OrderedTransform()
            )
        elif isinstance(cutpoints, Distribution):
            self._cutpoints = cutpoints
        else:
            numbers = torch.as_tensor(cutpoints, dtype=torch.float64, device="cpu")
            if numbers.dim() != 1 or not bool((numbers.diff() > 0).all()):
                raise ValueError(f"cutpoints must be increasing numbers, got {cutpoints}")
            self.register_buffer("_cutpoints", numbers.to(floating(self.network)))
        given = self._cutpoints
        shape = given.event_shape if isinstance(given, Distribution) else given.shape
        if len(shape) != 1 or num_classes not in (None, shape[0] + 1):
            raise ValueError(
                f"cutpoints of shape {tuple(shape)} do not fit num_classes={num_classes}: they are "
                "num_classes - 1 numbers"
            )
        self.num_classes = shape[0] + 1

    def likelihood(self, output: Tensor) -> Distribution:
        cutpoints = self._cutpoints
        if isinstance(cutpoints, Distribution):
            cutpoints = hyperparameter(cutpoints, self._site("cutpoints"), output)
        likelihood: Any = OrderedLogistic(self.record(output), cutpoints.to(output))
        return likelihood.to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return _checked_classes(self, super()._checked_targets(output, y))


def _checked_classes(program: ObservationModel, y: Tensor) -> Tensor:
    """Class numbers; those of which some may be missing are floats, for NaN."""
    if y.is_floating_point() and not program.missing_targets:
        raise ValueError(
            f"{program._targets_name} must hold class numbers as integers, got dtype {y.dtype}; "
            "where NaN marks classes that are missing, say missing_targets=True"
        )
    return y
