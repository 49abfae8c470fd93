"""The exact Gauss-Newton posterior in function space against the matrix of all weights.

A network 16-W-W-1 with fewer data than weights: the fit, ten gradient steps on the evidence and the
linearized moments of 100 inputs under structure="full" and "kernel" (and "kron", which is not
exact), with the largest relative difference of the variances from those of "full"::

    python benchmarks/function_space.py
"""

import argparse
import warnings
from typing import Any

import harness
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

STRUCTURES = ("full", "kernel", "kron")


class Side:
    def __init__(self, structure: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width, count = options.width, options.data
        x = torch.randn(count, 16, dtype=torch.float64)
        layers = [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        net = nn.Sequential(*layers, nn.Linear(width, 1)).double()
        scale = PyroParam(torch.tensor(1.0).double(), constraint=constraints.positive)
        self.model = bdl.models.Regression(
            bdl.bayesianize(net, bdl.priors.Normal(scale)), noise=1.0
        )
        self.data = x, x[:, 0].sin()
        self.guide = bdl.guides.AutoLaplaceGGN(self.model, structure=structure).prototype(
            *self.data
        )
        self.new = torch.randn(100, 16, dtype=torch.float64)
        self.fit()

    def fit(self) -> None:
        self.posterior = self.guide.laplace_approximation(self.data)

    def evidence(self) -> None:
        bdl.evidence.maximize(self.posterior, method="gradient", steps=10, linearized=False)

    def moments(self) -> Tensor:
        predictive = bdl.LinearizedPredictive(self.model, self.posterior)
        return predictive.parameter_moments(self.new)["y"].variance["loc"]


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=50, help="of the hidden layers")
    parser.add_argument("--data", type=int, default=200, help="number of data")
    parser.add_argument("--quick", action="store_true", help="a small network, two rounds")
    options = parser.parse_args()
    if options.quick:
        options.width, options.data, options.repeats = 20, 50, 2
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", BdlWarning)
    sides = {name: Side(name, options) for name in STRUCTURES}
    exact = sides["full"].moments()
    results: dict[str, Any] = {"weights": sides["full"].posterior.subset.size}
    for name in ("kernel", "kron"):
        gap = (sides[name].moments() / exact - 1.0).abs().max()
        results[f"difference of variances: {name}"] = float(gap)
    for phase in ("fit", "moments", "evidence"):
        calls = {name: getattr(side, phase) for name, side in sides.items()}
        seconds = harness.in_turns(calls, options.repeats)
        results |= {f"{phase}: {name}, s": value for name, value in seconds.items()}
        results[f"{phase}: ratio full / kernel"] = seconds["full"] / seconds["kernel"]
    harness.show("function space", results, options.json)


if __name__ == "__main__":
    main()
