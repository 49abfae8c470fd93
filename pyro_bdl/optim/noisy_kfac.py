"""Noisy K-FAC: natural-gradient variational inference with a matrix normal for every weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_bdl.curvature.fit import site_jacobians
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.structures.kron.curvature import KroneckerCurvature
from pyro_bdl.curvature.structures.kron.factors import WeightFactors, decompose
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.matrix_normal import AutoMatrixNormal
from pyro_bdl.optim.base import NaturalGradient, NaturalStep
from pyro_bdl.optim.vogn import GaussNewton_ELBO
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import require

_ROUNDING = 1e-3  # relative rounding error of a change whose terms almost cancel


class KroneckerGaussNewton_ELBO(GaussNewton_ELBO):
    """L(eta) of an ``AutoMatrixNormal`` with gradients in its factors from K-FAC's curvature.

    The value is that of ``TemperedTraceMeanField_ELBO``. The Gauss-Newton matrix of a weight is
    approximated by G kron A, with A = sum a a' of the layer's inputs and G = (1/N) sum g g' of the
    gradients in its outputs (Martens & Grosse 2015), at the draw and scaled up to all data. For
    q(W) = MN(M, U, V) the gradients in the factors of U and V are those of its expectation::

        E_q[(w - m)' (G kron A) (w - m)] / 2  =  tr(G U) tr(A V) / 2

    Other latents, and weights of several uses or groups, have the diagonal of the curvature.

    :param temperature: see ``GaussNewton_ELBO``, which also explains ``num_particles``,
        ``cold_temperature`` and ``curvature``.
    :raises TypeError: at a step, for another guide than an ``AutoMatrixNormal``.
    """

    family: ClassVar[type[Guide]] = AutoMatrixNormal
    structure: ClassVar[str] = "kron"

    def quadratic(self, guide: Any, at: Linearization) -> Tensor:
        variances = guide.variances()
        total = variances.new_zeros(())
        for name, site in at.run.observed.items():
            curvature = KroneckerCurvature(at.subset, at.vector.detach())
            for jacobian in site_jacobians(at, name, self.config):
                curvature.add(jacobian)
            curvature.end_batch()
            total = total + site.subsampling * _quadratic(guide, curvature, variances)
        return 0.5 * total


def _quadratic(guide: AutoMatrixNormal, curvature: KroneckerCurvature, variances: Tensor) -> Tensor:
    """E_q[(w - m)' H (w - m)], with the diagonal of H where it has no factors of a whole matrix."""
    slices = guide.require_layout().slices
    total = variances.new_zeros(())
    rest = []
    for part in curvature.parts.values():
        name = part.position.key[0]
        order = _order(part, slices[name]) if name in guide.matrices else None
        if order is None:
            rest.append(part)
            continue
        first, second = guide.factors(name)
        rows, columns = (first, second) if order == "rows" else (second, first)
        inputs, outputs = part.inputs.as_matrix()[0], part.outputs.as_matrix()[0]
        traces = _trace(outputs, rows) * _trace(inputs, columns)
        total = total + traces / part.count.to(variances).clamp(min=1.0)
    for part in rest:
        decompose(part.factors if isinstance(part, WeightFactors) else [])
        places = part.position.index_tensor(variances.device)
        total = total + torch.dot(part.diagonal().to(variances), variances[places])
    return total


def _order(part: Any, site: slice) -> str | None:
    """Which of the site's axes numbers the outputs: "rows" or "columns"; None without Kronecker
    factors of the site as one matrix."""
    if not isinstance(part, WeightFactors) or part.inputs is None:
        return None
    (groups, out, into), size = part.shape, site.stop - site.start
    if groups != 1 or out * into != size:
        return None
    places = part.position.index_tensor(torch.device("cpu")).cpu() - site.start
    numbers = torch.arange(size, device="cpu")
    if torch.equal(places, numbers):
        return "rows"
    return "columns" if torch.equal(places, numbers.view(into, out).mT.reshape(-1)) else None


def _trace(matrix: Tensor, factor: Tensor) -> Tensor:
    """tr(S F F') for a factor F, (n, n) or diagonal (n,)."""
    matrix = matrix.to(factor)
    if factor.dim() == 1:
        return torch.dot(matrix.diagonal(), factor.square())
    return (matrix @ factor * factor).sum()


class NoisyKFAC(NaturalGradient):
    """Natural-gradient variational inference with a Kronecker-factored covariance.

    For the loss L of a ``KroneckerGaussNewton_ELBO`` on an ``AutoMatrixNormal``, with q(W) =
    MN(M, A A', B B') for a p x q weight matrix::

        C  = A' (dL/dU) A 2 / (eta q),         U <- A (I + rho C)^-1 A'
        D  = B' (dL/dV) B 2 / (eta p),         V <- B (I + rho D)^-1 B'
        g <- b1 g + (1 - b1) dL/dM
        M <- M - lr A clip(A' g B / ((1 - b1^t) eta)) B',     rho = (1 - b2) sqrt(lr / l)

    eta is the temperature of the ELBO (or T of its cold mode).
    The precision U^-1 thus moves by the fraction rho toward the one at which L is stationary,
    [tr(A V) G + prior] / (eta q), a moving average of K-FAC's factors; l is the largest lr so far.
    The prior enters by its exact expectation. Zhang et al. (2018) add it as factored damping
    instead, which is not exact even if the posterior is a matrix normal. Latents that are not
    matrices move as in ``VOGN``.

    :param guide: after ``guide.prototype``.
    :param lr: the learning rate of the location; 1 is a Newton step. Torch's schedulers can change
        it.
    :param betas: b1 of the momentum and b2 of the precisions.
    :param clip: the location moves by at most lr * clip standard deviations in a step, in each
        direction of the covariance's factors.
    :raises TypeError: for another class of guide.
    :raises ValueError: for a number out of range.
    """

    def parameters_of(self, guide: Any) -> list[Tensor]:
        require(guide, AutoMatrixNormal, "NoisyKFAC moves the factors of an AutoMatrixNormal")
        guide.require_layout()
        return list(guide.parameters())

    def move(self, step: NaturalStep, *, lr: float, clip: float) -> None:
        guide, eta, moved = self.guide, step.temperature, {}
        layout = guide.require_layout()
        for k, name in enumerate(guide.matrices):
            sides = [len(factor) for factor in guide.factors(name)]
            for kind, other in (("row", sides[1]), ("column", sides[0])):
                moved[f"{kind}_{k}"] = self._factor(f"{kind}_{k}", eta * other, step.rate)
        if "scale_unconstrained" in guide._parameters:
            moved["scale"] = self._factor("scale", eta, step.rate)
        for name, value in moved.items():
            setattr(guide, name, value)
        steps = self._times_covariance(layout.unflatten(step.gradient / eta), clip)
        guide.loc.sub_(lr * layout.flatten(steps))

    def _factor(self, name: str, weight: float, rate: float) -> Tensor:
        """The factor after a step: A times the Cholesky factor of (I + rho C)^-1."""
        free: Any = getattr(self.guide, f"{name}_unconstrained")
        factor = getattr(self.guide, name)
        if factor.dim() == 1:
            change = factor * free.grad / torch.expm1(-factor).neg() / weight
            self._check(bool((change < -1.0 - _ROUNDING).any()))
            return factor * (1.0 + rate * change).rsqrt()
        diagonal = factor.diagonal()
        gradient = free.grad.tril()
        chain = torch.expm1(-diagonal).neg()  # of softplus on the diagonal
        gradient = gradient + torch.diag(gradient.diagonal() * (1 / chain - 1))
        lower = double(factor.mT @ gradient).tril() / weight
        change = lower + lower.tril(-1).mT
        identity = torch.eye(len(change), dtype=change.dtype, device=change.device)
        self._check(bool((change.diagonal() < -1.0 - _ROUNDING).any()))
        root, failed = torch.linalg.cholesky_ex(identity + rate * change)
        self._check(bool(failed))
        inverse = torch.cholesky_inverse(root)
        return (double(factor) @ torch.linalg.cholesky(inverse)).to(factor).tril()

    def _check(self, failed: bool) -> None:
        if failed:
            raise RuntimeError(
                "the precision asked for is not positive: train NoisyKFAC with the loss of a "
                "KroneckerGaussNewton_ELBO"
            )

    def _times_covariance(self, gradients: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
        """The covariance times a gradient, clipped in the factors' directions."""
        steps, guide = {}, self.guide
        scales = guide.scales()
        for name, gradient in gradients.items():
            if name not in guide.matrices:
                scale = scales[name]
                steps[name] = scale * (scale * gradient).clamp(-clip, clip)
                continue
            rows, columns = (torch.diag(f) if f.dim() == 1 else f for f in guide.factors(name))
            matrix = gradient.reshape(len(rows), len(columns))
            white = (rows.mT @ matrix @ columns).clamp(-clip, clip)
            steps[name] = (rows @ white @ columns.mT).reshape(gradient.shape)
        return steps
