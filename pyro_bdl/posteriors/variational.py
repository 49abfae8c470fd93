"""Posteriors by SVI: MAP, mean-field and other Gaussian families, and dropout.

Several draws a step cost little, since vmap takes them at once, and let Adam settle.
"""

from pyro_bdl.guides import AutoLowRank, AutoMAP, AutoMatrixNormal, AutoMCDropout, AutoMeanField
from pyro_bdl.optim import IVON, KroneckerGaussNewton_ELBO, NoisyKFAC
from pyro_bdl.posteriors.registry import Problem, Result, register, trained


@register("map", "MAP", "a point: the maximum of the posterior density", default=True)
def _map(problem: Problem) -> Result:
    return trained(problem, AutoMAP(problem.model), steps=2000)


@register(
    "mean-field",
    "mean-field VI",
    "independent Normals over the weights, maximizing the ELBO",
    default=True,
)
def _mean_field(problem: Problem) -> Result:
    guide = AutoMeanField(problem.model)
    return trained(problem, guide, steps=4000, num_particles=4, temperature=1.0)


@register(
    "mean-field-tempered",
    "mean-field VI, tempered",
    "mean-field with the KL weighted by a temperature of 0.1",
    default=True,
)
def _mean_field_tempered(problem: Problem) -> Result:
    guide = AutoMeanField(problem.model)
    return trained(problem, guide, steps=4000, num_particles=4, temperature=0.1)


@register(
    "mean-field-lrt",
    "mean-field VI, local noise",
    "mean-field by local reparameterization, with gradients of less variance",
)
def _mean_field_lrt(problem: Problem) -> Result:
    guide, estimator = AutoMeanField(problem.model), "local_reparameterization"
    return trained(problem, guide, steps=4000, num_particles=4, estimator=estimator)


@register(
    "low-rank",
    "low-rank VI",
    "a Normal with a covariance of rank 10 plus a diagonal, maximizing the ELBO",
)
def _low_rank(problem: Problem) -> Result:
    guide = AutoLowRank(problem.model, rank=10)
    made = trained(problem, guide, steps=4000, num_particles=4)
    return Result(guide, {**made.settings, "rank": guide.rank}, made.interrupted)


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


def _dropout(problem: Problem, *, learn_p: bool) -> Result:
    guide = AutoMCDropout(problem.model, learn_p=learn_p)
    made = trained(problem, guide, steps=4000, num_particles=4)
    rates = {f"p of {site}": f"{rate.item():.3g}" for site, rate in guide.rates().items()}
    return Result(guide, {**made.settings, **rates}, made.interrupted)


@register(
    "mc-dropout",
    "MC dropout",
    "dropout of a tenth of the hidden units, kept on for prediction",
    default=True,
)
def _mc_dropout(problem: Problem) -> Result:
    return _dropout(problem, learn_p=False)


@register(
    "concrete-dropout",
    "concrete dropout",
    "dropout of hidden units at rates that maximize the bound, one for each layer",
)
def _concrete_dropout(problem: Problem) -> Result:
    return _dropout(problem, learn_p=True)
