"""Microcanonical samplers against NUTS on Bayesian networks: effective draws of the function.

For each data set and network, the smallest and the median ESS of the outputs f(x) at 100 rows, per
second and per 1000 gradients:

- ``mclmc``, ``mams`` and ``nuts`` of ``bdl.mcmc.sample`` on the Pyro program;
- NumPyro's NUTS on the same density written by hand in JAX;
- BlackJAX's MCLMC with its own tuning on that density, where BlackJAX is installed.

Seconds are of the processor, warm-up included: "in all" with tracing and compilation, the others
without, as the difference to a run of two iterations. A network with one hidden layer has a noise
of its own, deeper ones give it as a second output. "agrees" is the root mean square, over rows, of
the difference of mean f to that of the reference (our NUTS; without it the first sampler) in Monte
Carlo standard errors of both, about 1 for equal posteriors; the sd of f is a median over rows.
Several numbers of ``--variance`` are several runs of ``mclmc``. "within chains" is the ESS of the
average of M chains that stay apart, M^2 / sum(1 / ESS of each), the figure to compare where chains
lie in separate modes.

``mclmc`` keeps a draw after every ``--thinning`` steps; BlackJAX's after as many. ``--trained``
starts the chains from trained networks. There the prior's many free directions have far less
energy than in the posterior, and what a chain does first is to take it up; ``--settled`` lets
``mclmc`` do this once, for all kernels. "ms per gradient" are of the log density and its gradient,
alone and in turn, the program's and that by hand.

    python benchmarks/mcmc.py --data uci --sets energy concrete --networks 50 16-16-16-16
"""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pyro
import pyro.distributions as dist
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import mcmc

ROWS = 100  # whose outputs are compared


def network(features: int, widths: list[int], outputs: int) -> nn.Sequential:
    sizes, layers = [features, *widths], []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def the_program(features: int, widths: list[int], floor: float) -> Any:
    """Priors Normal(0, 1); a network with one layer has the noise HalfNormal(1)."""
    single = len(widths) == 1
    bnn = bdl.bayesianize(network(features, widths, 1 if single else 2), bdl.priors.Normal(1.0))
    if single:
        return bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0))
    return bdl.models.HeteroscedasticRegression(bnn, floor=floor)


def by_hand(x, y, widths: list[int], floor: float):
    """The same log density of a flat vector, its outputs f, and P."""
    single = len(widths) == 1
    sizes = [x.shape[1], *widths, 1 if single else 2]
    pairs = list(pairwise(sizes))
    shapes = [shape for a, b in pairs for shape in ((b, a), (b,))] + [()] * single
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

    def outputs(u, x):
        parts = [p.reshape(s) for p, s in zip(jnp.split(u, ends[:-1]), shapes, strict=True)]
        for i in range(0, 2 * len(widths), 2):
            x = jax.nn.relu(x @ parts[i].T + parts[i + 1])
        i = 2 * len(widths)
        found = x @ parts[i].T + parts[i + 1]
        if single:
            return jnp.c_[found, jnp.broadcast_to(parts[-1], found.shape)]
        return found

    def log_density(u):
        f = outputs(u, x)
        if single:
            noise = jnp.exp(u[-1])
            prior = -0.5 * noise**2 + u[-1] - 0.5 * (u[:-1] ** 2).sum()
        else:
            noise = jax.nn.softplus(f[:, 1]) + floor
            prior = -0.5 * (u**2).sum()
        terms = -0.5 * ((y - f[:, 0]) / noise) ** 2 - jnp.log(noise)
        return terms.sum() + prior

    return log_density, outputs, int(ends[-1])


def table_of(folder: str | None, name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    if folder is None or name == "made-up":
        generator = np.random.default_rng(0)
        x = generator.normal(size=(300, 5))
        return x, np.sin(x[:, 0] + x[:, 1]) + 0.1 * generator.normal(size=300)
    single = Path(folder, f"{name}.data")
    if single.exists():
        table = np.loadtxt(single)[:rows]
        x, y = table[:, :-1], table[:, -1]
    else:
        where = Path(folder, "standard", name, "data")
        table = np.loadtxt(where / "data.txt")[:rows]
        x = table[:, np.loadtxt(where / "index_features.txt", dtype=int)]
        y = table[:, int(np.loadtxt(where / "index_target.txt"))]
    sd = x.std(0)
    x = (x[:, sd > 0] - x.mean(0)[sd > 0]) / sd[sd > 0]
    return x, (y - y.mean()) / y.std()


def measured(f: np.ndarray, seconds: float, whole: float, gradients: int) -> dict[str, Any]:
    """:param f: (chains, draws, rows)."""
    draws = torch.from_numpy(np.array(f)).double()
    ess = bdl.diagnostics.ess(draws, kind="mean")
    rhat = bdl.diagnostics.rhat(draws)
    still = (draws == draws[:, :1]).all((1, 2))  # a constant has the ESS of independent draws
    each = bdl.diagnostics.within_ess(draws, kind="mean")[~still]
    within = len(each) ** 2 / (1 / each).sum(0)  # of the average of chains that stay apart
    return {
        "seconds": seconds,
        "seconds in all": whole,
        "gradients": gradients,
        "chains that stand still": int(still.sum()),
        "min ESS": float(ess.min()),
        "median ESS": float(ess.median()),
        "min ESS within chains": float(within.min()),
        "median ESS within chains": float(within.median()),
        "max R-hat": float(rhat.max()),
        "median R-hat": float(rhat.median()),
        "min ESS per second": float(ess.min()) / seconds,
        "median ESS per second": float(ess.median()) / seconds,
        "min ESS within chains per second": float(within.min()) / seconds,
        "median ESS within chains per second": float(within.median()) / seconds,
        "median ESS per second in all": float(ess.median()) / whole,
        "median ESS per 1000 gradients": 1e3 * float(ess.median()) / gradients,
        "median ESS within chains per 1000 gradients": 1e3 * float(within.median()) / gradients,
        "mean": draws.mean((0, 1)),
        "error": bdl.diagnostics.mcse(draws),
        "sd": draws.std((0, 1)),
    }


def timed(side, budget: dict[str, Any]) -> dict[str, Any]:
    """:param side: budget -> (f, gradients of the draws)."""
    seconds = []
    short = budget | {"num_warmup": 2, "num_samples": 2}
    for own in (short, short, budget, budget):  # the first one imports
        started = time.process_time()
        f, gradients = side(own)
        seconds.append(time.process_time() - started)
    # Without compiling: a second run, or the first less a short one, where each run compiles anew.
    sampling = max(min(seconds[3], seconds[2] - seconds[1]), 0.01)
    return measured(f, sampling, seconds[2], gradients)


def ours(model, x, y, kernel: Any, chains: int, budget: dict[str, Any]) -> tuple[np.ndarray, int]:
    samples = bdl.mcmc.sample(
        model, x, y, kernel=kernel, num_chains=chains, progress=False, **budget
    )
    f = bdl.Predictive(model, samples)(x[:ROWS])["f"]
    f = f.reshape(chains, samples.num_draws, -1).numpy()
    return f, int(samples.stats["num_steps"].sum())


def numpyro_nuts(log_density, outputs, x, starts, depth, budget) -> tuple[np.ndarray, int]:
    kernel = numpyro.infer.NUTS(potential_fn=lambda u: -log_density(u), max_tree_depth=depth)
    sampler = numpyro.infer.MCMC(
        kernel, num_warmup=budget["num_warmup"], num_samples=budget["num_samples"],
        num_chains=len(starts), chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    first = jnp.asarray(starts if len(starts) > 1 else starts[0])
    sampler.run(jax.random.PRNGKey(0), init_params=first, extra_fields=("num_steps",))
    draws = np.asarray(sampler.get_samples(group_by_chain=True))
    steps = int(np.asarray(sampler.get_extra_fields()["num_steps"]).sum())
    f = jax.vmap(jax.vmap(lambda u: outputs(u, x[:ROWS])[:, 0]))(jnp.asarray(draws))
    return np.asarray(f), steps


def blackjax_mclmc(log_density, outputs, x, starts, thinning, budget) -> tuple[np.ndarray, int]:
    import blackjax

    steps = thinning * budget["num_samples"]
    warmup = thinning * budget["num_warmup"]

    @jax.jit
    @jax.vmap
    def chain(key, start):
        first, tune, run = jax.random.split(key, 3)
        state = blackjax.mcmc.mclmc.init(start, log_density, first)
        kernel = blackjax.mcmc.mclmc.build_kernel()
        fraction = warmup / steps / 3.34
        state, params, _ = blackjax.mclmc_find_L_and_step_size(
            kernel, steps, state, tune, logdensity_fn=log_density,
            frac_tune1=fraction, frac_tune2=fraction, frac_tune3=fraction,
        )  # fmt: skip

        def step(state, key):
            return kernel(
                key, state, log_density, params.inverse_mass_matrix, params.L, params.step_size
            )

        def draw(state, key):
            state, _ = jax.lax.scan(step, state, jax.random.split(key, thinning))
            return state, state.position

        return jax.lax.scan(draw, state, jax.random.split(run, budget["num_samples"]))[1]

    draws = chain(jax.random.split(jax.random.PRNGKey(0), len(starts)), jnp.asarray(starts))
    f = jax.vmap(jax.vmap(lambda u: outputs(u, x[:ROWS])[:, 0]))(draws)
    return np.asarray(f), 2 * steps * len(starts)


def settled(model, data, init, options) -> Any:
    """The ensemble moved to the ends of chains that started from its members."""
    samples = bdl.mcmc.sample(
        model, *data, kernel=bdl.mcmc.MCLMC(thinning=options.thinning), init=init,
        num_chains=options.chains, num_warmup=options.settled, num_samples=options.settled,
        chain_method=options.method, progress=False,
    )  # fmt: skip
    program = bdl.Program(model, *data)
    ends = [{k: v[i, -1] for k, v in samples.latents.items()} for i in range(options.chains)]
    with torch.no_grad():
        init.locs.copy_(torch.stack([program.unconstrain(end) for end in ends]))
    return init


def starting_points(model, data, options) -> tuple[Any, list[np.ndarray]]:
    """``init`` of our chains, and as many vectors (P,) for the others."""
    init, drawn = options.init, [bdl.Program(model, *data) for _ in range(options.chains)]
    latents = [each.initial for each in drawn]
    if options.trained:
        init = bdl.guides.AutoEnsemble(model, size=options.chains)
        bdl.training.train(
            model, init, *data, steps=options.trained, learning_rate=0.01,
            elbo=bdl.elbo.CompiledELBO(num_particles=options.chains), progress=False,
        )  # fmt: skip
        if options.settled:
            init = settled(model, data, init, options)
        latents = [init.member(i) for i in range(options.chains)]
    return init, [
        one.unconstrain(own).detach().numpy() for one, own in zip(drawn, latents, strict=True)
    ]


def gradient_times(densities: dict[str, Any], start: np.ndarray) -> dict[str, float]:
    """Milliseconds of a log density with its gradient, the least of five rounds in turns."""
    count, runs = 1000, {}
    for name, density in densities.items():
        both = jax.value_and_grad(density)

        def move(u, _, both=both):
            value, gradient = both(u)
            return u + 1e-9 * gradient, value

        runs[name] = jax.jit(lambda u, move=move: jax.lax.scan(move, u, None, length=count))
        jax.block_until_ready(runs[name](start))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in list(runs) * 5:
        started = time.perf_counter()
        jax.block_until_ready(runs[name](start))
        seconds[name].append(time.perf_counter() - started)
    return {f"ms per gradient, {name}": 1e3 * min(s) / count for name, s in seconds.items()}


def ratios(name: str, result: dict[str, Any], results: dict[str, Any]) -> dict[str, float]:
    """Effective draws per second of a run of ``mclmc`` over those of the other samplers."""
    units = (
        "min ESS per second", "median ESS per second",
        "min ESS within chains per second", "median ESS within chains per second",
        "median ESS per second in all",
    )  # fmt: skip
    return {
        f"ratio {name} : {other}, {unit}": result[unit] / theirs[unit]
        for other, theirs in results.items()
        for unit in units
        if not other.startswith("mclmc") and theirs[unit]  # 0 where every chain stands still
    }


def shares(count: int, warmup: float) -> dict[str, int]:
    """Twice ``count`` iterations, a share of them to adapt."""
    adapting = round(2 * count * warmup)
    return {"num_warmup": adapting, "num_samples": 2 * count - adapting}


def compare(x, y, widths: list[int], options) -> dict[str, Any]:
    data = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    arrays = tuple(jnp.asarray(value.numpy()) for value in data)
    model = the_program(x.shape[1], widths, options.floor)
    log_density, outputs, size = by_hand(*arrays, widths, options.floor)
    init, starts = starting_points(model, data, options)
    program = bdl.Program(model, *data)
    value = program.log_density(torch.from_numpy(starts[0]))
    gap = float(log_density(jnp.asarray(starts[0]))) - float(value)
    langevin = shares(options.iterations, options.warmup)
    nuts = shares(options.nuts, options.nuts_warmup)
    own: dict[str, Any] = {"init": init}
    hand = log_density, outputs, arrays[0], np.stack(starts)

    def sampled(kernel: Any):
        return lambda budget: ours(model, *data, kernel, options.chains, budget)

    variances = {
        f"mclmc {value:g}" if i else "mclmc": mcmc.MCLMC(
            energy_variance=value, thinning=options.thinning
        )
        for i, value in enumerate(options.variance)
    }
    tuned = langevin | own | {"chain_method": options.method}
    sides = {
        **{name: (sampled(kernel), tuned) for name, kernel in variances.items()},
        "mams": (sampled(mcmc.MAMS(max_steps=2**options.depth)), nuts | own),
        "nuts": (sampled(mcmc.NUTS(max_tree_depth=options.depth)), nuts | own),
        "by-hand": (lambda budget: numpyro_nuts(*hand, options.depth, budget), nuts),
        "blackjax": (lambda budget: blackjax_mclmc(*hand, options.thinning, budget), langevin),
    }
    found: dict[str, Any] = {"numbers": size, "rows": len(x), "constant of the two densities": gap}
    found |= gradient_times({"program": program.to_jax(), "by hand": log_density}, starts[0])
    results = {}
    for name, (side, budget) in sides.items():
        if name.split()[0] in (options.only or sides):
            try:
                results[name] = timed(side, budget)
            except ImportError:
                found[name] = "not installed"
    moments = {name: [r.pop(key) for key in ("mean", "error", "sd")] for name, r in results.items()}
    mean, error, sd = moments.get("nuts") or next(iter(moments.values()))
    for name, result in results.items():
        found |= {f"{name}: {key}": value for key, value in result.items()}
        own_mean, own_error, own_sd = moments[name]
        apart = (own_mean - mean) / (own_error**2 + error**2).sqrt()
        found[f"{name}: agrees"] = float(apart.square().mean().sqrt())
        found[f"{name}: means apart, in sds"] = float(
            ((own_mean - mean) / sd).square().mean().sqrt()
        )
        found[f"{name}: sd, times the reference's"] = float((own_sd / sd).median())
        if name.startswith("mclmc"):
            found |= ratios(name, result, results)
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with standard/NAME/data, or NAME.data")
    parser.add_argument("--sets", nargs="+", default=["made-up"])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--networks", nargs="+", default=["50"], help="widths, such as 16-16-16-16")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=2000, help="of mclmc")
    parser.add_argument("--thinning", type=int, default=5, help="steps of an iteration of mclmc")
    parser.add_argument("--nuts", type=int, default=200, help="warm-up and draws of nuts and mams")
    parser.add_argument("--warmup", type=float, default=0.5, help="share of mclmc's iterations")
    parser.add_argument("--nuts-warmup", type=float, default=0.5, help="of those of nuts and mams")
    parser.add_argument("--init", default="prior", help="of our chains: prior, network, uniform")
    parser.add_argument("--trained", type=int, help="start from networks trained so many steps")
    parser.add_argument("--settled", type=int, help="then run mclmc for twice so many iterations")
    parser.add_argument("--floor", type=float, default=1e-3, help="of a deep network's noise")
    parser.add_argument("--method", default="parallel", help="chain method of mclmc")
    parser.add_argument("--variance", type=float, nargs="+", default=[5e-4], help="of the energy")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="mclmc, mams, nuts, by-hand, blackjax")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.sets:
        x, y = table_of(options.data, name, options.rows)
        for widths in options.networks:
            pyro.set_rng_seed(0)
            found = compare(x, y, [int(w) for w in widths.split("-")], options)
            outputs = 2 if "-" in widths else 1
            title = f"mcmc: {name}, {x.shape[1]}-{widths}-{outputs}, {options.chains} chains"
            harness.show(title, found, options.json)


if __name__ == "__main__":
    main()
