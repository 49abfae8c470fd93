"""Parameters of programs that methods learn."""

import torch
from pyro.nn import PyroParam
from torch.distributions import constraints


def learned(value, constraint=constraints.positive):
    return PyroParam(torch.as_tensor(value), constraint=constraint)
