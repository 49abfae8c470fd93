"""Programs that tests compare posteriors of, and draws of these."""

import pyro
import pyro.distributions as dist
import torch

import pyro_bdl as bdl


class Shifted(dist.Normal):
    """A Normal whose constructor takes more than parameters, as the linear model does not know."""

    def __init__(self, loc, scale, shift=0.0, validate_args=None):
        self.shift = shift
        super().__init__(loc, scale, validate_args=validate_args)

    def expand(self, batch_shape, _instance=None):
        return Shifted(self.loc.expand(batch_shape), self.scale.expand(batch_shape), self.shift)


GRID = torch.linspace(-1, 1, 9)[:, None]


def shift(x, y=None):
    """f = w for every input, w ~ Normal(0, 1); y ~ Normal(f, 1)."""
    w = pyro.sample("w", dist.Normal(x.new_tensor(0.0), 1.0))
    f = pyro.deterministic("f", w.expand(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def line(x, y=None):
    """f = w_0 + w_1 x, w ~ Normal(0, I); y ~ Normal(f, 0.5)."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * x[:, 0])
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def labels(observation):
    """Two classes with logits (0, w_0 + w_1 x).

    :param observation: from the logits (N, 2) to a distribution.
    """

    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        logits = torch.stack([torch.zeros(len(x)), w[0] + w[1] * x[:, 0]], -1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", observation(logits), obs=y)

    return program


def normal(mean, sd, count=4000, seed=0, dtype=torch.float32):
    """Draws of w that are the quantiles of a Normal in random order, as of four chains."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    levels = (torch.arange(count, dtype=dtype) + 0.5) / count
    return bdl.Samples({"w": (mean + sd * torch.special.ndtri(levels)[order]).reshape(4, -1)})


def weights(*shape, chains=2, count=50, seed=0, scale=1.0):
    """Draws of standard Normal weights w."""
    torch.manual_seed(seed)
    return bdl.Samples({"w": scale * torch.randn(chains, count, *shape)})


def row_of(program, posterior, *data, **options):
    """The numbers of one posterior, compared with none."""
    return bdl.compare(program, {"a": posterior}, *data, reference=None, **options).numbers()["a"]
