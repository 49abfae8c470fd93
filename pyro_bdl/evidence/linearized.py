"""The linearised model: its optimum and its likelihood.

Around u* the observation's unconstrained parameters are eta(u*) + J (u - u*). The optimum of this
model under the prior is the point where its evidence is exact for Normal observations, and a
better point of evaluation than a u* that stopped early (Antoran et al. 2022, section 3).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.laplace import LaplaceGuide
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.program.unconstrained_parameters import natural_parameters, with_natural
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers, vmappable

_STEPS = 20
_HALVINGS = 8


def linearised_log_likelihood(guide: LaplaceGuide, offset: Tensor) -> Tensor:
    """The tempered log likelihood of the linearised model at u* + offset, a scalar.

    It is differentiable in the offset (p,) and in the program's parameters.
    """
    model = guide.program_model
    subset, layout = guide.subset, guide.require_layout()
    direction = subset.put(torch.zeros_like(guide.loc), offset.to(guide.loc))
    total = guide.loc.new_zeros((), dtype=torch.float64)
    for args, kwargs, count in _data(guide):

        def natural(vector: Tensor, args: Any = args, kwargs: Any = kwargs) -> Any:
            latents = layout.constrain(vector)[0]
            run = record(model, latents, args, kwargs, draw=leave_open)
            return {name: natural_parameters(s.distribution) for name, s in run.observed.items()}

        with evaluation_mode(model), preserved_buffers(model), vmappable():
            start, slope = torch.func.jvp(natural, (guide.loc,), (direction,))[:2]
            sites = record(model, layout.constrain(guide.loc)[0], args, kwargs).observed
        for name, site in sites.items():
            moved = {key: start[name][key] + slope[name][key] for key in start[name]}
            part = with_natural(site, moved).log_prob() / site.subsampling
            total = total + count * part.sum().double()
    return total


def _data(guide: LaplaceGuide) -> Iterator[tuple[tuple, dict, float]]:
    """Every batch that the guide has seen, and by what its log likelihood counts."""
    for batches, count in guide.passes:
        for args, kwargs in batches:
            yield args, kwargs, count


def linearised_optimum(
    guide: LaplaceGuide, *, steps: int = _STEPS, tolerance: float = 1e-6
) -> Tensor:
    """u - u* at the maximum of the linearised model's log joint density, (p,).

    Newton steps with the guide's own precision, halved until they gain; exact after one for a full
    Gauss-Newton posterior with Normal observations.
    """
    log_prior = _prior_around(guide)
    offset = torch.zeros_like(guide.subset.take(guide.loc))
    precision = guide.precision

    def value_and_gradient(at: Tensor) -> tuple[float, Tensor]:
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            value = linearised_log_likelihood(guide, at) + log_prior(at)
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
