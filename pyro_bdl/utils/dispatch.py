"""Modes below autograd, and tensors without numbers: torch's classes for them, imported in one
place, since torch has no public names for them."""

from torch._guards import TracingContext, tracing  # noqa: F401
from torch._subclasses.fake_tensor import (  # noqa: F401
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: F401

without_modes = _disable_current_modes
