"""Training of features by the evidence of the Bayesian linear regression on them."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_bdl.bayesian_linear import SufficientStatistics, log_evidence
from pyro_bdl.curvature.fisher import cell_weights
from pyro_bdl.distributions.families import name_of
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.elbo.checks import check_data
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import SET_BY_STEPS
from pyro_bdl.guides.last_layer import AutoLastLayer, Features, read_features
from pyro_bdl.guides.output_quadrature import tags_of
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.linear_ops.last_layer import Path
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.tracing.compiled import Arguments, CompiledLoss, Evaluation, split
from pyro_bdl.tracing.trace import NotTraceable
from pyro_bdl.utils.autograd import is_transformed, reaches
from pyro_bdl.utils.precision import castings, double


class LastLayerEvidence(Trace_ELBO):
    """A loss for everything but the last layer W, which is integrated out; for ``SVI`` or torch's
    optimizers:

        loss = -[log p(y | v) + log p(v)],  p(y | v) = int p(y | phi_v W') p(W) dW

    Here v are all other latents (hidden weights, a noise with a prior), unconstrained, at the
    guide's point, and log p(y | v) = log N(y; Phi m0', Phi S Phi' + noise^2) for W ~ Normal(m0, S).
    This is type-II maximum likelihood of the features, with their priors (Ober & Rasmussen 2019,
    section 2). The loss is differentiable in the features and in every ``PyroParam`` of priors and
    noise. It costs O(N H^2 + H^3) for N data and H features.

    If one ``PyroParam`` scales the priors of the last layer and of other layers, the loss is
    unbounded below as these weights shrink together: give the last layer a separate scale. After
    training ``guide.laplace_approximation(data)`` is the posterior of the last layer. The program
    must observe all data at once, since the evidence is not a sum over data.

    The loss of a layer with one output is traced at the second call, as by ``CompiledELBO``, whose
    contract holds.

    :raises UnsupportedProgramError: if the last layer's output is not the location of a Normal
        observation, or its prior not Normal.
    :raises ValueError: for a minibatch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: tuple[Callable, Callable, list[str]] | None = None
        self._outputs = 0  # of the last layer; 0 before its first run
        self.graphs = CompiledLoss(type(self).__name__, moving=SET_BY_STEPS)

    def loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """-[log p(y | v) + log p(v)], in nats."""
        return self.differentiable_loss(model, guide, *args, **kwargs).item()

    def loss_and_grads(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return the loss in nats and add its gradients to the parameters' gradients."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return loss.item()

    @torch.enable_grad()
    def differentiable_loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss as a tensor to differentiate once."""
        sites = self._sites(model, guide, args, kwargs)
        # rows of several outputs may share a factorization, which their values decide
        if self._outputs == 1 and not is_transformed():
            with contextlib.suppress(NotTraceable):
                outcome = self.graphs(_Evaluation(self, model, guide, split(args, kwargs)))
                loss = outcome if isinstance(outcome, Tensor) else outcome.differentiable()
                if loss.isfinite():
                    return loss
        return self._plain(model, guide, sites, args, kwargs)

    def pure_loss(self, model: Callable, guide: Any, args: tuple, kwargs: dict) -> Tensor:
        """The loss by a run of the program, for steps in JAX; ``loss`` has checked the program."""
        sites = self._sites(model, guide, args, kwargs)
        return self._plain(model, guide, sites, args, kwargs, checked=True)

    def _plain(
        self,
        model: Callable,
        guide: Any,
        sites: Sequence[str],
        args: tuple,
        kwargs: dict,
        *,
        checked: bool = False,
    ) -> Tensor:
        """The loss by a run of the program.

        :param sites: those of the last layer.
        :param checked: whether an earlier run has shown that the program has a closed form.
        """
        layout = guide.require_layout()
        with guide.cached_parameters():
            vector = guide.location()
            values, log_det = layout.constrain(vector)
            values |= {name: values[name].detach().requires_grad_() for name in sites}
            run, features = read_features(model, values, sites, args, kwargs)
        self._outputs = features.outputs
        inside = [values[name] for name in sites]
        try:
            total = log_marginal(run, features, values, checked=checked)
            total = total + double(_others(run, sites, inside))
        except ValueError:
            check_data(model, guide, args, kwargs)  # the data may be the reason
            raise
        return -(total + double(log_det)).to(vector)

    def _sites(self, model: Callable, guide: Any, args: tuple, kwargs: dict) -> list[str]:
        """The last layer's sites; the program is searched once."""
        if self._found is None or self._found[:2] != (model, guide):
            if not isinstance(guide, AutoLastLayer):
                raise TypeError(
                    f"LastLayerEvidence trains an AutoLastLayer, got {type(guide).__name__}"
                )
            guide.prototype(*args, **kwargs)
            check_data(model, guide, args, kwargs)
            subset = guide.layer(*args, **kwargs)
            if any(chosen is not None for chosen in subset.chosen.values()):
                raise UnsupportedProgramError("the last layer must be made of whole sites")
            self._found, self._outputs = (model, guide, list(subset.sites)), 0
        return self._found[2]

    def __getstate__(self) -> dict[str, Any]:
        """The state without graphs: copies begin without them."""
        return self.__dict__ | {"graphs": self.graphs.emptied()}


class _Evaluation(Evaluation):
    """The loss of a program and its guide at these arguments."""

    def __init__(
        self, loss: LastLayerEvidence, model: Callable, guide: Any, arguments: Arguments
    ) -> None:
        self.loss, self.model, self.guide, self.arguments = loss, model, guide, arguments
        self.owner = self.holders = model, guide
        self.key = arguments.key, castings()

    def plain(self) -> Tensor:
        return self._at(self.arguments.tensors)

    def tensors(self) -> list[Tensor]:
        return self.arguments.tensors

    def traced(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self._at(tensors, checked=True),)

    def size(self, loss: Tensor) -> Tensor:
        """The loss may be zero by chance, and is of the order of the number of data."""
        return loss.detach().abs() + leading_size(self.arguments.tensors)

    def _at(self, tensors: Sequence[Tensor], *, checked: bool = False) -> Tensor:
        args, kwargs = self.arguments.rebuild(tensors)
        sites = self.loss._sites(self.model, self.guide, args, kwargs)
        return self.loss._plain(self.model, self.guide, sites, args, kwargs, checked=checked)


def log_marginal(
    run: Run, features: Features, values: Mapping[str, Tensor], *, checked: bool = False
) -> Tensor:
    """log p(y | v) in nats, with the last layer integrated out; a float64 scalar.

    :param run: a run of the program at ``values``.
    :param checked: see ``LastLayerEvidence._plain``.
    """
    site, base = _normal_site(run, features, checked=checked)
    means, scales = _prior(run, features)
    shape = len(features.phi), features.outputs
    sigma = double(base.scale.expand(base.batch_shape).reshape(shape))
    counts = double(cell_weights(site).square().reshape(shape))
    offset = double(features.coefficients(values).detach() - means)
    # y - Phi m0' computed from y - Phi W', so that other terms of the location are kept
    residual = double((site.value - base.loc).reshape(shape)) + double(features.phi) @ offset.mT
    weights, alpha = counts / sigma.square(), double(scales).square().reciprocal()
    total = -(counts * (sigma.log() + 0.5 * math.log(2 * math.pi))).sum()
    columns = range(features.outputs)
    shared = features.outputs == 1 or bool((weights == weights[:, :1]).all())
    for part in [slice(None)] if shared else [slice(k, k + 1) for k in columns]:
        statistics = SufficientStatistics.of(
            features.phi, residual[:, part], weights[:, part.start or 0]
        )
        prior = alpha[part]
        prior = prior[:1] if len(prior) > 1 and bool((prior == prior[:1]).all()) else prior
        # the noise's constants are in the total already
        statistics = replace(statistics, count=torch.zeros_like(statistics.count))
        total = total + log_evidence(statistics, prior, 1.0)
    return total


def _normal_site(run: Run, features: Features, *, checked: bool) -> tuple[Site, Any]:
    """The observed site whose location is the last layer's output, and its Normal."""
    seen = features.seen
    found = {name: site for name, site in run.observed.items() if tags_of(site, seen)}
    if len(found) != 1:
        raise UnsupportedProgramError(
            f"the last layer feeds {len(found)} observed sites ({', '.join(found)}): the evidence "
            "in closed form needs exactly one"
        )
    ((name, site),) = found.items()
    base: Any = base_distribution(site.distribution)
    kind = type(base).__name__
    refused = f"the evidence in closed form needs a Normal observation, site '{name}' is {kind}"
    if name_of(base) != "Normal":
        raise UnsupportedProgramError(f"{refused}: train as MAP, and use evidence.maximize")
    if site.value is None:
        raise ValueError(f"site '{name}' has no observation: pass the targets as well")
    if site.subsampling != 1.0:
        raise ValueError(
            f"site '{name}' was given a minibatch of its data, but the evidence is not a sum over "
            "data: pass all of them at once, or train as MAP with an ELBO"
        )
    if checked:
        return site, base
    tags = tags_of(site, features.seen)
    if "scale" in tags:
        raise UnsupportedProgramError(
            f"the noise of site '{name}' depends on the last layer, which can then not be "
            "integrated out in closed form: train as MAP"
        )
    loc, changed = tags["loc"], features.seen.left is not None
    if changed or loc.path > Path.SHIFTED or not loc.is_complete:
        raise UnsupportedProgramError(
            f"the last layer's output is not the location of site '{name}' but something made of "
            "it: put what follows into the noise or the targets, or train as MAP"
        )
    return site, base


def _prior(run: Run, features: Features) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (K, H) of the last layer's Normal priors."""
    means, scales = {}, {}
    for name in features.sites:
        site = run.latents[name]
        base: Any = base_distribution(site.distribution)
        plain = site.mask is None and torch.as_tensor(site.scale == 1.0, device="cpu").all()
        if name_of(base) != "Normal" or not plain:
            raise UnsupportedProgramError(
                f"the prior of site '{name}' is no Normal ({type(base).__name__}), so that the "
                "last layer cannot be integrated out in closed form: train as MAP"
            )
        means[name] = base.loc.expand(base.batch_shape)
        scales[name] = base.scale.expand(base.batch_shape)
    return features.coefficients(means), features.coefficients(scales)


def _others(run: Run, sites: Sequence[str], inside: Sequence[Tensor]) -> Tensor:
    """The log density of all statements that do not depend on the last layer."""
    total = inside[0].new_zeros(())
    statements = {name: site for name, site in run.latents.items() if name not in sites}
    for name, site in (statements | run.prior_factors | run.observed | run.factors).items():
        if site.value is None:
            continue
        part = site.log_prob().sum()
        if not reaches(part, inside):
            total = total + part
        elif name not in run.observed:
            raise UnsupportedProgramError(
                f"the statement '{name}' depends on the last layer, which can then not be "
                "integrated out in closed form: train as MAP"
            )
    return total
