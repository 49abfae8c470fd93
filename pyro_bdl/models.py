"""Ready-made programs: a network of ``bayesianize`` with an observation model.

Each is ``model(x, y=None)``. It observes the site ``y`` inside the plate ``data`` and records the
network's output f(x) as the deterministic site ``f``. A network output with a single column
(N, 1) counts as (N,), and so do targets.
"""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus

from pyro_bdl.program.gaussian_prior import TaskPrior
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.scales import Hyperprior, Scale, beside, checked, hyperparameter
from pyro_bdl.utils.validation import whole_number


class ObservationModel(TaskPrior, OwnParameters):
    """Base of the programs: the network, the plate, the checks; a subclass says p(y | f).

    :param network: a module of ``bayesianize``, or any module that samples its weights.
    :param num_data: N, the number of data that the posterior is about, where the program is
        called with minibatches: their log likelihood then counts N / B times.
    :raises ValueError: for a ``num_data`` that is no whole number of at least 1.
    """

    def __init__(self, network: nn.Module, *, num_data: int | None = None) -> None:
        super().__init__()
        self.network = network
        self.num_data = None if num_data is None else whole_number(num_data, "num_data")

    def likelihood(self, output: Tensor) -> Distribution:
        """p(y | f) with batch shape (N,) for outputs of shape (N, ...)."""
        raise NotImplementedError

    def observation_shape(self, output: Tensor) -> torch.Size:
        """The shape of the targets that belong to outputs of shape (N, ...)."""
        return output.shape

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        with self._under_task_prior():
            return self._observe(x, y)

    def _observe(self, x: Tensor, y: Tensor | None) -> Tensor:
        output = _without_single_column(self.network(x))
        size = output.shape[0]
        if not size:
            raise ValueError("the batch has no rows: pass at least one datum")
        if y is not None:
            y = self._checked_targets(output, _without_single_column(y))
            size = self._plate_size(output.shape[0])
        likelihood: Any = self.likelihood(output)
        with pyro.plate("data", size, subsample=torch.arange(len(output), device=output.device)):
            return pyro.sample("y", likelihood, obs=y)

    def _plate_size(self, batch: int) -> int:
        if self.num_data is None:
            return batch
        if self.num_data < batch:
            raise ValueError(
                f"num_data is {self.num_data}, but the batch has {batch} rows: num_data is the "
                "number of all training data"
            )
        return self.num_data

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        expected = self.observation_shape(output)
        if y.shape != expected:
            raise ValueError(
                f"y has shape {tuple(y.shape)}, but the network's output {tuple(output.shape)} "
                f"asks for targets of shape {tuple(expected)}"
            )
        return y

    def _declare(self, name: str, value: Scale) -> None:
        """Keep a hyperparameter: a number, a PyroParam, or a distribution that is sampled."""
        value = checked(value, name)
        if isinstance(value, Hyperprior):
            self.__dict__["_" + name] = value
            value = value.parameter
        if isinstance(value, PyroParam):
            setattr(self, name, beside(self.network, value))
        else:
            self.__dict__["_" + name] = value

    def _hyperparameter(self, name: str, like: Tensor) -> Tensor:
        if name in self._pyro_params:
            value: Tensor = getattr(self, name)
            hyperprior = self.__dict__.get("_" + name)
            if hyperprior is not None:
                pyro.factor(f"{name}.hyperprior", hyperprior.log_prob(value))
            return value.to(like)
        return hyperparameter(self.__dict__["_" + name], name, like)


class Regression(ObservationModel):
    """y ~ Normal(f(x), noise^2); several targets are independent given f.

    :param noise: the noise's standard deviation, in units of y: a number, a ``PyroParam`` or a
        distribution (then a latent site ``noise``).
    """

    def __init__(
        self, network: nn.Module, *, noise: Scale | None = None, num_data: int | None = None
    ) -> None:
        super().__init__(network, num_data=num_data)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)

    def likelihood(self, output: Tensor) -> Distribution:
        noise = self._hyperparameter("noise", output)
        return dist.Normal(_record(output), noise).to_event(output.dim() - 1)


class HeteroscedasticRegression(ObservationModel):
    """y ~ Normal(f(x), s(x)^2), where the network gives f and the raw s side by side.

    The last dimension of the output is split in halves: f, and r with s = softplus(r). The site
    ``f`` is the mean, the deterministic site ``noise`` is s.
    """

    def likelihood(self, output: Tensor) -> Distribution:
        mean, raw = self._halves(output)
        noise = pyro.deterministic("noise", softplus(raw) + torch.finfo(raw.dtype).eps)
        return dist.Normal(_record(mean), noise).to_event(mean.dim() - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        return self._halves(output)[0].shape

    @staticmethod
    def _halves(output: Tensor) -> tuple[Tensor, Tensor]:
        if output.dim() < 2 or output.shape[-1] % 2:
            raise ValueError(
                "HeteroscedasticRegression needs a network with two outputs per target, got "
                f"output shape {tuple(output.shape)}"
            )
        mean, raw = output.chunk(2, -1)
        return _without_single_column(mean), _without_single_column(raw)


class StudentTRegression(ObservationModel):
    """y ~ StudentT(df, f(x), noise): regression that outliers do not spoil.

    :param noise: the scale, in units of y; ``df``: the degrees of freedom. Each a number, a
        ``PyroParam`` or a distribution (then a latent site of that name).
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        noise: Scale | None = None,
        df: Scale = 4.0,
        num_data: int | None = None,
    ) -> None:
        super().__init__(network, num_data=num_data)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)
        self._declare("df", df)

    def likelihood(self, output: Tensor) -> Distribution:
        df, noise = self._hyperparameter("df", output), self._hyperparameter("noise", output)
        return dist.StudentT(df, _record(output), noise).to_event(output.dim() - 1)


class Classification(ObservationModel):
    """y ~ Categorical(softmax(f(x))) for outputs (N, classes) and integer targets (N,)."""

    def likelihood(self, output: Tensor) -> Distribution:
        shape = self.observation_shape(output)
        return dist.Categorical(logits=_record(output)).to_event(len(shape) - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        if output.dim() < 2:
            raise ValueError(
                "Classification needs a network with one output per class, got output shape "
                f"{tuple(output.shape)}; for two classes and one output use BinaryClassification"
            )
        return output.shape[:-1]

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        y = super()._checked_targets(output, y)
        if y.is_floating_point():
            raise ValueError(f"y must hold class numbers as integers, got dtype {y.dtype}")
        return y


class BinaryClassification(ObservationModel):
    """y ~ Bernoulli(sigmoid(f(x))), y in {0, 1} as integers, booleans or floats."""

    def likelihood(self, output: Tensor) -> Distribution:
        return dist.Bernoulli(logits=_record(output)).to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class PoissonRegression(ObservationModel):
    """y ~ Poisson(exp(f(x))) for counts y."""

    def likelihood(self, output: Tensor) -> Distribution:
        return dist.Poisson(_record(output).exp()).to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


def _record(output: Tensor) -> Tensor:
    return pyro.deterministic("f", output)


def _without_single_column(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    return value.squeeze(-1) if value.dim() > 1 and value.shape[-1] == 1 else value
