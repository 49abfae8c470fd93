"""Any posterior as a surrogate of BoTorch, for Bayesian optimization."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import latent_draws, samples_of_mcmc
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.linearized import LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.random_state import seeded

try:
    from botorch.exceptions.errors import UnsupportedError
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import FantasizeMixin, Model
    from botorch.models.transforms.input import AffineInputTransform
    from botorch.posteriors import GPyTorchPosterior, Posterior
    from botorch.posteriors.ensemble import EnsemblePosterior
    from botorch.sampling.get_sampler import GetSampler
    from botorch.sampling.index_sampler import IndexSampler
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError(
        'pyro_bdl.contrib.botorch needs BoTorch: pip install "pyro-bdl[botorch]"'
    ) from error


class PosteriorModel(Model, FantasizeMixin):
    """The functions f of a program under a posterior, as a model of BoTorch.

    ``posterior(X)`` is differentiable in X, (*batch, q, d). A Laplace approximation, or another
    Gaussian of the linearized program, gives a joint Gaussian of f at the q points, f(x; u*) +
    J(x) (u - u*), and can be conditioned on observations. Of any other posterior there are S
    draws, the same in all calls, as an ``EnsemblePosterior``.

    :param model: the program, called with X as rows (N, d) in the posterior's dtype.
    :param posterior: a guide, ``Samples``, an MCMC after its run, or a dict of draws.
    :param num_outputs: m, the number of outputs of f.
    :param num_samples: S; by default all draws of ``Samples``, or 100 of a guide.
    :param site: the deterministic site of f; the ready-made programs name it "f".
    :param seed: of the draws.
    :param input_transform: of BoTorch, applied to X; ``outcome_transform``: undone on f.
    :param train_inputs: X (N, d) before the transform, from which an input transform that learns
        its coefficients, such as ``Normalize(d)``, takes them; one that was called in training mode
        has them already.
    :raises ValueError: for an input transform that has not learned them.
    """

    likelihood = None  # which ``fantasize`` looks at

    def __init__(
        self,
        model: Callable,
        posterior: Any,
        *,
        num_outputs: int = 1,
        num_samples: int | None = None,
        site: str = "f",
        seed: int = 0,
        input_transform: Any = None,
        outcome_transform: Any = None,
        train_inputs: Tensor | None = None,
    ) -> None:
        super().__init__()
        posterior = samples_of_mcmc(posterior)
        if isinstance(posterior, Guide | Samples) and not is_linear(posterior):
            with seeded(seed):
                draws = latent_draws(posterior, num_samples)
            posterior = Samples({name: value[None] for name, value in draws.items()})
        # no module itself, so that the program's modes and device stay as they are
        self._predictive: Any = (
            LinearizedPredictive(model, posterior, num_samples, seed=seed)
            if is_linear(posterior)
            else Predictive(model, posterior, num_samples, differentiable=True)
        )
        self._is_gaussian = is_linear(posterior) and not isinstance(posterior, MixtureGuide)
        self.site, self.seed, self._size = site, seed, num_outputs
        self._outputs = list(range(num_outputs))
        self._observed: tuple[Tensor, ...] | None = None  # X, Y and the variance of the noise
        if input_transform is not None:
            self.input_transform = _learned(input_transform, train_inputs)
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the observations in ``condition_on_observations``; () without any."""
        return torch.Size() if self._observed is None else self._observed[1].shape[:-2]

    def subset_output(self, idcs: list[int]) -> "PosteriorModel":
        result = copy.copy(self)
        result._modules = dict(self._modules)
        result._outputs = [self._outputs[index] for index in idcs]
        if hasattr(self, "outcome_transform"):
            result.outcome_transform = self.outcome_transform.subset_output(idcs)
        return result

    def posterior(  # type: ignore[override]  # that of FantasizeMixin has keywords only
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Posterior:
        """The posterior of f at X, or of y.

        :param observation_noise: add the noise of y; of a Gaussian f, Normal noise or a given
            variance, (..., q or 1, m).
        """
        if output_indices is not None:
            chosen = self.subset_output(output_indices)
            return chosen.posterior(X, None, observation_noise, posterior_transform)
        self.eval()
        x = self.transform_inputs(X)
        transform = getattr(self, "outcome_transform", None)
        if self._is_gaussian:
            result: Posterior = GPyTorchPosterior(self._normal(x, observation_noise))
            result = result if transform is None else transform.untransform_posterior(result, X=X)
        else:
            if isinstance(observation_noise, Tensor):
                raise UnsupportedError("draws of f take no noise of a given variance")
            draws = self._draws(self._predictive, x, noisy=observation_noise)
            draws = draws if transform is None else transform.untransform(draws, X=X)[0]
            result = _DrawsPosterior(draws.movedim(0, -3))
        return result if posterior_transform is None else posterior_transform(result, X=X)

    def draw(self, index: int) -> GenericDeterministicModel:
        """Draw number ``index`` of f as a function of X, the same in all calls, for Thompson
        sampling: member ``index`` of an ``EnsemblePosterior``, or any number for a Gaussian."""
        if self._observed is not None:
            raise UnsupportedError("take draws of f before condition_on_observations, not after")
        predictive = self._predictive
        model, posterior = predictive.model, predictive.posterior
        if self._is_gaussian:
            predictive, index = LinearizedPredictive(model, posterior, 1, seed=self.seed + index), 0
        elif isinstance(posterior, Samples):
            draw = {name: value[:, index, None] for name, value in posterior.latents.items()}
            predictive, index = Predictive(model, Samples(draw), differentiable=True), 0

        def function(X: Tensor) -> Tensor:
            value = self._draws(predictive, self.transform_inputs(X))[index]
            transform = getattr(self, "outcome_transform", None)
            return value if transform is None else transform.untransform(value, X=X)[0]

        return GenericDeterministicModel(function, self.num_outputs)

    def fantasize(self, *args: Any, **kwargs: Any) -> "PosteriorModel":
        """The model given observations that it draws itself.

        :raises UnsupportedError: unless f is Gaussian.
        """
        if not self._is_gaussian:
            raise UnsupportedError(
                "acquisition functions that look ahead by fantasies (knowledge gradient, negative "
                "integrated posterior variance) need a linearized Gaussian, as of "
                "laplace_approximation, and this posterior is draws of f: use one that does not "
                "look ahead, such as qLogExpectedImprovement"
            )
        return super().fantasize(*args, **kwargs)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "PosteriorModel":
        """The model given more observations, exactly for the linearized program.

        :param X: (*batch, n, d); ``Y``: (*more, *batch, n, m).
        :param noise: the variance of Y, as Y; by default that of the program's Normal noise.
        :raises UnsupportedError: unless f is Gaussian and the noise a Normal of known scale.
        """
        if not self._is_gaussian:
            raise UnsupportedError(
                "only a linearized Gaussian, as of laplace_approximation, can be conditioned on "
                "observations: fit the posterior to all data"
            )
        if self.num_outputs < self._size:
            raise UnsupportedError("condition the model of all outputs, then take its subset")
        self.eval()
        x = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            Y, noise = self.outcome_transform(Y, noise)
        noise = self._noise(x, known=True) if noise is None else noise
        given = x, Y, noise.expand(torch.broadcast_shapes(noise.shape, (*x.shape[:-1], self._size)))
        result = copy.copy(self)
        result._observed = tuple(map(_joined, self._observed, given)) if self._observed else given
        return result

    def _draws(self, predictive: Any, x: Tensor, *, noisy: bool = False) -> Tensor:
        """Draws of the chosen outputs of f or y, (S, *batch, q, m)."""
        with seeded(self.seed):
            observed, values = predictive.observe(self._rows(x))
        if noisy:
            values = {name: site.draws for name, site in observed.items()}
        names = list(values) if noisy else [self.site]
        if len(names) != 1 or names[0] not in values:
            raise ValueError(
                f"one site is needed, '{self.site}' or that of y, and the program has "
                f"{', '.join(map(repr, values)) or 'none'}: name a deterministic one by site="
            )
        return self._shaped(values[names[0]], x, len(values[names[0]]))[..., self._outputs]

    def _normal(self, x: Tensor, noise: bool | Tensor) -> MultivariateNormal:
        """The joint Gaussian of the chosen outputs at q points, data before outputs."""
        if self._observed is None:
            mean, covariance = self._moments(x)
        else:
            mean, covariance = self._conditioned(x, *self._observed)
        q, outputs = x.shape[-2], torch.tensor(self._outputs, device=x.device)
        starts = self._size * torch.arange(q, device=x.device)[:, None]
        chosen = (starts + outputs).flatten()
        mean, covariance = mean[..., chosen], covariance[..., chosen[:, None], chosen]
        if isinstance(noise, Tensor) or noise:
            variance = noise if isinstance(noise, Tensor) else self._noise(x)[..., self._outputs]
            variance = variance.expand(*variance.shape[:-2], q, len(outputs))
            covariance = covariance + torch.diag_embed(variance.flatten(-2))
        operator = to_linear_operator(covariance)  # which may be singular, in a linear model
        if len(outputs) == 1:
            return MultivariateNormal(mean, operator)
        return MultitaskMultivariateNormal(mean.unflatten(-1, (q, -1)), operator)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (*batch, q m) and the covariance (*batch, q m, q m) of f."""
        found = self._predictive.joint_parameter_covariance(
            self._rows(x), sites=[self.site], group=x.shape[-2]
        )
        mean, covariance = found[self.site]
        return self._shaped(mean, x).flatten(-2), covariance.to(x).reshape(
            *x.shape[:-2], *covariance.shape[1:]
        )

    def _conditioned(self, x: Tensor, *observed: Tensor) -> tuple[Tensor, Tensor]:
        """The moments of f at x given observations, N(m + K G (y - m_o), K_xx - K G K')."""
        x_o, y, noise = observed
        mean, covariance = self._moments(_joined(x, x_o))
        new = x.shape[-2] * self._size
        cross, inner = covariance[..., new:, :new], covariance[..., new:, new:]
        factor = torch.linalg.cholesky(inner + torch.diag_embed(noise.flatten(-2)))
        gain = torch.cholesky_solve(cross, factor).mT
        rest = (y.flatten(-2) - mean[..., new:])[..., None]
        moved = mean[..., :new] + (gain @ rest)[..., 0]
        left = covariance[..., :new, :new] - gain @ cross
        return moved, left.expand(*moved.shape, new)

    def _noise(self, x: Tensor, *, known: bool = False) -> Tensor:
        """The variance of Normal noise at x, (*batch, q, m).

        :param known: refuse a scale that depends on the latents.
        """
        found, *others = self._predictive.parameter_moments(self._rows(x)).values()
        if others or found.noise_variance is None or (known and "scale" in found.variance):
            kind = (
                ", whose scale is no latent: give the program's noise a number, or" if known else ""
            )
            what = "conditioning on more data" if known else "the noise of observations"
            remedy = " fit again with the new data" if known else ""
            raise UnsupportedError(
                f"{what} needs a program with one observed site, Normal{kind}{remedy}"
            )
        return self._shaped(found.noise_variance, x)

    def _rows(self, x: Tensor) -> Tensor:
        posterior, like = self._predictive.posterior, x
        if self._is_gaussian:
            like = posterior.location()
        elif isinstance(posterior, Samples):
            like = next(v for v in posterior.latents.values() if v.is_floating_point())
        return x.flatten(0, -2).to(like)

    def _shaped(self, values: Tensor, x: Tensor, *leading: int) -> Tensor:
        """Values of all rows by draw, batch, point and output."""
        shape = (*leading, *x.shape[:-1], self._size)
        if values.numel() != math.prod(shape):
            raise ValueError(
                f"a site has shape {tuple(values.shape)} at {x.shape[:-1].numel()} points, which "
                f"are not num_outputs={self._size} numbers of each"
            )
        return values.reshape(shape).to(x)

    def _set_transformed_inputs(self) -> None:
        """Nothing: the training inputs are the program's own affair."""


class _DrawsPosterior(EnsemblePosterior):
    """Draws of f that acquisition functions take in turn, the same at all points."""

    @property
    def base_sample_shape(self) -> torch.Size:
        raise UnsupportedError(
            "draws of f have no Normal base samples, which the acquisition function or its sampler "
            "asks for: leave the sampler to it (get_sampler), or use a linearized Gaussian"
        )


class _InTurn(IndexSampler):
    """Sample i of n is draw number i S / n of S, in every batch: ``IndexSampler`` chooses others
    for each batch, so that acquisition functions have noise over X."""

    def _construct_base_samples(self, posterior: EnsemblePosterior) -> None:
        size, batch = posterior.ensemble_size, posterior.batch_shape
        count = self.sample_shape.numel()
        indices = torch.arange(count, device=posterior.device) * size // count
        indices = indices.reshape(*self.sample_shape, *(1 for _ in batch))
        self.register_buffer("base_samples", indices.expand(*self.sample_shape, *batch))


@GetSampler.register(_DrawsPosterior)
def _sampler(
    posterior: _DrawsPosterior, sample_shape: torch.Size, *, seed: int | None = None
) -> IndexSampler:
    return _InTurn(sample_shape, seed=seed)


def _learned(transform: Any, train_inputs: Tensor | None) -> Any:
    """An input transform with the coefficients that it learns."""
    learns = [
        part
        for part in transform.modules()
        if isinstance(part, AffineInputTransform) and part.learn_coefficients
    ]
    if learns and train_inputs is not None:
        transform.train()
        transform(train_inputs)
    elif any(_is_identity(part) for part in learns):
        raise ValueError(
            f"the input transform ({type(transform).__name__}) learns its coefficients from data "
            "and has not seen any, so that it would change nothing: pass train_inputs=X, those "
            "that the posterior's inputs were made of, or give it bounds"
        )
    return transform


def _is_identity(transform: Any) -> bool:
    start = 0.5 - getattr(transform, "center", 0.5)
    return bool((transform.coefficient == 1).all() and (transform.offset == start).all())


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Rows one after the other, with their batches broadcast."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (first, second)], -2)
