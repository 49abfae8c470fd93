"""Estimated and measured peak memory: training, Laplace approximations, prediction and MCMC.

    python benchmarks/memory.py            # widths 1000, 2000 and 3000: up to 9 million weights
    python benchmarks/memory.py --quick    # the smallest network alone

Each side is measured in a process of its own: on the CPU how far the resident memory rises above
what the process held before, on CUDA what torch allocates. Networks 100-WIDTH-WIDTH-10, batches of
64 rows, three steps of Adam; approximations, 50 predictions and two chains of 50 draws over 256
rows. The C library's free room between blocks of less than 32 MB differs from run to run: of
``--repeats`` processes (3) the one with the median ratio is shown, with the range.
"""

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import in_own_process, memory_of, parser, show
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import guides

_ROWS, _BATCH = 256, 64
GUIDES: dict[str, Callable[[Any], Any]] = {
    "MAP": guides.AutoMAP,
    "mean-field": guides.AutoMeanField,
    "low rank 10": lambda model: guides.AutoLowRank(model, rank=10),
    "dropout": guides.AutoMCDropout,
}
STRUCTURES = ("diag", "kron")
KERNELS = ("nuts", "mclmc")
SIDES = (*GUIDES, *STRUCTURES, "prediction", *KERNELS)
DRAWS = 50  # of a prediction, and of each of two chains


def measured(run: Callable[[], object], device: str) -> float:
    """The peak of a call beyond what was held before, in MB."""
    if device == "cpu":
        return memory_of(run)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def first_calls(device: str) -> None:
    """Load what torch, Pyro and this library load when it is first needed."""
    x = torch.randn(4, 100, device=device)
    y = torch.randint(0, 10, (4,), device=device)
    net = nn.Sequential(nn.Linear(100, 8), nn.ReLU(), nn.Linear(8, 10)).to(device)
    model = bdl.models.Classification(bdl.bayesianize(net), num_data=4).to(device)
    for make in GUIDES.values():
        bdl.training.train(model, make(model), x, y, steps=3)
    for structure in STRUCTURES:
        guide = guides.AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        guide.laplace_approximation((x, y))
    bdl.Predictive(model, GUIDES["mean-field"](model).prototype(x, y), 2)(x)


def chains(model: nn.Module, x: torch.Tensor, y: torch.Tensor, kernel: str) -> object:
    """Few and short iterations: the memory does not depend on their number, but on the draws'."""
    few = {"max_tree_depth": 2} if kernel == "nuts" else {"thinning": 1}
    return bdl.mcmc.sample(
        model, x, y, kernel=kernel, num_warmup=2, num_samples=DRAWS, num_chains=2,
        chain_method="vectorized", progress=False, **few,
    )  # fmt: skip


def one(side: str, width: int, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(100, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).to(device)
    x = torch.randn(2048 if side in GUIDES else _ROWS, 100, device=device)
    y = torch.randint(0, 10, (len(x),), device=device)
    model = bdl.models.Classification(bdl.bayesianize(net), num_data=len(x)).to(device)
    first_calls(device)
    if side in GUIDES:
        guide = GUIDES[side](model)
        found = bdl.estimate_memory(model, guide, x, y, batch_size=_BATCH)
        peak = measured(
            lambda: bdl.training.train(model, guide, x, y, steps=3, batch_size=_BATCH), device
        )
    elif side in KERNELS:
        small, few = nn.Sequential(nn.Linear(100, 8), nn.ReLU(), nn.Linear(8, 10)), x[:4]
        chains(bdl.models.Classification(bdl.bayesianize(small), num_data=4), few, y[:4], side)
        found = bdl.estimate_memory(model, side, x, y, num_samples=DRAWS, num_chains=2)
        peak = measured(lambda: chains(model, x, y, side), device)
    elif side == "prediction":
        guide = GUIDES["mean-field"](model).prototype(x, y)
        found = bdl.estimate_memory(model, side, x, y, num_samples=DRAWS)
        peak = measured(lambda: bdl.Predictive(model, guide, DRAWS)(x), device)
    else:
        found = bdl.estimate_memory(model, side, x, y)
        guide = guides.AutoLaplaceGGN(model, structure=side).prototype(x, y)
        peak = measured(lambda: guide.laplace_approximation((x, y)), device)
    estimate = found.total / 2**20
    return {
        "weights": sum(p.numel() for p in net.parameters()),
        "estimated MB": round(estimate, 1),
        "measured MB": round(peak, 1),
        "estimated / measured": round(estimate / peak, 3),
    }


def median_of(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The run with the median ratio, and the range of ratios."""
    key = "estimated / measured"
    runs = sorted(runs, key=lambda run: run[key])
    return runs[len(runs) // 2] | {"range": [runs[0][key], runs[-1][key]]}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(repeats=3)
    options.add_argument("--quick", action="store_true", help="the smallest network alone")
    options.add_argument("--device", default="cpu")
    options.add_argument("--side", choices=SIDES, help="by default all")
    options.add_argument("--width", type=int, help="one side, in this process")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    if given.width is not None:
        print(json.dumps(one(given.side, given.width, given.device)))
        return
    sides = (given.side,) if given.side else SIDES
    widths = (1000,) if given.quick else (1000, 2000, 3000)
    found = {
        f"{side}, width {width}": median_of(
            [
                in_own_process(__file__, "--side", side, "--width", str(width))
                for _ in range(given.repeats)
            ]
        )
        for side in sides
        for width in widths
    }
    show("Peak memory, estimated and measured", found, given.json)


if __name__ == "__main__":
    main()
