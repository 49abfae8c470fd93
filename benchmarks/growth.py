"""Memory of a process over many steps, comparisons and MCMC runs: none grows after the first ten.

    python benchmarks/growth.py            # 10 000 steps, 1000 compares, 100 runs of mcmc.sample
    python benchmarks/growth.py --quick    # a tenth of each or less

Each kind of call runs in a process of its own. Growth is the resident memory after the last call
less that after the first tenth of the calls (at least ten), in MB, and per 1000 calls.
"""

import ctypes
import gc
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from harness import in_own_process, parser, show
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

import pyro_bdl as bdl


def program() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 30)[:, None]
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=30), x, x.sin()


def steps(compiled: bool) -> Callable[[], object]:
    """One step of SVI with one guide."""
    model, x, y = program()
    elbo = bdl.elbo.CompiledELBO() if compiled else bdl.elbo.TemperedTraceMeanField_ELBO()
    svi = SVI(model, bdl.guides.AutoMeanField(model), Adam({"lr": 0.01}), elbo)
    return lambda: svi.step(x, y)


def guides() -> Callable[[], object]:
    """A new program and guide each time, trained compiled and by SVI, and predictions."""

    def call() -> None:
        model, x, y = program()
        guide = bdl.guides.AutoLaplaceGGN(model)
        elbo = bdl.elbo.CompiledELBO()
        bdl.training.train(model, guide, x, y, steps=4, elbo=elbo)
        svi = SVI(model, guide, Adam({"lr": 0.01}), bdl.elbo.TemperedTraceMeanField_ELBO())
        svi.step(x, y)
        bdl.Predictive(model, guide.laplace_approximation((x, y)), 4)(x)

    return call


def compares() -> Callable[[], object]:
    model, x, y = program()
    guide = bdl.guides.AutoMeanField(model)
    bdl.training.train(model, guide, x, y, steps=20)
    point = bdl.guides.AutoMAP(model)
    bdl.training.train(model, point, x, y, steps=20)

    def call() -> None:
        posteriors = {"mean-field": guide, "map": point}
        bdl.compare(model, posteriors, x, y, reference="mean-field", train=(x, y), num_samples=50)

    return call


def samples(kernel: str) -> Callable[[], object]:
    """Chains of a new program each time, as in a study over data sets."""

    def call() -> None:
        model, x, y = program()
        bdl.mcmc.sample(
            model, x, y, kernel=kernel, num_warmup=20, num_samples=20, num_chains=2, progress=False
        )

    return call


SIDES: dict[str, tuple[Callable[[], Callable[[], object]], int, int]] = {
    "SVI steps": (lambda: steps(False), 10_000, 1000),
    "SVI steps, compiled": (lambda: steps(True), 10_000, 1000),
    "programs and guides": (guides, 300, 30),
    "compares": (compares, 1000, 40),
    "mcmc.sample, nuts": (lambda: samples("nuts"), 100, 20),
    "mcmc.sample, mclmc": (lambda: samples("mclmc"), 100, 20),
}


def resident() -> float:
    """The resident memory in MB, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) / 1024


def growth(side: str, quick: bool) -> dict[str, float]:
    make, full, few = SIDES[side]
    count = few if quick else full
    start, call = time.process_time(), make()
    first = max(10, count // 10)
    for _ in range(first):
        call()
    before = resident()
    for _ in range(count - first):
        call()
    grown = resident() - before
    return {
        "calls": count,
        "MB after the first": round(before, 1),
        "growth in MB": round(grown, 2),
        "MB per 1000 calls": round(1000 * grown / (count - first), 2),
        "seconds of the processor": round(time.process_time() - start, 1),
    }


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="fewer calls")
    options.add_argument("--side", choices=tuple(SIDES), action="append", help="by default all")
    options.add_argument("--in-this-process", action="store_true", help="print one side's numbers")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    sides = given.side or list(SIDES)
    if given.in_this_process:
        print(json.dumps(growth(sides[-1], given.quick)))
        return
    found = {side: in_own_process(__file__, "--side", side, "--in-this-process") for side in sides}
    show("Memory of a process over many calls", found, given.json)


if __name__ == "__main__":
    main()
