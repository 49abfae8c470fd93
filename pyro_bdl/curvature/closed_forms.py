"""Closed-form expectations of observation models over Gaussian outputs, without draws."""

import math
from typing import Any

import numpy as np
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bdl.curvature.linear_outputs import GaussianOutputs
from pyro_bdl.distributions.parameters import base_distribution

DISCRETE = ("Categorical", "OneHotCategorical", "Bernoulli")

_NODES = 24


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """E[sigmoid(f)] for f ~ N(m, v), approximately sigmoid(m / sqrt(1 + pi v / 8)) (MacKay 1992,
    "The evidence framework applied to classification networks", equation 10)."""
    return torch.sigmoid(mean / torch.sqrt(1.0 + math.pi / 8.0 * variance))


def centered_probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[softmax(f)], (..., C), for f ~ N(m, covariance), by a probit approximation of each class
    against the others.

    With v_k the variance of f_k minus the mean of the other f::

        softmax((m_k - mean of m) / sqrt(1 + pi v_k / 8))

    For two classes it is ``probit`` of their difference. In contrast to ``multiclass_probit``, a
    change of all f by one number, which softmax does not see and data do not determine, has no
    effect.

    :param mean: m (..., C).
    :param covariance: (..., C, C).
    """
    classes = mean.shape[-1]
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    own = covariance.diagonal(dim1=-2, dim2=-1)
    centered = (own - 2.0 * rows / classes + total / classes**2).clamp(min=0.0)  # of f - mean f
    variance = (classes / max(1, classes - 1)) ** 2 * centered
    return multiclass_probit(mean - mean.mean(-1, keepdim=True), variance)


def multiclass_probit(mean: Tensor, variance: Tensor) -> Tensor:
    """E[softmax(f)], (..., C), approximately softmax(m_k / sqrt(1 + pi v_k / 8)) (Gibbs 1997)."""
    return torch.softmax(mean / torch.sqrt(1.0 + math.pi / 8.0 * variance), -1)


def laplace_bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """E[softmax(f)], (N, C), for f ~ N(m, covariance), by the Laplace bridge.

    It is the mean of the Dirichlet whose Laplace approximation in the softmax basis is this
    Gaussian restricted to sum f = 0:

        alpha_k = (1 - 2/C + exp(m_k) / C^2 sum_l exp(-m_l)) / v_k

    (Hobbhahn, Kristiadi & Hennig 2022, equations 3 and 12). It is accurate for small variances.

    :param mean: m (N, C).
    :param covariance: (N, C, C), with v on its diagonal.
    """
    classes = mean.shape[-1]
    tiny = torch.finfo(mean.dtype).tiny
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True).clamp(min=tiny)
    mean = mean - rows * mean.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    spread = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2.0 * math.log(classes)
    flat = torch.full_like(mean, 1.0 - 2.0 / classes).log()
    return torch.softmax(torch.logaddexp(flat, spread) - variance.clamp(min=tiny).log(), -1)


def normal_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), entry by entry."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def joint_normal_log_density(y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """log N(y; mean, covariance) for y (..., E)."""
    if y.shape[-1] == 1:
        return normal_log_density(y, mean, covariance[..., 0])[..., 0]
    wide = torch.promote_types(mean.dtype, torch.float32)
    normal = torch.distributions.MultivariateNormal(
        mean.to(wide), covariance.to(wide), validate_args=False
    )
    return normal.log_prob(y.to(wide))


def uncertain_noise_log_density(
    y: Tensor,
    mean: Tensor,
    variance: Tensor,
    log_scale: Tensor,
    log_scale_variance: Tensor,
    cross: Tensor,
) -> Tensor:
    """log p(y) for y ~ N(f, sigma^2) with (f, log sigma) Gaussian, entry by entry.

    Given log sigma, y is Gaussian; log sigma is integrated by Gauss-Hermite quadrature.

    :param cross: the covariance of f and log sigma.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    spread = log_scale_variance.sqrt()
    slope = cross / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    rest = (variance - slope.square()).clamp(min=0.0)
    terms = []
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        total = rest + (2.0 * (log_scale + node * spread)).exp()
        terms.append(normal_log_density(y, mean + slope * node, total) + math.log(weight))
    return torch.stack(terms).logsumexp(0)


# ----------------------------------------------------------------------- by class of observation


def noise_variance(gaussian: GaussianOutputs) -> Tensor:
    """E[sigma^2] of a Normal: exp(2 m + 2 v) for log sigma ~ N(m, v)."""
    mean, variance = gaussian.cells("scale")
    return (2.0 * mean + 2.0 * variance).exp().reshape(gaussian.outputs.values["scale"].shape)


def noise_covariance(gaussian: GaussianOutputs) -> Tensor | None:
    """E[Cov[y | w]] of each event, (*batch, E, E); None if y has no moments in closed form."""
    outputs = gaussian.outputs
    if outputs.kind == "Normal":
        return noise_variance(gaussian)[..., None, None]
    if outputs.kind == "MultivariateNormal" and "scale_tril" not in outputs.dependent:
        assert outputs.site is not None
        base = base_distribution(outputs.site.distribution)
        return outputs.as_result(base.covariance_matrix)
    return None


def class_probabilities(gaussian: GaussianOutputs, method: str) -> Tensor | None:
    """P(y = class) of a discrete site, by "centered-probit", "probit" or "laplace-bridge"; None of
    another."""
    if gaussian.outputs.kind not in DISCRETE:
        return None
    logits, binary = gaussian.outputs.values["logits"], gaussian.outputs.kind == "Bernoulli"
    if method == "laplace-bridge":
        if binary:
            raise ValueError('"laplace-bridge" is for several classes: use "probit" for two')
        if logits.dim() != 2:
            raise ValueError('"laplace-bridge" needs one Categorical per datum: use "probit"')
        return laplace_bridge(logits, gaussian.block("logits", "logits"))
    if method == "centered-probit" and not binary:
        covariances = _of_events(gaussian.block("logits", "logits"), logits.shape[-1])
        return centered_probit(logits, covariances.reshape(*logits.shape, logits.shape[-1]))
    variance = gaussian.cells("logits")[1].reshape(logits.shape)
    return (probit if binary else multiclass_probit)(logits, variance)


def _of_events(covariances: Tensor, size: int) -> Tensor:
    """The covariances of the numbers of each event, (n, events, size, size), from those of all
    cells of each datum, (n, cells, cells)."""
    count, cells = covariances.shape[:2]
    blocks = covariances.reshape(count, cells // size, size, cells // size, size)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def log_density(gaussian: GaussianOutputs) -> Tensor | None:
    """log p(y) of an observed site in nats, masked, with the distribution's batch shape; None if
    there is no closed form.

    :raises ValueError: for a site without a value.
    """
    kind, site = gaussian.outputs.kind, gaussian.outputs.site
    assert site is not None
    if site.value is None:
        raise ValueError(
            f"site '{gaussian.outputs.name}' has no observation: pass the targets as well"
        )
    distribution = site.distribution
    inner = base_distribution(distribution, through_masks=False)
    if isinstance(inner, MaskedDistribution):
        return None
    shape = distribution.batch_shape
    if gaussian.outputs.has_data and not shape:
        return None  # all rows are one event, whose density takes the covariances between them
    event = torch.Size(inner.batch_shape[len(shape) :]).numel()  # Pyro may have a plain tuple
    if kind == "Normal":
        density = _normal_log_density(gaussian, site.value, event)
    elif kind in DISCRETE and event == 1:
        probabilities: Any = class_probabilities(gaussian, "centered-probit")
        density = _discrete_log_density(kind, probabilities, site.value)
    else:
        return None
    return None if density is None else scale_and_mask(density.reshape(shape), 1.0, site.mask)


def _normal_log_density(gaussian: GaussianOutputs, value: Tensor, event: int) -> Tensor | None:
    (mean, variance), (log_scale, uncertainty) = gaussian.cells("loc"), gaussian.cells("scale")
    y, size = value.reshape(mean.shape), len(mean)
    if "scale" in gaussian.outputs.dependent:
        if event > 1:
            return None
        cross = gaussian.block("loc", "scale").diagonal(dim1=-2, dim2=-1)
        return uncertain_noise_log_density(y, mean, variance, log_scale, uncertainty, cross)
    own = _of_events(gaussian.block("loc", "loc"), event)
    total = own + torch.diag_embed((2.0 * log_scale).exp().reshape(size, -1, event))
    y, mean = y.reshape(size, -1, event), mean.reshape(size, -1, event)
    return joint_normal_log_density(y, mean, total)


def _discrete_log_density(kind: str, probabilities: Tensor, value: Tensor) -> Tensor:
    if kind == "Bernoulli":
        probabilities = torch.where(value > 0.5, probabilities, 1.0 - probabilities)
    elif kind == "OneHotCategorical":
        probabilities = (probabilities * value).sum(-1)
    else:
        probabilities = probabilities.gather(-1, value[..., None].long())[..., 0]
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
