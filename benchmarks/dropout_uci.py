"""MC dropout on the UCI regression sets, against the figures of Gal & Ghahramani (2016).

A network with one hidden layer of 50 ReLU units (100 for protein) and dropout on its inputs and
hidden units, as in the public experiment (github.com/yaringal/DropoutUncertaintyExps). For each
split the rate is the one with the best log likelihood of a fifth of the training data among
networks trained on the rest; a network is then trained at that rate on all training data. The
noise is a latent, a point that maximizes the bound, and not picked from a grid. (Rates learned
together with the noise, ``learn_p=True``, fall to zero on these small sets: the point masses of
the mean weights then fit the training data as a maximum a posteriori would.)

    python benchmarks/dropout_uci.py --data uci --sets boston,concrete,energy --threads 1

``--data`` is a folder with ``standard/NAME/data/data.txt`` and its index files, as
github.com/cambridge-mlg/DUN has them. All networks of a set are trained at once: ``vmap`` over
the guide's parameters, with other rows for each of the draws of a step, so that a step sees many
masks. Root mean square errors are in units of the target, log likelihoods means over test data in
nats, both of predictions averaged over draws; after +- the standard error over splits, of each
the mean over seeds.
"""

import json
import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from harness import machine, parser
from torch import Tensor, nn
from tqdm import tqdm
from uci import SETS, Split, spread
from uci_published import DROPOUT_RMSE, LOG_LIKELIHOOD

import pyro_bdl as bdl
from pyro_bdl.init import init_afresh
from pyro_bdl.program import record

RATES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4)
WIDE = ("protein",)


class Networks:
    """Several networks of one shape, each with its own data and its own rate.

    :param features: inputs of each.
    :param hidden: units of each.
    :param particles: draws in each step of training.
    :param rows: data that each of them sees.
    """

    def __init__(self, features: int, hidden: int, particles: int, rows: int) -> None:
        net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        bnn = bdl.bayesianize(net, bdl.priors.Normal(1.0))
        self.model = bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0))
        self.example = torch.randn(2, features), torch.randn(2)
        self.guide = self._guide()
        self.particles, self.rows = particles, rows

    def _guide(self) -> bdl.guides.AutoMCDropout:
        guide = bdl.guides.AutoMCDropout(self.model, sites="all", init_loc_fn=init_afresh)
        return guide.prototype(*self.example)

    def _held(self, loc: Tensor, p: Tensor) -> Any:
        return self.guide.at_parameters({"loc": loc, "p": p.expand(len(self.guide.weights))})

    def _loss(self, loc: Tensor, p: Tensor, count: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """-ELBO of one network; every draw sees rows of its own."""

        def particle(vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            latents, log_det = self.guide.layout.constrain(vector)
            run = record(self.model, latents, (x, y))
            return run.log_likelihood() * count / len(y), self.guide.kl(vector, log_det, run)

        with self._held(loc, p):
            vectors = self.guide.sample_vectors(len(x))
            likelihood, kl = torch.vmap(particle, randomness="different")(vectors, x, y)
        return (kl - likelihood).mean()

    def train(self, data: list[tuple[Tensor, Tensor]], p: Tensor, steps: int, bar: Any) -> Tensor:
        """Adam on all bounds at once, its rate falling to zero along half a cosine.

        :param data: inputs and targets of each network.
        :param p: the rate of each.
        :returns: the parameters of each, (networks, P).
        """
        count = torch.tensor([float(len(y)) for _, y in data])
        start = torch.stack([self._guide().location().detach() for _ in data])
        loc = start.requires_grad_()
        optimizer = torch.optim.Adam([loc], lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses = torch.vmap(self._loss, randomness="different")
        x = nn.utils.rnn.pad_sequence([x for x, _ in data], batch_first=True)
        y = nn.utils.rnn.pad_sequence([y for _, y in data], batch_first=True)
        network = torch.arange(len(data))[:, None, None]
        with pyro.validation_enabled(False):
            for _ in range(steps):
                share = torch.rand(len(data), self.particles, self.rows)
                rows = (share * count[:, None, None]).long()
                loss = losses(loc, p, count, x[network, rows], y[network, rows]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.update()
        return loc.detach()

    @torch.no_grad()
    def scores(
        self, loc: Tensor, p: Tensor, x: Tensor, y: Tensor, draws: int
    ) -> tuple[float, float]:
        """RMSE and mean log likelihood of one network."""
        with self._held(loc, p):
            predictive = bdl.Predictive(self.model, self.guide, draws)
            mean = predictive.mean(x)["y"].mean(0)
            density = predictive.log_likelihood(x, y)["y"].logsumexp(0) - math.log(draws)
        return (mean - y).square().mean().sqrt().item(), density.mean().item()


def fitted(
    splits: list[Split], hidden: int, steps: int, options: Any, bar: Any
) -> list[dict[str, float]]:
    """RMSE, log likelihood and the chosen rate of each split."""
    networks = Networks(splits[0].x.shape[1], hidden, options.particles, options.rows)
    rates = torch.tensor(options.rates)
    kept, held = [], []
    for split in splits:
        order = torch.randperm(len(split.x))
        few, many = order[: len(order) // 5], order[len(order) // 5 :]
        kept.append((split.x[many], split.y[many]))
        held.append((split.x[few], split.y[few]))
    each = [part for part in kept for _ in rates]
    loc = networks.train(each, rates.repeat(len(splits)), steps, bar)
    best = []
    for number, (x, y) in enumerate(held):
        found = [
            networks.scores(loc[number * len(rates) + i], p, x, y, options.draws)[1]
            for i, p in enumerate(rates)
        ]
        best.append(int(torch.tensor(found).argmax()))
    chosen = rates[best]
    loc = networks.train([(split.x, split.y) for split in splits], chosen, steps, bar)
    result = []
    for one, p, split in zip(loc, chosen, splits, strict=True):
        error, density = networks.scores(one, p, split.x_test, split.y_test, options.draws)
        result.append(
            {
                "rmse": error * split.y_sd,
                "log likelihood": density - math.log(split.y_sd),
                "rate": round(p.item(), 6),
            }
        )
    return result


def summary(name: str, runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Means and standard errors over splits, the sd over seeds, and the published figures.

    :param runs: for each seed a row for each split.
    """
    result: dict[str, Any] = {"splits": [row for rows in runs for row in rows]}
    public = {"rmse": (DROPOUT_RMSE, -1.0), "log likelihood": (LOG_LIKELIHOOD["MC dropout"], 1.0)}
    for key, (figures, better) in public.items():
        each = [[row[key] for row in of_split] for of_split in zip(*runs, strict=True)]
        result[key] = spread(each)
        mean, its_error = figures.get(name, (None, None))
        if mean is not None and its_error is not None:
            reached = better * (result[key]["mean"] - mean) >= -2.0 * its_error
            result[key] |= {"published": mean, "its standard error": its_error, "reached": reached}
    return result


def show(name: str, found: dict[str, Any]) -> None:
    rates = [row["rate"] for row in found["splits"]]
    print(f"{name}, {len(rates)} runs, rates {min(rates):g} to {max(rates):g}")
    for key in ("rmse", "log likelihood"):
        part = found[key]
        line = f"  {key:<15}{part['mean']:#10.4g} +- {part['standard error']:#.2g}"
        line += f", sd over seeds {part['sd over seeds']:#.2g}"
        if "published" in part:
            line += f"   published {part['published']:.2f} +- {part['its standard error']:.2f}"
            line += "   reached" if part["reached"] else "   not reached"
        print(line, flush=True)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    arguments.add_argument("--sets", default=",".join(SETS), help="default: %(default)s")
    arguments.add_argument("--splits", type=int, default=20, help="of each set, at most")
    arguments.add_argument("--seeds", type=int, default=1, help="of each split (1)")
    arguments.add_argument("--rates", type=float, nargs="+", default=RATES, help="to choose from")
    arguments.add_argument(
        "--steps",
        type=int,
        help="of each training; default: 8000, or 150 passes where that is more",
    )
    arguments.add_argument("--particles", type=int, default=16, help="draws in each step")
    arguments.add_argument("--rows", type=int, default=16, help="data that each of them sees")
    arguments.add_argument("--draws", type=int, default=1000, help="for prediction")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for name in options.sets.split(","):
        where = options.data / "standard" / name / "data"
        count = min(options.splits, len(list(where.glob("index_test_*.txt"))))
        splits = [Split(options.data, "standard", name, number) for number in range(count)]
        passes = len(splits[0].x) / (options.particles * options.rows)
        steps = options.steps or max(8000, round(150 * passes))
        runs, total = [], 2 * steps * options.seeds
        with tqdm(total=total, desc=name, disable=options.json, mininterval=2) as bar:
            for seed in range(options.seeds):
                pyro.clear_param_store()
                pyro.set_rng_seed(seed)
                runs.append(fitted(splits, 100 if name in WIDE else 50, steps, options, bar))
        results[name] = summary(name, runs)
        if not options.json:
            show(name, results[name])
    if options.json:
        print(json.dumps({"benchmark": "dropout_uci", "machine": machine(), "sets": results}))


if __name__ == "__main__":
    main()
