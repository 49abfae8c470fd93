"""Microcanonical ensembles on tabular data, beside published results and scikit-learn's models.

A heteroscedastic ReLU network with Normal(0, 1) priors; ``mcmc.ensemble_sample`` trains the members
and runs their chains, with its defaults where no option says otherwise. Beside it the deep ensemble
that the chains start from, boosting, a random forest and ridge regression of scikit-learn, and with
``--nuts`` NUTS from the same starts for the same time. Inputs and targets are standardized by the
training rows. Bikesharing has the protocol of scikit-learn-contrib/bde: a fifth of the rows is the
test set (``train_test_split(test_size=0.2, random_state=SPLIT)``); concrete and energy have their
published splits. Test RMSE and negative log likelihood in nats, of standardized targets: of the
predictive mixture, and of the Normal with its mean and variance, which is how the published -.7315
is counted. Means over the splits with standard errors, and differences from the chains in pairs.

``--choose`` is for choosing options: four fifths of the training rows are fitted, and the scores
are of the rest and the test rows, so that other splits are for reporting; of bikesharing the first
4000 training rows are fitted and the 3000 after them scored.

    python benchmarks/mile.py --data uci_more --set bikesharing --splits 0
    python benchmarks/mile.py --data uci --set concrete --splits 1 2 3 4 5
"""

import argparse
import time
from pathlib import Path
from statistics import fmean, stdev

import harness
import numpy as np
import pyro
import torch
from sklearn.model_selection import train_test_split
from torch import nn
from uci import Split

import pyro_bdl as bdl
from pyro_bdl.app import baselines
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.utils.random_state import seeded

PUBLISHED = {
    "published chains from an ensemble: RMSE": 0.2261,
    "published chains from an ensemble: NLL of the Normal": -0.7315,
    "published deep ensemble: RMSE": 0.2879,
    "published deep ensemble: NLL of the Normal": -0.4551,
}
BASELINES = {
    "boosting": "sklearn-boosting",
    "random forest": "sklearn-forest",
    "ridge regression": "sklearn-linear",
}
SCORES = ("RMSE", "NLL of the Normal", "NLL of the mixture")
CHAINS = "ensemble of chains"
Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split(options: argparse.Namespace, number: int) -> Data:
    """Standardized training rows and targets, and those of the test."""
    if options.data is not None and options.set != "bikesharing":
        part = Split(Path(options.data), "standard", options.set, number)
        if options.choose:
            order = torch.randperm(len(part.x), generator=torch.Generator().manual_seed(0))
            back, fit = order[: len(order) // 5], order[len(order) // 5 :]
            x, y = (
                torch.cat(v) for v in ((part.x[back], part.x_test), (part.y[back], part.y_test))
            )
            return part.x[fit], part.y[fit], x, y
        rows = slice(options.rows)
        return part.x[rows], part.y[rows], part.x_test, part.y_test
    if options.data is None:
        generator = np.random.default_rng(number)
        count = options.rows or 1200
        x = generator.normal(size=(count + -(-count // 4), 5))
        table = np.c_[x, np.sin(2 * x[:, 0]) + 0.1 * generator.normal(size=len(x))]
    else:
        table = np.loadtxt(Path(options.data) / "bikesharing.data")
    train, test = train_test_split(table, test_size=0.2, random_state=number)
    if options.choose:
        train, test = train[:4000], train[4000:7000]
    train = train[: options.rows]
    mean, sd = train.mean(0), train.std(0)
    sd[sd == 0] = 1.0
    parts = [torch.tensor((part - mean) / sd).float() for part in (train, test)]
    return parts[0][:, :-1], parts[0][:, -1], parts[1][:, :-1], parts[1][:, -1]


def program(features: int, widths: list[int], floor: float, rows: int):
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    network = nn.Sequential(*layers, nn.Linear(features, 2))
    bnn = bdl.bayesianize(network, bdl.priors.Normal(1.0))
    return bdl.models.HeteroscedasticRegression(bnn, floor=floor, num_data=rows)


@torch.no_grad()
def scores(model, posterior, x, y) -> dict[str, float]:
    count = posterior.size if isinstance(posterior, bdl.guides.AutoEnsemble) else None
    drawn = bdl.Predictive(model, posterior, num_samples=count)(x)
    f, noise = drawn["f"].double(), drawn["noise"].double()
    mean = f.mean(0)
    variance = f.var(0, correction=0) + noise.square().mean(0)
    mixture = torch.distributions.Normal(f, noise).log_prob(y.double())
    mixture = mixture.logsumexp(0) - np.log(len(f))
    normal = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y.double())
    rmse = (mean - y).square().mean().sqrt()
    return dict(zip(SCORES, map(float, (rmse, -normal.mean(), -mixture.mean())), strict=True))


def baseline_scores(name: str, data: Data, seed: int) -> dict[str, float]:
    """A Normal around the prediction, with the spread of the errors on left-out folds."""
    x, y, x_test, y_test = data
    names = tuple(str(i) for i in range(x.shape[1]))
    dataset = Dataset(x, y, x_test, y_test, names, "y", "regression")
    drawn = baselines.predictions(name, dataset, seed)
    rmse = (drawn.function.double().mean(0) - y_test).square().mean().sqrt()
    return {"RMSE": float(rmse), "NLL of the Normal": -float(drawn.log_likelihood[0].mean())}


def convergence(model, samples, x) -> dict[str, float]:
    """R-hat and ESS of f at 100 test rows, within chains (the ESS of their average) and between."""
    f = bdl.Predictive(model, samples)(x[:100])["f"]
    f = f.reshape(samples.num_chains, samples.num_draws, -1)
    within = bdl.diagnostics.within_rhat(f)
    between = bdl.diagnostics.rhat(f)
    of_chains = bdl.diagnostics.within_ess(f, kind="mean")
    average = len(of_chains) ** 2 / (1 / of_chains).sum(0)
    of_all = bdl.diagnostics.ess(f, kind="mean")
    return {
        "R-hat of f within chains, median": float(within.nanmedian()),
        "R-hat of f between chains, median": float(between.nanmedian()),
        "ESS of f within chains, median": float(average.nanmedian()),
        "ESS of f between chains, median": float(of_all.nanmedian()),
    }


def for_seconds(seconds: float, samples: bdl.Samples) -> bdl.Samples:
    """Chains, extended until the time since ``samples`` was drawn comes to so many seconds."""
    end = time.perf_counter() + seconds - samples.info["seconds"]
    while time.perf_counter() < end:
        samples = samples.extend(samples.num_draws)
    return samples


def one_split(options: argparse.Namespace, number: int) -> dict[str, float]:
    data = x, y, x_test, y_test = split(options, number)
    pyro.set_rng_seed(options.seed)
    model = program(x.shape[1], [int(w) for w in options.widths.split("-")], options.floor, len(x))
    started = time.process_time()
    with seeded(options.seed):  # as ensemble_sample trains its members
        guide = bdl.guides.AutoEnsemble(model, size=options.members)
        bdl.training.train(
            model, guide, x, y, steps=options.steps, learning_rate=options.rate, held_out=0.1,
            batch_size=options.batch,
        )  # fmt: skip
    trained = time.process_time()
    lengths = {"num_warmup": options.warmup, "num_samples": options.draws}
    chosen = {name: value for name, value in lengths.items() if value is not None}
    kernel = {"energy_variance": options.variance, "thinning": options.thinning}
    kernel = {name: value for name, value in kernel.items() if value is not None}
    if kernel:
        chosen["kernel"] = bdl.mcmc.MCLMC(**kernel)
    if options.checkpoint is not None:
        chosen["checkpoint"] = Path(options.checkpoint) / f"{options.set}-{number}-{options.seed}"
    samples = bdl.mcmc.ensemble_sample(
        model, x, y, members=guide, seed=options.seed, progress=False, **chosen
    )
    ended = time.process_time()
    sides = {"deep ensemble": guide, CHAINS: samples}
    if options.nuts:
        nuts = bdl.mcmc.sample(
            model, x, y, init=guide, num_chains=options.members, num_warmup=100, num_samples=1,
            progress=False,
        )  # fmt: skip
        sides["NUTS for the same time"] = for_seconds(samples.info["seconds"], nuts)
    results = {
        "training rows": len(x),
        "processor seconds of the training": trained - started,
        "processor seconds of the chains": ended - trained,
        "gradients in a draw": float(samples.stats["num_steps"].double().mean()),
        "energy variance reached": float(samples.stats["energy_variance"].mean()),
    }
    for name, posterior in sides.items():
        values = scores(model, posterior, x_test, y_test)
        if isinstance(posterior, bdl.Samples):
            values["draws per chain"] = posterior.num_draws
            if posterior.num_draws >= 8:
                values |= convergence(model, posterior, x_test)
        results |= {f"{name}: {key}": value for key, value in values.items()}
    for name, kind in BASELINES.items():
        values = baseline_scores(kind, data, options.seed)
        results |= {f"{name}: {key}": value for key, value in values.items()}
    return results


def over_splits(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means, standard errors, and differences from the chains in pairs."""
    results = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        results[key] = fmean(values)
        name, _, score = key.rpartition(": ")
        if len(rows) < 2 or score not in SCORES:
            continue
        results[f"{key}, standard error"] = stdev(values) / len(rows) ** 0.5
        if name != CHAINS:
            differences = [row[key] - row[f"{CHAINS}: {score}"] for row in rows]
            results[f"{key}, above the chains"] = fmean(differences)
            results[f"{key}, its standard error"] = stdev(differences) / len(rows) ** 0.5
    return results


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--data", help="folder with bikesharing.data, or standard/NAME/data; made up if left out"
    )
    parser.add_argument("--set", default="bikesharing", help="or concrete, energy, ...")
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--choose", action="store_true", help="score on training rows")
    parser.add_argument("--rows", type=int, help="training rows, all if left out")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--widths", default="16-16-16-16")
    parser.add_argument("--floor", type=float, default=1e-3, help="of the noise")
    parser.add_argument("--steps", type=int, default=2000, help="of the training")
    parser.add_argument("--batch", type=int, help="rows of a step of the training")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of the training")
    parser.add_argument("--warmup", type=int, help="iterations")
    parser.add_argument("--draws", type=int, help="of each chain")
    parser.add_argument("--variance", type=float, help="energy variance")
    parser.add_argument("--thinning", type=int, help="steps in an iteration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nuts", action="store_true")
    parser.add_argument("--checkpoint", help="a folder, from which a run that was killed goes on")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [one_split(options, number) for number in options.splits]
    results = {"splits": len(rows)} | over_splits(rows)
    if options.data is not None and options.set == "bikesharing":
        results |= PUBLISHED
    title = "made up" if options.data is None else options.set
    harness.show(f"mile: {title}", results, options.json)


if __name__ == "__main__":
    main()
