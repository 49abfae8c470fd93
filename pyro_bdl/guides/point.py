"""Point masses at the mode of p(w | y), or at the mode of the unconstrained vector's density."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.statements import point
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.layout import Latent
from pyro_bdl.utils import bibliography


class AutoMAP(Guide):
    """A point mass at w = T(m), whose ELBO is log p(y | w) + log p(w).

    The parameter is one flat vector ``loc`` (m, (P,), unconstrained units). As in Pyro's
    ``AutoDelta``, the optimum is the mode of the density over the constrained latents.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMAP(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> round(guide.median()["weight"].item(), 1)
        2.0

    :param model: a Pyro program with continuous latents.
    :param init_loc_fn: where m starts; by default the network's own values.
    :param create_plates: as in Pyro's autoguides.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE,)
    normal_marginals = True

    def create_parameters(self, start: Tensor) -> None:
        self.loc = nn.Parameter(start.clone())

    def site_vectors(self) -> tuple[Tensor, ...]:
        return (self.location(),)

    def site_distribution(self, latent: Latent, *parts: Tensor) -> Any:
        return point(latent, *parts)

    @property
    def has_density(self) -> bool:
        return False

    def location(self) -> Tensor:
        return self.parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        return self.location().expand(num_samples, -1)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return torch.zeros_like(log_det)

    def variances(self) -> Tensor:
        """Zeros (P,)."""
        return torch.zeros_like(self.location())


class UnconstrainedMAP(AutoMAP):
    """Base class of guides that train the mode u* of the unconstrained vector.

    Its density is log p(T(u), y) + log |det dT/du|. Subclasses put a distribution around u*.
    """

    def site_distribution(self, latent: Latent, *parts: Tensor) -> Any:
        """A point mass whose log density is -log |det dT/du|."""
        return point(latent, *parts, change=True)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """-log |det dT/du|: a point mass, as an objective."""
        return -log_det


class JointGuide(Guide):
    """Base class of guides that are built around a trained guide.

    :param source: a trained guide for the same program; it is not changed.
    """

    def __init__(self, source: Guide) -> None:
        model = source.program_model
        super().__init__(model, create_plates=source.create_plates)
        self._take_structure(source)


def restored_source(model: Callable, batch: Batch) -> Guide:
    """A guide for a program, from which a joint guide of a file takes the layout."""
    args, kwargs = batch
    return UnconstrainedMAP(model).prototype(*args, **kwargs)
