"""Posteriors of wide networks against the Gaussian process that they tend to.

    python benchmarks/exact_limits.py --quick
    python benchmarks/exact_limits.py --rows rows.jsonl

A network with independent Normal weights, their variance over the number of inputs, tends to a
Gaussian process as its hidden layers widen (Neal 1996; Lee et al. 2018; Matthews et al. 2018). Its
kernel is a recursion in closed form, for ReLU (Cho & Saul 2009) and erf (Williams 1997)::

    K_0 = s^2 (1 + x'z / d)
    ReLU:  K_l = s^2 (1 + sqrt(K(x,x) K(z,z)) (sin t + (pi - t) cos t) / 2 pi),  cos t = correlation
    erf:   K_l = s^2 (1 + 2/pi arcsin(2 K(x,z) / sqrt((1 + 2 K(x,x)) (1 + 2 K(z,z)))))

so that mean and sd of f given data are exact. The data are 100 rows of a draw of that process in
--inputs dimensions, with noise of sd 0.1, half of the test inputs between the rows and half beyond
them. Printed, over the test inputs: the root mean square of (mean - exact mean) / exact sd; mean
and root mean square of log(sd / exact sd). What draws alone would leave is 1 / sqrt(ESS) and
1 / sqrt(2 ESS), from the smallest of 4 chains' effective sizes. Mean-field must fail in this limit
(Coker et al. 2022): its f returns to the prior. ``check`` are the kernel's values against draws of
the prior of the widest network, in standard errors.
"""

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pyro
import torch
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

NOISE = 0.1


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.erf()


ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], float]] = {  # and the gain s
    "relu": (nn.ReLU, 2.0**0.5),
    "erf": (Erf, 1.5),
}


def kernel(x: Tensor, z: Tensor, activation: str, layers: int) -> Tensor:
    """Prior covariance of f in the limit, (N, M)."""
    variance = ACTIVATIONS[activation][1] ** 2
    both, left, right = (
        variance * (1.0 + product / x.shape[1])
        for product in (x @ z.T, x.square().sum(1)[:, None], z.square().sum(1)[None])
    )
    for _ in range(layers):
        if activation == "relu":
            size = (left * right).sqrt()
            angle = (both / size).clamp(-1.0, 1.0).arccos()
            mixed = size * (angle.sin() + (math.pi - angle) * angle.cos()) / (2.0 * math.pi)
            own = left / 2.0, right / 2.0
        else:
            mixed = _arcsine(both, left, right)
            own = _arcsine(left, left, left), _arcsine(right, right, right)
        both, left, right = (variance * (1.0 + value) for value in (mixed, *own))
    return both


def _arcsine(both: Tensor, left: Tensor, right: Tensor) -> Tensor:
    scaled = 2.0 * both / ((1.0 + 2.0 * left) * (1.0 + 2.0 * right)).sqrt()
    return 2.0 / math.pi * scaled.clamp(-1.0, 1.0).arcsin()


class Problem(NamedTuple):
    """Rows, targets and test inputs, with the exact mean and sd of f there."""

    x: Tensor
    y: Tensor
    new: Tensor
    mean: Tensor
    sd: Tensor


def problem(activation: str, layers: int, options: argparse.Namespace) -> Problem:
    random = torch.Generator().manual_seed(0)
    x, near, far = (
        spread * torch.randn(count, options.inputs, generator=random, dtype=torch.float64)
        for count, spread in ((options.data, 1.0), (25, 1.0), (25, 3.0))
    )
    new = torch.cat([near, far])
    rows = kernel(x, x, activation, layers)
    noisy = rows + NOISE**2 * torch.eye(len(x), dtype=torch.float64)
    factor = torch.linalg.cholesky(noisy)
    y = factor @ torch.randn(len(x), generator=random, dtype=torch.float64)
    cross = kernel(x, new, activation, layers)
    mean = cross.T @ torch.cholesky_solve(y[:, None], factor)[:, 0]
    explained = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum(0)
    return Problem(
        x, y, new, mean, (kernel(new, new, activation, layers).diag() - explained).sqrt()
    )


def program(activation: str, layers: int, width: int, inputs: int) -> Any:
    make, gain = ACTIVATIONS[activation]
    sizes = [inputs, *[width] * layers]
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), make())]
    network = nn.Sequential(*parts, nn.Linear(width, 1)).double()
    return bdl.models.Regression(bdl.bayesianize(network, bdl.priors.FanIn(gain)), noise=NOISE)


Moments = tuple[Tensor, Tensor, float]  # mean, sd, effective draws


def chains(kind: str) -> Callable[..., Moments]:
    def fit(model: Any, data: Problem, options: argparse.Namespace) -> Moments:
        kernels = {
            "NUTS": bdl.mcmc.NUTS(max_tree_depth=options.depth),
            "mclmc": bdl.mcmc.MCLMC(),
        }
        samples = bdl.mcmc.sample(
            model, data.x, data.y, kernel=kernels[kind], num_warmup=options.warmup,
            num_samples=options.draws, num_chains=4, progress=False,
        )  # fmt: skip
        f = bdl.Predictive(model, samples)(data.new)["f"]
        f = f.reshape(4, options.draws, -1)
        flat = f.flatten(0, 1)
        return flat.mean(0), flat.std(0), float(bdl.diagnostics.ess(f, kind="mean").min())

    return fit


def variational(family: Callable[..., Any]) -> Callable[..., Moments]:
    def fit(model: Any, data: Problem, options: argparse.Namespace) -> Moments:
        guide = family(model)
        train(model, guide, data.x, data.y, steps=options.steps, learning_rate=0.01, progress=False)
        f = bdl.Predictive(model, guide, num_samples=4 * options.draws)(data.new)["f"]
        f = f.reshape(4 * options.draws, -1)
        return f.mean(0), f.std(0), float(len(f))

    return fit


def laplace(structure: str) -> Callable[..., Moments]:
    def fit(model: Any, data: Problem, options: argparse.Namespace) -> Moments:
        guide = bdl.guides.AutoLaplaceGGN(model, structure=structure)
        train(model, guide, data.x, data.y, steps=options.steps, learning_rate=0.01, progress=False)
        posterior = guide.laplace_approximation((data.x, data.y))
        found = bdl.LinearizedPredictive(model, posterior).parameter_moments(data.new)["y"]
        return found.mean["loc"], found.variance["loc"].sqrt(), math.inf

    return fit


def ensemble(model: Any, data: Problem, options: argparse.Namespace) -> Moments:
    guide = bdl.guides.AutoEnsemble(model, size=10)
    train(model, guide, data.x, data.y, steps=options.steps, learning_rate=0.01, progress=False)
    f = bdl.Predictive(model, guide, num_samples=10)(data.new)["f"].reshape(10, -1)
    return f.mean(0), f.std(0), 10.0


METHODS: dict[str, Callable[..., Moments]] = {
    "NUTS": chains("NUTS"),
    "mclmc": chains("mclmc"),
    "mean-field": variational(bdl.guides.AutoMeanField),
    "inducing": variational(bdl.guides.AutoInducing),
    "Laplace, full": laplace("full"),
    "Laplace, kernel": laplace("kernel"),
    "Laplace, kron": laplace("kron"),
    "ensemble of 10": ensemble,
}


def measured(method: str, model: Any, data: Problem, options: argparse.Namespace) -> dict[str, Any]:
    pyro.set_rng_seed(0)
    start = time.process_time()
    mean, sd, effective = METHODS[method](model, data, options)
    shift = (mean.detach() - data.mean) / data.sd
    ratio = (sd.detach() / data.sd).log()
    near = slice(0, 25)
    return {
        "mean off": float(shift.square().mean().sqrt()),
        "log sd": float(ratio.mean()),
        "sd off": float(ratio.square().mean().sqrt()),
        "log sd near": float(ratio[near].mean()),
        "by draws": effective**-0.5, "seconds": time.process_time() - start,
    }  # fmt: skip


def check(activation: str, layers: int, options: argparse.Namespace) -> float:
    """The largest difference of the kernel from prior draws of the widest network, in errors."""
    data = problem(activation, layers, options)
    x = data.new[[0, 1, 30, 31]]
    model = program(activation, layers, max(options.widths), options.inputs)
    pyro.set_rng_seed(1)
    f = bdl.prior_predictive(model, x, num_samples=2000)["f"].reshape(2000, -1)
    products = f[:, :, None] * f[:, None]
    expected = kernel(x, x, activation, layers)
    errors = products.std(0) / 2000**0.5
    return float(((products.mean(0) - expected) / errors).abs().max())


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--widths", type=int, nargs="+", help="of the hidden layers")
    parser.add_argument("--activations", nargs="+", choices=list(ACTIVATIONS), default=["erf"])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2], help="hidden layers (1 2)")
    sizes = {
        "data": (100, 20, "rows"),
        "inputs": (4, 4, "dimensions"),
        "warmup": (500, 100, "iterations of the chains"),
        "draws": (500, 100, "of each of four chains"),
        "depth": (10, 7, "of NUTS's trees, at most"),
        "steps": (5000, 300, "of training"),
        "largest": (20_000, 3000, "numbers of a full matrix"),
    }
    options = harness.parse_sizes(parser, sizes)
    options.widths = options.widths or ([20, 50] if options.quick else [50, 200, 1000, 3000])
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(r["activation"], r["layers"], r["width"], r["method"]) for r in done}
    checks = {}
    for activation, layers in itertools.product(options.activations, options.layers):
        title = f"{activation}, {layers} hidden"
        checks[title] = check(activation, layers, options)
        data = problem(activation, layers, options)
        for width, method in itertools.product(options.widths, options.only):
            key = (activation, layers, width, method)
            model = program(activation, layers, width, options.inputs)
            size = sum(part.numel() for part in model.parameters()) or width * (options.inputs + 2)
            if key in known or (method == "Laplace, full" and size > options.largest):
                continue
            if layers == 2 and width > 1000:
                continue
            row = dict(zip(("activation", "layers", "width", "method"), key, strict=True))
            row |= measured(method, model, data, options)
            harness.write_rows(options.rows, [row])
            done.append(row)
            if not options.json:
                numbers = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
                print(title, width, f"{method:16}", json.dumps(numbers), flush=True)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "check": checks, "rows": done}))
    else:
        print(harness.machine(), "kernel against draws, in standard errors:", checks)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        main()
