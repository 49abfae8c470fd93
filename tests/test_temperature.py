"""Schedules have the shapes they say, and the scaling with the width its ratio."""

import math

import pytest

from pyro_bdl import temperature


def test_constant():
    assert [temperature.constant(0.3)(step) for step in (0, 10)] == [0.3, 0.3]


def test_linear():
    schedule = temperature.linear(0.2, 1.0, 4)
    assert [schedule(step) for step in range(7)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    )
    assert temperature.linear(1.0, 0.5, 1)(1) == 0.5


def test_cosine():
    schedule = temperature.cosine(0.1, 1.1, 4)
    expected = [0.1 + 0.5 * (1 - math.cos(math.pi * t / 4)) for t in range(4)] + [1.1, 1.1]
    assert [schedule(step) for step in range(6)] == pytest.approx(expected)
    assert schedule(2) == pytest.approx(0.6)


def test_cyclical():
    """A straight line in each period (Fu et al. 2019)."""
    schedule = temperature.cyclical(0.1, 1.1, period=10, ramp=0.4)
    expected = [0.1, 0.35, 0.6, 0.85] + [1.1] * 6
    assert [schedule(step) for step in range(20)] == pytest.approx(expected * 2)
    assert temperature.cyclical(0.5, 1.0, 2, ramp=1.0)(1) == pytest.approx(0.75)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        temperature.constant,
        lambda t: temperature.linear(t, 1.0, 5),
        lambda t: temperature.cosine(1.0, t, 5),
        lambda t: temperature.cyclical(t, 1.0, 5),
        lambda t: temperature.overparameterized(t, 1, 1),
    ],
)
def test_bad_temperatures(make, bad):
    with pytest.raises(ValueError, match="positive finite"):
        make(bad)


def test_bad_lengths():
    with pytest.raises(ValueError, match="steps"):
        temperature.linear(0.1, 1.0, 0)
    with pytest.raises(ValueError, match="period"):
        temperature.cyclical(0.1, 1.0, 0)
    for ramp in (0.0, 1.5):
        with pytest.raises(ValueError, match="ramp"):
            temperature.cyclical(0.1, 1.0, 5, ramp=ramp)


def test_overparameterized():
    """eta = tau p / N (Huix et al. 2022)."""
    assert temperature.overparameterized(2.0, num_data=100, num_neurons=400) == 0.5
    with pytest.raises(ValueError, match="at least 1"):
        temperature.overparameterized(1.0, 0, 5)
