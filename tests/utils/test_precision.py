import pytest
import torch
from torch._subclasses import FakeTensorMode

from pyro_bdl.utils.precision import rounds_to_tf32


@pytest.fixture
def settings():
    """torch's settings of float32 products, put back at the end."""
    kinds = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [kind.fp32_precision for kind in kinds]
    yield kinds
    for kind, value in zip(kinds, before, strict=True):
        kind.fp32_precision = value


@pytest.mark.parametrize(
    ("convolutions", "products", "expected"),
    [("tf32", "ieee", True), ("ieee", "tf32", True), ("ieee", "ieee", False)],
)
def test_tf32_is_what_torch_is_set_to(settings, convolutions, products, expected):
    for kind, value in zip(settings, (convolutions, products), strict=True):
        kind.fp32_precision = value
    with FakeTensorMode():
        there = torch.empty(2, device="cuda")
    assert rounds_to_tf32(there) is expected
    assert not rounds_to_tf32(there.double())
    assert not rounds_to_tf32(torch.empty(2, device="cpu"))
