"""A program's log density in JAX, for the kernels that run there."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_bdl.errors import MissingOperatorError, UnsupportedProgramError
from pyro_bdl.tracing.jax.translate import JaxFunction, to_jax
from pyro_bdl.tracing.trace import NotTraceable

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
