"""Curvature by brute force: Jacobians of whole outputs by autograd, Fisher matrices by formula."""

from dataclasses import fields

import pytest
import torch

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


@pytest.fixture(params=[name for name, kind in STRUCTURES.items() if not kind.curvature.is_sampled])
def structure(request):
    """A curvature structure's name; here every one runs."""
    return request.param


class Oracle:
    """Programs, dense matrices and fits that the tests of curvature share."""

    @staticmethod
    def program(model, *args):
        """The program and a vector (P,) away from symmetric points."""
        if isinstance(model, torch.nn.Module):
            model.eval()
        program = Program(model, *args)
        vector = program.unconstrain(program.initial)
        return program, vector + 0.1 * torch.randn_like(vector)

    @staticmethod
    def jacobian(program, vector, read):
        """The Jacobian (*shape, P) of ``read(run)`` in the unconstrained vector."""

        def outputs(u):
            return read(program.run(program.constrain(u)[0]))

        return torch.autograd.functional.jacobian(outputs, vector)

    @classmethod
    def ggn(cls, program, vector, weights=None):
        """sum over cells of weight * J' F J, dense, with F by its formula.

        :param weights: site -> weights of the cells, of the distribution's batch shape.
        """
        run = program.run(program.constrain(vector)[0])
        total = 0.0
        for name, site in run.observed.items():
            base = base_distribution(site.distribution)
            weight = torch.ones(base.batch_shape)
            if weights is not None:
                weight = weight * weights[name]
            kind = type(base).__name__
            for keys, information in FISHER[kind](base):
                parts = []
                for key in keys:

                    def read(run, name=name, key=key):
                        base = base_distribution(run.observed[name].distribution)
                        return getattr(base, key)

                    part = cls.jacobian(program, vector, read)
                    event = part.shape[base.loc.dim() if kind == "Normal" else len(weight.shape) :]
                    part = part.reshape(weight.numel(), *(event if len(event) > 1 else (1, -1)))
                    parts.append(part)
                rows = torch.cat(parts, 1)  # (cells, parameters, P)
                f = information.reshape(weight.numel(), *information.shape[-2:])
                f = f * weight.reshape(-1, 1, 1)
                total = total + torch.einsum("cip,cij,cjq->pq", rows, f, rows)
        return total

    @staticmethod
    def fit(program, vector, data, subset=None, **options):
        subset = Subset(program.layout, subset) if not isinstance(subset, Subset) else subset
        names = ("structure", "curvature", "num_draws", "rows")
        config = {name: options.pop(name) for name in names if name in options}
        if options:  # of the structure, if it has them
            kind = STRUCTURES[config["structure"]]
            own = {field.name for field in fields(kind)}
            config["structure"] = kind(**{k: v for k, v in options.items() if k in own})
        config = CurvatureConfig(**config)
        return fit_curvature(
            ProgramAtPoint(program.model, subset, vector, config.rows), data, config
        )

    @staticmethod
    def regression(net, x, outputs=1, noise=0.5, prior=None):
        y = torch.randn(len(x), outputs) if outputs > 1 else torch.randn(len(x))
        return models.Regression(bayesianize(net, prior), noise=noise), (x, y)

    @staticmethod
    def classification(net, x, classes=3):
        return models.Classification(bayesianize(net)), (x, torch.randint(0, classes, (len(x),)))


def _normal(base):
    one = base.scale.square().reciprocal()[..., None, None]
    return [(("loc",), one), (("scale",), 2 * one)]


def _categorical(base):
    p = base.probs
    return [(("logits",), torch.diag_embed(p) - p[..., :, None] * p[..., None, :])]


def _bernoulli(base):
    return [(("logits",), (base.probs * (1 - base.probs))[..., None, None])]


def _poisson(base):
    return [(("rate",), base.rate.reciprocal()[..., None, None])]


FISHER = {
    "Normal": _normal,
    "Categorical": _categorical,
    "Bernoulli": _bernoulli,
    "Poisson": _poisson,
}


@pytest.fixture
def oracle():
    return Oracle
