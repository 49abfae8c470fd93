"""Local reparameterization (Kingma, Salimans & Welling 2015): noise of pre-activations."""

from functools import partial

import torch
from torch import Tensor

from pyro_bdl.estimators.per_datum import PerDatum, require_normal
from pyro_bdl.estimators.product import Product

_NAME = "local reparameterization"
POSITIONS = ("joint", "independent")


def local_reparameterization(*, positions: str = "joint") -> PerDatum:
    """Every datum samples its own pre-activations instead of sharing one draw of the weights.

    For w ~ Normal(m, s^2) and a datum's input a, the pre-activation of a linear layer is

        z = op(a, m) + sqrt(op(a^2, s^2)) * eps,   eps ~ Normal(0, 1),

    independent over data, so that the gradient's variance falls with the batch size (section 2.2
    of the paper). It reaches ``F.linear``, ``F.conv1d/2d/3d``, products with ``@``, einsums that
    are such products, ``F.embedding`` and the projections of ``nn.MultiheadAttention``, where the
    guide has a Normal at the site of the weight or the bias, or Gaussian dropout with a factor for
    each weight (variational dropout). Whatever else reads a latent gets one draw for all data.

    Where a datum meets a weight at several positions (sequences, images), its pre-activations
    depend on each other. "joint" keeps that, and with it the ELBO's expectation, by noise
    op(a_n, s * eps_n) with weights eps_n of its own for every datum. "independent" draws every
    position's noise for itself, as is usual for convolutions (Molchanov, Ashukha & Vetrov 2017):
    faster, each pre-activation keeps its distribution, but what averages over positions has too
    little noise.

    The data axis is the leading one, or the second where that has the data's number; inside an
    attention it is the batch axis. Where it cannot be told (rows flattened over data and
    positions), layers share one draw. Training of BatchNorm lets data mix, here as elsewhere.

    :param positions: "joint" or "independent".
    :raises UnsupportedProgramError: inside, for a latent that is used twice, and for one that
        multiplies data but has no Normal in the guide.
    """
    if positions not in POSITIONS:
        raise ValueError(f"positions must be 'joint' or 'independent', got {positions!r}")
    return PerDatum(partial(local_noise, joint=positions == "joint"), _NAME)


def local_noise(product: Product, kept: object = None, *, joint: bool = True) -> Tensor:
    """Outputs with the mean and, datum by datum, the covariance of the product."""
    require_normal(product, _NAME)
    mean = product.at_means()
    weight, bias = product.weight, product.bias
    if weight.scale is None:
        assert bias is not None and bias.scale is not None
        return mean + product.along_features(_per_datum(bias.scale, len(mean)), mean)
    several = product.has_positions(mean)
    if product.is_lookup:
        return mean + product.apply(product.inputs, weight.scale, None) * _row_noise(
            product, mean, joint and several
        )
    spread = None if bias is None else bias.scale
    if joint and several:
        weights = _per_datum(weight.scale, len(mean))
        return mean + product.datum_by_datum(
            weights, None if spread is None else _per_datum(spread, len(mean))
        )
    variance = product.apply(
        product.inputs.square(), weight.scale.square(), None if spread is None else spread.square()
    )
    # no variance where the inputs are all zero, whose square root has no gradient
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    return torch.addcmul(mean, deviation, torch.randn_like(mean))


def _per_datum(scale: Tensor, count: int) -> Tensor:
    """s * eps_n, (N, *shape)."""
    return scale * torch.randn(count, *scale.shape, dtype=scale.dtype, device=scale.device)


def _row_noise(product: Product, output: Tensor, shared: bool) -> Tensor:
    """Noise of looked up rows: one for all look-ups of a row by a datum where it is shared."""
    if not shared:
        return torch.randn_like(output)
    rows = product.inputs
    count = product.weight.value.shape[0]
    data = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    unique, inverse = (rows + count * data).unique(return_inverse=True)
    noise = torch.randn(len(unique), output.shape[-1], dtype=output.dtype, device=output.device)
    return noise[inverse]
