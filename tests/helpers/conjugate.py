"""The exact posterior of linear-Gaussian programs."""

import torch


class Conjugate:
    """w ~ Normal(0, prior^2), y ~ Normal(x w, noise^2)^(1 / eta): the posterior in closed form.

    :param x: (N, P), with a column of ones for a bias.
    :param y: (N,), or (N, K) for K outputs, each with its own weights.
    :param prior: a number, or one for each weight.
    """

    def __init__(self, x, y, noise, prior=1.0, eta=1.0):
        self.y, self.prior = y, torch.as_tensor(prior, dtype=x.dtype).expand(x.shape[1])
        self.x, self.noise = x, noise * eta**0.5
        self.precision = x.mT @ x / self.noise**2 + torch.diag(self.prior**-2)
        self.covariance = self.precision.inverse()
        self.mean = torch.linalg.solve(self.precision, x.mT @ y / self.noise**2)  # (P,) or (P, K)

    @property
    def evidence(self):
        """log p(y), a sum over the outputs."""
        total = (self.x * self.prior) @ (self.x * self.prior).mT
        total = total + self.noise**2 * torch.eye(len(self.x), dtype=self.x.dtype)
        law = torch.distributions.MultivariateNormal(torch.zeros_like(total[0]), total)
        return law.log_prob(self.y.movedim(0, -1)).sum()

    def predictive(self, x):
        """Mean (n,) and covariance (n, n) of x w."""
        return x @ self.mean, x @ self.covariance @ x.mT

    @property
    def law(self):
        """The posterior of one output's weights."""
        return torch.distributions.MultivariateNormal(self.mean, self.covariance)


def with_ones(x):
    """Inputs and a column of ones, whose weight is the bias."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)
