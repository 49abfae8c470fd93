"""A Bradley-Terry model of pairs, whose linear score is a logistic regression on differences."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import acquisition

SCALE = 0.7


@pytest.fixture
def program():
    network = bdl.bayesianize(nn.Linear(3, 1, bias=False).double(), bdl.priors.Normal(SCALE))

    def preferences(items, preferred=None):
        r = pyro.deterministic("r", network(items).squeeze(-1))
        if r.dim() == 1:
            return r
        with pyro.plate("data", len(items)):
            return pyro.sample("y", dist.Bernoulli(logits=r[:, 0] - r[:, 1]), obs=preferred)

    return preferences


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    pairs = torch.randn(40, 2, 3, generator=random, dtype=torch.float64)
    weights = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    p = ((pairs[:, 0] - pairs[:, 1]) @ weights).sigmoid()
    return pairs, torch.bernoulli(p, generator=random)


@pytest.mark.parametrize("subset", [None, "last-layer"])
def test_laplace_of_a_linear_score_is_logistic_regression_on_differences(program, data, subset):
    pairs, preferred = data
    differences = pairs[:, 0] - pairs[:, 1]
    exact = LogisticRegression(C=SCALE**2, fit_intercept=False, tol=1e-12, max_iter=1000)
    mode = torch.from_numpy(exact.fit(differences, preferred).coef_[0])
    p = (differences @ mode).sigmoid()
    hessian = differences.mT @ ((p * (1 - p))[:, None] * differences)
    covariance = torch.linalg.inv(hessian + torch.eye(3, dtype=p.dtype) / SCALE**2)

    guide = bdl.guides.AutoLaplaceGGN(program, structure="full", subset=subset)
    bdl.training.train(program, guide, pairs, preferred, steps=400, learning_rate=0.1)
    posterior = guide.laplace_approximation((pairs, preferred))
    (weight,) = posterior.median().values()
    assert weight[0].detach().tolist() == pytest.approx(mode.tolist(), abs=1e-4)

    new = torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    predictive = bdl.LinearizedPredictive(program, posterior)
    items = new[:, 0]
    moments = predictive.parameter_moments(items, sites=["r"])["r"]
    torch.testing.assert_close(moments.mean, items @ mode, atol=1e-4, rtol=0)
    exact_variance = (items @ covariance * items).sum(-1)
    torch.testing.assert_close(moments.variance, exact_variance, atol=1e-5, rtol=1e-4)

    x = new[:, 0] - new[:, 1]
    sd = (x @ covariance * x).sum(-1).sqrt()
    nodes = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    logits = (x @ mode)[:, None] + sd[:, None] * nodes
    expected = logits.sigmoid() @ torch.softmax(-0.5 * nodes.square(), 0)
    found = predictive.probabilities(new)["y"]  # a probit is not quite a sigmoid
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=0)


def test_the_pair_to_ask_is_one_whose_answer_the_draws_dispute(program):
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(50, 1, 1, 3, generator=random, dtype=torch.float64)
    pairs = torch.randn(20, 2, 3, generator=random, dtype=torch.float64)
    p = bdl.Predictive(program, {"weight": weights[:, 0]}).mean(pairs)["y"]
    expected = ((pairs[:, 0] - pairs[:, 1]) @ weights[:, 0, 0].mT).mT.sigmoid()
    torch.testing.assert_close(p, expected)

    def entropy(q):
        return -(q * q.log() + (1 - q) * (1 - q).log())

    information = acquisition.bald(torch.stack([1 - p, p], -1))
    torch.testing.assert_close(information, entropy(p.mean(0)) - entropy(p).mean(0))


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_one_linear_score_of_several_alternatives_is_a_conditional_logit(structure):
    random = torch.Generator().manual_seed(0)
    items = torch.randn(30, 4, 3, generator=random, dtype=torch.float64)
    network = bdl.bayesianize(nn.Linear(3, 1, bias=False).double(), bdl.priors.Normal(SCALE))

    def choices(items, chosen=None):
        r = pyro.deterministic("r", network(items).squeeze(-1))
        with pyro.plate("data", len(items)):
            return pyro.sample("y", dist.Categorical(logits=r), obs=chosen)

    chosen = torch.randint(4, (30,), generator=random)
    guide = bdl.guides.AutoLaplaceGGN(choices, structure=structure)
    bdl.training.train(choices, guide, items, chosen, steps=50, learning_rate=0.05)
    posterior = guide.laplace_approximation((items, chosen))
    (weight,) = posterior.median().values()
    p = (items @ weight[0].detach()).softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    hessian = torch.einsum("nki,nkl,nlj->ij", items, fisher, items)
    hessian = hessian + torch.eye(3, dtype=p.dtype) / SCALE**2
    exact = torch.linalg.inv(hessian if structure == "full" else hessian.diagonal().diag())
    moments = bdl.LinearizedPredictive(choices, posterior).parameter_moments(items, sites=["r"])
    expected = ((items @ exact) * items).sum(-1)
    torch.testing.assert_close(moments["r"].variance, expected, atol=1e-8, rtol=1e-5)
