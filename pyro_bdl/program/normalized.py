"""Weights before a normalization, whose size does not change the outputs.

f(theta' + theta'') = f(theta' + k theta'') for every k > 0, with theta'' the weights to which a
normalization is applied (Antoran et al. 2022, section 5). This is proved from the operators of one
run: where every weight w_i is multiplied by exp(t_i), a tensor is multiplied by exp(e . t), with
exponents e that a product adds up and a normalization puts to zero. A sum needs the same e . t for
all its terms; an output, and a function such as tanh, need e . t = 0. What solves this are the free
sizes. The epsilon of a normalization counts as 0, and functions that are not in the tables count as
tanh does.

Most often theta'' is one layer before a normalization. Where layers add to a stream that is
normalized only where it is read, as in a transformer with ``x + block(norm(x))``, it is all of
these layers together.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pyro_bdl.program.linear_ops.recognize import decompose
from pyro_bdl.program.linear_ops.tracker import CASTS, VIEWS, are_tracked, returns_values
from pyro_bdl.utils.trees import tensors_in, tree_leaves

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_ROUNDING = 1e-9  # of exponents, which are small numbers

# Functions by their names, without the underscores of methods.
_LIKE_FIRST = CASTS | {name.strip("_") for name in VIEWS} | {
    "get", "abs", "neg", "negative", "positive", "relu", "leaky_relu",
    "prelu", "mean", "sum", "detach", "roll", "flip", "repeat", "repeat_interleave", "tile", "tril",
    "triu", "diagonal", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
    "alias", "ravel", "gather", "index_select", "take_along_dim", "cumsum", "std", "amax", "amin",
    "norm", "vector_norm", "matrix_norm", "linalg_norm", "linalg_vector_norm", "max_pool1d",
    "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "interpolate", "unfold", "fold", "pixel_shuffle", "pixel_unshuffle",
}  # fmt: skip
_SUMS = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "maximum", "minimum", "where",
    "masked_fill",
}  # fmt: skip
_JOINED = {"cat", "concat", "stack", "hstack", "vstack"}
_PRODUCTS = {
    "mul", "rmul", "imul", "multiply", "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot",
    "inner", "outer", "einsum", "tensordot", "kron", "embedding",
}  # fmt: skip
_WITH_BIAS = {"linear"} | {f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)}
_POWERS = {"sqrt": 0.5, "square": 2.0, "reciprocal": -1.0, "rsqrt": -0.5}
# by the function, since torch.batch_norm has another order: the place of the scale, before the bias
_FUSED: dict[Any, int] = {
    F.layer_norm: 2, F.rms_norm: 2, F.group_norm: 2, F.batch_norm: 3, F.instance_norm: 3,
}  # fmt: skip


class Exponents(TorchFunctionMode):
    """The exponents of the tensors of a run in the sizes of weights.

    :param weights: the tensors that the run gets, by name, which require gradients.
    :ivar conditions: exponents whose product with t is zero if t does not change the outputs.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.number: dict[str, int] = {}
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # holds tensors, whose ids are the keys
        distinct = {id(weight): weight for weight in weights.values()}
        rows = torch.eye(len(distinct), dtype=torch.float64, device="cpu")
        for key, row in zip(distinct, rows, strict=True):
            self.known[key] = distinct[key], row
        places = {key: number for number, key in enumerate(distinct)}
        self.number = {name: places[id(weight)] for name, weight in weights.items()}
        self.zero = rows.new_zeros(len(distinct))
        self.used = self.zero.bool()
        self.conditions: set[tuple[float, ...]] = set()

    def of(self, value: Any) -> Tensor:
        """The exponents of a tensor; zero for numbers and for what no weight enters."""
        if not isinstance(value, Tensor):
            return self.zero
        known = self.known.get(id(value))
        if known is not None:
            return known[1]
        if value.requires_grad and not value.is_leaf:  # of a function that modes do not see
            self.conditions |= {
                tuple(row.tolist()) for row in torch.eye(len(self.zero), device="cpu")
            }
        return self.zero

    def ask_for_zero(self, exponents: Tensor) -> None:
        if exponents.any():
            self.conditions.add(tuple(exponents.tolist()))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tensors_in((args, kwargs))
        exponents = [self.of(leaf) for leaf in leaves]
        if not any(e.any() for e in exponents):
            return self._noted(func(*args, **kwargs), self.zero)
        if func is are_tracked:
            return True
        body = decompose(func, args, kwargs, lambda value: False)
        if body is not None:
            with self:
                return body()
        result = func(*args, **kwargs)
        if not returns_values(func, result) and func is not Tensor.__setitem__:
            return result
        self.used |= torch.stack(exponents).any(0)
        name = getattr(func, "__name__", "")
        before = self.of(args[0]) if args else self.zero
        after = self._rule(func, args, kwargs)
        if after is None or kwargs.get("out") is not None:
            for e in exponents:
                self.ask_for_zero(e)
            after = self.zero
        if name == "__setitem__" or (args and result is args[0]):  # its views are not known
            self.ask_for_zero(after - before)
        return self._noted(result, after)

    def _noted(self, result: Any, exponents: Tensor) -> Any:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (leaf.requires_grad or exponents.any()):
                self.known.setdefault(id(leaf), (leaf, exponents))
        return result

    def _rule(self, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """The exponents of a result; None for a function that is not known."""
        name = getattr(func, "__name__", "").strip("_")
        values = [*args, *(value for key, value in kwargs.items() if key != "alpha")]
        factors = [self.of(leaf) for leaf in tree_leaves(values)]
        if name in _PRODUCTS:
            return torch.stack(factors).sum(0)
        if name in _SUMS:
            return self._equal(values)
        if name in _JOINED:
            return self._equal(values[0])
        if name == "setitem":
            return self._equal([values[0], values[2]])
        if name in _LIKE_FIRST:
            for e in factors[1:]:
                self.ask_for_zero(e)
            return factors[0]
        if name in _WITH_BIAS:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            product = self.of(named["input"]) + self.of(named["weight"])
            return self._with_bias(product, named.get("bias"))
        if func in _FUSED:
            named = dict(zip(("weight", "bias"), args[_FUSED[func] :], strict=False)) | kwargs
            bias = None if func is F.rms_norm else named.get("bias")
            return self._with_bias(self.of(named.get("weight")), bias)
        if name in ("div", "truediv", "true_divide", "divide", "itruediv") and len(values) == 2:
            return self.of(values[0]) - self.of(values[1])
        if name in ("rdiv", "rtruediv"):
            return self.of(values[1]) - self.of(values[0])
        if name == "pow" and isinstance(values[1], int | float):
            return values[1] * self.of(values[0])
        if name in _POWERS:
            return _POWERS[name] * self.of(values[0])
        if name == "normalize":
            return self.zero
        if name == "weight_norm":  # of a direction and a length
            return self.of(values[1])
        if name == "scaled_dot_product_attention":
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            self.ask_for_zero(self.of(named["query"]) + self.of(named["key"]))
            return self.of(named["value"])
        return None

    def _with_bias(self, exponents: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            self.ask_for_zero(exponents - self.of(bias))
        return exponents

    def _equal(self, values: Any) -> Tensor:
        """The exponents of a sum, whose terms' must be equal; zero has any exponent."""
        terms = [
            self.of(leaf)
            for leaf in tree_leaves(values)
            if (leaf.is_floating_point() if isinstance(leaf, Tensor) else leaf not in (0, None))
        ]
        for other in terms[1:]:
            self.ask_for_zero(terms[0] - other)
        return terms[0]


def normalized_groups(
    exponents: Exponents, outputs: Iterable[Tensor], layers: Mapping[str, Collection[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the layers, or else single weights, or layers together, whose size is free.

    :param exponents: after the run.
    :param outputs: those that must not change.
    :param layers: the names of the weights of every layer.
    :returns: the weights of each group. Its name is the layer's, those of several layers joined by
        " + ", or that of a single weight, as the direction under ``weight_norm``.
    """
    for value in outputs:
        exponents.ask_for_zero(exponents.of(value))
    zero = exponents.zero
    conditions = torch.stack([zero, *(zero.new_tensor(row) for row in exponents.conditions)])

    def indicator(names: Collection[str]) -> Tensor:
        members = zero.clone()
        members[[exponents.number[name] for name in names]] = 1.0
        return members

    def is_free(names: Collection[str]) -> bool:
        used = bool(exponents.used[indicator(names).bool()].all())
        return used and not (conditions @ indicator(names)).abs().max() > _ROUNDING

    groups: dict[str, tuple[str, ...]] = {}
    for layer, names in layers.items():
        if is_free(names):
            groups[layer] = tuple(names)
        elif len(names) > 1:
            groups |= {name: (name,) for name in names if is_free((name,))}
    known = {name for own in groups.values() for name in own}
    others = {layer: own for layer, own in layers.items() if not known & set(own)}
    for group in _free_together(conditions, {k: indicator(own) for k, own in others.items()}):
        names = tuple(name for layer in group for name in others[layer])
        if is_free(names):
            groups[" + ".join(layer or ", ".join(others[layer]) for layer in group)] = names
    return groups


def _free_together(conditions: Tensor, layers: Mapping[str, Tensor]) -> list[list[str]]:
    """Return disjoint sets of layers that are free together.

    A set is a row of zeros and ones in the reduced basis of the free sizes, which also has rows
    such as (1, -1): layers whose sizes make up for each other.
    """
    if not layers:
        return []
    order = [*layers][::-1]
    rows = conditions @ torch.stack([layers[layer] for layer in order], -1)
    pivots: list[int] = []
    for column in range(len(order)):  # elimination
        number = len(pivots)
        best = number + int(rows[number:, column].abs().argmax()) if number < len(rows) else 0
        if number == len(rows) or abs(rows[best, column]) < _ROUNDING:
            continue
        rows[[number, best]] = rows[[best, number]]
        rows[number] /= rows[number, column].clone()
        others = torch.arange(len(rows), device="cpu") != number
        rows[others] -= rows[others, column, None] * rows[number]
        pivots.append(column)
    groups: list[list[str]] = []
    for column in sorted(set(range(len(order))) - set(pivots), reverse=True):
        solution = (-rows[: len(pivots), column]).tolist()
        sizes = dict(zip(pivots, solution, strict=True)) | {column: 1.0}
        group = [order[n] for n in sorted(sizes, reverse=True) if abs(sizes[n] - 1) < _ROUNDING]
        whole = all(min(abs(size), abs(size - 1)) < _ROUNDING for size in sizes.values())
        if whole and len(group) > 1 and not any(set(group) & set(other) for other in groups):
            groups.append(group)
    return groups
