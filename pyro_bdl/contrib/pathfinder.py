"""Pathfinder: a Gaussian along the way of an optimizer to the mode, without any training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bdl.curvature.structures.base import log_prob
from pyro_bdl.errors import warn
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.program.gaussian_prior import StoredPrecision
from pyro_bdl.program.program import Program
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import whole_number

_RADIUS = 2.0  # of the starts of further paths, as in Stan
_SMALLEST = 1e-12  # of s'y / y'y, below which a step says nothing about the curvature


@dataclass(frozen=True)
class InverseHessian:
    """N(0, Sigma) with Sigma = S (I + Q (L L' - I) Q') S, S = diag(s) and orthonormal columns in Q.

    It has the methods of a ``Precision`` that a density needs.

    :param scale: s (P,).
    :param basis: Q (P, r).
    :param tril: L (r, r).
    """

    scale: Tensor
    basis: Tensor
    tril: Tensor
    dense = independent = False

    @property
    def size(self) -> int:
        return len(self.scale)

    def times(self, vector: Tensor) -> Tensor:
        """Sigma v for v (P,)."""
        v = self.scale * vector
        w = self.basis.mT @ v
        return self.scale * (v + self.basis @ (self.tril @ (self.tril.mT @ w) - w))

    def root_times(self, noise: Tensor) -> Tensor:
        """S (I + Q (L - I) Q') z for rows z (..., P), which have covariance Sigma."""
        w = noise @ self.basis
        return self.scale * (noise + (w @ self.tril.mT - w) @ self.basis.mT)

    def sample(self, num_samples: int) -> Tensor:
        """Draws (num_samples, P)."""
        like = self.scale
        noise = torch.randn(num_samples, len(like), dtype=like.dtype, device=like.device)
        return self.root_times(noise)

    def quadratic(self, x: Tensor) -> Tensor:
        """x' Sigma^-1 x for x (..., P)."""
        v = x / self.scale
        w = v @ self.basis
        inner = torch.linalg.solve_triangular(self.tril, w[..., None], upper=False)[..., 0]
        return v.square().sum(-1) - w.square().sum(-1) + inner.square().sum(-1)

    def logdet(self) -> Tensor:
        """log det Sigma^-1."""
        return -2 * (self.scale.log().sum() + self.tril.diagonal().log().sum())

    def variances(self) -> Tensor:
        """The diagonal of Sigma (P,)."""
        change = self.tril @ self.tril.mT - identity(len(self.tril), self.tril)
        inner = (self.basis @ change * self.basis).sum(-1)
        return self.scale.square() * (1 + inner).clamp(min=torch.finfo(inner.dtype).tiny)


class AutoPathfinder(NormalGuide):
    """q(u) = Normal(m, Sigma) from L-BFGS on the way to the mode of the unconstrained density.

    At each point x_l of the way, with gradient g_l of log p(u, y), L-BFGS's estimate of the inverse
    Hessian gives a Gaussian, and the one with the largest ELBO is taken::

        Sigma_l = diag(alpha_l) + low rank (2 history),    m_l = x_l + Sigma_l g_l

    It takes some hundred gradients in all, no step of SVI, and no Hessian. The first run,
    ``guide.prototype(x, y)``, does all of it with the data given, which must be all data; there are
    no parameters to train. Draws are a start for
    chains (``mcmc.sample(..., init=guide)``), and the covariance a metric
    (``mcmc.NUTS(inverse_mass=guide.variances())``). How good it is as a posterior k-hat says
    (``bdl.importance``).

    :param model: a Pyro program with continuous latents.
    :param num_paths: how many ways are tried; the first from the initial values, the others from
        uniform numbers between -2 and 2; the one with the largest ELBO is taken.
    :param history: the steps that L-BFGS remembers.
    :param num_draws: draws for each ELBO.
    :param most_steps: of each path.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for numbers below 1; in the first run, if no point of the path has a finite
        ELBO.

    Source: Zhang, Carpenter, Gelman & Vehtari (2022), Pathfinder: Parallel quasi-Newton variational
    inference, algorithms 1 to 4.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.PATHFINDER,)
    starts_at_a_vector = False
    loc: Tensor
    scale: Tensor
    basis: Tensor
    tril: Tensor
    elbos: Tensor

    def __init__(
        self,
        model: Callable,
        *,
        num_paths: int = 1,
        history: int = 6,
        num_draws: int = 10,
        most_steps: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.num_paths = whole_number(num_paths, "num_paths")
        self.history = whole_number(history, "history")
        self.num_draws = whole_number(num_draws, "num_draws")
        self.most_steps = whole_number(most_steps, "most_steps")

    def options(self) -> dict[str, Any]:
        names = ("num_paths", "history", "num_draws", "most_steps")
        return {name: getattr(self, name) for name in names}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        is_loaded = self._loaded is not None
        super()._setup_prototype(*args, **kwargs)
        if not is_loaded:
            self._fit(args, kwargs)

    def create_parameters(self, start: Tensor) -> None:
        self.subset, rank = Subset(self.require_layout()), min(len(start), 2 * self.history)
        self.register_buffer("loc", start.clone())
        self.register_buffer("scale", torch.ones_like(start))
        self.register_buffer("basis", start.new_zeros(len(start), rank))
        self.register_buffer("tril", identity(rank, start))
        self.register_buffer("elbos", start.new_zeros(self.num_paths))

    def _fit(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Follow the paths, and take the best Gaussian.

        ``elbos`` holds the largest ELBO of each path, in nats.
        """
        model = self.program_model
        starts = [self.loc] + [
            _RADIUS * (2 * torch.rand_like(self.loc) - 1) for _ in range(1, self.num_paths)
        ]
        with evaluation_mode(self.program_modules), torch.no_grad():
            program = Program(model, *args, **kwargs)
            program.require_observed()
            found = [self._best_on_path(program, start) for start in starts]
            _, loc, best = max(found, key=lambda path: path[0])
            if best is None:
                raise ValueError(
                    "no point on the way of L-BFGS has a Gaussian with a finite ELBO: start "
                    "elsewhere (init_loc_fn=), or try several paths (num_paths=)"
                )
            rank = len(best.tril)
            self.elbos.copy_(self.elbos.new_tensor([value for value, _, _ in found]))
            self.loc.copy_(loc)
            self.scale.copy_(best.scale)
            self.basis[:, :rank] = best.basis
            self.tril[:rank, :rank] = best.tril

    def _best_on_path(
        self, program: Program, start: Tensor
    ) -> tuple[float, Tensor, InverseHessian | None]:
        noise = torch.randn(self.num_draws, len(start), dtype=start.dtype, device=start.device)
        best: tuple[float, Tensor, InverseHessian | None] = -math.inf, start, None
        points, gradients = lbfgs_path(program, start, self.history, self.most_steps)
        for loc, exact in gaussians(points, gradients, self.history):
            gaussian = InverseHessian(*(part.to(start) for part in vars(exact).values()))
            value = elbo(program, loc.to(start), gaussian, noise)
            if math.isfinite(value) and value > best[0]:
                best = value, loc.to(start), gaussian
        return best

    @property
    def precision(self) -> InverseHessian:
        self.require_layout()
        return InverseHessian(self.scale, self.basis, self.tril)

    def stored_precision(self) -> StoredPrecision:
        return StoredPrecision(InverseHessian, self.scale, self.basis, self.tril)

    def location(self) -> Tensor:
        self.require_layout()
        return self.loc

    def covariance(self) -> Tensor:
        """Sigma (P, P), for example as the metric of a chain."""
        root = self.precision.root_times(identity(len(self.loc), self.loc))
        return root.mT @ root

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TorchDistribution:
        """q over the unconstrained vector (P,), a MultivariateNormal."""
        self._prototype_if_given(args, kwargs)
        return dist.MultivariateNormal(self.location(), self.covariance())


def identity(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def elbo(program: Program, loc: Tensor, gaussian: InverseHessian, noise: Tensor) -> float:
    """The ELBO of Normal(loc, Sigma) in nats, from the draws made of noise (S, P)."""
    offsets = gaussian.root_times(noise)
    values = map_draws(lambda draw: program.log_density(draw["u"]), {"u": loc + offsets})
    return float((values - log_prob(gaussian, offsets)).mean())


def lbfgs_path(
    program: Program, start: Tensor, history: int, most_steps: int
) -> tuple[Tensor, Tensor]:
    """The points of L-BFGS on -log p(u, y) and the gradients of log p there, float64 (L + 1, P)."""
    seen: dict[bytes, np.ndarray] = {}

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(x).to(start, copy=True).requires_grad_()
        with torch.enable_grad():
            value = program.log_density(leaf)
            (gradient,) = torch.autograd.grad(value, leaf)
        slope = double(gradient).cpu().numpy()
        number = float(value)
        if not (math.isfinite(number) and np.isfinite(slope).all()):
            return 1e300, np.zeros_like(slope)
        seen[x.tobytes()] = slope
        return -number, -slope

    points = [double(start).cpu().numpy()]

    def after(x: np.ndarray) -> None:
        points.append(x.copy())

    from scipy.optimize import minimize  # imported when needed, it takes long

    found = minimize(
        negative, points[0], jac=True, method="L-BFGS-B", callback=after,
        options={"maxcor": history, "maxiter": most_steps, "maxfun": 20 * most_steps},
    )  # fmt: skip
    if found.nit >= most_steps:
        warn(
            f"L-BFGS had not reached the mode after {most_steps} steps: raise most_steps",
            "not-at-a-maximum",
        )
    points = [point for point in points if point.tobytes() in seen]
    gradients = [seen[point.tobytes()] for point in points]
    return torch.from_numpy(np.stack(points)), torch.from_numpy(np.stack(gradients))


def gaussians(points: Tensor, gradients: Tensor, history: int) -> Any:
    """Mean (P,) and covariance of the Gaussian at each point after the first, float64."""
    alpha = torch.ones_like(points[0])
    steps: list[Tensor] = []
    slopes: list[Tensor] = []
    for i in range(1, len(points)):
        step, slope = points[i] - points[i - 1], gradients[i - 1] - gradients[i]
        if float(step @ slope) > _SMALLEST * float(slope @ slope):
            alpha = next_diagonal(alpha, step, slope)
            steps, slopes = [*steps, step][-history:], [*slopes, slope][-history:]
        if not steps:
            continue
        gaussian = inverse_hessian(alpha, torch.stack(steps, -1), torch.stack(slopes, -1))
        if gaussian is not None:
            yield points[i] + gaussian.times(gradients[i]), gaussian


def next_diagonal(alpha: Tensor, step: Tensor, slope: Tensor) -> Tensor:
    """The diagonal (P,) of Gilbert & Lemarechal (1989), equation 4.9, as in algorithm 3."""
    a = slope @ (alpha * slope)
    b = slope @ step
    c = step @ (step / alpha)
    return 1 / (a / (b * alpha) + slope.square() / b - a * step.square() / (b * c * alpha.square()))


def inverse_hessian(alpha: Tensor, steps: Tensor, slopes: Tensor) -> InverseHessian | None:
    """The estimate of L-BFGS from a diagonal and the last pairs, in compact form.

    With S and Y the steps and the differences of gradients (P, J), E the upper triangle of S'Y and
    D its diagonal (Byrd, Nocedal & Schnabel 1994, theorem 2.2)::

        H = diag(alpha) + B G B',    B = [diag(alpha) Y, S]
        G = [[0, -E^-1], [-E^-T, E^-T (D + Y' diag(alpha) Y) E^-1]]

    :returns: None if it is not positive definite to rounding.
    """
    products = steps.mT @ slopes
    upper = products.triu()
    scaled = alpha[:, None] * slopes
    count = len(products)
    eye = identity(count, alpha)
    inverse = torch.linalg.solve_triangular(upper, eye, upper=True)
    middle = torch.diag(products.diagonal()) + slopes.mT @ scaled
    corner = inverse.mT @ middle @ inverse
    top = torch.cat([torch.zeros_like(inverse), -inverse], 1)
    inner = torch.cat([top, torch.cat([-inverse.mT, corner], 1)])
    root = alpha.sqrt()
    basis, triangle = torch.linalg.qr(torch.cat([scaled, steps], 1) / root[:, None])
    core = triangle @ inner @ triangle.mT
    core = identity(len(core), core) + 0.5 * (core + core.mT)
    tril, info = torch.linalg.cholesky_ex(core)
    if int(info) or not bool(tril.isfinite().all() and (alpha > 0).all()):
        return None
    return InverseHessian(root, basis, tril)
