"""Variational expectation maximization of hyperparameters, for any guide."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from pyro_bdl.curvature.fisher import cell_weights
from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    ParameterReading,
    group_sum,
    noise_owner,
    owners,
    prior_locations,
    read_at_center,
)
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import record
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers

_DRAWS = 32
_CHUNK = 8


def variational_em(
    model: Callable,
    guide: Guide,
    data: Any,
    *,
    rounds: int = 20,
    steps: int = 200,
    learning_rate: float = 0.01,
    elbo: Any = None,
    progress: bool = False,
) -> list[dict[str, Tensor]]:
    """Alternate SVI on the guide with closed-form updates of the program's hyperparameters.

    The E-step maximizes the ELBO in the guide's parameters only. The M-step maximizes it in closed
    form in every positive ``PyroParam`` theta that scales Normal priors, s_i = c_i theta, and in
    the noise of a Normal observation:

        theta^2 = mean_i E_q[(w_i / c_i)^2],  noise^2 = mean_n E_q[(y_n - f(x_n))^2]

    :param model: the program; its hyperparameters change in place.
    :param guide: a guide of this package for it; trained in place.
    :param data: ``(x, y)`` or an iterable of batches.
    :param rounds: the number of E- and M-steps.
    :param steps: gradient steps of an E-step, batch after batch.
    :param learning_rate: Adam's learning rate; Adam's state is kept between rounds.
    :param elbo: ``TemperedTraceMeanField_ELBO()`` by default.
    :param progress: show a bar over the rounds.
    :returns: the hyperparameters after each round, name -> value.
    :raises ValueError: if no hyperparameter has a closed form.
    """
    batches, elbo = Batches(data), elbo or TemperedTraceMeanField_ELBO()
    args, kwargs = batches.first()
    guide.prototype(*args, **kwargs)
    subset = Subset(guide.require_layout())
    parameters = [p for p in guide.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    history = []
    for _ in trange(rounds, desc="variational EM", disable=not progress, leave=False, delay=1):
        _train(model, guide, batches, elbo, optimizer, parameters, steps)
        reading = read_at_center(model, guide, args, kwargs)
        changes = _maximize(model, guide, subset, reading, batches)
        if not changes:
            raise ValueError(
                "no hyperparameter of the program is the scale of Normal priors or of a Normal "
                "observation: leave it to the optimizer of SVI"
            )
        for parameter, value in changes:
            parameter.set(value)
        history.append({parameter.name: value.clone() for parameter, value in changes})
    return history


def _train(
    model: Callable,
    guide: Guide,
    batches: Batches,
    elbo: Any,
    optimizer: torch.optim.Optimizer,
    parameters: list[Any],
    steps: int,
) -> None:
    taken = 0
    while taken < steps:
        for args, kwargs in batches:
            loss = elbo.differentiable_loss(model, guide, *args, **kwargs)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    optimizer.zero_grad()


@torch.enable_grad()
def _maximize(
    model: Callable, guide: Guide, subset: Subset, reading: ParameterReading, batches: Batches
) -> list[tuple[Hyperparameter, Tensor]]:
    mean, variance = guide.location(), guide.variances()
    changes: list[tuple[Hyperparameter, Tensor]] = []
    for name, sites in owners(reading, subset).items():
        parameter = reading.parameters[name]
        count, squares = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
        for site, scale in sites:
            part = subset.parts[site]
            offset = mean[part] - prior_locations(reading, subset, site)
            second = (offset.square() + variance[part]) / scale.detach().square()
            count += group_sum(scale, torch.ones_like(second), parameter)
            squares += group_sum(scale, second, parameter)
        value = parameter.value * (squares / count).sqrt()
        changes.append((parameter, value.detach()))
    noise = noise_owner(reading, subset)
    if noise is not None:
        parameter, _ = noise
        ratio = _mean_square(model, guide, batches)
        changes.append((parameter, (parameter.value * ratio.sqrt()).detach()))
    return changes


@torch.no_grad()
def _mean_square(model: Callable, guide: Guide, batches: Batches) -> Tensor:
    """E_q[((y - f) / noise)^2], averaged over the data."""
    layout = guide.require_layout()
    vectors = guide.sample_vectors(_DRAWS)
    squares = cells = vectors.new_zeros(())
    with evaluation_mode(model), preserved_buffers(model):
        for args, kwargs in batches:

            def residuals(draw: dict[str, Tensor], args: Any = args, kwargs: Any = kwargs) -> Any:
                run = record(model, layout.constrain(draw["u"])[0], args, kwargs)
                (site,) = run.observed.values()
                base: Any = base_distribution(site.distribution)
                weights = cell_weights(site).square()
                offsets = (site.value - base.loc) / base.scale
                return (weights * offsets.square()).sum(), weights.sum()

            total, count = map_draws(residuals, {"u": vectors}, chunk_size=_CHUNK)
            squares, cells = squares + total.mean(), cells + count.mean()
    return squares / cells
