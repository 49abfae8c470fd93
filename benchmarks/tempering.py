"""Mean-field networks of many widths over the temperature (Huix et al. 2022), and its theory.

    python benchmarks/tempering.py --quick --data DATA --figures FOLDER
    python benchmarks/tempering.py --medium --data DATA --figures FOLDER
    python benchmarks/tempering.py --full --data DATA --figures FOLDER

``--data`` is a folder with ``mnist.npz`` and ``fashion_mnist.npz`` of the Keras layout. The network
of one hidden layer is f(x) = 1/N sum_j a_j relu(b_j x + c_j), as in the paper's theory, with the
prior Normal(0, 1/5) for every weight. ``--quick`` takes 2000 images of 14 x 14 pixels and widths up
to 800; ``--medium`` 10 000 of them and widths up to 5000; ``--full`` all 60 000 images of 28 x 28
pixels. All train by Bayes by backprop (one draw of the weights for a batch) and by local
reparameterization. A width's rows and figures are written when it is done. The parts, chosen by
``--parts``:

limit        |ELBO - limit| N / p, which stays bounded as N grows
kl           KL(q* || prior) of trained guides at eta = 1 and at eta = tau p / N
images       scores against the temperature eta, widths as curves
cold         the same for few images, many steps and colder posteriors: overconfidence
resnet       scores of a small residual network on Fashion-MNIST against eta
priors       tempering beside correlated and functional priors, at eta = 1

Each of the paper's statements is checked at a bound and told as "holds" or "does not hold".
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pandas as pd
import torch
from images import Images
from temperature_sweep import Sweep, rows_of
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import temperature
from pyro_bdl.elbo import MeanFieldLimit, TemperedTraceMeanField_ELBO
from pyro_bdl.plots import temperature_curves
from pyro_bdl.training import train

PRIOR = bdl.priors.Normal(math.sqrt(0.2))
TAUS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ETAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
REFERENCE_TAU = 1e-3  # at which widths are compared: below it the scores are flat
COLD_TAUS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
PARTS = ("limit", "kl", "images", "cold", "resnet", "priors")
ESTIMATORS = ("bayes_by_backprop", "local_reparameterization")


class Averaged(nn.Module):
    """f(x) = 1/N sum_j a_j relu(b_j x + c_j)."""

    def __init__(self, inputs: int, width: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, width, bias=bias)
        self.out = nn.Linear(width, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()) / self.hidden.out_features


class Residual(nn.Module):
    """A residual network of three stages with one block each, without normalization."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        sizes = [channels, 2 * channels, 4 * channels]
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.steps, self.blocks = nn.ModuleList(), nn.ModuleList()
        before = channels
        for size in sizes:
            self.steps.append(nn.Conv2d(before, size, 3, stride=2, padding=1))
            self.blocks.append(nn.Conv2d(size, size, 3, padding=1))
            before = size
        self.out = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for step, block in zip(self.steps, self.blocks, strict=True):
            x = step(x).relu()
            x = x + block(x).relu()
        return self.out(x.mean((-2, -1)))


def images_of(options: argparse.Namespace, name: str, train: int) -> Images:
    return Images(options.data, name, train=train, test=options.tests, pooled=options.pooled)


def classifier(net: nn.Module, count: int, prior: Any = PRIOR) -> nn.Module:
    return bdl.models.Classification(bdl.bayesianize(net, prior), num_data=count)


# The paper's figures


def images(
    options: argparse.Namespace, name: str, estimator: str, **changed: Any
) -> Iterator[Sweep]:
    """The sweep over the widths up to each one, so that a run that is stopped keeps its rows."""
    count, widths = changed.pop("images", options.images), changed.pop("widths", options.widths)
    taus = changed.pop("taus", options.taus)
    data = images_of(options, name, count)
    x, x_test, ood = (part.flatten(1) for part in (data.train.x, data.test.x, data.elsewhere))
    settings = {
        "guide": lambda model: bdl.guides.AutoMeanField(model, init_scale=0.1),
        "ood": ood,
        "steps": options.steps,
        "learning_rate": 0.02,
        "batch_size": min(options.batch, len(x)),
        "estimator": None if estimator == "bayes_by_backprop" else estimator,
        "num_samples": options.draws,
    }
    found = []
    for width in widths:
        etas = {1.0, *(temperature.overparameterized(tau, len(x), width) for tau in taus)}
        model = classifier(Averaged(x.shape[1], width, 10), len(x))
        parts = (x, data.train.y), (x_test, data.test.y)
        found.append(rows_of(model, width, etas, *parts, **(settings | changed)))
        yield Sweep(pd.concat(found, ignore_index=True), len(x))


def statements(found: Sweep) -> dict[str, Any]:
    """The paper's statements about its figures, in numbers."""
    frame = found.frame
    bayes = frame[frame.eta == 1.0].set_index("neurons").sort_index()
    tau = REFERENCE_TAU
    tempered = frame[(frame.tau / tau - 1).abs() < 1e-6].set_index("neurons")
    best = frame.loc[frame.groupby("neurons").nlpd.idxmin()].set_index("neurons")
    narrow, wide = int(bayes.index.min()), int(bayes.index.max())
    lost = frame.groupby("neurons")[["eta", "nlpd"]].apply(_halfway)
    slope = np.polyfit(np.log(lost.index), np.log(lost), 1)[0] if wide > narrow else math.nan
    numbers = {
        f"eta = 1: accuracy at N = {narrow}": bayes.accuracy[narrow],
        f"eta = 1: accuracy at N = {wide}": bayes.accuracy[wide],
        f"eta = 1: confidence at N = {wide} (0.1 says nothing)": bayes.confidence[wide],
        f"eta = 1: KL per datum at N = {wide}": bayes.kl[wide] / found.num_data,
        f"lowest NLPD over tau at N = {wide}": best.nlpd[wide],
        "the tau of the lowest NLPD there": found.best_tau(),
        f"tau = {tau:g}: accuracy, least over widths": tempered.accuracy.min(),
        f"tau = {tau:g}: accuracy, largest over widths": tempered.accuracy.max(),
        f"tau = {tau:g}: NLPD, least over widths": tempered.nlpd.min(),
        f"tau = {tau:g}: NLPD, largest over widths": tempered.nlpd.max(),
        f"tau = {tau:g}: KL / N, least over widths": tempered.kl_per_neuron.min(),
        f"tau = {tau:g}: KL / N, largest over widths": tempered.kl_per_neuron.max(),
        f"tau = {tau:g}: entropy elsewhere at N = {wide} (nats)": tempered.ood_entropy[wide],
        "slope over log N of the log eta where half is lost (-1: eta = tau p / N)": slope,
    }
    kl = tempered.kl_per_neuron
    return numbers | _told(
        {
            "the widest network at eta = 1 ignores the data": bayes.confidence[wide] < 0.15
            and bayes.kl[wide] < 0.01 * found.num_data,
            "at eta = 1 the KL of the widest network is the smallest": bayes.kl.idxmin() == wide,
            "at eta = 1 the KL falls from each width to the next": bayes.kl.is_monotonic_decreasing,
            "at eta = tau p / N all widths have one NLPD (within 10 %)": tempered.nlpd.max()
            < 1.1 * tempered.nlpd.min(),
            "at eta = tau p / N the KL / N stays (within a factor of 1.5)": kl.max()
            < 1.5 * kl.min(),
            "the temperature where the fit is lost falls as 1 / N (slope within 0.15)": abs(
                slope + 1
            )
            < 0.15,
            "a temperature below 1 has the lowest NLPD at every width": (best.eta < 1).all(),
        }
    )


def overconfidence(found: Sweep) -> dict[str, Any]:
    """The statement that posteriors which are too cold are overconfident, in numbers."""
    frame, numbers = found.frame, {}
    for width, rows in frame.groupby("neurons"):
        coldest, best = rows.loc[rows.eta.idxmin()], rows.loc[rows.nlpd.idxmin()]
        for name, row in (("coldest", coldest), ("lowest NLPD", best)):
            numbers |= {
                f"N = {width}, {name}: tau": row.tau,
                f"N = {width}, {name}: NLPD": row.nlpd,
                f"N = {width}, {name}: ECE": row.ece,
                f"N = {width}, {name}: confidence less accuracy": row.confidence - row.accuracy,
                f"N = {width}, {name}: entropy elsewhere (nats)": row.ood_entropy,
            }
        told = numbers[f"N = {width}, coldest: confidence less accuracy"] > 0.02
        worse = coldest.nlpd > 1.05 * best.nlpd
        numbers |= _told({f"N = {width}: the coldest is overconfident": told and worse})
    return numbers


def _told(verdicts: dict[str, Any]) -> dict[str, str]:
    return {name: "holds" if value else "does not hold" for name, value in verdicts.items()}


def _halfway(curve: Any) -> float:
    """The temperature at which the NLPD is halfway between its lowest and a guess, log 10."""
    curve = curve.sort_values("eta")
    level = (curve.nlpd.min() + math.log(10)) / 2
    above = int((curve.nlpd.to_numpy() > level).argmax())
    low, high = curve.iloc[max(0, above - 1)], curve.iloc[above]
    share = (level - low.nlpd) / max(high.nlpd - low.nlpd, 1e-12)
    return float(low.eta * (high.eta / low.eta) ** share)


# The theory


def _regression(width: int, count: int, noise: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.linspace(-1, 1, count, dtype=torch.float64)[:, None]
    net = Averaged(1, width, 1).double()
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)), noise=noise)
    return model, x, (3 * x[:, 0]).sin()


Curves = dict[str, dict[str, tuple[list[int], list[float]]]]


def limit(
    widths: tuple[int, ...], count: int = 50, draws: int = 1000
) -> tuple[Curves, dict[str, Any]]:
    """|ELBO - limit| at guides with the same distribution of neurons."""
    gaps = []
    for width in widths:
        model, x, y = _regression(width, count)
        guide = bdl.guides.AutoMeanField(model, init_scale=0.5).prototype(x, y)
        generator = torch.Generator().manual_seed(0)
        guide.loc.data.normal_(generator=generator)
        losses = []
        for kind in (MeanFieldLimit, TemperedTraceMeanField_ELBO):
            elbo = kind(num_particles=draws)
            elbo.loss(model, guide, x, y)
            torch.manual_seed(1)
            losses.append(elbo.loss(model, guide, x, y))
        gaps.append(abs(losses[1] - losses[0]))
    bounds = [gap * width / count for gap, width in zip(gaps, widths, strict=True)]
    named = zip(widths, bounds, strict=True)
    found: dict[str, Any] = {f"|ELBO - limit| N / p at N = {n}": value for n, value in named}
    stays = max(bounds[1:]) < 1.25 * bounds[0]
    curves = {"ELBO against limit": {"|ELBO - limit|": (list(widths), gaps)}}
    return curves, found | _told({"|ELBO - limit| N / p stays bounded as N grows": stays})


def kl(
    widths: tuple[int, ...], steps: int, noise: float, tau: float = 0.01, count: int = 50
) -> tuple[Curves, dict[str, Any]]:
    """KL(q* || prior) of trained guides: to 0 at eta = 1, of order N at eta = tau p / N.

    The width at which the network gives up depends on the data: on 50 targets sin 3x, sd 0.7, with
    noise 1 that of 20 neurons has, and with noise 0.3 it has not.
    """
    values: dict[str, list[float]] = {"1": [], f"{tau:g} p / N": []}
    for width in widths:
        for label, eta in zip(values, (1.0, tau * count / width), strict=True):
            torch.manual_seed(0)
            model, x, y = _regression(width, count, noise)
            guide = bdl.guides.AutoMeanField(model, init_scale=0.9).prototype(x, y)
            guide.loc.data.normal_().mul_(0.3)
            elbo = TemperedTraceMeanField_ELBO(eta, num_particles=8)
            run: dict[str, Any] = {"steps": steps, "learning_rate": 0.03, "elbo": elbo}
            train(model, guide, x, y, **run)
            elbo.loss(model, guide, x, y)
            assert elbo.kl is not None
            values[label].append(elbo.kl.item())
    bayes, tempered = values.values()
    per_neuron = [value / width for value, width in zip(tempered, widths, strict=True)]
    found: dict[str, Any] = {}
    for width, value, share in zip(widths, bayes, per_neuron, strict=True):
        found[f"noise {noise:g}: KL at eta = 1, N = {width}"] = value
        found[f"noise {noise:g}: KL / N at eta = {tau:g} p / N, N = {width}"] = share
    curves = {
        f"KL(q* || prior), noise {noise:g}": {
            f"eta = {k}": (list(widths), v) for k, v in values.items()
        }
    }
    return curves, found | _told(
        {
            f"noise {noise:g}: KL at eta = 1 falls at least as 1 / N": bayes[-1] * widths[-1]
            <= bayes[0] * widths[0],
            f"noise {noise:g}: KL / N at eta = tau p / N stays (within a factor of 2)": max(
                per_neuron
            )
            < 2 * min(per_neuron),
        }
    )


# A residual network


def resnet(options: argparse.Namespace) -> Sweep:
    data = images_of(options, "fashion_mnist", options.images)
    rows = rows_of(
        classifier(Residual(options.channels), len(data.train.x)),
        15 * options.channels,
        ETAS,
        (data.train.x, data.train.y),
        (data.test.x, data.test.y),
        guide=lambda model: bdl.guides.AutoMeanField(model, init_scale=0.02),
        ood=data.elsewhere,
        steps=options.resnet_steps,
        learning_rate=0.01,
        batch_size=min(options.batch, len(data.train.x)),
        num_samples=options.draws,
    )
    return Sweep(rows, len(data.train.x))


# Other priors


def priors(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rows at eta = 1 under other priors, beside the tempered one."""
    data = images_of(options, "mnist", options.images)
    x, x_test = data.train.x.flatten(1), data.test.x.flatten(1)
    width, rows = options.prior_width, {}
    for name, (prior, guide, eta) in _rivals(data.train.x, width, len(x)).items():
        torch.manual_seed(0)
        model = classifier(Averaged(x.shape[1], width, 10), len(x), prior)
        chosen = guide(model)
        started = time.perf_counter()
        train(
            model, chosen, x, data.train.y, steps=options.steps, batch_size=options.batch,
            learning_rate=0.02, elbo=TemperedTraceMeanField_ELBO(eta),
        )  # fmt: skip
        scores = bdl.compare(
            model, {name: chosen}, x_test, data.test.y, reference=None, num_samples=options.draws
        ).table.iloc[0]
        rows[name] = {k: scores[k] for k in ("accuracy", "nlpd", "ece", "confidence")}
        rows[name]["seconds"] = time.perf_counter() - started
    return rows


def _rivals(images: Tensor, width: int, count: int) -> dict[str, tuple[Any, Callable, float]]:
    """Name -> prior, guide and temperature."""

    def mean_field(model: nn.Module) -> Any:
        return bdl.guides.AutoMeanField(model, init_scale=0.1)

    def matrix_normal(model: nn.Module) -> Any:
        return bdl.guides.AutoMatrixNormal(model, init_scale=0.1)

    side = images.shape[-1]
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    pixels = torch.exp(-0.5 * torch.cdist(at, at).square() / 1.5**2)
    pixels = pixels + 0.05 * torch.eye(len(at), dtype=pixels.dtype)
    scale = math.sqrt(0.2)
    smooth = bdl.priors.ByName(
        {"hidden.weight": bdl.priors.MatrixNormal(pixels, scale=scale), "*": PRIOR}
    )
    # Var f(x) = s^2 / N^2 sum_j E[relu(b_j x + c_j)^2], the mean over the images made 4: the scale
    # of the output weights is matched to a function with logits of sd 2 (as Tran et al. 2020 match
    # whole priors to a Gaussian process).
    mean_square = 0.2 * (images.flatten(1).square().sum(1) + 1).mean().item() / 2
    matched = 2.0 * math.sqrt(width / mean_square)
    functional = bdl.priors.ByName({"out.weight": bdl.priors.Normal(matched), "*": PRIOR})
    eta = temperature.overparameterized(0.001, count, width)
    return {
        "Normal(0, 1/5), mean-field, eta = 1": (PRIOR, mean_field, 1.0),
        "the same, tau = 0.001": (PRIOR, mean_field, eta),
        "the same, matrix normal guide, eta = 1": (PRIOR, matrix_normal, 1.0),
        "smooth over pixels, mean-field, eta = 1": (smooth, mean_field, 1.0),
        "smooth over pixels, matrix normal guide, eta = 1": (smooth, matrix_normal, 1.0),
        "matched in function space, mean-field, eta = 1": (functional, mean_field, 1.0),
    }


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with mnist.npz and fashion_mnist.npz")
    parser.add_argument("--figures", type=Path, help="folder for the figures and tables")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sets", nargs="+", default=["mnist", "fashion_mnist"])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="minutes; the default")
    size.add_argument("--medium", action="store_true", help="half an hour of one core")
    size.add_argument("--full", action="store_true", help="as published; hours without a GPU")
    for name in ("images", "tests", "steps", "draws", "cold_images", "cold_steps", "resnet_steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--taus", type=float, nargs="+", default=TAUS, help="of the images")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen: dict[str, Any] = FULL if options.full else MEDIUM if options.medium else QUICK
    for name, value in chosen.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    needs_data = [part for part in options.parts if part not in ("limit", "kl")]
    if needs_data and options.data is None:
        parser.error(f"--data is needed for {', '.join(needs_data)}")
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}

    def tell(found: dict[str, Any]) -> None:
        nonlocal results
        results |= found
        if not options.json:
            print("\n".join(f"  {key}: {value}" for key, value in found.items()), flush=True)

    def keep(name: str, found: Sweep, tau: float | None = None) -> None:
        if not options.json:
            print(f"\n{name}\n{found}\n", flush=True)
        if options.figures:
            found.save(options.figures, name, tau)

    panels: dict[str, Any] = {}
    if "limit" in options.parts:
        curves, found = limit(options.limit_widths)
        panels |= curves
        tell(found)
    for noise in (1.0, 0.3) if "kl" in options.parts else ():
        curves, found = kl(options.kl_widths, options.kl_steps, noise)
        panels |= curves
        tell(found)
    if panels and options.figures:
        figure = temperature_curves(panels, label="neurons N", line=None, logarithmic=list(panels))
        figure.savefig(options.figures / "theory.png", dpi=150)
    for name in options.sets if "images" in options.parts else ():
        for estimator in options.estimators:
            label, started = f"{name}_{estimator}", time.process_time()
            for swept in images(options, name, estimator):
                keep(label, swept, REFERENCE_TAU)
            found = statements(swept) | {"seconds of a processor": time.process_time() - started}
            tell({f"{label}: {key}": value for key, value in found.items()})
    for name in options.sets if "cold" in options.parts else ():
        changed = {"images": options.cold_images, "steps": options.cold_steps, "taus": COLD_TAUS}
        for swept in images(
            options, name, "local_reparameterization", widths=options.cold_widths, **changed
        ):
            keep(f"{name}_cold", swept)
        tell({f"{name}_cold: {key}": value for key, value in overconfidence(swept).items()})
    if "resnet" in options.parts:
        swept = resnet(options)
        keep("resnet", swept)
        rows = swept.frame.set_index("eta", drop=False).to_dict("index")
        best = min(rows.values(), key=lambda row: row["nlpd"])
        tell(
            {
                "resnet: eta of lowest NLPD": best["eta"],
                "resnet: NLPD there": best["nlpd"],
                "resnet: NLPD at eta = 1": rows[1.0]["nlpd"],
                "resnet: accuracy there": best["accuracy"],
                "resnet: accuracy at eta = 1": rows[1.0]["accuracy"],
            }
            | _told({"resnet: a temperature below 1 has the lowest NLPD": best["eta"] < 1})
        )
    if "priors" in options.parts:
        for name, row in priors(options).items():
            tell({f"priors: {name}, {key}": value for key, value in row.items()})
    results = {k: v if isinstance(v, str) else float(v) for k, v in results.items()}
    harness.show("mean-field over temperature and width", results, options.json)


QUICK = {
    "images": 2000,
    "tests": 1000,
    "pooled": True,
    "widths": [50, 200, 800],
    "steps": 400,
    "batch": 100,
    "draws": 50,
    "limit_widths": (50, 500, 5000),
    "kl_widths": (20, 200, 2000),
    "kl_steps": 1500,
    "cold_images": 300,
    "cold_widths": [50, 200],
    "cold_steps": 1500,
    "prior_width": 200,
    "channels": 4,
    "resnet_steps": 300,
}
MEDIUM = QUICK | {
    "images": 10_000,
    "widths": [50, 200, 1000, 5000],
    "limit_widths": (50, 500, 5000, 50_000),
    "kl_steps": 6000,
    "cold_images": 500,
    "cold_steps": 4000,
    "channels": 8,
    "resnet_steps": 1000,
}
FULL = {
    "images": 60_000,
    "tests": 10_000,
    "pooled": False,
    "widths": [50, 100, 500, 1000, 5000],
    "steps": 30_000,
    "batch": 128,
    "draws": 100,
    "limit_widths": (50, 500, 5000, 50_000),
    "kl_widths": (20, 200, 2000),
    "kl_steps": 20_000,
    "cold_images": 2000,
    "cold_widths": [50, 200, 1000],
    "cold_steps": 30_000,
    "prior_width": 1000,
    "channels": 16,
    "resnet_steps": 30_000,
}


if __name__ == "__main__":
    main()
