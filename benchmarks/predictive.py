"""Posterior predictive draws against ``pyro.infer.Predictive``, and memory by number of draws.

1000 draws x 1000 inputs through an 8-50-50-1 MLP written by hand as a Pyro program, and draws of
a small CNN on 28 x 28 images.
"""

import json
import subprocess
import sys
import time

import harness
import pyro
import torch
from pyro.infer.autoguide import AutoNormal
from svi import HandWritten
from torch import nn

import pyro_bdl as bdl


def mlp(inputs: int):
    x = torch.randn(inputs, 8)
    return HandWritten(), x, x[:, 0].sin()


def cnn(inputs: int):
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 10),
    )
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.FanIn(1.0)))
    return model, torch.randn(inputs, 1, 28, 28), torch.randint(10, (inputs,))


def compare(make, draws: int, inputs: int, repeats: int) -> dict[str, float]:
    """Both sides push draws of the same program's guides through it."""
    model, x, y = make(inputs)
    theirs = AutoNormal(model)
    theirs(x, y)
    ours = bdl.guides.AutoMeanField(model).prototype(x, y)
    sides = {
        "pyro": lambda: pyro.infer.Predictive(model, guide=theirs, num_samples=draws)(x),
        "bdl": lambda: bdl.Predictive(model, ours, draws)(x),
    }
    return harness.in_turns(sides, repeats)


def memory_of(draws: int) -> float:
    """Peak memory of a fresh process that predicts one number per draw, MB."""
    command = [sys.executable, __file__, "--memory-of", str(draws)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def measure_memory(draws: int) -> None:
    model, x, y = mlp(1000)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    harness.reset_peak_memory()
    before = harness.peak_memory_mb()
    bdl.Predictive(model, guide, draws)(x)
    print(json.dumps(harness.peak_memory_mb() - before))


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--cnn-draws", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-of", type=int, help="only measure the memory of so many draws")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    harness.set_device(options.device)
    torch.manual_seed(0)
    if options.memory_of:
        measure_memory(options.memory_of)
        return
    started = time.perf_counter()
    small = compare(mlp, options.draws, options.inputs, options.repeats)
    images = compare(cnn, options.cnn_draws, options.inputs, options.repeats)
    outputs = 2 * 4 * options.inputs * options.draws / 2**20
    few, many = memory_of(options.draws), memory_of(4 * options.draws)
    results = {
        f"MLP, {options.draws} draws x {options.inputs} inputs: pyro, s": small["pyro"],
        f"MLP, {options.draws} draws x {options.inputs} inputs: pyro_bdl, s": small["bdl"],
        "MLP: ratio": small["pyro"] / small["bdl"],
        f"CNN, {options.cnn_draws} draws x {options.inputs} images: pyro, s": images["pyro"],
        f"CNN, {options.cnn_draws} draws x {options.inputs} images: pyro_bdl, s": images["bdl"],
        "CNN: ratio": images["pyro"] / images["bdl"],
        f"MLP: memory above start, {options.draws} draws, MB": few,
        f"MLP: memory above start, {4 * options.draws} draws, MB": many,
        f"MLP: of which results y and f, {options.draws} draws, MB": outputs,
        f"MLP: of which results y and f, {4 * options.draws} draws, MB": 4 * outputs,
        "seconds in all": time.perf_counter() - started,
    }
    harness.show("predictive: draws x inputs", results, options.json)


if __name__ == "__main__":
    main()
