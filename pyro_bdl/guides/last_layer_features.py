"""The features of a program's last layer: the inputs of its product, with their graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.last_layer import LastLayer
from pyro_bdl.program.trace import Run, leave_open, record


class Features:
    """The features phi with z = phi W' in one run of a program, where W holds the last layer's
    sites.

    :param seen: the run's operations, with this layer as the only one.
    """

    def __init__(self, seen: LastLayer) -> None:
        self.seen, self.terms = seen, seen.layers[-1].terms
        terms = self.terms
        self.sites = [term.site for term in terms]
        rows = next(term.inputs for term in terms if term.inputs is not None)
        ones = rows.new_ones(len(rows), 1)
        self.phi = torch.cat([ones if t.inputs is None else t.inputs for t in terms], 1)
        self.outputs = len(terms[0].where)

    def coefficients(self, values: Mapping[str, Tensor]) -> Tensor:
        """Arrange values of the sites' entries as a matrix (K, H), like W."""
        parts = [values[term.site].reshape(-1)[term.where] for term in self.terms]
        return torch.cat(parts, 1)


def read_features(
    model: Callable,
    values: Mapping[str, Tensor],
    sites: Sequence[str],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> tuple[Run, Features]:
    """Run a program and read the features of its last layer, differentiable in everything else.

    :param values: site -> value; the last layer's values require gradients.
    :param sites: the sites of the last layer.
    :raises UnsupportedProgramError: if the sites enter other operations than one matrix product and
        additions to it.
    """
    seen = LastLayer({name: values[name] for name in sites})
    with torch.enable_grad(), seen:
        run = record(model, values, args, kwargs, draw=leave_open)
    check_one_product(seen, sites)
    for term in seen.layers[0].terms:
        width = term.output.shape[-1:]
        inputs, shape = term.op.inputs, term.tag.tensor.shape
        of_rows = term.op.output_dim == -1 and inputs.dim() == 2 and len(shape) == 2
        if term.output.dim() != 2 or not (shape == width if term.is_bias else of_rows):
            raise _not_of_rows(term.site, term.op.function.__name__)
    return run, Features(seen)


def check_one_product(seen: LastLayer, sites: Sequence[str]) -> None:
    """Check that the only uses of sites are one product with a matrix, and biases of its output.

    :raises UnsupportedProgramError: otherwise.
    """
    for name, operation in seen.others.items():
        raise _not_of_rows(name, operation)
    for layer in seen.layers:
        for term in layer.terms:
            if term.op.kind not in ("product", "addition") or not term.op.is_plain:
                raise _not_of_rows(term.site, term.op.function.__name__)
    for name in sites:
        count = sum(term.site == name for layer in seen.layers for term in layer.terms)
        if count != 1 or len(seen.layers) != 1:
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' enter "
                f"{'no product' if count == 0 else f'{len(seen.layers)} products (tied weights?)'}:"
                " they must be those of one product of the data's rows with a matrix"
            )


def _not_of_rows(site: str, operation: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the last layer's weights '{site}' enter the operation '{operation}', which is not a "
        "product of the data's rows (N, features) with a matrix: use AutoLaplaceGGN"
    )
