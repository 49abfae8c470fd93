"""NUTS and approximations on the reference posteriors of posteriordb, each a Pyro program.

``--data`` is a folder with a folder for each posterior: ``data.json``, ``mean_value.json`` and
``mean_squared_value.json`` of github.com/stan-dev/posteriordb. NUTS samples the Pyro program
through the bridge to JAX. Every mean and mean square is held against the reference in combined
Monte Carlo errors, sqrt(se^2 + se_reference^2). Beside it stands NumPyro's NUTS on the same model
written by hand, with the same warm-up, draws and chains, one after another. Seconds are of the
processor and hold the warm-up; "in all" they hold tracing and compilation too. ESS is the least
over the reference's numbers. Then mean-field, low rank and Laplace: the largest error of a mean and
of an sd, in posterior sd.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pyro
import torch
from posteriordb_by_hand import MODELS
from posteriordb_programs import POSTERIORS, Posterior
from pyro.distributions import ImproperUniform, constraints
from pyro.infer import SVI
from pyro.infer.autoguide import init_to_value
from torch import Tensor

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError

QUICK = ("arK-arK", "eight_schools-eight_schools_noncentered", "gp_pois_regr-gp_regr")


# -------------------------------------------------------------------------------- the reference


def reference_of(folder: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """For ``mean`` and ``square`` the value and its Monte Carlo error by name."""
    found = {}
    for kind, file in (("mean", "mean_value"), ("square", "mean_squared_value")):
        held = json.loads((folder / f"{file}.json").read_text())
        rows = zip(held["names"], held[file], held["mcse_mean"], strict=True)
        found[kind] = {name: (value, error) for name, value, error in rows}
    return found


def numbers(
    posterior: Posterior, names: list[str], latents: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The reference's numbers, (chains, draws), among the latents."""
    known = dict(latents) | posterior.derived(latents)
    found = {}
    for name in names:
        site, _, index = name.partition("[")
        value = known[site]
        value = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
        found[name] = value[..., int(index.rstrip("]")) - 1] if index else value
    return found


def errors_of(draws: Mapping[str, Tensor], reference: Mapping[str, Any]) -> dict[str, float]:
    """The largest |difference| in combined Monte Carlo errors, of means and of mean squares."""
    found = {}
    for kind, power in (("mean", 1), ("square", 2)):
        largest = 0.0
        for name, value in draws.items():
            expected, error = reference[kind][name]
            ours = bdl.diagnostics.mcse(value**power).item()
            gap = (value**power).mean().item() - expected
            largest = max(largest, abs(gap) / (ours**2 + error**2) ** 0.5)
        found[kind] = largest
    return found


def convergence(draws: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest R-hat and the least bulk ESS."""
    rhats = [bdl.diagnostics.rhat(value).item() for value in draws.values()]
    sizes = [bdl.diagnostics.ess(value).item() for value in draws.values()]
    return max(rhats), min(sizes)


# ----------------------------------------------------------------------------------------- NUTS


def by_hand(model: Any, arrays: tuple, accept: float, options: Any) -> Any:
    """Draws (chains, draws, ...) of NumPyro's NUTS on a model of its own. All chains and their
    warm-up share one compiled function."""
    kernel = numpyro.infer.NUTS(model, target_accept_prob=accept)
    length = max(options.warmup, options.draws)

    @jax.jit
    def advance(state: Any, count: int) -> Any:
        def body(i: int, carry: Any) -> Any:
            state, rows = carry
            state = kernel.sample(state, arrays, {})
            return state, jax.tree.map(lambda held, new: held.at[i].set(new), rows, state.z)

        rows = jax.tree.map(lambda v: jnp.zeros((length, *v.shape), v.dtype), state.z)
        return jax.lax.fori_loop(0, count, body, (state, rows))

    kept = []
    for key in jax.random.split(jax.random.PRNGKey(options.seed), options.chains):
        state = kernel.init(key, options.warmup, None, arrays, {})
        state, _ = advance(state, options.warmup)
        kept.append(jax.block_until_ready(advance(state, options.draws))[1])
    constrain = kernel.postprocess_fn(arrays, {})
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows)[:, : options.draws], *kept)
    return jax.vmap(jax.vmap(constrain))(stacked)


def timed(run: Callable[[Any], Any], options: Any) -> tuple[Any, float, float]:
    """The draws of a run, its seconds, and those less the seconds of a run of one draw, which takes
    as long to compile."""
    least = argparse.Namespace(**vars(options) | {"warmup": 1, "draws": 1})
    start = time.process_time()
    found = run(options)
    middle = time.process_time()
    run(least)
    in_all = middle - start
    return found, in_all, in_all - (time.process_time() - middle)


def nuts(name: str, posterior: Posterior, args: tuple, reference: Any, options: Any) -> dict:
    names = list(reference["mean"])

    def bridge(options: Any) -> bdl.Samples:
        return bdl.mcmc.sample(
            posterior.program, *args,
            num_warmup=options.warmup, num_samples=options.draws, num_chains=options.chains,
            kernel=bdl.mcmc.NUTS(target_accept=posterior.target_accept), seed=options.seed,
            init="uniform", progress=False,
        )  # fmt: skip

    def hand(options: Any) -> Any:
        arrays = tuple(jnp.array(value.numpy()) for value in args)
        return by_hand(MODELS[name], arrays, posterior.target_accept, options)

    samples, in_all, seconds = timed(bridge, options)
    draws = numbers(posterior, names, samples.latents)
    rhat, ess = convergence(draws)
    errors = errors_of(draws, reference)
    found, hand_in_all, hand_seconds = timed(hand, options)
    theirs = numbers(posterior, names, found)
    _, hand_ess = convergence(theirs)
    hand_errors = errors_of(theirs, reference)
    return {
        "error of means": errors["mean"],
        "error of squares": errors["square"],
        "by hand, error of means": hand_errors["mean"],
        "by hand, error of squares": hand_errors["square"],
        "R-hat": rhat,
        "divergences": int(samples.stats["diverging"].sum()),
        "ESS": ess,
        "by hand, ESS": hand_ess,
        "seconds in all": in_all,
        "by hand, seconds in all": hand_in_all,
        "seconds": seconds,
        "by hand, seconds": hand_seconds,
        "ESS per second": ess / seconds,
        "by hand, ESS per second": hand_ess / hand_seconds,
        "ratio of ESS per second": ess / seconds / (hand_ess / hand_seconds),
        "ratio of ESS per second, in all": ess / in_all / (hand_ess / hand_in_all),
    }


# ------------------------------------------------------------------------------- approximations


def mode_of(program: bdl.Program, steps: int = 200) -> tuple[Tensor, Tensor] | None:
    """The mode of the unconstrained log density and its Hessian's negative, by damped Newton steps;
    None where there is none."""
    hessian = torch.func.hessian(program.log_density)
    gradient = torch.func.grad(program.log_density)
    point, damping = torch.zeros(program.size), 1.0
    value = program.log_density(point)
    for _ in range(steps):
        slope, precision = gradient(point), -hessian(point)
        scale = precision.diagonal().abs().clamp(min=1e-12).sqrt()
        scaled = precision / scale / scale[:, None]
        if not scaled.isfinite().all():  # on the way to a point where the density is infinite
            return None
        lowest = torch.linalg.eigvalsh(scaled)[0]
        ridge = damping + max(0.0, -2 * lowest.item())
        step = torch.linalg.solve(scaled + ridge * torch.eye(len(point)), slope / scale) / scale
        proposed = program.log_density(point + step)
        if not proposed.isfinite() or proposed < value - 1e-9 * value.abs():
            damping = max(4 * damping, 1e-6)
            continue
        decrement = (slope * step).sum()
        point, value, damping = point + step, proposed, damping / 8
        if decrement < 1e-10 and lowest > 0:
            return point, -hessian(point)
    return None


class Scaled:
    """A program of one vector z with u = center + scale * z, u the program's unconstrained vector.

    The families of mean-field and low-rank Gaussians are the same over z as over u, and all
    numbers of z are of order 1, so that one learning rate serves them all.
    """

    def __init__(self, program: bdl.Program, center: Tensor, scale: Tensor) -> None:
        self.program, self.center, self.scale = program, center, scale

    def __call__(self) -> None:
        z = pyro.sample("z", ImproperUniform(constraints.real_vector, (), self.center.shape))
        pyro.factor("density", self.program.log_density(self.center + self.scale * z))

    def latents(self, z: Tensor) -> dict[str, Tensor]:
        return self.program.constrain(self.center + self.scale * z)[0]


def variational(kind: str, scaled: Scaled, options: Any) -> dict[str, Tensor]:
    """Draws (1, draws) of a Gaussian fitted by SVI with an averaged end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(options.seed)
    start = init_to_value(values={"z": torch.zeros_like(scaled.center)})
    if kind == "mean-field":
        guide = bdl.guides.AutoMeanField(scaled, init_loc_fn=start, init_scale=0.5)
    else:
        rank = max(1, round(len(scaled.center) ** 0.5))
        guide = bdl.guides.AutoLowRank(scaled, init_loc_fn=start, init_scale=0.5, rank=rank)
    guide.prototype()
    decay = 0.01 ** (1 / options.steps)
    optimizer = pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.03}, "gamma": decay}
    )
    svi = SVI(scaled, guide, optimizer, bdl.elbo.CompiledELBO(num_particles=options.particles))
    for _ in range(options.steps):
        svi.step()
        optimizer.step()
    with torch.no_grad():
        return scaled.latents(guide.sample_latents(20_000)["z"][None])


def laplace(posterior: Posterior, args: tuple, program: bdl.Program, mode: Tensor) -> dict:
    pyro.clear_param_store()
    latents, _ = program.constrain(mode)
    guide = bdl.guides.AutoLaplaceGGN(
        posterior.program, structure="full", init_loc_fn=init_to_value(values=latents)
    )
    fitted = guide.laplace_approximation(args)
    with torch.no_grad():
        return {name: value[None] for name, value in fitted.sample_latents(20_000).items()}


def in_sd(draws: Mapping[str, Tensor], reference: Mapping[str, Any]) -> dict[str, float]:
    """The largest error of a mean and of an sd, in posterior sd."""
    mean, sd = 0.0, 0.0
    for name, value in draws.items():
        expected, square = (reference[kind][name][0] for kind in ("mean", "square"))
        true = (square - expected**2) ** 0.5
        mean = max(mean, abs(value.mean().item() - expected) / true)
        sd = max(sd, value.std().item() / true - 1, key=abs)
    return {"mean": mean, "sd": sd}


def approximations(posterior: Posterior, args: tuple, reference: Any, options: Any) -> dict:
    names = list(reference["mean"])
    program = bdl.Program(posterior.program, *args)
    mode = mode_of(program)
    if mode is None:
        center, scale = torch.zeros(program.size), torch.ones(program.size)
    else:
        center, scale = mode[0], mode[1].diagonal().rsqrt()
    found: dict[str, Any] = {}
    for kind in ("mean-field", "low rank", "Laplace"):
        start = time.perf_counter()
        if kind != "Laplace":
            draws = variational(kind, Scaled(program, center, scale), options)
        elif mode is None:
            found["Laplace"] = "the density has no mode"
            continue
        else:
            try:
                draws = laplace(posterior, args, program, center)
            except (UnsupportedProgramError, ValueError) as error:
                found["Laplace"] = f"refused: {error}"
                continue
        seconds = time.perf_counter() - start
        errors = in_sd(numbers(posterior, names, draws), reference)
        found |= {f"{kind}, {key}": value for key, value in errors.items()}
        found[f"{kind}, seconds"] = seconds
    return found


# ------------------------------------------------------------------------------------------ all


def evaluate(name: str, folder: Path, options: Any) -> dict[str, Any]:
    posterior = POSTERIORS[name]
    args = posterior.read(json.loads((folder / "data.json").read_text()))
    reference = reference_of(folder)
    found = (
        {} if options.only == "approximations" else nuts(name, posterior, args, reference, options)
    )
    if options.only != "nuts":
        found |= approximations(posterior, args, reference, options)
    return found


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of the posteriors")
    parser.add_argument("--posteriors", nargs="*", choices=POSTERIORS, help="default: all")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=1000, help="of each chain")
    parser.add_argument("--steps", type=int, default=4000, help="of SVI")
    parser.add_argument("--particles", type=int, default=8, help="of SVI")
    parser.add_argument("--only", choices=("nuts", "approximations"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three small posteriors, short runs")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    chosen = options.posteriors or (QUICK if options.quick else POSTERIORS)
    if options.quick:
        options.warmup, options.draws = 300, 500
        options.steps, options.particles = 300, 2
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore", BdlWarning)
    results = {}
    for name in chosen:
        pyro.clear_param_store()
        results[name] = evaluate(name, options.data / name, options)
        if not options.json:
            harness.show(name, results[name], False)
    if options.json:
        harness.show("posteriordb", results, True)


if __name__ == "__main__":
    main()
