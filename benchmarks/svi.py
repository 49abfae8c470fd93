"""One step of mean-field SVI on an 8-50-50-1 network, batch 128, Adam.

Both sides train the same Pyro program: ``AutoMeanField`` with the tempered mean-field ELBO
against Pyro's ``AutoNormal`` with ``TraceMeanField_ELBO``. Once with the program written by hand
with ``PyroModule``, once with ``bayesianize``.
"""

from itertools import pairwise

import harness
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bdl as bdl

SIZES = [8, 50, 50, 1]


class HandWritten(PyroModule):
    """The usual Pyro program: PyroModule layers with PyroSample weights."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(pairwise(SIZES))
        self.layers = PyroModule[nn.ModuleList]([PyroModule[nn.Linear](a, b) for a, b in pairs])
        for layer in self.layers:
            for name in ("weight", "bias"):
                shape = getattr(layer, name).shape
                prior = dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
                setattr(layer, name, PyroSample(prior))

    def forward(self, x, y=None):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        mean = self.layers[-1](x).squeeze(-1)
        with pyro.plate("data", len(mean)):
            return pyro.sample("y", dist.Normal(mean, noise), obs=y)


def bayesianized():
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    return bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(1.0)))


def steps(model, guide, elbo, x, y, count):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)

    def run():
        for _ in range(count):
            svi.step(x, y)

    return run


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps per timed round")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(threads=1)  # Pyro's side is slower on several
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    harness.set_device(options.device)
    x = torch.randn(128, 8)
    y = x[:, 0].sin() + 0.1 * torch.randn(128)
    hand, other = HandWritten(), HandWritten()
    net, net_other = bayesianized(), bayesianized()
    ours, theirs = bdl.elbo.TemperedTraceMeanField_ELBO, TraceMeanField_ELBO
    mean_field = bdl.guides.AutoMeanField
    sides = {
        "hand_pyro": steps(hand, AutoNormal(hand), theirs(), x, y, options.steps),
        "hand_bdl": steps(other, mean_field(other), ours(), x, y, options.steps),
        "net_pyro": steps(net, AutoNormal(net), theirs(), x, y, options.steps),
        "net_bdl": steps(net_other, mean_field(net_other), ours(), x, y, options.steps),
    }
    ms = {k: 1e3 * v / options.steps for k, v in harness.in_turns(sides, options.repeats).items()}
    results = {
        "program by hand: AutoNormal + TraceMeanField_ELBO, ms/step": ms["hand_pyro"],
        "program by hand: AutoMeanField + tempered ELBO, ms/step": ms["hand_bdl"],
        "program by hand: ratio": ms["hand_pyro"] / ms["hand_bdl"],
        "bayesianize: AutoNormal + TraceMeanField_ELBO, ms/step": ms["net_pyro"],
        "bayesianize: AutoMeanField + tempered ELBO, ms/step": ms["net_bdl"],
        "bayesianize: ratio": ms["net_pyro"] / ms["net_bdl"],
        "hand with Pyro to bayesianize with pyro_bdl: ratio": ms["hand_pyro"] / ms["net_bdl"],
    }
    harness.show("svi: one mean-field step, 8-50-50-1, batch 128", results, options.json)


if __name__ == "__main__":
    main()
