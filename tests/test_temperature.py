"""Schedules have the shapes they say, and the scaling with the width its ratio."""

import math

import pytest

from pyro_bdl import temperature

SCHEDULES = {
    "linear": (temperature.linear(0.2, 1.0, 4), [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]),
    "cosine": (
        temperature.cosine(0.1, 1.1, 4),
        [0.1 + 0.5 * (1 - math.cos(math.pi * t / 4)) for t in range(4)] + [1.1, 1.1],
    ),
    "cyclical": (  # a straight line in each period (Fu et al. 2019)
        temperature.cyclical(0.1, 1.1, period=10, ramp=0.4),
        2 * ([0.1, 0.35, 0.6, 0.85] + [1.1] * 6),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    schedule, expected = SCHEDULES[name]
    assert [schedule(step) for step in range(len(expected))] == pytest.approx(expected)


def test_overparameterized():
    """eta = tau p / N (Huix et al. 2022)."""
    assert temperature.overparameterized(2.0, num_data=100, num_neurons=400) == 0.5


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: temperature.linear(t, 1.0, 5),
        lambda t: temperature.cosine(1.0, t, 5),
        lambda t: temperature.cyclical(t, 1.0, 5),
        lambda t: temperature.overparameterized(t, 1, 1),
    ],
)
def test_bad_temperatures(make, bad):
    with pytest.raises(ValueError, match="positive and finite"):
        make(bad)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: temperature.linear(0.1, 1.0, 0), "steps"),
        (lambda: temperature.cyclical(0.1, 1.0, 0), "period"),
        (lambda: temperature.cyclical(0.1, 1.0, 5, ramp=1.5), "ramp"),
        (lambda: temperature.overparameterized(1.0, 0, 5), "at least 1"),
    ],
)
def test_bad_lengths(call, words):
    with pytest.raises(ValueError, match=words):
        call()
