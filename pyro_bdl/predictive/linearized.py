"""The linearized posterior predictive: f(x; u) = f(x; u*) + J(x) (u - u*), u Gaussian.

With u ~ N(u*, C) the unconstrained parameters of the observation distribution are Gaussian, N(f(x;
u*), J C J'), in closed form. A generalized Gauss-Newton posterior belongs to this linear model; at
its draws the network itself predicts badly (Foong et al. 2019; Immer et al. 2021, "GLM
predictive"). The predictive of a mixture is sum_k weight_k p_k(y | x), with p_k linearized around
the center of member k (Eschenhagen et al. 2021, "mixtures of Laplace approximations").
"""

import functools
import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_bdl.curvature import closed_forms
from pyro_bdl.curvature.linear_outputs import GaussianOutputs
from pyro_bdl.distributions.moments import observation_mean
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.linearized_component import (
    LinearizedComponent,
    ParameterMoments,
    joint_mean_and_covariance,
    mean_and_covariance,
    moments,
)
from pyro_bdl.predictive.mixtures import averaged, combined
from pyro_bdl.predictive.observations import (
    AtDraws,
    ClosedPredictions,
    DrawPredictions,
    PredictiveCovariance,
    drawn,
)
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.trees import tree_map
from pyro_bdl.utils.validation import whole_number

METHODS = ("centered-probit", "probit", "laplace-bridge", "monte-carlo")
OF_WEIGHTS = 2**20  # sets the seed of the latents apart from that of the noise around them

UNKNOWN = (
    "the linearized model does not know {kind} observations: the draws of {posterior} go through "
    "the network itself"
)


def is_linear(posterior: Any) -> bool:
    """Return whether a posterior belongs to the linearized program.

    These are Laplace approximations, variational last layers whose outputs are linear in all that
    is not fixed, and mixtures of such guides only.
    """
    if isinstance(posterior, MixtureGuide):
        return all(member.linearized for member in posterior.members)
    return isinstance(posterior, Guide) and posterior.linearized


class LinearizedPredictive(DrawPredictions):
    """Predictions of the linearized program under a Gaussian guide or a mixture of Gaussian guides.

    ``LinearizedPredictive(model, guide)(x)`` gives draws ``{"y": (S, N, ...), "f": (S, N, ...)}``
    like ``Predictive``. Each draw is one function of all inputs. If an argument requires gradients
    (and gradients are enabled), moments, densities, means and drawn functions are differentiable in
    it, for example to search for the next input.

    For a mixture, draws are stratified over the members as in the guide, moments follow from the
    law of total variance, and densities and class probabilities are averages over the members.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> posterior = guide.laplace_approximation((x, y))
        >>> predictive = bdl.LinearizedPredictive(model, posterior)
        >>> moments = predictive.moments(torch.tensor([[0.0], [1.0]]))
        >>> moments["y"].variance["loc"].sqrt()  # the function's sd
        tensor([0.0224, 0.0431])

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide of ``laplace_approximation``, an ``AutoVariationalLastLayer``, or a
        mixture of such guides; the program is linearized around each member.
    :param num_samples: S, the number of draws.
    :param seed: seed of the draws of the latents, so that all calls are about the same S functions;
        by default each call draws anew.
    :raises TypeError: for any other kind of posterior.
    :raises ValueError: by its calls, for a posterior of another program; the error names the sites.
    """

    def __init__(
        self,
        model: Callable,
        posterior: Any,
        num_samples: int | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        if not is_linear(posterior):
            raise TypeError(
                "LinearizedPredictive needs the Gaussian guide that laplace_approximation(data) "
                f"returns, or a mixture of such guides, got {type(posterior).__name__}"
            )
        if num_samples is not None:
            num_samples = whole_number(num_samples, "num_samples")
        self.model, self.posterior = model, posterior
        self.num_samples = 100 if num_samples is None else num_samples
        is_mixture = isinstance(posterior, MixtureGuide)
        members = list(posterior.members) if is_mixture else [posterior]
        weights = posterior.weights if is_mixture else posterior.location().new_ones(1)
        self._kept = [k for k, weight in enumerate(weights.tolist()) if weight > 0]
        self.weights = weights[self._kept]
        self.seed = seed
        self.components = [
            LinearizedComponent(model, members[k], None if seed is None else seed + 2**16 * k)
            for k in self._kept
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws of the observed and the deterministic sites, each (S, ...)."""
        at_draws = self._at_draws(drawn, args, kwargs, deterministic=True)
        return at_draws.values | at_draws.deterministic

    def at_fixed_draws(self, *args: Any, **kwargs: Any) -> "LinearizedPredictive":
        """The same predictions, whose draws come from a seed."""
        seed = int(torch.randint(2**31, (), device="cpu")) if self.seed is None else self.seed
        return LinearizedPredictive(self.model, self.posterior, self.num_samples, seed=seed)

    @torch.no_grad()
    def latents(self) -> dict[str, Tensor]:
        """The draws of the latents, site -> (S, *shape), in the order of all other draws.

        With a seed they are those that ``__call__``, ``mean``, ``log_likelihood`` etc. are about::

            f_s(x) = f(x; u*) + J(x) (u_s - u*)

        Without a seed they are drawn anew.
        """
        pairs = zip(self.components, self._shares(), strict=True)
        vectors = self._mixed([part.vectors(number) for part, number in pairs if number])
        return self.posterior.require_layout().constrain(vectors)[0]

    # Closed forms

    def moments(
        self, *args: Any, sites: Collection[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Mean and variance of every observed site's unconstrained parameters, in closed form.

        These are not the moments of y, as in ``Predictive.moments``. E[y] and Var[y] of any
        observation are ``draw_moments(x)["y"].over_draws()``, for a Normal also ``mean["loc"]`` and
        ``predictive_variance`` of this result.

        :param sites: names of the sites, also of deterministic ones, such as an image f of which
            y = A f + noise is observed: ``moments(x, sites=["f"])["f"].variance``. Deterministic
            sites are linearized themselves, which is exact for linear functions of the outputs.
        :returns: ``ParameterMoments`` by observed site, ``PredictiveMoments`` by deterministic
            site, of its own shape.
        :raises ValueError: for a name that is no observed or deterministic site.
        """
        return combined(self.weights, self._closed_forms(moments, args, kwargs, sites=sites))

    def covariance(
        self, *args: Any, sites: Collection[str] | None = None, **kwargs: Any
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N, K) and the covariances (N, K, K) of the K
        unconstrained parameters of each datum; ``predictive_covariance`` is that of y.

        :param sites: as in ``moments``; the first dimension of a deterministic site is N.
        """
        members = self._closed_forms(mean_and_covariance, args, kwargs, sites=sites)
        return combined(self.weights, members)

    def joint_covariance(
        self,
        *args: Any,
        sites: Collection[str] | None = None,
        group: int | None = None,
        **kwargs: Any,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N K,) and the covariance (N K, N K) over all inputs,
        data before parameters. The whole batch is computed at once.

        :param sites: as in ``moments``; a deterministic site is flattened.
        :param group: q, for the moments of every q inputs in a row alone, (N / q, q K) and
            (N / q, q K, q K).
        """
        function = functools.partial(joint_mean_and_covariance, group=group)
        members = self._closed_forms(function, args, kwargs, sites=sites, whole=True)
        return combined(self.weights, members)

    def predictive_covariance(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveCovariance]:
        """Mean (N, D) and covariance (N, D, D) of the D numbers of y of each datum, noise included,
        for each observed site.

        They are in closed form for Normal observations, and multivariate ones whose noise does not
        depend on the latents. Of others they are moments over ``num_samples`` draws, as in
        ``Predictive.covariance``.
        """
        return self._predictive_covariance(args, kwargs, joint=False)

    def joint_predictive_covariance(
        self, *args: Any, **kwargs: Any
    ) -> dict[str, PredictiveCovariance]:
        """The same over all data: mean (N, D) and covariance (N, D, N, D)."""
        return self._predictive_covariance(args, kwargs, joint=True)

    def _predictive_covariance(
        self, args: tuple, kwargs: dict, *, joint: bool
    ) -> dict[str, PredictiveCovariance]:
        members = [
            component.predictive_covariance(self.num_samples, args, kwargs, joint=joint)
            for component in self.components
        ]
        return combined(self.weights, members)

    def prior_covariance(self, x: Any, x2: Any = None) -> dict[str, Tensor]:
        """For each observed site J(x) Lambda^-1 J(x2)', (N K, N2 K), data before parameters.

        This tangent kernel is the prior covariance of the linearized model's outputs, as in a
        Gaussian process, with Lambda the prior precision. With the noise's covariance S the
        posterior covariance is K(x, x) - K(x, X) (K(X, X) + S)^-1 K(X, x) for data X. It needs no
        curvature and is the same for every structure. Only a few rows of J are stored at once; x
        is linearized again for each such part of x2.

        :param x: the program's arguments, without the targets: a tensor, a tuple of arguments or a
            dict of keyword arguments.
        :param x2: the same; by default x.
        :raises ValueError: for a mixture or a variational last layer, and for a prior precision
            without an inverse.
        """
        if isinstance(self.posterior, MixtureGuide):
            raise ValueError(
                "a mixture has one tangent kernel for each member: take the LinearizedPredictive "
                "of a member"
            )
        if not isinstance(self.posterior, LaplaceGuide):
            raise ValueError(
                "the tangent kernel is that of all latents under their prior: take the "
                "LinearizedPredictive of a Laplace approximation"
            )
        first = Batches(x).first()
        second = first if x2 is None else Batches(x2).first()
        return self.components[0].prior_covariance(first, second)

    def probabilities(
        self, *args: Any, method: str = "centered-probit", **kwargs: Any
    ) -> dict[str, Tensor]:
        """P(y = class) for each Categorical site, (N, C), and P(y = 1) for Bernoulli ones, (N,).

        :param method: "centered-probit" (of each class against the others), "probit" (of each class
            by itself, Gibbs 1997, as in laplace-torch; too unsure where all logits move together),
            "laplace-bridge" (Hobbhahn et al. 2022; for several classes) or "monte-carlo" over
            ``num_samples`` draws. The first two are the same for a Bernoulli site (MacKay 1992).
        :raises ValueError: for another method, or if no site is discrete.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r} (there are {', '.join(METHODS)})")

        def closed(gaussian: GaussianOutputs) -> Tensor | None:
            known = gaussian.outputs.kind in closed_forms.DISCRETE
            return closed_forms.class_probabilities(gaussian, method) if known else None

        if method == "monte-carlo":
            drawn = self._at_draws(_class_means, args, kwargs).values
            members = [{name: value.mean(0) for name, value in drawn.items() if len(value)}]
        else:
            members = self._closed_forms(closed, args, kwargs)
        if not members[0]:
            raise ValueError("no observed site is Categorical or Bernoulli")
        return {
            name: averaged(self.weights, [values[name] for values in members])
            for name in members[0]
        }

    def log_density(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | x_n, data) in nats for each observed site, (N, ...). The arguments include
        targets.

        There are closed forms for a Normal (an uncertain noise is integrated by quadrature), and
        for one Categorical (centered probit) or Bernoulli per datum. Other densities are averages
        over ``num_samples`` draws, also for several numbers per datum, unless these are Normal with
        known noise.
        """
        members = [self._log_density(component, args, kwargs) for component in self.components]
        if len(members) == 1:
            return members[0]
        result = {}
        for name in members[0]:
            terms = torch.stack([densities[name] for densities in members], -1)
            result[name] = torch.logsumexp(terms + self.weights.to(terms).log(), -1)
        return result

    def _log_density(
        self, component: LinearizedComponent, args: tuple, kwargs: dict
    ) -> dict[str, Tensor]:
        def closed(gaussian: GaussianOutputs) -> Tensor | None:
            if _site_of(gaussian).value is None:
                raise ValueError(
                    f"site '{gaussian.outputs.name}' has no observation: pass the targets as well"
                )
            return _log_density(gaussian)

        result, drawn = component.closed_forms_or_draws(
            closed, args, kwargs, self.num_samples, densities=True
        )
        for name, draws in drawn.densities.items():
            result[name] = draws.logsumexp(0) - math.log(len(draws))
        return result

    def closed_predictions(self, *args: Any, **kwargs: Any) -> dict[str, ClosedPredictions]:
        """Mean, variance and log density of y for each Normal site, over posterior and noise,
        without draws::

            p(y) = N(y; f(x; u*), J C J' + sigma^2),   for a mixture sum_k weight_k p_k(y)

        An uncertain noise is integrated by quadrature. Other sites are left out.

        :param args: the program's arguments, with targets for their log densities.
        """
        members = self._closed_forms(_normal_predictions, args, kwargs)
        result = {}
        for name in members[0]:
            means, variances, densities = zip(*(values[name] for values in members), strict=True)
            mean = averaged(self.weights, means)
            total = averaged(
                self.weights,
                [v + (m - mean).square() for m, v in zip(means, variances, strict=True)],
            )
            density = densities[0]
            if len(members) > 1 and density is not None:
                terms = torch.stack(densities, -1)
                density = torch.logsumexp(terms + self.weights.to(terms).log(), -1)
            result[name] = ClosedPredictions(mean, total, density)
        return result

    # Over the components

    def _closed_forms(
        self,
        function: Callable[[GaussianOutputs], Any],
        args: tuple,
        kwargs: dict,
        **options: Any,
    ) -> list[dict[str, Any]]:
        values = [c.closed_forms(function, args, kwargs, **options) for c in self.components]
        return [{n: v for n, v in by_site.items() if v is not None} for by_site in values]

    def _at_draws(
        self, read: Callable[[Any], Any], args: tuple, kwargs: dict, **options: Any
    ) -> AtDraws:
        return self._mixed(
            [
                component.at_draws(read, number, args, kwargs, **options)
                for component, number in zip(self.components, self._shares(), strict=True)
                if number
            ]
        )

    def _shares(self) -> list[int]:
        """The number of draws of each component."""
        if not isinstance(self.posterior, MixtureGuide):
            return [self.num_samples]
        with nullcontext() if self.seed is None else seeded(self.seed):
            shares = self.posterior.shares(self.num_samples)
        return [shares[k] for k in self._kept]

    def _mixed(self, members: list[Any]) -> Any:
        """The components' draws in random order."""
        if not isinstance(self.posterior, MixtureGuide):
            return members[0]
        with nullcontext() if self.seed is None else seeded(self.seed):
            order = torch.randperm(self.num_samples, device=self.weights.device)
        return tree_map(lambda *parts: torch.cat(parts)[order], *members)


def _site_of(gaussian: GaussianOutputs) -> Site:
    site = gaussian.outputs.site
    assert site is not None
    return site


def _log_density(gaussian: GaussianOutputs) -> Tensor | None:
    """log p(y) of an observed site, masked; None without a closed form."""
    site = _site_of(gaussian)
    density = closed_forms.log_density(site, gaussian)
    return None if density is None else scale_and_mask(density, 1.0, site.mask)


def _normal_predictions(
    gaussian: GaussianOutputs,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """E[y], Var[y] and, with targets, log p(y) of a Normal site."""
    if gaussian.outputs.kind != "Normal":
        return None
    mean, found = gaussian.outputs.values["loc"], moments(gaussian)
    assert isinstance(found, ParameterMoments)  # of an observed site
    density = None if _site_of(gaussian).value is None else _log_density(gaussian)
    return mean, found.predictive_variance.expand_as(mean), density


def _class_means(distribution: Any) -> Any:
    """The probabilities of a discrete distribution; nothing of another."""
    known = type(base_distribution(distribution)).__name__ in closed_forms.DISCRETE
    return observation_mean(distribution) if known else ()
