"""A plate of networks at once against as many programs of one network, one after another.

Both sides do the same work from the start: mean-field SVI with the compiled ELBO, and NUTS on
NumPyro, tracing, translation and compilation included. Seconds are of the clock and, since machines
are shared, of the processor. The posteriors are compared as functions at the
training inputs: for NUTS the difference of the means of f in its Monte Carlo error (both sides'),
for SVI in the posterior's sd. The log density of the plate is the sum of the programs' own.
"""

import statistics
import time

import harness
import pyro
import pyro.distributions as dist
import torch
from torch import nn

import pyro_bdl as bdl


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def one(width):
    network = bdl.bayesianize(net(width), bdl.priors.FanIn(1.0))

    def model(x, y=None):
        f = pyro.deterministic("f", network(x)[:, 0])
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    return model


def many(width, count):
    networks = bdl.bayesianize(net(width), bdl.priors.FanIn(1.0), plate="groups")

    def model(x, y=None):
        with pyro.plate("groups", count):
            f = pyro.deterministic("f", networks(bdl.nn.each(x, dim=1))[..., 0].T)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    return model


def svi(model, x, y, options):
    """Mean and sd (n, ...) of f under mean-field VI."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    elbo = bdl.elbo.CompiledELBO()
    schedule = {"lr": 0.01, "lrd": 0.01 ** (1 / options.steps)}
    loop = pyro.infer.SVI(model, guide, pyro.optim.ClippedAdam(schedule), elbo)
    for _ in range(options.steps):
        loop.step(x, y)
    f = bdl.Predictive(model, guide, num_samples=1000)(x)["f"]
    return f.mean(0), f.std(0)


def nuts(model, x, y, options):
    """Mean of f (n, ...) under NUTS and its Monte Carlo error."""
    samples = bdl.mcmc.sample(
        model, x, y, num_warmup=options.warmup, num_samples=options.draws,
        num_chains=options.chains, kernel=bdl.mcmc.NUTS(max_tree_depth=options.depth), seed=0,
        progress=False,
    )  # fmt: skip
    f = bdl.Predictive(model, samples)(x)["f"].unflatten(0, (options.chains, -1))
    return f.mean((0, 1)), bdl.diagnostics.mcse(f)


def in_turn(run, x, y, options):
    """The same of every group by a program of its own, (n, groups)."""
    parts = [run(one(options.width), x[:, g], y[:, g], options) for g in range(options.networks)]
    return tuple(torch.stack(values, -1) for values in zip(*parts, strict=True))


def density_gap(x, y, options):
    """The largest relative difference of the plate's log density and the sum of the programs'."""
    whole = bdl.Program(many(options.width, options.networks), x, y)
    latents = whole.unflatten(torch.randn(whole.size, dtype=torch.float64))
    total = sum(
        bdl.Program(one(options.width), x[:, g], y[:, g]).log_joint(
            {name: value[g] for name, value in latents.items()}
        )
        for g in range(options.networks)
    )
    return float((whole.log_joint(latents) / total - 1.0).abs())


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=20, help="in the plate (default 20)")
    parser.add_argument("--width", type=int, default=10, help="hidden units (default 10)")
    parser.add_argument("--rows", type=int, default=30, help="data of each (default 30)")
    parser.add_argument("--steps", type=int, default=3000, help="of SVI (default 3000)")
    parser.add_argument("--warmup", type=int, default=200, help="of NUTS (default 200)")
    parser.add_argument("--draws", type=int, default=200, help="of each chain (default 200)")
    parser.add_argument("--chains", type=int, default=1, help="of NUTS (default 1)")
    parser.add_argument("--depth", type=int, default=7, help="of NUTS's trees (default 7)")
    parser.add_argument("--methods", nargs="+", default=["SVI", "NUTS"], choices=["SVI", "NUTS"])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.set_defaults(threads=1, repeats=1)
    options = parser.parse_args()
    if options.quick:  # whatever else was asked for, but for a smaller plate
        options.networks = min(options.networks, 3)
        options.steps, options.warmup, options.draws = 20, 20, 20
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.rand(options.rows, options.networks, 1, dtype=torch.float64) * 4 - 2
    phase = torch.linspace(0, 3, options.networks, dtype=torch.float64)
    y = (2 * x[..., 0] + phase).sin() + 0.2 * torch.randn(x.shape[:2], dtype=torch.float64)
    plate = many(options.width, options.networks)
    results = {"log density: relative difference": density_gap(x, y, options)}
    for name in options.methods:
        run = {"SVI": svi, "NUTS": nuts}[name]
        found, seconds = {}, {"plate": [], "in turn": []}
        processor = {"plate": [], "in turn": []}
        for _ in range(options.repeats):
            for side, call in (
                ("plate", lambda run=run: run(plate, x, y, options)),
                ("in turn", lambda run=run: in_turn(run, x, y, options)),
            ):
                start, busy = time.perf_counter(), time.process_time()
                found[side] = call()
                seconds[side].append(time.perf_counter() - start)
                processor[side].append(time.process_time() - busy)
        taken, busy = (
            {side: statistics.median(values) for side, values in clock.items()}
            for clock in (seconds, processor)
        )
        (mean, width), (mean2, width2) = found["plate"], found["in turn"]
        results[f"{name}, plate, s"] = taken["plate"]
        results[f"{name}, one after another, s"] = taken["in turn"]
        results[f"{name}, one after another to plate: ratio"] = taken["in turn"] / taken["plate"]
        results[f"{name}, the same of processor time: ratio"] = busy["in turn"] / busy["plate"]
        if name == "SVI":
            results["SVI, mean of f apart, in sd, root mean square"] = float(
                ((mean - mean2) / width2).square().mean().sqrt()
            )
            results["SVI, sd of f, plate to in turn, median"] = float((width / width2).median())
        else:
            error = (width.square() + width2.square()).sqrt()
            apart = (mean - mean2).abs() / error
            results["NUTS, mean of f apart, in Monte Carlo errors, root mean square"] = float(
                apart.square().mean().sqrt()
            )
            results["NUTS, the same, largest"] = float(apart.max())
    title = f"a plate of {options.networks} networks 1-{options.width}-1, {options.rows} data each"
    harness.show(title, results, options.json)


if __name__ == "__main__":
    main()
