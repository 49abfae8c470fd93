"""A program's log density as a graph of torch's operators, with its gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.tracing.compiled import CompiledLoss, Evaluation
from pyro_bdl.utils.autocast import castings
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.module_state import modules_of


class CompiledDensity:
    """A scalar function of a vector and its gradient, as a graph that is traced once.

    ``CompiledLoss`` says when the program itself runs, and what it must be. The gradient is that in
    the vector and in parameters, and can be taken once. Calls under ``vmap``, ``torch.func.grad``,
    autocast or without gradients run the program itself.

    :param function: of a vector (P,), a scalar.
    :param model: the program, whose modules' buffers are restored after a trace.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], model: Any) -> None:
        self.function, self.model = function, model
        self.graphs = CompiledLoss("Program.compile")

    def __call__(self, vector: Tensor) -> Tensor:
        """The value at a vector, to be differentiated once."""
        if not torch.is_grad_enabled() or is_transformed() or castings():
            return self.function(vector)
        leaf = vector if vector.requires_grad else vector.detach().requires_grad_()
        outcome = self.graphs(_Evaluation(self, leaf))
        return outcome if isinstance(outcome, Tensor) else outcome.differentiable()


class _Evaluation(Evaluation):
    def __init__(self, density: CompiledDensity, vector: Tensor) -> None:
        self.density, self.vector = density, vector
        self.owner = density.model
        self.key = vector.shape, vector.dtype, vector.device

    def plain(self) -> Tensor:
        return self.density.function(self.vector)

    def tensors(self) -> list[Tensor]:
        return [self.vector]

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.density.function(*tensors),)

    def modules(self) -> list[nn.Module]:
        return modules_of(self.density.model)
