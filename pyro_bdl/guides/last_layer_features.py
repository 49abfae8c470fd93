"""The features of a program's last layer: the inputs of its product, with their graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.recognize import AffineOp, recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker, tells_numbers
from pyro_bdl.program.trace import Run, leave_open, record


@dataclass
class Term:
    """A term a w' of the last layer's output z, or a bias.

    :param inputs: a, (N, in), with its graph; None for a bias.
    :param where: the entries of the flattened site that w holds, (K, in), or (K, 1) for a bias.
    :param output: the operation's result, (N, K).
    """

    site: str
    inputs: Tensor | None
    where: Tensor
    output: Tensor


class Features:
    """The features phi with z = phi W' in one run of a program, where W holds the last layer's
    sites.

    :param terms: the terms with the sum z.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
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
    with torch.enable_grad(), LastLayerTracker({name: values[name] for name in sites}) as seen:
        run = record(model, values, args, kwargs, draw=leave_open)
    for name in sites:
        count = sum(term.site == name for term in seen.terms)
        if count != 1:
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' enter "
                f"{'no product' if count == 0 else f'{count} products (tied weights?)'}: they must "
                "be those of one product of the data's rows with a matrix"
            )
    return run, Features(seen.terms)


class LastLayerTracker(Tracker):
    """Tracker that records matrix products with latents, and additions to them.

    ``rows_only`` refuses products of anything but the data's rows (N, in) with a matrix; else
    products of (..., in) with a matrix or a vector are recorded too.
    """

    rows_only = True

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.terms: list[Term] = []

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        result = func(*args, **kwargs)
        if not tells_numbers(func, result):
            return result
        op = recognize(func, args, kwargs, self.is_latent)
        terms = [] if op is None else self._terms(op, result)
        if len(terms) < len(tagged):
            name = getattr(func, "__name__", str(func))
            raise UnsupportedProgramError(
                f"the last layer's weights '{tagged[0].site}' enter the operation '{name}', which "
                "is not a product of the data's rows (N, features) with a matrix: use "
                "AutoLaplaceGGN"
            )
        self.terms += terms
        return result

    def _terms(self, op: AffineOp, output: Any) -> list[Term]:
        known = op.kind in ("product", "addition") and op.is_plain and op.sign > 0
        if not known or not isinstance(output, Tensor):
            return []
        if self.rows_only and output.dim() != 2:
            return []
        terms = []
        weight, bias = self.tag(op.weight), self.tag(op.bias)
        if weight is not None and self._multiplies_rows(op) and not self.is_latent(op.inputs):
            terms.append(Term(weight.site, op.inputs, op.as_matrix(weight.index()), output))
        if bias is not None and self._is_for_each_output(bias.tensor, output):
            terms.append(Term(bias.site, None, bias.index().reshape(-1, 1), output))
        return terms

    def _multiplies_rows(self, op: AffineOp) -> bool:
        """Return whether a product is x @ w for data x (N, in), and not w @ x for columns x."""
        if not self.rows_only:
            return op.output_dim == -1
        return op.inputs.dim() == op.weight.dim() == 2 and op.output_dim == -1

    def _is_for_each_output(self, bias: Tensor, output: Tensor) -> bool:
        """Return whether a bias has one number for each output; that of a vector's product has
        one."""
        if bias.shape == output.shape[-1:]:
            return True
        is_single = len(self.terms) == 1 and len(self.terms[0].where) == 1
        return not self.rows_only and is_single and bias.numel() == 1
