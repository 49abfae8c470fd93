"""Options and calls that guides refuse, each in a sentence that names what is wrong."""

import math

import pytest
from torch import nn

from pyro_bdl import init
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMeanField,
    AutoMultiSWAG,
    AutoPathfinder,
    AutoSubnetwork,
    AutoSWAG,
    AutoVariationalLastLayer,
    MixtureGuide,
    selectors,
)
from pyro_bdl.guides.selectors import number_of
from pyro_bdl.training import collect_swag


def made(kind, **options):
    return lambda model, x, y: kind(model, **options)


def run(kind, **options):
    return lambda model, x, y: kind(model, **options).prototype(x, y)


def members(model, x, y):
    return AutoEnsemble(model, size=2).prototype(x, y)


def snapshots(**settings):
    return lambda model, x, y: collect_swag(model, AutoSWAG(model, rank=2), x, y, **settings)


def mixture(*more, weights=None):
    def call(model, x, y):
        normals = [AutoMeanField(model).prototype(x, y) for _ in range(3)]
        return MixtureGuide([*normals[: 3 - len(more)], *(m(model) for m in more)], weights)

    return call


SCALES = "init_scale must give 6 numbers"
RATES = "learning_rate must be positive"
REFUSALS = [
    (made(AutoLowRank, rank=0), ValueError, "rank must be"),
    (made(AutoLowRank, rank=1.5), ValueError, "rank must be a whole number"),
    (made(AutoLowRank, init_scale=0.0), ValueError, "init_scale must be"),
    (made(AutoLowRank, init_scale=math.nan), ValueError, "init_scale must be"),
    (made(AutoMatrixNormal, init_scale=0.0), ValueError, "init_scale must"),
    (made(AutoMatrixNormal, max_side=-1), ValueError, "max_side must"),
    *(
        (made(AutoMeanField, init_scale=bad), ValueError, "init_scale must be")
        for bad in (0.0, -1.0, math.nan, math.inf)
    ),
    (made(AutoMeanField, scale="per-column"), ValueError, "scale must be one of 'per-weight'"),
    (made(AutoMeanField, scale=-0.1), ValueError, "scale must be positive"),
    (made(AutoMeanField, max_scale=0.0), ValueError, "max_scale must be positive"),
    (made(AutoMeanField, max_scale=0.01), ValueError, "init_scale 0.05 must be less than max_sca"),
    (made(AutoMeanField, scale=0.1, max_scale=0.2), ValueError, "takes no max_scale"),
    *(
        (run(AutoMeanField, init_scale=wrong, max_scale=0.5), ValueError, SCALES)
        for wrong in (lambda u: u.abs()[1:], lambda u: 0 * u, lambda u: 1 + 0 * u, lambda u: 0.1)
    ),
    (lambda *_: init.relative_scale(delta=0.0), ValueError, "delta must be positive"),
    (lambda *_: init.relative_scale(floor=-1.0), ValueError, "floor must be positive"),
    (made(AutoVariationalLastLayer, structure="kron"), ValueError, "structure"),
    (made(AutoVariationalLastLayer, features="none"), ValueError, "features"),
    (made(AutoVariationalLastLayer, init_scale=0.0), ValueError, "init_scale"),
    (made(AutoEnsemble, size=0), ValueError, "size must be at least 1"),
    (made(AutoEnsemble, members=3), TypeError, "no option 'members': it has size, anchored"),
    (made(AutoMAP, lr=0.1), TypeError, "AutoMAP has no option 'lr': it has init_loc_fn"),
    *(
        (
            lambda *data, kind=kind: members(*data).as_guides(kind),
            TypeError,
            f"{kind.__name__} starts from several vectors",
        )
        for kind in (AutoMultiSWAG, AutoPathfinder)
    ),
    *(
        (made(kind, rank=rank), ValueError, "rank must be at least")
        for kind in (AutoSWAG, AutoMultiSWAG)
        for rank in (-1, 1)
    ),
    *(
        (lambda model, x, y, call=call: call(AutoSWAG(model)), RuntimeError, "prototype")
        for call in (AutoSWAG.collect, AutoSWAG.discard, AutoSWAG.swag_approximation)
    ),
    (snapshots(snapshots=0), ValueError, "at least 1"),
    (snapshots(every=0), ValueError, "at least 1"),
    (snapshots(learning_rate=0.0), ValueError, RATES),
    (snapshots(learning_rate=1e-3, final_learning_rate=-1.0), ValueError, RATES),
    (snapshots(final_learning_rate=0.1), ValueError, "needs learning_rate"),
    (snapshots(batch_size=0), ValueError, "batch_size must be at least 1"),
    (lambda m, x, y: collect_swag(m, AutoMAP(m), x, y), TypeError, "AutoMAP"),
    (made(AutoSubnetwork, select="largest"), TypeError, "selector"),
    *(
        (made(AutoSubnetwork, size=size), ValueError, r"size|fraction")  # before any training
        for size in (0, -1, 1.5, "four", True)
    ),
    *(
        (lambda *_, size=size: number_of(size, 13), ValueError, "size")
        for size in (0, -1, 14, 0.0, 1.5, "4 GB", True, None)
    ),
    (
        lambda *_: selectors.LargestVariance(selectors.Random(1)),
        TypeError,
        "needs a guide with marginal variances, got Random",
    ),
    (lambda *_: MixtureGuide([]), ValueError, "at least one member"),
    (mixture(AutoMAP), RuntimeError, "prototype"),
    (mixture(lambda model: nn.Module()), TypeError, "member 2 of the mixture is a Module"),
    *(
        (mixture(weights=weights), ValueError, "weights must be 3 numbers")
        for weights in ([1.0], [0.0] * 3, [1.0, -1.0, 1.0], [math.nan, 1.0, 1.0])
    ),
]


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_refusals(call, error, words, linear):
    with pytest.raises(error, match=words):
        call(*linear)
