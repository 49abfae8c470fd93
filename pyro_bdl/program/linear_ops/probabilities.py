"""Probabilities among a network's outputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_bdl.program.linear_ops.tracker import Tag, Tracker

_FUNCTIONS = {
    torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid, F.sigmoid,
    torch.special.expit,
}  # fmt: skip


class Probabilities(Tracker):
    """Tracker that follows the results of softmax and sigmoid through views."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _FUNCTIONS and isinstance(result, Tensor):
            self.track(func.__name__, result)
        return result

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        return func(*args, **kwargs)

    def name(self, value: Any) -> str | None:
        """The function that made a tensor; None for one that no such function made."""
        tag = self.tag(value)
        return None if tag is None else tag.site
