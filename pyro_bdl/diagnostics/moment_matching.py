"""Importance sampling from draws that are moved until their moments are those of the target."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bdl.diagnostics.loo import leave_out
from pyro_bdl.diagnostics.psis import smooth
from pyro_bdl.utils.precision import double

_MOST_STEPS = 30
# Where the weights have three moments. At 0.7 the value is still too high by half its error, which
# is then too small itself.
_GOAL = 1 / 3

# (S, P) draws to log p(u, y) and log p(y_n | u), (S,) each
Density = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Affine:
    """T(u) = center + shift + L (u - center), with L lower triangular ``(P, P)`` or, diagonal, as
    ``(P,)``."""

    center: Tensor
    shift: Tensor
    factor: Tensor

    @property
    def log_det(self) -> Tensor:
        diagonal = self.factor if self.factor.dim() == 1 else self.factor.diagonal()
        return diagonal.log().sum()

    def __call__(self, u: Tensor) -> Tensor:
        return self.center + self.shift + _times(self.factor, (u - self.center).T).T

    def inverse(self, u: Tensor) -> Tensor:
        x = u - self.center - self.shift
        if self.factor.dim() == 1:
            return self.center + x / self.factor
        return self.center + torch.linalg.solve_triangular(self.factor, x.T, upper=False).T


def moment_matched(
    draws: Tensor,
    log_joint: Tensor,
    log_likelihood: Tensor,
    density: Density,
    power: float = 1.0,
) -> Tensor | None:
    """PSIS-LOO of one observation, from draws that are moved to the posterior without it.

    As long as k-hat lies above 1/3, the draws are moved by an affine map T that gives them
    the weighted mean, else also the weighted variances, else the weighted covariance; a map that
    does not lower k-hat is not taken. Every second draw then stays where it was, since the
    posterior with the observation is needed too, and the weights are those of the mixture::

        v(u) ~ p(u, y) / p(y_n | u) / (p(u | y) + p(T^-1 u | y) / |det T|)

    :param draws: ``(S, P)``, unconstrained, in the order of the chains.
    :param log_joint: log p(u, y) at the draws over the unconstrained numbers, ``(S,)``.
    :param log_likelihood: log p(y_n | u) at the draws, ``(S,)``.
    :param density: a function of draws ``(S, P)`` that returns these two.
    :param power: of p(y_n | u) in p(u, y), which then is to this power in v too.
    :returns: a column as of ``leave_out``, whose k-hat is the larger of those of v and of
        v p(y_n | u); None if no map lowers k-hat.

    Source: Paananen, Piironen, Buerkner, Vehtari (2021), Implicitly adaptive importance sampling.
    """
    u, here, own = double(draws), double(log_joint), double(log_likelihood)
    at = _Affine(u.mean(0), torch.zeros_like(u[0]), torch.ones_like(u[0]))
    weights, start, _ = smooth(-power * own[None], 1.0)
    moved, moved_joint, moved_own, k = u, here, own, start
    for _ in range(_MOST_STEPS):
        if not k > _GOAL:
            break
        for trial in _trials(at, u, moved, weights[0].exp()):
            there = trial(u)
            joint, likelihood = (double(value) for value in density(there.to(draws)))
            ratios = joint - power * likelihood - here
            new_weights, new_k, _ = smooth(_usable(ratios)[None], 1.0)
            if new_k < k:
                at, moved, moved_joint, moved_own = trial, there, joint, likelihood
                weights, k = new_weights, new_k
                break
        else:
            break
    if not k < start:
        return None
    points = (here, own), (moved_joint, moved_own)
    return _of_mixture(at, u, *points, density, start, power)


def _of_mixture(
    at: _Affine,
    u: Tensor,
    here: tuple[Tensor, Tensor],
    moved: tuple[Tensor, Tensor],
    density: Density,
    start: Tensor,
    power: float,
) -> Tensor | None:
    """The column from the even draws, moved, and the odd draws, as they are."""
    even = torch.arange(len(u), device=u.device) % 2 == 0
    joint, likelihood = (torch.where(even, *pair) for pair in zip(moved, here, strict=True))
    back = here[0].clone()  # log p at T^-1 of the points: of the moved ones, where they were
    back[~even] = density(at.inverse(u[~even]))[0].to(back)
    proposal = torch.logaddexp(joint, _usable(back - at.log_det))
    ratios = _usable(joint - power * likelihood - proposal)[None]
    likelihood = likelihood.nan_to_num(-torch.inf)[None]
    column = leave_out(likelihood, ratios, 1.0)[:, 0]
    column[2] = torch.fmax(column[2], smooth(_usable(ratios + likelihood), 1.0)[1][0])
    return column if column[2] < start else None


def _trials(at: _Affine, u: Tensor, moved: Tensor, weights: Tensor) -> Iterator[_Affine]:
    """The next maps: by the mean, the variances, and the covariance of the weighted draws."""
    mean = weights @ moved
    shift = mean - at.center
    yield _Affine(at.center, shift, at.factor)
    unbiased = len(u) / (len(u) - 1)
    spread = unbiased * (weights @ (moved - mean).square()) / moved.var(0)
    if (spread > 0).all():
        yield _Affine(at.center, shift, _times(spread.sqrt(), at.factor))
    if 1 / weights.square().sum() <= u.shape[1] + 1:
        return  # fewer effective draws than numbers: the covariance is singular
    far = moved - mean
    factors = [
        torch.linalg.cholesky_ex(matrix)
        for matrix in (unbiased * (far * weights[:, None]).T @ far, moved.T.cov())
    ]
    if not any(int(factor.info) for factor in factors):
        wanted, present = (factor.L for factor in factors)
        step = torch.linalg.solve_triangular(present, wanted, upper=False, left=False)
        factor = at.factor.diag() if at.factor.dim() == 1 else at.factor
        yield _Affine(at.center, shift, step @ factor)


def _times(factor: Tensor, x: Tensor) -> Tensor:
    """A matrix ``(P, P)``, or a diagonal one ``(P,)``, times a vector or a matrix."""
    if factor.dim() == 2:
        return factor @ x
    return factor * x if x.dim() == 1 else factor[:, None] * x


def _usable(log_weights: Tensor) -> Tensor:
    """Log weights, where a draw without a density weighs nothing."""
    return log_weights.nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
