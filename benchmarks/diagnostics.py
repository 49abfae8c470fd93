"""R-hat, effective sample size and LOO against ArviZ, 4 chains x 1000 draws in float64.

Convergence of 100 000 weights: ArviZ on 1000 of them, times 100, since its time is proportional to
their number. LOO of 10 000 observations. Peak memory above what the process held before the call,
input included, is measured in a process of its own for each side. ``--device cuda`` puts
pyro_bdl's side on a GPU; ArviZ stays on the CPU.
"""

import subprocess
import sys
import warnings

import arviz
import harness
import numpy as np
import torch

from pyro_bdl import diagnostics

CHAINS, DRAWS = 4, 1000


def draws(count, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    shape = CHAINS, DRAWS, count
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)


def log_likelihood(count, device="cpu"):
    """Of a model that fits: k-hat lies between 0 and 0.5."""
    x = draws(count, device)
    return -0.5 * (0.6 * x + 1).square()


def for_arviz(ll):
    groups = {"posterior": {"w": np.zeros((CHAINS, DRAWS))}, "log_likelihood": {"y": ll.numpy()}}
    return arviz.from_dict(groups) if arviz.__version__ >= "1" else arviz.from_dict(**groups)


def arviz_convergence(x):
    """R-hat and bulk ESS."""
    data = arviz.convert_to_dataset({"w": x.numpy()})
    arviz.rhat(data)
    arviz.ess(data)


def ready(function):
    """Wait for the GPU as well."""

    def run():
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


# The calls whose memory is measured: the input is there before.
MEMORY = {
    "arviz_loo": (log_likelihood, lambda ll: arviz.loo(for_arviz(ll), reff=1.0, pointwise=True)),
    "bdl_loo": (log_likelihood, lambda ll: diagnostics.loo(ll)),
    "bdl_rhat": (draws, lambda x: diagnostics.rhat(x)),
    "bdl_ess": (draws, lambda x: diagnostics.ess(x)),
}


def memory_in_a_process(side, count, threads):
    command = [sys.executable, __file__, "--memory-of", side, "--count", str(count)]
    command += ["--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=100_000)
    parser.add_argument("--arviz-weights", type=int, default=1000, help="ArviZ's share of them")
    parser.add_argument("--observations", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", help="of pyro_bdl's side")
    parser.add_argument("--memory-of", choices=list(MEMORY), help="print the MB of one call only")
    parser.add_argument("--count", type=int, help="of weights or observations, with --memory-of")
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.memory_of:
        make, call = MEMORY[options.memory_of]
        call(make(100))  # what is imported and compiled at the first call
        data = make(options.count)
        print(harness.memory_of(lambda: call(data)))
        return

    results = {"threads": options.threads, "ArviZ": arviz.__version__}
    results |= convergence(options) | loo(options)
    if options.device == "cpu":
        results |= memory(options)
    harness.show("diagnostics: 4 chains x 1000 draws, float64", results, options.json)


def convergence(options):
    x, few = draws(options.weights, options.device), draws(options.arviz_weights)
    sides = {
        "arviz": lambda: arviz_convergence(few),
        "rhat": ready(lambda: diagnostics.rhat(x)),
        "ess": ready(lambda: diagnostics.ess(x)),
        "joint": ready(lambda: diagnostics.convergence(x)),
    }
    seconds = harness.in_turns(sides, options.repeats)
    theirs = seconds["arviz"] * options.weights / options.arviz_weights
    ours = seconds["rhat"] + seconds["ess"]
    what = f"R-hat + bulk ESS, {options.weights} weights"
    return {
        f"{what}: ArviZ, from {options.arviz_weights}, s": theirs,
        f"{what}: rhat(x) and ess(x), s": ours,
        f"{what}: ratio": theirs / ours,
        f"{what} and tail ESS: convergence(x), s": seconds["joint"],
        f"{what} and tail ESS: ratio to ArviZ without tail": theirs / seconds["joint"],
    }


def loo(options):
    ll = log_likelihood(options.observations)
    data, on_device = for_arviz(ll), ll.to(options.device)
    sides = {
        "arviz": lambda: arviz.loo(data, reff=1.0, pointwise=True),
        "bdl": ready(lambda: diagnostics.loo(on_device)),
    }
    seconds = harness.in_turns(sides, options.repeats)
    what = f"LOO, {options.observations} observations"
    return {
        f"{what}: ArviZ, s": seconds["arviz"],
        f"{what}: pyro_bdl, s": seconds["bdl"],
        f"{what}: ratio": seconds["arviz"] / seconds["bdl"],
    }


def memory(options):
    def peak(side, count):
        return memory_in_a_process(side, count, options.threads)

    theirs, ours = (peak(side, options.observations) for side in ("arviz_loo", "bdl_loo"))
    return {
        "rhat(x): MB above the input": peak("bdl_rhat", options.weights),
        "ess(x): MB above the input": peak("bdl_ess", options.weights),
        "LOO: ArviZ, MB above the input": theirs,
        "LOO: pyro_bdl, MB above the input": ours,
        "LOO, memory: ratio": theirs / max(ours, 1.0),
    }


if __name__ == "__main__":
    main()
