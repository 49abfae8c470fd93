"""The folds of a cross-validation trained at once, against one after another: processor seconds.

python benchmarks/folds.py
python benchmarks/folds.py --guides map mean-field --folds 5 --quick
"""

import time
import warnings

import torch
from harness import in_turns, parser, show
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import posteriors
from pyro_bdl.data import load_default


def problems(folds: int, hidden: int) -> list[posteriors.Problem]:
    """The diabetes data without each fold."""
    found = []
    for fold in range(folds):
        data = load_default(seed=0, fold=(fold, folds))
        x, y = data.x_train, data.y_train
        net = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, 1))
        network = bdl.bayesianize(net, bdl.priors.FanIn(1.0))
        model = bdl.models.Regression(network, num_data=len(x))
        found.append(posteriors.Problem(model, x, y))
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    names = ["map", "mean-field", "mc-dropout", "ensemble", "subnetwork", "swag"]
    names += ["laplace-kron", "laplace-full", "laplace-evidence"]
    options.add_argument("--guides", nargs="+", default=names)
    options.add_argument("--folds", type=int, default=5)
    options.add_argument("--hidden", type=int, default=50)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--quick", action="store_true", help="100 steps, one round")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    settings = posteriors.Options(steps=100 if given.quick else given.steps)
    parts, found = problems(given.folds, given.hidden), {}
    for name in given.guides:
        sides = {
            "at once": lambda name=name: posteriors.fit_together(name, parts, settings),
            "one by one": lambda name=name: [posteriors.fit(name, p, settings) for p in parts],
        }
        rounds = 1 if given.quick else given.repeats
        seconds = in_turns(sides, rounds, clock=time.process_time)
        found |= {f"{name}, {side}, s": value for side, value in seconds.items()}
        found[f"{name}, ratio"] = seconds["at once"] / seconds["one by one"]
    show(f"{given.folds} folds, processor time", found, given.json)


if __name__ == "__main__":
    main()
