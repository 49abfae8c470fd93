"""R-hat and ESS by site."""

import numpy as np
import pytest
import torch

from pyro_bdl import diagnostics, plots


def test_rows_are_quantiles_of_each_site():
    draws = {"weight": torch.randn(4, 50, 6, 2), "bias": torch.randn(4, 50, 5)}
    summary = diagnostics.summary(draws, ess_limit=150)
    left, right = plots.convergence(summary).axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["weight", "bias"]
    for row, found in enumerate(summary.by_site.values()):
        for axis, values in ((left, found.rhat), (right, found.ess_bulk)):
            reach, half, middle = axis.lines[3 * row : 3 * row + 3]
            low, lower, median, upper, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
            np.testing.assert_allclose(reach.get_xdata(), [low, high])
            np.testing.assert_allclose(half.get_xdata(), [lower, upper])
            np.testing.assert_allclose(middle.get_xdata(), [median])
    assert left.lines[-1].get_xdata() == [summary.rhat_limit] * 2
    assert right.lines[-1].get_xdata() == [150, 150]


def test_constants_are_left_out_and_the_worst_of_many_sites_shown():
    draws = {f"site {i}": torch.randn(2, 8) for i in range(50)}
    draws["site 45"] = draws["site 45"] + 9 * torch.arange(2.0)[:, None]
    draws["constant"] = torch.ones(2, 8)
    left, _ = plots.convergence(diagnostics.summary(draws)).axes
    shown = [text.get_text() for text in left.get_yticklabels()]
    assert len(shown) == 40 and "site 45" in shown and "constant" not in shown
    with pytest.raises(ValueError, match="all are constant"):
        plots.convergence(diagnostics.summary({"a": torch.ones(2, 8)}))
