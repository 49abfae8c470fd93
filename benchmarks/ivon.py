"""IVON in the place of Adam: the ELBO of mean-field after as many steps, and the time of a step.

A network with 50 ReLU units and inferred noise on the first standard split of UCI sets, batches of
128, one draw a step, learning rates falling along half a cosine. Adam's learning rate is the best
of a grid, by its own final ELBO; IVON has its defaults.

    python benchmarks/ivon.py --data uci
"""

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
BATCH = 128
Make = Callable[[bdl.guides.AutoMeanField, nn.Module], torch.optim.Optimizer]


def fit(split: Split, make: Make, steps: int, elbo: type = TemperedTraceMeanField_ELBO):
    """The trained program and guide."""
    pyro.set_rng_seed(0)
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
    rows: Tensor = torch.empty(0)
    for _ in range(steps):
        if len(rows) < BATCH:
            rows = torch.randperm(len(split.x))
        batch, rows = rows[:BATCH], rows[BATCH:]
        optimizer.zero_grad()
        loss(split.x[batch], split.y[batch]).backward()
        optimizer.step()
        schedule.step()
    return model, guide


def reached(split: Split, make: Make, steps: int, elbo: type = TemperedTraceMeanField_ELBO):
    return estimate_elbo(*fit(split, make, steps, elbo), split.x, split.y)


def step_times(split: Split, makes: dict[str, tuple], steps: int, repeats: int) -> dict[str, float]:
    """Milliseconds of processor time a step, medians over runs in turns."""
    found: dict[str, list[float]] = {name: [] for name in makes}
    for _ in range(repeats):
        for name, (make, elbo) in makes.items():
            started = time.process_time()
            fit(split, make, steps, elbo)
            found[name].append((time.process_time() - started) / steps * 1000)
    return {name: statistics.median(values) for name, values in found.items()}


def adam(rate: float) -> Make:
    return lambda guide, model: torch.optim.Adam(
        [*guide.parameters(), *model.parameters()], lr=rate
    )


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, float] = {}
    names = options.sets.split(",")
    for name in tqdm(names, desc="sets"):
        split = Split(options.data, "standard", name, 0)
        by_rate = {rate: reached(split, adam(rate), options.steps) for rate in RATES}
        best = max(by_rate, key=lambda rate: by_rate[rate])
        results[f"{name}: Adam (learning rate {best}), ELBO"] = by_rate[best]
        for share in (0.5, 1.0):
            steps = int(share * options.steps)
            ours = reached(split, lambda guide, _: IVON(guide), steps)
            results[f"{name}: IVON, {share:.0%} of the steps, ELBO"] = ours
        vogn = reached(split, lambda guide, _: VOGN(guide), options.steps // 2, GaussNewton_ELBO)
        results[f"{name}: VOGN, 50% of the steps, ELBO"] = vogn
    split = Split(options.data, "standard", names[0], 0)
    plain = TemperedTraceMeanField_ELBO
    makes = {
        "Adam": (adam(0.01), plain),
        "IVON": (lambda guide, _: IVON(guide), plain),
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
