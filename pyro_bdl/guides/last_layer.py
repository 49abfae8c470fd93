"""Bayesian regression on the last hidden layer, with features trained by MAP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_bdl.curvature.at import At
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.laplace import AutoLaplaceGGN, subset_of
from pyro_bdl.guides.mode import STEPS, find_mode
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import fixed_normal


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

    def __init__(self, model: Callable, *, subset: Any = "last-layer", **options: Any) -> None:
        super().__init__(model, structure="full", subset=subset, **options)

    def options(self) -> dict[str, Any]:
        return {"subset": self.subset, "rows": self.config.rows}

    def _approximate(
        self, config: CurvatureConfig, subset: Subset, batches: Batches, **options: Any
    ) -> LaplaceGuide:
        """The posterior of the last layer given the features, at its mode.

        :raises UnsupportedProgramError: if the program uses the last layer's weights more than
            once, as with tied weights.
        """
        if config.structure.name != "full":
            raise ValueError(
                'AutoLastLayer has structure="full" alone: use AutoLaplaceGGN with '
                f'subset="last-layer" for structure="{config.structure}"'
            )
        posterior = super()._approximate(config, subset, batches, **options | {"check": False})
        model, loc = self.program_model, posterior.loc
        _check_used_once(model, subset, loc, *posterior.few_rows)
        closed = config.curvature in ("ggn", "hessian")
        closed = closed and is_quadratic(model, subset, loc, *batches.first())
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


def _check_used_once(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any
) -> None:
    """Check that every weight of the layer enters one operation, each network of a plate its own.

    :raises UnsupportedProgramError: if weights enter several operations.
    """
    uses = At(model, subset, vector).uses(args, kwargs).uses
    for name in subset.parts:
        size = subset.layout.latents[name].shape.numel()
        own_uses = [use for use in uses if use.site == name]
        dense = any(use.kind == "dense" for use in own_uses)  # for a vector of weights, or a prior
        count = vector.new_full((size,), float(dense))
        for use in own_uses:
            if use.kind != "dense":
                own = slice(None) if use.indices is None else use.indices[use.indices >= 0].unique()
                count[own] += 1
        if bool((count > 1).any()):
            raise UnsupportedProgramError(
                f"the last layer's weights '{name}' are used more than once in the program (tied "
                "weights?), so that it is no linear model of them: use "
                'AutoLaplaceGGN(model, subset="last-layer")'
            )


@torch.no_grad()
def is_quadratic(model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Any) -> bool:
    """Return whether log p(y, W) is a quadratic function of the subset W.

    It is quadratic if all observations, and the priors of W, are Normal with locations affine in W
    and constant scales. These are compared at three points on a line.
    """
    start, layout = subset.take(vector), subset.layout
    direction = fixed_normal(start) * (1.0 + start.abs().mean())
    if any(layout.latents[name].transform is not None for name in subset.parts):
        return False
    points = []
    for length in (-1.0, 0.0, 1.0):
        latents = layout.constrain(subset.put(vector, start + length * direction))[0]
        with evaluation_mode(model):
            run = record(model, latents, args, kwargs, draw=leave_open)
        sites = [*run.observed.values(), *(run.latents[name] for name in subset.parts)]
        points.append([base_distribution(site.distribution) for site in sites])
        if run.factors or not all(isinstance(base, Normal) for base in points[-1]):
            return False
    tolerance = 1e3 * torch.finfo(vector.dtype).eps
    for left, middle, right in zip(*points, strict=True):
        size = left.loc.abs().max() + right.loc.abs().max()
        bend = (left.loc + right.loc - 2.0 * middle.loc).abs().max()
        if not torch.equal(left.scale, right.scale) or bend > tolerance * size:
            return False
    return True
