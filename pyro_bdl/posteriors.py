"""The posteriors that ``pyro-bdl compare`` knows by name, registered here and nowhere else.

To add one, write a function that fits it::

    @register("my-posterior", title="my posterior", description="one sentence")
    def _my_posterior(problem, options, progress):
        ...
        return Result(guide_or_samples, settings={"what": "it was made with"})
"""

import difflib
import glob
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_bdl import evidence, mcmc
from pyro_bdl.comparison.costs import peak_memory
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoLowRank,
    AutoMAP,
    AutoMCDropout,
    AutoMeanField,
    AutoMultiSWAG,
    AutoSubnetwork,
    AutoSWAG,
    LaplaceGuide,
)
from pyro_bdl.guides.base import Guide
from pyro_bdl.nn import BayesianModule, with_learnable_prior
from pyro_bdl.optim import IVON
from pyro_bdl.training import collect_swag, estimate_elbo, train


@dataclass(frozen=True)
class Problem:
    """What a posterior is fitted to.

    :param model: a program ``model(x, y)``; for minibatches its ``num_data`` is N.
    :param x: ``(N, ...)``, the training inputs.
    :param y: ``(N, ...)``, their targets.
    """

    model: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Options:
    """How to fit; each posterior reads what concerns it.

    :param seed: of everything random.
    :param steps: gradient steps of a guide; None for each guide's own number.
    :param chains: Markov chains.
    :param warmup: iterations of each chain that adapt and are not kept.
    :param draws: draws of each chain after them.
    :param max_tree_depth: NUTS takes at most 2^depth gradient steps per draw.
    """

    seed: int = 0
    steps: int | None = None
    chains: int = 4
    warmup: int = 500
    draws: int = 500
    max_tree_depth: int = 8


@dataclass(frozen=True)
class Result:
    """What a registered function returns.

    :param posterior: a guide or ``Samples``.
    :param settings: what it was made with.
    :param interrupted: whether Ctrl-C ended the fit early.
    """

    posterior: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False


@dataclass(frozen=True)
class Fit:
    """A fitted posterior.

    :param name: its name in the registry.
    :param posterior: a guide or ``Samples``.
    :param seconds: wall-clock time of the fit.
    :param elbo: the bound at temperature 1 in nats; None where the posterior has no density.
    :param settings: what it was made with.
    :param interrupted: whether Ctrl-C ended the fit early.
    :param log_evidence: the log marginal likelihood of a Laplace approximation, in nats.
    :param peak_memory: bytes that the fit took at most beyond what was in use before, where the
        system tells.
    """

    name: str
    posterior: Any
    seconds: float
    elbo: float | None
    settings: Mapping[str, Any]
    interrupted: bool = False
    log_evidence: float | None = None
    peak_memory: int | None = None


FitFunction = Callable[[Problem, Options, bool], Result]


@dataclass(frozen=True)
class Entry:
    """One line of the registry; see ``register``."""

    name: str
    title: str
    description: str
    function: FitFunction
    default: bool = False


_registry: dict[str, Entry] = {}


def register(
    name: str, *, title: str, description: str, default: bool = False
) -> Callable[[FitFunction], FitFunction]:
    """Decorate ``function(problem, options, progress) -> Result`` to make it known by ``name``.

    :param name: what users write, in lower case with hyphens.
    :param title: a few words for tables and reports.
    :param description: one sentence for help texts.
    :param default: whether ``pyro-bdl compare`` fits it where none is named: those that together
        take two minutes or so on its default data, one of each kind.
    :raises ValueError: where the name is taken.
    """
    if name in _registry:
        raise ValueError(f"a posterior named {name!r} is registered already")

    def keep(function: FitFunction) -> FitFunction:
        _registry[name] = Entry(name, title, description, function, default)
        return function

    return keep


def entries() -> tuple[Entry, ...]:
    """All registered posteriors, in the order in which they were."""
    return tuple(_registry.values())


def get(name: str) -> Entry:
    """:raises ValueError: for a name that is not registered, with the names that are."""
    if name in _registry:
        return _registry[name]
    near = difflib.get_close_matches(name, _registry, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown posterior {name!r} (there are {', '.join(_registry)}){hint}")


def fit(
    name: str, problem: Problem, options: Options | None = None, *, progress: bool = False
) -> Fit:
    """Fit a registered posterior, time it and estimate its ELBO.

    Every fit starts from the options' seed, so that it does not depend on which were made before.

    :raises ValueError: for a name that is not registered, or what the posterior's own function
        refuses.
    :raises KeyboardInterrupt: for Ctrl-C before there was anything to keep.
    """
    entry, options = get(name), options or Options()
    pyro.set_rng_seed(options.seed)
    started = time.perf_counter()
    with peak_memory(problem.x.device) as peak:
        result = entry.function(problem, options, progress)
    seconds = time.perf_counter() - started
    return Fit(
        name=name,
        posterior=result.posterior,
        seconds=seconds,
        elbo=_elbo(problem, result.posterior),
        settings=result.settings,
        interrupted=result.interrupted,
        log_evidence=_log_evidence(result.posterior),
        peak_memory=peak.bytes,
    )


def _log_evidence(posterior: Any) -> float | None:
    if not isinstance(posterior, LaplaceGuide):
        return None
    with torch.no_grad():
        return float(evidence.log_marginal_likelihood(posterior))


def _elbo(problem: Problem, posterior: Any) -> float | None:
    if not isinstance(posterior, Guide) or not posterior.has_density:
        return None
    return estimate_elbo(problem.model, posterior, problem.x, problem.y)


def _trained(
    guide: Guide, problem: Problem, options: Options, label: str | None, **settings: Any
) -> Result:
    settings["steps"] = options.steps or settings["steps"]
    run = train(problem.model, guide, problem.x, problem.y, progress=label, **settings)
    told = {
        key: value if isinstance(value, int | float | str) else type(value).__name__
        for key, value in settings.items()
    }
    return Result(guide, {**told, "batch_size": run.batch_size}, run.interrupted)


# ------------------------------------------------------------------------------- the posteriors


@register(
    "map",
    title="MAP",
    description="a point: the maximum of the posterior density",
    default=True,
)
def _map(problem: Problem, options: Options, progress: bool) -> Result:
    label = "map" if progress else None
    return _trained(AutoMAP(problem.model), problem, options, label, steps=2000)


def _mean_field(
    name: str, temperature: float, problem: Problem, options: Options, progress: bool
) -> Result:
    guide, label = AutoMeanField(problem.model), name if progress else None
    # Several draws a step cost little, since vmap takes them at once, and let Adam settle.
    settings = {"steps": 4000, "num_particles": 4, "temperature": temperature}
    return _trained(guide, problem, options, label, **settings)


@register(
    "mean-field",
    title="mean-field VI",
    description="independent Normals over the weights, maximising the ELBO",
    default=True,
)
def _bayes_mean_field(problem: Problem, options: Options, progress: bool) -> Result:
    return _mean_field("mean-field", 1.0, problem, options, progress)


@register(
    "mean-field-tempered",
    title="mean-field VI, tempered",
    description="mean-field with the KL weighted by a temperature of 0.1",
    default=True,
)
def _tempered_mean_field(problem: Problem, options: Options, progress: bool) -> Result:
    return _mean_field("mean-field-tempered", 0.1, problem, options, progress)


@register(
    "mean-field-lrt",
    title="mean-field VI, local noise",
    description="mean-field by local reparameterisation, with gradients of less variance",
)
def _local_mean_field(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoMeanField(problem.model), "mean-field-lrt" if progress else None
    settings = {"steps": 4000, "num_particles": 4, "estimator": "local_reparameterization"}
    return _trained(guide, problem, options, label, **settings)


@register(
    "low-rank",
    title="low-rank VI",
    description="a Normal with a covariance of rank 10 plus a diagonal, maximising the ELBO",
)
def _low_rank(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoLowRank(problem.model, rank=10), "low-rank" if progress else None
    made = _trained(guide, problem, options, label, steps=4000, num_particles=4)
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
    return _trained(guide, problem, options, label, optimizer=IVON(guide), **settings)


def _laplace(
    name: str, problem: Problem, options: Options, progress: bool, **choice: Any
) -> Result:
    """MAP and prior scale by turns, the latter by the evidence."""
    try:
        model = with_learnable_prior(problem.model)
    except (TypeError, ValueError):  # a program of its own, or a prior without a scale
        model = problem.model
    guide = AutoLaplaceGGN(model, **choice)
    steps = options.steps or 2000
    posterior, interrupted = evidence.train_by_evidence(
        model, guide, problem.x, problem.y, steps=steps, progress=name if progress else None
    )
    return Result(posterior, {"steps": steps, **choice, **_tuned(posterior)}, interrupted)


def _tuned(posterior: LaplaceGuide) -> dict[str, str]:
    """The hyperparameters that the evidence set, for tables."""
    result = {}
    for name, value in evidence.hyperparameters(posterior).items():
        words = name.rpartition(".")[2].removeprefix("hyper_").replace("_", " ").split()
        if value.numel() == 1:
            result[" ".join(words)] = f"{value:.3g}"
    return result


@register(
    "laplace-kron",
    title="Laplace, Kronecker",
    description="Kronecker-factored Laplace, linearised, prior scale by the evidence",
    default=True,
)
def _laplace_kron(problem: Problem, options: Options, progress: bool) -> Result:
    return _laplace("laplace-kron", problem, options, progress, structure="kron")


@register(
    "laplace-full",
    title="Laplace, full",
    description="Laplace with the full Gauss-Newton matrix, linearised, where it fits in memory",
)
def _laplace_full(problem: Problem, options: Options, progress: bool) -> Result:
    return _laplace("laplace-full", problem, options, progress, structure="full")


@register(
    "laplace-diag",
    title="Laplace, diagonal",
    description="Laplace with the diagonal of the Gauss-Newton matrix, linearised",
)
def _laplace_diag(problem: Problem, options: Options, progress: bool) -> Result:
    return _laplace("laplace-diag", problem, options, progress, structure="diag")


@register(
    "laplace-last-layer",
    title="Laplace, last layer",
    description="full Laplace over the last layer, the rest at the MAP",
)
def _laplace_last_layer(problem: Problem, options: Options, progress: bool) -> Result:
    choice = {"structure": "full", "subset": "last-layer"}
    return _laplace("laplace-last-layer", problem, options, progress, **choice)


@register(
    "last-layer",
    title="last layer",
    description="last layer integrated out while the features train, in closed form; for classes "
    "Laplace at its mode given MAP features; its prior scale by the evidence",
    default=True,
)
def _last_layer(problem: Problem, options: Options, progress: bool) -> Result:
    x, y, label = problem.x, problem.y, "last-layer" if progress else None
    steps, interrupted = options.steps or 2000, False
    model = _with_scale_of_last_layer(problem)
    guide = AutoLastLayer(model)
    guide.prototype(x, y)
    objective = evidence.LastLayerEvidence()
    try:
        objective.loss(model, guide, x, y)
        features = "evidence"
    except UnsupportedProgramError:  # no linear regression
        features = "MAP"
    if features == "evidence":
        run = train(
            model, guide, x, y, steps=steps, batch_size=len(x), elbo=objective, progress=label
        )
        posterior: LaplaceGuide = guide.laplace_approximation((x, y))
        interrupted = run.interrupted
    else:
        posterior, interrupted = evidence.train_by_evidence(
            model, guide, x, y, steps=steps, progress=label
        )
        if evidence.hyperparameters(posterior):
            posterior = guide.maximize_evidence((x, y))
    settings = {"steps": steps, "features": features, **_tuned(posterior)}
    return Result(posterior, settings, interrupted)


def _with_scale_of_last_layer(problem: Problem) -> nn.Module:
    """The program with a PyroParam as the scale of the last layer's prior, where it can be: one
    of the last layer's own, since features would shrink under one that they share."""
    guide = AutoLastLayer(problem.model)
    guide.prototype(problem.x, problem.y)
    networks = [part for part in problem.model.modules() if isinstance(part, BayesianModule)]
    if len(networks) != 1:
        return problem.model
    prefix = networks[0].site_prefix
    names = [site.removeprefix(prefix) for site in guide.layer(problem.x, problem.y)]
    layer = names[0].rpartition(".")[0]
    pattern = glob.escape(layer) + ".*" if layer else glob.escape(names[0])
    try:
        return with_learnable_prior(problem.model, only=pattern)
    except (TypeError, ValueError):  # a prior without a scale that is a number
        return problem.model


@register(
    "subnetwork",
    title="subnetwork Laplace",
    description="full Laplace, linearised, over the tenth of the weights the data determine most",
    default=True,
)
def _subnetwork(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoSubnetwork(problem.model, size=0.1), "subnetwork" if progress else None
    made = _trained(guide, problem, options, label, steps=2000)
    posterior = guide.laplace_approximation((problem.x, problem.y))
    settings = {**made.settings, "weights": posterior.subset.size}
    return Result(posterior, settings, made.interrupted)


@register(
    "ensemble",
    title="ensemble",
    description="five networks, each trained as MAP from its own initialisation",
    default=True,
)
def _ensemble(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoEnsemble(problem.model, size=5), "ensemble" if progress else None
    return _trained(guide, problem, options, label, steps=2000, num_particles=5)


def _dropout(
    name: str, guide: AutoMCDropout, problem: Problem, options: Options, progress: bool
) -> Result:
    label = name if progress else None
    made = _trained(guide, problem, options, label, steps=4000, num_particles=4)
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
    description="dropout of hidden units at rates that maximise the bound, one for each layer",
)
def _concrete_dropout(problem: Problem, options: Options, progress: bool) -> Result:
    guide = AutoMCDropout(problem.model, learn_p=True)
    return _dropout("concrete-dropout", guide, problem, options, progress)


_SNAPSHOTS = 40
_RATES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)


def _swag_of(
    guide: AutoSWAG | AutoMultiSWAG, made: Result, problem: Problem, label: str | None
) -> Result:
    """SGD from where training ended, and the Gaussian of its snapshots.

    At the learning rate at which SGD is closest to a Gaussian posterior, -log p(u, y) lies on
    average P / 2 above its minimum, as under the posterior (Mandt, Hoffman & Blei 2017, section
    3.2); the highest rate that does not exceed this is taken.
    """
    size, rows = guide.require_layout().size, len(problem.x)
    members = guide.size if isinstance(guide, AutoMultiSWAG) else 1
    lowest = -estimate_elbo(problem.model, guide, problem.x, problem.y, num_particles=members)
    (parameter,) = guide.parameters()
    start = parameter.detach().clone()
    for rate in _RATES:
        parameter.data.copy_(start)
        guide.discard()
        try:
            run = collect_swag(
                problem.model, guide, problem.x, problem.y,
                snapshots=_SNAPSHOTS, learning_rate=rate, progress=label,
            )  # fmt: skip
        except ValueError:
            if rate == _RATES[-1]:
                raise
            continue
        excess = run.losses.mean().item() * rows / members - lowest
        if excess <= 0.5 * size or run.interrupted:
            break
    count = int(guide.snapshots.count)
    if count < 2:
        raise KeyboardInterrupt
    posterior = guide.swag_approximation(rank=min(guide.rank, count))
    settings = {"snapshots": count, "rank": min(guide.rank, count), "learning rate": rate}
    return Result(posterior, {**made.settings, **settings}, made.interrupted or run.interrupted)


@register(
    "swag",
    title="SWAG",
    description="a Gaussian of rank 20 from 40 points on the way of SGD after MAP training",
    default=True,
)
def _swag(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoSWAG(problem.model), "swag" if progress else None
    return _swag_of(guide, _trained(guide, problem, options, label, steps=2000), problem, label)


@register(
    "multi-swag", title="MultiSWAG", description="a mixture of the SWAG posteriors of five networks"
)
def _multi_swag(problem: Problem, options: Options, progress: bool) -> Result:
    guide, label = AutoMultiSWAG(problem.model, size=5), "multi-swag" if progress else None
    made = _trained(guide, problem, options, label, steps=2000, num_particles=5)
    return _swag_of(guide, made, problem, label)


# Rows that "sghmc" takes at once, and in a minibatch of more.
_MOST_ROWS, _ROWS = 8192, 1024
# Steps between two draws, the friction of a step and the curvature times the step size; steps in
# which the chains leave the MAP.
_THINNING, _FRICTION, _REACH, _SETTLING = 10, 0.02, 0.5, 250


@register(
    "sghmc",
    title="SGHMC",
    description="Markov chains by underdamped Langevin dynamics, on minibatches of many data",
    default=True,
)
def _sghmc(problem: Problem, options: Options, progress: bool) -> Result:
    """From MAP networks, by steps that follow the curvature where the chains are. Minibatches heat
    the stiffest direction by the share eps lambda (N / B) / 2 f, which is kept at a twentieth."""
    data, rows, chains = (problem.x, problem.y), len(problem.x), options.chains
    members, label = AutoEnsemble(problem.model, size=chains), "sghmc" if progress else None
    run = _trained(members, problem, options, label, steps=500, num_particles=chains)
    if run.interrupted:
        raise KeyboardInterrupt
    batch, friction, reach = None, _FRICTION, _REACH
    if rows > _MOST_ROWS:
        batch, friction = _ROWS, 5 * _FRICTION
        reach = 0.05 * 2 * friction * batch / rows
    start: Any = members
    settings: dict[str, Any] = {
        "num_chains": chains,
        "batch_size": batch,
        "friction": friction,
        "seed": options.seed,
        "progress": progress,
    }
    # The curvature at the MAP is several times less than among the draws, hence by parts.
    for share, warmup, draws, thinning in (
        (0.01, _SETTLING, 1, 1),
        (0.1, _SETTLING, 1, 1),
        (1.0, 2 * options.warmup, options.draws, _THINNING),
    ):
        step_size = mcmc.suggest_step_size(
            problem.model,
            data,
            at=start,
            fraction=share * reach,
            num_points=chains,
            seed=options.seed,
        )
        start = mcmc.sgmcmc(
            problem.model,
            data,
            init=start,
            step_size=step_size,
            num_warmup=warmup,
            num_samples=draws,
            thinning=thinning,
            **settings,
        )
    told = {name: start.info[name] for name in ("num_warmup", "thinning", "batch_size", "friction")}
    told |= {
        "num_chains": chains,
        "step_size": f"{step_size:.3g}",
        "MAP steps": run.settings["steps"],
    }
    return Result(start, told, bool(start.info["interrupted"]))


@register(
    "nuts",
    title="NUTS",
    description="Markov chains by the No-U-Turn sampler; the reference",
    default=True,
)
def _nuts(problem: Problem, options: Options, progress: bool) -> Result:
    settings: dict[str, Any] = {
        "num_chains": options.chains,
        "num_warmup": options.warmup,
        "num_samples": options.draws,
        "max_tree_depth": options.max_tree_depth,
    }
    samples = mcmc.sample(
        problem.model, problem.x, problem.y, seed=options.seed, progress=progress, **settings
    )
    return Result(samples, settings, bool(samples.info.get("interrupted")))
