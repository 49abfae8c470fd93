"""Subnetwork inference: full covariance over a few weights, with the others at the MAP."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.curvature.config import check_memory
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.guides.point import JointGuide, restored_source
from pyro_bdl.guides.selectors import (
    LargestPredictiveVariance,
    Selector,
    Size,
    Trained,
    checked_size,
    number_of,
)
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.gaussian_prior import StoredPrecision
from pyro_bdl.program.subset import Subset, select
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import real_number, require

_SHARE, _MOST = 0.1, 1000  # the default size


class AutoSubnetwork(AutoLaplaceGGN):
    """A guide that trains the MAP, and then a posterior with full covariance over a few weights.

    The other weights stay at the MAP. There are three posteriors over the chosen weights (Daxberger
    et al. 2021): ``laplace_approximation(data)`` is a Gaussian with the full Gauss-Newton matrix,
    ``variational(data)`` is a Normal guide with full covariance to be trained by SVI, and HMC or
    NUTS run over the weights of either, by ``mcmc.sample(..., subset=guide)``.

    :param model: a Pyro program with continuous latents.
    :param select: the selector of the weights, see ``pyro_bdl.selectors``; by default
        ``LargestPredictiveVariance``, the largest contributions to the outputs' variance.
    :param size: how many weights: a count, or a fraction of all. By default a tenth of all, at most
        1000; with a selector that has its own choice, all of it.
    :param options: ``curvature``, ``num_draws`` and ``rows`` of ``AutoLaplaceGGN``, and
        ``init_loc_fn``, ``create_plates`` of ``Guide``.
    :raises ValueError: for a size that is no positive count or fraction.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE, bibliography.SUBNETWORK)
    saved_parts = (Selector,)

    def __init__(
        self,
        model: Callable,
        *,
        select: Selector | None = None,
        size: Size = None,
        **options: Any,
    ) -> None:
        super().__init__(model, structure="full", **options)
        self.select = _selector(LargestPredictiveVariance() if select is None else select)
        self.size = None if size is None else checked_size(size)

    def options(self) -> dict[str, Any]:
        config = self.config
        names = ("curvature", "num_draws", "rows")
        found = {name: getattr(config, name) for name in names}
        return {**found, "size": self.size, "select": self.select}

    def choose(self, data: Any, *, select: Selector | None = None, size: Size = None) -> Tensor:
        """The chosen positions in the flat vector, sorted.

        :param data: ``(x, y)`` or an iterable of batches.
        :param select: replaces the guide's selector for this call.
        :param size: replaces the guide's size for this call.
        :raises MemoryError: if a matrix over so many weights does not fit in memory.
        :raises ValueError: for a size out of range, or a selector that chooses nothing.
        """
        batches = self.batches(data)
        args, kwargs = batches.first()
        self.prototype(*args, **kwargs)
        select = _selector(self.select if select is None else select)
        size = self.size if size is None else size
        if size is None and select.needs_size:
            total = self.require_layout().size
            size = min(_MOST, max(1, round(_SHARE * total)))
        if size is not None and select.needs_size:  # before the selector starts its work
            vector = self.location().detach()
            count = number_of(size, len(vector))
            check_memory(self.config, count, vector, advice="choose a smaller size")
        return select(Trained(self, batches), size)

    def laplace_approximation(
        self,
        data: Any = None,
        *,
        select: Selector | None = None,
        size: Size = None,
        **options: Any,
    ) -> LaplaceGuide:
        """A Gaussian with the full Gauss-Newton matrix over the chosen weights.

        :param data: as in ``AutoLaplaceGGN.laplace_approximation``, which takes the options too.
        :raises MemoryError: if the matrix does not fit; raised before any work.
        """
        batches = self.batches(data)
        chosen = self.choose(batches, select=select, size=size)
        return super().laplace_approximation(batches, subset=chosen, **options)

    def variational(
        self,
        data: Any,
        *,
        select: Selector | None = None,
        size: Size = None,
        init_scale: float = 0.05,
    ) -> "SubsetNormal":
        """A Normal with full covariance over the chosen weights, to be trained by SVI.

        :param data: as in ``laplace_approximation``; used to choose the weights.
        :param init_scale: the standard deviations at the start, in unconstrained units.
        """
        indices = self.choose(data, select=select, size=size)
        return SubsetNormal(self, Subset(self.require_layout(), indices.cpu()), init_scale)


def _selector(select: Any) -> Selector:
    require(select, Selector, "select must be a selector, such as bdl.selectors.LargestVariance()")
    return select


class SubsetNormal(JointGuide, NormalGuide):
    """A Normal u = loc + L eps over a subset of the unconstrained latents; the others are fixed.

    The parameters are ``loc`` (k,) and ``scale_tril`` (k, k), lower triangular.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SUBNETWORK,)

    def __init__(self, source: AutoLaplaceGGN, subset: Subset, init_scale: float) -> None:
        init_scale = real_number(init_scale, "init_scale")
        super().__init__(source)
        self.subset = subset
        self.register_buffer("fixed", source.location().detach().clone())
        start = subset.take(self.fixed)
        self.loc = nn.Parameter(start.clone())
        eye = torch.eye(len(start), dtype=start.dtype, device=start.device)
        self.scale_tril = PyroParam(init_scale * eye, constraints.lower_cholesky)

    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "subset": self.subset.indices}

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "SubsetNormal":
        source: Any = restored_source(model, batch)
        guide = cls(source, select(source.require_layout(), saved["subset"]), 1.0)
        guide.load_state_dict(saved["state"])
        return guide

    @property
    def precision(self) -> "_PrecisionOfCovariance":
        return _PrecisionOfCovariance(self.parameter("scale_tril"))

    def location(self) -> Tensor:
        return self.subset.put(self.fixed, self.parameter("loc"))

    def stored_precision(self) -> StoredPrecision:
        inverse = torch.cholesky_inverse(double(self.parameter("scale_tril").detach()))
        return StoredPrecision(FullPrecision, inverse)


class _PrecisionOfCovariance:
    """The precision (L L')^-1 of a Normal, with the methods of a ``Precision`` that a density
    needs."""

    dense, independent = True, False

    def __init__(self, tril: Tensor) -> None:
        self.tril, self.size = tril, len(tril)

    def logdet(self) -> Tensor:
        return -2.0 * self.tril.diagonal().log().sum()

    def quadratic(self, x: Tensor) -> Tensor:
        columns = x.reshape(-1, self.size).mT
        white = torch.linalg.solve_triangular(self.tril, columns, upper=False)
        return white.square().sum(0).reshape(x.shape[:-1])

    def sample(self, num_samples: int) -> Tensor:
        like = self.tril
        noise = torch.randn(num_samples, self.size, dtype=like.dtype, device=like.device)
        return noise @ like.mT

    def variances(self) -> Tensor:
        return self.tril.square().sum(-1)
