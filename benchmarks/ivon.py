"""IVON in the place of Adam: the ELBO of mean-field after as many steps, and the time of a step.

A network with 50 ReLU units and inferred noise on the first standard split of UCI sets, batches of
128, one draw a step, learning rates falling along half a cosine. Adam and IVON have the best rates
of grids, by the final ELBO; VOGN its default. ELBOs are in nats, means over seeds, after +-
their standard errors.

    python benchmarks/ivon.py --data uci
"""

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import harness
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from tqdm import tqdm
from uci import SETS, Split

import pyro_bdl as bdl
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO
from pyro_bdl.training import estimate_elbo

RATES = (0.003, 0.01, 0.03)
IVON_RATES = (0.05, 0.1)
BATCH = 128
PLAIN = TemperedTraceMeanField_ELBO
Make = Callable[[bdl.guides.AutoMeanField, nn.Module], torch.optim.Optimizer]


def prepared(split: Split, make: Make, steps: int, elbo: type = PLAIN, seed: int = 0):
    """The program, its guide and a function that trains it."""
    pyro.set_rng_seed(seed)
    net = nn.Sequential(nn.Linear(split.x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    model = bdl.models.Regression(
        bdl.bayesianize(net, bdl.priors.Normal(1.0)),
        noise=dist.HalfNormal(1.0),
        num_data=len(split.x),
    )
    guide = bdl.guides.AutoMeanField(model).prototype(split.x, split.y)
    loss = elbo()(model, guide)
    optimizer = make(guide, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def train() -> None:
        rows: Tensor = torch.empty(0)
        for _ in range(steps):
            if len(rows) < BATCH:
                rows = torch.randperm(len(split.x))
            batch, rows = rows[:BATCH], rows[BATCH:]
            optimizer.zero_grad()
            step = loss.take_step(split.x[batch], split.y[batch])
            step.backward()
            step.move(optimizer)
            schedule.step()

    return model, guide, train


def reached(
    split: Split, make: Make, steps: int, seeds: int, elbo: type = PLAIN
) -> tuple[float, float]:
    """The final ELBO, mean over seeds and its standard error."""
    found = []
    for seed in range(seeds):
        model, guide, train = prepared(split, make, steps, elbo, seed)
        train()
        found.append(estimate_elbo(model, guide, split.x, split.y))
    error = statistics.stdev(found) / math.sqrt(seeds) if seeds > 1 else math.nan
    return statistics.fmean(found), error


def step_times(split: Split, makes: dict[str, tuple], steps: int, repeats: int) -> dict[str, float]:
    """Milliseconds of processor time a step, medians over runs in turns."""
    found: dict[str, list[float]] = {name: [] for name in makes}
    for _ in range(repeats):
        for name, (make, elbo) in makes.items():
            train = prepared(split, make, steps, elbo)[-1]
            started = time.process_time()
            train()
            found[name].append((time.process_time() - started) / steps * 1000)
    return {name: statistics.median(values) for name, values in found.items()}


def adam(rate: float) -> Make:
    return lambda guide, model: torch.optim.Adam(
        [*guide.parameters(), *model.parameters()], lr=rate
    )


def ivon(rate: float) -> Make:
    return lambda guide, _: IVON(guide, lr=rate)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, float] = {}

    def put(label: str, found: tuple[float, float]) -> None:
        results[f"{label}, ELBO"] = found[0]
        if options.seeds > 1:
            results[f"{label}, +-"] = found[1]

    names = options.sets.split(",")
    for name in tqdm(names, desc="sets"):
        split = Split(options.data, "standard", name, 0)
        steps, seeds = options.steps, options.seeds
        by_rate = {rate: reached(split, adam(rate), steps, seeds) for rate in RATES}
        rate = max(by_rate, key=lambda rate: by_rate[rate])
        put(f"{name}: Adam (learning rate {rate})", by_rate[rate])
        by_rate = {rate: reached(split, ivon(rate), steps, seeds) for rate in IVON_RATES}
        rate = max(by_rate, key=lambda rate: by_rate[rate])
        put(f"{name}: IVON (learning rate {rate})", by_rate[rate])
        put(f"{name}: the same, half the steps", reached(split, ivon(rate), steps // 2, seeds))
        vogn = reached(split, lambda guide, _: VOGN(guide), steps // 2, seeds, GaussNewton_ELBO)
        put(f"{name}: VOGN, half the steps", vogn)
    split = Split(options.data, "standard", names[0], 0)
    makes = {
        "Adam": (adam(0.01), PLAIN),
        "IVON": (ivon(0.1), PLAIN),
        "VOGN": (lambda guide, _: VOGN(guide), GaussNewton_ELBO),
    }
    times = step_times(split, makes, 200, options.repeats)
    for name, value in times.items():
        results[f"{name}, ms/step"] = value
    results["time of a step, IVON over Adam"] = times["IVON"] / times["Adam"]
    results["time of a step, VOGN over Adam"] = times["VOGN"] / times["Adam"]
    harness.show("IVON against Adam", results, options.json)


if __name__ == "__main__":
    main()
