"""The package on a GPU, in ten minutes: tests, times and memory as one table.

``python benchmarks/gpu.py`` on a machine with CUDA runs the tests of GPUs (``pytest -m cuda``),
then steps of mean-field VI against the same step by hand in torch, trainings in torch and in JAX, a
Kronecker Laplace approximation with its linearized predictions (``--peer`` has laplace-torch, see
``laplace.py``), predictions by draws, convergence of many weights, and chains of NUTS and MCLMC on
the devices that JAX has. Times are medians by the clock, with the device waited for, those of
trainings the slope between two lengths; memory is the device's peak in each row, above what was
held before.

``--device cpu --quick`` runs every row at a small size on a CPU.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import harness
import jax
import torch
import torch.nn.functional as F
from images import convolutional
from networks import Transformer, resnet, resnet20, resnet20_frn
from torch import Tensor, nn
from torch.func import functional_call

import pyro_bdl as bdl

Rows = dict[str, Any]
SIZES = {  # full, quick
    "batch": (128, 4),
    "width": (64, 4),  # of ResNet-18
    "layers": (6, 1),  # of the transformer
    "images": (2048, 8),  # of the Laplace approximation
    "draws": (100, 3),
    "weights": (10**6, 100),  # of R-hat and ESS
    "iterations": (500, 10),  # of the chains
    "steps": (1000, 20),  # of the longer training
    "repeats": (10, 1),
}
PARTS = ["tests", "steps", "trainings", "laplace", "predictions", "convergence", "chains"]


class Bench:
    """Rows of the table, each timed with its peak of the device's memory.

    :param device: of the tensors.
    :param repeats: timed calls of each row, after three that are not.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.rows: Rows = {}

    def add(self, name: str, value: float) -> None:
        """Add a row, and show it at once: a run that is stopped leaves what it has measured."""
        self.rows[name] = value
        print(f"{name:60}{value:12.4g}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, name: str, call: Callable[[], Any], *, warm: int = 3, repeats: int = 0) -> None:
        """Add the median seconds of a call and its peak of memory."""
        cuda, seconds = self.device.type == "cuda", []
        held = torch.cuda.memory_allocated(self.device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(warm):
            call()
        for _ in range(repeats or self.repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            seconds.append(time.perf_counter() - start)
        self.add(f"{name}: ms", 1e3 * median(seconds))
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - held
            self.add(f"{name}: MB", peak / 2**20)

    def ratio(self, name: str, other: str) -> None:
        """Add the time of another row, divided by that of the row called ``name``."""
        ratio = self.rows[f"{other}: ms"] / self.rows[f"{name}: ms"]
        self.rows[f"{name}: ratio of {other.rpartition(', ')[2]} to it"] = ratio


def step_by_hand(net: nn.Module, x: Tensor, y: Tensor, autocast: bool) -> Callable[[], None]:
    """A step of mean-field VI with the prior Normal(0, 1), written in torch on flat vectors."""
    shapes = {name: value.shape for name, value in net.named_parameters()}
    loc = torch.cat([value.detach().reshape(-1) for value in net.parameters()]).requires_grad_()
    free = torch.full_like(loc, -3.0, requires_grad=True)
    adam = torch.optim.Adam([loc, free], lr=1e-4)

    def step() -> None:
        adam.zero_grad()
        scale = F.softplus(free)
        draw = torch.addcmul(loc, scale, torch.randn_like(scale))
        parts = draw.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
            logits = functional_call(net, weights, x)
        kl = 0.5 * (scale.square() + loc.square() - 1.0).sum() - scale.log().sum()
        (kl + F.cross_entropy(logits.float(), y, reduction="sum")).backward()
        adam.step()

    return step


def step_of(elbo: Any, net: nn.Module, x: Tensor, y: Tensor, autocast: bool) -> Callable:
    """The same step by ``AutoMeanField`` and a bound of the package."""
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    loss, adam = elbo(model, guide), torch.optim.Adam(guide.parameters(), lr=1e-4)

    def step() -> None:
        adam.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
            value = loss(x, y)
        value.backward()
        adam.step()

    return step


def steps(bench: Bench, sizes: argparse.Namespace, inductor: bool) -> None:
    """Rows of one training step."""
    device, batch = bench.device, sizes.batch
    y = torch.randint(10, (batch,), device=device)
    cases = {
        "ResNet-20": (resnet20, torch.randn(batch, 3, 32, 32, device=device)),
        "transformer": (
            lambda: Transformer(sizes.layers),
            torch.randn(batch, 64, 384, device=device),
        ),
    }
    plain, compiled = bdl.elbo.TemperedTraceMeanField_ELBO, bdl.elbo.CompiledELBO
    for network, (make, x) in cases.items():
        for autocast in (False, True):
            name = f"{network}, bfloat16" if autocast else network
            hand = f"{name}, by hand"
            bench.time(hand, step_by_hand(make().to(device), x, y, autocast))
            bounds: dict[str, Any] = {"plain": plain(), "compiled": compiled()}
            if inductor:
                bounds["inductor"] = compiled(backend="inductor")
            for bound, elbo in bounds.items():
                bench.time(f"{name}, {bound}", step_of(elbo, make().to(device), x, y, autocast))
                bench.ratio(f"{name}, {bound}", hand)


def trainings(bench: Bench, sizes: argparse.Namespace) -> None:
    """Rows of steps inside ``training.train``, where JAX runs them in one compiled loop."""
    batch, device = sizes.batch, bench.device
    mlp = lambda *widths: nn.Sequential(  # noqa: E731
        *(
            part
            for into, out in pairwise(widths)
            for part in (nn.Linear(into, out), *[nn.ReLU()] * (out > 10))
        )
    )
    cases = {
        "784-400-400-10": (lambda: mlp(784, 400, 400, 10), (784,)),
        "ResNet-20 with filter response": (resnet20_frn, (3, 32, 32)),
    }
    sides = {
        "plain": (bdl.elbo.TemperedTraceMeanField_ELBO, "torch"),
        "compiled": (bdl.elbo.CompiledELBO, "torch"),
        "JAX": (bdl.elbo.TemperedTraceMeanField_ELBO, "jax"),
    }
    for network, (make, shape) in cases.items():
        x = torch.randn(8 * batch, *shape, device=device)
        y = torch.randint(10, (len(x),), device=device)
        for side, (elbo, backend) in sides.items():
            seconds = []
            # one stretch of JAX's loop compiles; then each length is whole stretches
            for steps in (sizes.steps // 2, sizes.steps // 2, sizes.steps):
                prior = bdl.priors.Normal(1.0)
                model = bdl.models.Classification(
                    bdl.bayesianize(make().to(device), prior), num_data=len(x)
                )
                guide = bdl.guides.AutoMeanField(model)
                bench.wait()
                start = time.perf_counter()
                bdl.training.train(
                    model, guide, x, y, steps=steps, batch_size=batch, elbo=elbo(), backend=backend
                )
                bench.wait()
                seconds.append(time.perf_counter() - start)
            name = f"{network}, training, {side}"
            slope = (seconds[2] - seconds[1]) / (sizes.steps - sizes.steps // 2)
            bench.add(f"{name}: ms", 1e3 * slope)
            bench.add(f"{name}: first {sizes.steps // 2} steps, s", seconds[0])


def laplace(bench: Bench, sizes: argparse.Namespace, peer: bool) -> None:
    """Rows of a Kronecker Laplace approximation and of its predictions; the peer's fit beside,
    which takes no BatchNorm."""
    once = {"warm": 0, "repeats": 1}
    cases = {
        "ResNet-18": (resnet(sizes.width), (3, 32, 32)),
        "CNN": (convolutional(sizes.width / 64), (1, 28, 28)),
    }
    for network, (net, shape) in cases.items():
        x = torch.randn(sizes.images, *shape, device=bench.device)
        y = torch.randint(10, (sizes.images,), device=bench.device)
        net = net.to(bench.device).eval()
        model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
        guide = bdl.guides.AutoLaplaceGGN(model, structure="kron").prototype(x[:2], y[:2])
        batches = list(zip(x.split(256), y.split(256), strict=True))
        new = x[: min(100, len(x))]
        posterior = guide.laplace_approximation(batches)
        name = f"{network}, kron, fit"
        bench.time(name, lambda: guide.laplace_approximation(batches), **once)  # noqa: B023
        predictive = bdl.LinearizedPredictive(model, posterior)
        predict = lambda: predictive.probabilities(new)  # noqa: B023, E731
        bench.time(f"{network}, kron, predictions of {len(new)}", predict, **once)
        if peer and network == "CNN":
            from laplace import Laplace

            theirs = Laplace(net, "classification", "all", "kron")
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 256)
            fit = lambda: theirs.fit(loader)  # noqa: B023, E731
            bench.time("CNN, laplace-torch, fit", fit, **once)
            bench.ratio(name, "CNN, laplace-torch, fit")


def predictions(bench: Bench, sizes: argparse.Namespace) -> None:
    """A row of predictions at draws of the weights."""
    x = torch.randn(2 * sizes.batch, 3, 32, 32, device=bench.device)
    net = resnet20().to(bench.device).eval()
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    y = torch.randint(10, (len(x),), device=bench.device)
    guide = bdl.guides.AutoMeanField(model).prototype(x[:2], y[:2])
    predictive = bdl.Predictive(model, guide, sizes.draws)
    bench.time(f"ResNet-20, {sizes.draws} draws, {len(x)} images", lambda: predictive(x), warm=1)


def convergence(bench: Bench, sizes: argparse.Namespace) -> None:
    """A row of R-hat and ESS."""
    draws = torch.randn(4, 250, sizes.weights, device=bench.device)
    both = (bdl.diagnostics.rhat, bdl.diagnostics.ess)
    call = lambda: [function(draws) for function in both]  # noqa: E731
    bench.time(f"R-hat and ESS of {sizes.weights} weights", call, warm=0, repeats=1)


def chains(bench: Bench, sizes: argparse.Namespace) -> None:
    """Rows of chains on a network 8-50-1, on each device of JAX."""
    x = torch.randn(200, 8)
    y = x[:, 0].sin() + 0.1 * torch.randn(200)
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1)
    count = {"num_warmup": sizes.iterations, "num_samples": sizes.iterations, "num_chains": 4}
    for platform in sorted({"cpu", jax.default_backend()}):
        with jax.default_device(jax.devices(platform)[0]):
            for kernel in ("nuts", "mclmc"):
                run = lambda kernel=kernel: bdl.mcmc.sample(  # noqa: E731
                    model, x, y, kernel=kernel, seed=0, progress=False, **count
                )
                bench.time(f"8-50-1, {kernel}, JAX on {platform}", run, warm=0, repeats=1)


def tests() -> str:
    """The last line of the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider"]
    folder = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="every row at a small size")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--peer", type=Path, help="a folder with laplace-torch")
    parser.add_argument("--no-inductor", action="store_true", help="without its compilation")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    sizes = argparse.Namespace(**{name: pair[options.quick] for name, pair in SIZES.items()})
    device = torch.device(options.device)
    torch.manual_seed(0)
    bench = Bench(device, sizes.repeats)
    if device.type == "cuda" and "tests" in options.only:
        bench.rows["pytest -m cuda"] = tests()
    sys.path[:0] = [str(options.peer)] if options.peer else []
    parts: dict[str, Callable[[], None]] = {
        "steps": lambda: steps(bench, sizes, not (options.quick or options.no_inductor)),
        "trainings": lambda: trainings(bench, sizes),
        "laplace": lambda: laplace(bench, sizes, peer=options.peer is not None),
        "predictions": lambda: predictions(bench, sizes),
        "convergence": lambda: convergence(bench, sizes),
        "chains": lambda: chains(bench, sizes),
    }
    for name in options.only:
        if name in parts:
            parts[name]()
    harness.show(f"gpu: {device}", bench.rows, options.json)


if __name__ == "__main__":
    main()
