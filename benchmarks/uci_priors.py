"""Priors under the evidence, and mixtures of Laplace approximations, on UCI's gap splits.

The network of ``uci.py`` under four priors, with the noise and what the prior leaves open set by
the evidence twice between trainings: a scale for each layer; fan-in scaling alone; fan-in scaling
with a learned factor; and that factor under a hyperprior, LogNormal(0, 0.3). The table shows each
member's mean test log likelihood under the full linearized posterior, and that of the equal mixture
of all members' predictive densities. Each member starts anew and sets its own hyperparameters.

    python benchmarks/uci_priors.py --data uci --sets energy --splits 1 --members 2 --steps 400
"""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
import uci
from harness import parser
from torch import Tensor

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning

PRIORS: dict[str, Callable] = {
    "per layer": lambda: priors.PerLayer(priors.Normal(uci.positive(1.0))),
    "FanIn(1)": lambda: priors.FanIn(1.0),
    "FanIn(learned)": lambda: priors.FanIn(uci.positive(1.0)),
    "FanIn(hyperprior)": lambda: priors.FanIn(
        priors.Hyperprior(dist.LogNormal(torch.tensor(0.0), torch.tensor(0.3)))
    ),
}


def member(split: uci.Split, prior: Callable, seed: int, steps: int) -> Tensor:
    """Log likelihoods of the test data, of the standardized target."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    network = bdl.bayesianize(uci.network(split.x.shape[1]), prior())
    model = bdl.models.Regression(network, noise=uci.positive(0.3), num_data=len(split.x))
    guide, data = bdl.guides.AutoLaplaceGGN(model, structure="full"), (split.x, split.y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a ReLU network is seldom at its maximum
        uci.train(model, guide, *data, steps)
        for _ in range(2):
            posterior = guide.laplace_approximation(data)
            bdl.evidence.maximize(posterior, linearized=False, steps=30)
            uci.train(model, guide, *data, steps // 2)
        posterior = guide.laplace_approximation(data)
    return bdl.LinearizedPredictive(model, posterior).log_density(split.x_test, split.y_test)["y"]


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True, help="folder of the UCI sets")
    arguments.add_argument("--splits", type=int, default=3, help="of each set (default 3)")
    arguments.add_argument("--sets", default="energy", help="default: %(default)s")
    arguments.add_argument("--kinds", default="gap,standard", help="default: %(default)s")
    arguments.add_argument("--members", type=int, default=5, help="of each mixture (default 5)")
    arguments.add_argument("--steps", type=int, default=2500, help="of the first training")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    for kind in options.kinds.split(","):
        for name in options.sets.split(","):
            for number in range(options.splits):
                split = uci.Split(options.data, kind, name, number)
                for label, prior in PRIORS.items():
                    runs = range(options.members)
                    found = torch.stack([member(split, prior, m, options.steps) for m in runs])
                    mixture = found.logsumexp(0) - math.log(len(found))
                    own = [value - math.log(split.y_sd) for value in found.mean(1).tolist()]
                    both = mixture.mean().item() - math.log(split.y_sd)
                    row = {"split": f"{kind} {name} {number}", "prior": label}
                    results.append({**row, "members": own, "mixture": both})
                    if not options.json:
                        shown = "  ".join(f"{value:8.2f}" for value in own)
                        print(f"{row['split']:20}{label:20}{shown}   mixture {both:8.2f}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
