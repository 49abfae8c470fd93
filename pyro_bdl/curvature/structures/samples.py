"""The exact posterior of the linearized model as samples, from products with the Jacobian alone.

With the curvature G = sum_n J_n' F_n J_n and the prior precision Lambda = R R', a sample is the
minimum of an objective with perturbed data and prior (Antoran et al. 2023, section 3),

    1/2 |F^1/2 J w - e|^2 + 1/2 |w - w_0|^2_Lambda,    e ~ N(0, 1),  w_0 ~ N(0, Lambda^-1),

exactly a draw of N(0, (G + Lambda)^-1). Conjugate gradients solve for its deviation from the draw
w_0 of the prior, with products J v and J' v:

    (G + Lambda) (w - w_0) = J' F^1/2 e - G w_0

The right-hand side is zero in directions that the data do not determine. With Lambda as the
preconditioner w is the prior's draw there, whatever the solve's tolerance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures.base import (
    Curvature,
    Precision,
    Structure,
    Whitened,
    beside,
    named,
    whole_rows,
)
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.conjugate_gradients import conjugate_gradients, lanczos_quadrature
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.validation import real_number, whole_number

# right-hand sides of some numbers (S, p), and their norms (S,)
_RightSides = Callable[[range, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]
_AT_ONCE = 8  # right-hand sides
_STEPS = 2000
_PROBES = 16  # of the log determinant


class SamplesCurvature(Curvature):
    """J' F^1/2 e for S draws of e, (S, p), and the deviations w - w_0 that were solved for last.

    The samples are solved for again, from where they are, when the prior or the noise changes; this
    passes over the data. A posterior that was loaded from a file has its samples alone.

    :param num_samples: S.
    :param tolerance: see ``Samples``.
    """

    is_sampled = True
    makes = "entries"
    values: Tensor
    targets: Tensor
    deviations: Tensor
    seed: Tensor
    solved_prior: Tensor
    solved_factor: Tensor

    def __init__(self, subset: Subset, like: Tensor, *, num_samples: int, tolerance: float) -> None:
        super().__init__()
        self.size = size = subset.size
        self.parts, self.tolerance = dict(subset.parts), tolerance
        self._products: Any = None
        self.register_buffer("values", like.new_zeros(size))
        self.register_buffer("targets", like.new_zeros(num_samples, size))
        self.register_buffer("deviations", like.new_zeros(num_samples, size))
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(2**31)
        self.register_buffer("seed", seed)
        self.register_buffer("solved_prior", like.new_full((size,), torch.nan))
        self.register_buffer("solved_factor", like.new_zeros(()))

    def add(self, jacobian: Jacobian) -> None:
        like = jacobian.like
        noise = torch.randn(
            len(self.targets), jacobian.num_data, jacobian.num_columns,
            dtype=like.dtype, device=like.device,
        )  # fmt: skip
        self.targets += jacobian.combined(noise).to(self.targets)
        for block in jacobian.blocks:
            self.values[block.position.indices] += block.squares().flatten()

    def connect(self, products: Any) -> None:
        self._products = products

    def sums(self) -> list[Tensor]:
        raise UnsupportedProgramError(
            'structure="samples" multiplies by the data of one process: pass the data themselves '
            'instead of a Shard, or use structure="kron"'
        )

    def scale(self, factor: float) -> None:
        self.values *= factor
        self.targets *= factor**0.5

    def merge(self, other: Self) -> None:
        self.values += other.values
        self.targets += other.targets
        self.solved_prior.fill_(torch.nan)
        self._products = self._products + other._products

    def diagonal(self) -> Tensor:
        return self.values

    def products(self) -> Callable[[Tensor], Tensor]:
        """The curvature times vectors (S, p), as a function.

        :raises RuntimeError: where the data are not at hand.
        """
        if self._products is not None:
            return self._products.prepared()
        if not self.values.any():  # no data yet
            return torch.zeros_like
        raise RuntimeError(
            'structure="samples" needs the data for another prior or noise, and for densities: '
            "this posterior was loaded from a file without them; call "
            "laplace_approximation(data) again, at the same point"
        )

    def prior_noise(self, number: int) -> Tensor:
        """xi of one sample, (p,), the same every time."""
        return self._random(number)

    def probe(self, number: int) -> Tensor:
        """A vector of random signs (p,), the same every time."""
        return self._random(len(self.targets) + number).sign()

    def _random(self, number: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(int(self.seed) + number)
        found = torch.randn(self.size, generator=generator, dtype=torch.float64, device="cpu")
        return found.to(self.values)

    def with_prior(self, prior: PriorPrecision, factor: Tensor | float = 1.0) -> "SamplesPrecision":
        return SamplesPrecision(self, prior, factor)


@dataclass(frozen=True)
class Samples(Structure):
    """``structure="samples"``: the posterior of "full" as samples, from products with the Jacobian.

    Nothing grows with p^2, (N K)^2 or a layer's width squared. Variances and covariances are
    estimates whose relative error (standard deviation) is sqrt(2 / S), so that that of a standard
    deviation is about 1 / sqrt(2 S). Memory is about (3 S + 125) p numbers and, during solves, the
    graphs of the data where they fit in an eighth of the free memory, else those of one batch.

    :param num_samples: S.
    :param tolerance: the error of a solve at which it ends, in posterior standard deviations (root
        mean square over the latents, a bound). Products in float32 cannot resolve curvature below
        1e-6 of the largest; such directions keep the prior's variance.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.SAMPLES,)
    num_samples: int = 32
    tolerance: float = 1e-3
    name: str = named("samples")
    curvature: ClassVar = SamplesCurvature

    def __post_init__(self) -> None:
        whole_number(self.num_samples, "num_samples")
        real_number(self.tolerance, "tolerance", "(0, 1)")

    def memory(self, size: int, like: Tensor, num_rows: int = 0) -> int:
        at_once = min(self.num_samples, _AT_ONCE)
        return (3 * self.num_samples + 11 * at_once + 37) * size * like.element_size()


class SamplesPrecision(Precision):
    """The precision factor G + Lambda, and samples of N(0, precision^-1).

    ``solve`` and ``quadratic`` are those of the precision itself. ``sample`` returns the
    samples in random order and with random signs, again and again; covariances are those of the
    stored samples, with mean zero. The log determinant is an estimate by stochastic Lanczos
    quadrature with 16 probes that stay the same (Ubaru, Chen & Saad 2017), and its gradient that of
    the samples, tr(C d precision).
    """

    def __init__(
        self, curvature: SamplesCurvature, prior: PriorPrecision, factor: Tensor | float
    ) -> None:
        self.size, self.curvature = curvature.size, curvature
        self._leaves = prior.diagonal, prior.dense, factor
        dense = None if prior.dense is None else prior.dense.detach()
        self.prior = PriorPrecision(prior.diagonal.detach(), prior.indices, dense, uniform={})
        values = curvature.values
        self.factor = torch.as_tensor(factor, dtype=values.dtype, device=values.device).detach()
        self.root = self.prior.root(curvature.parts, 'structure="samples"')
        self.diagonal = self.factor * curvature.values + self.prior.diagonal.to(curvature.values)

    @cached_property
    @torch.no_grad()
    def samples(self) -> Tensor:
        """The stored samples, (S, p)."""
        curvature = self.curvature
        # The signs times the prior's entries, or sums over the rows of a dense block: a relative
        # change below 1e-5 moves no sample by more than a solve's tolerance, whatever the units.
        mark = self._times_prior(curvature.probe(0))
        pairs = (mark, curvature.solved_prior), (self.factor, curvature.solved_factor)
        same = all(torch.allclose(*pair, rtol=1e-5, atol=0.0) for pair in pairs)
        if not same:
            curvature.deviations = self._solved(self._targets, curvature.deviations)
            curvature.solved_prior, curvature.solved_factor = mark, self.factor
        return self._prior_draws(range(len(curvature.deviations))) + curvature.deviations

    def _prior_draws(self, part: range) -> Tensor:
        """w_0 of some samples."""
        noise = (double(self.curvature.prior_noise(number)) for number in part)
        draws = [self.root.solve_transposed(own).to(self.diagonal) for own in noise]
        return torch.stack(draws)

    def _targets(self, part: range, products: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """J' F^1/2 e - G w_0 of some samples, and sqrt(p), so that errors are in units of the
        posterior's standard deviations."""
        ours = self.factor.sqrt() * self.curvature.targets[part.start : part.stop]
        right = ours - self._times_curvature(products, self._prior_draws(part))
        return right, right.new_full((len(part),), self.size**0.5)

    def _times_prior(self, x: Tensor) -> Tensor:
        return self.root.times(self.root.rmatvec(double(x))).to(x)

    def _times(self, products: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The precision times vectors (S, p)."""
        return self._times_curvature(products, x) + self._times_prior(x)

    def _times_curvature(self, products: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """factor G times vectors (S, p).

        :raises UnsupportedProgramError: if the network's second derivatives, from which the
            products come, are not finite.
        """
        found = self.factor * products(x)
        if not torch.isfinite(found).all():
            raise UnsupportedProgramError(
                'structure="samples" takes products with the Jacobian from second derivatives: '
                "they are not finite here (as of logcumsumexp, or xlogy at zero); use "
                'structure="full", "kernel" or "kron"'
            )
        return found

    def _over_prior(self, x: Tensor) -> Tensor:
        """Lambda^-1 x for x (S, p), the preconditioner."""
        return self.root.solve_transposed(self.root.solve(double(x))).to(x)

    def _solved(self, right: _RightSides, start: Tensor) -> Tensor:
        """precision^-1 b for the vectors b of some numbers, (S, p)."""
        found, tolerance = [], self.curvature.tolerance
        products = self.curvature.products()
        for first in range(0, len(start), _AT_ONCE):
            part = range(first, min(first + _AT_ONCE, len(start)))
            sides, norms = right(part, products)
            solution = conjugate_gradients(
                partial(self._times, products),
                sides,
                self._over_prior,
                self.diagonal,
                start=start[part.start : part.stop],
                limit=tolerance * norms,
                steps=_STEPS,
            )
            found.append(solution.x)
            if not solution.converged:
                warn(
                    f"a solve for samples has not reached the tolerance in {_STEPS} steps: "
                    "give the weights a narrower prior, or take a larger tolerance=",
                    "solves",
                )
        return torch.cat(found)

    @torch.no_grad()
    def _log_determinant(self) -> Tensor:
        """log det Lambda + tr log(R^-1 precision R^-T), the trace from probes."""
        total = self.root.log_det()
        products, at_once = self.curvature.products(), min(len(self.curvature.targets), _AT_ONCE)
        for first in range(0, _PROBES, at_once):
            part = range(first, min(first + at_once, _PROBES))
            signs = torch.stack([self.curvature.probe(number) for number in part])
            solution = conjugate_gradients(
                partial(self._times, products),
                self.root.times(double(signs)).to(signs),
                self._over_prior,
                self.diagonal,
                limit=self.curvature.tolerance * self.size**0.5,
                steps=_STEPS,
            )
            found = lanczos_quadrature(solution, torch.log)
            total = total + self.size * found.sum() / _PROBES
        return total

    def logdet(self) -> Tensor:
        value, prior = self._log_determinant().to(self.diagonal), self.prior
        diagonal, dense, factor = self._leaves
        factor = beside(factor, self.diagonal)
        variances = self.variances().to(prior.diagonal)
        slope, inside = variances * diagonal, variances * prior.diagonal  # of C Lambda
        if prior.indices is not None and prior.dense is not None:
            assert dense is not None
            block = self.samples[:, prior.indices].to(prior.dense)
            block = block.mT @ block / len(block)
            slope, inside = (x.index_fill(0, prior.indices, 0.0) for x in (slope, inside))
            slope = slope.sum() + (block * dense).sum()
            inside = inside.sum() + (block * prior.dense).sum()
        rest = (self.size - inside.sum()) / self.factor
        slope = slope.sum() + rest * factor
        return value + (slope - slope.detach())

    def sample(self, num_samples: int) -> Tensor:
        samples = self.samples
        rounds = -(-num_samples // len(samples))
        order = torch.cat([torch.randperm(len(samples), device="cpu") for _ in range(rounds)])
        signs = torch.randint(0, 2, (num_samples, 1), device="cpu").to(samples) * 2 - 1
        return samples[order[:num_samples].to(samples.device)] * signs

    @torch.no_grad()
    def quadratic(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.size).to(self.diagonal)
        products = self.curvature.products()
        found = (self._times(products, rows) * rows).sum(-1)
        return found.reshape(x.shape[:-1])

    @torch.no_grad()
    def solve(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.size).to(self.diagonal)

        def right(part: range, products: Any) -> tuple[Tensor, Tensor]:
            sides = rows[part.start : part.stop]
            return sides, (sides * self._over_prior(sides)).sum(-1).sqrt()

        return self._solved(right, torch.zeros_like(rows)).reshape(x.shape)

    def precondition(self, x: Tensor) -> Tensor:
        return x / self.diagonal

    @cached_property
    @torch.no_grad()
    def _variances(self) -> Tensor:
        """By regression of w on its prior noise, Lambda_ii^1/2 w_i = r xi_i + rest.

        The slope is r = Lambda_ii C_ii, so that C_ii Lambda_ii = r^2 + var(rest), which is exact
        where the data say nothing and w_i is the prior's draw.
        """
        samples, scale = self.samples, self.root.diagonal.to(self.diagonal)
        count = len(samples)
        ours, both, prior = (torch.zeros_like(scale) for _ in range(3))
        for number, sample in enumerate(samples):
            noise = self.curvature.prior_noise(number)
            ours += sample.square() / count
            both += scale * sample * noise / count
            prior += noise.square() / count
        slope = both / prior
        found = (scale.square() * ours + slope.square() * (1.0 - prior)) / scale.square()
        if self.root.indices is None:
            return found
        indices = self.root.indices.to(found.device)
        return found.index_copy(0, indices, ours[indices])

    def variances(self) -> Tensor:
        return self._variances

    def whitened(self, jacobian: Jacobian) -> list[Whitened]:
        samples = self.samples
        outputs = jacobian.apply(samples.to(jacobian.like)) / len(samples) ** 0.5
        return [whole_rows(jacobian, outputs.permute(2, 1, 0))]
