"""Microcanonical ensembles on bikesharing, beside their published results.

The protocol is that of scikit-learn-contrib/bde: a fifth of the rows is the test set
(``train_test_split(test_size=0.2, random_state=0)``), inputs and targets are standardized by the
training rows. A heteroscedastic ReLU network with Normal(0, 1) priors; ``mcmc.ensemble_sample``
trains the members and runs their chains. Beside it: the deep ensemble of the same members, and NUTS
from the same starts for the same time. Test RMSE and negative log likelihood, of the predictive
mixture and of the Normal with its mean and variance, which is how the published -.7315 is counted.

    python benchmarks/mile.py --data uci_more --rows 2000 --members 4
"""

import time
from pathlib import Path

import harness
import numpy as np
import pyro
import torch
from sklearn.model_selection import train_test_split
from torch import nn

import pyro_bdl as bdl

PUBLISHED = {
    "published ensemble of chains, all rows: RMSE": 0.2261,
    "published ensemble of chains, all rows: NLL of the Normal": -0.7315,
    "published deep ensemble, all rows: RMSE": 0.2879,
    "published deep ensemble, all rows: NLL of the Normal": -0.4551,
}


def split(path: Path | None, rows: int) -> tuple[torch.Tensor, ...]:
    if path is None:
        generator = np.random.default_rng(0)
        count = rows + -(-rows // 4)
        x = generator.normal(size=(count, 5))
        table = np.c_[x, np.sin(2 * x[:, 0]) + 0.1 * generator.normal(size=count)]
    else:
        table = np.loadtxt(path / "bikesharing.data")
    train, test = train_test_split(table, test_size=0.2, random_state=0)
    train = train[:rows]
    mean, sd = train.mean(0), train.std(0)
    sd[sd == 0] = 1.0
    parts = [torch.tensor((part - mean) / sd).float() for part in (train, test)]
    return tuple(value for part in parts for value in (part[:, :-1], part[:, -1]))


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
    found = bdl.Predictive(model, posterior, num_samples=_draws(posterior))(x)
    f, noise = found["f"].double(), found["noise"].double()
    mean = f.mean(0)
    variance = f.var(0, correction=0) + noise.square().mean(0)
    mixture = torch.distributions.Normal(f, noise).log_prob(y.double())
    mixture = mixture.logsumexp(0) - np.log(len(f))
    return {
        "RMSE": float((mean - y).square().mean().sqrt()),
        "NLL of the Normal": -float(
            torch.distributions.Normal(mean, variance.sqrt()).log_prob(y.double()).mean()
        ),
        "NLL of the mixture": -float(mixture.mean()),
    }


def _draws(posterior) -> int:
    if isinstance(posterior, bdl.Samples):
        return min(1000, posterior.num_chains * posterior.num_draws)
    return posterior.size


def convergence(model, samples, x) -> dict[str, float]:
    """R-hat and ESS of f at 100 test rows, within chains (the ESS of their average) and between."""
    f = bdl.Predictive(model, samples)(x[:100])["f"]
    f = f.reshape(samples.num_chains, samples.num_draws, -1)
    within = bdl.diagnostics.within_rhat(f)
    between = bdl.diagnostics.rhat(f)
    each = bdl.diagnostics.within_ess(f, kind="mean")
    of_each = len(each) ** 2 / (1 / each).sum(0)
    of_all = bdl.diagnostics.ess(f, kind="mean")
    return {
        "R-hat of f within chains, median": float(within.nanmedian()),
        "R-hat of f between chains, median": float(between.nanmedian()),
        "ESS of f within chains, median": float(of_each.nanmedian()),
        "ESS of f between chains, median": float(of_all.nanmedian()),
    }


def for_seconds(seconds: float, samples: bdl.Samples) -> bdl.Samples:
    """Chains, extended until the time since ``samples`` was drawn comes to so many seconds."""
    end = time.perf_counter() + seconds - samples.info["seconds"]
    while time.perf_counter() < end:
        samples = samples.extend(samples.num_draws)
    return samples


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with bikesharing.data")
    parser.add_argument("--rows", type=int, default=2000, help="training rows")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--widths", default="16-16-16-16")
    parser.add_argument("--warmup", type=int, default=500, help="iterations of 20 steps")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6000, help="of the training")
    parser.add_argument("--batch", type=int, default=256, help="rows of a step of the training")
    parser.add_argument("--rate", type=float, default=0.005, help="learning rate")
    parser.add_argument("--seconds", type=float, help="double the draws until so many are over")
    parser.add_argument("--variance", type=float, default=5e-4, help="energy variance")
    parser.add_argument("--floor", type=float, default=1e-3, help="of the noise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-nuts", action="store_true")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pyro.set_rng_seed(options.seed)
    folder = None if options.data is None else Path(options.data)
    x, y, x_test, y_test = split(folder, options.rows)
    widths = [int(w) for w in options.widths.split("-")]
    model = program(x.shape[1], widths, options.floor, len(x))

    started = time.perf_counter()
    guide = bdl.guides.AutoEnsemble(model, size=options.members)
    bdl.training.train(
        model, guide, x, y, steps=options.steps, batch_size=min(options.batch, len(x)),
        learning_rate=options.rate,
        held_out=bdl.training.HeldOut(0.1, patience=50),  # never stops before the rate is 0
        elbo=bdl.elbo.CompiledELBO(num_particles=options.members),
    )  # fmt: skip
    trained = time.perf_counter() - started
    samples = bdl.mcmc.ensemble_sample(
        model, x, y, members=guide, num_warmup=options.warmup,
        num_samples=options.draws, seed=options.seed, progress=False,
        kernel=bdl.mcmc.MCLMC(energy_variance=options.variance),
    )  # fmt: skip
    if options.seconds is not None:
        samples = for_seconds(options.seconds, samples)
    sides = {"deep ensemble": guide, "ensemble of chains": samples}
    if not options.no_nuts:
        nuts = bdl.mcmc.sample(
            model, x, y, init=guide, num_chains=options.members, num_warmup=100, num_samples=1,
            progress=False,
        )  # fmt: skip
        sides["NUTS for the same time"] = for_seconds(samples.info["seconds"], nuts)
    results: dict[str, object] = {
        "training rows": len(x),
        "seconds of the training": trained,
        "seconds of the chains": samples.info["seconds"],
        "energy variance reached": float(samples.stats["energy_variance"].mean()),
    }
    for name, posterior in sides.items():
        found = scores(model, posterior, x_test, y_test)
        if isinstance(posterior, bdl.Samples):
            found["draws per chain"] = posterior.num_draws
            found["seconds"] = posterior.info["seconds"]
            if posterior.num_draws >= 8:
                found |= convergence(model, posterior, x_test)
        results |= {f"{name}: {key}": value for key, value in found.items()}
    harness.show("mile: bikesharing", results | PUBLISHED, options.json)


if __name__ == "__main__":
    main()
