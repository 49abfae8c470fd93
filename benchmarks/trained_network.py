"""What a posterior adds to a classifier that is already trained.

    python benchmarks/trained_network.py --quick
    python benchmarks/trained_network.py --data DATA
    python benchmarks/trained_network.py --scales

A perceptron, a convolutional network, a residual network with batch normalization and a transformer
are trained by plain torch (AdamW) on eight of ten classes: of scikit-learn's digits, and with
``--data``, a folder with ``fashion_mnist.npz`` of the Keras layout, of clothes. Images of the other
two classes are out of distribution. Then everything is fitted to the trained network, without
another step of training but for SWAG and the other four members of the ensemble. Held-out rows
choose the temperature, and the width of the Laplace approximation that is the default here.

NLL, its difference from that of the network itself, with the standard error of the mean over test
rows, and ECE are of test rows; the AUROCs are of the predictive entropy and of the disagreement of
draws (mutual information); seconds are those after the network's own training. laplace-torch is
measured where it is installed (``pip install --no-deps laplace-torch``, and what it imports).

``--scales`` shows why the evidence does not choose it: what the evidence, an ELBO and held-out rows
say of each scale of the prior, for the full matrix, Kronecker factors and the last layer.
"""

import argparse
import copy
import functools
import importlib
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import pyro
import torch
from images import entropy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl
from pyro_bdl import metrics, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import collect_swag

CLASSES = 8
DEFAULT = "Laplace, default"
_RESAMPLES = 200


class Data(NamedTuple):
    """Training, held-out and test rows of eight classes, and images of the other two."""

    train: TensorDataset
    held_out: TensorDataset
    test: TensorDataset
    elsewhere: Tensor
    size: int


def digits() -> Data:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return _split(x[order].reshape(-1, 8, 8) / 16, y[order], (800, 200))


def clothes(folder: Path, train: int) -> Data:
    """Images averaged over 2 x 2 pixels."""
    with np.load(folder / "fashion_mnist.npz") as file:
        x, y = file["x_train"][: 2 * train + 4000], file["y_train"][: 2 * train + 4000]
    pooled = x.reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255
    return _split(pooled, y, (train, train // 4))


def _split(x: Any, y: Any, sizes: tuple[int, int]) -> Data:
    images = torch.tensor(x, dtype=torch.float32)[:, None]
    targets = torch.tensor(y, dtype=torch.long)
    known = targets < CLASSES
    inside, classes = images[known][:4000], targets[known][:4000]
    ends = [0, sizes[0], sum(sizes), len(inside)]
    parts = [TensorDataset(inside[a:b], classes[a:b]) for a, b in pairwise(ends)]
    return Data(*parts, images[~known][:500], images.shape[-1])


class Block(nn.Module):
    """Two convolutions with batch normalization around a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.branch = nn.Sequential(*layers[:2], nn.ReLU(), *layers[2:])

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.branch(x)).relu()


def residual(size: int, width: int = 16) -> nn.Module:
    stem = nn.Conv2d(1, width, 3, 1 if size < 10 else 2, 1, bias=False)
    blocks = [stem, nn.BatchNorm2d(width), nn.ReLU(), Block(width), Block(width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def convolutional(size: int) -> nn.Module:
    side = -(-size // 4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * side**2, 32), nn.ReLU(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def perceptron(size: int, width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size**2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


class Transformer(nn.Module):
    """One block of self-attention over patches of the image."""

    def __init__(self, size: int, width: int = 32) -> None:
        super().__init__()
        self.side = 2 if size < 10 else 7
        self.patches = nn.Linear(self.side**2, width)
        self.positions = nn.Parameter(0.02 * torch.randn((size // self.side) ** 2, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(-2, self.side, self.side).unfold(-2, self.side, self.side)
        x = self.patches(patches.flatten(-2).flatten(1, -2)) + self.positions
        query, key, value = self.into(self.norm1(x)).chunk(3, -1)
        x = x + self.out((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value)
        x = x + self.down(self.up(self.norm2(x)).relu())
        return self.classes(self.norm3(x).mean(1))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "MLP": perceptron,
    "CNN": convolutional,
    "ResNet": residual,
    "transformer": Transformer,
}
EPOCHS = {"transformer": 2}  # times those asked for


def trained(
    name: str, seed: int, data: Data, options: argparse.Namespace, **sizes: int
) -> nn.Module:
    torch.manual_seed(seed)
    network = NETWORKS[name](data.size, **sizes)
    loader = DataLoader(data.train, batch_size=64, shuffle=True)
    epochs = EPOCHS.get(name, 1) * options.epochs
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=options.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(loader)
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


SCALES = (1.0, 0.3, 0.1, 0.03, 0.01)
NARROW = {"MLP": 16, "ResNet": 6}  # whose full matrix is small


def by_scale(name: str, options: argparse.Namespace) -> Iterator[str]:
    """Lines on what the evidence, a bound and held-out rows say of a prior's scale.

    The bound is the ELBO of the linearized posterior around the trained weights, with the
    likelihood of the training rows averaged over draws of their outputs.
    """
    data = digits()
    network = trained(name, 0, data, options, width=NARROW[name])
    (x, y), held_out, test = data.train.tensors, data.held_out.tensors, data.test.tensors
    loss = float(losses(network(test[0]).softmax(-1), test[1]).mean())
    p = network(x).softmax(-1)
    sure = float((p * (1.0 - p)).amax(1).median())
    yield f"{name}, digits, width {NARROW[name]}: NLL {loss:.4f}, median p (1 - p) {sure:.2g}"
    for label, more in {
        "full": {"structure": "full"}, "kron": {"structure": "kron"},
        "last layer": {"structure": "full", "subset": "last-layer"},
    }.items():  # fmt: skip
        model = program(network, data, options, prior=priors.learnable(priors.Normal(1.0)))
        posterior = bdl.guides.AutoLaplaceGGN(model, **more).laplace_approximation((x, y))
        (key,) = posterior.hyperparameters()
        size, weights = posterior.subset.size, posterior.subset.take(posterior.loc)
        yield f"  {label}: {size} weights\n" + "".join(
            f"{head:>11}"
            for head in (
                "prior sd",
                "evidence",
                "ELBO",
                "sd of rows",
                "held-out",
                "NLL",
                "probit",
                "MC",
            )
        )
        for scale in SCALES:
            pyro.get_param_store()[key] = torch.tensor(scale)
            posterior.refresh()
            with torch.no_grad():
                evidence = float(bdl.evidence.log_marginal_likelihood(posterior))
                predictive = bdl.LinearizedPredictive(model, posterior, options.draws)
                expected = float(predictive.log_likelihood(x, y)["y"].mean(0).sum())
                trace = float(posterior.precision.variances().sum())
                divergence = 0.5 * (
                    (trace + float(weights @ weights)) / scale**2 - size
                    + float(posterior.precision.logdet()) + 2.0 * size * math.log(scale)
                )  # fmt: skip
                spread = predictive.parameter_moments(x)["y"].variance["logits"].sqrt().median()
                scores = [
                    float(losses(predictive.probabilities(part[0], method=by)["y"], part[1]).mean())
                    for part, by in (
                        (held_out, "centered-probit"), (test, "centered-probit"),
                        (test, "probit"), (test, "monte-carlo"),
                    )
                ]  # fmt: skip
            yield (
                f"{scale:11}{evidence:11.1f}{expected - divergence:11.1f}{spread:11.2f}"
                + "".join(f"{score:11.4f}" for score in scores)
            )
        pyro.get_param_store()[key] = torch.tensor(0.3)
        posterior.refresh()
        chosen = []
        for linearized in (False, True):
            found = bdl.evidence.maximize(posterior, linearized=linearized, progress=False)
            chosen.append(float(*found.hyperparameters.values()))
        yield "    by the evidence at the weights {:.2g}, at the linear optimum {:.2g}".format(
            *chosen
        )


Draws = Callable[[Tensor], Tensor]  # class probabilities (S, N, C)
Probabilities = Callable[[Tensor], Tensor]  # their means (N, C)
Method = tuple[Probabilities, Draws | None, str]  # what is printed of it comes last


def program(network: nn.Module, data: Data, options: argparse.Namespace, **more: Any) -> Any:
    """With the prior that belongs to the weight decay; ``more`` are options of bayesianize."""
    size = len(data.train)
    prior = more.pop("prior", None) or priors.Normal.from_weight_decay(options.decay, size)
    return bdl.models.Classification(bdl.bayesianize(network, prior, **more), num_data=size)


def linearized(model: Any, posterior: Any, options: argparse.Namespace, said: str = "") -> Method:
    predictive = bdl.LinearizedPredictive(model, posterior, num_samples=options.draws)
    return (
        lambda x: predictive.probabilities(x)["y"],
        lambda x: predictive.mean(x)["y"],
        said,
    )


def drawn(model: Any, posterior: Any, options: argparse.Namespace) -> Method:
    predictive = bdl.Predictive(model, posterior, num_samples=options.draws)
    return lambda x: predictive.mean(x)["y"].mean(0), lambda x: predictive.mean(x)["y"], ""


class Diverged(Exception):
    """SGD that diverged at the rate of SWAG."""


def methods(
    name: str, network: nn.Module, data: Data, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Method]]]:
    """Name of each method, and the function that fits it."""
    loader = DataLoader(data.train, batch_size=64)
    held_out = data.held_out.tensors

    @torch.no_grad()
    def softmax(x: Tensor, scale: float = 1.0) -> Tensor:
        return (network(x) / scale).softmax(-1)

    def temperature() -> Method:
        x, y = held_out
        scales = torch.logspace(-1.0, 1.0, 201).tolist()
        best = min(scales, key=lambda scale: float(losses(softmax(x, scale), y).mean()))
        return lambda x: softmax(x, best), None, f"temperature {best:.2f}"

    def dropout() -> Method:
        model = program(network, data, options)
        guide = bdl.guides.AutoMCDropout(model, p=0.1).prototype(*data.train.tensors)
        return drawn(model, guide, options)

    def laplace(subset: Any = None) -> Method:
        model = program(network, data, options)
        guide = bdl.guides.AutoLaplaceGGN(model, subset=subset)
        posterior = guide.laplace_approximation(loader, held_out=held_out)
        return linearized(model, posterior, options, str(posterior.held_out))

    def evidence() -> Method:
        model = program(network, data, options, prior=priors.learnable(priors.Normal(1.0)))
        posterior = bdl.guides.AutoLaplaceGGN(model).laplace_approximation(loader)
        found = bdl.evidence.maximize(posterior, linearized=False)
        (scale,) = found.hyperparameters.values()
        return linearized(model, posterior, options, f"prior sd {float(scale):.2g}")

    def last_layer() -> Method:
        model = program(network, data, options, prior=priors.learnable(priors.Normal(1.0)))
        guide = bdl.guides.AutoLastLayer(model)
        posterior = guide.laplace_approximation(data.train.tensors)
        bdl.evidence.maximize(posterior)
        return linearized(model, posterior, options)

    def swag() -> Method:
        model = program(network, data, options)
        guide = bdl.guides.AutoSWAG(model).prototype(*data.train.tensors)
        try:
            collect_swag(model, guide, *data.train.tensors, snapshots=20, learning_rate=0.01)
        except ValueError as error:
            raise Diverged(str(error)) from error
        return drawn(model, guide.swag_approximation(), options)

    def ensemble() -> Method:
        members = [network, *(trained(name, seed, data, options) for seed in range(1, 5))]

        @torch.no_grad()
        def each(x: Tensor) -> Tensor:
            return torch.stack([member(x).softmax(-1) for member in members])

        return lambda x: each(x).mean(0), each, ""

    def laplace_torch(part: str = "all", said: str = "all weights") -> Method:
        kind = peer_laplace().Laplace
        try:
            theirs = kind(
                copy.deepcopy(network), "classification",
                subset_of_weights=part, hessian_structure="kron",
            )  # fmt: skip
            theirs.fit(loader)
            theirs.optimize_prior_precision(method="marglik")
            predict = functools.partial(theirs, pred_type="glm", link_approx="probit")
            predict(held_out[0][:2])
        except Exception as error:  # whatever it cannot do is said in the table
            if part != "all":
                raise
            refused = f"last layer (all weights: {type(error).__name__})"
            return laplace_torch("last_layer", refused)
        scale = float(theirs.prior_precision.mean()) ** -0.5
        return lambda x: predict(x).detach(), None, f"{said}, prior sd {scale:.2g}"

    yield "softmax", lambda: (softmax, None, "")
    yield "temperature scaling", temperature
    yield "MC dropout, p = 0.1", dropout
    yield DEFAULT, laplace
    yield "the same, last layer", lambda: laplace("last-layer")
    yield "Laplace, evidence", evidence
    yield "last layer, evidence", last_layer
    yield "laplace-torch, evidence", laplace_torch
    yield "SWAG", swag
    yield "ensemble of 5", ensemble


def peer_laplace(folder: str | None = None) -> Any:
    """The package laplace-torch, whose module has the name of a script in this folder.

    :param folder: where it is installed, if not beside the others.
    """
    here, path = str(Path(__file__).parent), list(sys.path)
    try:
        sys.path[:] = [entry for entry in path if entry not in (here, "")]
        sys.path += [folder] if folder else []
        return importlib.import_module("laplace")
    finally:
        sys.path[:] = path


def losses(found: Tensor, y: Tensor) -> Tensor:
    """Negative log likelihood of every row, (N,)."""
    return -found.double().gather(1, y[:, None])[:, 0].clamp(min=1e-30).log()


def calibration_error(found: Tensor, y: Tensor) -> tuple[float, float]:
    """The expected calibration error, and its standard deviation over resampled rows."""
    noise = torch.Generator().manual_seed(0)
    chosen = [torch.randint(len(y), (len(y),), generator=noise) for _ in range(_RESAMPLES)]
    again = [metrics.expected_calibration_error(found[rows], y[rows]) for rows in chosen]
    ece = float(metrics.expected_calibration_error(found, y))
    return ece, float(torch.stack(again).std())


def measure(method: Method, data: Data, own: Tensor | None) -> tuple[dict[str, Any], Tensor]:
    """The scores of a method, and its losses at the test rows.

    :param own: those of the network itself.
    """
    probabilities, draws, said = method
    x, y = data.test.tensors
    known, new = (
        torch.cat([probabilities(part).detach().double() for part in images.split(500)])
        for images in (x, data.elsewhere)
    )
    loss = losses(known, y)
    change = loss - (loss if own is None else own)
    ece, ece_error = calibration_error(known, y)
    row: dict[str, Any] = {
        "NLL": float(loss.mean()),
        "NLL error": float(loss.std() / len(loss) ** 0.5),
        "change": float(change.mean()),
        "change error": float(change.std() / len(change) ** 0.5),
        "ECE": ece, "ECE error": ece_error,
        "OOD": float(metrics.auroc(entropy(known), entropy(new))),
        "said": said,
    }  # fmt: skip
    if draws is not None:
        here, there = (
            torch.cat(
                [metrics.entropy_parts(draws(part).detach()).epistemic for part in i.split(500)]
            )
            for i in (x, data.elsewhere)
        )
        row["OOD by draws"] = float(metrics.auroc(here, there))
    return row, loss


def text(label: str, row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"  {label:24} skipped: {row['skipped']}"
    draws = f"{row['OOD by draws']:.3f}" if "OOD by draws" in row else ""
    return (
        f"  {label:24}{row['NLL']:7.4f}  {row['change']:+.4f} ± {row['change error']:.4f}"
        f"{row['ECE']:8.3f}{row['OOD']:8.3f}{draws:>8}{row['seconds']:8.1f}  {row['said']}"
    ).rstrip()


def harms(rows: dict[str, dict[str, Any]]) -> bool:
    """True if the default is worse than the network by more than a standard error."""
    own, default = rows["softmax"], rows[DEFAULT]
    of_loss = default["NLL"] - own["NLL"] > own["NLL error"]
    return of_loss or default["ECE"] - own["ECE"] > own["ECE error"]


def gained(found: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """What each method adds to the AUROC of softmax's entropy, by its own entropy and by the
    disagreement of its draws: mean and sd over the networks, the least and the most."""
    gains: dict[str, list[float]] = {}
    for rows in found.values():
        own = next(iter(rows.values()))["OOD"]
        for label, row in rows.items():
            for key, words in (("OOD", "entropy"), ("OOD by draws", "draws")):
                if key in row:
                    gains.setdefault(f"{label}, {words}", []).append(row[key] - own)
    return {
        label: [float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else 0.0, min(v), max(v)]
        for label, v in gains.items()
    }


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="folder of fashion_mnist.npz; digits alone if not"
    )
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--decay", type=float, default=1e-4, help="weight decay (1e-4)")
    parser.add_argument(
        "--scales", action="store_true", help="what chooses the prior's scale, on narrow networks"
    )
    parser.add_argument("--methods", nargs="+", help="names of the rows, without the first")
    sizes = {
        "seeds": (1, 1, "trainings of each network"),
        "epochs": (50, 20, "passes over the data in training"),
        "train": (2000, 800, "images of clothes"),
        "draws": (100, 30, "of the posteriors"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    if options.scales:
        for name in NARROW:
            for line in by_scale(name, options):
                print(line, flush=True)
        return
    sets = {"digits": digits()}
    if options.data is not None:
        sets["clothes"] = clothes(options.data, options.train)
    found: dict[str, dict[str, Any]] = {}
    if not options.json:
        print(harness.machine())
    for kind, data in sets.items():
        for name, seed in itertools.product(options.networks, range(options.seeds)):
            start = time.perf_counter()
            network = trained(name, seed, data, options)
            title = f"{name}, {kind}" + (f", seed {seed}" if seed else "")
            rows = found[title] = {}
            if not options.json:
                count = sum(parameter.numel() for parameter in network.parameters())
                seconds = time.perf_counter() - start
                print(f"{title}: {count} weights, {len(data.train)} images, {seconds:.0f} s")
                print(
                    f"  {'':24}    NLL     from softmax's     ECE     OOD   draws seconds",
                    flush=True,
                )
            own = None
            for label, fit in methods(name, network, data, options):
                if options.methods and own is not None and label not in options.methods:
                    continue
                start = time.perf_counter()
                try:
                    method = fit()
                except (ImportError, Diverged) as error:
                    rows[label] = {"skipped": str(error)}
                else:
                    seconds = time.perf_counter() - start
                    rows[label], loss = measure(method, data, own)
                    rows[label]["seconds"] = seconds
                    own = loss if own is None else own
                if not options.json:
                    print(text(label, rows[label]), flush=True)
    gains = gained(found)
    worse = [title for title, rows in found.items() if harms(rows)]
    if options.json:
        print(
            json.dumps(
                {"machine": harness.machine(), "networks": found, "harmed": worse, "gains": gains}
            )
        )
        return
    if len(found) > 1:
        print("AUROC less that of the entropy of softmax: mean and sd over networks, least, most")
        for label, values in gains.items():
            print(f"  {label:36} " + "  ".join(f"{value:6.3f}" for value in values))
    print(
        "The default is worse than the network by more than a standard error, in NLL or ECE, on "
        f"{', '.join(worse) or 'none'} of {len(found)} networks."
    )


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a trained network is at no maximum
        warnings.simplefilter("ignore", UserWarning)  # of laplace-torch
        main()
