"""The linearized model: its optimum and its likelihood.

Around u* the observation's unconstrained parameters are eta(u*) + J (u - u*). For Normal
observations the evidence of this model is exact at its optimum under the prior. This optimum is
also a better point to evaluate the evidence than a u* from unfinished training (Antoran et al.
2022, section 3).
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import observed_outputs
from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers

_STEPS = 20
_HALVINGS = 8


def linearized_log_likelihood(guide: LaplaceGuide, offset: Tensor) -> Tensor:
    """The tempered log likelihood of the linearized model at u* + offset in nats, a scalar.

    It is differentiable in the offset (p,) and in the program's parameters.
    """
    total = guide.loc.new_zeros((), dtype=torch.float64)
    for args, kwargs, count in _data(guide):
        at = Linearization(guide.program_model, guide.subset, guide.loc, args, kwargs)
        for outputs in observed_outputs(at, differentiable=True).values():
            site = outputs.observed(outputs.moved(offset))
            total = total + count * (site.log_prob() / site.subsampling).sum().double()
    return total


def _data(guide: LaplaceGuide) -> Iterator[tuple[tuple, dict, float]]:
    """Yield every batch of the guide's data, with the factor of its log likelihood."""
    for batches, count in guide.passes:
        for args, kwargs in batches:
            yield args, kwargs, count


def linearized_optimum(
    guide: LaplaceGuide, *, steps: int = _STEPS, tolerance: float = 1e-6
) -> Tensor:
    """u - u* at the maximum of the linearized model's log joint density, (p,).

    It is found by Newton steps with the guide's precision; a step that does not increase the
    density is halved. For a full Gauss-Newton posterior with Normal observations one step is exact.
    """
    log_prior = _prior_around(guide)
    offset = torch.zeros_like(guide.subset.take(guide.loc))
    precision = guide.precision

    def value_and_gradient(at: Tensor) -> tuple[float, Tensor]:
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            value = linearized_log_likelihood(guide, at) + log_prior(at)
            (gradient,) = torch.autograd.grad(value, at)
        return value.item(), gradient

    value, gradient = value_and_gradient(offset)
    for _ in range(steps):
        with torch.no_grad():
            step = precision.solve(gradient.to(guide.prior_diagonal)).to(offset)
        gain = 0.5 * float((step * gradient).sum())
        if gain < tolerance * max(1.0, abs(value)):
            break
        for _ in range(_HALVINGS):
            moved, slope = value_and_gradient(offset + step)
            if moved > value:
                break
            step = 0.5 * step
        else:
            break
        offset, value, gradient = offset + step, moved, slope
    return offset.detach()


def _prior_around(guide: LaplaceGuide) -> Callable[[Tensor], Tensor]:
    """log p(T(u)) + log |det dT/du| as a function of the offset."""
    model = guide.program_model
    subset, layout = guide.subset, guide.require_layout()

    def log_prior(offset: Tensor) -> Tensor:
        vector = subset.put(guide.loc, subset.take(guide.loc) + offset)
        latents, log_det = layout.constrain(vector)
        with evaluation_mode(model), preserved_buffers(model):
            run = record(model, latents, *guide.few, draw=leave_open)
        return run.log_prior() + log_det

    return log_prior


def either_spelling(linearized: bool, linearised: bool | None) -> bool:
    """The value of the keyword ``linearized``, also under its former spelling ``linearised``."""
    if linearised is None:
        return linearized
    warnings.warn("the keyword is now linearized=", DeprecationWarning, stacklevel=3)
    return linearised
