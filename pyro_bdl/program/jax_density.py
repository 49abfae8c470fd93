"""A program's log density in JAX: for the kernels that run there, and as ``JaxDensity`` for any
sampler that is written in JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from pyro_bdl.errors import MissingOperatorError, UnsupportedProgramError
from pyro_bdl.program.program import Program
from pyro_bdl.program.samples import Samples, as_tensor
from pyro_bdl.tracing.jax.ops.registry import as_dtype
from pyro_bdl.tracing.jax.translate import JaxFunction, to_jax
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten


class JaxDensity:
    """log p(T(u), y) + log |det dT/du| in nats, as a JAX function of the unconstrained vector u
    (P,) and of the data; made by ``Program.to_jax``.

    ::

        density = bdl.Program(model, x, y).to_jax()
        density(u)                              # with the program's data
        density(u, x_batch, y_batch)            # with others, and the program's scaling by N/B
        density.value_and_grad(u, x_batch, y_batch)
        density.constrain(u)                    # site -> the latent, in its support
        samples = density.samples(vectors)      # draws of any sampler, as ``Samples``

    The functions can be jitted, differentiated and mapped. The program is traced once for each
    shape of the data; data of a shape seen before are arguments of the same function. Call all of
    it under ``jax.enable_x64(True)`` if the program is in float64. The program runs in evaluation
    mode.

    The translation covers torch's core ATen operators that occur in networks and distributions; the
    files of ``pyro_bdl/tracing/jax/ops`` list them by kind. Operators that torch decomposes into
    these need nothing. One line adds another::

        from pyro_bdl.tracing.jax.ops.registry import register

        @register(torch.ops.aten.special_entr)
        def entr(x):
            return jax.scipy.special.entr(x)

    :param program: the program, run with its data.
    :raises MissingOperatorError: if an operator has no translation; it names the site.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        program.require_observed()
        start = program.unconstrain(program.initial).detach()
        self._example = start
        with self._tracing():
            self._own = jax_density(program.log_density, program.log_density_terms, start)
            self._constrain = to_jax(lambda u: program.constrain(u)[0], start)
        self._with_data: dict[Any, Any] = {}

    @property
    def size(self) -> int:
        """P."""
        return self.program.size

    @property
    def initial(self) -> np.ndarray:
        """The vector (P,) of the latents that the program drew in its first run."""
        return self._example.cpu().numpy().copy()

    def __call__(self, vector: Any, *args: Any, **kwargs: Any) -> jax.Array:
        """The log density, a scalar.

        :param args: the program's arguments, of JAX, numpy or torch; none for those it was made
            with. Arguments that are no arrays are constants.
        """
        if not args and not kwargs:
            return self._own(vector)
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        arrays = [jnp.asarray(_array(leaves[i])) for i in places]
        constants = {i: leaf for i, leaf in enumerate(leaves) if i not in places}
        shapes = tuple((array.shape, str(array.dtype)) for array in arrays)
        key = structure, tuple(places), shapes, repr(constants)
        if key not in self._with_data:
            self._with_data[key] = self._translated(structure, constants, places, arrays)
        return self._with_data[key](vector, *arrays)

    def value_and_grad(self, vector: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The log density and its gradient (P,)."""
        return jax.value_and_grad(self.__call__)(vector, *args, **kwargs)

    def constrain(self, vector: Any) -> Mapping[str, jax.Array]:
        """The latents T(u) in their supports, site -> array; map it over several vectors."""
        return self._constrain(vector)

    def samples(self, vectors: Any, stats: Mapping[str, Any] | None = None) -> Samples:
        """``Samples`` of the draws of any sampler.

        :param vectors: unconstrained draws (chains, draws, P), or (draws, P) of one chain.
        :param stats: name -> (chains, draws).
        """
        tensor = as_tensor(vectors).to(self._example)
        if tensor.dim() not in (2, 3) or tensor.shape[-1] != self.size:
            raise ValueError(
                f"vectors must have shape (chains, draws, {self.size}), got {tuple(tensor.shape)}"
            )
        tensor = tensor[None] if tensor.dim() == 2 else tensor
        with torch.no_grad():
            latents = self.program.constrain(tensor)[0]
        values = {
            name: as_tensor(value).reshape(tensor.shape[:2])
            for name, value in (stats or {}).items()
        }
        return Samples(latents, values, {"backend": "jax"})

    def _tracing(self) -> Any:
        return evaluation_mode(self.program.modules)

    def _translated(
        self, structure: Any, constants: dict[int, Any], places: list[int], arrays: list[jax.Array]
    ) -> Any:
        """The translated function for arguments of these shapes."""
        program = self.program

        def log_density(vector: Tensor, *data: Tensor) -> Tensor:
            leaves = constants | dict(zip(places, data, strict=True))
            args, kwargs = tree_unflatten([leaves[i] for i in range(len(leaves))], structure)
            return program.log_density(vector, *args, **kwargs)

        own = [v for v in tree_flatten((program.args, program.kwargs))[0] if isinstance(v, Tensor)]
        examples = [_example_of(v, own, i) for i, v in enumerate(arrays)]
        with self._tracing(), jax.ensure_compile_time_eval():
            return jax_density(log_density, program.log_density_terms, self._example, *examples)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | jax.Array)


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _example_of(array: jax.Array, own: list[Tensor], place: int) -> Tensor:
    """A tensor of an array's shape, which has no values while JAX traces: rows of the program's own
    data where the shapes fit, else zeros."""
    if place < len(own):
        data = own[place]
        if data.shape[1:] == array.shape[1:] and len(data) and data.dim() == array.ndim > 0:
            if jax.dtypes.canonicalize_dtype(as_dtype(data)) != array.dtype:
                raise TypeError(
                    f"the program's data hold {data.dtype} where {array.dtype} is given: convert "
                    "them, and call it under jax.enable_x64(True) for float64"
                )
            return data[torch.arange(array.shape[0], device=data.device) % len(data)]
    return torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype)), device="cpu")


_WAY_OUT = 'Sample with backend="pyro", which runs any program.'
Density = Callable[..., Tensor]
Terms = Callable[[Tensor], dict[str, Tensor]]


def jax_density(density: Density, terms: Terms, example: Tensor, *data: Tensor) -> JaxFunction:
    """A log density in JAX, as a function of vectors with the example's shape and dtype.

    Call it under ``jax.enable_x64(True)`` for float64.

    :param density: (vector (P,), *data) -> scalar, in nats.
    :param terms: vector -> site -> scalar, by which the site of an operator is found.
    :param data: examples of further arguments of the density, and then of the result.
    :raises MissingOperatorError: if an operator has no translation; it names the site.
    :raises UnsupportedProgramError: for latents in half precision.
    """
    if example.dtype not in (torch.float32, torch.float64):
        raise UnsupportedProgramError(
            f"the latents are {example.dtype}, in which chains in JAX do not run: give the weights "
            "and the data float32 or float64, as by .float()"
        )

    def function(vector: Tensor, *data: Tensor) -> Tensor:  # make_fx would count a method's self
        return density(vector, *data)

    try:
        return to_jax(function, example, *data)
    except MissingOperatorError as error:
        untraceable = isinstance(error.__cause__, NotTraceable)  # whichever term is wanted
        site = None if untraceable else _site_of(error.op, terms, example)
        where = "" if site is None else f"site '{site}': "
        raise MissingOperatorError(f"{where}{error} {_WAY_OUT}", op=error.op, site=site) from error


def _site_of(op: str, terms: Terms, example: Tensor) -> str | None:
    """The first site whose own density needs the operator."""
    for name in terms(example):
        try:
            to_jax(lambda vector, name=name: terms(vector)[name], example)
        except MissingOperatorError as error:
            if error.op == op:
                return name
    return None
