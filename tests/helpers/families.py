"""Distributions of numbers of any sign: what a network's outputs may parametrize."""

import pyro.distributions as dist
import torch


def triangle(w):
    """A Cholesky factor of three numbers."""
    zero = torch.zeros_like(w[..., 0])
    rows = ((w[..., 0].exp(), zero), (w[..., 1], w[..., 2].exp()))
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def covariance(w):
    return triangle(w) @ triangle(w).mT


# name -> how many numbers (..., size), and the distribution that they make
FAMILIES = {
    "Normal": (2, lambda w: dist.Normal(w[..., 0], w[..., 1].exp())),
    "Normal, known scale": (1, lambda w: dist.Normal(w[..., 0], 1.3)),
    "LogNormal": (2, lambda w: dist.LogNormal(w[..., 0], 0.3 * w[..., 1].exp())),
    "Laplace": (2, lambda w: dist.Laplace(w[..., 0], w[..., 1].exp())),
    "Cauchy": (2, lambda w: dist.Cauchy(w[..., 0], w[..., 1].exp())),
    "Gumbel": (2, lambda w: dist.Gumbel(w[..., 0], w[..., 1].exp())),
    "Logistic": (2, lambda w: dist.Logistic(w[..., 0], w[..., 1].exp())),
    "SkewLogistic": (
        1, lambda w: dist.SkewLogistic(w[..., 0], w.new_tensor(1.2), w.new_tensor(1.5)),
    ),
    "SoftLaplace": (2, lambda w: dist.SoftLaplace(w[..., 0], w[..., 1].exp())),
    "AsymmetricLaplace": (
        1, lambda w: dist.AsymmetricLaplace(w[..., 0], w.new_tensor(2.0), w.new_tensor(1.3)),
    ),
    "StudentT": (3, lambda w: dist.StudentT(5 + w[..., 2].exp(), w[..., 0], w[..., 1].exp())),
    "StudentT, heavy": (2, lambda w: dist.StudentT(1.5, w[..., 0], w[..., 1].exp())),
    "StudentT of rows": (2, lambda w: dist.StudentT(w[..., 0].exp() + 0.5, w[..., 1], 0.5)),
    "VonMises": (2, lambda w: dist.VonMises(w[..., 0], w[..., 1].exp())),
    "Gamma": (2, lambda w: dist.Gamma(w[..., 0].exp(), w[..., 1].exp())),
    "InverseGamma": (2, lambda w: dist.InverseGamma(2 + w[..., 0].exp(), w[..., 1].exp())),
    "Chi2": (1, lambda w: dist.Chi2(w[..., 0].exp())),
    "Exponential": (1, lambda w: dist.Exponential(w[..., 0].exp())),
    "HalfNormal": (1, lambda w: dist.HalfNormal(w[..., 0].exp())),
    "HalfCauchy": (1, lambda w: dist.HalfCauchy(w[..., 0].exp())),
    "Weibull": (2, lambda w: dist.Weibull(w[..., 0].exp(), (0.5 * w[..., 1]).exp())),
    "Pareto": (1, lambda w: dist.Pareto(w.new_tensor(1.0), 2 + w[..., 0].exp())),
    "FisherSnedecor": (
        2, lambda w: dist.FisherSnedecor(w[..., 0].exp() + 2, w[..., 1].exp() + 5),
    ),
    "Uniform": (1, lambda w: dist.Uniform(w[..., 0], w[..., 0] + 1.0)),
    "Beta": (2, lambda w: dist.Beta(w[..., 0].exp(), w[..., 1].exp())),
    "AffineBeta": (
        2,
        lambda w: dist.AffineBeta(
            w[..., 0].exp(), w[..., 1].exp(), w.new_tensor(0.0), w.new_tensor(2.0)
        ),
    ),
    "Kumaraswamy": (2, lambda w: dist.Kumaraswamy(w[..., 0].exp() + 1, w[..., 1].exp())),
    "ContinuousBernoulli": (1, lambda w: dist.ContinuousBernoulli(probs=w[..., 0].sigmoid())),
    "Poisson": (1, lambda w: dist.Poisson(w[..., 0].exp())),
    "GammaPoisson": (2, lambda w: dist.GammaPoisson(w[..., 0].exp(), w[..., 1].exp())),
    "Geometric, logits": (1, lambda w: dist.Geometric(logits=w[..., 0])),
    "Geometric, probs": (1, lambda w: dist.Geometric(probs=w[..., 0].sigmoid())),
    "Bernoulli, logits": (1, lambda w: dist.Bernoulli(logits=w[..., 0])),
    "Bernoulli, probs": (1, lambda w: dist.Bernoulli(probs=w[..., 0].sigmoid())),
    "Binomial, logits": (1, lambda w: dist.Binomial(4, logits=w[..., 0])),
    "Binomial, probs": (1, lambda w: dist.Binomial(4, probs=w[..., 0].sigmoid())),
    "BetaBinomial": (
        2, lambda w: dist.BetaBinomial(w[..., 0].exp(), w[..., 1].exp(), w.new_tensor(5.0)),
    ),
    "NegativeBinomial, logits": (
        1, lambda w: dist.NegativeBinomial(w.new_tensor(4.0), logits=w[..., 0]),
    ),
    "NegativeBinomial, probs": (
        1, lambda w: dist.NegativeBinomial(w.new_tensor(4.0), probs=w[..., 0].sigmoid()),
    ),
    "NegativeBinomial, count": (
        2, lambda w: dist.NegativeBinomial(w[..., 1].exp(), probs=w[..., 0].sigmoid()),
    ),
    "ZeroInflatedPoisson": (
        2, lambda w: dist.ZeroInflatedPoisson(w[..., 0].exp(), gate_logits=w[..., 1]),
    ),
    "ZeroInflatedNegativeBinomial": (
        2,
        lambda w: dist.ZeroInflatedNegativeBinomial(
            w.new_tensor(3.0), probs=w[..., 0].sigmoid(), gate_logits=w[..., 1]
        ),
    ),
    "ZeroInflated": (
        2,
        lambda w: dist.ZeroInflatedDistribution(
            dist.Geometric(probs=w[..., 0].sigmoid()), gate=w[..., 1].sigmoid()
        ),
    ),
    "Categorical, logits": (3, lambda w: dist.Categorical(logits=w)),
    "Categorical, probs": (3, lambda w: dist.Categorical(probs=w.exp())),
    "OneHotCategorical, logits": (3, lambda w: dist.OneHotCategorical(logits=w)),
    "OneHotCategoricalStraightThrough": (
        3, lambda w: dist.OneHotCategoricalStraightThrough(probs=w.exp()),
    ),
    "OrderedLogistic": (
        1, lambda w: dist.OrderedLogistic(w[..., 0], w.new_tensor([-1.0, 0.5, 2.0])),
    ),
    "Multinomial, logits": (3, lambda w: dist.Multinomial(5, logits=w)),
    "Multinomial, probs": (3, lambda w: dist.Multinomial(5, probs=w.exp())),
    "Dirichlet": (3, lambda w: dist.Dirichlet(w.exp())),
    "DirichletMultinomial": (3, lambda w: dist.DirichletMultinomial(w.exp(), w.new_tensor(5.0))),
    "LogisticNormal": (3, lambda w: dist.LogisticNormal(w[..., :2], w[..., 2:].exp())),
    "ProjectedNormal": (3, dist.ProjectedNormal),
    "MultivariateNormal, scale_tril": (
        5, lambda w: dist.MultivariateNormal(w[..., 3:], scale_tril=triangle(w)),
    ),
    "MultivariateNormal, covariance_matrix": (
        5, lambda w: dist.MultivariateNormal(w[..., 3:], covariance_matrix=covariance(w)),
    ),
    "MultivariateNormal, precision_matrix": (
        5, lambda w: dist.MultivariateNormal(w[..., 3:], precision_matrix=covariance(w)),
    ),
    "LowRankMultivariateNormal": (
        6,
        lambda w: dist.LowRankMultivariateNormal(
            w[..., :2], w[..., 2:4, None], w[..., 4:].exp()
        ),
    ),
    "MultivariateStudentT": (
        5, lambda w: dist.MultivariateStudentT(w.new_tensor(4.0), w[..., 3:], triangle(w)),
    ),
    "Independent": (2, lambda w: dist.Normal(w, 1.0).to_event(1)),
    "MixtureSameFamily": (
        4,
        lambda w: dist.MixtureSameFamily(
            dist.Categorical(probs=w[..., :2].softmax(-1)),
            dist.Binomial(6, probs=(3 * w[..., 2:]).sigmoid()),
        ),
    ),
    "TransformedDistribution": (
        2,
        lambda w: dist.TransformedDistribution(
            dist.Gamma(w[..., 0].exp(), 1.0),
            [dist.transforms.AffineTransform(0.0, w[..., 1].exp())],
        ),
    ),
}  # fmt: skip
