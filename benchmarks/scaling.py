"""Time and memory of a step as networks and data grow, with fitted exponents.

A network of hidden layers as wide as they need be up to 256, and then as deep, has P from 10^3 to
10^7.5 weights. The work of each method at each P: a step of mean-field VI with Adam, one of IVON, a
Kronecker-factored Laplace fit to 64 rows, a last layer's posterior from 64 rows, and predictions
at 64 inputs from 4 draws of a mean-field guide. Layers are 256 wide at most since Kronecker factors
are decomposed, in a time cubic in the width.

At P = 10^3 the same works with N rows, from 10^3 to 10^6: a step on a minibatch of 64, and for the
fits, which go once over all data in batches of 1000, the time for each row.

Times are of the processor, medians of rounds, or of one call where that takes more than two
seconds. Memory is the peak of the work above what was held before, the method's own parameters and
moments included; less than 1 MB counts as 1 MB. An exponent is the slope of a line through the
logarithms: over P from 10^5, where work outweighs the operators' calls, and over all N.
"""

import math
import statistics
import time
from functools import partial
from pathlib import Path

import harness
import numpy as np
import torch
from torch import nn

import pyro_bdl as bdl

INPUTS, OUTPUTS, BATCH, WIDEST, DRAWS = 32, 10, 64, 256, 4


def network(size):
    """A network of about ``size`` weights."""
    ends = INPUTS + OUTPUTS + 1
    width = min(WIDEST, max(4, round((math.sqrt(ends**2 + 4 * size) - ends) / 2)))
    depth = max(1, round((size - width * ends) / (width * (width + 1))))
    layers = [nn.Linear(INPUTS, width)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, OUTPUTS))


def program(size, num_data):
    torch.manual_seed(0)
    net = network(size)
    return bdl.models.Classification(bdl.bayesianize(net, bdl.priors.FanIn(1.0)), num_data=num_data)


def minibatch(x, y, step):
    rows = torch.randint(len(x), (BATCH,)) if len(x) > BATCH else slice(None)
    return x[rows], y[rows]


def steps(x, y, size, *, ivon):
    """A function that takes a step of mean-field VI."""
    guide = bdl.guides.AutoMeanField(program(size, len(x)))
    guide.prototype(x[:BATCH], y[:BATCH])
    objective = bdl.elbo.TemperedTraceMeanField_ELBO()(guide.program_model, guide)
    if ivon:
        optimizer = bdl.optim.IVON(guide, lr=0.01)
    else:
        optimizer = torch.optim.Adam(guide.parameters(), lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        taken = objective.take_step(*minibatch(x, y, 0))
        taken.backward()
        optimizer.step(*[taken] if ivon else [])

    return step


def batches(x, y):
    return list(zip(x.split(1000), y.split(1000), strict=True))


def fit(x, y, size, *, kind):
    guide = kind(program(size, len(x))).prototype(x[:BATCH], y[:BATCH])
    return lambda: guide.laplace_approximation(batches(x, y), progress=False)


def prediction(x, y, size):
    model = program(size, len(x))
    guide = bdl.guides.AutoMeanField(model).prototype(x[:BATCH], y[:BATCH])
    predictive = bdl.Predictive(model, guide, num_samples=DRAWS)
    return lambda: predictive(x[:BATCH])


METHODS = {
    "mean-field": partial(steps, ivon=False),
    "IVON": partial(steps, ivon=True),
    "kron fit": partial(fit, kind=partial(bdl.guides.AutoLaplaceGGN, structure="kron")),
    "last layer": partial(fit, kind=bdl.guides.AutoLastLayer),
    "prediction": prediction,
}
SLOW = 2.0  # seconds
FITS = ("kron fit", "last layer")  # whose time is for each row as N grows


def rows(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, INPUTS, generator=generator)
    return x, torch.randint(OUTPUTS, (count,), generator=generator)


def measured(method, x, y, size, repeats):
    """Median seconds of a call, and the peak of making and calling it in MB."""
    made, times = [], []

    def first():
        made.append(METHODS[method](x, y, size))
        start = time.process_time()
        made[0]()
        times.append(time.process_time() - start)

    peak = max(1.0, harness.memory_of(first))
    if times[0] > SLOW:
        return times[0], peak
    times.clear()
    for _ in range(repeats):
        start = time.process_time()
        made[0]()
        times.append(time.process_time() - start)
    return statistics.median(times), peak


def exponent(sizes, values, least):
    """The slope of log(value) in log(size)."""
    pairs = [pair for pair in zip(sizes, values, strict=True) if pair[0] >= least]
    return float(np.polyfit(*np.log(np.array(pairs)).T, 1)[0])


def draw(found, path):
    """A picture: time and memory against P and N, with the exponents in the legends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    for axes, (axis, kind) in zip(
        figure.subplots(2, 2).flat,
        [(axis, kind) for kind in ("time", "memory") for axis in ("P", "N")],
        strict=True,
    ):
        for method in METHODS:
            sizes, values, slope = found[axis, kind, method]
            axes.loglog(sizes, values, "o-", markersize=3, label=f"{method}: {slope:.2f}")
        unit = "s" if kind == "time" else "MB"
        per_row = " (fits: for each row)" if (axis, kind) == ("N", "time") else ""
        axes.set_xlabel("weights P" if axis == "P" else "rows N, at P = 1000")
        axes.set_ylabel(f"{kind} of a step, {unit}{per_row}")
        axes.legend(title="exponent", fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--weights", type=float, nargs="+", default=[3, 4, 5, 6, 7, 7.5])
    parser.add_argument("--data", type=float, nargs="+", default=[3, 4, 5, 6])
    parser.add_argument("--figure", type=Path, help="where to write the picture")
    parser.add_argument("--quick", action="store_true", help="up to 10^5 weights and 10^4 rows")
    parser.set_defaults(threads=1, repeats=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.weights, options.data, options.repeats = [3, 4, 5], [3, 3.5], 1
    found, results = {}, {}
    for method in METHODS:
        METHODS[method](*rows(BATCH), 1000)()  # imports, which are not counted
    for axis, powers in (("P", options.weights), ("N", options.data)):
        sizes = [round(10**power) for power in powers]
        for method in METHODS:
            times, peaks = [], []
            for size in sizes:
                x, y = rows(BATCH if axis == "P" else size)
                weights = size if axis == "P" else 1000
                seconds, peak = measured(method, x, y, weights, options.repeats)
                if axis == "N" and method in FITS:
                    seconds /= size
                times.append(seconds)
                peaks.append(peak)
                results[f"{method}, {axis} = {size:,}: s"] = seconds
                results[f"{method}, {axis} = {size:,}: MB"] = peak
            least = 1e5 if axis == "P" and not options.quick else 0.0
            for kind, values in (("time", times), ("memory", peaks)):
                slope = exponent(sizes, values, least)
                found[axis, kind, method] = sizes, values, slope
                results[f"{method}: exponent of {kind} in {axis}"] = slope
    if options.figure is not None:
        draw(found, options.figure)
    harness.show("scaling: a step as networks and data grow", results, options.json)


if __name__ == "__main__":
    main()
