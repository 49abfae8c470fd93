"""Every test starts from the same seed, an empty parameter store and one thread."""

import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh():
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(torch.float32)
