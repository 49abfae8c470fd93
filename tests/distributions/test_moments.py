"""Moments whose own forms write by masks: the same numbers, also under ``vmap`` and in a graph."""

import pyro.distributions as dist
import pytest
import torch

from pyro_bdl.distributions.moments import observation_moments
from pyro_bdl.tracing.trace import trace_pure

DF = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 4.0, 5.0, 30.0])

WITH_MASKS = {
    "StudentT": lambda df: dist.StudentT(df, 2.0, 3.0),
    "StudentT of one df": lambda df: dist.StudentT(4.0, df, 3.0),
    "MultivariateStudentT": lambda df: dist.MultivariateStudentT(
        df, torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0.0], [0.5, 2.0]])
    ),
    "FisherSnedecor": lambda df: dist.FisherSnedecor(3.0, df),
}


@pytest.mark.parametrize("name", WITH_MASKS)
def test_the_same_numbers_as_torch(name):
    make = WITH_MASKS[name]
    expected = make(DF).mean, make(DF).variance
    graph = trace_pure(lambda df: observation_moments(make(df)), [DF])
    for found in (observation_moments(make(DF)), graph(DF)):
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other, equal_nan=True)
    mapped = torch.vmap(lambda df: observation_moments(make(df)))(torch.stack([DF, DF + 1.0]))
    torch.testing.assert_close(
        mapped[0][0], expected[0].broadcast_to(mapped[0][0].shape), equal_nan=True
    )
    torch.testing.assert_close(mapped[1][1], make(DF + 1.0).variance, equal_nan=True)
