"""Programs of one layer, and what their outputs are under plain draws of their latents."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.func import jacrev

from pyro_bdl.program import record
from pyro_bdl.program.vmap import RowMap

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
        row_map = RowMap()

        def one(draws):
            return row_by_row(estimator, row_map, self.program, self.q, draws, x)

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


def row_by_row(estimator, row_map, program, q, draws, x):
    """The result of a program for each row of x, (N, ...), at draws of a guide q."""
    with estimator.run() as products:
        for site, distribution in q.items():
            products.drawn(site, distribution, draws[site])

        def of_row(args, kwargs, lane):
            return products.of_datum(lambda: record(program, draws, args).result)[0]

        return row_map(of_row, (x,), {})


def losses_and_gradients(elbo, model, guide, data, count):
    """Losses and gradients of ``count`` steps, (count, 1 + parameters)."""
    objective, results = elbo(model, guide), []
    parameters = list(guide.parameters())
    for _ in range(count):
        loss = objective(*data)
        gradients = torch.autograd.grad(loss, parameters)
        results.append(torch.cat([loss.reshape(1), *(g.reshape(-1) for g in gradients)]))
    return torch.stack(results).detach()


def have_one_mean(first, second, errors=5.0):
    """Two samples (S, K) have the same mean, within so many standard errors."""
    error = (first.var(0) / len(first) + second.var(0) / len(second)).sqrt()
    return bool(((first.mean(0) - second.mean(0)).abs() <= errors * error + 1e-12).all())


@pytest.fixture
def layer():
    return Layer


@pytest.fixture
def steps():
    return losses_and_gradients


@pytest.fixture
def one_mean():
    return have_one_mean


@pytest.fixture
def rowwise():
    return row_by_row
