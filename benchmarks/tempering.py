"""Mean-field networks of many widths over the temperature (Huix et al. 2022), and its theory.

    python benchmarks/tempering.py --quick --data DATA --figures FOLDER
    python benchmarks/tempering.py --full --data DATA --figures FOLDER

``--data`` is a folder with ``mnist.npz`` and ``fashion_mnist.npz`` of the Keras layout. The network
of one hidden layer is f(x) = 1/N sum_j a_j relu(b_j x + c_j), as in the paper's theory, with the
prior Normal(0, 1/5) for every weight. ``--quick`` takes 2000 images of 14 x 14 pixels and widths up
to 800; ``--full`` all 60 000 images and widths up to 5000, with Bayes by backprop (one draw of the
weights for a batch) and local reparameterization. The parts, chosen by ``--parts``:

images       scores against the temperature eta, widths as curves; the statements in numbers
limit        |ELBO - limit| N / p, which stays bounded as N grows
kl           KL(q* || prior) of trained guides at eta = 1 and at eta = tau p / N
resnet       scores of a small residual network on Fashion-MNIST against eta
priors       tempering beside correlated and functional priors, at eta = 1
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl import temperature
from pyro_bdl.elbo import MeanFieldLimit, TemperedTraceMeanField_ELBO
from pyro_bdl.training import train

PRIOR = bdl.priors.Normal(math.sqrt(0.2))
TAUS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ETAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
PARTS = ("images", "limit", "kl", "resnet", "priors")


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


class Images:
    """Images scaled to mean 0 and sd 1: for training, for testing, and from the other set."""

    def __init__(self, folder: Path, name: str, count: int, tests: int, pooled: bool) -> None:
        other = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}[name]
        with np.load(folder / f"{name}.npz") as file:
            arrays = {key: file[key] for key in ("x_train", "y_train", "x_test", "y_test")}
        with np.load(folder / f"{other}.npz") as file:
            elsewhere = file["x_test"][:500]
        x = torch.from_numpy(arrays["x_train"][:count]).float() / 255
        mean, sd = x.mean(), x.std()

        def prepared(images: Any) -> Tensor:
            scaled = (torch.as_tensor(images).float() / 255 - mean) / sd
            return nn.functional.avg_pool2d(scaled[:, None], 2) if pooled else scaled[:, None]

        self.x, self.y = prepared(arrays["x_train"][:count]), _labels(arrays["y_train"][:count])
        self.x_test = prepared(arrays["x_test"][:tests])
        self.y_test = _labels(arrays["y_test"][:tests])
        self.ood = prepared(elsewhere)


def _labels(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def classifier(net: nn.Module, count: int, prior: Any = PRIOR) -> nn.Module:
    return bdl.models.Classification(bdl.bayesianize(net, prior), num_data=count)


# The paper's figures


def images(options: argparse.Namespace, name: str, estimator: str | None) -> temperature.Sweep:
    data = Images(options.data, name, options.images, options.tests, options.pooled)
    x, x_test, ood = (part.flatten(1) for part in (data.x, data.x_test, data.ood))
    return temperature.sweep(
        lambda width: classifier(Averaged(x.shape[1], width, 10), len(x)),
        lambda model: bdl.guides.AutoMeanField(model, init_scale=0.1),
        (x, data.y),
        (x_test, data.y_test),
        taus=TAUS,
        etas=(1.0,),
        widths=options.widths,
        ood=ood,
        steps=options.steps,
        learning_rate=0.02,
        batch_size=options.batch,
        estimator=estimator,
        num_samples=options.draws,
        progress=True,
    )


def statements(found: temperature.Sweep) -> dict[str, float]:
    """The paper's statements about its figures, in numbers."""
    frame = found.to_frame()
    bayes = frame[frame.eta == 1.0].set_index("neurons").sort_index()
    tempered = frame[(frame.tau / found.best_tau() - 1).abs() < 1e-6].set_index("neurons")
    best = frame.loc[frame.groupby("neurons").nlpd.idxmin()].set_index("neurons")
    coldest = frame.loc[frame.groupby("neurons").eta.idxmin()].set_index("neurons")
    narrow, wide = bayes.index.min(), bayes.index.max()
    lost = frame.groupby("neurons")[["eta", "nlpd"]].apply(_halfway)
    slope = np.polyfit(np.log(lost.index), np.log(lost), 1)[0] if wide > narrow else math.nan
    return {
        f"eta = 1: accuracy at N = {narrow}": bayes.accuracy[narrow],
        f"eta = 1: accuracy at N = {wide}": bayes.accuracy[wide],
        f"eta = 1: confidence at N = {wide} (0.1 says nothing)": bayes.confidence[wide],
        f"eta = 1: KL per datum at N = {wide}": bayes.kl[wide] / found.num_data,
        "the tau of lowest NLPD at the widest network": found.best_tau(),
        "there: accuracy, least over widths": tempered.accuracy.min(),
        "there: accuracy, largest over widths": tempered.accuracy.max(),
        f"there: entropy elsewhere at N = {wide} (nats)": tempered.ood_entropy[wide],
        "slope over log N of the log eta where half is lost (-1: eta = tau p / N)": slope,
        f"coldest: NLPD over the best at N = {wide}": coldest.nlpd[wide] / best.nlpd[wide],
        f"coldest: confidence less accuracy at N = {wide}": coldest.confidence[wide]
        - coldest.accuracy[wide],
        f"coldest: E_q[NLL] less NLPD at N = {wide}": coldest.expected_nll[wide]
        - coldest.nlpd[wide],
    }


def _halfway(curve: Any) -> float:
    """The temperature at which the NLPD is halfway between its lowest and a guess, log 10."""
    curve = curve.sort_values("eta")
    level = (curve.nlpd.min() + math.log(10)) / 2
    above = int((curve.nlpd.to_numpy() > level).argmax())
    low, high = curve.iloc[max(0, above - 1)], curve.iloc[above]
    share = (level - low.nlpd) / max(high.nlpd - low.nlpd, 1e-12)
    return float(low.eta * (high.eta / low.eta) ** share)


# The theory


def _regression(width: int, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.linspace(-1, 1, count, dtype=torch.float64)[:, None]
    net = Averaged(1, width, 1).double()
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)), noise=1.0)
    return model, x, (3 * x[:, 0]).sin()


def limit(widths: tuple[int, ...], count: int = 50, draws: int = 1000) -> dict[str, float]:
    """|ELBO - limit| N / p at guides with the same distribution of neurons."""
    found = {}
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
        found[f"|ELBO - limit| N / p at N = {width}"] = abs(losses[1] - losses[0]) * width / count
    return found


def kl(widths: tuple[int, ...], steps: int, tau: float = 0.01, count: int = 50) -> dict[str, float]:
    """KL(q* || prior) of trained guides: to 0 at eta = 1, of order N at eta = tau p / N."""
    found = {}
    for width in widths:
        for label, eta in (("1", 1.0), ("tau p / N", tau * count / width)):
            torch.manual_seed(0)
            model, x, y = _regression(width, count)
            guide = bdl.guides.AutoMeanField(model, init_scale=0.9).prototype(x, y)
            guide.loc.data.normal_().mul_(0.3)
            elbo = TemperedTraceMeanField_ELBO(eta, num_particles=8)
            run: dict[str, Any] = {"steps": steps, "learning_rate": 0.03, "elbo": elbo}
            train(model, guide, x, y, **run)
            elbo.loss(model, guide, x, y)
            assert elbo.kl is not None
            value = elbo.kl.item() / (width if eta != 1.0 else 1)
            found[f"KL{'' if eta == 1.0 else ' / N'} at eta = {label}, N = {width}"] = value
    return found


# A residual network


def resnet(options: argparse.Namespace) -> temperature.Sweep:
    data = Images(options.data, "fashion_mnist", options.images, options.tests, options.pooled)
    return temperature.sweep(
        classifier(Residual(options.channels), len(data.x)),
        lambda model: bdl.guides.AutoMeanField(model, init_scale=0.02),
        (data.x, data.y),
        (data.x_test, data.y_test),
        etas=ETAS,
        ood=data.ood,
        steps=options.resnet_steps,
        learning_rate=0.01,
        batch_size=options.batch,
        num_samples=options.draws,
        progress=True,
    )


# Other priors


def priors(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rows at eta = 1 under other priors, beside the tempered one."""
    data = Images(options.data, "mnist", options.images, options.tests, options.pooled)
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    width, rows = options.prior_width, {}
    for name, (prior, guide, eta) in _rivals(data.x, width, len(x)).items():
        torch.manual_seed(0)
        model = classifier(Averaged(x.shape[1], width, 10), len(x), prior)
        chosen = guide(model)
        started = time.perf_counter()
        train(
            model, chosen, x, data.y, steps=options.steps, learning_rate=0.02, temperature=eta,
            batch_size=options.batch,
        )  # fmt: skip
        scores = bdl.compare(
            model, {name: chosen}, x_test, data.y_test, reference=None, num_samples=options.draws
        ).rows[0]
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
    size.add_argument("--full", action="store_true", help="as published; hours without a GPU")
    for name, kind in (("images", int), ("tests", int), ("steps", int), ("draws", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--widths", type=int, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen: dict[str, Any] = FULL if options.full else QUICK
    for name, value in chosen.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    needs_data = [part for part in options.parts if part not in ("limit", "kl")]
    if needs_data and options.data is None:
        parser.error(f"--data is needed for {', '.join(needs_data)}")
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}

    def keep(name: str, found: temperature.Sweep) -> None:
        if not options.json:
            print(f"\n{name}\n{found}\n", flush=True)
        if options.figures:
            found.to_csv(options.figures / f"{name}.csv")
            for key, figure in found.figures().items():
                figure.savefig(options.figures / f"{name}_{key}.png", dpi=150)

    if "limit" in options.parts:
        results |= limit(options.limit_widths)
    if "kl" in options.parts:
        results |= kl(options.kl_widths, options.kl_steps)
    if "images" in options.parts:
        for name in options.sets:
            for estimator in options.estimators:
                label = name + ("" if estimator is None else "_local_reparameterization")
                found = images(options, name, estimator)
                keep(label, found)
                results |= {f"{label}: {key}": v for key, v in statements(found).items()}
    if "resnet" in options.parts:
        found = resnet(options)
        keep("resnet", found)
        rows = {row["eta"]: row for row in found.rows}
        best = min(found.rows, key=lambda row: row["nlpd"])
        results |= {
            "resnet: eta of lowest NLPD": best["eta"],
            "resnet: NLPD there": best["nlpd"],
            "resnet: NLPD at eta = 1": rows[1.0]["nlpd"],
            "resnet: accuracy there": best["accuracy"],
            "resnet: accuracy at eta = 1": rows[1.0]["accuracy"],
        }
    if "priors" in options.parts:
        for name, row in priors(options).items():
            results |= {f"priors: {name}, {key}": value for key, value in row.items()}
    results = {key: float(value) for key, value in results.items()}
    harness.show("mean-field over temperature and width", results, options.json)


QUICK = {
    "images": 2000,
    "tests": 1000,
    "pooled": True,
    "widths": [50, 200, 800],
    "steps": 400,
    "batch": 100,
    "draws": 50,
    "estimators": ["local_reparameterization"],
    "limit_widths": (50, 500, 5000),
    "kl_widths": (20, 200),
    "kl_steps": 1500,
    "prior_width": 200,
    "channels": 4,
    "resnet_steps": 300,
}
FULL = {
    "images": 60_000,
    "tests": 10_000,
    "pooled": False,
    "widths": [50, 100, 500, 1000, 5000],
    "steps": 30_000,
    "batch": 128,
    "draws": 100,
    "estimators": [None, "local_reparameterization"],
    "limit_widths": (50, 500, 5000, 50_000),
    "kl_widths": (20, 200, 2000),
    "kl_steps": 20_000,
    "prior_width": 1000,
    "channels": 16,
    "resnet_steps": 30_000,
}


if __name__ == "__main__":
    main()
