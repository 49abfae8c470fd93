"""NumPyro's HMC and NUTS on a Pyro program that is translated to JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from numpyro.infer import HMC, NUTS
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Settings, Target
from pyro_bdl.mcmc.jax import chains
from pyro_bdl.mcmc.jax.chains import Kernel, Stage


def run(
    target: Target, start: Tensor, settings: Settings, state: Mapping[str, Tensor] | None = None
) -> Chains:
    """Sample ``target`` from the starting vectors (chains, P).

    :param state: ``Chains.state`` of an earlier run, from which the chains go on.
    :raises RuntimeError: in a process that was forked after JAX was used, or without a device.
    """
    return chains.run(target, start, settings, kernel, state)


def kernel(log_density: Callable[[jax.Array], jax.Array], settings: Settings, size: int) -> Kernel:
    """NumPyro's kernel, which adapts by the number of its iterations."""
    sampler = (NUTS if settings.kernel == "nuts" else HMC)(
        potential_fn=jax.jit(lambda vector: -log_density(vector)),
        dense_mass=settings.dense_mass,
        inverse_mass_matrix=settings.inverse_mass,
        **settings.kernel_options(),
    )

    def init(keys: jax.Array, starts: jax.Array) -> Any:
        return sampler.init(
            keys, settings.num_warmup, init_params=starts, model_args=(), model_kwargs={}
        )

    stages = (Stage(settings.num_warmup, keep=False), Stage(settings.num_samples, keep=True))
    return Kernel(init, lambda state: sampler.sample(state, (), {}), _kept, stages)


def _kept(state: Any) -> dict[str, jax.Array]:
    return {
        "vector": state.z,
        "potential_energy": state.potential_energy,
        "energy": state.energy,
        "num_steps": state.num_steps,
        "accept_prob": state.accept_prob,
        "step_size": state.adapt_state.step_size,
        "diverging": state.diverging,
    }
