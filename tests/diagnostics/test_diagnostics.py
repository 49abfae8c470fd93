"""R-hat, ESS and MCSE equal ArviZ (0.23 and 1.3), and bound their memory."""

import logging

import arviz
import numpy as np
import pytest
import torch
from scipy.stats import norm, rankdata

from pyro_bdl.diagnostics import ess, mcse, rhat
from pyro_bdl.diagnostics.blocks import map_blocks
from pyro_bdl.diagnostics.rank import average_ranks, normal_scores

STATISTICS = {
    "rhat": (rhat, arviz.rhat),
    "bulk": (ess, arviz.ess),
    "tail": (
        lambda x: ess(x, kind="tail"),
        lambda x: arviz.ess(x, method="tail", prob=(0.05, 0.95)),
    ),
    "mean": (lambda x: ess(x, kind="mean"), lambda x: arviz.ess(x, method="mean")),
    "mcse": (mcse, arviz.mcse),
}


def autoregressive(rng, chains, draws, quantities, coefficient):
    noise = rng.standard_normal((chains, draws, quantities))
    x = np.zeros_like(noise)
    x[:, 0] = noise[:, 0]
    for t in range(1, draws):
        x[:, t] = coefficient * x[:, t - 1] + noise[:, t]
    return x


def cases():
    rng = np.random.default_rng(0)
    smooth = rng.standard_normal((4, 100, 6))
    with_nan = smooth.copy()
    with_nan[1, 3, 2] = np.nan
    with_infinity = smooth.copy()
    with_infinity[1, 3, 2] = np.inf
    with_infinity[2, 5, 2] = -np.inf
    with_infinity[0, 7, 4] = np.inf
    constant = smooth.copy()
    constant[..., 1] = 0.1
    return {
        "random": smooth,
        "apart": smooth + 0.3 * np.arange(4)[:, None, None],
        "unequal spread": smooth * (1 + np.arange(4))[:, None, None],
        "slow": autoregressive(rng, 3, 150, 6, 0.95),
        "antithetic": autoregressive(rng, 4, 120, 6, -0.8),
        "heavy tails": rng.standard_cauchy((4, 100, 6)),
        "ties": np.round(smooth * 2) / 2,
        "integers": rng.integers(0, 4, (4, 100, 6)).astype(float),
        "odd draws": rng.standard_normal((4, 101, 6)),
        "one chain": autoregressive(rng, 1, 90, 6, 0.5),
        "two by five": rng.standard_normal((2, 5, 200)),
        "four draws": rng.standard_normal((2, 4, 20)),
        "six draws": rng.standard_normal((2, 6, 50)),
        "nan": with_nan,
        "infinity": with_infinity,
        "one constant": constant,
    }


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("case", cases())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_equals_arviz(case, name):
    ours, theirs = STATISTICS[name]
    x = cases()[case]
    logging.getLogger("arviz").setLevel(logging.ERROR)
    expected = np.array([theirs(x[..., i]) for i in range(x.shape[-1])], dtype=float)
    np.testing.assert_allclose(ours(torch.from_numpy(x)).numpy(), expected, rtol=1e-10, atol=1e-15)


def test_trailing_axes_and_scalars():
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 40, 2, 5)))
    for ours, _ in STATISTICS.values():
        batched = ours(x)
        assert batched.shape == (2, 5)
        assert batched.dtype == torch.float64
        torch.testing.assert_close(batched[1, 3], ours(x[:, :, 1, 3]), rtol=1e-12, atol=0)
        assert ours(x[..., 0, 0]).shape == ()


def test_single_precision_is_computed_in_double_and_leaves_the_graph():
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 50, 3)).astype(np.float32))
    for ours, _ in STATISTICS.values():
        result = ours(x.clone().requires_grad_())
        assert not result.requires_grad
        torch.testing.assert_close(result, ours(x.double()), rtol=0, atol=0)


def test_known_values():
    constant = torch.full((4, 10), 0.1, dtype=torch.float64)
    assert torch.isnan(rhat(constant))
    assert ess(constant) == 40
    assert torch.isnan(rhat(torch.randn(1, 20)))
    stuck = torch.arange(2.0)[:, None].expand(2, 20)
    assert rhat(stuck) > 1e6


@pytest.mark.parametrize("shape", [(7,), (3, 9), (2, 4, 1)])
def test_ranks_with_ties(shape):
    rng = np.random.default_rng(3)
    for x in (rng.standard_normal(shape), rng.integers(0, 3, shape).astype(float)):
        expected = rankdata(x, axis=-1)
        np.testing.assert_array_equal(average_ranks(torch.from_numpy(x)).numpy(), expected)
        scores = norm.ppf((expected - 3 / 8) / (shape[-1] + 1 / 4))
        got = normal_scores(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(got, scores, rtol=1e-12, atol=1e-15)


def test_blocks_see_every_quantity_once_and_stay_small():
    x = torch.arange(2 * 5 * 7, dtype=torch.float32).reshape(2, 5, 7)
    sizes = []

    def total(block):
        sizes.append(block.numel())
        return block.sum((1, 2))

    result = map_blocks(total, x, block_numbers=30)
    torch.testing.assert_close(result, x.double().sum((0, 1)))
    assert sizes == [30, 30, 10]


@pytest.mark.parametrize("ours", [rhat, ess, mcse])
def test_bad_input(ours):
    with pytest.raises(ValueError, match=r"shape \(10,\)"):
        ours(torch.randn(10))
    with pytest.raises(ValueError, match="4 draws"):
        ours(torch.randn(4, 3, 2))
    with pytest.raises(TypeError, match="ndarray"):
        ours(np.zeros((4, 10)))
    with pytest.raises(TypeError, match="real"):
        ours(torch.zeros(4, 10, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'bulk', 'tail'"):
        ess(torch.randn(4, 10), kind="middle")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["random", "ties", "antithetic", "nan", "odd draws"])
def test_same_on_the_gpu(case):
    x = torch.from_numpy(cases()[case])
    for ours, _ in STATISTICS.values():
        on_gpu = ours(x.cuda())
        assert on_gpu.device.type == "cuda"
        torch.testing.assert_close(on_gpu.cpu(), ours(x), rtol=1e-10, atol=1e-14, equal_nan=True)
