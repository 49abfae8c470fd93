"""Tracking of latents through a program to the operations that use them.

``Tracker`` is a ``TorchFunctionMode`` that follows latents through views and passes every other
operation on them to a subclass. ``recognize.py`` reads operations that are affine in a latent.
Curvature records these operations (``curvature/jacobian/affine_uses.py``), the estimators compute
them with separate noise for every datum (``estimators/``), and dropout and the evidence of a last
layer find weights in them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from pyro_bdl.program.linear_ops.recognize import decompose
from pyro_bdl.utils.trees import tensors_in


@dataclass
class Tag:
    """A tensor that consists of a latent's entries.

    :param site: the latent's name.
    :param root: the latent; kept, so that its id is not reused.
    :param tensor: the tensor.
    :param view: the function that makes the tensor from the latent; None for the latent itself.
    :param whole: whether the tensor holds all entries in their order and shape.
    """

    site: str
    root: Tensor
    tensor: Tensor
    view: Callable[[Tensor], Tensor] | None = None
    whole: bool = True

    def of(self, values: Tensor) -> Tensor:
        """Take the same view of other values with the latent's shape."""
        return values if self.view is None else self.view(values)

    def index(self) -> Tensor:
        """The positions of the entries in the flattened site, with the tensor's shape."""
        numbers = torch.arange(self.root.numel(), device=self.root.device)
        return self.of(numbers.view(self.root.shape))

    @cached_property
    def indices(self) -> Tensor | None:
        """``index()``; None for all entries in order."""
        return None if self.whole else self.index()


CASTS = {"to", "float", "double", "bfloat16", "half"}
VIEWS = CASTS | {
    "view", "reshape", "t", "transpose", "permute", "chunk", "split", "unbind", "__getitem__",
    "unsqueeze", "squeeze", "expand", "contiguous", "flatten", "unflatten", "narrow", "select",
    "swapaxes", "swapdims", "movedim", "moveaxis", "tensor_split", "view_as", "expand_as",
    "clone", "broadcast_to", "split_with_sizes", "adjoint",
}  # fmt: skip
_VIEW_PROPERTIES = {torch.Tensor.T, torch.Tensor.mT}


def are_tracked(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether a ``Tracker`` follows one of the tensors: ``vmap`` would hide them from it."""
    if has_torch_function(tensors):
        return handle_torch_function(are_tracked, tensors, tensors)
    return False


class Tracker(TorchFunctionMode):
    """Mode that follows latents while a program runs; a subclass handles the operations on them.

    :param latents: site -> the same tensor objects that the program gets.
    """

    def __init__(self, latents: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.tags: dict[int, Tag] = {}
        for name, value in (latents or {}).items():
            self.track(name, value)

    def track(self, site: str, value: Tensor) -> None:
        self.tags[id(value)] = Tag(site, value, value)

    def tag(self, value: Any) -> Tag | None:
        return self.tags.get(id(value)) if isinstance(value, Tensor) else None

    def is_latent(self, value: Any) -> bool:
        """Return whether an argument is computed from a latent by views."""
        return isinstance(value, Tensor) and id(value) in self.tags

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        """Return the result of an operation on tagged tensors that is not a view."""
        raise NotImplementedError

    def trace_body(self, func: Any, args: tuple, kwargs: dict, body: Callable[[], Any]) -> Any:
        """Return the result of a function that ``decompose`` has converted to ``body``."""
        with self:
            return body()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tagged = self._tagged((*args, *kwargs.values())) if self.tags else None
        if not tagged:
            return func(*args, **kwargs)
        if func is are_tracked:
            return True
        body = decompose(func, args, kwargs, self.is_latent)
        if body is not None:
            return self.trace_body(func, args, kwargs, body)
        if self._is_view(func, args, tagged):
            return self._follow(func, args, kwargs)
        return self.operate(func, args, kwargs, tagged)

    def _tagged(self, values: Iterable[Any]) -> list[Tag]:
        """The tags among arguments; a loop by hand, since torch's pytrees take longer than small
        operators."""
        tags = []
        for value in values:
            tag = self.tags.get(id(value))
            if tag is not None:
                tags.append(tag)
            elif isinstance(value, list | tuple):
                tags += self._tagged(value)
            elif isinstance(value, dict):
                tags += self._tagged(value.values())
        return tags

    def _is_view(self, func: Any, args: tuple, tagged: list[Tag]) -> bool:
        if len(tagged) != 1 or not args or id(args[0]) not in self.tags:
            return False
        name = getattr(func, "__name__", "")
        return name in VIEWS or (
            name == "__get__" and getattr(func, "__self__", None) in _VIEW_PROPERTIES
        )

    def _follow(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tag, is_cast = self.tags[id(args[0])], func.__name__ in CASTS
        result = func(*args, **kwargs)
        for number, output in enumerate(tensors_in(result)):
            if id(output) in self.tags:  # the same tensor object
                continue

            def view(values: Tensor, number: int = number) -> Tensor:
                values = tag.of(values)
                if is_cast and not values.is_floating_point():
                    return values
                return tensors_in(func(values, *args[1:], **kwargs))[number]

            whole = tag.whole and is_cast
            self.tags[id(output)] = replace(tag, tensor=output, view=view, whole=whole)
        return result


_SHAPES = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    "requires_grad_",
}  # fmt: skip
_NUMBERS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__float__",
    "__int__", "__bool__", "__index__", "__complex__", "__contains__",
}  # fmt: skip


def returns_values(func: Any, result: Any) -> bool:
    """Return whether a result depends on the values of a tensor, not only on its shape."""
    name = getattr(func, "__name__", "")
    if tensors_in(result):
        return name not in _SHAPES
    return name in _NUMBERS


_PROBABILITIES = {
    torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid, F.sigmoid,
    torch.special.expit,
}  # fmt: skip


class Probabilities(Tracker):
    """Tracker that follows the results of softmax and sigmoid through views."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _PROBABILITIES and isinstance(result, Tensor):
            self.track(func.__name__, result)
        return result

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        return func(*args, **kwargs)

    def name(self, value: Any) -> str | None:
        """The function that made a tensor; None for one that no such function made."""
        tag = self.tag(value)
        return None if tag is None else tag.site
