"""One step of SGHMC on a 1-50-1 network, 1000 points in minibatches of 100.

``mcmc.sgmcmc`` on a Pyro program against the same update written by hand in torch, on one flat
vector for each chain with its own layers, priors and likelihood: what the program costs. The noise
of both is a latent, on the log scale.
"""

import math

import harness
import torch
from torch import nn

import pyro_bdl as bdl

HIDDEN, ROWS, BATCH = 50, 1000, 100
SIZES = [HIDDEN, HIDDEN, HIDDEN, 1, 1]
STEP_SIZE, FRICTION = 1e-6, 0.02


def by_program(model, x, y, chains, steps):
    def run():
        return bdl.mcmc.sgmcmc(
            model,
            (x, y),
            kernel=bdl.mcmc.SGHMC(step_size=STEP_SIZE, friction=FRICTION, thinning=10),
            batch_size=BATCH,
            num_warmup=0,
            num_samples=max(1, steps // 10),
            num_chains=chains,
            init="network",
            progress=False,
        )

    return run


def log_density(u, x, y):
    """Of chains (chains, P) on a minibatch."""
    first, first_bias, second, second_bias, log_noise = u.split(SIZES, -1)
    hidden = torch.tanh(x.mT * first[..., None] + first_bias[..., None])  # chains, units, rows
    mean = (second[..., None] * hidden).sum(1) + second_bias
    noise = log_noise.exp()
    prior = -0.5 * u[:, :-1].square().sum(-1) - 0.5 * noise[:, 0].square() + log_noise[:, 0]
    terms = -0.5 * ((y - mean) / noise).square() - log_noise
    return prior + ROWS / BATCH * terms.sum(-1)


def by_hand(x, y, chains, steps):
    def run():
        u, kept = 0.1 * torch.randn(chains, sum(SIZES)), []
        p, h = torch.randn_like(u), math.sqrt(STEP_SIZE)
        heat = math.sqrt(1 - (1 - FRICTION) ** 2)
        for step in range(steps):
            rows = torch.randint(ROWS, (BATCH,))
            u.requires_grad_()
            (gradient,) = torch.autograd.grad(log_density(u, x[rows], y[rows]).sum(), u)
            u = u.detach()
            p = p + h * gradient
            u = u + h / 2 * p
            p = (1 - FRICTION) * p + heat * torch.randn_like(p)
            u = u + h / 2 * p
            if step % 10 == 9:
                kept.append(u)
        return kept

    return run


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="steps per timed round")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 20])
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    harness.set_device(options.device)
    x = torch.randn(ROWS, 1)
    y = x[:, 0].sin() + 0.1 * torch.randn(ROWS)
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    bnn = bdl.bayesianize(network, bdl.priors.Normal(1.0))
    model = bdl.models.Regression(bnn, num_data=ROWS)
    results = {}
    for chains in options.chains:
        sides = {
            "program": by_program(model, x, y, chains, options.steps),
            "hand": by_hand(x, y, chains, options.steps),
        }
        seconds = harness.in_turns(sides, options.repeats)
        ms = {side: 1e3 * value / options.steps for side, value in seconds.items()}
        name = f"{chains} chain{'s' * (chains > 1)}"
        results[f"{name}: sgmcmc on the program, ms/step"] = ms["program"]
        results[f"{name}: torch by hand, ms/step"] = ms["hand"]
        results[f"{name}: ratio"] = ms["program"] / ms["hand"]
    harness.show("sgmcmc: one SGHMC step, 1-50-1, batch 100", results, options.json)


if __name__ == "__main__":
    main()
