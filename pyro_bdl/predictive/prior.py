"""Draws of the prior and its predictions, before there is a posterior."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.program import Program
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number


def prior_predictive(
    model: Callable, *args: Any, num_samples: int = 500, seed: int = 0, **kwargs: Any
) -> dict[str, Tensor]:
    """Draws w ~ p(w), the deterministic sites at w, and y ~ p(y | w, x), each ``(S, ...)``.

    They show before any fit which functions and data a prior holds for likely. Draws are made all
    at once under ``vmap``, in evaluation mode; a distribution that ``vmap`` cannot draw makes them
    come one by one, with a warning that names its site.

    Example::

        >>> x = torch.linspace(-2, 2, 50)[:, None]
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> draws = bdl.prior_predictive(model, x, num_samples=200)
        >>> {name: tuple(value.shape) for name, value in draws.items()}
        {'f': (200, 50), 'weight': (200, 1, 1), 'bias': (200, 1), 'y': (200, 50)}

    :param model: the Pyro program.
    :param args: its arguments, such as x; targets may be among them, and do not count.
    :param num_samples: S.
    :param seed: seed of the draws.
    :param kwargs: the program's keyword arguments.
    :raises UnsupportedProgramError: for a prior that cannot be sampled: an improper one, or one
        with a ``priors.factor`` of latents.
    """
    count = whole_number(num_samples, "num_samples")
    with evaluation_mode(model), seeded(seed):
        return prior_draws(Program(model, *args, **kwargs), count, args, kwargs)


def prior_draws(
    program: Program, count: int, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """As ``prior_predictive``, of a program that was run, at the present random state.

    :param args: the arguments to predict at, which may lack targets.
    """
    weighed = _factor_of_latents(program)
    if weighed is not None:
        raise UnsupportedProgramError(
            f"the prior cannot be sampled: the factor '{weighed}' weighs its latents, which draws "
            "of the sample statements do not follow"
        )
    try:
        return Predictive(program.model, num_samples=count)(*args, **kwargs)
    except NotImplementedError as error:
        raise UnsupportedProgramError(f"the prior cannot be sampled: {error}") from error


@torch.enable_grad()
def _factor_of_latents(program: Program) -> str | None:
    """The name of a factor of the prior that depends on latents; None where there is none."""
    values = {name: value.clone().requires_grad_() for name, value in program.initial.items()}
    factors = program.run(values).prior_factors.items()
    found = (n for n, site in factors if reaches(site.log_prob().sum(), values.values()))
    return next(found, None)
