"""Posteriors over the adapters of a tiny transformer, adapted from upright digits to turned ones.

A transformer reads the rows of a digit, at half the resolution 14 of 14 numbers, as a sequence. It
is trained on upright digits, gets low-rank adapters beside all of its linear layers, and these
learn from a few turned digits: as MAP, or with a posterior over them (mean-field by Adam and by
IVON, Laplace with Kronecker factors, the last layer's adapter). MAP of all weights, whose prior is
Normal around the trained ones, is fine-tuning without adapters. Each takes the prior scale of a
grid that predicts held-out turned digits best, and is scored on other ones. Means over seeds (of
training, adapters and draws, with other digits to learn from), after +- their standard errors; log
likelihoods are in nats per digit.

    python benchmarks/lora.py --data mnist.npz

``--data`` takes an .npz with ``x_train`` (N, 28, 28), ``y_train`` (N,), ``x_test`` and ``y_test``,
such as Keras' mnist.npz.
"""

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np
import torch
from scipy.ndimage import rotate
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl import metrics
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

BATCH = 50
SCORES = ("log likelihood", "ECE", "accuracy")
Data = tuple[Tensor, Tensor]
Probabilities = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Attention of two heads and a network of one hidden layer, each beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(x)
        heads = [
            layer(a).unflatten(-1, (2, -1)).transpose(-3, -2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.narrow(self.wide(self.norm2(x)).relu())


class Transformer(nn.Module):
    """Logits (N, 10) of digits (N, 14, 14), whose rows are the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(14, width)
        self.place = nn.Parameter(0.1 * torch.randn(14, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place)).mean(-2))


class Digits:
    """Upright digits, turned ones to learn from, held-out and test ones."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        with np.load(options.data) as data:
            order = np.random.default_rng(seed).permutation(len(data["x_train"]))
            x, y = data["x_train"][order], data["y_train"][order]
            x_test = data["x_test"][: options.test_size]
            y_test = data["y_test"][: options.test_size]
        ends = np.cumsum([options.upright, options.train_size, options.held_out])
        upright, turned, held = (slice(a, b) for a, b in zip((0, *ends), ends, strict=False))
        self.upright = self._tensors(x[upright], y[upright], 0.0)
        self.train = self._tensors(x[turned], y[turned], options.angle)
        self.held_out = self._tensors(x[held], y[held], options.angle)
        self.test = self._tensors(x_test, y_test, options.angle)

    @staticmethod
    def _tensors(x: Any, y: Any, angle: float) -> Data:
        x = x / np.float32(255)
        if angle:
            x = rotate(x, angle, axes=(2, 1), reshape=False, order=1)
        halved = nn.functional.avg_pool2d(torch.tensor(x)[:, None], 2)[:, 0]
        return halved, torch.tensor(y.astype(np.int64))


def pretrained(digits: Digits, options: argparse.Namespace) -> nn.Module:
    """The transformer after Adam on upright digits."""
    net = Transformer(options.width)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    steps = options.upright_steps
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x, y = digits.upright
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    return net.eval()


# Methods ------------------------------------------------------------------------------------------


def fitted(guide: Any, model: Any, digits: Digits, options: argparse.Namespace, **changes: Any):
    batch = min(BATCH, options.train_size)
    train(model, guide, *digits.train, steps=options.steps, batch_size=batch, **changes)
    return guide


def drawn(model: Any, guide: Any, draws: int) -> Probabilities:
    predictive = bdl.Predictive(model, guide, num_samples=draws)
    return lambda x: predictive.mean(x)["y"].mean(0)


def program(net: nn.Module, prior: Any, digits: Digits) -> Any:
    return bdl.models.Classification(bdl.bayesianize(net, prior), num_data=len(digits.train[0]))


def all_weights(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = program(net, bdl.priors.Pretrained(scale), digits)
    return drawn(model, fitted(bdl.guides.AutoMAP(model), model, digits, options), 1)


def adapters(net: nn.Module, scale: float, digits: Digits, options: Any) -> Any:
    return program(bdl.nn.lora(net, options.rank), bdl.priors.Normal(scale), digits)


def map_of_adapters(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = adapters(net, scale, digits, options)
    return drawn(model, fitted(bdl.guides.AutoMAP(model), model, digits, options), 1)


def mean_field(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = adapters(net, scale, digits, options)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.01)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(estimator="flipout")
    fitted(guide, model, digits, options, elbo=elbo)
    return drawn(model, guide, options.draws)


def ivon(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = adapters(net, scale, digits, options)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.1).prototype(*digits.train)
    fitted(guide, model, digits, options, optimizer=bdl.optim.IVON(guide, lr=0.1))
    return drawn(model, guide, options.draws)


def laplace(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = adapters(net, scale, digits, options)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    posterior = fitted(guide, model, digits, options).laplace_approximation(digits.train)
    predictive = bdl.LinearizedPredictive(model, posterior)
    return lambda x: predictive.probabilities(x)["y"]


def last_layer(net: nn.Module, scale: float, digits: Digits, options: Any) -> Probabilities:
    model = adapters(net, scale, digits, options)
    guide = bdl.guides.AutoLastLayer(model)
    posterior = fitted(guide, model, digits, options).laplace_approximation(digits.train)
    predictive = bdl.LinearizedPredictive(model, posterior)
    return lambda x: predictive.probabilities(x)["y"]


METHODS = {
    "MAP, all weights": all_weights,
    "MAP, adapters": map_of_adapters,
    "mean-field, adapters": mean_field,
    "IVON, adapters": ivon,
    "Laplace (kron), adapters": laplace,
    "last layer's adapter": last_layer,
}


def scores(probabilities: Tensor, y: Tensor) -> tuple[float, ...]:
    """Scores in the order of ``SCORES``."""
    known = probabilities.gather(1, y[:, None]).clamp(min=1e-12)
    return (
        known.log().mean().item(),
        metrics.expected_calibration_error(probabilities, y).item(),
        metrics.accuracy(probabilities, y).item(),
    )


def of_seed(seed: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    torch.manual_seed(seed)
    digits = Digits(options, seed)
    net = pretrained(digits, options)

    def score(predict: Probabilities, data: Data) -> tuple[float, ...]:
        return scores(predict(data[0]), data[1])

    yield "before", {"scores": score(lambda x: net(x).softmax(-1).detach(), digits.test)}
    for name in options.methods:
        started = time.process_time()
        best: tuple[float, float, Probabilities] | None = None
        for scale in options.scales:
            torch.manual_seed(seed)
            predict = METHODS[name](copy.deepcopy(net), scale, digits, options)
            value = score(predict, digits.held_out)[0]
            if best is None or value > best[0]:
                best = value, scale, predict
        assert best is not None
        yield (
            name,
            {
                "scores": score(best[2], digits.test),
                "prior scale": best[1],
                "CPU s": time.process_time() - started,
            },
        )


def summary(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="file of the digits")
    parser.add_argument("--quick", action="store_true", help="two seeds and one prior scale")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--scales", type=float, nargs="*", default=[0.3, 1.0])
    parser.add_argument("--upright", type=int, default=5000, help="upright digits (5000)")
    parser.add_argument("--upright-steps", type=int, default=600)
    parser.add_argument("--train-size", type=int, default=200, help="turned digits (200)")
    parser.add_argument("--held-out", type=int, default=200, help="for the prior scale (200)")
    parser.add_argument("--test-size", type=int, default=500)
    parser.add_argument("--angle", type=float, default=60.0, help="degrees (60)")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150, help="of each adaptation (150)")
    parser.add_argument("--draws", type=int, default=30, help="of a variational posterior (30)")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.scales, options.steps = 2, [0.3], 150
        options.upright_steps = 300
    torch.set_num_threads(options.threads)
    found: dict[str, list[dict[str, Any]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a network is seldom at its maximum
        for number in tqdm(range(options.seeds), desc="seeds", disable=options.json):
            for name, entry in of_seed(options.first_seed + number, options):
                found.setdefault(name, []).append(entry)
    rows = {}
    for name, entries in found.items():
        columns = zip(*(entry["scores"] for entry in entries), strict=True)
        rows[name] = dict(zip(SCORES, map(summary, map(list, columns)), strict=True))
        if name == "before":
            continue
        first = [entry["scores"][0] for entry in entries]
        if name != "MAP, adapters" and "MAP, adapters" in found:
            own = [entry["scores"][0] for entry in found["MAP, adapters"]]
            pairs = zip(first, own, strict=True)
            rows[name]["over MAP of adapters"] = summary([a - b for a, b in pairs])
        rows[name]["prior scales"] = [entry["prior scale"] for entry in entries]
        rows[name]["CPU s"] = statistics.mean(entry["CPU s"] for entry in entries)
    adapted = bdl.nn.lora(Transformer(options.width), options.rank)
    sizes = [p.numel() for p in adapted.parameters()]
    learned = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    results: dict[str, Any] = {"weights": sum(sizes) - learned, "of adapters": learned}
    if options.json:
        harness.show("posteriors over adapters", results | {"posteriors": rows}, True)
        return
    harness.show("posteriors over adapters", results, False)
    for name, row in rows.items():
        parts = [
            f"{key} {value[0]:.3f} +- {value[1]:.3f}" if isinstance(value, tuple)
            else f"{key} {value if isinstance(value, list) else round(value, 1)}"
            for key, value in row.items()
        ]  # fmt: skip
        print(f"  {name:<26} {', '.join(parts)}")


if __name__ == "__main__":
    main()
