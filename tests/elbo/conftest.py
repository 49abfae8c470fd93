"""Fixtures of the tests of the compiled ELBO."""

import warnings

import pytest

from pyro_bdl.errors import BdlWarning


@pytest.fixture
def compiled():
    """Fail if a program runs uncompiled, unless the test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=BdlWarning, message="CompiledELBO")
        yield
