"""Bayesian regression on the last hidden layer, with features trained by MAP; the features are the
inputs of the last layer's product, with their graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.structures.base import Structure
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.laplace import AutoLaplaceGGN, subset_of
from pyro_bdl.guides.mode import STEPS, find_mode
from pyro_bdl.guides.output_quadrature import depends, tags_of
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.linear_ops.last_layer import LastLayer
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, placeholder_for_observed, record
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.module_state import evaluation_mode, vmappable


class Features:
    """The features phi with z = phi W' in one run of a program, where W holds the last layer's
    sites.

    :param seen: the run's operations, with this layer as the only one.
    """

    def __init__(self, seen: LastLayer) -> None:
        self.seen, self.terms = seen, seen.layers[-1].terms
        terms = self.terms
        self.sites = [term.site for term in terms]
        rows = next(term.inputs for term in terms if term.inputs is not None)
        ones = rows.new_ones(len(rows), 1)
        self.phi = torch.cat([ones if t.inputs is None else t.inputs for t in terms], 1)
        self.outputs = len(terms[0].where)

    def coefficients(self, values: Mapping[str, Tensor]) -> Tensor:
        """Arrange values of the sites' entries as a matrix (K, H), like W."""
        parts = [values[term.site].reshape(-1)[term.where] for term in self.terms]
        return torch.cat(parts, 1)


def read_features(
    model: Callable,
    values: Mapping[str, Tensor],
    sites: Sequence[str],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> tuple[Run, Features]:
    """Run a program and read the features of its last layer, differentiable in everything else.

    :param values: site -> value; the last layer's values require gradients.
    :param sites: the sites of the last layer.
    :raises UnsupportedProgramError: if the sites enter other operations than one matrix product and
        additions to it.
    """
    seen = LastLayer({name: values[name] for name in sites})
    with torch.enable_grad(), seen:
        run = record(model, values, args, kwargs, draw=placeholder_for_observed)
    check_one_product(seen, sites)
    for term in seen.layers[0].terms:
        width = term.output.shape[-1:]
        inputs, shape = term.op.inputs, term.tag.tensor.shape
        of_rows = term.op.output_dim == -1 and inputs.dim() == 2 and len(shape) == 2
        if term.output.dim() != 2 or not (shape == width if term.is_bias else of_rows):
            raise _not_of_rows(term.site, term.op.function.__name__)
    return run, Features(seen)


def check_one_product(seen: LastLayer, sites: Sequence[str]) -> None:
    """Check that the only uses of sites are one product with a matrix, and biases of its output.

    :raises UnsupportedProgramError: otherwise.
    """
    for name, operation in seen.others.items():
        raise _not_of_rows(name, operation)
    for layer in seen.layers:
        for term in layer.terms:
            if term.op.kind not in ("product", "addition") or not term.op.is_plain:
                raise _not_of_rows(term.site, term.op.function.__name__)
    for name in sites:
        count = sum(term.site == name for layer in seen.layers for term in layer.terms)
        if count != 1 or len(seen.layers) != 1:
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' enter "
                f"{'no product' if count == 0 else f'{len(seen.layers)} products (tied weights?)'}:"
                " they must be those of one product of the data's rows with a matrix"
            )


def _not_of_rows(site: str, operation: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the last layer's weights '{site}' enter the operation '{operation}', which is not a "
        "product of the data's rows (N, features) with a matrix: use AutoLaplaceGGN"
    )


class AutoLastLayer(AutoLaplaceGGN):
    """A guide that trains the MAP, and then finds the last layer's posterior given the features.

    Let phi(x) be the input of the last layer and W its weights and biases. If everything before the
    last layer is fixed, a program with Normal observations and priors is Bayesian linear
    regression:

        p(W | y) = N(m, C),  C^-1 = sum_n phi_n phi_n' / noise^2 + prior precision,
        m = C (sum_n phi_n y_n / noise^2 + prior precision prior mean)

    ``laplace_approximation(data)`` returns this posterior. It is exact, with its evidence and its
    predictive, even if training has not converged, and follows the program's hyperparameters and
    further data (``update``) in closed form. For other observations it is a Gaussian at the mode of
    p(W | y), found by Newton steps with the Gauss-Newton precision. Memory does
    not grow with the number of data.

    The features are trained by MAP with SVI, or by maximizing the evidence, with W integrated out,
    with ``evidence.LastLayerEvidence`` (Ober & Rasmussen 2019, "neural linear").
    ``evidence.maximize`` sets the scales of priors and noise that are ``PyroParam``s, by the
    evidence of the last layer alone. Other latents, such as a noise scale with a prior, keep their
    trained values.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1)
        >>> guide = bdl.guides.AutoLastLayer(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=50)
        >>> guide.laplace_approximation((x, y))
        LaplaceGuide(25 latent numbers, 4 sites, 9 with a covariance, structure=Full())

    :param model: a Pyro program with continuous latents.
    :param subset: the last layer, by default the weights and biases of the program's last matrix
        product; for other values see ``AutoLaplaceGGN``.
    :param options: ``rows`` of ``AutoLaplaceGGN``; ``init_loc_fn``, where the guide starts, and
        ``create_plates``, see ``Guide``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE, bibliography.LAST_LAYER)

    def __init__(
        self,
        model: Callable,
        *,
        structure: str | Structure = "full",
        subset: Any = "last-layer",
        **options: Any,
    ) -> None:
        super().__init__(model, structure=structure, subset=subset, **options)
        self._check_structure(self.config)

    @staticmethod
    def _check_structure(config: CurvatureConfig) -> None:
        if config.structure.name != "full":
            raise ValueError(
                'AutoLastLayer has structure="full" alone: use AutoLaplaceGGN with '
                f'subset="last-layer" for structure="{config.structure.name}"'
            )

    def options(self) -> dict[str, Any]:
        return {"subset": self.subset, "rows": self.config.rows}

    def _approximate(
        self, config: CurvatureConfig, subset: Subset, batches: Batches, **options: Any
    ) -> LaplaceGuide:
        """The posterior of the last layer given the features, at its mode.

        :raises UnsupportedProgramError: if the program uses the last layer's weights more than
            once, as with tied weights.
        """
        self._check_structure(config)
        posterior = super()._approximate(config, subset, batches, **options | {"check": False})
        model, loc = self.program_model, posterior.loc
        seen, run = _uses(model, subset, loc, batches.first())
        _check_used_once(subset, seen)
        closed = config.curvature in ("ggn", "hessian") and is_quadratic(subset, seen, run)
        find_mode(posterior, steps=1 if closed else STEPS, progress=options["progress"])
        posterior.mode = "closed" if closed else "steps"
        if closed:
            posterior.refresh()  # remove the remaining rounding error
        return posterior

    def layer(self, *args: Any, **kwargs: Any) -> Subset:
        """The latents of the last layer.

        :param args: the program's arguments.
        """
        return subset_of(self, self.subset, args, kwargs)

    @torch.no_grad()
    def solve(self, data: Any) -> "AutoLastLayer":
        """Move the guide's last layer to its mode given the features; return the guide.

        :param data: as in ``laplace_approximation``.
        """
        self.loc.copy_(self.laplace_approximation(data).loc)
        return self


def _uses(model: Callable, subset: Subset, vector: Tensor, batch: Batch) -> tuple[LastLayer, Run]:
    """The operations that the subset's latents enter, in a run that does not change the model."""
    values = subset.layout.constrain(vector)[0]
    values |= {name: values[name].detach().requires_grad_() for name in subset.parts}
    seen = LastLayer({name: values[name] for name in subset.parts})
    with torch.enable_grad(), evaluation_mode(model), vmappable(), seen:
        run = record(model, values, *batch, draw=placeholder_for_observed)
    return seen, run


def _check_used_once(subset: Subset, seen: LastLayer) -> None:
    """Check that every weight of the layer enters one operation, each network of a plate its own.

    :raises UnsupportedProgramError: if weights enter several operations.
    """
    for name in subset.parts:
        terms = [term for layer in seen.layers for term in layer.terms if term.site == name]
        vectors = [term for term in terms if not term.is_bias and term.tag.tensor.dim() == 1]
        # a vector of weights may enter a prior too, as one of operations on the whole
        whole = name in seen.others or bool(vectors)
        size = subset.layout.latents[name].shape.numel()
        count = torch.full((size,), int(whole), device="cpu")
        for term in terms:
            if all(term is not vector for vector in vectors):
                count[term.tag.index().reshape(-1).unique().cpu()] += 1
        if bool((count > 1).any()):
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' are used more than once in the program (tied "
                "weights?), so that it is no linear model of them: use "
                'AutoLaplaceGGN(model, subset="last-layer")'
            )


def is_quadratic(subset: Subset, seen: LastLayer, run: Run) -> bool:
    """Return whether log p(y, W) is a quadratic function of the subset W.

    It is, by the operations, if all observations, and the priors of W, are Normal with locations
    affine in W and scales that do not depend on it, and nothing else depends on W.
    """
    transformed = any(subset.layout.latents[name].transform is not None for name in subset.parts)
    if transformed or seen.others or seen.left or seen.deep or run.discrete is not None:
        return False
    for name, site in (run.priors | run.factors | run.observed).items():
        is_normal = isinstance(base_distribution(site.distribution), Normal)
        tags = tags_of(site, seen)
        if name in run.observed:
            loc = tags.pop("loc", None)
            affine = is_normal and (loc is None or loc.path.is_linear)
            if tags or not affine or seen.output_tag(site.value) or seen.output_tag(site.mask):
                return False
        elif name in subset.parts:
            if tags or not is_normal:
                return False
        elif depends(site, seen):
            return False
    return True
