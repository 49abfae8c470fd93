"""Tempered bounds against closed forms on a conjugate model, and against Pyro's own."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_bdl import bayesianize, models, temperature
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoMAP, AutoMCDropout, AutoMeanField
from pyro_bdl.handlers import cold, temper
from pyro_bdl.optim import GaussNewton_ELBO

ELBOS = [TemperedTrace_ELBO, TemperedTraceMeanField_ELBO]
D = torch.float64


@pytest.fixture(params=ELBOS)
def kind(request):
    return request.param


def _gradients(loss, guide):
    return torch.autograd.grad(loss, [guide.loc, guide.scale_unconstrained])


def _close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Targets, exactly: expectations are finite sums (see conftest.exact_expectations)


@pytest.mark.parametrize("eta", [1.0, 0.1, 4.0])
def test_the_bound_and_its_terms_are_the_closed_form(kind, conjugate, exact_expectations, eta):
    """L(eta) = E_q[log p(y | w)] - eta KL(q || p) for Normals (Huix et al. 2022)."""
    guide = AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    elbo = kind(eta, num_particles=exact_expectations(4))
    loss = elbo.loss(conjugate.model, guide, conjugate.x, conjugate.y)
    with torch.no_grad():
        likelihood, kl = conjugate.terms(guide.loc, guide.scale)
    assert loss == pytest.approx((eta * kl - likelihood).item(), rel=1e-10)
    _close(elbo.expected_log_likelihood, likelihood)
    _close(elbo.kl, kl)
    assert elbo.temperature == eta
    assert not elbo.kl.requires_grad and elbo.kl.shape == ()
    assert not elbo.expected_log_likelihood.requires_grad


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_the_tempered_posterior_is_the_target(kind, conjugate, exact_expectations, eta):
    """At the tempered optimum the gradient vanishes, and nowhere near it. The target is
    proportional to p(y | w)^(1/eta) p(w) (Huix et al. 2022)."""
    guide = conjugate.mean_field(AutoMeanField(conjugate.model), eta)
    elbo = kind(eta, num_particles=exact_expectations(4))(conjugate.model, guide)
    for gradient in _gradients(elbo(conjugate.x, conjugate.y), guide):
        assert gradient.abs().max() < 1e-9
    other = kind(2 * eta, num_particles=8)(conjugate.model, guide)
    for gradient in _gradients(other(conjugate.x, conjugate.y), guide):
        assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("eta", [0.1, 3.0])
@pytest.mark.parametrize(
    "plain", [*ELBOS, Trace_ELBO, TraceMeanField_ELBO], ids=lambda kind: kind.__name__
)
def test_a_tempered_program_has_the_same_gradient(conjugate, exact_expectations, plain, eta):
    """temper(model, eta) under a plain bound: the tempered bound divided by eta."""
    particles = exact_expectations(4)
    guide = AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    tempered = TemperedTrace_ELBO(eta, particles)(conjugate.model, guide)
    expected = _gradients(tempered(conjugate.x, conjugate.y), guide)
    program = temper(conjugate.model, eta)
    value = plain(num_particles=particles)(program, guide)(conjugate.x, conjugate.y)
    for a, b in zip(_gradients(value, guide), expected, strict=True):
        _close(a * eta, b)


def test_the_cold_posterior_is_the_target(kind, conjugate, exact_expectations):
    """The target is proportional to (p(y | w) p(w))^(1/T) (Wenzel et al. 2020, equation 2)."""
    guide = conjugate.mean_field(AutoMeanField(conjugate.model), cold=0.1)
    with torch.no_grad():
        guide.scale = (conjugate.precision() / 0.1).diagonal().rsqrt()
    particles = exact_expectations(4)
    loss = kind(num_particles=particles, cold_temperature=0.1)(conjugate.model, guide)
    value = loss(conjugate.x, conjugate.y)
    for gradient in _gradients(value, guide):
        assert gradient.abs().max() < 1e-9
    likelihood, kl = conjugate.terms(guide.loc, guide.scale)
    entropy = dist.Normal(guide.loc, guide.scale).entropy().sum()
    _close(value, -(likelihood - kl) - (0.1 - 1) * entropy)
    # and as a handler
    program = cold(conjugate.model, 0.1)
    handled = kind(num_particles=particles)(program, guide)(conjugate.x, conjugate.y)
    _close(handled * 0.1, value)
    for gradient in _gradients(handled, guide):
        assert gradient.abs().max() < 1e-8


@pytest.mark.parametrize("cold_temperature", [None, 0.2])
def test_the_path_by_sites_gives_the_same(kind, conjugate, exact_expectations, cold_temperature):
    """Guides of other packages, and ours inside others, go through their sample statements."""
    guide = AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    particles = exact_expectations(4)

    def loss(posterior):
        if cold_temperature:
            elbo = kind(num_particles=particles, cold_temperature=cold_temperature)
        else:
            elbo = kind(0.3, particles)
        value = elbo.differentiable_loss(conjugate.model, posterior, conjugate.x, conjugate.y)
        return value, elbo.kl, *_gradients(value, guide)

    for a, b in zip(loss(guide), loss(lambda *args: guide(*args)), strict=True):
        _close(a, b)


def test_minibatches_are_unbiased(kind, conjugate, exact_expectations):
    """E[(N / B) sum over a batch] is the sum over all data (Hoffman et al. 2013)."""
    whole = models.Regression(conjugate.model.network, noise=0.5, num_data=8)
    guide = AutoMeanField(whole).prototype(conjugate.x, conjugate.y)
    elbo = kind(0.1, num_particles=exact_expectations(4))
    full = elbo.loss(whole, guide, conjugate.x, conjugate.y)
    parts = [elbo.loss(whole, guide, conjugate.x[i::4], conjugate.y[i::4]) for i in range(4)]
    assert sum(parts) / 4 == pytest.approx(full, rel=1e-10)


def test_a_lognormal_site_has_its_exact_kl(kind, exact_expectations):
    """KL(LogNormal(0.8, 0.6^2) || LogNormal(0, 1)) is that of the Normals of log w, also in Pyro's
    bound."""

    def model():
        w = pyro.sample("w", dist.LogNormal(torch.zeros((), dtype=D), 1.0))
        pyro.sample("y", dist.Normal(w.log(), 1.0), obs=torch.zeros((), dtype=D))

    particles = exact_expectations(1)
    guide = AutoMeanField(model).prototype()
    with torch.no_grad():
        guide.loc.fill_(0.8)
        guide.scale = torch.tensor([0.6], dtype=D)
    kl = -math.log(0.6) + (0.36 + 0.64) / 2 - 0.5
    likelihood = -0.5 * (0.36 + 0.64) - 0.5 * math.log(2 * math.pi)
    elbo = kind(num_particles=particles)
    assert elbo.loss(model, guide) == pytest.approx(kl - likelihood, rel=1e-9)
    assert elbo.kl.item() == pytest.approx(kl, rel=1e-9)
    pyros = TraceMeanField_ELBO(num_particles=particles).loss(model, guide)
    assert pyros == pytest.approx(kl - likelihood, rel=1e-9)


# Against Pyro's own bounds


def _network(outputs=1, **kwargs):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).to(D)
    return models.Regression(bayesianize(net), noise=dist.LogNormal(-1.0, 0.5), **kwargs)


X, Y = torch.linspace(-1, 1, 10, dtype=D).reshape(5, 2), torch.linspace(0, 1, 5, dtype=D)


@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal, AutoDelta, AutoMAP])
def test_pyros_guides_give_pyros_loss(kind, guide):
    model = _network(num_data=50)
    guide = guide(model)
    elbo = kind(num_particles=3)
    elbo.loss(model, guide, X, Y)
    pyro.set_rng_seed(5)
    mine = elbo.loss(model, guide, X, Y)
    pyro.set_rng_seed(5)
    assert mine == pytest.approx(Trace_ELBO(num_particles=3).loss(model, guide, X, Y), rel=1e-10)


def local(x, y):
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=D), 1.0))
    with pyro.plate("data", 10, subsample_size=5) as i:
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=D), scale))
        pyro.sample("y", dist.Normal(z, 0.3), obs=y[i])


def _local_guide():
    return AutoMeanField(
        local, create_plates=lambda x, y: pyro.plate("data", 10, subsample_size=5, dim=-1)
    )


def test_local_latents_in_a_subsample_give_pyros_loss():
    x, y = torch.randn(10, dtype=D), torch.randn(10, dtype=D)
    guide = _local_guide().prototype(x, y)
    assert guide.subsampled == {"z"}
    assert guide.layout.size == 11
    elbo = TemperedTrace_ELBO()
    elbo.loss(local, guide, x, y)
    pyro.set_rng_seed(2)
    mine = elbo.loss(local, guide, x, y)
    pyro.set_rng_seed(2)
    assert mine == pytest.approx(Trace_ELBO().loss(local, guide, x, y), rel=1e-10)


def test_factors_of_a_guide_count():
    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.3))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.2))
        pyro.sample("w", dist.Normal(loc, 1.0))
        pyro.factor("extra", torch.tensor(1.7), has_rsample=True)

    elbo = TemperedTrace_ELBO()
    elbo.loss(model, guide)
    pyro.set_rng_seed(5)
    mine = elbo.loss(model, guide)
    pyro.set_rng_seed(5)
    assert mine == pytest.approx(Trace_ELBO().loss(model, guide), rel=1e-6)


# Particles


def test_vectorized_particles_are_the_loop(kind):
    """At the draws that the guide makes for several particles, one by one."""
    model = _network()
    guide = AutoMeanField(model, init_scale=0.3).prototype(X, Y)
    pyro.set_rng_seed(3)
    vectors = guide.sample_vectors(5)
    elbo = kind(0.3, num_particles=5)
    elbo.loss(model, guide, X, Y)
    pyro.set_rng_seed(3)
    value = elbo.differentiable_loss(model, guide, X, Y)
    single = kind(0.3)
    terms = []
    for vector in vectors:
        guide.sample_vectors = lambda n, v=vector: v[None]
        terms.append(single.differentiable_loss(model, guide, X, Y))
    _close(value, torch.stack(terms).mean())
    for a, b in zip(
        _gradients(value, guide), _gradients(torch.stack(terms).mean(), guide), strict=True
    ):
        _close(a, b)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1, :1]


def test_without_a_batching_rule_particles_are_looped_with_one_warning(kind):
    model = models.Regression(bayesianize(Recurrent()), noise=0.5)
    x, y = torch.randn(4, 3, 2), torch.randn(4)
    guide = AutoMeanField(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), kind(num_particles=3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert math.isfinite(svi.step(x, y))
    told = [w for w in caught if issubclass(w.category, BdlWarning)]
    assert len(told) == 1
    assert "lstm" in str(told[0].message)


def test_random_subsamples_inside_vmap():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
        with pyro.plate("data", 5, subsample_size=2) as i:
            pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])

    guide = AutoMeanField(model).prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO(num_particles=2000)
    loss = elbo.loss(model, guide, X, Y)

    def full(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    exact = TemperedTraceMeanField_ELBO(num_particles=2000).loss(full, guide, X, Y)
    assert loss == pytest.approx(exact, abs=0.1)


# Schedules and steps


def test_each_training_step_counts_and_a_look_does_not(kind):
    model = _network()
    guide = AutoMeanField(model)
    elbo = kind(temperature.linear(0.2, 1.0, 4))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    seen = []
    for _ in range(6):
        svi.evaluate_loss(X, Y)
        svi.step(X, Y)
        seen.append(elbo.temperature)
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert elbo.step == 6
    elbo(model, guide)(X, Y)
    assert elbo.step == 7


# Refusals


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperatures(kind, bad):
    for options in ({"temperature": bad}, {"cold_temperature": bad}):
        with pytest.raises(ValueError, match="positive and finite"):
            kind(**options)
    model = _network()
    later = kind(lambda step: 1.0 if step == 0 else bad)(model, AutoMeanField(model))
    later(X, Y)
    with pytest.raises(ValueError, match="positive and finite"):
        later(X, Y)


def _discrete_guide(x, y):
    pyro.sample("noise", dist.Bernoulli(torch.tensor(0.5, dtype=D)))


def _without_weights(x, y):
    pyro.sample("noise", dist.LogNormal(torch.zeros((), dtype=D), 1.0))


def _batch_without_a_plate(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0))
    pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.0))


def _rows_without_a_plate(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def _weights_of_a_guide_without_a_plate(x, y):
    pyro.sample("w", dist.Normal(pyro.param("m", torch.zeros(2, dtype=D)), 0.1))


def _exponential(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Exponential((x @ w).exp()), obs=y)


def _step(model, *data, guide=AutoMeanField, **options):
    def step(kind):
        posterior = guide(model) if guide is AutoMeanField else guide
        return kind(**options)(model, posterior)(*data)

    return step


def _of_inputs_alone(kind):
    model = _network()
    kind()(model, AutoMeanField(model).prototype(X))(X, Y)


REFUSALS = {
    r"'y'.*prototype.*targets": _of_inputs_alone,
    "num_particles must be at least 1": lambda kind: kind(num_particles=0),
    "num_particles must be a whole number": lambda kind: kind(num_particles=2.5),
    "not both": lambda kind: kind(0.5, cold_temperature=0.5),
    r"num_data is 4.*5 rows": _step(_network(num_data=4), X, Y),
    r"'noise' cannot be reparameterized \(Bernoulli\)": _step(
        _network(), X, Y, guide=_discrete_guide
    ),
    "no value for the latent site": _step(_network(), X, Y, guide=_without_weights),
    r"no observed site.*targets": _step(_network(), X),
    'at site "w"': _step(_batch_without_a_plate, X, Y),
    'at site "y", invalid log_prob shape': _step(_rows_without_a_plate, X, Y),
    'site "y", invalid log_prob shape': _step(_rows_without_a_plate, X, Y, num_particles=2),
    # a statement of the guide, as Pyro's own bounds refuse it
    'at site "w", invalid log_prob shape': _step(
        _exponential, X, Y, guide=_weights_of_a_guide_without_a_plate
    ),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_is_refused(kind, words):
    with pytest.raises(ValueError, match=words):
        REFUSALS[words](kind)


@pytest.mark.parametrize("temperature", ["0.5", None, TemperedTrace_ELBO(), TemperedTrace_ELBO])
def test_a_temperature_is_a_number_or_a_schedule(kind, temperature):
    with pytest.raises(TypeError, match="temperature must be a number"):
        kind(temperature)


def _bad(x, places, value):
    x = x.clone()
    for place in places:
        x[place] = value
    return x


@pytest.mark.parametrize("handler", [lambda m: m, lambda m: temper(m, 0.5)])
def test_data_that_are_not_finite_are_named(kind, handler):
    model = handler(_network())
    x = _bad(X, [(1, 0), (3, 1)], math.nan)
    with pytest.raises(ValueError, match=r"x holds NaN or infinity in rows 1, 3, columns 0, 1:"):
        kind()(model, AutoMeanField(model))(x, Y)
    with pytest.raises(ValueError, match=r"y holds NaN or infinity in rows 2:"):
        kind()(model, AutoMeanField(model))(X, y=_bad(Y, [2], -math.inf))


def test_so_are_those_of_a_later_batch(kind):
    """Before a step of Pyro's loop or of torch's can be taken."""
    model = _network()
    guide = AutoMeanField(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), kind())
    svi.step(X, Y)
    before = guide.loc.clone()
    with pytest.raises(ValueError, match=r"x holds NaN or infinity in rows 4, columns 0"):
        svi.step(_bad(X, [(4, 0)], math.nan), Y)
    with pytest.raises(ValueError, match="y holds"):
        svi.evaluate_loss(X, _bad(Y, [0], math.inf))
    assert torch.equal(guide.loc, before)
    assert math.isfinite(svi.step(X, Y))


def test_a_loss_on_an_accelerator_is_checked_before_backward(device):
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros((), device=device), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x, y = torch.randn(8, device=device), torch.randn(8, device=device)
    guide = AutoMeanField(model).prototype(x, y)
    loss = TemperedTrace_ELBO()(model, guide)
    loss(x, y).backward()
    with pytest.raises(ValueError, match="y holds NaN or infinity in rows 2"):
        loss(x, y.index_fill(0, torch.tensor(2, device=device), math.nan))


def test_a_loss_that_diverges_on_good_data_is_a_warning(kind):
    model = _network()
    guide = AutoMeanField(model).prototype(X, Y)
    loss = kind()(model, guide)
    loss(X, Y)
    guide.loc.data.fill_(math.nan)
    with pytest.warns(UserWarning, match="Encountered NaN: loss"):
        assert loss(X, Y).isnan()


def _binomial(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Binomial(total_count=2, logits=x @ w), obs=y)


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize(
    "program,outputs,bad",
    [
        (models.Classification, 3, 3),
        (models.PoissonRegression, 1, -1),
        (models.PoissonRegression, 1, 0.5),
        (models.BinaryClassification, 1, 2),
        (models.BinaryClassification, 1, 0.5),
        (_binomial, 1, 0.5),
        (_exponential, 1, -1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*#number-of-data")
def test_targets_outside_the_support_are_named_in_a_later_batch(
    kind, program, outputs, bad, particles
):
    model = program
    if isinstance(program, type):
        model = program(bayesianize(nn.Linear(2, outputs).to(X.dtype)))
    guide = AutoMeanField(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), kind(num_particles=particles))
    y = torch.arange(len(X)) % (3 if program is models.Classification else 2)
    y = y if isinstance(bad, int) else y.to(D)
    svi.step(X, y)
    with pytest.raises(ValueError, match=r"site 'y' hold values outside the support.*in rows 1, 4"):
        svi.step(X, y.index_fill(0, torch.tensor([1, 4]), bad))
    assert math.isfinite(svi.step(X, y))


@pytest.mark.parametrize("bound", [*ELBOS, CompiledELBO, GaussNewton_ELBO, "by sites"])
@pytest.mark.parametrize("particles", [1, 3])
def test_targets_that_are_missing_in_a_later_step(bound, particles):
    """Otherwise they would be drawn as latents, and the loss would be only the KL."""
    model = _network()
    posterior = guide = AutoMeanField(model)
    if bound == "by sites":
        bound, posterior = TemperedTrace_ELBO, lambda *args: guide(*args)
    loss = bound(num_particles=particles)(model, posterior)
    for _ in range(3):
        loss(X, Y)
    with pytest.raises(ValueError, match=r"no value for the latent site 'y': .* pass its targets"):
        loss(X)


def _warnings_of(elbo, model, batches):
    guide = AutoMeanField(model).prototype(*batches[0])
    bound = elbo(model, guide)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in batches:
            bound(*batch).backward()
    return [str(w.message) for w in seen if w.category is BdlWarning]


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("bound", [*ELBOS, CompiledELBO])
def test_batches_that_count_as_all_data_are_told_once(bound, particles):
    halves = [(X[:2], Y[:2]), (X[2:4], Y[2:4])] * 3
    (told,) = _warnings_of(bound(num_particles=particles), _network(), halves)
    assert "different targets at site 'y'" in told and "num_data=N" in told
    unequal = [(X[:2], Y[:2]), (X[2:], Y[2:])] * 3
    assert len(_warnings_of(bound(num_particles=particles), _network(), unequal)) == 1


def test_batches_that_differ_for_a_reason_are_left_alone(kind):
    halves = [(X[:2], Y[:2]), (X[2:4], Y[2:4])] * 2
    assert not _warnings_of(kind(), _network(num_data=5), halves)
    assert not _warnings_of(kind(), temper(_network(), 0.4), halves)  # a scale of its own
    assert not _warnings_of(kind(0.4), _network(), halves)  # a weight of the KL by hand
    assert not _warnings_of(kind(), _network(), [(X, Y)] * 4)
    orders = [torch.randperm(5) for _ in range(4)]
    assert not _warnings_of(kind(), _network(), [(X[i], Y[i]) for i in orders])  # the same data
    augmented = [(X + 0.1 * torch.randn_like(X), Y) for _ in range(4)]
    assert not _warnings_of(kind(), _network(), augmented)
    some = Y.clone()
    some[1] = torch.nan
    assert not _warnings_of(kind(), _network(missing_targets=True), [(X, some)] * 3)
    late = [(X[:2], Y[:2])] * 3 + [(X[2:4], Y[2:4])]  # looked for in the first steps alone
    assert not _warnings_of(kind(), _network(), late)


def test_programs_of_parameters_alone():
    """Maximum likelihood: no latents, an empty guide."""

    def model(x, y):
        loc = pyro.param("loc", torch.zeros((), dtype=D))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def guide(x, y):
        pass

    elbo = TemperedTraceMeanField_ELBO()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    for _ in range(200):
        svi.step(X, Y)
    assert pyro.param("loc").item() == pytest.approx(0.5, abs=1e-3)
    assert elbo.kl == 0.0


# The first step


class _Counting(nn.Linear):
    runs = 0

    def forward(self, x):
        type(self).runs += 1
        return super().forward(x)


@pytest.mark.parametrize("particles", [1, 3])
def test_the_first_step_runs_the_network_for_the_guide_and_for_itself(kind, particles):
    """And on two rows, which the guide keeps; particles run at once."""
    x = torch.randn(6, 2)
    model = models.Regression(bayesianize(_Counting(2, 1)), noise=0.5)
    objective = kind(num_particles=particles)(model, AutoMeanField(model))
    for runs in (3, 1, 1):
        _Counting.runs = 0
        objective(x, x[:, 0])
        assert _Counting.runs == runs


@pytest.mark.parametrize("elbo", [*ELBOS, CompiledELBO])
def test_steps_of_two_guides_are_counted_by_their_own(elbo):
    """The temperature of learned dropout rates falls with the guide's steps."""
    x, bound, guides = torch.randn(6, 2), elbo(), []
    dropped = {"p": 0.3, "learn_p": True, "sites": "all"}
    for _ in range(2):
        model = models.Regression(bayesianize(nn.Linear(2, 1)), noise=0.5)
        guides.append((model, AutoMCDropout(model, **dropped).prototype(x, x[:, 0])))
    for number in range(6):
        for model, guide in guides[: 1 + (number < 2)]:
            bound.take_step(model, guide, x, x[:, 0])
    assert [int(guide.steps) for _, guide in guides] == [6, 2]
