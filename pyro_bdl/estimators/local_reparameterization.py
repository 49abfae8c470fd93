"""Local reparameterization (Kingma, Salimans & Welling 2015): sampled pre-activations."""

from functools import partial

import torch
from torch import Tensor

from pyro_bdl.estimators.per_datum import PerDatum, require_normal
from pyro_bdl.estimators.product import DataProduct
from pyro_bdl.utils.validation import one_of

_NAME = "local reparameterization"
POSITIONS = ("joint", "independent")


def local_reparameterization(*, positions: str = "joint") -> PerDatum:
    """A context in which every datum samples its pre-activations instead of sharing a draw of
    weights.

    For w ~ Normal(m, s^2) and a datum's input a, the pre-activation of a linear layer is

        z = op(a, m) + sqrt(op(a^2, s^2)) * eps,   eps ~ Normal(0, 1),

    independent over data, so that the gradient's variance falls with the batch size (section 2.2 of
    the paper). It supports ``F.linear``, ``F.conv1d/2d/3d``, products with ``@``, einsums of that
    form, ``F.embedding`` and the projections of ``nn.MultiheadAttention``. The guide must have a
    Normal at the site of the weight or bias, or Gaussian dropout with a factor for each weight
    (variational dropout). All other operations use one draw of a latent for all data.

    If a datum uses a weight at several positions (sequences, images), its pre-activations are
    correlated. "joint" keeps the correlation, and so the ELBO's expectation, by noise op(a_n, s *
    eps_n) with separate eps_n for every datum. "independent" draws separate noise for every
    position, as is usual for convolutions (Molchanov, Ashukha & Vetrov 2017). It is faster, and
    each pre-activation keeps its distribution, but averages over positions have too little noise.

    The program runs on one datum at a time, by ``vmap``: data may lie along any axis inside it. A
    program whose data depend on each other, as under BatchNorm in training mode, is refused.

    :param positions: "joint" or "independent".
    :raises UnsupportedProgramError: inside the context, for a latent that is used twice, or that
        multiplies data but has no Normal in the guide.
    """
    one_of(positions, "positions", POSITIONS)
    return PerDatum(partial(local_noise, joint=positions == "joint"), _NAME)


def local_noise(product: DataProduct, values: object = None, *, joint: bool = True) -> Tensor:
    """Sample outputs with the mean and covariance of the product of one datum."""
    require_normal(product, _NAME)
    mean = product.at_means()
    weight, bias = product.weight, product.bias
    if weight.scale is None:
        assert bias is not None and bias.scale is not None
        return mean + product.along_features(_noise(bias.scale), mean)
    several = product.has_positions(mean)
    if product.is_lookup:
        return mean + product.apply(product.inputs, weight.scale, None) * _row_noise(
            product.inputs, mean, joint and several
        )
    spread = None if bias is None else bias.scale
    if joint and several:
        deviations = _noise(weight.scale), None if spread is None else _noise(spread)
        return mean + product.apply(product.inputs, *deviations)
    variance = product.apply(
        product.inputs.square(), weight.scale.square(), None if spread is None else spread.square()
    )
    # the variance is zero if all inputs are zero; its square root would have no gradient
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    return mean + deviation * torch.randn_like(mean)


def _noise(scale: Tensor) -> Tensor:
    """s * eps, (*shape)."""
    return scale * torch.randn(scale.shape, dtype=scale.dtype, device=scale.device)


def _row_noise(rows: Tensor, output: Tensor, shared: bool) -> Tensor:
    """Noise of looked-up rows; if shared, all look-ups of a row have the same noise."""
    noise = torch.randn_like(output)
    if not shared:
        return noise
    flat = rows.reshape(-1)
    first = (flat[:, None] == flat).int().argmax(1)  # the first look-up of the same row
    return noise.reshape(len(flat), -1)[first].reshape(output.shape)
