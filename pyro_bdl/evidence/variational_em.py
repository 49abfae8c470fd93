"""Variational expectation maximization of hyperparameters, for any guide."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from pyro_bdl.curvature.fisher import cell_weights
from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    ReadParameters,
    owners_of_priors,
    prior_normals,
    read_at_center,
)
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.elbo.checks import Objective, require_differentiable
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.evidence.formula import log_slopes, normal_terms, only_scales, rescaled
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import Batches, Stream, leading_size
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import record
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.training.descent import Descent
from pyro_bdl.training.svi import BACKENDS, in_backend
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.progress import is_silent
from pyro_bdl.utils.validation import one_of, real_number, whole_number

_DRAWS = 32
_CHUNK = 8


def variational_em(
    model: Callable,
    guide: Callable,
    data: Any,
    *,
    rounds: int = 20,
    steps: int = 200,
    m_steps: int = 50,
    learning_rate: float = 0.01,
    elbo: Any = None,
    progress: bool | None = None,
    backend: str = "torch",
) -> list[dict[str, Tensor]]:
    """Alternate SVI on the guide with updates of the program's parameters.

    The E-step maximizes the ELBO in the guide's parameters only. The M-step maximizes it in all
    other parameters that the program reads. Under a guide of this package it does so in closed form
    for every positive ``PyroParam`` theta that scales Normal priors, s_i = c_i theta, and for the
    noise of a Normal observation:

        theta^2 = mean_i E_q[(w_i / c_i)^2],  noise^2 = mean_n E_q[(y_n - f(x_n))^2]

    The rest (a StudentT's scale, a Gamma's rate, weights without a prior) takes steps of Adam.

    :param model: the program; its hyperparameters change in place.
    :param guide: any guide for it, of this package or of Pyro; trained in place.
    :param data: ``(x, y)`` or an iterable of batches.
    :param rounds: the number of E- and M-steps.
    :param steps: gradient steps of an E-step, batch after batch.
    :param m_steps: gradient steps of an M-step, if parameters without a closed form need them.
    :param learning_rate: Adam's learning rate; Adam's state is kept between rounds.
    :param elbo: ``TemperedTraceMeanField_ELBO()`` by default.
    :param progress: show a bar over the rounds; by default in terminals and notebooks.
    :param backend: of the E-steps, as in ``training.train``; all rounds share one compilation.
    :returns: the parameters after each round, name -> value.
    :raises ValueError: if the program has no parameter of its own.
    :raises FailedStepError: for a loss or gradient that is not finite.
    """
    one_of(backend, "backend", BACKENDS)
    rounds, steps = whole_number(rounds, "rounds"), whole_number(steps, "steps", least=0)
    m_steps = whole_number(m_steps, "m_steps", least=0)
    learning_rate = real_number(learning_rate, "learning_rate")
    batches, elbo = Batches(data), elbo or TemperedTraceMeanField_ELBO()
    require_differentiable(elbo)
    args, kwargs = batches.first()
    e_step, m_step = _groups(model, guide, elbo, args, kwargs)
    ours = isinstance(guide, Guide)
    has_noise = ours and read_at_center(model, guide, batches).has_noise
    stream = None if batches.is_single and not kwargs else Stream(batches.part)
    parts: Any = (model, guide, elbo)
    objective = Objective(*parts)
    held = [{"params": [parameter.leaf for parameter in m_step.values()], "lr": 0.0}]

    def descent(groups: list[Any]) -> Descent:
        optimizer = torch.optim.Adam(groups, lr=learning_rate)
        rows = max(1, leading_size((args, kwargs)))
        return Descent(objective, optimizer, args, rows, stream=stream)

    expectation = in_backend(
        descent([{"params": e_step}, *held]), backend, "variational_em", steps=rounds * steps,
        rates=lambda _: [learning_rate, 0.0], stride=steps,
    )  # fmt: skip
    maximization: Descent | None = None
    history = []
    for number in trange(
        rounds, desc="variational EM", disable=is_silent(progress), leave=False, delay=1
    ):
        taken = range(number * steps, (number + 1) * steps, expectation.stride)
        if expectation.run(taken, rounds * steps, None, lambda _: None):
            break
        closed = _closed_forms(model, guide, batches, has_noise) if ours else {}
        for name, value in closed.items():
            m_step[name].set(value)
        rest = [parameter.leaf for name, parameter in m_step.items() if name not in closed]
        if rest:
            maximization = maximization or descent(rest)
            maximization.run(range(m_steps), m_steps, None, lambda _: None)
        history.append({name: p.now().detach().clone() for name, p in m_step.items()})
    for parameter in (*e_step, *(p.leaf for p in m_step.values())):
        parameter.grad = None
    return history


def _groups(
    model: Callable, guide: Any, elbo: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Hyperparameter]]:
    """The parameters of the guide, and those that the program alone reads.

    :raises ValueError: if the program has none.
    """
    if isinstance(guide, Guide):
        guide.prototype(*args, **kwargs)
        e_step: list[Tensor] = [leaf for leaf in guide.parameters() if leaf.requires_grad]
        found = read_at_center(model, guide).parameters
    else:
        with preserved_buffers(model), ReadParameters() as own:
            guide(*args, **kwargs)
        e_step = [parameter.leaf for parameter in own.learned().values()]
        with preserved_buffers(model), ReadParameters() as read:
            elbo.differentiable_loss(model, guide, *args, **kwargs)
        found = read.learned()
    known = {id(leaf) for leaf in e_step}
    m_step = {
        name: parameter for name, parameter in found.items() if id(parameter.leaf) not in known
    }
    if not m_step:
        raise ValueError(
            "the program has no parameter of its own to maximize over, such as a PyroParam that "
            "scales its priors: train the guide by SVI"
        )
    return e_step, m_step


@torch.enable_grad()
def _closed_forms(
    model: Callable, guide: Any, batches: Batches, has_noise: bool
) -> dict[str, Tensor]:
    """The maxima of the ELBO in the scales of Normal priors and of a Normal noise, by name.

    :param has_noise: see ``ParameterReading``.
    """
    reading, subset = read_at_center(model, guide), Subset(guide.require_layout())
    reading.has_noise = has_noise
    mean, variance = guide.location().detach(), guide.variances().detach()
    normals, noise = prior_normals(reading, subset), reading.noise
    names, terms = only_scales(reading, subset), []
    for site, owner in owners_of_priors(reading, subset).items():
        if owner not in names:
            continue
        (loc, scale), part = normals[site], subset.parts[site]
        second = (mean[part] - loc.detach()).square() + variance[part]
        terms.append(normal_terms(scale, second, 1))
    if noise is not None and noise.owner is not None and noise.owner.name in names:
        assert noise.value is not None
        square = noise.value.detach().square() * _mean_square(model, guide, batches)
        terms.append(normal_terms(noise.value, square, 1))
    values = {name: p.value for name, p in reading.parameters.items() if name in names}
    above, below = (log_slopes(sum(term[i] for term in terms), values) for i in range(2))
    return rescaled(values, above, below)


@torch.no_grad()
def _mean_square(model: Callable, guide: Guide, batches: Batches) -> Tensor:
    """E_q[((y - f) / noise)^2], averaged over the data."""
    layout = guide.require_layout()
    vectors = guide.sample_vectors(_DRAWS)
    squares = cells = vectors.new_zeros(())
    with evaluation_mode(guide.program_modules):
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
