"""NumPyro's HMC and NUTS as transitions of ``run``."""

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from numpyro.infer import HMC, NUTS
from numpyro.infer.hmc_util import build_adaptation_schedule

from pyro_bdl.mcmc.chains import Plan
from pyro_bdl.mcmc.kernels import HMC as Hmc
from pyro_bdl.mcmc.kernels import LONGEST, Hamiltonian
from pyro_bdl.mcmc.run import Stage, Transition

_LENGTHS = 2**32 - 1  # a small number here would be the key of the sampler's own split


def transition(
    log_density: Callable[[jax.Array], jax.Array], kernel: Hamiltonian, plan: Plan
) -> Transition:
    """NumPyro's kernel, which adapts by the number of its iterations."""
    metric = kernel.inverse_mass
    sampler = {"nuts": NUTS, "hmc": HMC}[kernel.name](
        potential_fn=lambda vector: -log_density(vector),
        dense_mass=kernel.dense_mass or (metric is not None and metric.ndim == 2),
        inverse_mass_matrix=metric,
        **kernel.shared_options(),
    )

    def init(key: jax.Array, start: jax.Array) -> Any:
        state = sampler.init(
            key, plan.num_warmup, init_params=start, model_args=(), model_kwargs={}
        )
        if metric is None:
            return state
        # The windows are those of the metric, and at the end of each the step size begins anew:
        # a metric that stays is in the last one from the start.
        last = len(build_adaptation_schedule(plan.num_warmup)) - 1
        adaptation = state.adapt_state._replace(window_idx=jnp.array(last))
        return state._replace(adapt_state=adaptation)

    def step(state: Any) -> tuple[Any, dict[str, jax.Array]]:
        jax.eval_shape(init, state.rng_key, state.z)  # it gives the sampler its adaptation
        if isinstance(kernel, Hmc):  # it takes the length over the step size, rounded up
            longest = (kernel.max_steps - 0.5) * state.adapt_state.step_size
            key = jax.random.fold_in(state.rng_key, _LENGTHS)
            drawn = LONGEST * jax.random.uniform(key)
            given = kernel.trajectory_length
            length = jnp.minimum(drawn if given is None else given, longest)
            state = state._replace(trajectory_length=length.astype(state.trajectory_length.dtype))
        state = sampler.sample(state, (), {})
        return state, {
            "vector": state.z,
            "potential_energy": state.potential_energy,
            "energy": state.energy,
            "num_steps": state.num_steps,
            "accept_prob": state.accept_prob,
            "step_size": state.adapt_state.step_size,
            "diverging": state.diverging,
        }

    return Transition(init, step, (Stage(plan.num_warmup),))
