"""Posteriors by SVI: MAP, mean-field and other Gaussian families, and dropout."""

from typing import Any

from pyro_bdl.guides import AutoLowRank, AutoMAP, AutoMatrixNormal, AutoMCDropout, AutoMeanField
from pyro_bdl.optim import IVON, KroneckerGaussNewton_ELBO, NoisyKFAC
from pyro_bdl.posteriors.registry import Options, Problem, Result, register, trained


@register(
    "map",
    title="MAP",
    description="a point: the maximum of the posterior density",
    default=True,
)
def _map(problem: Problem, options: Options, progress: bool) -> Result:
    label = "map" if progress else None
    return trained(AutoMAP(problem.model), problem, options, label, steps=2000)


def _register_mean_field(
    name: str, title: str, description: str, *, default: bool = False, **choice: Any
) -> None:
    """Register a mean-field guide.

    :param choice: arguments of ``training.train``.
    """

    @register(name, title=title, description=description, default=default)
    def fit(problem: Problem, options: Options, progress: bool) -> Result:
        guide, label = AutoMeanField(problem.model), name if progress else None
        # Several draws a step cost little, since vmap takes them at once, and let Adam settle.
        settings = {"steps": 4000, "num_particles": 4, **choice}
        return trained(guide, problem, options, label, **settings)


_register_mean_field(
    "mean-field",
    "mean-field VI",
    "independent Normals over the weights, maximizing the ELBO",
    default=True,
    temperature=1.0,
)
_register_mean_field(
    "mean-field-tempered",
    "mean-field VI, tempered",
    "mean-field with the KL weighted by a temperature of 0.1",
    default=True,
    temperature=0.1,
)
_register_mean_field(
    "mean-field-lrt",
    "mean-field VI, local noise",
    "mean-field by local reparameterization, with gradients of less variance",
    estimator="local_reparameterization",
)


@register(
    "low-rank",
    title="low-rank VI",
    description="a Normal with a covariance of rank 10 plus a diagonal, maximizing the ELBO",
)
def _low_rank(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoLowRank(problem.model, rank=10), "low-rank" if progress else None
    made = trained(guide, problem, options, label, steps=4000, num_particles=4)
    return Result(guide, {**made.settings, "rank": guide.rank}, made.interrupted)


@register(
    "ivon",
    title="mean-field VI, IVON",
    description="mean-field by natural gradients (IVON) in place of Adam",
)
def _ivon(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoMeanField(problem.model), "ivon" if progress else None
    guide.prototype(problem.x, problem.y)
    settings = {"steps": 4000, "num_particles": 4}
    return trained(guide, problem, options, label, optimizer=IVON(guide), **settings)


@register(
    "noisy-kfac",
    title="matrix normal VI, noisy K-FAC",
    description="a matrix normal for each weight matrix, by natural gradients (K-FAC)",
)
def _noisy_kfac(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoMatrixNormal(problem.model), "noisy-kfac" if progress else None
    guide.prototype(problem.x, problem.y)
    loss, settings = KroneckerGaussNewton_ELBO(), {"steps": 2000}
    return trained(
        guide, problem, options, label, optimizer=NoisyKFAC(guide), elbo=loss, **settings
    )


def _dropout(
    name: str, guide: AutoMCDropout, problem: Problem, options: Options, progress: bool
) -> Result:
    label = name if progress else None
    made = trained(guide, problem, options, label, steps=4000, num_particles=4)
    rates = {f"p of {site}": f"{rate.item():.3g}" for site, rate in guide.rates().items()}
    return Result(guide, {**made.settings, **rates}, made.interrupted)


@register(
    "mc-dropout",
    title="MC dropout",
    description="dropout of a tenth of the hidden units, kept on for prediction",
    default=True,
)
def _mc_dropout(problem: Problem, options: Options, progress: bool) -> Result:
    return _dropout("mc-dropout", AutoMCDropout(problem.model), problem, options, progress)


@register(
    "concrete-dropout",
    title="concrete dropout",
    description="dropout of hidden units at rates that maximize the bound, one for each layer",
)
def _concrete_dropout(problem: Problem, options: Options, progress: bool) -> Result:
    guide = AutoMCDropout(problem.model, learn_p=True)
    return _dropout("concrete-dropout", guide, problem, options, progress)
