"""Steps of chains in one compiled loop of JAX: a kernel's update, and the log density after it."""

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import MissingOperatorError, UnsupportedProgramError
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.program.jax_density import jax_density
from pyro_bdl.tracing.jax.ops.registry import aten
from pyro_bdl.tracing.jax.translate import KEYS, loss_to_jax
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten


class CompiledSteps:
    """Steps of all chains on all data. Random numbers are JAX's, from a key that torch draws.

    :param restriction: run with all data.
    :param start: positions (chains, P), on a CPU.
    :raises UnsupportedProgramError: for convolutions, which take longer there, and numbers of 64
        bits in a program of 32.
    :raises MissingOperatorError: for an operator without translation.
    """

    def __init__(self, kernel: StochasticKernel, restriction: Restriction, start: Tensor) -> None:
        self.kernel, self.double = kernel, start.dtype == torch.float64
        with jax.enable_x64(self.double):
            density: Any = jax_density(
                restriction.log_density, restriction.log_density_terms, start[0]
            )
        if aten.convolution.default in density.operators:
            raise UnsupportedProgramError("convolutions take longer there")
        if density.wide and not self.double:
            raise UnsupportedProgramError("it computes numbers of 64 bits")
        self._scores = jax.vmap(jax.value_and_grad(density))
        self._loops: dict[Any, Any] = {}  # by all that is no tensor

    def __call__(
        self, state: Any, gradient: Tensor, limit: Tensor, count: int, *, size: float,
        temperature: float,
    ) -> tuple[int, Any, Tensor, Tensor] | None:  # fmt: skip
        """Take steps up to the first after which a log density is not finite or below the limit.

        :param gradient: of the log density at the state, (chains, P).
        :param limit: (chains,).
        :param count: the largest number of steps.
        :returns: the number of steps, the state, the log densities (chains,) and their gradient;
            None where a step adds a tensor to the state, or has no translation.
        """
        leaves, structure = tree_flatten(state)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[i] for i in places]
        rest = {i: leaf for i, leaf in enumerate(leaves) if i not in places}

        def rebuilt(values: Any) -> Any:
            known = rest | dict(zip(places, values, strict=True))
            return tree_unflatten([known[i] for i in range(len(leaves))], structure)

        key = size, temperature, str(structure), repr(rest)
        with jax.enable_x64(self.double):
            if key not in self._loops:

                def update(*tensors: Tensor) -> list[Tensor]:
                    moved = self.kernel.update(
                        rebuilt(tensors[:-1]), tensors[-1], size, temperature
                    )
                    return [leaf for leaf in tree_flatten(moved)[0] if isinstance(leaf, Tensor)]

                with own_randomness():
                    examples = [*tensors, gradient]
                    same = len(update(*examples)) == len(tensors)
                    self._loops[key] = None
                    with suppress(MissingOperatorError):
                        self._loops[key] = self._loop(update, rebuilt, examples) if same else None
            if self._loops[key] is None:
                return None
            seed = int(torch.randint(2**31, (), device="cpu"))
            arrays = [jnp.asarray(tensor.numpy()) for tensor in (*tensors, gradient, limit)]
            results = self._loops[key](
                arrays[:-2], *arrays[-2:], jax.random.key(seed, impl=KEYS), count
            )
            taken, moved, values, gradients = jax.device_get(results)
        found = [torch.from_numpy(np.array(value)) for value in (*moved, values, gradients)]
        return int(taken), rebuilt(found[:-2]), *found[-2:]

    def _loop(self, update: Any, rebuilt: Any, examples: list[Tensor]) -> Any:
        """The compiled loop.

        :param update: from the tensors of a state and a gradient to those of the next state.
        :param rebuilt: from the tensors, or arrays, of a state to the state.
        """
        translated = loss_to_jax(update, [], examples)
        constants = [jnp.asarray(constant) for constant in translated.constants]

        def run(state: list, gradient: Any, limit: Any, key: Any, count: Any) -> Any:
            def body(carry: Any) -> Any:
                i, _, state, _, gradient = carry
                own = jax.random.fold_in(key, i)
                state = list(translated.function([], constants, own, *state, gradient))
                values, gradient = self._scores(rebuilt(state).position)
                sound = ((values >= limit) & (values < jnp.inf)).all()
                return i + 1, sound, state, values, gradient

            start = jnp.array(0), jnp.array(True), state, limit, gradient
            end = jax.lax.while_loop(lambda c: (c[0] < count) & c[1], body, start)
            return end[0], *end[2:]

        return jax.jit(run)
