"""Posteriors around a trained network: what predictions and a frozen module cost.

    python benchmarks/large_trained.py --threads 1

A residual network with BatchNorm, random images and labels; nothing is trained. Work is counted in
the floating-point operations of a forward pass of the same rows, so that other load on the machine
does not count; of the frozen module also in seconds of the processor. Memory is the growth of a
process of its own, in MB, beside the draws that it holds. For all weights ("kron") and the last
layer: the fit, the file of the posterior, ``probabilities``, S draws by ``mean``, and the module of
``bdl.freeze`` with S draws; and for the last layer ``Predictive`` with S draws.
"""

import copy
import json
import tempfile
import time
import warnings
from pathlib import Path

import torch
from harness import in_own_process, in_turns, memory_of, parse_sizes, parser, show
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pyro_bdl as bdl

KINDS = {"all weights": None, "last layer": "last-layer"}


class Block(nn.Module):
    """Two convolutions beside a skip connection."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.skip(x))


def network(width: int, classes: int) -> nn.Module:
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))
    first = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(first, *blocks, head).eval()


def problem(options):
    torch.manual_seed(0)
    net = network(options.width, options.classes)
    x = torch.randn(options.rows, 3, options.pixels, options.pixels)
    y = torch.randint(options.classes, (options.rows,))
    model = bdl.models.Classification(
        bdl.bayesianize(copy.deepcopy(net), bdl.priors.Normal(0.1)), num_data=1000
    )
    return net, model, x, y


def fitted(model, x, y, subset):
    with warnings.catch_warnings(action="ignore", category=bdl.errors.BdlWarning):
        structure = "kron" if subset is None else "full"
        guide = bdl.guides.AutoLaplaceGGN(
            model, structure=structure, subset=subset, curvature="ggn-mc"
        )
        return guide.prototype(x, y).laplace_approximation((x, y))


def work(function):
    """Floating-point operations, and the result."""
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


def costs(options, subset) -> dict[str, float]:
    """Forward passes of each task, and the sizes of what is stored, in networks."""
    net, model, x, y = problem(options)
    with torch.no_grad():
        forward, _ = work(lambda: net(x))
    found = {}

    def measure(task, function):
        operations, result = work(function)
        found[f"{task}, forwards"] = operations / forward
        return result

    posterior = measure("fit", lambda: fitted(model, x, y, subset))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        size = path.stat().st_size / sum(4 * value.numel() for value in net.state_dict().values())
    found["file, networks"] = size
    options_of_draws = {"num_samples": options.draws, "seed": 0}
    linearized = bdl.LinearizedPredictive(model, posterior, **options_of_draws)
    if options.classes <= 20 or subset is not None:
        measure("probabilities", lambda: linearized.probabilities(x))
    measure("mean of draws", lambda: linearized.mean(x))
    if subset is not None:
        sampled = bdl.Predictive(model, posterior, options.draws)
        measure("Predictive", lambda: sampled.mean(x))
    frozen = bdl.freeze(model, posterior, x[:1], draws=options.draws)
    with torch.no_grad():
        measure("frozen", lambda: frozen(x))
        sides = {"network": lambda: net(x), "frozen": lambda: frozen(x)}
        seconds = in_turns(sides, options.repeats, clock=time.process_time)
    found["frozen, time of forwards"] = seconds["frozen"] / seconds["network"]
    weights = sum(value.numel() for value in net.parameters())
    stored = sum(value.numel() for value in frozen.state_dict().values())
    return found | {"frozen, stored networks": stored / weights}


def memory(options, subset) -> dict[str, float]:
    """MB by which making a frozen module grows the process, beside its draws."""
    _, model, x, y = problem(options)
    posterior = fitted(model, x[:2], y[:2], subset)
    grown = memory_of(lambda: bdl.freeze(model, posterior, x[:1], draws=options.draws))
    draws = posterior.subset.size * options.draws * 4 / 2**20
    return {"making the frozen module, MB": grown, "its draws, MB": draws}


SIZES = {
    "width": (128, 4, "channels of the first layers"),
    "classes": (10, 10, "classes"),
    "rows": (16, 4, "images"),
    "pixels": (32, 8, "height and width of an image"),
    "draws": (20, 6, "S"),
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--memory", choices=KINDS, help="print the memory of one posterior")
    options = parse_sizes(arguments, SIZES)
    torch.set_num_threads(options.threads)
    if options.memory:
        print(json.dumps(memory(options, KINDS[options.memory])))
        return
    results = {}
    for kind, subset in KINDS.items():
        found = costs(options, subset) | in_own_process(__file__, f"--memory={kind}")
        results |= {f"{kind}: {name}": value for name, value in found.items()}
    show("large trained", results, options.json)


if __name__ == "__main__":
    main()
