"""Programs of one layer, and what their outputs are under plain draws of their latents."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.func import jacrev

from pyro_bdl.program import record
from pyro_bdl.program.rows import RowMap

D = torch.float64


class Layer:
    """z = function(x, **latents), with independent Normals q over the latents.

    :param function: of data x (N, ...) and the latents by name.
    :param x: one datum, without a data axis.
    :param shapes: the latents' shapes, or fixed means.
    """

    def __init__(self, function, x, **shapes):
        generator = torch.Generator().manual_seed(3)
        self.function, self.x = function, x
        self.q = {}
        for name, shape in shapes.items():
            loc = torch.randn(shape, generator=generator, dtype=D)
            scale = 0.2 + torch.rand(shape, generator=generator, dtype=D)
            self.q[name] = dist.Normal(loc, scale)

    def program(self, x):
        values = {
            name: pyro.sample(name, dist.Normal(0.0, 1.0).expand(q.batch_shape).to_event())
            for name, q in self.q.items()
        }
        return self.function(x, **values)

    def runs(self, estimator, count, rows=1):
        """Outputs (count, rows, ...) of so many copies of the datum in each of many runs."""
        x = self.x.expand(rows, *self.x.shape)
        rows_of = RowMap()

        def one(draws):
            def of_datum(args, kwargs, lane):
                run = estimator.of_datum(lambda: record(self.program, draws, args))
                return run.result[0]

            with estimator.run(self.q, draws):
                return rows_of(of_datum, (x,), {})

        draws = {name: q.sample((count,)) for name, q in self.q.items()}
        return torch.vmap(one, randomness="different")(draws)

    def plain(self, count):
        """Outputs (count, ...) for so many draws of the latents."""
        draws = {name: q.sample((count,)) for name, q in self.q.items()}
        return torch.vmap(lambda values: self.function(self.x[None], **values)[0])(draws)

    def moments(self):
        """Mean (K,) and covariance (K, K) of the flattened output, which is affine in the
        latents: z = z(m) + J (w - m)."""
        means = {name: q.loc for name, q in self.q.items()}
        jacobian = jacrev(lambda values: self.function(self.x[None], **values)[0].reshape(-1))(
            means
        )
        mean = self.function(self.x[None], **means)[0].reshape(-1)
        covariance = sum(
            (part.flatten(1) * self.q[name].variance.reshape(-1)) @ part.flatten(1).T
            for name, part in jacobian.items()
        )
        return mean, covariance

    def has_moments_of(self, samples, errors=5.0):
        """The samples (S, ...) have the exact moments, within so many standard errors."""
        mean, covariance = self.moments()
        count, variance = len(samples), covariance.diagonal()
        slack = errors * (variance / count).sqrt() + 1e-9
        assert ((samples.flatten(1).mean(0) - mean).abs() <= slack).all()
        centered = samples.flatten(1) - mean
        slack = variance[:, None] * variance + covariance.square()
        slack = errors * (slack / count).sqrt() + 1e-9
        assert ((centered.T @ centered / count - covariance).abs() <= slack).all()


@pytest.fixture
def layer():
    return Layer
