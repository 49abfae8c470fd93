"""A variational last layer against the vbll package and the other last layers of this one.

    python benchmarks/variational_last_layer.py --data uci --images folder --json

``--data`` is a folder with ``standard/NAME/data/`` as ``uci.py`` reads it, ``--images`` one with
``fashion_mnist.npz`` of the Keras layout.

On UCI sets a network D-50-50-1 is trained from the same weights, by Adam from 5e-3 down to 0, on
the same batches of 128 rows. All have the prior of fan-in scale on all weights (vbll on the last
layer; on its features the same penalty is added by hand) and no bias in the last layer. They differ
in the noise: a HalfNormal(1) on its standard deviation here, vbll's own Wishart term there; and the
evidence takes all rows in each step. vbll starts from the same last layer and covariance, and a
noise of 1; with ``--own-start`` from its own random ones. Numbers are means over splits of the
negative log density of the target in its own units on the test rows, in nats, and of the root mean
squared error in its units.

On images the features are the 64 last hidden units of a network that was trained on other images;
only last layers are trained, from the same batches and by the same prior, N(0, 2 / 64). vbll has a
Normal noise on the logits besides. Class probabilities are means over 200 draws.

A step is timed in processor time, in turns.
"""

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from harness import in_turns, parse_sizes, parser, repeated
from torch import Tensor, nn
from uci import Split, distinct

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.evidence import LastLayerEvidence
from pyro_bdl.guides import AutoLastLayer, AutoMAP, AutoVariationalLastLayer
from pyro_bdl.metrics import expected_calibration_error

SETS = ("boston", "concrete", "energy", "power")
RATE, BATCH, UNITS, FEATURES, CLASSES, DRAWS = 5e-3, 128, 50, 64, 10, 200

Step = Callable[[Tensor], Tensor]  # the loss of a batch, given its rows


def descend(parameters: list[Tensor], loss: Step, count: int, steps: int) -> Callable[[], None]:
    """A function that takes one step of Adam; its rate falls to 0 over the steps."""
    adam = torch.optim.Adam(parameters, RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: max(0.0, 1.0 - step / steps))
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        rows = torch.randint(count, (min(BATCH, count),), generator=generator)
        adam.zero_grad()
        loss(rows).backward()
        adam.step()
        rate.step()

    return step


# ----------------------------------------------------------------------------- regression


def body(features: int) -> list[nn.Module]:
    first, second = nn.Linear(features, UNITS), nn.Linear(UNITS, UNITS)
    return [first, nn.Tanh(), second, nn.Tanh()]


def penalty(module: nn.Module) -> Tensor:
    """Minus the log density of the weights under the prior of fan-in scale, but for a constant."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    weights = [part.in_features * part.weight.square().sum() for part in layers]
    return 0.5 * torch.stack(weights + [part.bias.square().sum() for part in layers]).sum()


class Regression:
    """The ways to fit one split, each as a step and the predictive after the steps."""

    def __init__(self, split: Any, steps: int, seed: int, own_start: bool) -> None:
        self.split, self.steps, self.count, self.own_start = split, steps, len(split.x), own_start
        torch.manual_seed(seed)
        self.body = body(split.x.shape[1])
        self.last = nn.Linear(UNITS, 1, bias=False)

    def program(self) -> Any:
        made = body(self.split.x.shape[1])
        for mine, theirs in zip(made, self.body, strict=True):
            mine.load_state_dict(theirs.state_dict())
        net = nn.Sequential(*made, nn.Linear(UNITS, 1, bias=False))
        net[-1].load_state_dict(self.last.state_dict())
        noise = dist.HalfNormal(1.0)
        prior = priors.FanIn(1.0)
        return bdl.models.Regression(
            bdl.bayesianize(net, prior=prior), noise=noise, num_data=self.count
        )

    def by_bound(self, kind: Any, elbo: Any) -> tuple[Any, Any, Callable[[], None]]:
        x, y = self.split.x, self.split.y
        model = self.program()
        guide = kind(model).prototype(x[:BATCH], y[:BATCH])

        def loss(rows: Tensor) -> Tensor:
            return elbo.differentiable_loss(model, guide, x[rows], y[rows]) / self.count

        return model, guide, descend(list(guide.parameters()), loss, self.count, self.steps)

    def variational(self) -> Any:
        model, guide, step = self.by_bound(AutoVariationalLastLayer, CompiledELBO())
        return step, lambda: self.linearized(model, guide)

    def plain(self) -> Any:
        bound = TemperedTraceMeanField_ELBO()
        model, guide, step = self.by_bound(AutoVariationalLastLayer, bound)
        return step, lambda: self.linearized(model, guide)

    def laplace(self) -> Any:
        model, guide, step = self.by_bound(AutoLastLayer, CompiledELBO())
        data = self.split.x, self.split.y
        return step, lambda: self.linearized(model, guide.laplace_approximation(data))

    def evidence(self) -> Any:
        data = self.split.x, self.split.y
        model, loss = self.program(), LastLayerEvidence()
        guide = AutoLastLayer(model).prototype(*data)

        def whole(_: Tensor) -> Tensor:
            return loss.differentiable_loss(model, guide, *data) / self.count

        step = descend(list(guide.parameters()), whole, self.count, self.steps)
        return step, lambda: self.linearized(model, guide.laplace_approximation(data))

    def vbll(self) -> Any:
        import vbll

        x, y = self.split.x, self.split.y[:, None]
        features = nn.Sequential(*body(x.shape[1]))
        for mine, theirs in zip(features, self.body, strict=True):
            mine.load_state_dict(theirs.state_dict())
        layer = vbll.Regression(UNITS, 1, 1.0 / self.count, parameterization="dense")
        if not self.own_start:
            with torch.no_grad():
                layer.W_mean.copy_(self.last.weight)
                layer.W_logdiag.fill_(math.log(0.05))
                layer.W_offdiag.zero_()
                layer.noise_logdiag.zero_()

        def loss(rows: Tensor) -> Tensor:
            bound = layer(features(x[rows])).train_loss_fn(y[rows])
            return bound + penalty(features) / self.count

        parameters = [*features.parameters(), *layer.parameters()]
        free = [p for p in parameters if p.requires_grad]

        def predict() -> tuple[Tensor, Tensor]:
            found = layer(features(self.split.x_test)).predictive
            return found.mean[:, 0], found.var[:, 0]

        return descend(free, loss, self.count, self.steps), predict

    def linearized(self, model: Any, guide: Any) -> tuple[Tensor, Tensor]:
        found = bdl.LinearizedPredictive(model, guide).covariance(self.split.x_test)["y"]
        return found.mean[:, 0], found.covariance[:, 0, 0]

    def scores(self, mean: Tensor, variance: Tensor) -> dict[str, float]:
        normal = dist.Normal(mean.double(), variance.double().sqrt())
        y, sd = self.split.y_test.double(), self.split.y_sd
        nll = math.log(sd) - normal.log_prob(y).mean().item()
        return {"nll": nll, "rmse": sd * (y - normal.loc).square().mean().sqrt().item()}


REGRESSIONS = {
    "variational last layer": Regression.variational,
    "vbll": Regression.vbll,
    "Laplace, last layer": Regression.laplace,
    "evidence, last layer": Regression.evidence,
}


def regressions(options: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in options.sets:
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in REGRESSIONS}
        for number in distinct(options.data, "standard", name)[: options.splits]:
            split = Split(options.data, "standard", name, number)
            case = Regression(split, options.steps, number, options.own_start)
            for way, make in REGRESSIONS.items():
                torch.manual_seed(number)
                step, predict = make(case)
                for _ in range(options.steps):
                    step()
                with torch.no_grad():
                    rows[way].append(case.scores(*predict()))
        sides = {way: make(case)[0] for way, make in REGRESSIONS.items()}
        sides["variational last layer, not compiled"] = case.plain()[0]
        result[name] = {
            "rows": case.count,
            "scores": {way: summary(found) for way, found in rows.items()},
            "ms a step": timed(sides, options),
        }
    return result


def summary(found: list[dict[str, float]]) -> dict[str, list[float]]:
    """Means over splits, and their standard errors."""
    values = {key: [row[key] for row in found] for key in found[0]}
    return {
        key: [
            statistics.mean(numbers),
            statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else math.nan,
        ]
        for key, numbers in values.items()
    }


def timed(sides: dict[str, Callable[[], None]], options: Any) -> dict[str, float]:
    runs = {way: repeated(step, options.timed) for way, step in sides.items()}
    seconds = in_turns(runs, options.repeats, clock=time.process_time)
    return {way: 1e3 * value / options.timed for way, value in seconds.items()}


# ----------------------------------------------------------------------------- images


def features_of(options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last hidden units and classes of training images and of test images."""
    with np.load(options.images / "fashion_mnist.npz") as file:
        arrays = {k: torch.from_numpy(file[k]) for k in file.files}
    x, x_test = (arrays[f"x_{part}"].float().flatten(1) / 255 for part in ("train", "test"))
    y, y_test = (arrays[f"y_{part}"].long() for part in ("train", "test"))
    first = len(x) // 3
    hidden = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, FEATURES), nn.Tanh())
    net = nn.Sequential(hidden, nn.Linear(FEATURES, CLASSES))

    def loss(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x[rows]), y[rows])

    step = descend(list(net.parameters()), loss, first, options.image_steps)
    for _ in range(options.image_steps):
        step()
    with torch.no_grad():
        return hidden(x[first:]), y[first:], hidden(x_test), y_test


class Images:
    """The ways to fit a last layer to features, each as a step and the class probabilities."""

    def __init__(self, data: tuple[Tensor, Tensor, Tensor, Tensor], steps: int) -> None:
        (self.x, self.y, self.x_test, self.y_test), self.steps = data, steps
        self.count = len(self.x)

    def program(self) -> Any:
        net = nn.Linear(FEATURES, CLASSES, bias=False)
        network = bdl.bayesianize(net, prior=priors.Normal((2.0 / FEATURES) ** 0.5))
        return bdl.models.Classification(network, num_data=self.count)

    def by_bound(self, kind: Any, **options: Any) -> tuple[Any, Any, Callable[[], None]]:
        model, elbo = self.program(), CompiledELBO()
        guide = kind(model, **options).prototype(self.x[:BATCH], self.y[:BATCH])

        def loss(rows: Tensor) -> Tensor:
            found = elbo.differentiable_loss(model, guide, self.x[rows], self.y[rows])
            return found / self.count

        return model, guide, descend(list(guide.parameters()), loss, self.count, self.steps)

    def probabilities(self, model: Any, guide: Any) -> Tensor:
        logits = bdl.Predictive(model, guide, DRAWS)(self.x_test)["f"]
        return logits.softmax(-1).mean(0)

    def variational(self, **options: Any) -> Any:
        model, guide, step = self.by_bound(AutoVariationalLastLayer, **options)
        return step, lambda: self.probabilities(model, guide)

    def matrix_normal(self) -> Any:
        return self.variational(structure="matrix-normal")

    def map(self) -> Any:
        model, guide, step = self.by_bound(AutoMAP)
        return step, lambda: self.probabilities(model, guide)

    def laplace(self) -> Any:
        model, guide, step = self.by_bound(AutoLastLayer)
        data = self.x, self.y
        return step, lambda: self.probabilities(model, guide.laplace_approximation(data))

    def vbll(self) -> Any:
        import vbll

        layer = vbll.DiscClassification(
            FEATURES, CLASSES, 1.0 / self.count, parameterization="dense"
        )
        free = [p for p in layer.parameters() if p.requires_grad]

        def loss(rows: Tensor) -> Tensor:
            return layer(self.x[rows]).train_loss_fn(self.y[rows])

        step = descend(free, loss, self.count, self.steps)
        return step, lambda: layer.predictive(self.x_test, n_samples=DRAWS)

    def scores(self, probabilities: Tensor) -> dict[str, float]:
        picked = probabilities.gather(1, self.y_test[:, None]).clamp_min(1e-12)
        return {
            "nll": -picked.log().mean().item(),
            "accuracy": (probabilities.argmax(1) == self.y_test).float().mean().item(),
            "ece": float(expected_calibration_error(probabilities, self.y_test)),
        }


IMAGES = {
    "variational last layer, dense": Images.variational,
    "variational last layer, matrix normal": Images.matrix_normal,
    "vbll": Images.vbll,
    "Laplace, last layer": Images.laplace,
    "MAP": Images.map,
}


def images(options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    case = Images(features_of(options), options.image_steps)
    scores = {}
    for way, make in IMAGES.items():
        torch.manual_seed(0)
        step, predict = make(case)
        for _ in range(options.image_steps):
            step()
        with torch.no_grad():
            scores[way] = case.scores(predict())
    sides = {way: make(case)[0] for way, make in IMAGES.items() if "Laplace" not in way}
    return {"rows": case.count, "scores": scores, "ms a step": timed(sides, options)}


def show(results: dict[str, Any]) -> None:
    for name, found in results.items():
        print(f"\n{name}, {found['rows']} rows")
        for way, scores in found["scores"].items():
            cells = []
            for key, value in scores.items():
                shown = f"{value[0]:.3f} ± {value[1]:.3f}" if isinstance(value, list) else value
                cells.append(f"{key} {shown if isinstance(shown, str) else f'{shown:.4f}'}")
            cost = found["ms a step"].get(way)
            print(f"  {way:40s}", *cells, "" if cost is None else f"{cost:.2f} ms", sep="  ")
        print("  ms a step:", {way: round(ms, 2) for way, ms in found["ms a step"].items()})


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--data", type=Path, help="of UCI sets")
    options.add_argument("--images", type=Path)
    options.add_argument("--own-start", action="store_true", help="that of vbll by default")
    options.add_argument("--sets", nargs="*", default=list(SETS))
    sizes = {
        "splits": (3, 1, "of each set"),
        "steps": (700, 20, "on UCI sets"),
        "image_steps": (700, 20, "on images"),
        "timed": (30, 5, "steps of a timed run"),
    }
    chosen = parse_sizes(options, sizes)
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    if chosen.data is not None:
        results |= regressions(chosen)
    if chosen.images is not None:
        results["Fashion-MNIST features"] = images(chosen)
    if chosen.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
