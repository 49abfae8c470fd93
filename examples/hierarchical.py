"""A hierarchical Pyro program of your own: groups that share what they know, by VI and by NUTS.

    python examples/hierarchical.py

Copy this file and change ``program``. Each group has a line of its own; their slopes and intercepts
come from a common distribution. Groups with few data lean on the others.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch

import pyro_bdl as bdl


def simulate(groups: int, seed: int = 0):
    """Groups of 2 to 20 data: inputs (N,), the group of each (N,), targets (N,)."""
    torch.manual_seed(seed)
    sizes = torch.linspace(2, 20, groups).long()
    group = torch.arange(groups).repeat_interleave(sizes)
    x = torch.randn(len(group))
    slope, intercept = 1.0 + 0.5 * torch.randn(groups), torch.randn(groups)
    return x, group, intercept[group] + slope[group] * x + 0.5 * torch.randn(len(group))


def program(x, group, y=None, *, groups: int):
    """y ~ Normal(a_g + b_g x, noise), a_g ~ Normal(a, s_a), b_g ~ Normal(b, s_b)."""
    center = pyro.sample("center", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(torch.ones(2)).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("groups", groups):
        # Lines in units of the spread suit NUTS and independent Normals better.
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    line = pyro.deterministic("line", center + spread * z)
    f = pyro.deterministic("f", line[group, 0] + line[group, 1] * x)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3000, help="of Adam, for each guide")
    parser.add_argument("--draws", type=int, default=500, help="of each chain of NUTS")
    options = parser.parse_args()

    pyro.set_rng_seed(0)
    x, group, y = simulate(options.groups)

    def model(x, group, y=None):
        return program(x, group, y, groups=options.groups)

    posteriors = {}
    for name, guide in {
        "mean-field": bdl.guides.AutoMeanField(model),
        "low rank": bdl.guides.AutoLowRank(model, rank=5),
    }.items():
        optimizer = pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.1 ** (1 / options.steps)})
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=2)
        svi = pyro.infer.SVI(model, guide, optimizer, elbo)
        for _ in range(options.steps):
            svi.step(x, group, y)
        posteriors[name] = guide
    posteriors["nuts"] = bdl.mcmc.sample(
        model, x, group, y, num_chains=2, num_warmup=options.draws, num_samples=options.draws
    )

    for name, posterior in posteriors.items():
        draws = bdl.Predictive(model, posterior, min(500, 2 * options.draws))(x, group)["line"]
        slopes = ", ".join(
            f"{mean:.2f} ± {sd:.2f}"
            for mean, sd in zip(draws.mean(0)[:, 1], draws.std(0)[:, 1], strict=True)
        )
        print(f"{name}: slopes {slopes}")
    print(bdl.diagnostics.summary(posteriors["nuts"]))


if __name__ == "__main__":
    main()
