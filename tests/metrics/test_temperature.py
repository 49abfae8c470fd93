"""Temperature scaling against closed forms."""

import math

import pytest
import torch

from pyro_bdl.metrics.temperature import best_temperature, calibrated_nlpd, tempered


def two(logits):
    """Probabilities of two classes."""
    return torch.stack([-logits, logits], -1).div(2).softmax(-1)


def test_of_a_normal_it_is_the_mean_squared_standardized_residual():
    torch.manual_seed(0)
    mean, variance, y = torch.randn(3, 50, 2).double().exp().unbind()
    ratios = ((y - mean) ** 2 / variance).mean(1)
    value, error = best_temperature(mean, variance, y)
    assert value == pytest.approx(ratios.mean().item(), rel=1e-12)
    assert error == pytest.approx(ratios.std().item() / math.sqrt(50), rel=1e-12)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_classes_whose_frequencies_are_known(factor):
    """Logits log 3 and log 7, times a factor: 3 of 4 and 7 of 8 rows are of the second class."""
    logits = factor * torch.tensor([3.0] * 4 + [7.0] * 8).double().log()
    y = torch.tensor([1] * 3 + [0] + [1] * 7 + [0])
    assert best_temperature(two(logits).log(), None, y)[0] == pytest.approx(factor, rel=1e-9)
    exact = torch.tensor([0.25, 0.75]).double()
    torch.testing.assert_close(tempered(two(logits[:1]), factor)[0], exact)


def test_the_error_of_one_logit_is_that_of_a_frequency():
    """T = l / logit(p), with sd(p) = sqrt(p (1 - p) / N)."""
    logit, y = 2.0, torch.arange(4).clamp_max(1).repeat(100)
    value, error = best_temperature(two(torch.full((400,), logit).double()).log(), None, y)
    assert value == pytest.approx(logit / math.log(3))
    expected = value**2 / logit / math.sqrt(400 * 0.75 * 0.25)
    assert error == pytest.approx(expected, rel=2e-3)  # N or N - 1


def test_where_the_likelihood_has_no_maximum():
    p = two(torch.tensor([5.0, 4.0])).log()
    for label, end in ((1, 0.01), (0, 100)):  # where there is no maximum, and no error
        assert best_temperature(p, None, torch.tensor([label] * 2)) == (
            pytest.approx((end, torch.nan), nan_ok=True)
        )
    even = torch.full((4, 2), 0.5).log()
    assert best_temperature(even, None, torch.zeros(4)) == pytest.approx(
        (1, torch.nan), nan_ok=True
    )


def test_the_calibrated_density_forgets_the_temperature_and_scores_held_out_halves():
    torch.manual_seed(1)
    p, labels = torch.randn(40, 3).double().softmax(-1), torch.randint(0, 3, (40,))
    expected = calibrated_nlpd(p.log(), None, labels)
    torch.testing.assert_close(calibrated_nlpd(tempered(p, 3.0).log(), None, labels), expected)
    best = tempered(p, best_temperature(p.log(), None, labels)[0])
    assert expected.mean() > -best.gather(1, labels[:, None]).log().mean()  # not of the same rows
    y = torch.tensor([2.0, -2.0]).repeat(10).double()
    exact = 0.5 * math.log(2 * math.pi * 4) + 0.5
    for variance in (0.1, 1.0, 9.0):
        values = calibrated_nlpd(torch.zeros_like(y), torch.full_like(y, variance), y)
        torch.testing.assert_close(values, torch.full_like(y, exact))


def test_probabilities_that_are_not_finite_have_no_temperature():
    p = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    p[2] = torch.nan
    found = best_temperature(p.log(), None, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert all(map(math.isnan, found))


@pytest.mark.parametrize("gap", [10.0, 80.0, 300.0, 800.0])
def test_probabilities_that_underflow_have_a_temperature(gap):
    """Logits +-gap with 3 of 4 labels right: T = gap / log 3, also where exp(-gap) is zero."""
    logits = torch.tensor([-gap / 2, gap / 2]).expand(40, 2)
    y = (torch.arange(40) % 4 > 0).long()
    value, _ = best_temperature(logits.log_softmax(1), None, y)
    assert value == pytest.approx(min(gap / math.log(3), 100.0), rel=1e-6)


def test_calibrated_values_stand_at_their_points():
    """One target far from its mean has by far the largest value, wherever it stands."""
    for place in range(24):
        y = torch.linspace(-1, 1, 24).double()
        y[place] = 20.0
        values = calibrated_nlpd(torch.zeros(24), torch.ones(24), y)
        assert values.argmax() == place
