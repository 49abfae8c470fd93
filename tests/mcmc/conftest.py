"""The exact posterior of linear regression, and a clock, for every sampler."""

import itertools

import pytest
from helpers.conjugate import Conjugate


@pytest.fixture(scope="session")
def exact_posterior():
    """Mean and covariance for prior N(0, 1) and likelihood N(x w, 0.5^2)^(1/temperature)."""

    def compute(x, y, temperature=1.0):
        exact = Conjugate(x, y, 0.5, eta=temperature)
        return exact.mean, exact.covariance

    return compute


@pytest.fixture
def slow_clock(monkeypatch):
    """Ten seconds pass between two looks at the clock: chains run in blocks of one iteration, and
    a checkpoint is written after each."""
    monkeypatch.setattr("time.perf_counter", itertools.count(0.0, 10.0).__next__)
