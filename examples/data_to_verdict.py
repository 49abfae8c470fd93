"""From data to a verdict, with torch's and Pyro's own loops: a script to copy.

    python examples/data_to_verdict.py
    python examples/data_to_verdict.py --data houses.npz

The steps are in the order in which they are taken: data, network, prior, program, a look at the
prior, three posteriors by loops that are all here, NUTS as the reference, checks, the comparison,
predictions, and the files that are kept. Each is a function of a few lines; change what differs.
"""

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_bdl as bdl


class Data(NamedTuple):
    """Standardized rows for training and testing, and the units of the target."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    scale: float
    shift: float


def read(path: str | None, rows: int) -> Data:
    """A file with arrays x (N, features) and y (N,), or a made-up one."""
    rng = np.random.default_rng(0)
    if path is not None:
        with np.load(path) as file:
            x, y = file["x"], file["y"]
    else:
        x = rng.uniform(-2, 2, (rows, 2))
        y = 3.0 * np.sin(2 * x[:, 0]) + x[:, 1] + 0.3 * rng.normal(size=rows)
    order = rng.permutation(len(x))
    train, test = np.split(order, [int(0.8 * len(x))])
    x = (x - x[train].mean(0)) / x[train].std(0)  # by the training rows alone
    shift, scale = y[train].mean(), y[train].std()
    x, y = (torch.tensor(part, dtype=torch.float32) for part in (x, (y - shift) / scale))
    return Data(x[train], y[train], x[test], y[test], float(scale), float(shift))


def program(data: Data, hidden: int) -> bdl.models.Regression:
    """The network, its prior, and what is observed."""
    net = nn.Sequential(nn.Linear(data.x.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, 1))
    network = bdl.bayesianize(net, prior=bdl.priors.FanIn(2.0))
    noise = dist.HalfNormal(1.0)  # unknown, of a standardized target
    return bdl.models.Regression(network, noise=noise, num_data=len(data.x))


def batches(data: Data, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches without end, all rows once in each pass."""
    while True:
        for rows in torch.randperm(len(data.x)).split(size):
            yield data.x[rows], data.y[rows]


def by_svi(model, guide, data: Data, steps: int) -> None:
    """Pyro's loop. The program scales a minibatch's likelihood by N / B."""
    decay = 0.1 ** (1 / steps)  # the rate falls to a tenth
    adam = pyro.optim.ClippedAdam({"lr": 0.02, "lrd": decay})
    svi = pyro.infer.SVI(model, guide, adam, bdl.elbo.TemperedTraceMeanField_ELBO())
    for _, batch in zip(range(steps), batches(data, 32), strict=False):
        svi.step(*batch)


def by_torch(model, guide, data: Data, steps: int) -> None:
    """Torch's loop, of the same objective."""
    guide.prototype(data.x, data.y)  # makes the parameters
    loss = bdl.elbo.TemperedTraceMeanField_ELBO()
    adam = torch.optim.Adam(guide.parameters(), lr=0.02)
    rate = torch.optim.lr_scheduler.ExponentialLR(adam, 0.1 ** (1 / steps))
    for _, batch in zip(range(steps), batches(data, 32), strict=False):
        adam.zero_grad()
        loss.differentiable_loss(model, guide, *batch).backward()
        adam.step()
        rate.step()


def fitted(model, data: Data, steps: int) -> tuple[dict, dict]:
    """Posteriors by name, and what each cost."""
    posteriors, costs = {}, {}

    def timed(name, fit):
        start = time.perf_counter()
        posteriors[name] = fit()
        costs[name] = bdl.Costs(seconds=time.perf_counter() - start)

    def mean_field():
        guide = bdl.guides.AutoMeanField(model)
        by_svi(model, guide, data, steps)
        return guide

    def laplace():
        guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
        by_svi(model, guide, data, 2 * steps)  # to the maximum
        return guide.laplace_approximation((data.x, data.y))

    def low_rank():
        guide = bdl.guides.AutoLowRank(model, rank=5)
        by_torch(model, guide, data, steps)
        return guide

    timed("mean-field", mean_field)
    timed("low rank", low_rank)
    timed("Laplace", laplace)
    return posteriors, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="an npz file with arrays x and y; made up if not given")
    parser.add_argument("--rows", type=int, default=200, help="of made-up data")
    parser.add_argument("--hidden", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--draws", type=int, default=500, help="of each of two chains")
    options = parser.parse_args()
    pyro.set_rng_seed(0)

    data = read(options.data, options.rows)
    model = program(data, options.hidden)
    prior = bdl.prior_predictive(model, data.x, num_samples=200)["y"]
    print(f"sd of a target under the prior {float(prior.std()):.2g}, of the data 1")

    posteriors, costs = fitted(model, data, options.steps)
    posteriors["nuts"] = bdl.mcmc.sample(
        model, data.x, data.y, num_chains=2, num_warmup=options.draws, num_samples=options.draws,
        progress=False,
    )  # fmt: skip
    print(bdl.diagnostics.summary(posteriors["nuts"]))

    comparison = bdl.compare(
        model, posteriors, data.x_test, data.y_test, train=(data.x, data.y), reference="nuts",
        units=(data.scale, data.shift), costs=costs,
    )  # fmt: skip
    print(comparison)
    comparison.report("verdict.html")

    best = next(name for name in comparison.judgments if name != "nuts")  # the first in the ranking
    # a Laplace approximation belongs to the linearized network
    predictive = bdl.LinearizedPredictive if best == "Laplace" else bdl.Predictive
    moments = predictive(model, posteriors[best], 500).moments(data.x_test[:3])["y"]
    for mean, sd in zip(moments.mean, moments.variance.sqrt(), strict=True):
        value, error = float(mean) * data.scale + data.shift, float(sd) * data.scale
        print(f"{best} predicts {value:.2f} ± {error:.2f}")
    posteriors[best].save("posterior.safetensors")
    print(bdl.cite(posteriors[best]))


if __name__ == "__main__":
    main()
