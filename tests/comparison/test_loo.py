"""Leave-one-out where PSIS fails: by moment matching and by refits, against exact densities."""

import functools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl

PRIOR, NOISE = 2.0, 0.5
N = 12


def line(x, y=None, seen=None):
    """w ~ Normal(0, 2), y_n ~ Normal(w'x_n, 0.5), with the rows that a mask leaves."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), PRIOR).to_event(1))
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=True if seen is None else seen):
        pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


def posterior(x, y):
    covariance = torch.linalg.inv(torch.eye(2, dtype=x.dtype) / PRIOR**2 + x.T @ x / NOISE**2)
    return torch.distributions.MultivariateNormal(covariance @ x.T @ y / NOISE**2, covariance)


def chains(x, y, draws=1000):
    return bdl.Samples({"w": posterior(x, y).sample((4, draws))})


@pytest.fixture
def data():
    """A line, and a last row far out that is far from it."""
    x = torch.stack([torch.ones(N), torch.linspace(-1, 1, N)], 1).double()
    y = x @ torch.tensor([0.3, 1.0], dtype=x.dtype) + NOISE * torch.randn(N, dtype=x.dtype)
    x[-1, 1], y[-1] = 3.0, -0.5
    return x, y


def exact(x, y):
    """log p(y_n | the others), (N,)."""
    values = []
    for n in range(len(y)):
        others = torch.arange(len(y)) != n
        q = posterior(x[others], y[others])
        spread = NOISE**2 + x[n] @ q.covariance_matrix @ x[n]
        values.append(dist.Normal(x[n] @ q.mean, spread.sqrt()).log_prob(y[n]))
    return torch.stack(values)


def found(model, samples, *data, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)
        return bdl.loo(model, samples, *data, progress=False, **options)


@pytest.mark.parametrize("seed", range(2))
def test_moment_matching_gives_the_exact_density_of_an_outlier(data, seed):
    torch.manual_seed(seed)
    samples, truth = chains(*data), exact(*data)
    with pytest.warns(bdl.errors.BdlWarning, match="k-hat of 1 of 12") as warned:
        plain = bdl.loo(line, samples, *data)
    assert warned[0].filename == __file__
    assert plain.pareto_k[-1] > 0.8 and plain.num_bad == 1
    assert plain.elpd - truth.sum() > 2 * plain.draws_se  # its own error hides what is wrong
    matched = found(line, samples, *data, method="moment_matching")
    assert matched.num_bad == 0 and matched.pareto_k[-1] < 0.7
    assert abs(matched.elpd - truth.sum()) < 3 * matched.draws_se < 0.3
    assert torch.equal(matched.pointwise[:-1], plain.pointwise[:-1])  # nothing else is touched
    full = posterior(*data)
    spread = (NOISE**2 + ((data[0] @ full.covariance_matrix) * data[0]).sum(1)).sqrt()
    with_all = dist.Normal(data[0] @ full.mean, spread).log_prob(data[1])
    assert matched.p_loo == pytest.approx((with_all - truth).sum().item(), abs=0.2)


def test_its_error_is_the_spread_over_sets_of_draws(data):
    loos = [found(line, chains(*data, 250), *data, method="moment_matching") for _ in range(20)]
    spread = torch.tensor([one.elpd for one in loos]).std().item()
    mean_square = torch.tensor([one.draws_se for one in loos]).square().mean().sqrt().item()
    assert 0.6 < mean_square / spread < 1.6
    bias = sum(one.elpd for one in loos) / 20 - exact(*data).sum().item()
    assert abs(bias) < 4 * spread / math.sqrt(20)


def scaled(x, y=None):
    """Normal data with an unknown scale, which is positive."""
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 2.0))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, scale).expand([len(x)]), obs=y)


def test_moment_matching_moves_unconstrained_numbers():
    """Against quadrature over mean and log scale: the scale without an outlier is much smaller."""
    y = torch.cat([0.3 * torch.randn(15, dtype=torch.float64), torch.tensor([2.5])])
    mean, log_scale = torch.linspace(-4, 5, 901).double(), torch.linspace(-4, 3, 701).double()
    a, b = (grid.flatten() for grid in torch.meshgrid(mean, log_scale, indexing="ij"))
    likelihood = dist.Normal(a[:, None], b.exp()[:, None]).log_prob(y)
    joint = dist.Normal(0.0, 2.0).log_prob(a) + dist.Normal(0.0, 1.0).log_prob(b)
    joint = joint + likelihood.sum(1)
    without = joint[:, None] - likelihood
    truth = joint.logsumexp(0) - without.logsumexp(0)
    places = joint.softmax(0).multinomial(4000, replacement=True)
    jitter = torch.rand(2, 4000).double() - 0.5
    samples = bdl.Samples({
        "mean": (a[places] + 0.01 * jitter[0]).reshape(4, 1000),
        "scale": (b[places] + 0.01 * jitter[1]).exp().reshape(4, 1000),
    })  # fmt: skip
    plain = found(scaled, samples, torch.zeros(16, 1).double(), y)
    assert plain.pareto_k[-1] > 0.7
    matched = found(scaled, samples, torch.zeros(16, 1).double(), y, method="moment_matching")
    assert matched.num_bad == 0
    assert abs(matched.elpd - truth.sum()) < 3 * matched.draws_se < 0.5


def mixture_chains(x, y, draws=1000):
    """Draws of sum_n p(w | y) / p(y_n | w), a mixture of Normals, by its components: they have the
    weights 1 / p(y_n | the others) and the posteriors without y_n."""
    truth = exact(x, y)
    numbers = torch.distributions.Categorical(logits=-truth).sample((4, draws))
    w = torch.empty(4, draws, 2, dtype=x.dtype)
    for n in range(len(y)):
        others = torch.arange(len(y)) != n
        chosen = numbers == n
        w[chosen] = posterior(x[others], y[others]).sample((int(chosen.sum()),))
    return bdl.Samples({"w": w})


@pytest.mark.parametrize("seed", range(2))
def test_draws_of_the_mixture_give_the_exact_densities(data, seed):
    """Where PSIS fails: p(y_n | the others), with all data, and the error over draws."""
    torch.manual_seed(seed)
    truth, mixture = exact(*data), bdl.loo_mixture(line, *data)
    program = bdl.Program(mixture, *data)
    w = torch.randn(5, 2, dtype=torch.float64)
    joint = torch.stack([program.log_joint({"w": value}) for value in w])
    plain = bdl.Program(line, *data)
    each = dist.Normal(w @ data[0].T, NOISE).log_prob(data[1])
    expected = torch.stack([plain.log_joint({"w": v}) for v in w]) + (-each).logsumexp(1)
    torch.testing.assert_close(joint, expected)
    seen = torch.arange(N) != 2  # the rows behind a mask are no data
    masked, without = (
        bdl.Program(bdl.loo_mixture(line, *args), *args).log_joint({"w": w[0]})
        for args in ((*data, seen), [part[seen] for part in data])
    )
    torch.testing.assert_close(masked, without)
    result = bdl.loo(mixture, mixture_chains(*data), *data, progress=False)
    assert result.num_bad == 0
    assert abs(result.elpd - truth.sum()) < 3 * result.draws_se < 0.6
    full = posterior(*data)
    spread = (NOISE**2 + ((data[0] @ full.covariance_matrix) * data[0]).sum(1)).sqrt()
    with_all = dist.Normal(data[0] @ full.mean, spread).log_prob(data[1])
    assert result.p_loo == pytest.approx(float((with_all - truth).sum()), abs=0.5)


def test_few_draws_have_no_error_over_draws(data):
    for model in (line, bdl.loo_mixture(line, *data)):
        result = found(model, chains(*data, draws=4), *data)
        assert math.isnan(result.draws_se) and math.isfinite(result.elpd)


def test_a_mixture_needs_single_data(data):
    x, y = data
    with pytest.raises(ValueError, match="masks leave out all data"):
        bdl.loo_mixture(line, x, y, torch.zeros(N, dtype=torch.bool))

    def switched(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            kind = pyro.sample("kind", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(w + kind, NOISE), obs=y)

    with pytest.raises(bdl.errors.UnsupportedProgramError, match=r"discrete sites \(kind\)"):
        bdl.loo_mixture(switched, x, y)


def test_two_observed_sites_are_one_datum(data):
    def both(x, y=None, z=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, NOISE), obs=y)
            pyro.sample("z", dist.Poisson((w * x).exp()), obs=z)

    x, y, w = data[0][:, 1], data[1], torch.tensor(0.7, dtype=torch.float64)
    z = torch.poisson(x.exp())
    each = dist.Normal(w * x, NOISE).log_prob(y) + dist.Poisson((w * x).exp()).log_prob(z)
    found = bdl.Program(bdl.loo_mixture(both, x, y, z), x, y, z).log_joint({"w": w})
    expected = dist.Normal(0.0, 2.0).log_prob(w) + each.sum() + (-each).logsumexp(0)
    torch.testing.assert_close(found, expected)


def test_the_right_datum_is_moved_behind_masked_rows_and_in_parts(data):
    x, y = data
    order = torch.tensor([0, 1, 11, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    x, y = x[order], y[order]
    seen = torch.arange(N) != 1
    samples = chains(x[seen], y[seen])
    truth = exact(x[seen], y[seen])

    def masked(x, seen, y=None):
        line(x, y, seen)

    whole = found(masked, samples, x, seen, y, method="moment_matching")
    with bdl.working_memory(8 * 4000 * 2):
        parts = found(masked, samples, x, seen, y, method="moment_matching")
    for one in (whole, parts):
        assert one.pointwise.shape == (N - 1,) and one.num_bad == 0
        torch.testing.assert_close(one.pointwise, truth, rtol=0, atol=0.1)


def test_only_the_bad_rows_are_fitted_again(data):
    """A row far out, near the line, alone fixes the slope. After moment matching none is left."""
    x, y = data[0].clone(), data[1].clone()
    x[-1, 1], y[-1] = 12.0, 12.0
    rows = []

    def fit(x, y):
        rows.append(len(y))
        return line, chains(x, y)

    samples, truth = chains(x, y), exact(x, y)
    assert found(line, samples, x, y).num_bad == 1
    again = found(line, samples, x, y, refit=fit)
    assert rows == [N - 1] and again.num_bad == 0
    assert abs(again.elpd - truth.sum()) < 3 * again.draws_se < 0.3
    assert again.pointwise[-1] == pytest.approx(truth[-1].item(), abs=0.1)
    rows.clear()
    matched = found(line, samples, x, y, method="moment_matching", refit=fit)
    assert not rows and abs(matched.elpd - truth.sum()) < 3 * matched.draws_se


def test_a_refit_says_if_an_outlier_is_too_far_for_its_draws(data):
    """No draw without the row comes near it: the mean of p(y_n | w) has a heavy tail itself."""
    x, y = data[0], torch.cat([data[1][:-1], torch.tensor([-6.0])])
    again = found(line, chains(x, y), x, y, refit=lambda x, y: (line, chains(x, y)))
    assert again.num_bad >= 1


def test_refusals(data):
    samples = chains(*data, 25)
    guide = bdl.guides.AutoMeanField(line).prototype(*data)
    with pytest.raises(TypeError, match="draws of the posterior from chains, got AutoMeanField"):
        bdl.loo(line, guide, *data)
    with pytest.raises(ValueError, match="method must be"):
        bdl.loo(line, samples, *data, method="waic")


def test_transforms_are_the_exact_distribution_functions_without_each_datum(data):
    x, y = data
    samples = bdl.Samples({"w": posterior(x, y).sample((4, 2500))})
    values = found(line, samples, x, y).pit
    expected = []
    for n in range(N):
        others = torch.arange(N) != n
        q = posterior(x[others], y[others])
        spread = NOISE**2 + x[n] @ q.covariance_matrix @ x[n]
        expected.append(dist.Normal(x[n] @ q.mean, spread.sqrt()).cdf(y[n]))
    expected = torch.stack(expected)
    # all but the outlier, whose k-hat is high
    torch.testing.assert_close(values[:-1], expected[:-1], atol=0.02, rtol=0)
    assert torch.equal(found(line, samples, x, y).pit, values)  # the seed is an argument
    seen = torch.arange(N) % 3 > 0
    samples = bdl.Samples({"w": posterior(x[seen], y[seen]).sample((4, 500))})
    masked = functools.partial(line, seen=seen)
    values = found(masked, samples, x, y.masked_fill(~seen, 100.0)).pit
    of_seen = found(line, samples, x[seen], y[seen]).pit
    torch.testing.assert_close(values, of_seen, atol=0.06, rtol=0)  # other draws of the noise


def test_transforms_of_censored_targets_are_uniform_and_classes_have_none():
    """Of 300 times, of which a third is known to be longer than a limit."""
    torch.manual_seed(0)
    x = torch.randn(300, 1).double()
    time = (0.5 * x[:, 0] + 0.4 * torch.randn(300).double()).exp()
    limit = 0.3 + 2 * torch.rand(300).double()
    y = torch.stack([time.minimum(limit), (time < limit).double()], -1)
    net = torch.nn.Linear(1, 1).double()
    model = bdl.models.CensoredRegression(
        bdl.bayesianize(net), "lognormal", scale=torch.tensor(0.4).double()
    )
    weight = 0.5 + 0.03 * torch.randn(2, 200, 1, 1).double()
    samples = bdl.Samples({"weight": weight, "bias": 0.03 * torch.randn(2, 200, 1).double()})
    loo = found(model, samples, x, y)
    assert loo.pit.shape == (300,)
    assert bdl.metrics.calibration.uniformity(loo.pit) < 1.63 / 300**0.5
    labels = (x[:, 0] > 0).double()
    classes = bdl.models.BinaryClassification(bdl.bayesianize(net))
    assert found(classes, samples, x, labels).pit is None


def test_the_difference_of_two_programs_is_paired(data):
    """Against the exact densities; its error over draws is the spread over sets of draws."""
    x, y = data[0][:-1], data[1][:-1]

    def level(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), PRIOR))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, NOISE).expand([len(x)]), obs=y)

    flat = x[:, :1]

    def posterior_of_level():
        precision = 1 / PRIOR**2 + len(y) / NOISE**2
        q = torch.distributions.Normal(y.sum() / NOISE**2 / precision, precision**-0.5)
        return bdl.Samples({"w": q.sample((4, 1000))})

    def exact_of(inputs):
        values = []
        for n in range(len(y)):
            k = torch.arange(len(y)) != n
            a = inputs[k]
            covariance = torch.linalg.inv(
                torch.eye(a.shape[1], dtype=a.dtype) / PRIOR**2 + a.T @ a / NOISE**2
            )
            mean = covariance @ a.T @ y[k] / NOISE**2
            sd = (NOISE**2 + inputs[n] @ covariance @ inputs[n]).sqrt()
            values.append(dist.Normal(inputs[n] @ mean, sd).log_prob(y[n]))
        return torch.stack(values)

    differences = [
        found(line, chains(x, y), x, y).difference(found(level, posterior_of_level(), x, y))
        for _ in range(20)
    ]
    each = exact_of(x) - exact_of(flat)
    values = torch.tensor([one.elpd for one in differences])
    error = float(torch.tensor([one.draws_se for one in differences]).mean())
    assert float(values.mean()) == pytest.approx(each.sum().item(), abs=4 * error / 20**0.5)
    assert error == pytest.approx(float(values.std()), rel=0.5)
    assert differences[0].se == pytest.approx(len(y) ** 0.5 * each.std().item(), rel=0.1)
    assert "nats (se" in str(differences[0])
    with pytest.raises(ValueError, match=r"the same data, got \(11,\) and \(10,\)"):
        found(line, chains(x, y), x, y).difference(found(line, chains(x, y), x[1:], y[1:]))


# ------------------------------------------- likelihoods to a power, as of tempered posteriors


def weights_of(x):
    """A weight of each row, from 0.5 to 2."""
    return 1.25 + 0.75 * torch.sin(5 * x[:, 1])


class Powered:
    """The posterior of the line with the prior to a power and the likelihood of each datum to one,
    w ~ Normal(0, 2 / sqrt(prior power)) up to a constant."""

    def __init__(self, x, y, powers, prior=1.0):
        self.x, self.y, self.powers, self.prior = x, y, powers, prior
        self.precision = prior * torch.eye(2, dtype=x.dtype) / PRIOR**2
        self.precision = self.precision + (x.T * powers) @ x / NOISE**2
        self.covariance = torch.linalg.inv(self.precision)
        self.shift = x.T @ (powers * y) / NOISE**2
        self.law = torch.distributions.MultivariateNormal(
            self.covariance @ self.shift, self.covariance
        )

    def log_normalizer(self):
        each = -0.5 * (self.y / NOISE).square() - 0.5 * math.log(2 * math.pi * NOISE**2)
        fitted = 0.5 * self.shift @ self.covariance @ self.shift
        return fitted - 0.5 * torch.logdet(self.precision) + (self.powers * each).sum()

    def without(self, n):
        others = torch.arange(len(self.y)) != n
        return Powered(self.x[others], self.y[others], self.powers[others], self.prior)

    def left_out(self):
        """The predictive law of each datum without it."""
        laws = []
        for n in range(len(self.y)):
            w, x = self.without(n).law, self.x[n]
            spread = NOISE**2 + x @ w.covariance_matrix @ x
            laws.append(dist.Normal(x @ w.mean, spread.sqrt()))
        return laws

    def mixture(self, draws):
        """Draws of sum_n p(w | y) / p(y_n | w)^c."""
        logits = torch.stack([self.without(n).log_normalizer() for n in range(len(self.y))])
        numbers = torch.distributions.Categorical(logits=logits).sample((4, draws))
        w = torch.empty(4, draws, 2, dtype=self.x.dtype)
        for n in range(len(self.y)):
            chosen = numbers == n
            w[chosen] = self.without(n).law.sample((int(chosen.sum()),))
        return w


def weighted(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), PRIOR).to_event(1))
    with pyro.plate("data", len(x)), pyro.poutine.scale(scale=weights_of(x)):
        pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


POWERS = {
    "tempered": (lambda: bdl.handlers.temper(line, 0.4), lambda x: 2.5, 1.0),
    "warm": (lambda: bdl.handlers.temper(line, 4.0), lambda x: 0.25, 1.0),
    "cold": (lambda: bdl.handlers.cold(line, 0.5), lambda x: 2.0, 2.0),
    "scaled": (lambda: pyro.poutine.scale(line, 0.5), lambda x: 0.5, 0.5),
    "of each datum": (lambda: weighted, weights_of, 1.0),
}


@pytest.fixture(params=POWERS)
def powered(request):
    """A program, its exact posterior, and log p(y_n | the others) with its law."""
    make, powers, prior = POWERS[request.param]
    x = torch.stack([torch.ones(20), torch.linspace(-1, 1, 20)], 1).double()
    y = x @ torch.tensor([0.3, 1.0], dtype=x.dtype) + NOISE * torch.randn(20, dtype=x.dtype)
    x[-1, 1], y[-1] = 1.5, 1.0
    exactly = Powered(x, y, powers(x) * torch.ones_like(y), prior)
    laws = exactly.left_out()
    return make(), exactly, [law.log_prob(value) for law, value in zip(laws, y, strict=True)], laws


@pytest.mark.parametrize("method", ["psis", "moment_matching", "mixture"])
def test_a_datum_is_left_out_with_its_power_and_scored_without_it(method, powered):
    model, exactly, truth, laws = powered
    x, y, truth = exactly.x, exactly.y, torch.stack(truth)
    if method == "mixture":
        draws, options = exactly.mixture(2000), {}
        mixture = bdl.loo_mixture(model, x, y)
        w = torch.randn(5, 2, dtype=x.dtype)
        joint, plain = (
            torch.stack([bdl.Program(program, x, y).log_joint({"w": v}) for v in w])
            for program in (mixture, model)
        )
        each = exactly.powers * dist.Normal(w @ x.T, NOISE).log_prob(y)
        torch.testing.assert_close(joint, plain + (-each).logsumexp(1))
        model = mixture
    else:
        draws, options = exactly.law.sample((4, 2000)), {"method": method}
    result = found(model, bdl.Samples({"w": draws}), x, y, **options)
    assert abs(result.elpd - truth.sum()) < 4 * result.draws_se + 0.05 < 0.9
    pit = torch.stack([law.cdf(value) for law, value in zip(laws, y, strict=True)])
    torch.testing.assert_close(result.pit, pit, atol=0.03, rtol=0.0)


@pytest.mark.parametrize("powered", ["tempered", "of each datum"], indirect=True)
def test_compare_leaves_out_with_the_power_too(powered):
    """By draws, and by p / q of a guide, which then is about the program's own posterior."""
    model, exactly, truth, _ = powered
    wider = 1.4 * torch.linalg.cholesky(exactly.covariance)

    def guide(x, y=None):
        pyro.sample("w", dist.MultivariateNormal(exactly.law.mean, scale_tril=wider))

    posteriors = {"draws": bdl.Samples({"w": exactly.law.sample((4, 1000))}), "p / q": guide}
    data = exactly.x, exactly.y
    table = bdl.compare(
        model, posteriors, *data, train=data, reference=None, num_samples=1000, progress=False
    ).table
    for by in posteriors:
        assert table.loc[by, "loo_by"] == by
        assert abs(table.loc[by, "elpd_loo"] - sum(truth)) < 0.4


def test_powers_and_parts_that_leave_out_no_datum_are_refused(data):
    x, y = data

    def both(x, y=None, z=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), PRIOR).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)
            with pyro.poutine.scale(scale=0.5):
                pyro.sample("z", dist.Normal(x @ w, NOISE), obs=z)

    def stated(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), PRIOR).to_event(1))
        with pyro.plate("data", 10 * len(x), subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)

    samples = chains(x, y, 20)
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="raised to different powers"):
        bdl.loo(both, samples, x, y, y)
    with pytest.raises(ValueError, match="states 10 times as many at the site 'y'"):
        bdl.loo_mixture(stated, x, y)
    with pytest.raises(ValueError, match="moment matching needs all the data"):
        found(stated, samples, x, y, method="moment_matching")
    mixture = bdl.handlers.temper(bdl.loo_mixture(line, x, y), 0.5)
    with pytest.raises(ValueError, match="apply the handler first"):
        bdl.loo(mixture, samples, x, y)


def test_arviz_has_the_likelihood_of_predictions_and_says_that_it_is_not_the_posteriors(data):
    x, y = data
    model, samples = bdl.handlers.temper(line, 0.4), chains(x, y, 20)
    with pytest.warns(bdl.errors.BdlWarning, match="raised to a power in the posterior"):
        found = bdl.to_arviz(model, samples, x, y)
    expected = dist.Normal(samples.latents["w"] @ x.T, NOISE).log_prob(y)
    torch.testing.assert_close(torch.as_tensor(found["log_likelihood"]["y"].values), expected)
