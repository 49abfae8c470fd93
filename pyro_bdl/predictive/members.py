"""The members of a linearized predictive, one Gaussian each, and what they say together.

A mixture's moments follow from its members' by the law of total variance::

    E[f] = sum_k weight_k E_k[f]
    Cov[f] = sum_k weight_k (Cov_k[f] + d_k d_k'),  d_k = E_k[f] - E[f]
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature import closed_forms
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.jacobian.jacobian import grouped
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import GaussianOutputs, LinearOutputs, observed_outputs
from pyro_bdl.curvature.structures.base import LinearDraws
from pyro_bdl.distributions.parameters import bijections, parameters_of
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import check_posterior
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.predictive.observations import (
    ClosedPredictions,
    PredictiveCovariance,
    PredictiveMoments,
    with_noise,
)
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.trace import Site, uses_of_placeholders
from pyro_bdl.utils.autograd import wants_gradients
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.trees import tree_map

_DRAWS_AT_ONCE = 2**29  # bytes of latent draws


class ParameterMoments(NamedTuple):
    """Means and variances of an observed site's unconstrained parameters.

    Only parameters that depend on the latents are included: the location and the logarithm of the
    scale for a Normal, the logits for classes, the logarithm of a rate, ...

    :param mean: by parameter, (N, ...).
    :param variance: by parameter, (N, ...), without the noise of the observation.
    :param noise_variance: for a Normal the expected variance of the noise, (N, ...), in squared
        units of y, over the posterior of the noise scale; None for other distributions.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    noise_variance: Tensor | None

    @property
    def predictive_variance(self) -> Tensor:
        """Var[y] of a Normal, (N, ...): the variance of its location plus the noise variance."""
        if self.noise_variance is None:
            raise ValueError("only a Normal observation has a predictive variance in closed form")
        return self.variance.get("loc", torch.zeros_like(self.noise_variance)) + self.noise_variance


class Member:
    """A program linearized around the center of one Gaussian over its latents.

    Large data are linearized in batches that fit in memory, and the results are joined.

    :param model: the Pyro program.
    :param guide: the Gaussian.
    :param seed: seed of the draws of the latents; None to draw anew in each call.
    """

    def __init__(self, model: Callable, guide: NormalGuide, seed: int | None = None) -> None:
        self.model, self.guide, self.seed = model, guide, seed
        self._is_checked = False
        self._free: set[frozenset[str]] = set()  # open sites on whose values no other depends
        self._point: ProgramAtPoint | None = None

    def closed_forms(
        self,
        function: Callable[[GaussianOutputs], Any],
        batch: Batch,
        sites: Collection[str] | None = None,
        *,
        whole: bool = False,
    ) -> dict[str, Any]:
        """A function of the Gaussian outputs of each observed site, or of those that are named.

        :param function: returns tensors (n, ...), nested or not; None without a closed form.
        """
        precision = self.guide.precision

        def read(at: Linearization) -> dict[str, Any]:
            named = _outputs(at, sites).items()
            return {name: function(outputs.gaussian(precision)) for name, outputs in named}

        return self._over_batches(read, batch, whole=whole)

    def at_draws(
        self,
        read: Callable[[Site], Any],
        num_samples: int,
        batch: Batch,
        sites: Collection[str] | None = None,
        *,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        """What is read of the observed sites at S draws of the latents, each with the draws in
        front of all tensors, and the deterministic sites, (S, ...), where asked for."""
        chunks = []
        for offsets in self._offsets(num_samples):

            def of_batch(at: Linearization, offsets: LinearDraws = offsets) -> dict[str, Any]:
                known = _outputs(at, sites)
                drawn = {name: outputs.draws(offsets) for name, outputs in known.items()}
                found = {name: read(known[name].observed(drawn[name])) for name in known}
                return found | (_deterministic_draws(at, offsets, drawn) if deterministic else {})

            chunks.append(self._over_batches(of_batch, batch, dim=1))
        return tree_map(lambda *parts: torch.cat(parts), *chunks)

    def vectors(self, num_samples: int) -> Tensor:
        """The draws of ``at_draws`` as unconstrained vectors (S, P); with a seed, the same ones."""
        guide, center = self.guide, self.guide.location()
        offsets = torch.cat([part.vectors() for part in self._offsets(num_samples)])
        return guide.subset.put(center, guide.subset.take(center) + offsets.to(center))

    def prior_covariance(self, first: Batch, second: Batch) -> dict[str, Tensor]:
        """For each observed site J(x) Lambda^-1 J(x2)', (N K, N2 K), data before parameters."""
        guide: Any = self.guide  # a Laplace approximation
        root = guide.prior.root(guide.subset.parts, "the tangent kernel")
        over_batches = functools.partial(
            self._over_batches, as_rows=True, differentiable=wants_gradients(first, second)
        )

        def columns(right: Linearization) -> dict[str, Tensor]:
            dependent = {n: outputs for n, outputs in _outputs(right).items() if outputs.dependent}
            solved = {
                name: root.solve_transposed(root.solve(_double_rows(outputs)))
                for name, outputs in dependent.items()
            }

            def products(left: Linearization) -> dict[str, Tensor]:
                known = _outputs(left)
                return {
                    name: (_double_rows(known[name]) @ own.mT).to(known[name].mean)
                    for name, own in solved.items()
                }

            return over_batches(products, first)

        return over_batches(columns, second, dim=1)

    def _over_batches(
        self,
        read: Callable[[Linearization], dict[str, Any]],
        batch: Batch,
        *,
        dim: int = 0,
        whole: bool = False,
        as_rows: bool = False,
        differentiable: bool | None = None,
    ) -> dict[str, Any]:
        """Join what is read of each site over the batches of the data.

        :param read: returns tensors by site, nested or not, with the data along ``dim``.
        :param whole: linearize all data at once.
        :param as_rows: choose batches whose Jacobians fit in memory as rows.
        :param differentiable: in the arguments; by default if one of them requires gradients.
        """
        self._check(self.model if whole else on_whole_data(self.model), batch)
        if differentiable is None:
            differentiable = wants_gradients(*batch)
        at = self._at(differentiable=differentiable)
        results: list[dict[str, Any]] = []
        by_row: Mapping[str, bool] = {}
        with torch.set_grad_enabled(differentiable):
            parts = (
                [at.linearize(*batch, compared=False)]
                if whole
                else at.linearizations([batch], compared=False, every_output=True, as_rows=as_rows)
            )
            for part in parts:
                self._refuse_chains(part)
                results.append(read(part))
                by_row = part.by_row
            return {
                name: _joined([result[name] for result in results], dim)
                if by_row.get(name, True)
                else value
                for name, value in results[0].items()
            }

    def _at(self, *, differentiable: bool) -> ProgramAtPoint:
        """The program at the guide's center."""
        guide = self.guide
        if self._point is None or self._point.subset is not guide.subset:
            config = getattr(guide, "config", None)
            rows = "alone" if config is None else config.rows
            program, modules = on_whole_data(self.model), guide.program_modules
            self._point = ProgramAtPoint(program, guide.subset, guide.location(), rows, modules)
        return self._point.moved(guide.location(), differentiable=differentiable)

    def _offsets(self, num_samples: int) -> Iterator[LinearDraws]:
        """Draws of the latents minus the center, as many at a time as fit in memory."""
        guide = self.guide
        draw = guide.location().element_size() * guide.subset.size
        at_once = max(1, bytes_at_once(_DRAWS_AT_ONCE, guide.location().device) // max(1, draw))
        for start in range(0, num_samples, at_once):
            with nullcontext() if self.seed is None else seeded(self.seed + start):
                offsets = guide.precision.draw(min(at_once, num_samples - start))
            yield offsets

    def _refuse_chains(self, at: Linearization) -> None:
        """Refuse observed sites that depend on the values of others without a value."""
        missing = frozenset(name for name, site in at.run.observed.items() if site.value is None)
        if missing in self._free:
            return
        center = self.guide.require_layout().constrain(self.guide.location())[0]
        with evaluation_mode(self.model, self.guide):
            found = uses_of_placeholders(at.run, at.model, center, at.args, at.kwargs)
        if found:
            name, other = next(iter(found.items()))
            raise UnsupportedProgramError(
                f"the site '{name}' depends on the value of the site '{other}', for which there "
                "are no targets, so that its outputs are not linear in the latents: take "
                "Predictive, which draws one after the other, or pass the targets"
            )
        self._free.add(missing)

    def _check(self, program: Callable, batch: Batch) -> None:
        """Check that the posterior belongs to the program.

        :raises ValueError: for a posterior of another program.
        """
        if self._is_checked or self.guide.is_of(self.model):
            return
        center = self.guide.require_layout().constrain(self.guide.location()[None])[0]
        with evaluation_mode(program, self.guide):
            check_posterior(program, self.guide, center, *batch)
        self._is_checked = True


def _joined(parts: Sequence[Any], dim: int) -> Any:
    def join(*tensors: Any) -> Any:
        return None if tensors[0] is None else torch.cat(tensors, dim)

    return parts[0] if len(parts) == 1 else tree_map(join, *parts)


def _outputs(
    at: Linearization, sites: Collection[str] | None = None
) -> Mapping[str, LinearOutputs]:
    """The outputs of some observed and deterministic sites; by default of the observed ones.

    :raises ValueError: for a name that is no such site.
    """
    observed = observed_outputs(at)
    if sites is None:
        return observed
    return {name: observed.get(name) or _of_deterministic(at, name) for name in sites}


def _of_deterministic(at: Linearization, name: str) -> LinearOutputs:
    known = at.run.deterministic
    value = known.get(name)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(
            f"'{name}' is no observed or deterministic site with floating-point values "
            f"(there are {', '.join(map(repr, [*at.run.observed, *known]))})"
        )
    return LinearOutputs.of_deterministic(at, name)


def _deterministic_draws(
    at: Linearization, offsets: LinearDraws, drawn: Mapping[str, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Draws of the deterministic sites, linearized; of one that is a parameter of an observed
    site, the draws of this parameter.

    :param drawn: the parameters' draws by observed site.
    """
    parameters = [
        (parameter, bijections(distribution)[key], draws[key])
        for name, draws in drawn.items()
        for distribution in [at.run.observed[name].distribution]
        for key, parameter in parameters_of(distribution).items()
        if key in draws
    ]
    result = {}
    for name, value in at.run.deterministic.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            same = (bijection(own) for p, bijection, own in parameters if _is_same(p, value))
            found = next(same, None)
            result[name] = (
                _of_deterministic(at, name).draws(offsets)["value"] if found is None else found
            )
    return result


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same numbers in memory."""
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return same and one.data_ptr() == other.data_ptr()


def _double_rows(outputs: LinearOutputs) -> Tensor:
    """The Jacobian as rows (n K, p), data before columns, in float64."""
    return double(outputs.jacobian.rows()).transpose(0, 1).flatten(0, 1)


# ------------------------------------------------------------------- functions of Gaussian outputs


def parameter_moments(gaussian: GaussianOutputs) -> ParameterMoments | PredictiveMoments:
    """Means and variances of an observed site's unconstrained parameters, or of a deterministic
    site."""
    outputs = gaussian.outputs
    if outputs.site is None:
        value = outputs.values["value"]
        return PredictiveMoments(value, gaussian.cells("value")[1].reshape(value.shape))
    noise = closed_forms.noise_variance(gaussian) if outputs.kind == "Normal" else None
    return ParameterMoments(gaussian.means(), gaussian.variances(), noise)


def mean_and_covariance(gaussian: GaussianOutputs) -> tuple[Tensor, Tensor]:
    """The mean (n, K) and the covariances (n, K, K) of a site."""
    return gaussian.mean, gaussian.covariance


def joint_mean_and_covariance(
    gaussian: GaussianOutputs, group: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """The mean (n K,) and the covariance (n K, n K) of a site over all data; None of an observed
    site that does not depend on the latents.

    :param group: q, for those of every q data in a row, (n / q, q K) and (n / q, q K, q K).
    """
    outputs, precision = gaussian.outputs, gaussian.precision
    if not outputs.dependent:
        return None
    if group is None:
        mean = outputs.mean.reshape(-1)
        covariance = precision.joint_covariance(outputs.jacobian)
    elif outputs.num_data % group:
        raise ValueError(f"{outputs.num_data} rows are not in groups of {group}")
    else:
        mean = outputs.mean.reshape(outputs.num_data // group, -1)
        covariance = precision.covariance(grouped(outputs.jacobian, group))
    return mean, outputs.as_result(covariance).to(mean)


def predictive_covariance(
    gaussian: GaussianOutputs, *, joint: bool = False
) -> PredictiveCovariance | None:
    """Mean and covariance of y of each datum, or ``joint`` over all data; None without a closed
    form."""
    noise = closed_forms.noise_covariance(gaussian)
    if noise is None:
        return None
    mean, covariance = gaussian.cells("loc")[0], gaussian.block("loc", "loc")
    if joint:
        covariance, part = mean.new_zeros(*mean.shape, *mean.shape), gaussian.columns("loc")
        found = joint_mean_and_covariance(gaussian) if "loc" in gaussian.outputs.dependent else None
        if found is not None:
            shape = gaussian.mean.shape
            covariance = found[1].reshape(*shape, *shape)[:, part, :, part]
    return PredictiveCovariance(mean, with_noise(covariance, noise))


def normal_predictions(gaussian: GaussianOutputs) -> ClosedPredictions | None:
    """E[y], Var[y] and, with targets, log p(y) of a Normal site; None of another."""
    found, site = normal_moments(gaussian), gaussian.outputs.site
    if found is None or site is None:
        return None
    return ClosedPredictions(
        *found, None if site.value is None else closed_forms.log_density(gaussian)
    )


def normal_moments(gaussian: GaussianOutputs) -> PredictiveMoments | None:
    """E[y] and Var[y] of a Normal site; None of another."""
    if gaussian.outputs.site is None or gaussian.outputs.kind != "Normal":
        return None
    mean, found = gaussian.outputs.values["loc"], parameter_moments(gaussian)
    assert isinstance(found, ParameterMoments)  # of an observed site
    return PredictiveMoments(mean, found.predictive_variance.expand_as(mean))


# ------------------------------------------------------------------------------ several members


def averaged(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """sum_k weight_k values_k."""
    stacked = torch.stack(list(values))
    return torch.tensordot(weights.to(stacked), stacked, dims=1)


def mean_density(densities: Tensor) -> Tensor:
    """The log of the mean of exp(densities) over draws in front."""
    return densities.logsumexp(0) - math.log(len(densities))


def mixed_density(weights: Tensor, densities: Sequence[Tensor]) -> Tensor:
    """log sum_k weight_k exp(densities_k)."""
    terms = torch.stack(list(densities), -1)
    return torch.logsumexp(terms + weights.to(terms).log(), -1)


def mixed_moments(weights: Tensor, parts: Sequence[Any]) -> Any:
    """The mixture's moments of one site from those of its members.

    :param weights: (K,), with sum 1.
    :param parts: ``ParameterMoments``, ``ClosedPredictions``, or pairs of a mean and a variance, a
        covariance of the last dimension, or a covariance of all numbers.
    """
    first = parts[0]
    if isinstance(first, ParameterMoments):
        pairs = {
            key: _total(weights, [p.mean[key] for p in parts], [p.variance[key] for p in parts])
            for key in first.mean
        }
        mean, variance = ({key: pair[i] for key, pair in pairs.items()} for i in range(2))
        noise = first.noise_variance
        if noise is not None:
            noise = averaged(weights, [part.noise_variance for part in parts])
        return ParameterMoments(mean, variance, noise)
    if isinstance(first, ClosedPredictions):
        means, variances, densities = zip(*parts, strict=True)
        density = None if densities[0] is None else mixed_density(weights, densities)
        return ClosedPredictions(*_total(weights, means, variances), density)
    pair = _total(weights, *zip(*parts, strict=True))
    return type(first)(*pair) if hasattr(first, "_fields") else pair


def _total(
    weights: Tensor, means: Sequence[Tensor], spreads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The mean, and the variance or covariance in the shape of ``spreads``."""
    mean, inside = averaged(weights, means), torch.stack(list(spreads))
    offset = torch.stack(list(means)) - mean
    if inside.dim() == offset.dim():
        between = offset.square()
    elif inside.dim() == offset.dim() + 1:
        between = offset[..., :, None] * offset[..., None, :]
    else:
        flat = offset.flatten(1)
        between = (flat[:, :, None] * flat[:, None, :]).reshape(inside.shape)
    return mean, averaged(weights, (inside + between).unbind())
