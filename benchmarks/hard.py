"""A network on which NUTS does not mix, and what does: its last layer integrated out.

A 2-50-50-1 ReLU network, FanIn(4.0) weights and Normal(0, 1) biases, noise 0.1, 100 points in two
clusters. The data fix f to 0.1 where its prior deviation is about 10, so that the posterior of all
weights is a thin curved sheet. Given the features h(x) of the last hidden layer, the last layer's
weights are Gaussian, and

    y | features ~ N(0, s^2 h h' + 1 + 0.01 I),    s = 4 / sqrt(50)

is a Pyro program of the other weights alone, whose posterior is not thin. ``f drawn`` takes a draw
of the last layer from its Gaussian posterior given the features and the data; ``f mean`` is its
mean, without that independent part.

Smallest effective sample size and largest R-hat of f at 49 points of a grid; "agrees" is the root
mean square, over the points, of the difference of mean f to that of ``mclmc`` in Monte Carlo
standard errors of both, about 1 for equal posteriors.

    python benchmarks/hard.py --threads 1
"""

import math
import time
from typing import Any

import harness
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import mcmc

NOISE, WIDTH, GAIN = 0.1, 50, 4.0
PRIOR = bdl.priors.ByName({"*weight": bdl.priors.FanIn(GAIN), "*bias": bdl.priors.Normal(1.0)})


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    centers = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).repeat_interleave(50, 0)
    x = centers + 0.3 * torch.randn(100, 2, generator=generator)
    f = torch.sin(2 * x[:, 0]) + 0.5 * torch.cos(3 * x[:, 1])
    return x, f + NOISE * torch.randn(100, generator=generator)


def hidden_layers() -> list[nn.Module]:
    return [nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]


class Collapsed(PyroModule):
    """The program without its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = bdl.bayesianize(nn.Sequential(*hidden_layers()), PRIOR)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.features(x)
        scaled = pyro.deterministic("features", GAIN / math.sqrt(WIDTH) * h, event_dim=2)
        factor = torch.cat([scaled, torch.ones_like(h[:, :1])], -1)  # of the weights and the bias
        noise = h.new_full((len(h),), NOISE**2)
        given = dist.LowRankMultivariateNormal(torch.zeros_like(noise), factor, noise)
        return pyro.sample("y", given, obs=y)


def last_layer(samples: bdl.Samples, model: Any, x: Tensor, y: Tensor, at: Tensor) -> Any:
    """Draws of f and their means given the features, each (draws, points)."""
    features = bdl.Predictive(model, samples)(torch.cat([x, at]))["features"]
    phi = torch.cat([features, torch.ones_like(features[..., :1])], -1)
    seen, new = phi[:, : len(x)], phi[:, len(x) :]
    precision = seen.mT @ seen / NOISE**2 + torch.eye(WIDTH + 1)
    root = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(seen.mT @ y[:, None] / NOISE**2, root)
    z = torch.randn(len(root), WIDTH + 1, 1)
    drawn = mean + torch.linalg.solve_triangular(root.mT, z, upper=True)
    return (new @ drawn)[..., 0], (new @ mean)[..., 0]


def convergence(f: Tensor, chains: int) -> dict[str, Any]:
    f = f.unflatten(0, (chains, -1))
    ess = bdl.diagnostics.ess(f)
    rhat = bdl.diagnostics.rhat(f)
    return {
        "max R-hat": float(rhat.max()),
        "median R-hat": float(rhat.median()),
        "min ESS": float(ess.min()),
        "median ESS": float(ess.median()),
    }


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=250, help="of mclmc, 20 steps each")
    parser.add_argument("--variance", type=float, default=5e-4, help="energy variance of mclmc")
    parser.add_argument("--adjusted", type=int, default=400, help="iterations of mams")
    parser.add_argument("--longest", type=int, default=7, help="log2 of a mean trajectory of mams")
    parser.add_argument("--whole", type=float, default=120.0, help="seconds of NUTS on all weights")
    parser.add_argument("--depth", type=int, default=10)
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    x, y = data()
    side = torch.linspace(-2, 2, 7)
    at = torch.cartesian_prod(side, side)
    collapsed = Collapsed()
    network = nn.Sequential(*hidden_layers(), nn.Linear(WIDTH, 1))
    whole = bdl.models.Regression(bdl.bayesianize(network, PRIOR), noise=NOISE)

    moments: dict[str, tuple[Tensor, Tensor]] = {}
    sides = {
        "mclmc": (collapsed, mcmc.MCLMC(energy_variance=options.variance), options.iterations),
        "mams": (collapsed, mcmc.MAMS(max_steps=2**options.longest), options.adjusted),
        "nuts, all weights": (whole, mcmc.NUTS(max_tree_depth=options.depth), 25),
    }
    for name, (model, kernel, count) in sides.items():
        started = time.perf_counter()
        samples = mcmc.sample(
            model, x, y, kernel=kernel, num_warmup=count, num_samples=count,
            num_chains=options.chains, progress=False,
        )  # fmt: skip
        while model is whole and time.perf_counter() < started + options.whole:
            samples = samples.extend(count)
        found = {
            "seconds": time.perf_counter() - started,
            "draws per chain": samples.num_draws,
            "gradients of the draws": int(samples.stats["num_steps"].sum()),
        }
        if model is whole:
            drawn = bdl.Predictive(model, samples)(at)["f"].squeeze(-1)
        else:
            drawn, mean = last_layer(samples, model, x, y, at)
            found |= {f"f mean, {k}": v for k, v in convergence(mean, samples.num_chains).items()}
        if samples.num_draws < 8:  # within the time
            harness.show(f"hard: 2-50-50-1 on two clusters, {name}", found, options.json)
            continue
        found |= {f"f drawn, {k}": v for k, v in convergence(drawn, samples.num_chains).items()}
        chains = drawn.unflatten(0, (samples.num_chains, -1))
        moments[name] = chains.mean((0, 1)), bdl.diagnostics.mcse(chains)
        apart = moments[name][0] - moments["mclmc"][0]
        error = (moments[name][1].square() + moments["mclmc"][1].square()).sqrt()
        found["agrees"] = float((apart / error).square().mean().sqrt())
        harness.show(f"hard: 2-50-50-1 on two clusters, {name}", found, options.json)


if __name__ == "__main__":
    main()
