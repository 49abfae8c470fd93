"""Inner products of the gradients of all data with each other."""

from typing import Any

from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import ProductBlock, weighted
from pyro_bdl.utils.linear_algebra import products


def joint_gram(block: Any, weights: Tensor | None = None) -> Tensor:
    """Return sum_e w_e G_ie G_je for all rows i, j of a block, (n K, n K), data before columns.

    For products at single positions, G = g a', the sum over the inputs is computed for each output
    o separately, sum_o g_io g_jo (sum_e a_ie w_oe a_je), without rows over all entries.

    :param weights: not negative, of the block's shape (groups, out, in); None: ones.
    """
    if isinstance(block, ProductBlock) and block.single:
        return _of_products(block, weights)
    if isinstance(block, ProductBlock):
        rows = block.entries().flatten(2)
    else:
        rows = block.rows()
        weights = None if weights is None else block.position.take(weights.flatten())
    rows = weighted(rows, None if weights is None else weights.sqrt())
    return products(rows.transpose(0, 1).flatten(0, 1).mT)


def _of_products(block: ProductBlock, weights: Tensor | None) -> Tensor:
    assert block.source is not None
    a, g = block.source()[:, 0], block.gradients[:, :, 0]  # (n, groups, in), (K, n, groups, out)
    columns, n = g.shape[:2]
    result = g.new_zeros(n, columns, n, columns)
    for group in range(g.shape[2]):
        own = g[:, :, group].transpose(0, 1)  # (n, K, out)
        if weights is None:
            flat = own.reshape(n * columns, -1)
            squares = products(a[:, group].mT)
            result += products(flat.mT).reshape(result.shape) * squares[:, None, :, None]
            continue
        roots = weights[group].sqrt()
        for o in range(own.shape[2]):
            squares = products((a[:, group] * roots[o]).mT)
            result += own[:, :, None, None, o] * own[:, :, o] * squares[:, None, :, None]
    return result.reshape(n * columns, n * columns)
