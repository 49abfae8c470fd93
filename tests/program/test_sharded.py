"""Parameters that are sharded over processes are refused by name, before anything is drawn."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError

ADVICE = r"is sharded over processes .*DataParallel_ELBO.*AutoLastLayer"


@pytest.fixture
def sharded():
    """A layer with a weight in pieces, on a group of one process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    layer = nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    yield layer
    torch.distributed.destroy_process_group()


def test_bayesianize(sharded):
    with pytest.raises(UnsupportedProgramError, match=f"'weight' of Linear {ADVICE}"):
        bdl.bayesianize(nn.Sequential(sharded, nn.Tanh()))


def test_a_program_of_ones_own(sharded):
    class Program(PyroModule):
        def __init__(self):
            super().__init__()
            self.features = sharded
            self.w = PyroSample(dist.Normal(torch.zeros(2), 1.0).to_event(1))

        def forward(self, x, y=None):
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(self.features(x) @ self.w, 1.0), obs=y)

    guide = bdl.guides.AutoMeanField(Program())
    with pytest.raises(UnsupportedProgramError, match=f"'weight' of Linear {ADVICE}"):
        guide.prototype(torch.ones(4, 3), torch.ones(4))


def test_the_wrapper_of_fsdp():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self._flat_param = nn.Parameter(torch.zeros(8))

    with pytest.raises(UnsupportedProgramError, match=ADVICE):
        bdl.bayesianize(FullyShardedDataParallel())
