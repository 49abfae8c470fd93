"""A probabilistic deep image prior for tomography (Antoran et al. 2022, arXiv 2203.00479).

    python benchmarks/tomography.py --quick                       # a phantom and a digit
    python benchmarks/tomography.py --data mnist.npz --figure tomography.png

One image f of D x D pixels is seen through noisy parallel-beam projections y = A f + noise, fewer
than pixels. A small U-Net maps a fixed input to the image. Its weights are trained on y alone, with
a total-variation (TV) loss on the image. The image's standard deviation then comes from

- the linearized Laplace approximation: f ~ N(f*, J C J'), solved in the space of the projections
  (``structure="kernel"``), with the scale of each layer and the noise by the evidence;
- the same with a prior on the scales that prefers images of small total variation (section 4 of the
  paper): a layer's scale s has the density Exp(k(s)) |dk/ds|, where k(s) is the expected
  total-variation loss of images drawn from the prior of that layer alone;
- MC dropout, and mean-field variational inference, of the same program.

For each it prints the log likelihood of the true pixels, the share of them inside the 90 %
interval, the rank correlation of error and sd over the pixels, and the PSNR of the mean, with
means and standard errors over the images. Pixels have, in all methods, the additional variance
noise^2 / |a|^2 for the mean squared size |a|^2 of A's columns, which is that of a pixel if it were
the only unknown.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from harness import machine, parser, read_rows, write_rows
from pyro.infer.autoguide.initialization import init_to_value
from pyro.nn import PyroModule, PyroParam
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl import evidence, training
from pyro_bdl.errors import BdlWarning

SIDE = 28
LAPLACE, WITH_TV = "linearized Laplace", "linearized Laplace, TV prior"
DROPOUT, MEAN_FIELD = "MC dropout", "mean-field"


def projections(side: int, angles: int) -> Tensor:
    """The matrix A of parallel-beam projections, (angles x detectors, side^2).

    Each row is a line integral: the sum over points half a pixel apart, bilinear between pixels.
    """
    detectors = math.ceil(1.42 * side) + 1
    place = np.arange(detectors) - (detectors - 1) / 2
    along = np.arange(-0.75 * side, 0.75 * side, 0.5)
    matrix = np.zeros((angles, detectors, side + 2, side + 2))
    for i, angle in enumerate(np.arange(angles) * np.pi / angles):
        cos, sin = np.cos(angle), np.sin(angle)
        column = cos * place[:, None] - sin * along + (side - 1) / 2
        row = sin * place[:, None] + cos * along + (side - 1) / 2
        left, top = np.floor(column).astype(int), np.floor(row).astype(int)
        right, bottom = column - left, row - top
        detector = np.broadcast_to(np.arange(detectors)[:, None], left.shape)
        for down in (0, 1):
            for across in (0, 1):
                weight = (right if across else 1 - right) * (bottom if down else 1 - bottom)
                at = (  # the margin of a pixel takes what lies outside
                    np.clip(top + down + 1, 0, side + 1),
                    np.clip(left + across + 1, 0, side + 1),
                )
                np.add.at(matrix[i], (detector, *at), 0.5 * weight)
    return torch.tensor(
        matrix[:, :, 1:-1, 1:-1].reshape(angles * detectors, -1), dtype=torch.float32
    )


def phantom(side: int) -> Tensor:
    """Ellipses of several densities, as in the phantom of Shepp and Logan, (side, side)."""
    ellipses = [  # density, half axes, center, angle
        (0.9, 0.72, 0.92, 0.0, 0.0, 0.0),
        (-0.6, 0.60, 0.78, 0.0, 0.0, 0.0),
        (0.4, 0.13, 0.32, 0.25, -0.05, -0.3),
        (-0.2, 0.17, 0.42, -0.25, -0.05, 0.3),
        (0.5, 0.22, 0.16, 0.0, 0.42, 0.0),
        (0.4, 0.10, 0.10, 0.0, -0.5, 0.0),
    ]
    grid = (torch.arange(side) - (side - 1) / 2) / (side / 2)
    vertical, horizontal = torch.meshgrid(-grid, grid, indexing="ij")
    image = torch.zeros(side, side)
    for density, a, b, x0, y0, angle in ellipses:
        x, y = horizontal - x0, vertical - y0
        cos, sin = math.cos(angle), math.sin(angle)
        inside = ((cos * x + sin * y) / a) ** 2 + ((cos * y - sin * x) / b) ** 2 <= 1
        image += density * inside
    return image.clamp(0, 1)


class UNet(nn.Module):
    """Two scales, three-by-three convolutions, a skip connection; the output is linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        fine = nn.functional.silu(self.first(z))
        coarse = nn.functional.silu(self.middle(nn.functional.silu(self.down(fine))))
        coarse = nn.functional.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return self.last(nn.functional.silu(self.up(torch.cat([fine, coarse], 1))))


def total_variation(f: Tensor) -> Tensor:
    """The sum of the absolute differences of neighboring pixels."""
    return f.diff(dim=-1).abs().sum() + f.diff(dim=-2).abs().sum()


class Tomography(PyroModule):
    """An image f of a network, and y ~ Normal(A f, noise^2).

    :param smoothness: the weight of the total variation of f, in nats; 0 for none.
    :param rates: by the name of a prior's scale the rate of its exponential hyperprior.
    """

    def __init__(
        self, network: nn.Module, matrix: Tensor, noise: float, smoothness: float = 0.0
    ) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("matrix", matrix)
        self.noise = PyroParam(torch.tensor(noise), constraint=constraints.positive)
        self.smoothness = smoothness
        self.rates: dict[str, float] = {}

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        f = pyro.deterministic("f", self.network(z)[0, 0])
        if self.smoothness:
            pyro.factor("TV", -self.smoothness * total_variation(f))
        for name, rate in self.rates.items():
            scale = getattr(self.network, name)
            pyro.factor(f"{name}.TV", math.log(rate) - rate * scale)
        mean = self.matrix @ f.reshape(-1)
        return pyro.sample("y", dist.Normal(mean, self.noise).to_event(1), obs=y)


def rates_of_scales(
    network: nn.Module, weights: dict[str, Tensor], z: Tensor, smoothness: float
) -> dict[str, float]:
    """For each layer the expected TV loss of an image J w of its weights w ~ N(0, 1).

    The differences of neighboring pixels are Gaussian under the prior, and E|N(0, v)| = sqrt(2 v /
    pi). The expectation is linear in the layer's scale, so that Exp(k(s)) |dk/ds| is an exponential
    density of the scale with this rate.
    """

    def differences(values: dict[str, Tensor]) -> Tensor:
        f = torch.func.functional_call(network, values, (z,))[0, 0]
        return torch.cat([f.diff(dim=-1).reshape(-1), f.diff(dim=-2).reshape(-1)])

    jacobian = torch.func.jacrev(differences, chunk_size=128)(weights)
    variances: dict[str, Any] = {}
    for name, rows in jacobian.items():
        layer = name.rpartition(".")[0]
        variances[layer] = variances.get(layer, 0.0) + rows.flatten(1).square().sum(1)
    return {
        layer: smoothness * math.sqrt(2 / math.pi) * values.sqrt().sum().item()
        for layer, values in variances.items()
    }


class Reconstruction:
    """One image, its projections, and the posteriors of the network's images."""

    def __init__(
        self, image: Tensor, matrix: Tensor, options: argparse.Namespace, seed: int
    ) -> None:
        torch.manual_seed(seed)
        pyro.clear_param_store()
        self.image, self.options, self.matrix = image, options, matrix
        clean = matrix @ image.reshape(-1)
        self.noise = options.noise * clean.abs().mean().item()
        self.y = clean + self.noise * torch.randn(len(clean))
        self.z = 0.5 * torch.randn(1, 1, *image.shape)
        self.network = UNet(options.width)
        start = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
        self.prior = bdl.priors.PerLayer(bdl.priors.Normal(start))
        self.program = self._program(options.smoothness)
        self.guide = bdl.guides.AutoLaplaceGGN(self.program, structure="kernel")
        self._train(self.guide, options.steps)

    def _program(self, smoothness: float) -> Tomography:
        bnn = bdl.bayesianize(self.network, self.prior)
        return Tomography(bnn, self.matrix, self.noise, smoothness)

    def _train(self, guide: Any, steps: int, learning_rate: float = 0.01) -> None:
        guide.prototype(self.z, self.y)
        training.train(
            self.program, guide, self.z, self.y, steps=steps, batch_size=1,
            optimizer=torch.optim.Adam(guide.parameters(), lr=learning_rate),
        )  # fmt: skip

    def mean_of_map(self) -> Tensor:
        return bdl.Predictive(self.program, self.guide, 1)(self.z)["f"][0]

    def laplace(self, tv_prior: bool) -> dict[str, Any]:
        """Mean and variance of each pixel, and what the evidence found."""
        program = self._program(0.0)  # without the TV loss, which is no part of the linear model
        weights = self.guide.median()
        at = bdl.guides.AutoLaplaceGGN(
            program, structure="kernel", init_loc_fn=init_to_value(values=weights)
        )
        if tv_prior:
            rates = rates_of_scales(self.network, weights, self.z, self.options.smoothness)
            program.rates = {_scale_name(program, layer): rate for layer, rate in rates.items()}
        posterior = at.laplace_approximation((self.z, self.y))
        found = evidence.maximize(posterior, steps=self.options.evidence_steps, tolerance=1e-2)
        predictive = bdl.LinearizedPredictive(program, posterior)
        moments = predictive.parameter_moments(self.z, sites=["f"])["f"]
        return {
            "mean": moments.mean, "variance": moments.variance, "noise": program.noise.item(),
            "evidence": found, "program": program, "predictive": predictive,
        }  # fmt: skip

    def sampled(self, guide: Any, steps: int) -> dict[str, Any]:
        self._train(guide, steps)
        f = bdl.Predictive(self.program, guide, self.options.draws)(self.z)["f"]
        return {"mean": f.mean(0), "variance": f.var(0), "noise": self.noise}

    def all(self) -> dict[str, dict[str, Any]]:
        options, start = self.options, init_to_value(values=self.guide.median())
        laplace, with_tv = self.laplace(False), self.laplace(True)
        dropout = bdl.guides.AutoMCDropout(self.program, p=options.rate)
        mean_field = bdl.guides.AutoMeanField(self.program, init_loc_fn=start, init_scale=0.01)
        return {
            LAPLACE: laplace,
            WITH_TV: with_tv,
            DROPOUT: self.sampled(dropout, options.steps),
            MEAN_FIELD: self.sampled(mean_field, options.steps),
        }

    def scores(self, mean: Tensor, variance: Tensor, noise: float, **_: Any) -> dict[str, float]:
        floor = noise**2 / self.matrix.square().sum(0).mean()
        sd = (variance + floor).sqrt()
        error = (self.image - mean).abs()
        return {
            "log likelihood": dist.Normal(mean, sd).log_prob(self.image).mean().item(),
            "in 90 %": (error < 1.6449 * sd).double().mean().item(),
            "rank correlation": spearmanr(error.flatten(), variance.flatten())[0],
            "PSNR": -10 * error.square().mean().log10().item(),
        }


def _scale_name(program: Tomography, layer: str) -> str:
    """The name of the parameter that holds the scale of a layer's prior."""
    names = [name for name in program.network._pyro_params if name.startswith("hyper_")]
    (found,) = (name for name in names if layer in name)
    return found


def images(options: argparse.Namespace) -> dict[str, Tensor]:
    found = {"phantom": phantom(SIDE)}
    if options.digits:
        digits = np.load(options.data)["x_test"][: options.digits]
        found |= {f"digit {i}": torch.tensor(d / 255.0).float() for i, d in enumerate(digits)}
    return found


def figure(first: Reconstruction, found: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2.1 * (len(found) + 1), 4.6), layout="constrained")
    axes = drawn.subplots(2, len(found) + 1)
    axes[0, 0].imshow(first.image, cmap="gray", vmin=0, vmax=1)
    axes[0, 0].set_title("image", fontsize=9)
    axes[1, 0].imshow(first.mean_of_map().detach(), cmap="gray", vmin=0, vmax=1)
    axes[1, 0].set_title("reconstruction", fontsize=9)
    top = 0.3
    for column, (name, result) in zip(axes.T[1:], found.items(), strict=True):
        for axis, values, text in (
            (column[0], (first.image - result["mean"]).abs(), "error"),
            (column[1], result["variance"].sqrt(), "sd"),
        ):
            shown = axis.imshow(values.detach(), cmap="magma", vmin=0, vmax=top)
            axis.set_title(f"{name}:\n{text}", fontsize=9)
    drawn.colorbar(shown, ax=axes[:, -1], shrink=0.8)
    for axis in axes.flat:
        axis.set_axis_off()
    drawn.savefig(path, dpi=110)


def run(options: argparse.Namespace) -> dict[str, Any]:
    shown = images(options)
    rows = {(row["angles"], row["image"]): row for row in read_rows(options.rows)}
    for angles in options.angles:
        matrix = projections(SIDE, angles)
        for seed, (name, image) in enumerate(shown.items()):
            if (angles, name) in rows:
                continue
            started = time.process_time()
            one = Reconstruction(image, matrix, options, seed)
            found = one.all()
            scores = {method: one.scores(**result) for method, result in found.items()}
            row = rows[angles, name] = {"angles": angles, "image": name, "scores": scores}
            write_rows(options.rows, [row])
            if options.figure and seed == 0 and angles == options.angles[-1]:
                figure(one, found, options.figure)
            if not options.json:
                seconds = time.process_time() - started
                print(f"{angles} angles, {name}: {seconds:.0f} s of processor time", flush=True)
    return {"tables": dict(_table(angles, rows) for angles in options.angles)}


def _table(angles: int, rows: dict[tuple[int, str], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A title, and mean and standard error over the images of each score of each method."""
    found = [row["scores"] for (number, _), row in rows.items() if number == angles]
    return f"{angles} angles, {len(found)} images", {
        method: {key: _mean_and_error([row[method][key] for row in found]) for key in scores}
        for method, scores in found[0].items()
    }


def _mean_and_error(values: list[float]) -> list[float]:
    count = len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return [statistics.fmean(values), error]


def main() -> None:
    options_of = parser(__doc__.splitlines()[0])
    options_of.add_argument("--quick", action="store_true", help="5 angles, one digit")
    options_of.add_argument("--data", type=Path, default=Path("mnist.npz"))
    options_of.add_argument("--digits", type=int, help="besides the phantom (20, quick 1)")
    options_of.add_argument("--angles", type=int, nargs="+", help="(5 10 20, quick 5)")
    options_of.add_argument("--noise", type=float, default=0.05, help="of the mean projection")
    options_of.add_argument("--smoothness", type=float, default=2.0, help="of TV, in nats (2)")
    options_of.add_argument("--width", type=int, help="channels (12, quick 8)")
    options_of.add_argument("--steps", type=int, help="of Adam (2000, quick 1000)")
    options_of.add_argument("--evidence-steps", type=int, default=25)
    options_of.add_argument("--rate", type=float, default=0.05, help="of dropout (0.05)")
    options_of.add_argument("--draws", type=int, default=100, help="of dropout and mean-field")
    options_of.add_argument("--rows", type=Path, help="file of the rows; those in it are not run")
    options_of.add_argument("--figure", type=Path)
    options = options_of.parse_args()
    options.digits = (1 if options.quick else 20) if options.digits is None else options.digits
    options.angles = options.angles or ([5] if options.quick else [5, 10, 20])
    options.width = options.width or (8 if options.quick else 12)
    options.steps = options.steps or (1000 if options.quick else 2000)
    if options.quick and not options.data.exists():
        options.digits = 0
    torch.set_num_threads(options.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        results = {"machine": machine()} | run(options)
    if options.json:
        print(json.dumps({"benchmark": "tomography"} | results))
        return
    for title, table in results["tables"].items():
        print(f"\n{title}, mean ± standard error")
        keys = list(next(iter(table.values())))
        print(f"  {'':30}" + "".join(f"{key:>20}" for key in keys))
        for method, row in table.items():
            cells = (f"{mean:.3f} ± {error:.3f}" for mean, error in row.values())
            print(f"  {method:30}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
