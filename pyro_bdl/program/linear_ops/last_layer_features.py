"""The features of a program's last layer: what enters its product, with the graph to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.linear_ops.tracker import OPERATIONS, Tag, Tracker
from pyro_bdl.program.trace import Run, leave_open, record


@dataclass
class Term:
    """A part a w' of the last layer's output z, or a bias.

    :param inputs: a, (N, in), with its graph; None for a bias.
    :param where: the entries of the flattened site that w holds, (K, in), or (K, 1) for a bias.
    :param output: what the operation returned, (N, K).
    """

    site: str
    inputs: Tensor | None
    where: Tensor
    output: Tensor


class Features:
    """z = phi W' in one run of a program, W made of the last layer's sites.

    :param terms: the parts that add up to z.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        self.sites = [term.site for term in terms]
        rows = next(term.inputs for term in terms if term.inputs is not None)
        ones = rows.new_ones(len(rows), 1)
        self.phi = torch.cat([ones if t.inputs is None else t.inputs for t in terms], 1)
        self.outputs = len(terms[0].where)

    def coefficients(self, values: Mapping[str, Tensor]) -> Tensor:
        """Numbers given for every entry of the sites as a matrix (K, H), like W."""
        parts = [values[term.site].reshape(-1)[term.where] for term in self.terms]
        return torch.cat(parts, 1)


def read_features(
    model: Callable,
    values: Mapping[str, Tensor],
    sites: Sequence[str],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> tuple[Run, Features]:
    """Run a program and see the features of its last layer, differentiable in everything else.

    :param values: site -> value; those of the last layer require gradients.
    :param sites: of the last layer.
    :raises UnsupportedProgramError: where the sites enter anything but one product of matrices, or
        an addition to it.
    """
    with torch.enable_grad(), _Products({name: values[name] for name in sites}) as seen:
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


class _Products(Tracker):
    """Sees matrix products with latents, and their additions."""

    def __init__(self, latents: Mapping[str, Tensor]) -> None:
        super().__init__(latents)
        self.terms: list[Term] = []

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        result = func(*args, **kwargs)
        known = OPERATIONS.get(func)
        terms = [] if known is None else self._terms(known.family, known.bind(args, kwargs), result)
        if len(terms) < len(tagged):
            name = getattr(func, "__name__", str(func))
            raise UnsupportedProgramError(
                f"the last layer's weights '{tagged[0].site}' enter the operation '{name}', which "
                "is no product of the data's rows (N, features) with a matrix: use AutoLaplaceGGN"
            )
        self.terms += terms
        return result

    def _terms(self, family: str, named: dict[str, Any], output: Any) -> list[Term]:
        if not isinstance(output, Tensor) or output.dim() != 2:
            return []
        if family == "linear":
            product = self._product(named["input"], named["weight"], output, transposed=False)
            return product + self._bias(named.get("bias"), output)
        if family == "matmul":
            return self._product(named["input"], named["other"], output, transposed=True)
        if family == "rmatmul":
            return self._product(named["other"], named["input"], output, transposed=True)
        if family == "addmm" and named.get("beta", 1) == 1 and named.get("alpha", 1) == 1:
            product = self._product(named["mat1"], named["mat2"], output, transposed=True)
            return product + self._bias(named["input"], output)
        if family == "add" and named.get("alpha", 1) == 1:
            return self._bias(named["input"], output) + self._bias(named["other"], output)
        return []

    def _product(
        self, inputs: Tensor, weight: Tensor, output: Tensor, *, transposed: bool
    ) -> list[Term]:
        tag = self.tag(weight)
        if tag is None or self.tag(inputs) is not None or weight.dim() != 2 or inputs.dim() != 2:
            return []
        where = tag.index().mT if transposed else tag.index()
        return [Term(tag.site, inputs, where, output)]

    def _bias(self, value: Any, output: Tensor) -> list[Term]:
        tag = self.tag(value)
        if tag is None or tag.tensor.shape != output.shape[-1:]:
            return []
        return [Term(tag.site, None, tag.index()[:, None], output)]
