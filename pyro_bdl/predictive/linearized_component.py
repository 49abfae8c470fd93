"""The predictive of a program linearized around the center of one Gaussian.

``LinearizedPredictive`` averages such components over the members of a mixture.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.curvature import closed_forms
from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.jacobian.jacobian import grouped
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import GaussianOutputs, LinearOutputs, observed_outputs
from pyro_bdl.curvature.prior import PriorRoot
from pyro_bdl.curvature.structures.base import LinearDraws
from pyro_bdl.distributions.moments import observation_covariance
from pyro_bdl.distributions.parameters import bijections, parameters_of
from pyro_bdl.guides.draws import check_posterior
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.predictive.observations import (
    AtDraws,
    PredictiveCovariance,
    PredictiveMoments,
    densities_of,
    total_covariance,
    with_noise,
)
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.utils.autograd import wants_gradients
from pyro_bdl.utils.memory import bytes_at_once
from pyro_bdl.utils.module_state import evaluation_mode
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


@dataclass
class LinearizedPart:
    """Some rows of the data, with the outputs of their observed sites."""

    at: Linearization
    outputs: dict[str, LinearOutputs]

    @property
    def rows(self) -> int:
        return leading_size((self.at.args, dict(self.at.kwargs)))

    def chosen(self, sites: Collection[str] | None) -> dict[str, LinearOutputs]:
        """The outputs of some observed and deterministic sites; None for the observed ones.

        :raises ValueError: for a name that is no such site.
        """
        if sites is None:
            return self.outputs
        return {name: self.outputs.get(name) or self._deterministic(name) for name in sites}

    def _deterministic(self, name: str) -> LinearOutputs:
        known = self.at.run.deterministic
        value = known.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(
                f"'{name}' is no observed or deterministic site with floating-point values "
                f"(there are {', '.join(map(repr, [*self.outputs, *known]))})"
            )
        return LinearOutputs.of_deterministic(self.at, name)

    def at_draws(
        self,
        offsets: LinearDraws,
        read: Callable[[Any], Any],
        *,
        densities: bool = False,
        deterministic: bool = False,
        sites: Collection[str] | None = None,
    ) -> AtDraws:
        """Apply ``read`` to the observed sites' distributions at draws, and read what else is
        asked for.

        :param sites: names of the observed sites; by default all.
        """
        names = self.outputs if sites is None else sites
        parameters = {name: self.outputs[name].draws(offsets) for name in names}
        drawn = {n: self.outputs[n].observed(values) for n, values in parameters.items()}
        return AtDraws(
            {name: read(site.distribution) for name, site in drawn.items()},
            densities_of(drawn) if densities else {},
            self._deterministic_draws(offsets, parameters) if deterministic else {},
        )

    def _deterministic_draws(
        self, offsets: LinearDraws, parameters: dict[str, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Draws of the deterministic sites, linearized; of one that is a parameter of an observed
        site, the draws of this parameter."""
        result = {}
        for name, value in self.at.run.deterministic.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                drawn = self._parameter_draws(value, parameters)
                if drawn is None:
                    drawn = self._deterministic(name).draws(offsets)["value"]
                result[name] = drawn
        return result

    def _parameter_draws(
        self, value: Tensor, parameters: dict[str, dict[str, Tensor]]
    ) -> Tensor | None:
        for name, drawn in parameters.items():
            distribution = self.at.run.observed[name].distribution
            for key, parameter in parameters_of(distribution).items():
                if key in drawn and _is_same_tensor(parameter, value):
                    return bijections(distribution)[key](drawn[key])
        return None


class LinearizedComponent:
    """A program with outputs that are linear in the latents, under one Gaussian over the latents.

    Large data are linearized in batches that fit in memory, and the results are joined.

    :param model: the Pyro program.
    :param guide: the Gaussian; the program is linearized around its center.
    :param seed: seed of the draws of the latents; None to draw anew in each call.
    """

    def __init__(self, model: Callable, guide: NormalGuide, seed: int | None = None) -> None:
        self.model, self.guide, self.seed = model, guide, seed
        self._is_checked = False
        self._point: At | None = None

    def _at(self, *, differentiable: bool) -> At:
        """The program at the guide's center."""
        if self._point is None or self._point.subset is not self.guide.subset:
            config = getattr(self.guide, "config", None)
            rows = "alone" if config is None else config.rows
            program, vector = on_whole_data(self.model), self.guide.location()
            self._point = At(program, self.guide.subset, vector, rows, self.guide.program_modules)
        return self._point.moved(self.guide.location(), differentiable=differentiable)

    def closed_forms(
        self,
        function: Callable[[GaussianOutputs], Any],
        args: tuple,
        kwargs: dict,
        sites: Collection[str] | None = None,
        *,
        whole: bool = False,
    ) -> dict[str, Any]:
        """Apply a function to the Gaussian outputs of each observed site, or of those that are
        named.

        :param function: returns tensors (n, ...), nested or not; None without a closed form.
        :param whole: linearize all data at once.
        """
        parts, rows, precision = [], [], self.guide.precision
        with torch.set_grad_enabled(wants_gradients(args, dict(kwargs))):
            for part in self.parts(args, kwargs, whole=whole):
                sited = part.chosen(sites).items()
                parts.append({n: function(outputs.gaussian(precision)) for n, outputs in sited})
                rows.append(part.rows)
            return _joined(parts, rows, 0)

    def closed_forms_or_draws(
        self,
        function: Callable[[GaussianOutputs], Any],
        args: tuple,
        kwargs: dict,
        num_samples: int,
        read: Callable[[Any], Any] = lambda distribution: (),
        *,
        densities: bool = False,
        whole: bool = False,
    ) -> tuple[dict[str, Any], AtDraws]:
        """``closed_forms``, and of the sites without one what is read at draws."""
        values = self.closed_forms(function, args, kwargs, whole=whole)
        known = {name: value for name, value in values.items() if value is not None}
        others = [name for name in values if name not in known]
        if not others:
            return known, AtDraws({}, {}, {})
        options: dict[str, Any] = {"densities": densities, "sites": others}
        return known, self.at_draws(read, num_samples, args, kwargs, **options)

    def predictive_covariance(
        self, num_samples: int, args: tuple, kwargs: dict, *, joint: bool
    ) -> dict[str, PredictiveCovariance]:
        """Mean and covariance of y for each observed site.

        :param num_samples: the number of draws where there is no closed form.
        """

        def closed(gaussian: GaussianOutputs) -> PredictiveCovariance | None:
            noise = closed_forms.noise_covariance(gaussian)
            if noise is None:
                return None
            mean, _ = gaussian.cells("loc")
            covariance = _joint_block(gaussian) if joint else gaussian.block("loc", "loc")
            return PredictiveCovariance(mean, with_noise(covariance, noise))

        result, drawn = self.closed_forms_or_draws(
            closed, args, kwargs, num_samples, observation_covariance, whole=joint
        )
        for name, values in drawn.values.items():
            result[name] = total_covariance(*values, joint=joint)
        return result

    def prior_covariance(
        self, first: tuple[tuple, dict], second: tuple[tuple, dict]
    ) -> dict[str, Tensor]:
        """For each observed site J(x) Lambda^-1 J(x2)', (N K, N2 K), data before parameters."""
        guide: Any = self.guide  # a Laplace approximation
        root = PriorRoot(guide.prior, guide.subset.parts, "the tangent kernel")
        columns: dict[str, list[Tensor]] = {}
        with torch.set_grad_enabled(wants_gradients(first, second)):
            for right in self.parts(*second, as_rows=True):
                vectors = {
                    name: _times_covariance(root, outputs)
                    for name, outputs in right.outputs.items()
                    if outputs.moving
                }
                products: dict[str, list[Tensor]] = {}
                for left in self.parts(*first, as_rows=True):
                    for name, own in vectors.items():
                        outputs = left.outputs[name]
                        product = _double_rows(outputs) @ own.mT
                        products.setdefault(name, []).append(product.to(outputs.mean))
                for name, rows in products.items():
                    columns.setdefault(name, []).append(torch.cat(rows))
            return {name: torch.cat(parts, 1) for name, parts in columns.items()}

    def at_draws(
        self,
        read: Callable[[Any], Any],
        num_samples: int,
        args: tuple,
        kwargs: dict,
        **options: Any,
    ) -> AtDraws:
        """Join ``LinearizedPart.at_draws`` at draws of the latents over batches.

        :param options: of ``LinearizedPart.at_draws``.
        """
        chunks = []
        with torch.set_grad_enabled(wants_gradients(args, dict(kwargs))):
            for offsets in self._offsets(num_samples):
                batches, rows = [], []
                for part in self.parts(args, kwargs):
                    batches.append(part.at_draws(offsets, read, **options))
                    rows.append(part.rows)
                chunks.append(_joined(batches, rows, 1))
            return tree_map(lambda *parts: torch.cat(parts), *chunks)

    def vectors(self, num_samples: int) -> Tensor:
        """The draws of ``at_draws`` as unconstrained vectors (S, P); with a seed, the same ones."""
        guide, center = self.guide, self.guide.location()
        offsets = torch.cat([part.vectors() for part in self._offsets(num_samples)])
        return guide.subset.put(center, guide.subset.take(center) + offsets.to(center))

    def _offsets(self, num_samples: int) -> Iterator[LinearDraws]:
        """Draws of the latents minus the center, as many at a time as fit in memory."""
        guide = self.guide
        draw = guide.location().element_size() * guide.subset.size
        at_once = max(1, bytes_at_once(_DRAWS_AT_ONCE) // max(1, draw))
        for start in range(0, num_samples, at_once):
            with nullcontext() if self.seed is None else seeded(self.seed + start):
                offsets = guide.precision.draw(min(at_once, num_samples - start))
            yield offsets

    def parts(
        self, args: tuple, kwargs: dict, *, as_rows: bool = False, whole: bool = False
    ) -> Iterator[LinearizedPart]:
        """Yield linearizations of the data, batch by batch.

        :param as_rows: choose batches whose Jacobians fit in memory as rows.
        :param whole: take all data at once.
        """
        self._check(self.model if whole else on_whole_data(self.model), args, kwargs)
        at = self._at(differentiable=wants_gradients(args, dict(kwargs)))
        linearizations: Iterable[Linearization] = (
            [at.linearize(args, kwargs, compared=False)]
            if whole
            else at.linearizations(
                [(args, kwargs)], compared=False, every_output=True, as_rows=as_rows
            )
        )
        for linearization in linearizations:
            yield LinearizedPart(linearization, observed_outputs(linearization))

    def _check(self, program: Callable, args: tuple, kwargs: dict) -> None:
        """Check that the posterior belongs to the program.

        :raises ValueError: for a posterior of another program.
        """
        if self._is_checked or self.guide.is_of(self.model):
            return
        center = self.guide.require_layout().constrain(self.guide.location()[None])[0]
        with evaluation_mode(program, self.guide):
            check_posterior(program, self.guide, center, args, kwargs)
        self._is_checked = True


def _times_covariance(root: PriorRoot, outputs: LinearOutputs) -> Tensor:
    """Return J Lambda^-1 as rows (n K, p), data before columns, in float64."""
    return root.solve_transposed(root.solve(_double_rows(outputs)))


def _double_rows(outputs: LinearOutputs) -> Tensor:
    """The Jacobian as rows (n K, p), data before columns, in float64."""
    return outputs.jacobian.rows().double().transpose(0, 1).flatten(0, 1)


def moments(gaussian: GaussianOutputs) -> ParameterMoments | PredictiveMoments:
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
    if gaussian.outputs.moving or gaussian.outputs.site is not None:
        return gaussian.mean, gaussian.covariance
    mean = _constant(gaussian.outputs)
    return mean, mean.new_zeros(*mean.shape, mean.shape[-1])


def joint_mean_and_covariance(
    gaussian: GaussianOutputs, group: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """The mean (n K,) and the covariance (n K, n K) of a site over all data; None of an observed
    site that does not depend on the latents.

    :param group: q, for those of every q data in a row, (n / q, q K) and (n / q, q K, q K).
    """
    outputs = gaussian.outputs
    if group is not None:
        if outputs.num_data % group:
            raise ValueError(f"{outputs.num_data} rows are not in groups of {group}")
        mean = outputs.mean if outputs.moving else _constant(outputs)
        mean = mean.reshape(outputs.num_data // group, -1)
        if not outputs.moving:
            return mean, mean.new_zeros(*mean.shape, mean.shape[-1])
        covariance = gaussian.precision.covariance(grouped(outputs.jacobian, group))
        return mean, outputs.kept(covariance).to(mean)
    if outputs.moving:
        covariance = gaussian.precision.joint_covariance(outputs.jacobian)
        return outputs.mean.reshape(-1), outputs.kept(covariance).to(outputs.mean)
    if outputs.site is not None:
        return None
    mean = _constant(outputs).reshape(-1)
    return mean, mean.new_zeros(len(mean), len(mean))


def _joint_block(gaussian: GaussianOutputs) -> Tensor:
    """Cov[loc] over all data, (N, D, N, D)."""
    mean, joint = gaussian.cells("loc")[0], joint_mean_and_covariance(gaussian)
    if joint is None or "loc" not in gaussian.outputs.moving:
        return mean.new_zeros(*mean.shape, *mean.shape)
    part, shape = gaussian.columns("loc"), gaussian.mean.shape
    return joint[1].reshape(*shape, *shape)[:, part, :, part]


def _constant(outputs: LinearOutputs) -> Tensor:
    """A deterministic site that does not depend on the latents, (n, K)."""
    return outputs.values["value"].reshape(outputs.num_data, -1)


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same numbers in memory."""
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return same and one.data_ptr() == other.data_ptr()


def _joined(results: list[Any], rows: list[int], dim: int) -> Any:
    """Concatenate the batches' results; results that are not per datum are kept once."""

    def join(*parts: Any) -> Any:
        if parts[0] is None or len(parts) == 1 or parts[0].dim() <= dim:
            return parts[0]
        of_data = all(part.shape[dim] == size for part, size in zip(parts, rows, strict=True))
        if not of_data and all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        return torch.cat(parts, dim)

    return tree_map(join, results[0], *results[1:])
