"""Ready-made programs of several targets of which some are NaN: as if masks were written."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from pyro.nn import PyroParam
from torch.distributions import MultivariateNormal, constraints

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

N, NOISE = 12, 0.3
D = {"dtype": torch.float64}


@pytest.fixture
def data():
    torch.manual_seed(3)
    x = torch.randn(N, 2, **D)
    y = x @ torch.tensor([[1.0, -0.5], [0.3, 0.8]], **D) + NOISE * torch.randn(N, 2, **D)
    y[torch.rand(N, 2) < 0.3] = torch.nan
    y[4] = torch.nan  # a row of which nothing was seen
    y[5] = 0.1
    return x, y


def program(noise=NOISE, **options):
    net = torch.nn.Linear(2, 2, bias=False, **D)
    options = {"missing_targets": True} | options
    return bdl.models.Regression(bdl.bayesianize(net), noise=noise, **options)


def exact(x, y):
    """Posterior mean (targets, 2) and covariances (targets, 2, 2), and log p(y), target by target
    over the rows in which it was seen."""
    each = [Conjugate(x[seen := ~target.isnan()], target[seen], NOISE) for target in y.T]
    evidence = float(sum(e.evidence for e in each))
    return torch.stack([e.mean for e in each]), torch.stack([e.covariance for e in each]), evidence


def laplace(model, x, y, **options):
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        bdl.training.train(model, guide, x, y, steps=400, learning_rate=0.1, **options)
        return guide.laplace_approximation((x, y))


@pytest.mark.parametrize("elbo", [None, bdl.elbo.CompiledELBO()], ids=["plain", "compiled"])
def test_the_posterior_and_the_evidence_of_what_was_seen(elbo, data):
    x, y = data
    mean, covariance, evidence = exact(x, y)
    posterior = laplace(program(), x, y, elbo=elbo)
    torch.testing.assert_close(posterior.location().reshape(2, 2), mean, atol=1e-4, rtol=1e-4)
    inverse = posterior.precision.solve(torch.eye(4, **D))
    torch.testing.assert_close(inverse, torch.block_diag(*covariance))
    found = bdl.evidence.log_marginal_likelihood(posterior)
    assert float(found) == pytest.approx(evidence, abs=1e-5)


def test_all_methods_say_what_a_program_with_masks_says(data):
    x, y = data

    def by_hand(x, y):
        w = pyro.sample("weight", dist.Normal(torch.zeros(2, 2, **D), 1.0).to_event(2))
        f = x @ w.T
        with pyro.plate("data", len(x)):
            law = dist.Normal(f, NOISE)
            if y is not None:
                law, y = law.mask(~y.isnan()), y.nan_to_num(7.0)
            pyro.sample("y", law.to_event(1), obs=y)

    by_hand.takes_missing = lambda name: name == "y"
    for structure in ("full", "diag", "kron"):
        found = []
        for model in (program(), by_hand):
            guide = bdl.guides.AutoLaplaceGGN(model, structure=structure).prototype(x, y)
            with torch.no_grad():
                guide.loc.copy_(torch.arange(4.0) / 4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BdlWarning)
                posterior = guide.laplace_approximation((x, y))
            found.append(posterior.precision.solve(torch.eye(4, **D)))
        torch.testing.assert_close(*found)
    draws = {"weight": torch.randn(1, 8, 2, 2, **D)}
    name = next(iter(bdl.Program(program(), x, y).latents))
    densities = [
        bdl.Predictive(model, bdl.Samples(values)).log_likelihood(x, y)["y"]
        for model, values in ((program(), {name: draws["weight"]}), (by_hand, draws))
    ]
    torch.testing.assert_close(*densities)
    assert (densities[0][:, 4] == 0.0).all()


def test_scores_count_what_was_seen(data):
    x, y = data
    model = program()
    posterior = laplace(model, x, y)
    found = bdl.evaluate(model, posterior, x, y, train=(x, y), num_samples=4000)
    seen = ~y.isnan()
    assert found.seen == (int(seen.sum()), y.numel())
    assert found.rows == int(seen.any(1).sum())
    assert torch.equal(found.y.isnan(), ~seen[seen.any(1)])
    mean, covariance, _ = exact(x, y)
    predicted = x @ mean.T
    variance = torch.einsum("ni,tij,nj->nt", x, covariance, x) + NOISE**2
    density = dist.Normal(predicted, variance.sqrt()).log_prob(y.nan_to_num()) * seen
    nlpd = -density.sum(1)[seen.any(1)].mean()
    assert found.scores["nlpd"] == pytest.approx(float(nlpd), abs=0.01)
    rmse = ((predicted - y)[seen]).square().mean().sqrt()
    assert found.scores["rmse"] == pytest.approx(float(rmse), abs=0.02)


def test_a_learned_noise_is_that_of_what_was_seen(data):
    """MacKay's fixed point at the exact posterior: residuals / (seen - gamma)."""
    x, y = data
    noise = PyroParam(torch.tensor(1.0, **D), constraints.positive)
    model = program(noise)
    posterior = laplace(model, x, y)
    bdl.evidence.maximize(posterior)
    found = float(model.noise)

    def evidence(noise):
        total = 0.0
        for target in y.T:
            seen = ~target.isnan()
            prior = x[seen] @ x[seen].T + noise**2 * torch.eye(int(seen.sum()), **D)
            law = MultivariateNormal(torch.zeros_like(target[seen]), prior)
            total += float(law.log_prob(target[seen]))
        return total

    best = max(torch.linspace(0.1, 1.0, 901, **D).tolist(), key=evidence)
    assert found == pytest.approx(best, abs=2e-3)


def test_minibatches_and_chains(data):
    x, y = data
    mean, covariance, _ = exact(x, y)
    model = program(num_data=N)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior = guide.laplace_approximation(batches)
        samples = bdl.mcmc.sample(
            model, x, y, num_warmup=200, num_samples=500, num_chains=1, progress=False
        )
    inverse = posterior.precision.solve(torch.eye(4, **D))
    torch.testing.assert_close(inverse, torch.block_diag(*covariance))
    draws = next(iter(samples.latents.values()))
    torch.testing.assert_close(draws.mean((0, 1)).reshape(2, 2), mean, atol=0.05, rtol=0)


def test_heads_of_several_outputs(data):
    x, y = data
    counts = torch.arange(N, **D) % 3
    counts[2] = torch.nan
    heads = {
        "price": bdl.models.Regression(noise=NOISE, output=lambda f: f[:, 0], missing_targets=True),
        "count": bdl.models.PoissonRegression(output=lambda f: f[:, 1], missing_targets=True),
    }
    net = torch.nn.Linear(2, 2, bias=False, **D)
    model = bdl.models.MultiOutput(bdl.bayesianize(net), heads)
    given = {"price": y[:, 0], "count": counts}
    program = bdl.Program(model, x, given)
    program.check()
    (name,) = program.latents
    w = torch.randn(2, 2, **D)
    found = program.log_likelihood({name: w})
    f = x @ w.T
    price = dist.Normal(f[:, 0], NOISE).log_prob(y[:, 0].nan_to_num())
    count = dist.Poisson(f[:, 1].exp()).log_prob(counts.nan_to_num())
    torch.testing.assert_close(found["price"], price.where(~y[:, 0].isnan(), 0.0))
    torch.testing.assert_close(found["count"], count.where(~counts.isnan(), 0.0))


@pytest.mark.parametrize("targets", [2, 1])
def test_nan_is_refused_where_it_is_not_declared(targets, data):
    x, y = data
    net = torch.nn.Linear(2, targets, bias=False, **D)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=NOISE)
    with pytest.raises(ValueError, match=r"y holds NaN .*missing_targets=True"):
        laplace(model, x, y[:, :targets])
    with pytest.raises(ValueError, match="x holds NaN"):
        laplace(program(), y, y)
    with pytest.raises(ValueError, match="y holds NaN or infinity in rows 0"):
        laplace(program(), x, torch.where(torch.arange(N)[:, None] == 0, torch.inf, y))


CLASSES = {
    "classes": (lambda net, **o: bdl.models.Classification(net, **o), 3),
    "two classes": (lambda net, **o: bdl.models.BinaryClassification(net, **o), 1),
    "grades": (lambda net, **o: bdl.models.OrdinalRegression(net, cutpoints=[-1.0, 0.5], **o), 1),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_that_is_missing_counts_as_a_row_that_is_left_out(kind):
    build, outputs = CLASSES[kind]
    torch.manual_seed(0)
    x, net = torch.randn(20, 2, **D), torch.nn.Linear(2, outputs, **D)
    y = torch.randint(0, 2 if kind == "two classes" else 3, (20,))
    seen = torch.arange(20) % 4 != 0
    some = torch.where(seen, y.double(), torch.nan)
    found = []
    for inputs, targets, options in (
        (x, some, {"missing_targets": True}),
        (x[seen], y[seen], {}),
    ):
        model = build(bdl.bayesianize(net), **options)
        guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(inputs, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            posterior = guide.laplace_approximation((inputs, targets))
            held_out = guide.laplace_approximation(
                (inputs, targets), held_out=(inputs, targets)
            ).held_out
        scores = bdl.evaluate(model, posterior, inputs, targets, num_samples=50).scores
        covariance = posterior.precision.solve(torch.eye(3 * outputs, **D))
        found.append((covariance, held_out, scores))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1].rows == found[1][1].rows == 15
    for name in ("gain", "error", "factor") if kind != "grades" else ():  # they take draws
        of_all, of_some = (getattr(one[1], name) for one in found)
        assert of_all == pytest.approx(of_some, rel=1e-9)
    for name in ("nlpd", "accuracy", "brier", "ece"):
        assert found[0][2][name] == pytest.approx(found[1][2][name], rel=1e-9), name
    with pytest.raises(ValueError, match="missing_targets=True"):
        bdl.training.train(build(bdl.bayesianize(net)), guide, x, some, steps=1)
