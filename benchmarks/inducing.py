"""Global inducing points against mean-field: in-between, with the width, and on UCI sets.

    python benchmarks/inducing.py --threads 1 --rows inducing.jsonl
    python benchmarks/inducing.py --threads 1 --rows inducing.jsonl --tasks uci --data uci

All bounds are at temperature 1. Mean-field and low-rank take four times ``--steps`` at each of two
rates, of which the better one counts. ``gap`` is the network and the data of ``in_between.py``,
``width`` the same data and one hidden layer of 50 to 1000 units. ``uci``: standard splits of UCI
sets, 50 ReLU units, the prior FanIn(1) and noise ~ HalfNormal(1). ELBO and KL are in nats, at the
training data. ``rmse``, of f's mean, is that at the training data for ``gap`` and ``width``, else
at the test data, like the log likelihood, both in units of y. Seconds are processor time of the
fit. Each row is written to ``--rows`` as soon as it is known, and one that is there is not run
again.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from harness import machine, parse_sizes, parser, read_rows, write_rows
from torch import Tensor, nn
from uci import Split

import pyro_bdl as bdl
from pyro_bdl import elbo, guides, optim
from pyro_bdl.data import two_clusters
from pyro_bdl.training import estimate_elbo, train

NOISE = 0.1
Row = dict[str, Any]
Fit = Callable[[Any, int, Tensor, Tensor], Any]


def by_adam(family: Callable[..., Any], *, times: int = 1, rates: tuple[float, ...]) -> Fit:
    """Adam with four draws a step; of several rates the one with the best bound.

    :param times: more steps, for posteriors that need them.
    """

    def fit(model: Any, steps: int, x: Tensor, y: Tensor) -> Any:
        found = []
        for rate in rates:
            guide = family(model, init_loc_fn=bdl.init.init_afresh).prototype(x, y)
            bound = elbo.CompiledELBO(num_particles=4)
            train(model, guide, x, y, steps=times * steps, learning_rate=rate, elbo=bound)
            value = estimate_elbo(model, guide, x, y, num_particles=64, progress=False)
            found.append((value, guide))
        return max(found, key=lambda pair: pair[0])[1]

    return fit


def noisy_kfac(model: Any, steps: int, x: Tensor, y: Tensor) -> Any:
    guide = guides.AutoMatrixNormal(model, init_loc_fn=bdl.init.init_afresh).prototype(x, y)
    optimizer = optim.NoisyKFAC(guide)
    bound = optim.KroneckerGaussNewton_ELBO()
    train(model, guide, x, y, steps=steps, elbo=bound, optimizer=optimizer)
    return guide


FITS: dict[str, Fit] = {
    "mean-field": by_adam(guides.AutoMeanField, times=4, rates=(0.03, 0.1)),
    "low-rank": by_adam(guides.AutoLowRank, times=4, rates=(0.03, 0.1)),
    "noisy K-FAC": noisy_kfac,
    "inducing": by_adam(guides.AutoInducing, rates=(0.03,)),
}


def program(inputs: int, width: int, gain: float, noise: Any, num_data: int) -> Any:
    net = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
    bnn = bdl.bayesianize(net, bdl.priors.FanIn(gain))
    return bdl.models.Regression(bnn, noise=noise, num_data=num_data)


def fitted(model: Any, name: str, steps: int, x: Tensor, y: Tensor) -> tuple[Any, Row]:
    """A fit, with its bound, its KL and its processor time."""
    started = time.process_time()
    guide = FITS[name](model, steps, x, y)
    seconds = time.process_time() - started
    bound = elbo.TemperedTraceMeanField_ELBO(num_particles=20)
    bound.loss(model, guide, x, y)
    value = estimate_elbo(model, guide, x, y, num_particles=128, progress=False)
    return guide, {"elbo": value, "kl": float(bound.kl), "seconds": seconds}


def on_clusters(case: Row, steps: int) -> Row:
    data = two_clusters(100, seed=0, noise=NOISE)
    x, y = data.x_train, data.y_train
    model = program(1, case["width"], 3.0, NOISE, len(x))
    guide, row = fitted(model, case["posterior"], steps, x, y)
    f = bdl.Predictive(model, guide, 200)(x)["f"]
    error = (f.mean(0) - y).square().mean().sqrt()
    return row | {"rmse": float(error), "sd of y": float(y.std())}


def on_uci(case: Row, steps: int, folder: Path) -> Row:
    data = Split(folder, "standard", case["set"], case["split"])
    model = program(data.x.shape[1], 50, 1.0, dist.HalfNormal(1.0), len(data.x))
    guide, row = fitted(model, case["posterior"], steps, data.x, data.y)
    draws = guide.sample_latents(500)
    f = bdl.Predictive(model, draws)(data.x_test)["f"]
    log_p = dist.Normal(f, draws["noise"].reshape(-1, 1)).log_prob(data.y_test)
    density = (log_p.logsumexp(0) - math.log(len(f))).mean() - math.log(data.y_sd)
    error = (f.mean(0) - data.y_test).square().mean().sqrt() * data.y_sd
    return row | {"rmse": float(error), "log likelihood": float(density)}


def to_text(rows: list[Row]) -> str:
    """A table in Markdown, with means over splits and their standard errors."""
    cells: dict[tuple, list[Row]] = {}
    for row in rows:
        case = row.get("set", f"{row.get('width')} units")
        cells.setdefault((row["task"], case, row["posterior"]), []).append(row)
    columns = "elbo", "kl", "rmse", "log likelihood", "seconds"
    lines = [f"| task | | posterior | {' | '.join(columns)} |", "|---" * 8 + "|"]
    for key, found in cells.items():
        values = ([row[name] for row in found if name in row] for name in columns)
        lines.append(f"| {' | '.join([*key, *map(_mean, values)])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.4g} ± {error:.2g}"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--tasks", nargs="+", default=["gap", "width"], choices=["gap", "width", "uci"])
    add("--posteriors", nargs="+", default=list(FITS), choices=list(FITS))
    add("--widths", type=int, nargs="+", default=[50, 200, 1000])
    add("--sets", nargs="+", default=["concrete", "energy"])
    add("--data", type=Path, help="folder of the UCI sets, see uci.py")
    add("--rows", type=Path, help="file of the rows; those in it are not run")
    sizes = {"steps": (2000, 20, "of each guide"), "splits": (2, 1, "of each set")}
    options = parse_sizes(arguments, sizes)
    torch.set_num_threads(options.threads)
    rows = read_rows(options.rows)
    cases: list[Row] = []
    for name in options.posteriors:
        if "gap" in options.tasks:
            cases.append({"task": "gap", "width": 50, "posterior": name})
        if "width" in options.tasks and name in ("mean-field", "inducing"):
            cases += [{"task": "width", "width": w, "posterior": name} for w in options.widths]
        if "uci" in options.tasks:
            splits = [(s, n) for s in options.sets for n in range(options.splits)]
            cases += [{"task": "uci", "set": s, "split": n, "posterior": name} for s, n in splits]
    for case in cases:
        case["steps"] = options.steps
        if any(case.items() <= row.items() for row in rows):
            continue
        torch.manual_seed(0)
        if case["task"] == "uci":
            rows.append(case | on_uci(case, options.steps, options.data))
        else:
            rows.append(case | on_clusters(case, options.steps))
        write_rows(options.rows, rows[-1:])
        if not options.json:
            print(rows[-1], flush=True)
    result = {"benchmark": "global inducing points", "machine": machine(), "rows": rows}
    print(json.dumps(result) if options.json else to_text(rows))


if __name__ == "__main__":
    main()
