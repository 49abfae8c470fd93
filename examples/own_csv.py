"""Compare posteriors of one network on a table of your own.

    python examples/own_csv.py houses.csv --target price

Copy this file and change it: the network, its prior, the posteriors. It prints a table with a
verdict on each posterior and writes report.html. The same without code: pyro-bdl compare.
"""

import argparse
import time

import pyro
from pyro import distributions as dist
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.data import load_csv


def program(data, hidden: int):
    """A network with a prior on its weights, and an observation model for the target."""
    outputs = len(data.class_names) or 1
    net = nn.Sequential(
        nn.Linear(len(data.feature_names), hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )
    network = bdl.bayesianize(net, prior=bdl.priors.FanIn(1.0))
    if data.task == "classification":
        return bdl.models.Classification(network, num_data=len(data.x_train))
    if data.task == "count":
        return bdl.models.PoissonRegression(network, num_data=len(data.x_train))
    noise = dist.HalfNormal(1.0)  # unknown; the target has been standardized
    return bdl.models.Regression(network, noise=noise, num_data=len(data.x_train))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="a CSV file with a header; all columns but one are features")
    parser.add_argument("--target", required=True, help="the name of the column to predict")
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000, help="of Adam, for each guide")
    parser.add_argument("--draws", type=int, default=500, help="of NUTS; 0 leaves NUTS out")
    parser.add_argument("--report", default="report.html")
    options = parser.parse_args()

    pyro.set_rng_seed(0)
    data = load_csv(options.data, options.target)  # standardized and split
    train, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    model = program(data, options.hidden)

    posteriors, costs = {}, {}
    for name, guide in {
        "map": bdl.guides.AutoMAP(model),
        "mean-field": bdl.guides.AutoMeanField(model),
        "ensemble": bdl.guides.AutoEnsemble(model, size=5),
        "laplace": bdl.guides.AutoLaplaceGGN(model, structure="kron"),
    }.items():
        start = time.perf_counter()
        bdl.training.train(model, guide, *train, steps=options.steps, progress=name)
        posteriors[name] = guide.laplace_approximation(train) if name == "laplace" else guide
        costs[name] = bdl.Costs(seconds=time.perf_counter() - start)
    if options.draws:
        posteriors["nuts"] = bdl.mcmc.sample(
            model, *train, num_chains=2, num_warmup=options.draws, num_samples=options.draws
        )

    reference = "nuts" if options.draws else None
    result = bdl.compare(model, posteriors, *test, train=train, reference=reference, costs=costs)
    print(result)
    result.report(options.report)


if __name__ == "__main__":
    main()
