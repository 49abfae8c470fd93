"""A posterior of another program is refused wherever program and posterior meet."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import evidence, importance
from pyro_bdl.elbo import TemperedTrace_ELBO

X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8], [0.6, 0.1]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.9, 0.4], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")


def _model(width=3, noise=0.5, layers=1):
    parts = [nn.Linear(2, width), nn.Tanh()]
    for _ in range(1, layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    net = nn.Sequential(*parts, nn.Linear(width, 1)).double()
    return bdl.models.Regression(bdl.bayesianize(net), noise=noise)


# Options of the posterior's program, of the one that is used, and the message.
NOISE = {"noise": dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64))}
OTHERS = {
    "no noise in the posterior": ({}, NOISE, "no value for.* 'noise'"),
    "noise in the posterior": (
        NOISE, {}, "program does not have: 'noise'|'noise', which is not a latent of the program",
    ),
    "a layer more": (
        {}, {"layers": 2}, r"4.weight|other shapes: '2.weight' \(1, 3\) for \(3, 3\)",
    ),
    "a layer less": (
        {"layers": 2}, {}, r"4.weight|other shapes: '2.weight' \(3, 3\) for \(1, 3\)",
    ),
    "another width": (
        {"width": 4}, {},
        r"other shapes: '0.weight' \(4, 2\) for \(3, 2\), '0.bias' \(4,\) for \(3,\)",
    ),
    "a width that broadcasts": ({"width": 1}, {}, r"shapes: '0.weight' \(1, 2\) for \(3, 2\)"),
}  # fmt: skip


def _predictive(name):
    def ask(theirs, model):
        guide = bdl.guides.AutoMeanField(theirs).prototype(X, Y)
        predictive = bdl.Predictive(model, guide, 3)
        getattr(predictive, name)(X)

    return ask


def _samples(theirs, model):
    guide = bdl.guides.AutoMeanField(theirs).prototype(X, Y)
    draws = {name: value[None] for name, value in guide.sample_latents(3).items()}
    bdl.Predictive(model, bdl.Samples(draws))(X)


def _linearized(name):
    def ask(theirs, model):
        guide = bdl.guides.AutoLaplaceGGN(theirs, structure="full").laplace_approximation((X, Y))
        getattr(bdl.LinearizedPredictive(model, guide), name)(X)

    return ask


def _elbo(theirs, model):
    guide = bdl.guides.AutoMeanField(theirs).prototype(X, Y)
    TemperedTrace_ELBO().loss(model, guide, X, Y)


def _last_layer(theirs, model):
    guide = bdl.guides.AutoLastLayer(theirs).prototype(X, Y)
    evidence.LastLayerEvidence().loss(model, guide, X, Y)


def _ratios(theirs, model):
    importance.ratios(model, bdl.guides.AutoMeanField(theirs).prototype(X, Y), X, Y, num_samples=25)


def _compare(theirs, model):
    guide = bdl.guides.AutoMeanField(theirs).prototype(X, Y)
    bdl.compare(model, {"a": guide}, X, Y, reference=None, num_samples=2)


USES = {
    "Predictive": _predictive("__call__"),
    "Predictive.mean": _predictive("mean"),
    "Samples": _samples,
    "LinearizedPredictive": _linearized("__call__"),
    "joint covariance": _linearized("joint_covariance"),
    "ELBO": _elbo,
    "LastLayerEvidence": _last_layer,
    "importance": _ratios,
    "compare": _compare,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("case", OTHERS)
def test_a_posterior_of_another_program_is_refused(case, use):
    theirs, model, words = OTHERS[case]
    with pytest.raises(ValueError, match=words):
        USES[use](_model(**theirs), _model(**model))


@pytest.mark.parametrize("use", USES)
def test_a_posterior_of_an_equal_program_is_taken(use):
    USES[use](_model(), _model())


def test_guides_of_pyro_have_sites_of_their_own():
    model, other = _model(), _model(width=4)
    guide = AutoNormal(model)
    guide(X, Y)
    assert bdl.Predictive(model, guide, 3)(X)["y"].shape == (3, 4)
    with pytest.raises(ValueError, match="another program"):
        bdl.Predictive(other, guide, 3)(X)


def _hierarchical(names):
    def model(x, y=None):
        scale = pyro.sample("scale", dist.HalfNormal(x.new_ones(())))
        values = {n: pyro.sample(n, dist.Normal(x.new_zeros(2), 1.0).to_event(1)) for n in names}
        pyro.sample("y", dist.Normal(x @ values["a"], scale).to_event(1), obs=y)
        if y is None:
            pyro.sample("more", dist.Normal(values["a"].sum(), scale))

    return model


def test_sites_that_are_predicted_alone_are_no_missing_latents():
    model = _hierarchical(["a"])
    guide = bdl.guides.AutoMeanField(model).prototype(X, Y)
    samples = bdl.Samples({name: value[None] for name, value in guide.sample_latents(5).items()})
    for posterior in (guide, samples.of_program(bdl.Program(model, X, Y))):
        assert set(bdl.Predictive(model, posterior, 5)(X)) == {"y", "more"}


def _grouped(x, y=None):
    """Latents that the prior of the weights, or of their scales, rests on."""
    width = pyro.sample("width", dist.HalfNormal(x.new_ones(())))
    with pyro.plate("groups", 2):
        scale = pyro.sample("scale", dist.HalfNormal(width))
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), scale).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, width), obs=y)


@pytest.mark.parametrize("lacking", ["width", "scale", "w"])
@pytest.mark.parametrize("args", [(X,), (X, Y)], ids=["x", "x and y"])
@pytest.mark.parametrize("name", ["__call__", "moments", "mean"])
def test_draws_from_elsewhere_that_lack_a_latent(lacking, args, name):
    """They were drawn from the prior."""
    values = {"width": X.new_ones(1, 3), "scale": X.new_ones(1, 3, 2), "w": X.new_ones(1, 3, 2)}
    del values[lacking]
    predictive = bdl.Predictive(_grouped, bdl.Samples(values))
    with pytest.raises(ValueError, match=f"no value (of|for:) '{lacking}'"):
        getattr(predictive, name)(*args)
    draws = {site: value[0] for site, value in values.items()}
    assert lacking in bdl.Predictive(_grouped, draws)(*args) or len(args) == 2  # said by a dict


def _lacking(with_weights):
    """A program whose weights' prior depends on a latent that stands in another program too."""

    def model(x, y=None):
        t = pyro.sample("t", dist.HalfNormal(x.new_ones(())))
        w = x.new_ones(2)
        if with_weights:
            w = pyro.sample("w", dist.Normal(x.new_zeros(2), t).to_event(1))
        first = pyro.sample("first", dist.Normal(x[0] @ w, t), obs=None if y is None else y[0])
        mean = x @ w + first
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, t), obs=y)

    return model


@pytest.mark.parametrize("use", ["Predictive", "Predictive.mean", "importance", "compare"])
def test_a_latent_that_is_lacking_below_another_one(use):
    with pytest.raises(ValueError, match="'w'"):
        USES[use](_lacking(False), _lacking(True))
    if use.startswith("Predictive"):  # one observed site depends on another one
        USES[use](_lacking(True), _lacking(True))


def test_another_order_is_refused_where_it_counts():
    guide = bdl.guides.AutoMeanField(_hierarchical(["a", "b"])).prototype(X, Y)
    model = _hierarchical(["b", "a"])
    with pytest.raises(ValueError, match="another order: 'scale', 'a', 'b'"):
        importance.ratios(model, guide, X, Y, num_samples=25)
    assert bdl.Predictive(model, guide, 3)(X)["y"].shape == (3, 4)


def test_the_check_leaves_buffers_and_random_numbers_alone():
    model = _model()
    guide = bdl.guides.AutoMeanField(_model()).prototype(X, Y)
    own = bdl.guides.AutoMeanField(model).prototype(X, Y)
    own.load_state_dict(guide.state_dict())
    found = []
    for posterior in (guide, own):
        torch.manual_seed(1)
        found.append(bdl.Predictive(model, posterior, 3)(X)["y"])
    assert torch.equal(*found)


def test_an_error_of_the_program_stays_its_own():
    model = _model()
    guide = bdl.guides.AutoMeanField(_model()).prototype(X, Y)
    for wrong, kind, words in ((X[:, :1], RuntimeError, "mat1"), (X.float(), TypeError, "dtype")):
        with pytest.raises(kind, match=words):
            bdl.Predictive(model, guide, 3)(wrong)


def _local(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(x @ w + z, 0.3), obs=y)


def test_other_numbers_of_rows_are_said():
    guide = bdl.guides.AutoMeanField(_local).prototype(X, Y)
    samples = bdl.Samples({name: value[None] for name, value in guide.sample_latents(30).items()})
    words = r"another number of rows \(other shapes: 'z' \(4,\) for \(3,\)\)"
    with pytest.raises(ValueError, match=words):
        bdl.Predictive(_local, samples, 3)(X[:3])
    for posterior in (guide, samples):
        with pytest.raises(ValueError, match=words):
            bdl.to_arviz(_local, posterior, X[:3], Y[:3])
    with pytest.raises(RuntimeError, match=words):
        bdl.guides.AutoMeanField(_local).prototype(X[:3], Y[:3]).load_state_dict(guide.state_dict())


def test_local_latents_of_other_rows_are_named_with_the_ways_to_predict_new_ones():
    guide = bdl.guides.AutoMeanField(_local).prototype(X, Y)
    words = r"'z' has values for 4 rows of the plate 'data', which holds 3 now.*AutoAmortized"
    laplace = bdl.guides.AutoLaplaceGGN(_local, structure="diag").prototype(X, Y)
    with pytest.warns(bdl.errors.BdlWarning, match="not at a maximum"):
        laplace = laplace.laplace_approximation((X, Y))
    for call in (
        lambda: bdl.Predictive(_local, guide, 3)(X[:3]),
        lambda: bdl.Predictive(_local, guide, 3).log_likelihood(X[:3], Y[:3]),
        lambda: bdl.LinearizedPredictive(_local, laplace).parameter_moments(X[:3]),
        lambda: bdl.Program(_local, X[:3], Y[:3]).log_joint(guide.median(X, Y)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    samples = bdl.Samples({name: value[None] for name, value in guide.sample_latents(3).items()})
    with pytest.raises(ValueError, match=r"another number of rows .*: local latents .* prior"):
        bdl.Predictive(_local, samples, 3)(X[:3])
    own = {"w": guide.sample_latents(5)["w"]}
    drawn = bdl.Predictive(_local, own)(X[:3])
    assert drawn["y"].shape == (5, 3) and drawn["z"].unique().numel() == 15


def test_a_factor_in_the_prior_of_a_last_layer_is_said_once():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.factor("smooth", -(w[0] - w[1]).square())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    guide = bdl.guides.AutoLastLayer(model).prototype(X, Y.abs().round())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", bdl.errors.BdlWarning)
        guide.laplace_approximation((X, Y.abs().round()))
    assert sum("no Fisher information" in str(w.message) for w in told) == 1
