"""Samplers against known moments, and against a long run of NUTS in function space.

The targets with known moments: a Normal with deviations from 0.01 to 10, a banana b ~ N(a^2, 0.5)
with a ~ N(0, 1), and a funnel x ~ N(0, exp(v)) with v ~ N(0, 1). Of each, the root mean square of
(estimate - exact value) / Monte Carlo error over its means and mean squares, about 1 for an exact
sampler. Then f(x) at 20 rows of a 2-10-1 network: the same with a NUTS run of ten times the draws
in place of the exact values, its errors included. "bias" is the largest relative error of a mean
square that is above 3 Monte Carlo errors.

    python benchmarks/moments.py --threads 1
"""

import time
from typing import Any

import harness
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_bdl as bdl

SD = torch.logspace(-2, 1, 6, dtype=torch.float64)


def known(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros_like(SD), SD).to_event(1))
    a = pyro.sample("a", dist.Normal(torch.zeros_like(y), 1.0))
    pyro.sample("b", dist.Normal(a**2, 0.5))
    v = pyro.sample("v", dist.Normal(torch.zeros_like(y), 1.0))
    pyro.sample("x", dist.Normal(torch.zeros(3).to(y), (v / 2).exp()).to_event(1))
    pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)


def moments(latents: Any) -> dict[str, tuple[Tensor, float]]:
    """Draws (chains, draws, ...) whose expectation is known, and that expectation."""
    w, b, v = latents["w"] / SD, latents["b"], latents["v"]
    x = latents["x"] / (v[..., None] / 2).exp()
    return {
        "Normal, mean": (w, 0.0),
        "Normal, square": (w**2, 1.0),
        "banana, mean": (b, 1.0),
        "banana, square": ((b - 1) ** 2, 2.25),
        "funnel, mean": (v, 0.0),
        "funnel, square": (torch.cat([v[..., None] ** 2, x**2], -1), 1.0),
    }


def in_errors(values: Tensor, exact: Tensor | float, error: Tensor | float = 0.0) -> Tensor:
    own = bdl.diagnostics.mcse(values)
    return (values.mean((0, 1)) - exact) / (own**2 + error**2) ** 0.5


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000, help="warm-up and draws")
    parser.add_argument("--chains", type=int, default=4)
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    x = torch.randn(100, 2)
    y = torch.sin(x[:, 0]) * x[:, 1] + 0.3 * torch.randn(100)
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)), noise=0.3)

    def draws(program: Any, *data: Tensor, kernel: str, times: int = 1, seed: int = 0) -> Any:
        return bdl.mcmc.sample(
            program, *data, kernel=kernel, num_warmup=options.iterations, seed=seed,
            num_samples=times * options.iterations, num_chains=options.chains, progress=False,
        )  # fmt: skip

    def functions(samples: bdl.Samples) -> Tensor:
        f = bdl.Predictive(model, samples)(x[:20])["f"]
        return f.reshape(samples.num_chains, samples.num_draws, -1)

    long = functions(draws(model, x, y, kernel="nuts", times=10, seed=1))
    center = long.mean((0, 1))
    error = bdl.diagnostics.mcse(long)
    spread = (long - center).square()
    spread_error = bdl.diagnostics.mcse(spread)
    results: dict[str, Any] = {"long NUTS: max R-hat of f": float(bdl.diagnostics.rhat(long).max())}
    for kernel in ("nuts", "mams", "mclmc"):
        started = time.perf_counter()
        samples = draws(known, torch.tensor(0.0), kernel=kernel)
        for name, (values, exact) in moments(samples.latents).items():
            z = in_errors(values, exact)
            results[f"{kernel}: {name}, in errors"] = float(z.square().mean().sqrt())
            if "square" in name:
                relative = (values.mean((0, 1)) / exact - 1).abs()
                results[f"{kernel}: {name}, bias"] = float((relative * (z.abs() > 3)).max())
        f = functions(draws(model, x, y, kernel=kernel))
        variances = (f - center).square()
        for name, z in (
            ("mean f", in_errors(f, center, error)),
            ("variance of f", in_errors(variances, spread.mean((0, 1)), spread_error)),
        ):
            results[f"{kernel}: {name}, in errors"] = float(z.square().mean().sqrt())
        results[f"{kernel}: max R-hat of f"] = float(bdl.diagnostics.rhat(f).max())
        results[f"{kernel}: seconds"] = time.perf_counter() - started
    harness.show("moments: samplers against known moments and a long run", results, options.json)


if __name__ == "__main__":
    main()
