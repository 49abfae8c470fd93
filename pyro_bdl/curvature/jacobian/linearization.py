"""The linearization of a program over one batch of data, which gives columns of its Jacobian."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Block, BlockPosition, DenseBlock, Jacobian
from pyro_bdl.curvature.jacobian.output_layers import IdentityBlock, SoftmaxBlock
from pyro_bdl.curvature.jacobian.recorded_rows import RecordedRows, working_dtype
from pyro_bdl.distributions.parameters import base_distribution, parameters_of
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.random_state import fixed_normal


class Linearization:
    """A run of a program on one batch at a point, with its graph.

    :param at: the point. ``leaves`` are the unconstrained latents, by site.
    :param rows: the run's uses of the latents, datum by datum; None if only the whole run is known.
    :param parameters: of observed sites, the tensors of their distributions in ``rows``, if these
        are not those of ``run``.
    :param by_row: of deterministic sites, whether they have a value for each row.
    :param reading: the run with the parameters that the program reads, where they are asked for (a
        ``ParameterReading``).
    :param together: the program on all rows at once, as a function of the leaves, where single rows
        were mapped.
    """

    def __init__(
        self,
        at: Any,
        batch: tuple[tuple, Mapping[str, Any]],
        run: Run,
        rows: RecordedRows | None,
        parameters: Mapping[str, dict[str, Tensor]] | None = None,
        by_row: Mapping[str, bool] | None = None,
        reading: Any = None,
        together: Callable[[Mapping[str, Tensor]], Run] | None = None,
    ) -> None:
        self.model, self.subset, self.vector = at.model, at.subset, at.vector
        self.leaves: Mapping[str, Tensor] = at.leaves
        self.differentiable: bool = at.differentiable
        self.args, self.kwargs = batch
        self.run, self.rows, self.reading = run, rows, reading
        self._parameters = parameters or {}
        self.by_row = by_row or {}
        self.together = together

    def parameters(self, name: str) -> dict[str, Tensor]:
        """The tensors of an observed site's distribution, by name."""
        if name in self._parameters:
            return self._parameters[name]
        return parameters_of(base_distribution(self.run.observed[name].distribution))

    def gradient(self, value: Tensor, *, create_graph: bool = False) -> Tensor:
        """The gradient of a scalar in the subset, (p,); zero where it does not depend on it."""
        leaves = [self.leaves[name] for name in self.subset.parts]
        graph = create_graph or self.differentiable
        found = torch.autograd.grad(
            value, leaves, retain_graph=True, create_graph=graph, materialize_grads=True
        )
        return self.subset.of_sites(found)

    def pullback(self, outputs: Sequence[Tensor], num_data: int) -> "Pullback":
        """Return outputs of the run as functions of the subset, datum by datum.

        :param outputs: each of shape (n, ...), or of any shape if n = 1.
        :param num_data: n.
        """
        return Pullback(self, list(outputs), num_data)


class Pullback:
    """Outputs of a linearization as functions of the subset, datum by datum: their Jacobian."""

    def __init__(self, at: Linearization, outputs: list[Tensor], num_data: int) -> None:
        self.at, self.outputs, self.num_data = at, outputs, num_data
        known = at.rows is not None and at.rows.num_data == num_data
        self.rows = at.rows if known else None

    def jacobian(self, columns: Sequence[Sequence[Tensor]]) -> Jacobian:
        """Return the gradients of sum_j <column_kj, output_j> in the subset, for every datum.

        :param columns: K cotangents, each with a tensor for every output.
        """
        blocks = [] if self.rows is None else self.rows.blocks(self.outputs, columns)
        leaves = [self.at.leaves[name] for name in self.at.subset.parts]
        if not blocks and any(reaches(output, leaves) for output in self.outputs):
            blocks = self._backward(columns)  # the outputs are not those of single rows
        return self._of_blocks(blocks, len(columns))

    @torch.enable_grad()  # outputs are indexed here
    def _backward(self, columns: Sequence[Sequence[Tensor]]) -> list[Block]:
        """Blocks of rows by one backward pass for each datum and column."""
        at, rows = self.at, []
        for column in columns:
            for datum in range(self.num_data):
                total = at.vector.new_zeros(())
                for cotangent, output in zip(column, self.outputs, strict=True):
                    whole = self.num_data == 1
                    c, out = (cotangent, output) if whole else (cotangent[datum], output[datum])
                    total = total + (c * out).sum()
                rows.append(
                    at.gradient(total) if total.requires_grad else at.subset.take(0 * at.vector)
                )
        values = torch.stack(rows).unflatten(0, (len(columns), self.num_data))
        values = values.to(working_dtype(values.dtype))
        return [
            DenseBlock(BlockPosition((name, -1), part), values[..., part])
            for name, part in at.subset.parts.items()
        ]

    def identity(self) -> Jacobian:
        """Return the Jacobian of all K outputs of a datum, with a column for each."""
        sizes = [output.numel() // self.num_data for output in self.outputs]
        uses = self._output_layer(lambda noise: noise)
        if uses:
            (size,) = sizes
            like = self.outputs[0].detach()
            eye = torch.eye(size, dtype=working_dtype(like.dtype), device=like.device)
            eye = eye[:, None, None, None].expand(size, self.num_data, 1, 1, size)
            blocks: list[Block] = [
                IdentityBlock(position, source, eye, shape) for position, source, shape in uses
            ]
            return self._of_blocks(blocks, size)
        columns: list[list[Tensor]] = []
        for number, size in enumerate(sizes):
            for entry in range(size):
                column = [torch.zeros_like(output) for output in self.outputs]
                column[number].view(self.num_data, -1)[:, entry] = 1.0
                columns.append(column)
        return self.jacobian(columns)

    def softmax(self, weights: Tensor) -> Jacobian | None:
        """Return columns of a Categorical's Fisher information, if its logits are the outputs of
        one product.

        :param weights: weights of the data, (n,).
        :returns: None if the logits (n, K) are not the outputs of a product, up to a constant of
            each datum.
        """
        p = self.outputs[0].detach().softmax(-1)
        uses = self._output_layer(lambda noise: noise - p * noise.sum(-1, keepdim=True))
        if not uses:
            return None
        p = p.to(working_dtype(p.dtype))
        blocks: list[Block] = [
            SoftmaxBlock(position, source, p[None, :, None, None], shape, weights.to(p)[:, None])
            for position, source, shape in uses
        ]
        return self._of_blocks(blocks, p.shape[-1])

    def _output_layer(self, expected: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return the products z whose weights and biases are the whole subset's uses, if the only
        output is z, or a function of each datum's z with a known Jacobian.

        :param expected: the product of that Jacobian's transpose with a cotangent (n, K).
        """
        rows = self.rows
        if rows is None or rows.num_operations != 1 or len(self.outputs) != 1:
            return []
        (output,) = self.outputs
        if output.dim() != 2 or self.num_data == 1:
            return []
        places = range(len(rows.uses))
        if (
            len({use.site for use in rows.uses}) < len(rows.uses)
            or any(use.kind != "product" or use.to_rows is not None for use in rows.uses)
            or any(use.groups > 1 or use.indices is not None for use in rows.uses)
            or any(use.output_shape.numel() != output.shape[1] for use in rows.uses)
            or any(self.at.subset.chosen[use.site] is not None for use in rows.uses)
        ):
            return []
        noise = fixed_normal(output, seed=1)
        (found,) = rows.gradients([output], [noise])
        slack = rounding_of(output) * float(noise.abs().max()) * 10
        if found is None or not torch.allclose(
            found.reshape(noise.shape), expected(noise), rtol=0.0, atol=slack
        ):
            return []
        return [rows.product(place) for place in places]

    def _of_blocks(self, blocks: list[Block], num_columns: int) -> Jacobian:
        vector = self.at.vector
        like = vector.new_empty(0, dtype=working_dtype(vector.dtype))
        return Jacobian(blocks, num_columns, self.num_data, self.at.subset.size, like)


def unseen_uses(
    rows: RecordedRows, outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> set[str]:
    """Return the sites whose gradients are not the sums of their uses' gradients.

    :param outputs: of the rows.
    :param leaves: the sites of the subset.
    """
    subset = rows.subset
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        return set()
    noise = [fixed_normal(output, seed) for seed, output in enumerate(outputs)]
    found = torch.autograd.grad(
        outputs, list(leaves.values()), noise, retain_graph=True, materialize_grads=True
    )
    count, like = rows.num_data, found[0].new_empty(0, dtype=working_dtype(found[0].dtype))
    jacobian = Jacobian(rows.blocks(outputs, [noise]), 1, count, subset.size, like)
    (total,), expected = jacobian.combined(like.new_ones(1, count, 1)), subset.of_sites(found)
    rounding = rounding_of(expected)
    least, wrong = 0.1 * rounding * float(expected.abs().max()), set()
    for site, part in subset.parts.items():
        slack = max(least, min(100 * rounding, 0.1) * float(expected[part].abs().max()))
        if not ((total[part] - expected[part]).abs() <= slack).all() and math.isfinite(slack):
            wrong.add(site)
    return wrong


def rounding_of(like: Tensor) -> float:
    """Return the possible difference of equal numbers by rounding, relative to their terms'
    sizes."""
    if like.dtype == torch.float64:
        return 1e-9
    if like.dtype != torch.float32:
        return 3e-2
    return 3e-3 if like.is_cuda else 1e-5  # TF32
