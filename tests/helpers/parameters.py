"""Parameters of programs that methods learn."""

import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch.distributions import constraints

from pyro_bdl import priors


def learned(value, constraint=constraints.positive):
    return PyroParam(torch.as_tensor(value), constraint=constraint)


class AroundOne(priors.Prior):
    """Independent Normals around 1."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, name, module, parameter):
        base = dist.Normal(parameter.new_ones(()), self._value("scale", parameter))
        return base.expand(parameter.shape).to_event(parameter.dim())
