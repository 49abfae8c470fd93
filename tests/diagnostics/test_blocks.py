"""Blocks: every quantity once, in bounded blocks, on one thread or several; input checks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import second_device

from pyro_bdl import diagnostics as bdl
from pyro_bdl import working_memory
from pyro_bdl.diagnostics.blocks import map_blocks, split_chains
from pyro_bdl.utils.precision import double_device

NAMES = pytest.mark.parametrize("name", ["rhat", "ess", "mcse", "convergence", "psis", "loo"])
pytestmark = pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_see_every_quantity_once_on_any_number_of_threads(threads):
    x = torch.randn(3, 8, 4, 5, dtype=torch.float64)
    torch.set_num_threads(threads)

    def both(block):
        assert threads == 1 or torch.get_num_threads() == 1
        with ThreadPoolExecutor(1) as pool:  # others keep their number meanwhile
            assert pool.submit(torch.get_num_threads).result() == threads
        sizes.append(len(block))
        return torch.stack([block.mean((1, 2)), block.amax((1, 2))])

    sizes: list[int] = []
    with working_memory(8 * 24 * 3):
        mean, largest = map_blocks(both, x)
    torch.testing.assert_close(mean, x.mean((0, 1)))
    torch.testing.assert_close(largest, x.amax((0, 1)))
    assert sorted(sizes) == [2, 3, 3, 3, 3, 3, 3]  # threads end in any order
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as pool:  # a thread that begins later has as many
        assert pool.submit(torch.get_num_threads).result() == threads


def test_an_error_in_a_thread_reaches_the_caller_and_restores_the_threads():
    torch.set_num_threads(2)

    def fails(block):
        raise RuntimeError("no such block")

    with pytest.raises(RuntimeError, match="no such block"), working_memory(8 * 8):
        map_blocks(fails, torch.randn(2, 4, 50))
    assert torch.get_num_threads() == 2


def leaves(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = result if isinstance(result, tuple) else vars(result).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


@NAMES
def test_blocks_equal_the_whole_and_the_single_quantities(name):
    x = torch.randn(3, 40, 2, 5, dtype=torch.float64)
    function = getattr(bdl, name)
    whole = leaves(function(x))
    with working_memory(8 * 360):
        parts = leaves(function(x))
    single = leaves(function(x[:, :, 1, 3]))
    for one, part, alone in zip(whole, parts, single, strict=True):
        assert one.dtype == torch.float64 and one.shape[-2:] == (2, 5)
        torch.testing.assert_close(one, part, rtol=1e-13, atol=0)
        torch.testing.assert_close(one[..., 1, 3], alone, rtol=1e-13, atol=0)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_dtype_is_computed_in_double_and_leaves_the_graph(name, dtype):
    x = (5 * torch.randn(4, 50, 3)).to(dtype)
    function = getattr(bdl, name)
    tracked = x.clone().requires_grad_() if dtype.is_floating_point else x
    for one, other in zip(leaves(function(tracked)), leaves(function(x.double())), strict=True):
        assert not one.requires_grad
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_no_quantities_and_halves_of_an_odd_number_of_draws():
    assert bdl.rhat(torch.randn(4, 10, 0)).shape == (0,)
    assert bdl.ess(torch.randn(4, 10, 3, 0)).shape == (3, 0)
    x = torch.arange(14.0).reshape(1, 2, 7)
    expected = [part for row in x[0].tolist() for part in (row[:3], row[-3:])]
    assert sorted(split_chains(x)[0].tolist()) == sorted(expected)


@NAMES
@pytest.mark.parametrize("decimals", [0, 12])
def test_same_on_another_device(name, decimals, device):
    x = torch.randn(4, 101, 20, dtype=torch.float64).round(decimals=decimals)
    x[0, 3, 4] = torch.nan
    x[1, 3, 5] = torch.inf
    there = second_device.moved(x, device)
    x, function = there.cpu().double(), getattr(bdl, name)
    for one, other in zip(leaves(function(there)), leaves(function(x)), strict=True):
        assert one.device.type == double_device(device).type and one.dtype == torch.float64
        one = one.cpu()
        if name == "psis" and one.dim() > 1:  # which of equal ratios are in the tail is left open
            one, other = (value.flatten(0, 1).sort(0).values for value in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13, equal_nan=True)
