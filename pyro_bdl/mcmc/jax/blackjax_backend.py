"""BlackJAX's samplers on a Pyro program that is translated to JAX, where BlackJAX is installed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Settings, Target
from pyro_bdl.mcmc.jax import chains
from pyro_bdl.mcmc.jax.chains import Kernel, Stage

KERNELS = ("nuts", "hmc", "mclmc")
_STEPS = 20  # of mclmc in an iteration


class ChainState(NamedTuple):
    """One chain: its random key, BlackJAX's state, and the adapted settings."""

    key: jax.Array
    chain: Any
    tuned: Any
    info: dict[str, jax.Array]


def run(
    target: Target, start: Tensor, settings: Settings, state: Mapping[str, Tensor] | None = None
) -> Chains:
    """Sample ``target`` from the starting vectors (chains, P).

    The warm-up is BlackJAX's own: window adaptation for "nuts" and "hmc", and
    ``mclmc_find_L_and_step_size`` for "mclmc".

    :param state: ``Chains.state`` of an earlier run, from which the chains go on.
    :raises ImportError: if BlackJAX is not installed.
    """
    try:
        import blackjax
    except ImportError as error:
        raise ImportError(
            "backend='blackjax' needs BlackJAX: pip install blackjax, or use backend='numpyro'"
        ) from error
    make = _langevin if settings.kernel == "mclmc" else _hamiltonian

    def kernel(log_density: Callable, settings: Settings, size: int) -> Kernel:
        return make(blackjax, log_density, settings)

    return chains.run(target, start, settings, kernel, state)


def _hamiltonian(blackjax: Any, log_density: Callable, settings: Settings) -> Kernel:
    nuts = settings.kernel == "nuts"
    algorithm = blackjax.nuts if nuts else blackjax.hmc
    fixed = {} if nuts else {"num_integration_steps": 2**settings.max_tree_depth // 32}
    warm_up = blackjax.window_adaptation(
        algorithm, log_density, is_mass_matrix_diagonal=not settings.dense_mass,
        target_acceptance_rate=settings.target_accept, **fixed,
    )  # fmt: skip
    step = algorithm.build_kernel()
    limit = {"max_num_doublings": settings.max_tree_depth} if nuts else fixed

    def init(key: jax.Array, start: jax.Array) -> ChainState:
        own, first = jax.random.split(key)
        (chain, tuned), _ = warm_up.run(first, start, num_steps=settings.num_warmup)
        tuned = {k: jnp.asarray(tuned[k]) for k in ("step_size", "inverse_mass_matrix")}
        zero = chain.logdensity * 0
        nothing = {"accept_prob": zero, "energy": zero, "num_steps": zero, "diverging": zero > 0}
        return ChainState(own, chain, tuned, nothing)

    def iteration(state: ChainState) -> ChainState:
        key, own = jax.random.split(state.key)
        chain, info = step(own, state.chain, log_density, **state.tuned, **limit)
        energy = info.energy
        found = {
            "accept_prob": info.acceptance_rate,
            "energy": energy,
            "num_steps": jnp.asarray(info.num_integration_steps, energy.dtype),
            "diverging": info.is_divergent,
        }
        return ChainState(key, chain, state.tuned, found)

    def kept(state: ChainState) -> dict[str, jax.Array]:
        return {
            "vector": state.chain.position,
            "potential_energy": -state.chain.logdensity,
            "step_size": state.tuned["step_size"],
            **state.info,
        }

    return _kernel(init, iteration, kept, settings)


def _langevin(blackjax: Any, log_density: Callable, settings: Settings) -> Kernel:
    step = blackjax.mcmc.mclmc.build_kernel()
    steps = settings.thinning or _STEPS
    warm_up = max(10, steps * settings.num_warmup)
    fraction = 1 / (3 + 1 / 3)  # the second phase is longer by a third

    def init(key: jax.Array, start: jax.Array) -> ChainState:
        own, first, second = jax.random.split(key, 3)
        chain = blackjax.mcmc.mclmc.init(start, log_density, first)
        chain, tuned, _ = blackjax.mclmc_find_L_and_step_size(
            step, warm_up, chain, second, logdensity_fn=log_density,
            frac_tune1=fraction, frac_tune2=fraction, frac_tune3=fraction,
            desired_energy_var=settings.energy_variance,
        )  # fmt: skip
        zero = chain.logdensity * 0
        return ChainState(own, chain, tuned, {"energy_variance": zero, "diverging": zero > 0})

    def iteration(state: ChainState) -> ChainState:
        key, own = jax.random.split(state.key)

        def one(chain: Any, key: jax.Array) -> Any:
            chain, info = step(
                key, chain, log_density, state.tuned.inverse_mass_matrix, state.tuned.L,
                state.tuned.step_size,
            )  # fmt: skip
            return chain, (info.energy_change**2 / len(chain.position), ~info.nonans)

        chain, (squares, lost) = jax.lax.scan(one, state.chain, jax.random.split(own, steps))
        found = {"energy_variance": squares.mean(), "diverging": lost.any()}
        return ChainState(key, chain, state.tuned, found)

    def kept(state: ChainState) -> dict[str, jax.Array]:
        value = state.chain.logdensity
        return {
            "vector": state.chain.position,
            "potential_energy": -value,
            "step_size": state.tuned.step_size,
            "momentum_length": state.tuned.L,
            "num_steps": jnp.full(value.shape, 2 * steps),
            **state.info,
        }

    return _kernel(init, iteration, kept, settings)


def _kernel(init: Callable, iteration: Callable, kept: Callable, settings: Settings) -> Kernel:
    """The kernel of one chain, or of several with a leading axis; its warm-up is in ``init``."""

    def whole(keys: jax.Array, starts: jax.Array) -> Any:
        return jax.jit(jax.vmap(init) if starts.ndim == 2 else init)(keys, starts)

    def step(state: ChainState) -> ChainState:
        return (jax.vmap(iteration) if state.chain.position.ndim == 2 else iteration)(state)

    return Kernel(whole, step, kept, (Stage(settings.num_samples, keep=True),))
