"""``tempered_smc``: particles that move from the prior to the posterior, and the evidence.

N particles stand for p_b(u) proportional to p(u) p(y | u)^b, from draws of the prior at b = 0 to
the posterior at b = 1. Each stage chooses the next b, weights the particles, resamples them, and
moves each by a few iterations of Hamiltonian Monte Carlo for p_b. Nothing needs to be reached from
one start: symmetric and separate modes all take part, with their mass. The mean weights multiply to
an estimate of the evidence p(y)::

    log p(y) ~ sum over stages of log mean_i p(y | u_i)^(b' - b)

Sources: Del Moral, Doucet & Jasra (2006), Sequential Monte Carlo samplers, JRSS B 68(3); Jasra,
Stephens, Doucet & Tsagaris (2011), Inference for Levy-driven stochastic volatility models via
adaptive sequential Monte Carlo, Scand. J. Statist. 38(1), for the choice of b.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.mcmc.chains import progress_bar
from pyro_bdl.mcmc.starts import Restriction, checked_program
from pyro_bdl.predictive.sampled import prior_draws
from pyro_bdl.program.jax_density import jax_density
from pyro_bdl.program.program import Program
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import checked_seed, seeded
from pyro_bdl.utils.validation import real_number, whole_number

_LENGTH = math.pi / 2  # of a trajectory, in deviations of the particles
_MOST_STEPS = 32  # of a trajectory
_ACCEPTANCE = 0.8  # that the step size follows


def tempered_smc(
    model: Callable,
    *args: Any,
    num_samples: int = 500,
    num_chains: int = 8,
    moves: int = 5,
    ess: float = 0.5,
    seed: int = 0,
    progress: bool | None = None,
) -> Samples:
    """Draw from the posterior by particles from the prior, and estimate the log evidence.

    For programs of some hundred numbers. ``info["log_evidence"]`` is the logarithm of the runs'
    mean evidence in nats, and ``info["log_evidence_error"]`` its jackknife error over the runs. It
    does not hold the bias of temperatures and steps that are chosen by the particles: take more.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> samples = bdl.mcmc.tempered_smc(model, x, y, num_samples=200)
        >>> samples.info["log_evidence_error"] < 1
        True

    :param model: a Pyro program with continuous latents, whose prior can be sampled.
    :param args: its arguments with all data, including the targets.
    :param num_samples: N, particles of each run.
    :param num_chains: independent runs, at least two; their particles are the chains of the result.
    :param moves: iterations of Hamiltonian Monte Carlo of each particle at each b.
    :param ess: effective particles that the weights of a stage leave, as a share of N.
    :raises UnsupportedProgramError: for a prior that cannot be sampled, such as an improper one.
    :raises ValueError: for an argument outside its range, or likelihoods that are not finite.
    """
    count = whole_number(num_samples, "num_samples", least=2)
    runs = whole_number(num_chains, "num_chains", least=2)
    moves, ess = whole_number(moves, "moves"), real_number(ess, "ess", "(0, 1)")
    seed = checked_seed(seed)
    started = time.perf_counter()
    with evaluation_mode(model), seeded(seed):
        program, _ = checked_program(model, args, {}, "prior")
        program.require_all_data("MCMC")
        run = program.run(program.initial)
        run.refuse_improper("evidence")
        for name, site in run.latents.items():
            if site.mask is False:
                raise UnsupportedProgramError(
                    f"the prior of the latent site '{name}' is improper, so that it has no draws "
                    "and the data no evidence: give it a proper one"
                )
        draws = prior_draws(model, run, runs * count, args, {})
        start = program.unconstrain({name: draws[name] for name in program.latents}).detach()
        described = Restriction(program).described(start[0])
    with evaluation_mode(program.modules), jax.enable_x64(True):
        bar = progress_bar(progress, runs, "SMC")
        sampler = _sampler(program, start[0], moves, ess)
        groups = start.double().cpu().numpy().reshape(runs, count, -1)
        results = []
        for number, group in enumerate(groups):
            results.append(
                sampler(jnp.asarray(group), np.random.default_rng([seed % 2**63, number]))
            )
            bar.update(1)
        bar.close()
    vectors = torch.from_numpy(np.stack([result.particles for result in results])).to(start)
    energy = torch.tensor(np.stack([result.energy for result in results]), device=start.device)
    evidences = np.array([result.log_evidence for result in results])
    others = np.array([logsumexp(np.delete(evidences, i)) for i in range(runs)])
    info = {
        "kernel": "tempered-smc",
        "seed": seed,
        "options": {"moves": moves, "ess": ess},
        "log_evidence": float(logsumexp(evidences)) - math.log(runs),
        "log_evidence_error": float(others.std() * math.sqrt(runs - 1)),
        "log_evidences": evidences.tolist(),
        "temperatures": [result.powers for result in results],
        "gradients": sum(result.gradients for result in results),
        "seconds": time.perf_counter() - started,
    }
    with torch.no_grad():
        latents = program.constrain(vectors)[0]
    return Samples(latents, {"potential_energy": energy}, info, program=described)


class _Run(NamedTuple):
    particles: np.ndarray
    energy: np.ndarray
    log_evidence: float
    powers: list[float]
    gradients: int


def _sampler(
    program: Program, example: Tensor, moves: int, ess: float
) -> Callable[[jax.Array, np.random.Generator], _Run]:
    """A function of particles from the prior (N, P) and a generator."""

    def parts(vector: Tensor, power: Tensor) -> Tensor:
        latents, log_det = program.constrain(vector)
        run = program.run(latents)
        return run.log_prior() + log_det + power * run.log_likelihood()

    tempered = jax_density(parts, program.log_density_terms, example, example.new_ones(()))
    tempered = tempered if example.dtype == torch.float64 else tempered.in_double()

    @jax.jit
    @jax.vmap
    def log_likelihood(u: jax.Array) -> jax.Array:
        return tempered(u, jnp.ones(())) - tempered(u, jnp.zeros(()))

    @jax.jit
    def moved(key: Any, particles: Any, scale: Any, power: Any, size: Any) -> Any:
        """One iteration of HMC each, its mean acceptance and the number of its gradients."""
        density = jax.value_and_grad(lambda u: tempered(u, power))
        steps = jnp.clip(jnp.round(_LENGTH / size), 1, _MOST_STEPS).astype(int)

        def one(key: Any, u: Any) -> Any:
            first, second, third = jax.random.split(key, 3)
            own = size * jax.random.uniform(first, minval=0.8, maxval=1.2)
            momentum = jax.random.normal(second, u.shape)
            value, gradient = density(u)

            def leap(_: Any, carry: Any) -> Any:
                u, momentum, _, gradient = carry
                momentum = momentum + 0.5 * own * scale * gradient
                u = u + own * scale * momentum
                value, gradient = density(u)
                return u, momentum + 0.5 * own * scale * gradient, value, gradient

            end = jax.lax.fori_loop(0, steps, leap, (u, momentum, value, gradient))
            gain = end[2] - value + 0.5 * (momentum @ momentum - end[1] @ end[1])
            accept = jnp.where(jnp.isfinite(gain), jnp.exp(jnp.minimum(gain, 0)), 0)
            return jnp.where(jax.random.uniform(third) < accept, end[0], u), accept

        particles, accept = jax.vmap(one)(jax.random.split(key, len(particles)), particles)
        return particles, accept.mean(), steps + 1

    def run(particles: jax.Array, random: np.random.Generator) -> _Run:
        count, power, log_evidence, size, gradients = len(particles), 0.0, 0.0, 0.5, 0
        powers = [power]
        while power < 1:
            terms = np.asarray(log_likelihood(particles))
            terms = np.where(np.isnan(terms), -np.inf, terms)
            if not np.isfinite(terms).any() or np.isposinf(terms).any():
                raise ValueError(
                    "the log likelihood is finite at no particle of the prior, or infinite at one: "
                    "check the data, and that the prior allows values that the program accepts"
                )
            step = _next(terms, 1 - power, ess)
            log_weights = step * terms
            log_evidence += float(logsumexp(log_weights)) - math.log(count)
            weights = np.exp(log_weights - logsumexp(log_weights))
            points = (np.arange(count) + random.random()) / count
            chosen = np.searchsorted(np.cumsum(weights), points).clip(max=count - 1)
            particles, power = particles[chosen], min(power + step, 1.0)
            powers.append(power)
            deviations = particles.std(0)
            scale = jnp.where(deviations > 0, deviations, 1.0)
            for _ in range(moves):
                key = jax.random.PRNGKey(random.integers(2**31))
                particles, accept, steps = moved(key, particles, scale, power, size)
                size = float(np.clip(size * math.exp(float(accept) - _ACCEPTANCE), 1e-6, _LENGTH))
                gradients += int(steps) * count
        value = jax.jit(jax.vmap(lambda u: tempered(u, jnp.ones(()))))(particles)
        return _Run(np.array(particles), -np.array(value), log_evidence, powers, gradients)

    return run


def _next(terms: np.ndarray, most: float, ess: float) -> float:
    """The step of b that leaves so large a share of effective particles, at most ``most``."""

    def share(step: float) -> float:
        log = step * terms
        return math.exp(2 * logsumexp(log) - logsumexp(2 * log)) / len(terms)

    if share(most) >= ess:
        return most
    low, high = 0.0, most
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share(middle) >= ess else (low, middle)
    return high
