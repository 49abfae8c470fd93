"""Posteriors by SVI: MAP, mean-field and other Gaussian families, dropout, ensembles and SWAG.

Several draws a step cost little, since vmap takes them at once, and let Adam settle.
"""

import copy
from dataclasses import replace
from functools import partial

import torch

from pyro_bdl.adapters import replaced
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.elbo.compiled import bound_for
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoInducing,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
    AutoMultiSWAG,
    AutoSWAG,
    AutoVariationalLastLayer,
)
from pyro_bdl.nn import BayesianModule, rank_one
from pyro_bdl.optim import IVON, KroneckerGaussNewton_ELBO, NoisyKFAC
from pyro_bdl.posteriors.registry import Problem, Result, by_svi, register, trained
from pyro_bdl.training.held_out import HeldOut
from pyro_bdl.training.svi import train
from pyro_bdl.training.swag import collect_swag

_DRAWS = 200  # of the weights, where a posterior is over other latents
_RATES = (0.005, 0.01, 0.05, 0.1)  # of dropout, those of Gal & Ghahramani (2016)

_vi = partial(by_svi, steps=4000, num_particles=4)

register("map", "MAP", "a point: the maximum of the posterior density", default=True)(
    by_svi(AutoMAP, steps=2000)
)
register(
    "mean-field",
    "mean-field VI",
    "independent Normals over the weights, maximizing the ELBO",
    default=True,
)(_vi(AutoMeanField, temperature=1.0))
register(
    "mean-field-tempered",
    "mean-field VI, tempered",
    "mean-field with the KL weighted by a temperature of 0.1",
    default=True,
)(_vi(AutoMeanField, temperature=0.1))
register(
    "mean-field-lrt",
    "mean-field VI, local noise",
    "mean-field by local reparameterization, with gradients of less variance",
)(_vi(AutoMeanField, estimator="local_reparameterization"))
register(
    "low-rank",
    "low-rank VI",
    "a Normal with a covariance of rank 10 plus a diagonal, maximizing the ELBO",
)(_vi(partial(AutoLowRank, rank=10)))
register(
    "variational-last-layer",
    "variational last layer",
    "a Normal over the last layer's weights, with the features trained by the same bound",
)(by_svi(AutoVariationalLastLayer, steps=4000))
register(
    "inducing",
    "inducing-point VI",
    "each layer's weights given the features of 50 inducing inputs, at temperature 1",
)(_vi(AutoInducing, temperature=1.0, learning_rate=0.03))


@register("ivon", "mean-field VI, IVON", "mean-field by natural gradients (IVON) in place of Adam")
def _ivon(problem: Problem) -> Result:
    guide = AutoMeanField(problem.model).prototype(*problem.data)
    return trained(problem, guide, steps=4000, num_particles=4, optimizer=IVON(guide))


@register(
    "noisy-kfac",
    "matrix normal VI, noisy K-FAC",
    "a matrix normal for each weight matrix, by natural gradients (K-FAC)",
)
def _noisy_kfac(problem: Problem) -> Result:
    guide = AutoMatrixNormal(problem.model).prototype(*problem.data)
    loss, optimizer = KroneckerGaussNewton_ELBO(), NoisyKFAC(guide)
    return trained(problem, guide, steps=2000, elbo=loss, optimizer=optimizer)


@register(
    "rank-one",
    "rank-one VI",
    "mean-field over rank-one factors of the weight matrices, which are trained themselves; 200 "
    "draws of the weights",
)
def _rank_one(problem: Problem) -> Result:
    model = copy.deepcopy(problem.model)
    networks = [part for part in model.modules() if isinstance(part, BayesianModule)]
    if len(networks) != 1:
        raise ValueError(f"rank-one is for programs with one network, and this has {len(networks)}")
    network = networks[0]
    small = rank_one(network.plain(), prior=network.prior, name=network.site_prefix.rstrip("."))
    model = replaced(model, {network: small})
    made = trained(replace(problem, model=model), AutoMeanField(model), steps=4000, num_particles=4)
    posterior = AutoEnsemble(problem.model, size=_DRAWS).prototype(*problem.data)
    with torch.no_grad():
        draws = made.posterior.sample_latents(_DRAWS)
        weights = small.products(draws).items()
        draws |= {f"{network.site_prefix}{name}": value for name, value in weights}
        posterior.locs.copy_(posterior.require_layout().unconstrain(draws))
    return Result(posterior, {**made.settings, "draws": _DRAWS}, made.interrupted)


def _with_rates(made: Result) -> Result:
    rates = {f"p of {site}": f"{p.item():.3g}" for site, p in made.posterior.rates().items()}
    return replace(made, settings={**made.settings, **rates})


@register(
    "mc-dropout",
    "MC dropout",
    "dropout of hidden units, kept on for prediction, at the one of four rates that predicts "
    "held-out rows best",
    default=True,
)
def _mc_dropout(problem: Problem) -> Result:
    """The rate is chosen as by Gal & Ghahramani (2016): the best log likelihood of a fifth of the
    rows, by shorter trainings on the rest."""
    steps, data = problem.options.steps or 4000, problem.data
    shorter = max(1, steps // 4)
    held_out = HeldOut(max(0.2, 1 / len(problem.x)))
    scores = {}
    for rate in _RATES:
        guide = AutoMCDropout(problem.model, p=rate)
        run = train(
            problem.model, guide, *data, steps=shorter, held_out=held_out,
            elbo=bound_for(shorter, num_particles=4), progress=problem.label, backend="auto",
        )  # fmt: skip
        if run.interrupted:
            raise KeyboardInterrupt
        assert run.best_scores is not None
        scores[rate] = float(run.best_scores)
    best = max(_RATES, key=scores.__getitem__)
    return _with_rates(_vi(partial(AutoMCDropout, p=best))(problem))


@register(
    "concrete-dropout",
    "concrete dropout",
    "dropout of hidden units at rates that maximize the bound, one for each layer",
)
def _concrete_dropout(problem: Problem) -> Result:
    # The temperature of learned rates falls with the steps, which a graph would not see.
    elbo = TemperedTraceMeanField_ELBO(num_particles=4)
    return _with_rates(_vi(partial(AutoMCDropout, learn_p=True), elbo=elbo)(problem))


register(
    "ensemble",
    "ensemble",
    "five networks, each a MAP estimate from its own initialization",
    default=True,
)(by_svi(partial(AutoEnsemble, size=5), steps=2000))
register(
    "anchored-ensemble",
    "ensemble, anchored",
    "five networks, each a MAP estimate under a prior around a draw of its own from the prior",
)(by_svi(partial(AutoEnsemble, size=5, anchored=True), steps=2000))


def _swag(problem: Problem, guide: AutoSWAG | AutoMultiSWAG) -> Result:
    """SGD from the end of training, and the Gaussian of its snapshots."""
    made = trained(problem, guide, steps=2000)
    run = collect_swag(
        problem.model, guide, *problem.data, snapshots=problem.options.snapshots,
        progress=problem.label,
    )  # fmt: skip
    count = int(guide.snapshots.count)
    if count < 2:
        raise KeyboardInterrupt
    rank = min(guide.rank, count)
    posterior = guide.swag_approximation(rank=rank)
    settings = {"snapshots": count, "rank": rank, "learning rate": run.learning_rate}
    return Result(posterior, {**made.settings, **settings}, made.interrupted or run.interrupted)


register(
    "swag",
    "SWAG",
    "a Gaussian of rank 20 from 40 snapshots of SGD after MAP training",
    default=True,
)(lambda problem: _swag(problem, AutoSWAG(problem.model)))
register("multi-swag", "MultiSWAG", "a mixture of the SWAG posteriors of five networks")(
    lambda problem: _swag(problem, AutoMultiSWAG(problem.model, size=5))
)
