"""Leave-one-out by PSIS against exact refits: elpd of posteriors on the diabetes data.

    python benchmarks/left_out.py last-layer subnetwork laplace-kron mean-field nuts

Each posterior is fitted to all training data, for its PSIS-LOO, and again without each of
``--folds`` parts of them. "gap" is the PSIS value minus the refitted one, in nats, with its
standard error over the data. Refits have fewer data (4 of 5 parts by default), which costs a few
nats themselves: the gap of NUTS says how many.
"""

import json
import warnings

import torch
from harness import parser
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import posteriors
from pyro_bdl.comparison.leave_one_out import difference
from pyro_bdl.data.examples import EXAMPLES
from pyro_bdl.predictive.linearized import is_linear


def model_of(x: torch.Tensor, hidden: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.Tanh(), nn.Linear(hidden, 1))
    return bdl.models.Regression(bdl.bayesianize(net, bdl.priors.FanIn(1.0)), num_data=len(x))


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="+", help="names of pyro-bdl compare")
    options.add_argument("--hidden", type=int, default=20)
    options.add_argument("--folds", type=int, default=5)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--draws", type=int, default=300, help="of NUTS, and of its warm-up")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    data = EXAMPLES["diabetes"].load()
    settings = posteriors.Options(
        steps=given.steps, chains=2, warmup=given.draws, draws=given.draws
    )
    found = {}
    for name in given.names:

        def fit(x, y, name=name):
            torch.manual_seed(0)
            model = model_of(x, given.hidden)
            return model, posteriors.fit(name, posteriors.Problem(model, x, y), settings).posterior

        model, posterior = fit(data.x_train, data.y_train)
        table = bdl.compare(
            model, {name: posterior}, data.x_test, data.y_test, reference=None,
            train=(data.x_train, data.y_train),
        )  # fmt: skip
        psis = table.evaluations[name].loo
        if psis is None:  # the table withholds it without computing it
            make = bdl.LinearizedPredictive if is_linear(posterior) else bdl.Predictive
            density = make(model, posterior, 1000).log_likelihood(data.x_train, data.y_train)
            (density,) = density.values()
            psis = bdl.diagnostics.loo(density.flatten(1)[None], r_eff=1.0)
        refitted = bdl.k_fold(fit, data.x_train, data.y_train, folds=given.folds, progress=False)
        gap, error = difference(psis, refitted)
        found[name] = row = {
            "refits": refitted.elpd, "refits_se": refitted.se, "psis": psis.elpd, "gap": gap,
            "gap_se": error, "high_k": psis.num_bad, "shown as": table.numbers()[name]["loo_by"],
        }  # fmt: skip
        if not given.json:
            told = {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}
            print(f"{name:20s} {told}", flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
