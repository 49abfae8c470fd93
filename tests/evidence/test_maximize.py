"""The fixed point and the ascent, against the maximum of the exact evidence."""

import itertools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from scipy.optimize import minimize
from torch import nn

from pyro_bdl import bayesianize, evidence, handlers, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import formula, maximize
from pyro_bdl.evidence.formula import formula_of
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoLaplaceGGN

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#log-prior"),  # no curvature of a prior
    pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum"),  # around points that nobody trained
]


@pytest.mark.parametrize("method", ["fixed-point", "gradient"])
def test_both_reach_the_maximum_of_the_exact_evidence(line, method, values, put):
    """alpha = gamma / w'w, beta = (N - gamma) / residuals at the linearized optimum (MacKay 1992,
    section 3), wherever the weights are."""
    best, prior, noise = line.best()
    guide = line.laplace(loc=torch.tensor([3.0, -4.0, 5.0, 1.0]))
    put(guide, prior=1.0, noise=1.0)
    found = maximize(guide, method=method, linearized=True, steps=120, tolerance=1e-9)
    assert found.log_evidence == pytest.approx(best, abs=1e-7)
    assert found.log_evidence == pytest.approx(max(found.history), abs=1e-6)
    assert len(found.history) > 2 and found.history[0] < best
    now = values(guide)
    assert now["hyper_prior_scale"].item() == pytest.approx(prior.item(), rel=1e-3)
    assert now["noise"].item() == pytest.approx(noise.item(), rel=1e-3)
    assert set(found.hyperparameters) == set(guide.read().parameters)
    for name, parameter in guide.read().parameters.items():
        assert torch.equal(found.hyperparameters[name], parameter.value.detach())
    curvature = line.design.T @ line.design / noise**2
    gamma = torch.linalg.solve(line.precision(prior, noise), curvature).trace()
    assert found.gamma == pytest.approx(gamma.item(), rel=1e-3)
    torch.testing.assert_close(guide.precision.logdet(), line.precision(**{
        "a": now["hyper_prior_scale"], "s": now["noise"]}).logdet())  # fmt: skip


@pytest.mark.parametrize("linearized", [True, False])
@pytest.mark.parametrize("prior", ["scaled", "heavy", "hyperprior"])
def test_it_takes_its_own_gradients_under_no_grad(line, learn, prior, linearized):
    """In closed form, and by runs of the program, where Adam ascends."""
    found = []
    for enabled in (True, False):
        kinds = {
            "scaled": lambda: priors.Normal(learn(0.7)),
            "heavy": lambda: priors.StudentT(4.0, learn(0.7)),
            "hyperprior": lambda: priors.Normal(priors.Hyperprior(dist.LogNormal(0.0, 1.0))),
        }
        bnn = bayesianize(nn.Linear(3, 1), kinds[prior]())
        model = models.Regression(bnn, noise=learn(0.5))
        with torch.set_grad_enabled(enabled):
            guide = line.laplace(model=model)
            best = maximize(guide, linearized=linearized, steps=10)
            value = evidence.log_marginal_likelihood(guide, linearized=linearized)
        found.append([best.log_evidence, value.item(), *map(float, best.hyperparameters.values())])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("method", ["fixed-point", "gradient"])
def test_with_the_map_held_fixed(line, method, values):
    """The maximum of log p(y, u*) - 1/2 log det in both parameters."""
    guide = line.laplace()
    loc = guide.loc.clone()

    def negative(t):
        a, s = torch.tensor(t).exp()
        joint = dist.Normal(line.design @ loc, s).log_prob(line.y).sum()
        joint = joint + dist.Normal(0.0, a).log_prob(loc).sum()
        return (0.5 * line.precision(a, s).logdet() - joint).item()

    a, s = torch.tensor(minimize(negative, [0.0, -0.7], tol=1e-10).x).exp()
    maximize(guide, method=method, steps=400, tolerance=1e-9, linearized=False)
    assert torch.equal(guide.loc, loc)
    assert values(guide)["hyper_prior_scale"].item() == pytest.approx(a.item(), rel=1e-3)
    assert values(guide)["noise"].item() == pytest.approx(s.item(), rel=1e-3)


def test_one_step_of_the_fixed_point_by_hand(line):
    """theta^2 = sum (w / c)^2 / gamma, noise^2 = residuals / (N - gamma) (MacKay 1992, section
    3)."""
    guide = line.laplace()
    formula = formula_of(guide, guide.read())
    (prior, new_prior), (noise, new_noise) = formula.fixed_point(formula.parts()).items()
    variances = torch.linalg.inv(line.precision()).diagonal()
    gamma = (1 - variances / line.prior**2).sum()
    torch.testing.assert_close(new_prior, (guide.loc.square().sum() / gamma).sqrt())
    rest = (line.y - line.design @ guide.loc).square().sum()
    torch.testing.assert_close(new_noise, (rest / (12 - gamma)).sqrt())
    assert "prior" in prior and "noise" in noise


@pytest.mark.parametrize("method", ["fixed-point", "gradient"])
def test_the_first_step_is_from_the_present_hyperparameters(line, method, put):
    """Even if ``refresh`` was not called after their change."""
    found = []
    for refreshed in (True, False):
        guide = line.laplace()
        put(guide, prior=1.6, noise=0.9)
        if refreshed:
            guide.refresh()
        found.append(maximize(guide, method=method, steps=1, linearized=True).hyperparameters)
        put(guide, prior=line.prior, noise=line.noise)
    torch.testing.assert_close(*(list(values.values()) for values in found))


@pytest.mark.parametrize("eta", [0.5, 3.0])
def test_the_tempered_noise(line, eta, values, put):
    """At the fixed point c Q / eta = N / eta - gamma."""
    model = handlers.temper(line.model, eta)
    guide = line.laplace(model=model, loc=line.mode(eta=eta))
    maximize(guide, steps=300, tolerance=1e-10, linearized=False)
    a, s = values(guide)["hyper_prior_scale"], values(guide)["noise"]
    variances = torch.linalg.inv(line.precision(a, s, eta)).diagonal()
    gamma = (1 - variances / a**2).sum()
    rest = (line.y - line.design @ guide.loc).square().sum()
    torch.testing.assert_close(rest / s**2 / eta, 12 / eta - gamma, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(guide.loc.square().sum() / a**2, gamma, rtol=1e-6, atol=1e-6)


def read(name):
    """A parameter, read anew by every statement, as an attribute of a PyroModule is."""
    return pyro.param(name, lambda: torch.ones(()), constraint=dist.constraints.positive)


# of a program of two sites: the scales of their priors, and the noise
SCALES = {
    "read twice": lambda: (read("a"), read("a"), read("n")),
    "read thrice": lambda: (read("a"), 2.0 * read("a"), 0.5 * read("a")),
    "product": lambda: (read("a") * read("b"), read("b"), read("n")),
    "power": lambda: (read("a"), read("a") ** 2, read("n")),
    "noise with a part of its own": lambda: (read("a"), 1.0, (read("n") ** 2 + 0.01).sqrt()),
}


# The gradient of any of them is by runs of the program; where there is no fixed point it goes on.
KINDS = [("fixed-point", kind) for kind in SCALES]
KINDS += [("gradient", "product"), ("gradient", "noise with a part of its own")]


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_every_parameter_of_a_program_is_at_its_maximum(kind, method, line):
    """The maximum of log N(y; 0, X diag(s^2) X' + noise^2), by L-BFGS."""
    x, y = line.design, line.y

    def model(x, y=None):
        first, second, noise = SCALES[kind]()
        w = pyro.sample("w", dist.Normal(torch.zeros(2), first).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(2), second).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x[:, :2] @ w + x[:, 2:] @ v, noise), obs=y)

    def exact():
        first, second, noise = (torch.as_tensor(value) for value in SCALES[kind]())
        scales = torch.cat([first.expand(2), second.expand(2)])
        covariance = x @ torch.diag(scales.square()) @ x.T + noise.square() * torch.eye(len(x))
        return dist.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y)

    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    found = maximize(posterior, method=method, linearized=True, steps=300, tolerance=1e-6)
    assert found.log_evidence == pytest.approx(exact().item(), abs=1e-6)
    leaves = [leaf for _, leaf in pyro.get_param_store().named_parameters()]
    optimizer = torch.optim.LBFGS(leaves, max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = -exact()
        value.backward()
        return value

    optimizer.step(loss)
    assert found.log_evidence == pytest.approx(exact().item(), abs=1e-3)


def test_a_scale_with_a_small_number_added_is_no_multiple(line, learn):
    """theta + 9e-5 is proportional to theta = 1 but for a ten-thousandth, and not to 0.003."""
    x, y = line.design[:, :1], 0.003 * line.design[:, 0]
    y = y + 0.003 * torch.linspace(-1.0, 1.0, len(x)).to(y).roll(3)

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.theta, self.noise = learn(1.0), learn(1.0)

        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(x.new_zeros(1), self.theta + 9e-5).to_event(1))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(x @ w, self.noise + 9e-5), obs=y)

    model = Model()
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    found = maximize(guide.laplace_approximation((x, y)), linearized=True, steps=300)
    prior, noise = (value.detach() + 9e-5 for value in (model.theta, model.noise))
    covariance = prior**2 * x @ x.T + noise**2 * torch.eye(len(x)).to(x)
    exact = dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    assert found.log_evidence == pytest.approx(exact.item(), abs=1e-6)


def test_every_scale_at_its_own_fixed_point(line, scales):
    """theta^2 gamma = sum of (w / c)^2 for each number theta and the weights that it scales: there
    the evidence with the MAP held fixed has no slope."""
    model = models.Regression(bayesianize(nn.Linear(3, 1), scales.prior), noise=0.5)
    guide = line.laplace(model=model, loc=torch.tensor([0.8, -0.5, -1.2, 0.4]))
    found = maximize(guide, steps=500, tolerance=1e-10, linearized=False)
    thetas = torch.cat([v.reshape(-1) for v in found.hyperparameters.values()])
    assert len(thetas) == len(scales.start)
    torch.testing.assert_close(guide.prior.diagonal, scales.variances(thetas).reciprocal())
    leaves = [parameter.leaf for parameter in guide.read().parameters.values()]
    slopes = torch.autograd.grad(evidence.log_marginal_likelihood(guide), leaves)
    assert all(slope.abs().max() < 1e-5 for slope in slopes)


def test_a_value_out_of_bounds_stays_at_the_bound(line):
    """The exact maximum has a larger prior scale and a smaller noise than are allowed."""
    prior = PyroParam(torch.tensor(0.5), constraint=dist.constraints.interval(0.1, 0.6))
    noise = PyroParam(torch.tensor(1.0), constraint=dist.constraints.greater_than(0.8))
    model = models.Regression(bayesianize(nn.Linear(3, 1), priors.Normal(prior)), noise=noise)
    guide = line.laplace(model=model)
    found = maximize(guide, steps=20)
    first, second = found.hyperparameters.values()
    assert first.item() == pytest.approx(0.6) and second.item() == pytest.approx(0.8)
    assert first < 0.6 and second > 0.8 and torch.isfinite(torch.tensor(found.log_evidence))
    assert torch.isfinite(torch.tensor(maximize(guide, method="gradient", steps=10).log_evidence))


@pytest.mark.parametrize("method", ["fixed-point", "gradient"])
def test_what_the_evidence_leaves_alone(method, learn):
    """Two noises scale parts of the curvature differently; a weight without a prior is the
    optimizer's."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 2), torch.randn(9, 2)
    prior = priors.ByName({"weight": priors.Normal(learn(0.7))})
    model = models.Regression(bayesianize(nn.Linear(2, 2), prior), noise=learn([0.5, 1.5]))
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        laplace = guide.laplace_approximation((x, y))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with pytest.warns(BdlWarning, match=r"leaves Regression\w*\.noise as trained.*one noise param"):
        found = maximize(laplace, method=method, steps=20)
    maximize(laplace, method=method, steps=1)  # it is said once
    moved = {n for n, value in model.named_parameters() if not torch.equal(value, before[n])}
    names = [name.rpartition(".")[2] for name in found.hyperparameters]
    assert len(moved) == 1 and names == ["hyper_prior_weight__scale"]


def test_where_the_noise_has_no_fixed_point_the_gradient_goes_on(make_line):
    """As many parameters as data: N - gamma is not positive when tempered."""
    found = []
    for method in ("fixed-point", "gradient"):
        line = make_line(size=4, prior=50.0, noise=0.01)
        guide = line.laplace(model=handlers.temper(line.model, 4.0), loc=line.mode(eta=4.0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BdlWarning)
            found.append(maximize(guide, method=method, steps=150, linearized=False))
        said = [str(w.message) for w in caught if w.category is BdlWarning]
        assert [("observations (1): the noise" in text) for text in said] == [True] * (
            method == "fixed-point"
        )
    fixed, gradient = found
    assert fixed.log_evidence == pytest.approx(gradient.log_evidence, abs=1e-3)
    assert fixed.log_evidence > fixed.history[0] + 1.0


def test_a_fixed_point_that_loses_evidence_is_given_up(line, monkeypatch):
    guide, other = line.laplace(), line.laplace()
    best = maximize(other, method="gradient", steps=60, linearized=False).log_evidence

    def away(formula, parts):
        return {name: 3.0 * value for name, value in formula.guide.hyperparameters().items()}

    monkeypatch.setattr(formula.NormalFormula, "fixed_point", away)
    with pytest.warns(BdlWarning, match="gradient ascent continues"):
        found = maximize(guide, steps=60, linearized=False)
    assert found.log_evidence == pytest.approx(best, abs=1e-3)


def test_gradients_of_the_users_parameters_are_kept(line):
    guide = line.laplace()
    leaves = [p.leaf for p in guide.read().parameters.values()]
    leaves[0].grad = torch.tensor(3.0)
    maximize(guide, method="gradient", steps=3)
    assert leaves[0].grad == 3.0 and leaves[1].grad is None


@pytest.mark.parametrize("method", ["fixed-point", "gradient"])
def test_an_error_restores_everything(line, method, values, monkeypatch):
    guide = line.laplace()
    before, logdet = values(guide), guide.precision.logdet()
    calls = []
    whole = LinearizedModel.optimum

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:  # after the first change
            raise RuntimeError("no luck today")
        return whole(*args, **kwargs)

    monkeypatch.setattr(LinearizedModel, "optimum", failing)
    with pytest.raises(RuntimeError, match="no luck today"):
        maximize(guide, method=method, linearized=True)
    after = values(guide)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    torch.testing.assert_close(guide.precision.logdet(), logdet)
    assert guide.noise_factor == 1.0


def test_bad_arguments(line, learn):
    guide = line.laplace()
    model = guide.program_model
    for call in (maximize, evidence.log_marginal_likelihood):
        with pytest.raises(TypeError, match=r"laplace_approximation\(data\).* got AutoLaplaceGGN"):
            call(AutoLaplaceGGN(model))
    with pytest.raises(ValueError, match="method must be one of 'fixed-point', 'gradi"):
        maximize(guide, method="adam")
    model = models.Regression(bayesianize(nn.Linear(3, 1)), noise=0.5)
    with pytest.raises(ValueError, match="have no PyroParam to tune: make a prior's scale one"):
        maximize(line.laplace(model=model))
    each = models.Regression(bayesianize(nn.Linear(3, 2)), noise=learn(torch.ones(2)))
    x = torch.randn(8, 3)
    guide = AutoLaplaceGGN(each).prototype(x, x[:, :2])
    with pytest.raises(ValueError, match=r"cannot tune '.*noise'.* one number of noise"):
        maximize(guide.laplace_approximation((x, x[:, :2])))
    heavy = models.Regression(bayesianize(nn.Linear(3, 1), priors.Laplace(learn(1.0))), noise=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = line.laplace(model=heavy)
        before = evidence.log_marginal_likelihood(guide)  # no fixed point: the ascent
        assert maximize(guide, steps=30, linearized=False).log_evidence > before


# The linearized model's optimum


class Around(dist.Normal):
    """A distribution of a user's own, with other arguments."""

    def __init__(self, where):
        super().__init__(where, 1.0)

    def expand(self, batch_shape, _instance=None):
        return Around(self.loc.expand(batch_shape))


class OwnKind(models.Regression):
    def likelihood(self, output):
        return Around(output)


def test_observations_that_cannot_be_linearized_are_evaluated_at_the_weights(line, learn):
    model = OwnKind(bayesianize(nn.Linear(3, 1), priors.Normal(learn(1.0))), noise=0.5)
    guide = line.laplace(model=model, curvature="hessian")
    assert maximize(guide).gap is None
    with pytest.raises(NotImplementedError, match="does not know Around observations"):
        maximize(guide, linearized=True)


def test_the_bar_waits_for_steps_that_take_long(line, capsys, monkeypatch):
    guide = line.laplace()
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a second at each look
    maximize(guide, steps=2, progress=True)
    assert "evidence, at most" in capsys.readouterr().err
    maximize(guide, steps=2, method="gradient", progress=False)
    assert capsys.readouterr().err == ""


def test_an_ascent_that_leaves_the_finite_numbers_ends_at_its_best_step(line, values, put):
    """A step that takes the scale to exp(1000) is the last; the best before it stays."""
    guide = line.laplace()
    put(guide, prior=1.0, noise=1.0)
    before = formula_of(guide, guide.read()).value(None).item()
    with pytest.warns(BdlWarning, match="gradient ascent, which ends there"):
        found = maximize(guide, method="gradient", linearized=False, learning_rate=1000.0, steps=5)
    assert found.log_evidence == pytest.approx(before) and len(found.history) == 2
    assert values(guide)["hyper_prior_scale"].item() == pytest.approx(1.0)
