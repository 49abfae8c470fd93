"""Data-parallel training and Laplace fits: one process against several on one machine.

Two classifiers of 28 x 28 images under ``AutoMeanField``, LeNet-5 (61 706 weights) and a
784-400-400-10 network (478 410), are trained with batches of the same size by one process and, in
equal parts, by K processes (gloo); then Laplace approximations are fitted to the same rows. All
processes live all the time and have as many threads each; where one works the others wait.
Processor times are those of the busiest process, without waiting: what idle cores come close to.
The data are random, their values do not matter.

    python benchmarks/distributed.py --processes 2
"""

import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO, Shard
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO

CLASSES = 10


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "small":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 1), nn.Tanh(), nn.Linear(1, CLASSES))
    if name == "MLP":
        layers = [nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(400, CLASSES))
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    layers = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return nn.Sequential(*convolutions, *layers, nn.Linear(84, CLASSES))


def program(name: str, rows: int) -> nn.Module:
    net = bdl.bayesianize(network(name), bdl.priors.FanIn(1.0))
    return bdl.models.Classification(net, num_data=rows)


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 1, 28, 28, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def training(name: str, batch: int, steps: int, *, alone: bool) -> Callable[[], None]:
    """Steps on a joint batch of that size, on one rank or on all."""
    model, elbo = program(name, 60_000), TemperedTraceMeanField_ELBO()
    x, y = images(batch)
    if not alone:
        part = slice(dist.get_rank(), None, dist.get_world_size())
        x, y, elbo = x[part], y[part], DataParallel_ELBO(elbo)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=1e-3)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            objective(x, y).backward()
            optimizer.step()

    return run


def fit(structure: str, name: str, rows: int, *, alone: bool) -> Callable[[], Any]:
    """A Laplace approximation to that many rows, on one rank or on all."""
    model = program(name, rows)
    x, y = images(rows)
    guide = bdl.guides.AutoLaplaceGGN(model, structure=structure).prototype(x[:2], y[:2])
    data: Any = (x, y)
    if not alone:
        part = slice(dist.get_rank(), None, dist.get_world_size())
        data = Shard((x[part], y[part]))

    def run() -> None:
        with warnings.catch_warnings():  # the network is not trained
            warnings.simplefilter("ignore", bdl.errors.BdlWarning)
            guide.laplace_approximation(data)

    return run


def seconds(
    one: Callable[[], Any], all_of_them: Callable[[], Any], repeats: int
) -> tuple[list[float], list[float]]:
    """Medians for one process and for all, in turns: seconds by the clock, and processor seconds of
    the busiest process; the first round does not count."""
    clock: list[list[float]] = [[], []]
    processor: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for side, (work, alone) in enumerate(((one, True), (all_of_them, False))):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            if not alone or dist.get_rank() == 0:
                work()
            most = torch.tensor([time.process_time() - used], dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)  # which waits for all
            clock[side].append(time.perf_counter() - start)
            processor[side].append(most.item())
    medians = ([statistics.median(times[1:]) for times in kind] for kind in (clock, processor))
    return next(medians), next(medians)


def told(title: str, unit: str, factor: float, found: tuple[list[float], list[float]]) -> dict:
    """Both times of both sides, in a unit, and the ratios."""
    count, results = dist.get_world_size(), {}
    for kind, (one, many) in zip(("clock", "processor"), found, strict=True):
        results |= {
            f"{title}: 1 process, {kind} {unit}": factor * one,
            f"{title}: {count} processes, {kind} {unit}": factor * many,
            f"{title}: {kind} ratio": one / many,
        }
    return results


def measured(options: Any) -> dict[str, Any]:
    results = {"processes": dist.get_world_size(), "threads of each": options.threads}
    for name, batch in zip(("LeNet-5", "MLP"), options.batches, strict=True):
        sides = [training(name, batch, options.steps, alone=alone) for alone in (True, False)]
        found = seconds(*sides, options.repeats)
        results |= told(f"{name}, joint batch {batch}", "ms/step", 1e3 / options.steps, found)
    for structure, name in (("kron", "LeNet-5"), ("kron", "MLP"), ("full", "small")):
        sides = [fit(structure, name, options.rows, alone=alone) for alone in (True, False)]
        found = seconds(*sides, options.repeats)
        results |= told(f"Laplace {structure}, {name}, {options.rows} rows", "s", 1.0, found)
    return results


def work(options: Any) -> None:
    """One of the processes; the first writes down what was found."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.folder}/meeting",
        rank=options.rank,
        world_size=options.processes,
        timeout=datetime.timedelta(minutes=10),
    )
    results = measured(options)
    if options.rank == 0:
        Path(options.folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="steps per timed round")
    parser.add_argument(
        "--batches", type=int, nargs=2, default=[512, 1024], help="of LeNet-5 and the MLP"
    )
    parser.add_argument("--rows", type=int, default=4000, help="of the Laplace fits")
    parser.add_argument("--rank", type=int, help="of this process; set by the script itself")
    parser.add_argument("--folder", help="where processes meet; set by the script itself")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.processes)
        ]
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise SystemExit(f"the processes ended with {codes}")
        results = json.loads(Path(folder, "results.json").read_text())
    harness.show("distributed: one process against several", results, options.json)


if __name__ == "__main__":
    main()
