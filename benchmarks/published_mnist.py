"""Nine posteriors of a perceptron and four of LeNet-5 on MNIST, each beside its published figure.

    python benchmarks/published_mnist.py --data DATA --quick
    python benchmarks/published_mnist.py --data DATA --rows rows.jsonl --seeds 3

"MLP" is the table of github JavierAntoran/Bayesian-Neural-Networks: 784-1200-1200-10 with ReLU on
MNIST, prior Normal(0, 0.1), batches of 128, 100 draws: the sum of the test log likelihoods and the
error in percent. "LeNet-5" is that of google/uncertainty-baselines (``baselines/mnist``) on MNIST
and Fashion-MNIST: 50 000 images, batches of 256, Adam at 1e-3: NLL, accuracy and ECE. Seconds are
of the processor for the fit and for predicting the test images, by the clock with ``--device
cuda``.

What differs: variational and MAP fits use Adam with a falling learning rate (published: SGD for the
MLP), and a KL in closed form where there is one; one draw in a step (published 3) unless
``--particles`` says otherwise. The published mixture prior mixes whole layers, since its code sums
log densities before it mixes them; here each weight has the mixture, as in the paper. The step of
SGLD is halved in the warm-up where a chain diverges, as it does at the published 5e-5 (half their
1e-4), and its preconditioner is fixed after half the warm-up (see ``mcmc.PSGLD``). LeNet-5's VI has
flipout in all layers (published: in convolutions) and one learned prior scale for each layer;
pixels have mean 0 and sd 1. Refined VI has no counterpart here.

The published sizes need a GPU; ``--width``, ``--epochs`` and the others shorten them. With ``--rows
FILE`` every row is kept, and a run that was stopped goes on with those that are missing.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pyro
import pyro.distributions as dist
import torch
from images import Images, Part, log_loss, over
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import metrics, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "MLP, mnist": {
        method: {"log likelihood": value, "error": error}
        for method, value, error in (
            ("MAP", -572.9, 1.58),
            ("bootstrap ensemble", -496.5, 1.53),
            ("mean-field, Normal", -1100, 2.60),
            ("mean-field, mixture", -1008, 2.38),
            ("mean-field, Laplace", -893, 2.28),
            ("local reparameterization", -1086, 2.61),
            ("MC dropout", -435.5, 1.37),
            ("SGLD", -828, 1.76),
            ("preconditioned SGLD", -661, 1.76),
        )
    },
    "LeNet-5, mnist": {
        "deterministic": {"NLL": 0.037, "accuracy": 0.991},
        "mean-field": {"NLL": 0.048, "accuracy": 0.985, "ECE": 0.010},
        "refined VI": {"NLL": 0.034, "accuracy": 0.990, "ECE": 0.010},
        "ensemble": {"NLL": 0.016, "accuracy": 0.994, "ECE": 0.005},
    },
    "LeNet-5, fashion_mnist": {
        "deterministic": {"NLL": 0.321, "accuracy": 0.910},
        "mean-field": {"NLL": 0.292, "accuracy": 0.895, "ECE": 0.011},
        "refined VI": {"NLL": 0.259, "accuracy": 0.906, "ECE": 0.011},
        "ensemble": {"NLL": 0.200, "accuracy": 0.932, "ECE": 0.010},
    },
}
SCORES = ("log likelihood", "error", "NLL", "accuracy", "ECE")
SIZES = {
    "seeds": (3, 1, "of networks, batches and draws"),
    "train": (60_000, 2000, "training images, at most 50 000 of them for LeNet-5"),
    "test": (10_000, 500, "test images"),
    "width": (1200, 50, "of the MLP's hidden layers"),
    "channels": (1.0, 0.5, "share of LeNet-5's channels and units"),
    "epochs": (200.0, 2.0, "of mean-field and of SGLD, the first quarter of these not kept"),
    "map_epochs": (60.0, 2.0, "of the MAP and of MC dropout"),
    "member_epochs": (10.0, 1.0, "of each member of the bootstrap ensemble"),
    "nets": (100, 3, "members of the bootstrap ensemble"),
    "members": (10, 3, "of LeNet-5's ensemble"),
    "lenet_steps": (5000, 50, "of LeNet-5's networks"),
    "vi_steps": (30_000, 50, "of LeNet-5's mean-field"),
    "draws": (100, 10, "of the weights, 10 at most for LeNet-5"),
    "particles": (1, 1, "draws in a step of mean-field"),
    "rate": (1e-3, 1e-3, "of Adam"),
    "decay": (1.0, 1.0, "of MC dropout, beside the sum over a batch"),
    "langevin": (5e-5, 5e-4, "step of SGLD on the sum over all images"),
    "preconditioned": (5e-5, 5e-4, "step of the preconditioned one"),
}

Posterior = tuple[Any, Any]  # the program and its posterior


class Row(NamedTuple):
    """A method, and the function that fits it."""

    method: str
    fit: Callable[[], Posterior]
    draws: int


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def lenet5(channels: float) -> nn.Module:
    """The published layers, all convolutions padded (544 954 weights at 1, most of the fourth)."""
    c1, c2, c3, d = (max(2, int(channels * size)) for size in (6, 16, 120, 84))
    return nn.Sequential(
        *(nn.Conv2d(1, c1, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(c2, c3, 5, padding=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(49 * c3, d), nn.ReLU(), nn.Linear(d, 10)),
    )


def mixture(name: str, module: nn.Module, parameter: Tensor) -> Any:
    """0.75 Normal(0, 0.1) + 0.25 Normal(0, 0.0005) of each weight."""
    shape = parameter.shape
    weights = dist.Categorical(torch.tensor([0.75, 0.25]).expand(*shape, 2))
    parts = dist.Normal(0.0, torch.tensor([0.1, 0.0005]).expand(*shape, 2))
    return dist.MixtureSameFamily(weights, parts).to_event(len(shape))


class Fits:
    """The posteriors of one network on one set, by one seed's images and batches."""

    def __init__(self, network: Callable[[], nn.Module], data: Part, batch: int, options: Any):
        self._network = lambda: network().to(options.device)
        self._data, self._batch, self._options = data, batch, options

    def _program(self, prior: Any, size: int | None = None) -> Any:
        count = size or len(self._data.x)
        return bdl.models.Classification(bdl.bayesianize(self._network(), prior), num_data=count)

    def _trained(self, model: Any, guide: Any, steps: int, **more: Any) -> Posterior:
        data = more.pop("data", self._data)
        guide.prototype(data.x[:2], data.y[:2])
        train(
            model, guide, *data, steps=steps, learning_rate=self._options.rate,
            batch_size=self._batch, progress=None, backend=self._options.backend, **more,
        )  # fmt: skip
        return model, guide

    def steps(self, epochs: float) -> int:
        return max(1, int(epochs * (len(self._data.x) // self._batch)))

    def points(self, prior: Any, steps: int, *, nets: int = 1, share: float = 1.0) -> Posterior:
        """One network or several, each trained on a random share of the images."""
        found = []
        for _ in range(nets):
            rows = torch.randperm(len(self._data.x))[: int(share * len(self._data.x))]
            rows = rows.to(self._data.x.device)
            part = Part(*(tensor[rows] for tensor in self._data))
            model = self._program(prior, len(rows))
            guide = bdl.guides.AutoMAP(model)
            self._trained(model, guide, steps, data=part)
            found.append({name: value.detach() for name, value in guide.median().items()})
        return model, {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def mean_field(
        self, prior: Any, steps: int, init_scale: float, estimator: str | None = None
    ) -> Posterior:
        model = self._program(prior)
        guide = bdl.guides.AutoMeanField(model, init_scale=init_scale)
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(
            num_particles=self._options.particles, estimator=estimator
        )
        return self._trained(model, guide, steps, elbo=elbo)

    def dropout(self, prior: Any, steps: int) -> Posterior:
        model = self._program(prior)
        return self._trained(model, bdl.guides.AutoMCDropout(model, p=0.5), steps)

    def langevin(self, prior: Any, steps: int, kernel: Any, size: float, seed: int) -> Posterior:
        """A chain whose draws are spread over the last three quarters of its steps."""
        model, warmup = self._program(prior), max(2, steps // 4)
        count = min(self._options.draws, steps - warmup)
        thinning = (steps - warmup) // count
        return model, bdl.mcmc.sgmcmc(
            model, tuple(self._data),
            kernel=kernel(step_size=size, thinning=thinning, adapt_step_size=True),
            num_warmup=warmup, num_samples=count, batch_size=self._batch, seed=seed,
            init="network", progress=False,
        )  # fmt: skip


def of_perceptron(data: Part, seed: int, options: argparse.Namespace) -> Iterator[Row]:
    fits = Fits(lambda: perceptron(options.width), data, options.batch, options)
    normal, draws = priors.Normal(0.1), options.draws
    steps, few = fits.steps(options.epochs), fits.steps(options.map_epochs)
    yield Row("MAP", lambda: fits.points(normal, few), 1)
    yield Row(
        "bootstrap ensemble",
        lambda: fits.points(
            normal, fits.steps(0.8 * options.member_epochs), nets=options.nets, share=0.8
        ),
        options.nets,
    )
    for name, prior in (("Normal", normal), ("mixture", mixture), ("Laplace", priors.Laplace(0.1))):
        yield Row(
            f"mean-field, {name}",
            lambda prior=prior: fits.mean_field(prior, steps, options.init_scale),
            draws,
        )
    yield Row(
        "local reparameterization",
        lambda: fits.mean_field(normal, steps, options.init_scale, "local_reparameterization"),
        draws,
    )
    decay = priors.Normal.from_weight_decay(options.decay / options.batch, len(data.x))
    yield Row("MC dropout", lambda: fits.dropout(decay, few), draws)
    kernels = (
        ("SGLD", bdl.mcmc.SGLD, options.langevin),
        ("preconditioned SGLD", bdl.mcmc.PSGLD, options.preconditioned),
    )
    for name, kernel, size in kernels:
        yield Row(
            name,
            lambda kernel=kernel, size=size: fits.langevin(normal, steps, kernel, size, seed),
            draws,
        )


def of_lenet(data: Part, seed: int, options: argparse.Namespace) -> Iterator[Row]:
    data = Part(*(part[:50_000] for part in data))
    fits = Fits(lambda: lenet5(options.channels), data, min(256, len(data.x)), options)
    weak, steps, members = priors.Normal(1.0), options.lenet_steps, options.members
    learned = priors.learnable(priors.PerLayer(priors.Normal(1.0)))
    yield Row("deterministic", lambda: fits.points(weak, steps), 1)
    yield Row(
        "mean-field",
        lambda: fits.mean_field(learned, options.vi_steps, 1e-3, "flipout"),
        min(10, options.draws),
    )
    yield Row("ensemble", lambda: fits.points(weak, steps, nets=members), members)


def measured(row: Row, test: Part) -> dict[str, Any]:
    clock = time.process_time if test.x.device.type == "cpu" else time.perf_counter
    start = clock()
    model, posterior = row.fit()
    middle = clock()
    predictive = bdl.Predictive(model, posterior, num_samples=row.draws)
    found = over(lambda x: predictive.mean(x)["y"].mean(0), test.x)
    nll, accuracy = log_loss(found, test.y), float(metrics.accuracy(found, test.y))
    return {
        "method": row.method, "log likelihood": -nll * len(test.y), "error": 100 * (1 - accuracy),
        "NLL": nll, "accuracy": accuracy,
        "ECE": float(metrics.expected_calibration_error(found, test.y)),
        "fit": middle - start, "predict": clock() - middle,
    }  # fmt: skip


def table(done: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over seeds with their standard errors, by table and method, and published figures."""
    found: dict[str, dict[str, Any]] = {}
    for title, published in PUBLISHED.items():
        for method, figures in published.items():
            mine = [row for row in done if (row["table"], row["method"]) == (title, method)]
            entry: dict[str, Any] = {"published": figures, "seeds": len(mine)}
            for name in (*SCORES, "fit", "predict") if mine else ():
                values = [row[name] for row in mine]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(mine) > 1 else None
                entry[name] = {"mean": statistics.mean(values), "error": error}
            found[f"{title}: {method}"] = entry
    return found


def text(title: str, entry: dict[str, Any]) -> str:
    parts = [f"{title:44}"]
    for name, value in entry["published"].items():
        ours = "-"
        if name in entry:
            error = entry[name]["error"]
            ours = f"{entry[name]['mean']:.4g}" + (f" ± {error:.2g}" if error is not None else "")
        parts.append(f"{name} {ours} (published {value:.4g})")
    if entry["seeds"]:
        parts.append(f"{entry['fit']['mean']:.0f} + {entry['predict']['mean']:.0f} s")
    return "  ".join(parts)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--tables", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--only", nargs="+", help="methods to run, all by default")
    parser.add_argument("--batch", type=int, default=128, help="images of the MLP's steps (128)")
    parser.add_argument("--init-scale", type=float, default=0.08, help="of mean-field (0.08)")
    parser.add_argument("--device", default="cpu", help="of the networks and images (cpu)")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "jax"))
    options = harness.parse_sizes(parser, SIZES)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["table"], row["method"], row["seed"]) for row in done}
    for seed in range(options.seeds):
        for title in options.tables:
            network, name = title.split(", ")
            data = Images(options.data, name, train=options.train, test=options.test)
            train_part, test_part = (
                Part(*(tensor.to(options.device) for tensor in part))
                for part in (data.train, data.test)
            )
            rows = of_perceptron if network == "MLP" else of_lenet
            for row in rows(train_part, seed, options):
                chosen = options.only is None or row.method in options.only
                if not chosen or (title, row.method, seed) in known:
                    continue
                pyro.clear_param_store()
                pyro.set_rng_seed(seed)
                one = {"table": title, "seed": seed, **measured(row, test_part)}
                harness.write_rows(options.rows, [one])
                done.append(one)
                if not options.json:
                    print(json.dumps(one), flush=True)
    found = table(done)
    shortened = {
        name: getattr(options, name) for name, (full, *_) in SIZES.items()
        if name != "seeds" and getattr(options, name) != full
    }  # fmt: skip
    if options.json:
        print(json.dumps({"machine": harness.machine(), "shortened": shortened, "rows": found}))
        return
    print(harness.machine())
    print("shortened:", ", ".join(f"{name} {value}" for name, value in shortened.items()) or "no")
    for title, entry in found.items():
        print(text(title, entry))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        main()
