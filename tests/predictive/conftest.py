"""Fixtures of the tests of predictions."""

import functools

import pytest


@pytest.fixture
def full_covariance(covariance):
    """The exact covariance of a Laplace guide in R^P."""

    def compute(guide):
        put = functools.partial(guide.subset.put, guide.loc * 0)
        return put(put(covariance(guide)).mT.contiguous())

    return compute
