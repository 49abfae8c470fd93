"""Training steps of networks with 19 and 25 million weights: time and memory.

Sides: the network trained by Adam (deterministic), mean-field VI by hand in torch, and
``AutoMeanField`` by the plain ELBO, the compiled one and inductor, each with a draw of the weights
(no estimator) and with local reparameterization, which draws a number for every unit of every datum
instead of one for every weight. Every side takes the whole step: ``zero_grad``, loss, ``backward``
and Adam. ``--fused`` gives all sides torch's fused Adam. Times are of the processor.

Memory is the peak of a process of its own above what it held before the network was made: weights,
gradients, Adam's moments, noise and intermediates.
"""

import json
import time
from functools import partial

import compiled
import harness
import torch
import torch.nn.functional as F
from torch import nn

import pyro_bdl as bdl

NETWORKS = {
    "19M": (784, 4000, 4000, 10),
    "25M": (784, 4660, 4660, 10),
    "1M": (784, 800, 400, 10),  # for --quick
}
BOUNDS = {
    "plain": bdl.elbo.TemperedTraceMeanField_ELBO,
    "compiled": bdl.elbo.CompiledELBO,
    "inductor": partial(bdl.elbo.CompiledELBO, backend="inductor"),
}
LOCAL = "local_reparameterization"
SIDES = [
    "deterministic", "by hand",
    *(name + end for name in BOUNDS for end in ("", ", local")),
]  # fmt: skip


def objective(side, net, x, y):
    """The parameters of a side, and its loss as a function."""
    if side == "deterministic":
        return net.parameters(), lambda: F.cross_entropy(net(x), y, reduction="sum")
    if side == "by hand":
        vectors = compiled.ByHand(net, regression=False)
        return [vectors.loc, vectors.free], lambda: vectors.loss(x, y)
    name, _, local = side.partition(", ")
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    pair = BOUNDS[name](estimator=LOCAL if local else None)(model, guide)
    return guide.parameters(), lambda: pair(x, y)


def step_of(side, network, batch, fused):
    """A function that takes one training step."""
    x, y = torch.rand(batch, 784), torch.randint(10, (batch,))
    net = compiled.mlp(*NETWORKS[network], activation=nn.ReLU)
    parameters, loss = objective(side, net, x, y)
    adam = torch.optim.Adam(parameters, lr=1e-4, fused=fused)

    def step():
        adam.zero_grad()
        loss().backward()
        adam.step()

    return step


def memory(side, options):
    """The peak of some steps in MB above the start."""

    def run():
        step = step_of(side, options.network, options.batch, options.fused)
        for _ in range(4):  # the trace, the comparison, and two steps of the graph
            step()

    torch.rand(8, 8) @ torch.rand(8, 8)
    return harness.memory_of(run)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--network", default="19M", choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--fused", action="store_true", help="torch's fused Adam, on all sides")
    parser.add_argument("--quick", action="store_true", help="a small network, without inductor")
    parser.add_argument("--memory-of", choices=SIDES, help="of one side; set by the script itself")
    parser.set_defaults(threads=1, repeats=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.quick:
        options.network, options.repeats = "1M", 2
        options.sides = [side for side in options.sides if not side.startswith("inductor")]
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, options)))
        return
    peaks = {side: harness.in_own_process(__file__, "--memory-of", side) for side in options.sides}
    steps = {
        side: step_of(side, options.network, options.batch, options.fused) for side in options.sides
    }
    for step in steps.values():
        for _ in range(3):
            step()
    seconds = harness.in_turns(steps, options.repeats, clock=time.process_time)
    results = {}
    for side in options.sides:
        results[f"{side}: ms/step"] = 1e3 * seconds[side]
        results[f"{side}: MB"] = peaks[side]
        for other in ("deterministic", "by hand"):
            if other in options.sides and side != other:
                results[f"{side}: ratio of time to {other}"] = seconds[side] / seconds[other]
        if "deterministic" in options.sides and side != "deterministic":
            results[f"{side}: ratio of memory to deterministic"] = (
                peaks[side] / peaks["deterministic"]
            )
    harness.show(f"large: one step, {options.network} weights", results, options.json)


if __name__ == "__main__":
    main()
