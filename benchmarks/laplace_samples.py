"""The exact linearized posterior of a ResNet-18 by samples, under a g-prior: time and memory.

ResNet-18 for 32 x 32 images (11 173 962 weights) and random images; times and
memory depend little on their values. The diagonal of the curvature gives the g-prior
(``priors.GPrior``), conjugate gradients give samples of the exact posterior of the linearized
network (``structure="samples"``), and the EM-like fixed point sets the prior's scale from them,
scale^2 = sum_i h_i w_i^2 / gamma (Antoran et al. 2023, arXiv 2210.04994). Seconds are of the
processor, memory is the peak of the process, torch and the network included.

    python benchmarks/laplace_samples.py --threads 1
"""

import time
import warnings
from typing import Any

import harness
import torch
from networks import resnet
from pyro.infer.autoguide.initialization import init_to_value
from pyro.nn import PyroParam
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl import nn
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import train

SIZES = {
    "width": (64, 16, "of the ResNet"),
    "images": (16, 16, "of the fit"),
    "steps": (30, 30, "of Adam"),
    "samples": (8, 4, "of the posterior; gamma needs 8 or more"),
    "tolerance": (0.05, 0.05, "of the solves"),
    "rounds": (2, 2, "of the fixed point"),
}


class Clock:
    """Seconds of the processor since the last call, and the peak of memory."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.found: dict[str, Any] = {}
        self.started = time.process_time()

    def mark(self, name: str) -> None:
        now = time.process_time()
        self.found[f"{name}, s"] = now - self.started
        self.found[f"{name}, peak GB"] = harness.peak_memory_mb() / 1024
        if not self.silent:
            print(f"  {name}: {now - self.started:.3g} s", flush=True)
        self.started = now


def main() -> None:
    options = harness.parse_sizes(harness.parser(__doc__.splitlines()[0]), SIZES)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    data = torch.randn(options.images, 3, 32, 32), torch.randint(10, (options.images,))
    net = resnet(options.width).eval()
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(0.1)))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(*data)
    harness.reset_peak_memory()
    clock = Clock(options.json)
    train(model, guide, *data, steps=options.steps, learning_rate=1e-3)
    clock.mark(f"{options.steps} steps of MAP training")
    h = guide.laplace_approximation(data).curvature_diagonals()
    clock.mark("diagonal of the curvature")
    flat = torch.cat([h[name] for name in h])
    squares = (guide.location().detach().square() * flat).sum()  # sum_i h_i w_i^2
    scale = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
    scaled = nn.with_prior(model, bdl.priors.GPrior(h, scale))
    at = bdl.guides.AutoLaplaceGGN(
        scaled,
        structure=bdl.curvature.Samples(options.samples, options.tolerance),
        init_loc_fn=init_to_value(values=guide.median()),
    )
    posterior = at.laplace_approximation(data)
    for number in range(options.rounds):
        gamma = posterior.effective_parameters()
        (theta,) = posterior.hyperparameters().values()
        clock.mark(f"samples, scale {float(theta):.3g}, gamma {float(gamma):.3g}, round {number}")
        if number + 1 < options.rounds:
            (leaf,) = scaled.parameters()
            with torch.no_grad():
                leaf.copy_((squares / gamma.clamp(min=1.0)).sqrt().log())
            posterior.refresh()
    predictive = bdl.LinearizedPredictive(scaled, posterior)
    with torch.no_grad():
        predictive.probabilities(data[0][:4])
    clock.mark("probabilities of 4 images")
    weights = posterior.subset.size
    title = f"ResNet-18, {weights} weights, {options.images} images, {options.samples} samples"
    harness.show(title, clock.found, options.json)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # the network is not trained
        main()
