"""Microcanonical chains on a Pyro program that is translated to JAX."""

from collections.abc import Mapping

from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Settings, Target
from pyro_bdl.mcmc.jax import chains
from pyro_bdl.mcmc.microcanonical import adjusted, langevin


def run(
    target: Target, start: Tensor, settings: Settings, state: Mapping[str, Tensor] | None = None
) -> Chains:
    """Sample ``target`` from the starting vectors (chains, P).

    :param state: ``Chains.state`` of an earlier run, from which the chains go on.
    :raises ValueError: for a posterior of a single number.
    :raises RuntimeError: in a process that was forked after JAX was used, or without a device.
    """
    kernel = langevin.kernel if settings.kernel == "mclmc" else adjusted.kernel
    return chains.run(target, start, settings, kernel, state)
