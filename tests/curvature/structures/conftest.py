"""Jacobians for structures."""

import pytest
import torch

from pyro_bdl.curvature.jacobian.block_position import BlockPosition
from pyro_bdl.curvature.jacobian.jacobian import DenseBlock, Jacobian


def _jacobian(size, *positions):
    blocks = []
    for i, where in enumerate(positions):
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        blocks.append(DenseBlock(BlockPosition((f"site{i}", -1), where), torch.randn(2, 3, count)))
    return Jacobian(blocks, 2, 3, size, torch.zeros(0))


@pytest.fixture
def jacobian():
    """K = 2 columns for n = 3 data, dense in some places of a vector."""
    torch.manual_seed(0)
    return _jacobian


CASES = (
    [slice(0, 10)],
    [slice(0, 4), slice(6, 10)],
    [slice(2, 4)],
    [torch.tensor([7, 1]), slice(3, 4)],
    [],
)


@pytest.fixture(params=CASES, ids=range(len(CASES)))
def positions(request):
    """Where the blocks of a Jacobian lie in a vector of 10."""
    return request.param
