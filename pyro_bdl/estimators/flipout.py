"""Flipout (Wen et al. 2018): one draw of the weights, with random signs for every datum."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_bdl.estimators.per_datum import PerDatum, require_normal
from pyro_bdl.estimators.product import DataProduct, Operand

_NAME = "flipout"


def flipout() -> PerDatum:
    """A context in which every datum flips the signs of the shared draw's deviations at random.

    For a draw w = m + d of Normal(m, s^2), with symmetric deviations d = s * eps, datum n computes
    with w_n = m + d * t_n r_n', where r_n and t_n are random signs of the input and output units
    (equation 4 of the paper):

        z_n = op(a_n, m) + op(a_n * r_n, d) * t_n.

    Each w_n has the distribution of w, so that the ELBO's expectation is unchanged, even if a datum
    uses a weight at several positions. The w_n of different data are uncorrelated. Units are
    features of linear layers and channels of convolutions; embeddings and biases have output signs
    only. It supports the same operations as ``local_reparameterization`` and also costs two
    products, but needs no draw per datum.

    :raises UnsupportedProgramError: inside the context, for a latent that is used twice, or that
        multiplies data but has no Normal in the guide.
    """
    return PerDatum(signed, _NAME)


def signed(product: DataProduct, values: object = None) -> Tensor:
    """Outputs of a product with the datum's own signs."""
    require_normal(product, _NAME)
    mean = product.at_means()
    weight, bias, inputs = product.weight, product.bias, product.inputs
    out = product.along_features(_signs(mean.shape[product.features], mean), mean)
    shift = None if bias is None or bias.tag is None else _deviation(bias)
    if weight.tag is None:
        assert shift is not None
        return mean + out * product.along_features(shift, mean)
    if not product.is_lookup:
        into = _signs(inputs.shape[product.features], inputs)
        inputs = inputs * product.along_features(into, inputs)
    return mean + out * product.apply(inputs, _deviation(weight), shift)


def _deviation(operand: Operand) -> Tensor:
    """d = w - m."""
    return operand.value - operand.loc


# the signs (256, 8) that encode the bits of each byte
_SIGNS = 2.0 * (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1) - 1.0


def _signs(count: int, like: Tensor) -> Tensor:
    """Random signs (count,), eight from each random byte."""
    bytes_of_signs = torch.randint(0, 256, ((count + 7) // 8,), device=like.device)
    signs = _SIGNS.to(like, non_blocking=like.is_cuda)  # no wait for the GPU
    return F.embedding(bytes_of_signs, signs).flatten()[:count]
