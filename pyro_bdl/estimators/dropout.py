"""A separate dropout mask for every example, for guides that draw one mask for all data."""

from torch import Tensor

from pyro_bdl.distributions.dropout_noise import NoisyWeight, draw
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators.per_datum import PerDatum
from pyro_bdl.estimators.product import DataProduct

_NAME = "per-example dropout"


def per_example_dropout() -> PerDatum:
    """A context in which every datum has its own dropout mask, as with dropout layers in training.

    A draw of ``AutoMCDropout`` is w = M diag(eps), with one mask for all data, so that it defines a
    function. Inside this context the outputs of datum n are

        z_n = op(a_n * eps_n, M),

    with separate factors eps_n that have the guide's distribution. Each datum's outputs keep their
    distribution, so that the ELBO's expectation is unchanged (Gal & Ghahramani 2016, section 3.2: a
    mask for each data point in a mini-batch). All positions of a datum, all calls of a module in a
    run, and all blocks of a packed weight share the datum's mask, as they share the mask of a draw.
    Masks per weight (DropConnect) need a copy of the weight for every datum.

    :raises UnsupportedProgramError: inside the context, for a latent that multiplies something
        other than data too, or if the guide's weights have no dropout.
    """
    return PerDatum(masked, _NAME, shared=True)


def masked(product: DataProduct, values: dict[str, Tensor]) -> Tensor:
    """Outputs of a product with the datum's own factors.

    :param values: the factors (K,) that the datum has drawn, by site.
    """
    weight, bias = product.weight, product.bias
    noisy = weight.base
    if not isinstance(noisy, NoisyWeight) or (bias is not None and bias.tag is not None):
        raise UnsupportedProgramError(
            f"{_NAME} needs a guide with dropout, such as AutoMCDropout, and site "
            f"'{_other(product)}' has none: use plain sampling (estimator=None)"
        )
    assert weight.tag is not None
    site = weight.tag.site
    if site not in values:
        values[site] = draw(noisy.noise, noisy.p.expand(noisy.count), 1, noisy.scheduled)[0]
    factors, loc, index = values[site], weight.of(noisy.loc), weight.of(noisy.index)
    shift = None if bias is None else bias.value
    units = _units(product, index)
    if units is None:
        return product.apply(product.inputs, loc * factors[index], shift)
    if product.is_lookup:
        of_rows = factors[units[product.inputs]][..., None]
        return product.apply(product.inputs, loc, None) * of_rows
    mask = product.along_features(factors[units], product.inputs)
    return product.apply(product.inputs * mask, loc, shift)


def _other(product: DataProduct) -> str:
    """The site of an operand without dropout."""
    tags = [o.tag for o in product.operands if not isinstance(o.base, NoisyWeight)]
    return next(tag.site for tag in tags if tag is not None)


def _units(product: DataProduct, index: Tensor) -> Tensor | None:
    """The factor of each input unit, if all weights of a unit share one; else None.

    :param index: the factor of each weight: (out, in), (out, in / groups, *kernel) or, for a
        look-up, (rows, features).
    """
    if product.is_lookup:
        units, same = index[:, 0], index == index[:, :1]
    else:
        grouped = index.reshape(product.groups, -1, index.shape[1], index[0, 0].numel())
        first = grouped[:, :1, :, :1]
        units, same = first.flatten(), grouped == first
    return units if bool(same.all()) else None
