"""The improper log-uniform density."""

from typing import Any, ClassVar

from pyro.distributions import TorchDistribution, constraints
from torch import Tensor


class ImproperLogUniform(TorchDistribution):
    """The improper density 1 / |w|, uniform in log |w|; it cannot be sampled.

    :param like: a tensor with the distribution's batch shape, dtype and device.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, like: Tensor) -> None:
        self.like = like
        super().__init__(like.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ImproperLogUniform":
        return ImproperLogUniform(self.like.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return -value.abs().log()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        raise NotImplementedError(
            "a log-uniform prior is improper and cannot be sampled: give the latent a value"
        )
