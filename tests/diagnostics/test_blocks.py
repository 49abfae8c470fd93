"""Streaming: every quantity once, in bounded blocks, on one thread or several; input checks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pyro_bdl import diagnostics as bdl
from pyro_bdl import working_memory
from pyro_bdl.diagnostics.blocks import map_blocks, split_chains


def test_blocks_see_every_quantity_once_and_stay_small():
    x = torch.arange(2 * 5 * 7, dtype=torch.float32).reshape(2, 5, 7)
    sizes = []

    def total(block):
        sizes.append(block.numel())
        return block.sum((1, 2))

    result = map_blocks(total, x, block_numbers=30)
    torch.testing.assert_close(result, x.double().sum((0, 1)))
    assert sizes == [30, 30, 10]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_with_axes_of_their_own_and_any_number_of_threads(threads):
    x = torch.randn(3, 8, 4, 5, dtype=torch.float64)
    torch.set_num_threads(threads)

    def both(block):
        assert threads == 1 or not seen or torch.get_num_threads() == 1
        seen.append(len(block))
        return torch.stack([block.mean((1, 2)), block.amax((1, 2))])

    seen: list[int] = []
    mean, largest = map_blocks(both, x, block_numbers=24 * 3)
    torch.testing.assert_close(mean, x.mean((0, 1)))
    torch.testing.assert_close(largest, x.amax((0, 1)))
    assert sorted(seen) == [2, 3, 3, 3, 3, 3, 3]  # threads end in any order
    assert torch.get_num_threads() == threads
    with ThreadPoolExecutor(1) as pool:  # a thread that begins later has as many
        assert pool.submit(torch.get_num_threads).result() == threads


def test_an_error_in_a_thread_reaches_the_caller_and_restores_the_threads():
    torch.set_num_threads(2)
    calls = []

    def fails(block):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no such block")
        return block.sum((1, 2))

    with pytest.raises(RuntimeError, match="no such block"):
        map_blocks(fails, torch.randn(2, 4, 50), block_numbers=8)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["rhat", "ess", "mcse", "convergence", "psis", "loo"])
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_chunks_equal_the_whole_and_the_single_quantities(name):
    x = torch.randn(3, 40, 2, 5, dtype=torch.float64)
    function = getattr(bdl, name)
    whole = leaves(function(x))
    with working_memory(8 * 360):
        parts = leaves(function(x))
    for one, other in zip(whole, parts, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    for one, other in zip(whole, leaves(function(x[:, :, 1, 3])), strict=True):
        assert one.shape[-2:] == (2, 5)
        torch.testing.assert_close(one[..., 1, 3], other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["rhat", "ess", "mcse", "convergence", "psis", "loo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_every_dtype_is_computed_in_double_and_leaves_the_graph(name, dtype):
    x = (5 * torch.randn(4, 50, 3)).to(dtype)
    function = getattr(bdl, name)
    given = x.clone().requires_grad_() if dtype.is_floating_point else x
    for one, other in zip(leaves(function(given)), leaves(function(x.double())), strict=True):
        assert not one.requires_grad
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def leaves(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = result if isinstance(result, tuple) else vars(result).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def test_no_quantities():
    assert bdl.rhat(torch.randn(4, 10, 0)).shape == (0,)
    assert bdl.ess(torch.randn(4, 10, 3, 0)).shape == (3, 0)


@pytest.mark.parametrize("draws", [6, 7])
def test_halves_leave_out_the_middle_draw(draws):
    x = torch.arange(2.0 * draws).reshape(1, 2, draws)
    halves = {tuple(half.tolist()) for half in split_chains(x)[0]}
    expected = {tuple(part.tolist()) for row in x[0] for part in (row[:3], row[-3:])}
    assert halves == expected


@pytest.mark.parametrize("name", ["rhat", "ess", "mcse", "convergence", "psis", "loo"])
def test_bad_input(name):
    function = getattr(bdl, name)
    with pytest.raises(ValueError, match=r"shape \(10,\)"):
        function(torch.randn(10))
    with pytest.raises(ValueError, match="4 draws"):
        function(torch.randn(4, 3, 2))
    with pytest.raises(TypeError, match="ndarray"):
        function(np.zeros((4, 10)))
    with pytest.raises(TypeError, match="real"):
        function(torch.zeros(4, 10, dtype=torch.complex64))


@pytest.mark.parametrize("name", ["rhat", "ess", "mcse", "convergence", "psis", "loo"])
@pytest.mark.parametrize("decimals", [0, 12])
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_same_on_another_device(name, decimals, device):
    x = torch.randn(4, 101, 20, dtype=torch.float64).round(decimals=decimals)
    x[0, 3, 4] = torch.nan
    x[1, 3, 5] = torch.inf
    function = getattr(bdl, name)
    for one, other in zip(leaves(function(x.to(device))), leaves(function(x)), strict=True):
        assert one.device.type == device.type
        one, other = one.cpu(), other
        if name == "psis":  # which of several equal ratios are in the tail is left open
            one, other = one.sort(0).values, other.sort(0).values
            one, other = (
                t.flatten(0, 1).sort(0).values if t.dim() > 1 else t for t in (one, other)
            )
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13, equal_nan=True)
