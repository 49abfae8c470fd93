"""``subnetwork.py --task large``: time and memory in a network of 11 million weights.

ResNet-18 for 32 x 32 images (11 173 962 weights) and random images; times and
memory do not depend on their values. Each size runs in a process of its own: the selection by
predictive variance (a diagonal Laplace approximation over all weights), the full matrix over the
chosen ones, and linearised class probabilities. Times are of the processor, memory is the peak of
the process. Counts above ``--most`` are only asked whether they would fit, in float32 and float64.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from typing import Any

import harness
import torch
from networks import resnet

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import selectors
from pyro_bdl.guides.gaussian import approximate
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subset import Subset


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("large")
    group.add_argument(
        "--counts", type=int, nargs="*", default=[1000, 5000, 42_000], help="chosen weights"
    )
    group.add_argument("--most", type=int, default=20_000, help="that are run (20 000)")
    group.add_argument("--images", type=int, default=64, help="of the fit (64)")
    group.add_argument("--predicted", type=int, default=16, help="images to predict (16)")
    group.add_argument("--width", type=int, default=64, help="of the ResNet (64)")
    group.add_argument("--only-count", type=int, help=argparse.SUPPRESS)


def program(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, torch.Tensor, Any]:
    """A guide at a network's initial values, images and their classes."""
    torch.manual_seed(0)
    x, y = torch.randn(options.images, 3, 32, 32, dtype=dtype), torch.randint(10, (options.images,))
    net = resnet(options.width).eval().to(dtype)
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(0.1)))
    return bdl.guides.AutoSubnetwork(model).prototype(x[:2], y[:2]), x, y


def one(options: argparse.Namespace) -> dict[str, float]:
    """Processor seconds and peak memory of one count, in this process."""
    guide, x, y = program(options, torch.float32)
    model, data = guide.program_model, (x, y)
    select, times, memory = selectors.LargestPredictiveVariance(), [time.process_time()], []

    def mark() -> None:
        times.append(time.process_time())
        memory.append(harness.peak_memory_mb())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # the network is not trained
        chosen = guide.choose(data, select=select, size=options.only_count)
        mark()
        subset = Subset(guide.require_layout(), chosen)
        posterior = approximate(guide, guide.config, subset, Batches(data))
        mark()
        predicted = x[: options.predicted]
        bdl.LinearizedPredictive(model, posterior).probabilities(predicted)
        mark()
    select_s, fit_s, predict_s = (b - a for a, b in pairwise(times))
    return {
        "select, s per image": select_s / len(x),
        "fit, s": fit_s,
        "predict, s per image": predict_s / len(predicted),
        **dict(zip(("MB to select", "MB to fit", "MB in all"), memory, strict=True)),
    }


def would_fit(options: argparse.Namespace, count: int) -> dict[str, str]:
    """What the package says of a count before it starts."""
    answers = {}
    for dtype in (torch.float32, torch.float64):
        guide, x, y = program(options, dtype)
        started = time.process_time()
        try:
            guide.choose((x, y), select=selectors.Random(), size=count)
            answer = "fits"
        except MemoryError as error:
            answer = str(error)
        seconds = time.process_time() - started
        answers[str(dtype).removeprefix("torch.")] = f"{answer} (told after {seconds:.1f} s)"
    return answers


def run(options: argparse.Namespace) -> tuple[dict[str, Any], None]:
    """Each count in a process of its own."""
    if options.only_count is not None:
        return one(options), None
    weights = program(options, torch.float32)[0].require_layout().size
    results: dict[str, Any] = {
        "weights": weights, "images": options.images, "threads": options.threads, "counts": {}
    }  # fmt: skip
    for count in options.counts:
        if count > options.most:
            results["counts"][count] = would_fit(options, count)
            continue
        command = [sys.executable, *sys.argv, "--json", "--only-count", str(count)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        results["counts"][count] = {k: v for k, v in found.items() if isinstance(v, float)}
    return results, None


def show(results: dict[str, Any]) -> None:
    print(f"ResNet-18, {results['weights']} weights, {results['images']} images")
    for count, values in results["counts"].items():
        print(f"  {count} chosen")
        for name, value in values.items():
            print(f"    {name:<24} {value if isinstance(value, str) else f'{value:.3g}'}")


def figure(results: dict[str, Any], extra: None, path: str) -> None:
    raise SystemExit("--task large has no figure")
