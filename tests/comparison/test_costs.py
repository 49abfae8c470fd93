"""Memory, numbers held and time of a draw."""

import sys

import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import pyro_bdl as bdl
from pyro_bdl.comparison.costs import numbers_held, peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_is_what_the_block_took():
    with peak_memory(torch.device("cpu")) as peak:
        held = torch.ones(2**24)  # 64 MiB
        del held
    assert 60 * 2**20 < peak.bytes < 200 * 2**20
    with peak_memory(torch.device("cpu")) as small:
        torch.ones(10)
    assert small.bytes < 20 * 2**20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_on_a_gpu_is_exact():
    with peak_memory(torch.device("cuda")) as peak:
        held = torch.ones(2**20, device="cuda")
        del held
    assert peak.bytes == 4 * 2**20


def test_numbers_are_those_of_the_posterior():
    x, y = torch.randn(10, 3), torch.randn(10)
    model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(3, 1)), noise=1.0)
    assert numbers_held(bdl.guides.AutoMeanField(model).prototype(x, y)) == 2 * 4
    assert numbers_held(bdl.guides.AutoMAP(model).prototype(x, y)) == 4
    assert numbers_held(bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)) == 12
    theirs = AutoNormal(model)
    theirs(x, y)
    assert numbers_held(theirs) == 2 * 4
    assert numbers_held(bdl.Samples({"w": torch.zeros(2, 5, 3)})) == 30
    assert numbers_held(lambda: None) is None
