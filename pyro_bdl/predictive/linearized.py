"""The linearized posterior predictive: f(x; u) = f(x; u*) + J(x) (u - u*), u Gaussian.

With u ~ N(u*, C) the unconstrained parameters of the observation distribution are Gaussian, N(f(x;
u*), J C J'), in closed form. A generalized Gauss-Newton posterior belongs to this linear model; at
its draws the network itself predicts badly (Foong et al. 2019; Immer et al. 2021, "GLM
predictive"). The predictive of a mixture is sum_k weight_k p_k(y | x), with p_k linearized around
the center of member k (Eschenhagen et al. 2021, "mixtures of Laplace approximations").
"""

import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature import closed_forms
from pyro_bdl.curvature.linear_outputs import GaussianOutputs
from pyro_bdl.distributions.families import name_of
from pyro_bdl.distributions.moments import (
    observation_covariance,
    observation_mean,
    observation_moments,
)
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.predictive.members import (
    Member,
    averaged,
    joint_mean_and_covariance,
    mean_and_covariance,
    mean_density,
    mixed_density,
    mixed_moments,
    normal_moments,
    normal_predictions,
    parameter_moments,
    predictive_covariance,
)
from pyro_bdl.predictive.observations import (
    AtDraws,
    ClosedPredictions,
    Predictions,
    PredictiveCovariance,
    PredictiveMoments,
    drawn,
    total_covariance,
)
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.trace import Site
from pyro_bdl.utils.random_state import checked_seed, seeded
from pyro_bdl.utils.trees import tree_map
from pyro_bdl.utils.validation import one_of, whole_number

METHODS = ("centered-probit", "probit", "laplace-bridge", "monte-carlo")
OF_WEIGHTS = 2**20  # sets the seed of the latents apart from that of the noise around them


def is_linear(posterior: Any) -> bool:
    """Return whether a posterior belongs to the linearized program.

    These are Laplace approximations, variational last layers whose outputs are linear in all that
    is not fixed, and mixtures of such guides only.
    """
    if isinstance(posterior, MixtureGuide):
        return all(member.linearized for member in posterior.members)
    return isinstance(posterior, Guide) and posterior.linearized


class LinearizedPredictive(Predictions):
    """Predictions of the linearized program under a Gaussian guide or a mixture of Gaussian guides.

    ``LinearizedPredictive(model, guide)(x)`` gives draws ``{"y": (S, N, ...), "f": (S, N, ...)}``
    like ``Predictive``. Each draw is one function of all inputs. Each row is predicted alone unless
    the posterior has ``rows="together"``; the first batch of each number of rows and kind of
    arguments is compared with a run over all of its rows.

    If an argument requires gradients (and gradients are enabled), moments, densities, means and
    drawn functions are differentiable in it, for example to search for the next input.

    For a mixture, draws are stratified over the members as in the guide, moments follow from the
    law of total variance, and densities and class probabilities are averages over the members.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> posterior = guide.laplace_approximation((x, y))
        >>> predictive = bdl.LinearizedPredictive(model, posterior)
        >>> moments = predictive.parameter_moments(torch.tensor([[0.0], [1.0]]))
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
        self.seed = seed = None if seed is None else checked_seed(seed)
        self.members = [
            Member(model, members[k], None if seed is None else seed + 2**16 * k)
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
        vectors = self._mixed(Member.vectors)
        return self.posterior.require_layout().constrain(vectors)[0]

    # Closed forms

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """Mean and variance of y for each observed site, over posterior and noise, (N, ...).

        They are in closed form for Normal observations, whose noise may be a latent. Of others they
        are moments over ``num_samples`` draws, as in ``Predictive.moments``.
        """

        def at_draws(site: Site) -> PredictiveMoments:
            return PredictiveMoments(*observation_moments(site.distribution))

        otherwise = at_draws, PredictiveMoments.over_draws
        return self._closed_forms(normal_moments, (args, kwargs), otherwise=otherwise)

    def parameter_moments(
        self, *args: Any, sites: Collection[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Mean and variance of every observed site's unconstrained parameters, in closed form.

        :param sites: names of the sites, also of deterministic ones, such as an image f of which
            y = A f + noise is observed: ``parameter_moments(x, sites=["f"])["f"].variance``. These
            are linearized themselves, which is exact for linear functions of the outputs.
        :returns: ``ParameterMoments`` by observed site, ``PredictiveMoments`` by deterministic
            site, of its own shape.
        :raises ValueError: for a name that is no observed or deterministic site.
        """
        return self._closed_forms(parameter_moments, (args, kwargs), sites)

    def parameter_covariance(
        self, *args: Any, sites: Collection[str] | None = None, **kwargs: Any
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N, K) and the covariances (N, K, K) of the K
        unconstrained parameters of each datum; ``covariance`` is that of y.

        :param sites: as in ``parameter_moments``; the first dimension of a deterministic site is N.
        """
        return self._closed_forms(mean_and_covariance, (args, kwargs), sites)

    def joint_parameter_covariance(
        self,
        *args: Any,
        sites: Collection[str] | None = None,
        group: int | None = None,
        **kwargs: Any,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """For each observed site the mean (N K,) and the covariance (N K, N K) over all inputs,
        data before parameters. The whole batch is computed at once.

        :param sites: as in ``parameter_moments``; a deterministic site is flattened.
        :param group: q, for the moments of every q inputs in a row alone, (N / q, q K) and
            (N / q, q K, q K).
        """
        function = functools.partial(joint_mean_and_covariance, group=group)
        return self._closed_forms(function, (args, kwargs), sites, whole=True)

    def _covariance(
        self, args: tuple, kwargs: dict, *, joint: bool
    ) -> dict[str, PredictiveCovariance]:
        """The covariances in closed form for Normal observations, and multivariate ones whose noise
        does not depend on the latents; of others, over ``num_samples`` draws."""

        def at_draws(site: Site) -> tuple[Tensor, Tensor]:
            return observation_covariance(site.distribution)

        def over_draws(values: tuple[Tensor, Tensor]) -> PredictiveCovariance:
            return total_covariance(*values, joint=joint)

        closed = functools.partial(predictive_covariance, joint=joint)
        otherwise = at_draws, over_draws
        return self._closed_forms(closed, (args, kwargs), whole=joint, otherwise=otherwise)

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
        return self.members[0].prior_covariance(first, second)

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
        one_of(method, "method", METHODS)
        if method == "monte-carlo":
            drawn = self._at_draws(_class_means, args, kwargs).values
            found = {name: value.mean(0) for name, value in drawn.items() if len(value)}
        else:
            closed = functools.partial(closed_forms.class_probabilities, method=method)
            found = self._closed_forms(closed, (args, kwargs), combine=averaged)
        if not found:
            raise ValueError("no observed site is Categorical or Bernoulli")
        return found

    def log_density(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | x_n, data) in nats for each observed site, (N, ...). The arguments include
        targets.

        There are closed forms for a Normal (an uncertain noise is integrated by quadrature), and
        for one Categorical (centered probit) or Bernoulli per datum. Other densities are averages
        over ``num_samples`` draws, also for several numbers per datum, unless these are Normal with
        known noise.
        """
        otherwise = (lambda site: site.unscaled_log_prob(), mean_density)
        return self._closed_forms(
            closed_forms.log_density, (args, kwargs), otherwise=otherwise, combine=mixed_density
        )

    def closed_predictions(self, *args: Any, **kwargs: Any) -> dict[str, ClosedPredictions]:
        """Mean, variance and log density of y for each Normal site, over posterior and noise,
        without draws::

            p(y) = N(y; f(x; u*), J C J' + sigma^2),   for a mixture sum_k weight_k p_k(y)

        An uncertain noise is integrated by quadrature. Other sites are left out.

        :param args: the program's arguments, with targets for their log densities.
        """
        return self._closed_forms(normal_predictions, (args, kwargs))

    # Over the members

    def _closed_forms(
        self,
        function: Callable[[GaussianOutputs], Any],
        batch: Batch,
        sites: Collection[str] | None = None,
        *,
        whole: bool = False,
        otherwise: tuple[Callable[[Site], Any], Callable[[Any], Any]] | None = None,
        combine: Callable[[Tensor, list[Any]], Any] = mixed_moments,
    ) -> dict[str, Any]:
        """Combine the members' closed forms of each site.

        :param otherwise: of sites without one, what is read at draws, and a function of that.
            Without this such sites are left out.
        """
        results = []
        for member in self.members:
            values = member.closed_forms(function, batch, sites, whole=whole)
            known = {name: value for name, value in values.items() if value is not None}
            others = [name for name in values if name not in known]
            if others and otherwise is not None:
                drawn = member.at_draws(otherwise[0], self.num_samples, batch, others)
                known |= {name: otherwise[1](found) for name, found in drawn.items()}
            results.append(known)
        if len(results) == 1:
            return results[0]
        return {n: combine(self.weights, [values[n] for values in results]) for n in results[0]}

    def _at_draws(
        self,
        read: Callable[[Any], Any],
        args: tuple,
        kwargs: dict,
        *,
        densities: bool = False,
        deterministic: bool = False,
    ) -> AtDraws:
        def of_site(site: Site) -> tuple[Any, ...]:
            found = read(site.distribution)
            known = densities and site.value is not None
            return (found, site.unscaled_log_prob()) if known else (found,)

        def of_member(member: Member, number: int) -> dict[str, Any]:
            return member.at_draws(of_site, number, (args, kwargs), deterministic=deterministic)

        values = self._mixed(of_member)
        observed = {name: value for name, value in values.items() if isinstance(value, tuple)}
        return AtDraws(
            {name: value[0] for name, value in observed.items()},
            {name: value[1] for name, value in observed.items() if len(value) > 1},
            {name: value for name, value in values.items() if name not in observed},
        )

    def _mixed(self, of_member: Callable[[Member, int], Any]) -> Any:
        """What each member gives for its number of draws, in random order."""
        if not isinstance(self.posterior, MixtureGuide):
            return of_member(self.members[0], self.num_samples)
        with nullcontext() if self.seed is None else seeded(self.seed):
            shares = self.posterior.shares(self.num_samples)
        pairs = zip(self.members, self._kept, strict=True)
        found = [of_member(member, shares[k]) for member, k in pairs if shares[k]]
        with nullcontext() if self.seed is None else seeded(self.seed):
            order = torch.randperm(self.num_samples, device=self.weights.device)
        return tree_map(lambda *parts: torch.cat(parts)[order], *found)


def _class_means(distribution: Any) -> Any:
    """The probabilities of a discrete distribution; nothing of another."""
    known = name_of(base_distribution(distribution)) in closed_forms.DISCRETE
    return observation_mean(distribution) if known else ()
