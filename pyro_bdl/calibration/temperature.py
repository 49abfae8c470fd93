"""Temperature scaling of a posterior's predictions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_bdl.comparison.evaluate import evaluate
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.metrics.temperature import tempered
from pyro_bdl.predictive.observations import PredictiveMoments


@dataclass(frozen=True)
class Temperature:
    """One number that calibrates predictions, with its standard error; above 1 they were too sure.

    :param value: T.
    :param error: its standard error over the held-out rows and over the draws.
    """

    value: float
    error: float

    def probabilities(self, p: Tensor) -> Tensor:
        """Class probabilities ``(N, C)``, means over the draws, to the power 1 / T, normalized."""
        return tempered(p, self.value).to(p)

    def moments(self, moments: PredictiveMoments) -> PredictiveMoments:
        """Predictive moments, as of ``Predictive.moments(x)["y"]``, with T times the variance."""
        return moments._replace(variance=self.value * moments.variance)


def temperature_scaling(model: Callable, posterior: Any, *data: Any, **options: Any) -> Temperature:
    """Fit the temperature of a posterior's predictions to held-out data, by likelihood.

    Of classes T divides the logits of the probabilities averaged over the draws, not those of each
    draw: an average of calibrated draws is not calibrated. Of numbers it is the mean squared error
    in predictive variances, the best factor of the variance of a Normal:
    ``T.moments(predictive.moments(x)["y"])`` has T times the variance.

    Example::

        >>> x = torch.randn(40, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> model = bdl.models.Classification(bdl.bayesianize(torch.nn.Linear(2, 2)))
        >>> guide = bdl.guides.AutoMeanField(model)
        >>> training = bdl.training.train(model, guide, x[:20], y[:20], steps=50)
        >>> T = bdl.calibration.temperature_scaling(model, guide, x[20:], y[20:])  # held-out data
        >>> p = bdl.Predictive(model, guide).mean(x)["y"].mean(0)  # class probabilities
        >>> T.probabilities(p).shape
        torch.Size([40, 2])

    :param data: inputs and, last, targets that the posterior was not fitted to.
    :param options: ``num_samples``, ``batch_norm_data`` and ``seed``, as of ``compare``.
    :raises UnsupportedProgramError: for classes and numbers in one target.
    :raises ValueError: as ``compare``.

    Source: Guo et al. (2017), On calibration of modern neural networks; after averaging: Ashukha et
    al. (2020), Pitfalls of in-domain uncertainty estimation, and Rahaman & Thiery (2021),
    Uncertainty quantification and deep ensembles.
    """
    scores = evaluate(model, posterior, *data, **options).scores
    if "temperature" not in scores:
        raise UnsupportedProgramError(
            "temperature scaling needs targets of one kind, and the program observes classes and "
            "numbers: scale a program of one of them"
        )
    return Temperature(scores["temperature"], scores["temperature_se"])
