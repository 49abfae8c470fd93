"""The likelihoods beyond the Normal and the classes: densities, information, scores, and every
method on a small network."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import metrics, models
from pyro_bdl.curvature.fisher import cell_roots, exact_columns, sampled_columns
from pyro_bdl.distributions.censored import Censored
from pyro_bdl.distributions.parameters import parameters_of, rebuilt
from pyro_bdl.distributions.targets import OrderedLogistic, ZeroTruncated
from pyro_bdl.errors import BdlWarning
from pyro_bdl.program import Site

D = torch.float64
ROWS = 24


def T(value):
    return torch.tensor(value, dtype=D)


def network(outputs=1):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).to(D)
    return bdl.bayesianize(net, bdl.priors.FanIn(1.0))


# name: the program
PROGRAMS = {
    "ordinal": lambda: models.OrdinalRegression(network(), 4, num_data=ROWS),
    "ordinal, fixed": lambda: models.OrdinalRegression(
        network(), cutpoints=[-1.0, 0.5], num_data=ROWS
    ),
    "negative binomial": lambda: models.NegativeBinomialRegression(network(), num_data=ROWS),
    **{
        f"{zeros} {kind.__name__}": lambda kind=kind, zeros=zeros: kind(
            network(2), zeros=zeros, num_data=ROWS
        )
        for zeros in ("inflated", "hurdle")
        for kind in (models.PoissonRegression, models.NegativeBinomialRegression)
    },
}

CENSORED = ("normal", "lognormal", "weibull")
for law in CENSORED:
    PROGRAMS[f"censored, {law}"] = lambda law=law: models.CensoredRegression(
        network(), law, num_data=ROWS
    )


def data(make, rows=ROWS):
    """Inputs, and targets drawn from the program's prior."""
    torch.manual_seed(0)
    x = torch.randn(rows, 2, dtype=D)
    y = bdl.Predictive(make(), num_samples=1)(x)["y"][0]
    if isinstance(make(), models.CensoredRegression):
        y = torch.stack([y, torch.arange(rows) % 4, y + 1.0], -1)  # all kinds of status
    return x, y


COUNTS_SLOW = ("inflated PoissonRegression", "hurdle PoissonRegression")
SLOW = ("ordinal, fixed", "censored, normal", *COUNTS_SLOW)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROGRAMS]
)
def test_every_method_takes_it(name):
    make = PROGRAMS[name]
    x, y = data(make)
    model = make()
    posteriors = {
        "mean field": bdl.guides.AutoMeanField(model),
        "Laplace": bdl.guides.AutoLaplaceGGN(model),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # of so few steps and draws
        warnings.filterwarnings("error", ".*one by one")
        warnings.filterwarnings("error", ".*batching rule")
        for guide in posteriors.values():
            bdl.training.train(model, guide, x, y, steps=30, batch_size=8)
        posteriors["Laplace"] = posteriors["Laplace"].laplace_approximation((x, y))
        posteriors["NUTS"] = bdl.mcmc.sample(model, x, y, num_warmup=10, num_samples=10)
        table = bdl.compare(model, posteriors, x, y, reference="NUTS", num_samples=40)
    score = "ranked_probability_score" if "ordinal" in name else "crps"
    score = "crps_censored" if "censored" in name else score
    found = table.table.loc[[*posteriors], ["nlpd", score]]
    assert ("may be censored" in str(table.notes)) == ("censored" in name)
    assert np.isfinite(found.to_numpy(dtype=float)).all(), found


def information(base, names):
    """S S' of some parameters together."""
    used = {name: value for name, value in parameters_of(base).items() if name in names}
    columns = [
        torch.cat([root[name].reshape(-1) for name in used if name in root])
        for root in [
            {name: root.get(name, torch.zeros_like(used[name])) for name in used}
            for root in cell_roots(base, used)
        ]
    ]
    return sum(column.outer(column) for column in columns), list(used)


def summed_information(base, names, values, weights):
    """F = sum of p(y) s s' over values of the observation, with the score s by autograd."""
    every = {name: v.expand(len(values), *v.shape) for name, v in parameters_of(base).items()}
    leaves = {name: every[name].clone().requires_grad_() for name in names}
    log_p = rebuilt(base, every | leaves).log_prob(values)
    log_p.sum().backward()
    scores = torch.cat([leaf.grad.reshape(len(values), -1) for leaf in leaves.values()], 1)
    return torch.einsum("d,di,dj->ij", weights * log_p.detach().exp(), scores, scores)


# Ordered classes


CUTS = T([-1.0, 0.3, 2.0])


def test_ordered_classes_by_hand():
    """P(y <= k) = sigmoid(c_k - f) (McCullagh 1980), as Pyro's own where that does not cancel."""
    f = T([-2.0, 0.1, 1.5])
    ours, theirs = OrderedLogistic(f, CUTS), dist.OrderedLogistic(f, CUTS)
    torch.testing.assert_close(ours.probs, theirs.probs)
    assert ours.expand((2, 3)).batch_shape == (2, 3)
    far = OrderedLogistic(T(60.0), CUTS).log_prob(torch.arange(4))
    by_hand = (CUTS[1:2] - 60).exp() - (CUTS[:1] - 60).exp()
    torch.testing.assert_close(far[1:2], by_hand.log())
    assert far.isfinite().all()
    values = torch.arange(4)
    base = OrderedLogistic(T(0.4), CUTS)
    found, names = information(base, ["predictor", "cutpoints"])
    expected = summed_information(base, names, values, torch.ones(4, dtype=D))
    torch.testing.assert_close(found, expected)


def test_the_prior_of_the_cut_points_has_equal_classes_at_its_median():
    model = models.OrdinalRegression(network(), 5)
    cuts = bdl.Predictive(model, num_samples=2000)(torch.zeros(1, 2, dtype=D))["cutpoints"]
    assert (cuts.diff(dim=-1) > 0).all() and cuts.dtype == D
    gaps = cuts.diff(dim=-1).median(0).values
    expected = T([0.2, 0.4, 0.6, 0.8]).logit().diff()
    assert ((gaps / expected).log().abs() < 0.15).all()


def test_the_ranked_probability_score_is_the_crps_of_the_class_numbers():
    """CRPS = E|X - y| - E|X - X'| / 2 (Gneiting & Raftery 2007, equation 21)."""
    p, y = torch.rand(6, 4, dtype=D).softmax(-1), torch.randint(0, 4, (6,))
    k = torch.arange(4, dtype=D)
    to_y = (p * (k - y[:, None]).abs()).sum(-1)
    between = torch.einsum("ni,nj,ij->n", p, p, (k[:, None] - k).abs())
    expected = to_y - 0.5 * between
    found = metrics.ranked_probability_score(p, y, pointwise=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(metrics.ranked_probability_score(p, y), expected.mean())


def test_cut_points_that_do_not_fit_are_refused():
    for arguments, words in (
        ({}, "needs num_classes"),
        ({"num_classes": 1}, "at least 2"),
        ({"cutpoints": [0.5, 0.5]}, "increasing"),
        ({"cutpoints": [0.5], "num_classes": 3}, "num_classes - 1 numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            models.OrdinalRegression(network(), **arguments)


# Counts


COUNTS = torch.arange(2000, dtype=D)


@pytest.mark.parametrize("zeros", [None, "inflated", "hurdle"])
@pytest.mark.parametrize("dispersion", [None, 0.8])
def test_counts_by_hand(zeros, dispersion):
    """A negative binomial has the mean m and the variance m + (dispersion m)^2 (Cameron & Trivedi
    1998), its probabilities are those of Poisson counts with a Gamma rate; a share of zeros more
    shrinks the rest, and behind a hurdle the rest is what is left of one without zero."""
    f = T([[0.7, -0.4], [2.0, 0.9]])
    share = torch.zeros(2, dtype=D) if zeros is None else f[:, 1].sigmoid()
    if dispersion is None:
        model = models.PoissonRegression(network(), zeros=zeros)
    else:
        model = models.NegativeBinomialRegression(network(), dispersion=dispersion, zeros=zeros)
    base = model.likelihood(f[:, 0] if zeros is None else f)
    m, squared = f[:, 0].exp(), (dispersion or 0.0) ** 2
    if dispersion is None:
        inner = dist.Poisson(m).log_prob(COUNTS[:, None]).exp()
        second = m + m.square()
    else:
        u = (torch.arange(20_000, dtype=D) + 0.5) / 20_000  # midpoints, dense near a rate of zero
        rates, steps = 120 * u**3, 360 * u**2 / 20_000
        weights = dist.Gamma(1 / squared, 1 / squared / m).log_prob(rates[:, None]).exp()
        some = torch.stack([dist.Poisson(rates).log_prob(k).exp() for k in COUNTS[:12]])
        inner = some @ (weights * steps[:, None])
        second = m + (1 + squared) * m.square()
    left = 1 - inner[0] if zeros == "hurdle" else torch.ones(2, dtype=D)
    by_hand = (1 - share) * inner / left
    by_hand[0] = share if zeros == "hurdle" else share + (1 - share) * inner[0]
    p = base.log_prob(COUNTS[:, None]).exp()
    torch.testing.assert_close(p[: len(inner)], by_hand, rtol=1e-4, atol=1e-12)
    torch.testing.assert_close(p.sum(0), torch.ones(2, dtype=D))
    mean = (COUNTS[:, None] * p).sum(0)
    torch.testing.assert_close(mean, (1 - share) * m / left, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(base.mean, mean)
    variance = ((COUNTS[:, None] - mean) ** 2 * p).sum(0)
    expected = (1 - share) * second / left - mean.square()
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(base.variance, variance)


TRUNCATED = [
    ZeroTruncated(dist.Poisson(T(1.7))),
    ZeroTruncated(dist.NegativeBinomial(T(2.5), logits=T(0.4))),
]


@pytest.mark.parametrize(
    "base", [*TRUNCATED, ZeroTruncated(dist.Poisson(T(0.05))),
             ZeroTruncated(dist.NegativeBinomial(T(0.3), logits=T(-1.0)))],
)  # fmt: skip
def test_draws_behind_a_hurdle_have_its_probabilities(base):
    torch.manual_seed(0)
    draws = base.sample((100_000,))
    shares = torch.stack([(draws == k).double().mean() for k in range(8)])
    p = base.log_prob(COUNTS[:8]).exp()
    assert shares[0] == p[0] == 0
    assert ((shares - p).abs() <= 4.5 * (p * (1 - p) / len(draws)).sqrt()).all(), (shares, p)


def test_a_hurdle_has_gradients_at_zero_and_at_small_rates():
    f = torch.tensor([-30.0, 0.3, -30.0, 4.0], dtype=D, requires_grad=True)
    g = torch.zeros(4, dtype=D, requires_grad=True)
    y = T([0.0, 0.0, 1.0, 3.0])
    for make in (lambda: dist.Poisson(f.exp()), lambda: dist.NegativeBinomial(T(1.5), logits=f)):
        base = dist.ZeroInflatedDistribution(ZeroTruncated(make()), gate_logits=g)
        log_p = base.log_prob(y)
        torch.testing.assert_close(log_p[:3].exp(), torch.cat([T([0.5, 0.5]), T([0.5])]))
        found = torch.autograd.grad(log_p.sum(), [f, g])
        assert all(gradient.isfinite().all() for gradient in found)
        torch.testing.assert_close(found[0][:3], torch.zeros(3, dtype=D), atol=1e-9, rtol=0.0)
    with pytest.raises(TypeError, match="takes a Poisson or a NegativeBinomial, got Geometric"):
        ZeroTruncated(dist.Geometric(T(0.5)))
    with pytest.raises(ValueError, match="zeros must be one of 'inflated', 'hurdle', None"):
        models.PoissonRegression(network(2), zeros="none")


@pytest.mark.parametrize(
    "base",
    [
        dist.NegativeBinomial(T(2.5), logits=T(0.4)),
        dist.ZeroInflatedPoisson(T(1.7), gate_logits=T(-0.5)),
        dist.ZeroInflatedDistribution(
            dist.NegativeBinomial(T(2.5), logits=T(0.4)), gate_logits=T(-0.5)
        ),
        *TRUNCATED,
        *(dist.ZeroInflatedDistribution(base, gate_logits=T(-0.5)) for base in TRUNCATED),
    ],
)
def test_the_information_of_counts_is_a_sum(base):
    found, names = information(base, parameters_of(base))
    expected = summed_information(base, names, COUNTS, torch.ones(len(COUNTS), dtype=D))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_counts_beyond_the_sum_are_drawn():
    torch.manual_seed(0)
    base = dist.ZeroInflatedPoisson(T([1.7, 3000.0]), gate_logits=T([-0.5, -0.5]))
    (rate,) = cell_roots(base, {"base_dist.rate": parameters_of(base)["base_dist.rate"]})
    found = rate["base_dist.rate"].square()
    share = 1 - T(-0.5).sigmoid()
    assert abs(float(found[1] * 3000 / share) - 1) < 0.5


# Censored targets


def log_law(law, t, loc, scale):
    """log p(t) of the documented laws, by hand."""
    if law == "normal":
        return dist.Normal(loc, scale).log_prob(t)
    z = (t.log() - loc) / scale
    if law == "lognormal":
        return -0.5 * z**2 - (scale * t).log() - 0.5 * math.log(2 * math.pi)
    return z - z.exp() - (scale * t).log()


@pytest.mark.parametrize("law", CENSORED)
def test_censored_targets_by_quadrature(law):
    """P(y > c), P(y < c) and P(c < y < d) are integrals of the density."""
    loc, scale, low, high = T(0.3), T(0.7), T(1.2), T(2.5)
    value = low.expand(4)
    base = Censored(law, loc, scale, torch.arange(4), high)
    start = -12.0 if law == "normal" else -9.0
    grid = torch.linspace(start, 12.0 if law == "normal" else 7.0, 400_001, dtype=D)
    t = grid if law == "normal" else grid.exp()
    p = log_law(law, t, loc, scale).exp() * (1.0 if law == "normal" else t)
    step = grid[1] - grid[0]
    masses = [
        torch.where(part, p, 0.0).sum() * step
        for part in (t > low, t < low, (t > low) & (t < high))
    ]
    expected = torch.stack([masses[0], log_law(law, low, loc, scale).exp(), *masses[1:]])
    torch.testing.assert_close(base.log_prob(value).exp(), expected, rtol=2e-4, atol=1e-8)
    mean = (p * t).sum() * step
    torch.testing.assert_close(base.mean[0], mean, rtol=1e-4, atol=1e-8)
    variance = (p * (t - mean) ** 2).sum() * step
    torch.testing.assert_close(base.variance[0], variance, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("units", [(1.0, 0.0), (2.0, 3.0)])
def test_scores_of_censored_targets_are_those_of_their_limits(units):
    """With a mask too, in the target's units; of targets that were all seen as of others."""
    torch.manual_seed(0)
    model = models.CensoredRegression(network(), "normal", scale=0.7)
    x, seen = torch.randn(8, 2, dtype=D), torch.arange(8) != 3
    value = torch.randn(8, dtype=D)
    posterior = bdl.Predictive(model, num_samples=40)(x)
    latents = {name: v[None] for name, v in posterior.items() if name not in ("y", "f")}
    posterior = bdl.Samples(latents)

    def masked(x, y=None):
        with pyro.poutine.mask(mask=seen):
            return model(x, y)

    y = torch.stack([value, torch.arange(8) % 4, value + 0.5], -1)
    evaluation = bdl.evaluate(masked, posterior, x, y, units=units, progress=False)
    draws, status = evaluation.predictions, y[:, 1]
    upper = torch.where(status == 3, value + 0.5, value).masked_fill(status == 0, math.inf)
    ends = (value.masked_fill(status == 2, -math.inf), upper)
    low, high = (end[seen] * units[0] + units[1] for end in ends)
    expected = metrics.crps(draws, low, upper=high)
    assert evaluation.scores["crps_censored"] == pytest.approx(float(expected))
    assert "crps" not in evaluation.scores and evaluation.pit.shape == (7,)
    # a limit has a probability, which is the same in all units
    law = stats.norm(evaluation.expected.numpy(), 0.7 * units[0])
    within = torch.from_numpy(law.cdf(high.numpy()) - law.cdf(low.numpy()))
    p = torch.where(low == high, torch.from_numpy(law.pdf(low.numpy())), within).mean(0)
    assert evaluation.scores["nlpd"] == pytest.approx(float(-p.log().mean()))


@pytest.mark.parametrize("law", CENSORED)
def test_censored_densities_and_their_gradients_are_finite_far_out(law):
    loc = torch.linspace(-4.0, 4.0, 9, dtype=D)[:, None].requires_grad_()
    scale = T(0.2).requires_grad_()
    status = torch.arange(4).expand(9, 4)
    found = Censored(law, loc, scale, status, T(1.5)).log_prob(T(1.0))
    found.sum().backward()
    assert found.isfinite().all() and loc.grad.isfinite().all() and scale.grad.isfinite()


@pytest.mark.parametrize("law", CENSORED)
@pytest.mark.parametrize("num_draws", [None, 4000])
def test_the_curvature_of_censored_targets_is_the_hessian(law, num_draws):
    """-d^2 log p in loc at a known scale is exact and not negative; in both parameters the second
    derivatives are those in loc / scale and 1 / scale (Burridge 1981)."""
    torch.manual_seed(0)
    loc, scale = torch.full((4,), 0.3, dtype=D), torch.full((4,), 0.7, dtype=D)
    value = torch.full((4,), 1.2, dtype=D)

    def log_p(loc, scale, k):
        return Censored(law, loc, scale, torch.tensor(k), T(2.5)).log_prob(T(1.2))

    def of_status(k):
        at = torch.stack([loc[k] / scale[k], 1 / scale[k]])
        to = torch.autograd.functional.jacobian(
            lambda v: torch.stack([v[0] / v[1], 1 / v[1]]), torch.stack([loc[k], scale[k]])
        )
        hessian = torch.autograd.functional.hessian(lambda v: log_p(v[0] / v[1], 1 / v[1], k), at)
        assert torch.linalg.eigvalsh(-hessian).min() > -1e-9
        return -to.T @ hessian @ to

    expected = torch.stack([of_status(k) for k in range(4)])
    base = Censored(
        law, loc.requires_grad_(), scale.requires_grad_(), torch.arange(4), torch.full((4,), 2.5)
    )
    site = Site(base, value, 1.0, None)
    columns = exact_columns(site) if num_draws is None else sampled_columns(site, num_draws)
    columns = [torch.stack([c["loc"], c["scale"]], -1) for c in columns]
    found = sum(c[:, :, None] * c[:, None, :] for c in columns)
    scaled = 1e-9 if num_draws is None else 0.1 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=scaled)
    if num_draws is None:
        direct = torch.stack(
            [
                torch.autograd.functional.hessian(lambda v: log_p(v, T(0.7), k), T(0.3))  # noqa: B023
                for k in range(4)
            ]
        )
        torch.testing.assert_close(found[:, 0, 0], -direct)


@pytest.mark.parametrize("status, words", [(5.0, "not 0, 1, 2 or 3"), (3.0, "not above its value")])
def test_a_status_or_an_interval_that_is_none_is_refused(status, words):
    """Where the posterior is made, and not as draws that are NaN."""
    model = models.CensoredRegression(network(), "weibull")
    x, y = torch.randn(6, 2, dtype=D), torch.ones(6, 3, dtype=D)
    y[4, 1], y[4, 2] = status, 0.5
    with pytest.raises(ValueError, match=f"y has in row 4 .*{words}"):
        bdl.guides.AutoMeanField(model).prototype(x, y)
    with pytest.raises(ValueError, match=f"y has in row 4 .*{words}"):
        bdl.Program(model, x, y).check()


def test_censored_targets_that_do_not_fit_are_refused():
    x, y = torch.randn(5, 2, dtype=D), torch.ones(5, 2, dtype=D)
    with pytest.raises(ValueError, match="'normal', 'lognormal', 'weibull'"):
        models.CensoredRegression(network(), "gamma")
    for wrong in (y[:, 0], y[:3], torch.ones(5, 4, dtype=D)):
        with pytest.raises(ValueError, match="values and status"):
            models.CensoredRegression(network())(x, wrong)


# Shares


def test_shares_by_quadrature():
    """Mean m and variance m (1 - m) / (1 + precision) (Ferrari & Cribari-Neto 2004); the
    information is that of the scores."""
    f = T([0.8])
    base = models.BetaRegression(network(), precision=6.0).likelihood(f)
    y = (torch.arange(200_000, dtype=D) + 0.5) / 200_000
    p = base.log_prob(y[:, None]).exp() / len(y)
    m = f.sigmoid()
    torch.testing.assert_close(p.sum(0), torch.ones(1, dtype=D))
    mean = (p * y[:, None]).sum(0)
    torch.testing.assert_close(mean, m)
    variance = (p * (y[:, None] - mean) ** 2).sum(0)
    torch.testing.assert_close(variance, m * (1 - m) / 7, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(base.variance, variance, rtol=1e-5, atol=1e-9)
    one = dist.Beta(base.concentration1[0], base.concentration0[0])
    found, names = information(one, ["concentration1", "concentration0"])
    weights = torch.full((len(y),), 1 / len(y), dtype=D)
    expected = summed_information(one, names, y, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
