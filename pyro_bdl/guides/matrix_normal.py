"""Variational inference with dependent rows and columns of every weight matrix."""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.kl import mean_field_kl
from pyro_bdl.program.gaussian_prior import GaussianPrior, MatrixBlock, NormalBlock
from pyro_bdl.program.layout import Latent, Layout, marginal
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import real_number, whole_number


class AutoMatrixNormal(Guide):
    """q(W) = MN(M, U, V) for every weight matrix, independent Normals for all other latents.

    A weight matrix is a real latent with two or more event dimensions, outside plates. Its first
    dimension counts the rows, the others together the columns: a convolution's kernel is (out, in *
    kh * kw), an embedding (rows, features). U = A A' is the covariance of the rows (outputs), V = B
    B' that of the columns (inputs), with lower triangular A and B. The sites are independent
    (Louizos & Welling 2016). A p x q matrix needs p^2 + q^2 numbers, and p q (p + q) operations per
    draw.

    The parameters are ``loc`` (M of all latents, (P,)), ``row_<k>`` and ``column_<k>`` (A and B of
    the k-th matrix; see ``factors``), and ``scale`` (standard deviations of the other latents).

    :param model: a Pyro program with continuous latents.
    :param init_scale: the standard deviations at the start, in unconstrained units.
    :param max_side: a row or column covariance larger than this is diagonal, to save memory.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for an ``init_scale`` that is not positive and finite, or a negative
        ``max_side``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.MATRIX_NORMAL,)
    normal_marginals = True

    def __init__(
        self,
        model: Callable,
        *,
        init_scale: float = 0.05,
        max_side: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.init_scale = real_number(init_scale, "init_scale")
        self.max_side = whole_number(max_side, "max_side", least=0)

    def options(self) -> dict[str, Any]:
        return {"max_side": self.max_side}

    def create_parameters(self, start: Tensor) -> None:
        latents = self.require_layout().latents
        self.matrices = tuple(name for name, latent in latents.items() if is_matrix(latent))
        self._others = Layout([v for name, v in latents.items() if name not in self.matrices])
        self.loc = nn.Parameter(start.clone())
        for k, name in enumerate(self.matrices):
            shape = latents[name].unconstrained_shape
            setattr(self, f"row_{k}", self._factor(shape[0], start))
            setattr(self, f"column_{k}", self._factor(math.prod(shape[1:]), start))
        if self._others.size:
            self.scale = PyroParam(
                start.new_full((self._others.size,), self.init_scale),
                constraints.softplus_positive,
            )

    def _factor(self, side: int, like: Tensor) -> PyroParam:
        diagonal = like.new_full((side,), math.sqrt(self.init_scale))
        if side > self.max_side:
            return PyroParam(diagonal, constraints.softplus_positive)
        return PyroParam(torch.diag(diagonal), constraints.softplus_lower_cholesky)

    def factors(self, site: str) -> tuple[Tensor, Tensor]:
        """The factors A (p, p) and B (q, q) of a matrix; vectors if they are diagonal.

        :raises KeyError: for a site that is not a matrix.
        """
        self.require_layout()
        if site not in self.matrices:
            raise KeyError(f"'{site}' is not a weight matrix; there are {', '.join(self.matrices)}")
        k = self.matrices.index(site)
        return self.parameter(f"row_{k}"), self.parameter(f"column_{k}")

    def scales(self) -> dict[str, Tensor]:
        """The standard deviations of each site that is not a matrix."""
        return self._others.unflatten(self.parameter("scale")) if self._others.size else {}

    def _unconstrained(self) -> Iterator[tuple[Latent, Any]]:
        """Yield each site with the distribution of its slice of u."""
        layout, scales = self.require_layout(), self.scales()
        for name, loc in layout.unflatten(self.parameter("loc")).items():
            if name in self.matrices:
                yield layout.latents[name], MatrixNormal(loc, *self.factors(name))
            else:
                yield layout.latents[name], dist.Normal(loc, scales[name]).to_event(loc.dim())

    def site_vectors(self) -> tuple[Tensor, ...]:
        """M, and the standard deviations, which count for nothing at the matrices."""
        layout, loc = self.require_layout(), self.parameter("loc")
        ones = layout.unflatten(torch.ones_like(loc))
        return loc, layout.flatten({**ones, **self.scales()})

    def site_distribution(self, latent: Latent, *parts: Tensor) -> dist.TorchDistribution:
        """A matrix normal, which keeps its event dimensions, or independent Normals."""
        if latent.name in self.matrices:
            return MatrixNormal(parts[0], *self.factors(latent.name))
        return marginal(latent, *parts)

    def location(self) -> Tensor:
        return self.parameter("loc")

    def sample_vectors(self, num_samples: int) -> Tensor:
        draws = []
        for _, q in self._unconstrained():
            if isinstance(q, MatrixNormal):
                draw = q.rsample((num_samples,))
            else:  # Normal.rsample draws in place, which vmap refuses
                noise = torch.randn(
                    num_samples, *q.mean.shape, dtype=q.mean.dtype, device=q.mean.device
                )
                draw = q.mean + q.stddev * noise
            draws.append(draw.reshape(num_samples, -1))
        return torch.cat(draws, -1)

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        values = self.require_layout().unflatten(vector)
        terms = [q.log_prob(values[latent.name]) for latent, q in self._unconstrained()]
        return torch.stack(terms).sum() - log_det

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """KL(q || p) in nats, for each site in closed form if there is one, else at the run's
        draw."""
        distributions: Any = self.site_distributions()
        sites = {}
        for name, q in distributions.items():
            q = q.to_event(self.require_layout().latents[name].event_dim - q.event_dim)
            sites[name] = Site(q, run.latents[name].value, 1.0, None)
        return mean_field_kl(sites, run.priors)

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        return torch.stack([q.entropy() for _, q in self._unconstrained()]).sum() + log_det

    def variances(self) -> Tensor:
        """The marginal variances of the unconstrained vector (P,)."""
        return torch.cat([q.variance.reshape(-1) for _, q in self._unconstrained()])

    def as_prior(self) -> GaussianPrior:
        """Matrix normals and independent Normals over u, see ``Guide.as_prior``."""
        self._require_global()
        layout, scales = self.require_layout(), self.scales()
        blocks: list[nn.Module] = []
        for name, loc in layout.unflatten(self.parameter("loc")).items():
            latent = layout.latents[name]
            if name in self.matrices:
                rows, columns = self.factors(name)
                blocks.append(MatrixBlock(latent, loc=loc, row_factor=rows, column_factor=columns))
            else:
                blocks.append(NormalBlock(latent, loc=loc, scale=scales[name]))
        return GaussianPrior(blocks)


def is_matrix(latent: Latent) -> bool:
    """Return whether a latent is real with two or more dimensions, all of them event dimensions."""
    return latent.transform is None and latent.event_dim == len(latent.shape) >= 2
