"""Importance ratios p / q at a guide's draws: k-hat, and the gap of the bound."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.diagnostics.psis import good_k, psis
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import (
    check_guide,
    log_densities,
    log_densities_of,
    samples_of_program,
    to_samples,
)
from pyro_bdl.program.program import Program
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

__all__ = [
    "Importance",
    "function_khat",
    "ratios",
]


@dataclass(frozen=True)
class Importance:
    """Importance ratios of a posterior over a guide.

    :param log_ratios: ``(S,)``, log p(w, y) - log q(w) at the guide's draws, in nats.
    :param pareto_k: k-hat of their upper tail. Up to ``good_k(S)`` importance sampling can correct
        the guide; above 1 the ratios have no mean. It is infinite if a few draws have all the
        weight, and NaN if all ratios are equal, as for the exact posterior.
    :param elbo: their mean, the evidence lower bound at temperature 1, in nats.
    :param log_evidence: log of the smoothed mean ratio in nats, an estimate of log p(y); too low,
        as a rule, if k-hat is above ``good_k(S)``.
    """

    log_ratios: Tensor
    pareto_k: float
    elbo: float
    log_evidence: float

    @property
    def gap(self) -> float:
        """``log_evidence - elbo``, an estimate of KL(q || p(w | y)) in nats; too small if k-hat is
        above 0.7."""
        return self.log_evidence - self.elbo

    @property
    def elbo_error(self) -> float:
        """The Monte Carlo standard error of ``elbo``, in nats."""
        return _error(self.log_ratios)

    @property
    def log_evidence_error(self) -> float:
        """The Monte Carlo standard error of ``log_evidence``, in nats, by the delta method; too
        small if k-hat is above ``good_k``."""
        return _error(self._relative)

    @property
    def gap_error(self) -> float:
        """The Monte Carlo standard error of ``gap``, likewise, from the same draws."""
        return _error(self._relative - self.log_ratios)

    @property
    def _relative(self) -> Tensor:
        """The smoothed ratios over their mean, ``(S,)``."""
        return len(self.log_ratios) * psis(self.log_ratios[None]).log_weights[0].exp()

    def __repr__(self) -> str:
        limit = good_k(len(self.log_ratios))
        good = not self.pareto_k > limit
        trust = "good" if good else "too high" if self.pareto_k < 1 else "hopeless"
        error = f" ± {self.log_evidence_error:.2f}" if good else " (too low, as a rule)"
        gap_error = f" ± {self.gap_error:.2f}" if good else ""
        tail = f"k-hat {self.pareto_k:.2f} ({trust}; limit {limit:.2f})"
        if math.isnan(self.pareto_k):
            tail = "no k-hat (all ratios are equal)"
        lost = int(self.log_ratios.isnan().sum())
        if lost:
            tail = f"no k-hat ({lost} of {len(self.log_ratios)} ratios are NaN)"
        return (
            f"{tail}, ELBO {self.elbo:.2f} ± {self.elbo_error:.2f}, log evidence "
            f"{self.log_evidence:.2f}{error}, gap {self.gap:.2f}{gap_error} nats"
        )


def _error(values: Tensor) -> float:
    return float(values.std() / math.sqrt(len(values)))


def ratios(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_samples: int = 1000,
    seed: int = 0,
) -> Importance:
    """Measure how far a guide is from the posterior by the tail of p / q (Yao et al. 2018, section
    3.1).

    In the weights of a large network k-hat is above 1 for any guide, and says nothing about the
    predictions; see ``function_khat``.

    :param model: a Pyro program.
    :param guide: a guide with a density over all latents; Pyro's own guides run draw by draw.
    :param args: the program's arguments with all data, including the targets.
    :param num_samples: S, at least 25, as k-hat requires.
    :param seed: seed of the draws.
    :raises ValueError: for a guide without a density or of another program, too few draws, or a
        minibatch of the data.
    :raises UnsupportedProgramError: for a latent of which a mask leaves numbers without a density.
    """
    num_samples = whole_number(num_samples, "num_samples")
    _check(guide, num_samples)
    with evaluation_mode(model, guide), seeded(seed), torch.no_grad():
        program = Program(model, *args)
        program.require_observed()
        program.require_all_data("the ratio of the posterior and a guide")
        program.run(program.initial).refuse_improper("ratio of the posterior and a guide")
        if not isinstance(guide, Guide):
            return summary_of(_ratios_of_runs(program, guide, num_samples))
        check_guide(program.latents, guide)
        ratios = _log_ratios(program, guide, guide.sample_vectors(num_samples))
    return summary_of(ratios)


def function_khat(draws: Tensor, reference: Tensor) -> Tensor:
    """k of a posterior's function values against a reference's, at each input.

    It is that of the ratio p / q of two Normals with the sds of the draws, in closed form::

        k = 1 - (sd of q / sd of p)^2

    Above 0.7 the posterior has less than 0.55 of the sd. A value below 0.7 does not mean that the
    posterior is right: one that is too wide has k below 0, and one with the correct sd and another
    mean has 0. Only the sds at one input are compared, not correlations between inputs or further
    modes. Look at means and sds (or ``compare``) as well.

    :param draws: ``(S, ...)``, draws of the function under the posterior q, at least 2.
    :param reference: ``(T, ...)``, draws of the same function under the reference p.
    :returns: float64 ``(...)``; infinity if the posterior's draws are all the same, NaN if only the
        reference's are.
    :raises ValueError: for shapes that do not fit, or too few draws.
    """
    if draws.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"draws and reference must be of the same function, got shapes {tuple(draws.shape)} "
            f"and {tuple(reference.shape)}"
        )
    if min(len(draws), len(reference)) < 2:
        raise ValueError("an sd needs at least 2 draws of the posterior and of the reference")
    q = double(draws).std(0)
    p = double(reference).std(0).to(q.device)
    k = (1 - (q / p).square()).where(p > 0, torch.nan)
    return torch.where(q > 0, k, torch.inf)


def _log_ratios(program: Program, guide: Guide, vectors: Tensor) -> Tensor:
    """log p(u, y) - log q(u) over the unconstrained latents, (S,)."""
    log_p, log_q = log_densities(program, guide, vectors)
    assert log_q is not None
    return log_p - log_q


def _ratios_of_runs(program: Program, guide: Callable, num_samples: int) -> Tensor:
    """log p(u, y) - log q(u), (S,), of one of Pyro's guides."""
    samples = to_samples(guide, num_samples, *program.args, **program.kwargs)
    samples = samples_of_program(program.latents, guide, samples)
    log_p, log_q = log_densities_of(program, guide, samples)
    if log_q is None:
        raise ValueError(
            f"{type(guide).__name__} has no density over all latents (it gives some site one "
            "value, or draws further numbers that are integrated out): there are no importance "
            "ratios"
        )
    return log_p - log_q


def summary_of(ratios: Tensor) -> Importance:
    """The summary of log p - log q of draws from q, (S,)."""
    ratios = double(ratios)
    weights, k = psis(ratios[None])
    if k.isnan() and ratios.std() > 1:
        k = torch.full_like(k, torch.inf)  # nearly all of the tail underflows
    # The smoothed weights sum to one; the unsmoothed ones among them give the scale.
    lowest = ratios.where(ratios > -torch.inf, torch.inf).argmin()
    scale = ratios[lowest] - weights[0, lowest]
    log_evidence = scale - math.log(len(ratios))
    return Importance(ratios, float(k), float(ratios.mean()), float(log_evidence))


def _check(guide: Any, num_samples: int) -> None:
    _check_number(num_samples)
    if not callable(guide):
        raise TypeError(
            f"importance ratios need a guide, whose density is known, got {type(guide).__name__}: "
            "the log evidence is in mcmc.tempered_smc(model, *data).info, leave-one-out in loo"
        )
    if not isinstance(guide, Guide):
        return
    if not guide.has_density:
        raise ValueError(
            f"{type(guide).__name__} has no density over all latents, so that there are no "
            "importance ratios: compare it in function space (function_khat) instead"
        )
    if guide.subsampled:
        raise ValueError(
            f"the latent site '{min(guide.subsampled)}' is in a subsampled plate, so that no "
            "run of the program holds all latents: make a guide for the program with all its data"
        )


def _check_number(num_samples: int) -> None:
    if num_samples < 25:
        raise ValueError(f"k-hat needs at least 25 draws, got {num_samples}")
