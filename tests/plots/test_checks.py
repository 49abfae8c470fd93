"""Posterior predictive checks: bands with the coverage they state, and what panels show."""

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from scipy import stats

from pyro_bdl import metrics, plots
from pyro_bdl.plots.checks import uniform_band
from pyro_bdl.plots.predictions import law_of_sum


@pytest.mark.parametrize("count", [12, 80, 1000])
def test_lines_of_uniform_numbers_stay_within_the_band_in_95_of_100_cases(count):
    u, low, high = uniform_band(count)
    rng, repeats = np.random.default_rng(7), 2000
    values = np.sort(rng.random((repeats, count)), axis=1)
    lines = (values[:, :, None] <= u).mean(1) if count < 100 else None
    if lines is None:
        lines = np.stack([np.searchsorted(row, u, side="right") for row in values]) / count
    inside = ((lines - u >= low - 1e-12) & (lines - u <= high + 1e-12)).all(1).mean()
    assert inside == pytest.approx(0.95, abs=3.5 * (0.95 * 0.05 / repeats) ** 0.5)
    # each end alone is wider than the pointwise one
    pointwise = stats.binom(count, u).ppf(0.975) / count - u
    assert (high >= pointwise).all() and (high > pointwise).any()


def test_lines_of_pits_and_numbers_that_were_not_seen(draws):
    pit = {name: torch.rand(40).double() for name in draws}
    pit["map"] = pit["map"] ** 3
    pit["nuts"][3] = torch.nan
    figure = plots.pit_ecdf(pit, reference="nuts")
    for axis, (name, values) in zip(figure.axes, pit.items(), strict=True):
        known = values[~values.isnan()].numpy()
        u, low, high = uniform_band(len(known))
        line = axis.lines[-1]
        expected = [(known <= at).mean() - at for at in u]
        np.testing.assert_allclose(line.get_ydata(), expected, atol=1e-12)
        outside = (line.get_ydata() > high).any() or (line.get_ydata() < low).any()
        assert (line.get_linewidth() > 2) == outside
        assert outside or name != "map"


def test_densities_integrate_to_one_and_whole_numbers_have_shares():
    torch.manual_seed(0)
    y = torch.randn(60)
    figure = plots.ppc({"a": torch.randn(100, 60), "b": 3 * torch.randn(20, 60)}, y, reference="b")
    for axis in figure.axes:
        assert len(axis.lines) == 20 + 2  # draws, targets and the mark in the title
    grid, density = figure.axes[0].lines[-1].get_data()
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-3)
    width = 0.9 * min(y.double().std(correction=0), stats.iqr(y) / 1.349) * 60**-0.2
    at = stats.norm.pdf(grid[50], y.numpy(), width).mean()
    assert density[50] == pytest.approx(at, rel=1e-6)
    counts = torch.poisson(torch.full((60,), 2.0))
    figure = plots.ppc({"a": torch.poisson(torch.full((30, 60), 2.0))}, counts)
    grid, shares = figure.axes[0].lines[-1].get_data()
    assert shares.tolist() == [(counts == value).double().mean().item() for value in grid]


def test_statistics_leave_out_what_was_not_seen():
    torch.manual_seed(0)
    y, draws = torch.randn(20), torch.randn(200, 20)
    y[4], draws[:, 4] = torch.nan, 1000.0
    chosen = {"largest": lambda v: v.amax(-1), "mean": lambda v: v.mean(-1)}
    figure = plots.ppc({"a": draws, "b": draws + 1}, y, statistics=chosen)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["a: largest", "a: mean", "b: largest", "b: mean"]
    seen = ~y.isnan()
    share = (draws[:, seen].amax(-1) > y[seen].max()).double().mean().item()
    assert figure.axes[0].get_xlabel() == f"p = {share:.2g}"
    assert figure.axes[0].lines[-1].get_xdata()[0] == pytest.approx(y[seen].max().item())


def test_residuals_of_right_predictions_are_standard_normal_in_groups_of_the_input():
    torch.manual_seed(0)
    x, pit = torch.rand(200), torch.rand(200).double()
    pit[7] = torch.nan
    figure = plots.residuals(x, {"a": pit})
    _, dots, *means = figure.axes[0].lines[:-1]  # the first is the mark in the title
    known = ~pit.isnan()
    z = torch.special.ndtri(pit[known])
    order = x[known].argsort()
    np.testing.assert_allclose(dots.get_ydata(), z[order].numpy())
    groups = np.array_split(z[order].numpy(), 10)
    np.testing.assert_allclose([m.get_ydata()[0] for m in means], [g.mean() for g in groups])
    ends = [band.get_paths()[0].vertices[:, 1].max() for band in figure.axes[0].collections]
    np.testing.assert_allclose(ends, [2.5758293 / len(g) ** 0.5 for g in groups])


def test_bars_of_a_reliability_diagram_hold_99_of_100_shares():
    torch.manual_seed(0)
    p = torch.rand(12, dtype=torch.float64)
    law = np.ones(1)
    for each in p.tolist():
        law = np.convolve(law, [1 - each, each])
    np.testing.assert_allclose(law_of_sum(p.numpy()), law, atol=1e-14)
    confidence = 0.5 + 0.5 * torch.rand(400, dtype=torch.float64)
    probabilities = torch.stack([confidence, 1 - confidence], 1)
    outside = total = 0
    for _ in range(60):
        y = (torch.rand(400) > confidence).long()
        figure = plots.calibration({"a": probabilities}, y, task="classification")
        (bars,) = (c for c in figure.axes[0].collections if isinstance(c, LineCollection))
        observed = figure.axes[0].lines[-1].get_ydata()
        for value, ((_, low), (_, high)) in zip(observed, bars.get_segments(), strict=True):
            outside, total = outside + (not low <= value <= high), total + 1
    assert total == 300 and outside <= 8  # 3 expected at most


def test_coverage_leaves_out_targets_that_were_not_seen():
    torch.manual_seed(0)
    y, draws = torch.randn(30), torch.randn(80, 30)
    y[5:15] = torch.nan
    figure = plots.calibration({"a": draws}, y, task="regression")
    seen = ~y.isnan()
    expected = metrics.interval_coverage(
        draws[:, seen], y[seen], level=(np.arange(1, 20) / 20).tolist()
    )
    np.testing.assert_allclose(figure.axes[0].lines[-1].get_ydata(), expected)
