"""Predictive draws: exact moments, vectorized equals looped, one shape for all posteriors."""

import functools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributions.moments import observation_mean
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.predictive import sampled
from pyro_bdl.program.vmap import map_draws


def network(inputs=3, outputs=1):
    return bdl.bayesianize(
        nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)),
        bdl.priors.FanIn(1.0),
    )


def model_and_data(kind="Regression", rows=9):
    outputs = {"Classification": 4, "HeteroscedasticRegression": 2}.get(kind, 1)
    model = getattr(bdl.models, kind)(network(outputs=outputs))
    x = torch.randn(rows, 3)
    y = torch.randint(0, 2, (rows,)) if "Class" in kind or "Poisson" in kind else torch.randn(rows)
    return model, x, y


KINDS = (
    "Regression",
    "HeteroscedasticRegression",
    "StudentTRegression",
    "Classification",
    "BinaryClassification",
    "PoissonRegression",
)


def posteriors(model, x, y):
    guides = [bdl.guides.AutoMeanField(model), bdl.guides.AutoMAP(model)]
    theirs = [AutoNormal(model), AutoDelta(model), AutoMultivariateNormal(model)]
    for guide in [*guides, *theirs]:
        guide(x, y)
    latents = guides[0].sample_latents(20)
    samples = bdl.Samples({k: v.reshape(4, 5, *v.shape[1:]) for k, v in latents.items()})
    return [*guides, *theirs, samples]


@pytest.mark.parametrize("kind", KINDS)
def test_same_keys_and_shapes_for_every_posterior(kind):
    model, x, y = model_and_data(kind)
    expected = {"y": (20, 9), "f": (20, 9)}
    if kind == "Classification":
        expected["f"] = (20, 9, 4)
    if kind == "HeteroscedasticRegression":
        expected["noise"] = (20, 9)
    for posterior in posteriors(model, x, y):
        draws = bdl.Predictive(model, posterior, 20)(x)
        assert {name: tuple(value.shape) for name, value in draws.items()} == expected
        assert not any(value.requires_grad for value in draws.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [10_000, 2**30])
def test_chunks_equal_the_program_conditioned_on_each_draw(kind, memory):
    model, x, y = model_and_data(kind)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.5).prototype(x, y)
    samples = bdl.Samples({k: v[None] for k, v in guide.sample_latents(7).items()})
    predictive = bdl.Predictive(model, samples, memory=memory)
    f, mean, likelihood = predictive(x)["f"], predictive.mean(x), predictive.log_likelihood(x, y)
    for i in range(7):
        latents = {name: value[0, i] for name, value in samples.latents.items()}
        trace = pyro.poutine.trace(pyro.condition(model, latents)).get_trace(x, y)
        trace.compute_log_prob()
        torch.testing.assert_close(f[i], trace.nodes["f"]["value"])
        torch.testing.assert_close(likelihood["y"][i], trace.nodes["y"]["log_prob"])
        torch.testing.assert_close(mean["y"][i], observation_mean(trace.nodes["y"]["fn"]))


def test_latents_are_returned_with_what_was_computed_from_them():
    """Check the draws of every posterior, in chunks, and those of the prior."""

    def schools(sd, effect=None):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        with pyro.plate("schools", len(sd)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            theta = pyro.deterministic("theta", mean + 2.0 * z)
            return pyro.sample("effect", dist.Normal(theta, sd), obs=effect)

    sd = torch.tensor([15.0, 10.0, 16.0])
    for posterior in (*posteriors(schools, sd, torch.randn(3)), None):
        predictive = bdl.Predictive(schools, posterior, 20, memory=2000)
        draws = predictive(sd, sites=["theta", "mean", "z"])
        assert list(draws) == ["theta", "mean", "z"] and draws["theta"].shape == (20, 3)
        expected = draws["mean"][:, None] + 2.0 * draws["z"]
        torch.testing.assert_close(draws["theta"], expected)
        assert predictive(sd).keys() == {"theta", "effect", *(() if posterior else ("mean", "z"))}
        with pytest.raises(ValueError, match="no site 'tau' to return"):
            predictive(sd, sites=["mean", "tau"])


def test_draws_of_large_guides_are_made_in_parts(monkeypatch):
    """Three, three and one draw of the weights at a time, as many as a part may hold."""
    model, x, y = model_and_data()
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    monkeypatch.setattr("pyro_bdl.guides.draws.DRAWS_AT_ONCE", 3 * guide.layout.size + 1)
    torch.manual_seed(1)
    parts = [guide.sample_latents(count) for count in (3, 3, 1)]
    latents = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    torch.manual_seed(1)
    found = bdl.Predictive(model, guide, 7).draw_moments(x)["y"]
    expected = bdl.Predictive(model, bdl.Samples(latents)).draw_moments(x)["y"]
    torch.testing.assert_close(found, expected)


def test_each_member_of_an_ensemble_comes_once_however_large(monkeypatch):
    model, x, y = model_and_data()
    guide = bdl.guides.AutoEnsemble(model, size=5).prototype(x, y)
    monkeypatch.setattr("pyro_bdl.guides.draws.DRAWS_AT_ONCE", 1)
    f = bdl.Predictive(model, guide, 5)(x)["f"]
    assert len(f.unique(dim=0)) == 5


def test_what_comes_after_the_observation_follows_its_draw():
    def model(x, first=None, second=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(2.0), 0.1))
        with pyro.plate("data", len(x)):
            first = pyro.sample("first", dist.Normal(w * x, 0.1), obs=first)
            pyro.sample("second", dist.Normal(10 * first, 0.1), obs=second)
        pyro.deterministic("twice", 2 * first)

    ones = torch.ones(4)
    samples = bdl.Samples({"w": torch.full((1, 500), 2.0)})
    samples = samples.of_program(bdl.Program(model, ones, ones, ones))
    draws = bdl.Predictive(model, samples)(ones)
    assert (draws["first"].std(0) > 0.05).all()
    residual = draws["second"] - 10 * draws["first"]
    assert residual.std() < 0.12 and abs(residual.mean()) < 0.02
    torch.testing.assert_close(draws["twice"], 2 * draws["first"])


def test_a_program_that_picks_rows_itself_is_refused():
    def model(x, y=None, size=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 6 if size is None else len(x), subsample_size=size or len(x)) as i:
            rows = slice(None) if size is None else i
            y = None if y is None else y[rows]
            return pyro.sample("y", dist.Normal(w * x[rows], 1.0), obs=y)

    x, y = torch.randn(6), torch.randn(6)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y, 3)
    laplace = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # not at a maximum
        laplace = laplace.laplace_approximation((x, y))
    sampled, linear = bdl.Predictive(model, guide, 4), bdl.LinearizedPredictive(model, laplace, 4)
    calls = [sampled, sampled.moments, sampled.log_likelihood, linear, linear.moments]
    for call in (*calls, functools.partial(bdl.to_arviz, model, guide)):
        with pytest.raises(UnsupportedProgramError, match=r"'data' picks 3 of the 6 rows"):
            call(x, y, 3)
    w = torch.randn(1, 4)  # two of six that are given, are not picked
    found = bdl.Predictive(model, bdl.Samples({"w": w})).log_likelihood(x[:2], y[:2])["y"]
    torch.testing.assert_close(found, dist.Normal(w.T * x[:2], 1.0).log_prob(y[:2]))


@pytest.mark.parametrize(
    "observation",
    [
        lambda mean: dist.Normal(mean, 1.0),
        lambda mean: dist.FoldedDistribution(dist.Normal(mean, 1.0)),
    ],
    ids=["taken apart", "unknown"],
)
@pytest.mark.parametrize("followed", [False, True])
def test_data_that_the_program_holds_are_predicted_not_returned(observation, followed):
    x, y = torch.ones(4), torch.tensor([0.5, 1.5, 2.5, 3.5])

    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        if followed:
            pyro.sample("open", dist.Normal(w, 1.0))
        with pyro.plate("data", 4):
            pyro.sample("y", observation(w * x), obs=y)

    samples = bdl.Samples({"w": torch.full((1, 600), 3.0)})
    draws = bdl.Predictive(model, samples)()["y"]
    torch.testing.assert_close(draws.mean(0), torch.full((4,), 3.0), atol=0.2, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.ones(4), atol=0.15, rtol=0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.recurrent(x)[0][:, -1])


def test_recurrent_networks_are_looped_over_and_it_is_said_once():
    model = bdl.models.Regression(bdl.bayesianize(Recurrent()))
    x, y = torch.randn(4, 5, 3), torch.randn(4)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = bdl.Predictive(model, guide, 6)(x)
    assert draws["f"].shape == (6, 4)
    assert len([w for w in caught if issubclass(w.category, BdlWarning)]) == 1


def test_a_function_that_cannot_be_vectorized_is_told_of_once_for_all_chunks():
    draws = {"w": torch.arange(5.0)}
    with pytest.warns(BdlWarning, match="cannot be vectorized") as caught:
        result = map_draws(lambda d: d["w"] * d["w"].item(), draws, chunk_size=2)
    assert torch.equal(result, draws["w"] ** 2) and len(caught) == 1


def test_networks_that_leave_torch_are_looped_over():
    class Outside(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(self.weight.detach().numpy().sum())

    model = bdl.models.Regression(bdl.bayesianize(Outside(3, 1)), noise=0.5)
    x = torch.randn(4, 3)
    w, b = torch.randn(1, 4, 1, 3), torch.randn(1, 4, 1)
    with pytest.warns(BdlWarning, match="cannot be vectorized over draws"):
        found = bdl.Predictive(model, bdl.Samples({"weight": w, "bias": b}))(x)["f"]
    expected = (torch.einsum("sp,np->sn", w[0, :, 0], x) + b[0]) * w[0].sum((1, 2))[:, None]
    torch.testing.assert_close(found, expected)


def test_an_error_that_a_loop_has_too_is_the_loops():
    def broken(draw):
        raise RuntimeError("size mismatch")

    with pytest.raises(ZeroDivisionError):
        map_draws(lambda draw: draw["w"].item() / 0, {"w": torch.ones(3)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        map_draws(broken, {"w": torch.zeros(3)})


def test_draws_that_fill_the_memory_are_evaluated_without_vmap():
    """A network that runs once per draw sees plain tensors; results equal the vectorized ones."""
    seen = []

    class Spy(nn.Conv2d):
        def forward(self, x):
            seen.append(torch._C._functorch.is_batchedtensor(self.weight))
            return super().forward(x)

    net = nn.Sequential(Spy(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.FanIn(1.0)))
    x, y = torch.randn(5, 1, 6, 6), torch.randint(3, (5,))
    guide = bdl.guides.AutoMeanField(model, init_scale=0.5).prototype(x, y)
    samples = bdl.Samples({k: v[None] for k, v in guide.sample_latents(7).items()})
    results = {}
    for memory, vectorized in ((1, False), (2**30, True)):
        seen.clear()
        results[memory] = bdl.Predictive(model, samples, memory=memory)(x)
        # after the run that checks the posterior and measures the memory
        assert seen[1:] == ([True] if vectorized else 7 * [False])
    torch.testing.assert_close(results[1]["f"], results[2**30]["f"])
    assert results[1]["y"].shape == results[2**30]["y"].shape == (7, 5)


def test_number_of_draws():
    model, x, y = model_and_data()
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    samples = bdl.Samples(
        {k: v.reshape(2, 15, *v.shape[1:]) for k, v in guide.sample_latents(30).items()}
    )
    for posterior, count, found in ((guide, None, 100), (samples, None, 30), (samples, 4, 4)):
        assert len(bdl.Predictive(model, posterior, count)(x)["f"]) == found


MODEL, X, Y = model_and_data()


def held(count=3, without="none"):
    latents = bdl.guides.AutoMeanField(MODEL).prototype(X, Y).sample_latents(count)
    return bdl.Samples({k: v[None] for k, v in latents.items() if without not in k})


def factor(y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.factor("fit", -(y - w).square().sum())


def exported():
    predictive = bdl.Predictive(MODEL, held())

    class Mean(nn.Module):
        def forward(self, x):
            return predictive(x)["f"].mean(0)

    torch.export.export(Mean(), (X,))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: bdl.Predictive(MODEL, held(), 0)(X), ValueError, "num_samples"),
        (lambda: bdl.Predictive(MODEL, 3)(X), TypeError, "a posterior is a guide or Samples"),
        (lambda: bdl.Predictive(MODEL), ValueError, "num_samples for draws of the prior"),
        (lambda: bdl.Predictive(MODEL, held()).log_likelihood(X), ValueError, "pass the targets"),
        (
            lambda: bdl.Predictive(MODEL, bdl.guides.AutoMeanField(MODEL))(X),
            RuntimeError,
            r"call guide\.prototype",
        ),
        (
            lambda: bdl.Predictive(MODEL, held(without="2.weight")).log_likelihood(X, Y),
            ValueError,
            "no value for the network's weights '2.weight'",
        ),
        (
            lambda: bdl.Predictive(MODEL, held(without="2.weight"))(X),
            ValueError,
            "no value for the network's weights '2.weight'",
        ),
        (
            lambda: bdl.Predictive(factor, bdl.Samples({"w": torch.zeros(1, 3)})).log_likelihood(Y),
            UnsupportedProgramError,
            "the factor 'fit' is no log likelihood",
        ),
        (exported, UnsupportedProgramError, "cannot keep"),
    ],
)
def test_what_cannot_be_predicted_is_told(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_moments_of_each_draw_are_those_of_its_distribution():
    """Var[y] = E[Var[y | w]] + Var[E[y | w]] (Gal & Ghahramani 2016, section 4)."""

    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Gamma((w[0] * x).exp(), w[1].exp()), obs=y)

    torch.manual_seed(0)
    x, w = torch.randn(5), torch.randn(1, 7, 2)
    found = bdl.Predictive(program, bdl.Samples({"w": w})).draw_moments(x)["y"]
    each = dist.Gamma((w[0, :, :1] * x).exp(), w[0, :, 1:].exp())
    torch.testing.assert_close(found.mean, each.mean)
    torch.testing.assert_close(found.variance, each.variance)
    whole = found.over_draws()  # of the mixture of the seven, by its first two raw moments
    torch.testing.assert_close(whole.mean, each.mean.mean(0))
    second = (each.variance + each.mean.square()).mean(0)
    torch.testing.assert_close(whole.variance, second - whole.mean.square(), rtol=1e-4, atol=1e-5)


def ones(x):
    return torch.ones_like(x[:, 0])


OTHERS = {
    "OrderedLogistic": lambda f, x: dist.OrderedLogistic(f, torch.tensor([-1.0, 0.5])),
    "Dirichlet": lambda f, x: dist.Dirichlet(torch.stack([f.exp(), ones(x)], -1)),
    "MixtureSameFamily": lambda f, x: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(torch.stack([f, f + 2.0], -1), 0.3)
    ),
    "TransformedDistribution": lambda f, x: dist.TransformedDistribution(
        dist.Normal(f, 0.3), [dist.transforms.SigmoidTransform()]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_draws_and_moments_of_other_distributions(name):
    """Moments of the draws of y at one point of the posterior, within five standard errors."""
    torch.manual_seed(0)
    net = network()

    def model(x, y=None):
        f = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", OTHERS[name](f, x), obs=y)

    x = torch.randn(5, 3)
    guide = bdl.guides.AutoMAP(model).prototype(x, model_draw(model, x))
    num_draws = 600 if name == "OrderedLogistic" else 4000  # whose draws run one by one
    predictive = bdl.Predictive(model, guide, num_draws)
    drawn, found = predictive(x)["y"], predictive.moments(x)["y"]
    if name == "OrderedLogistic":
        drawn = torch.nn.functional.one_hot(drawn, 3).float()
    error = found.variance.sqrt() / num_draws**0.5 * (1 + 1 / 256**0.5)
    assert found.mean.shape == drawn.shape[1:]
    assert ((drawn.mean(0) - found.mean).abs() <= 5 * error + 1e-6).all()
    torch.testing.assert_close(drawn.var(0), found.variance, rtol=0.25, atol=1e-3)


def model_draw(model, x):
    with torch.no_grad():
        return pyro.poutine.trace(model).get_trace(x).nodes["y"]["value"]


@pytest.mark.parametrize("how", ["jvp", "autograd", "sparse"])
def test_programs_that_differentiate_or_multiply_sparse_matrices(how):
    """The draws' functions are those of the program run by itself at each draw."""
    torch.manual_seed(0)
    x = torch.randn(6, 1)
    neighbors = torch.eye(6).roll(1, 0).to_sparse()

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))

        def net(t):
            return (w.sum(0) * t).tanh().sum(-1)

        if how == "jvp":
            f = torch.func.jvp(net, (x,), (torch.ones_like(x),))[1]
        elif how == "autograd":
            with torch.enable_grad():
                t = x.clone().requires_grad_(True)
                (f,) = torch.autograd.grad(net(t).sum(), t, create_graph=True)
            f = f[:, 0]
        else:
            f = torch.sparse.mm(neighbors, (w.sum(0) * x).tanh()).sum(-1)
        pyro.deterministic("f", f)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    samples = bdl.Samples({"w": torch.randn(1, 7, 1, 3)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a batching rule
        found = bdl.Predictive(model, samples)(x)["f"]
    for draw, one in zip(samples.latents["w"][0], found, strict=True):
        trace = pyro.poutine.trace(pyro.condition(model, {"w": draw})).get_trace(x)
        torch.testing.assert_close(one, trace.nodes["f"]["value"].detach())


@pytest.mark.parametrize("memory", [sampled.MEMORY, 1])
def test_gradients_flow_to_the_inputs_where_they_are_asked_for(memory):
    """f and E[y] at draws have the derivatives of finite differences; draws of y follow f."""
    model, x, y = model_and_data()
    model, inputs = model.double(), torch.randn(2, 3, dtype=torch.float64)
    guide = bdl.guides.AutoMeanField(model)
    guide(x.double(), y.double())
    draws = bdl.Samples({site: v[None] for site, v in guide.sample_latents(3).items()})
    predictive = bdl.Predictive(model, draws, memory=memory, differentiable=True)

    def function(inputs):
        return predictive(inputs)["f"], predictive.mean(inputs)["y"]

    assert not any(value.requires_grad for value in function(inputs))
    inputs.requires_grad_()
    assert torch.autograd.gradcheck(function, (inputs,))
    result = predictive(inputs)
    of_f, of_y = (torch.autograd.grad(result[k].sum(), inputs, retain_graph=True) for k in "fy")
    torch.testing.assert_close(of_y, of_f)  # the noise is known
    assert not bdl.Predictive(model, draws)(inputs)["f"].requires_grad
    with torch.no_grad():
        assert not predictive(inputs)["f"].requires_grad


def test_of_chains_with_fewer_draws_all_are_taken_and_it_is_said():
    model, x, y = model_and_data()
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    latents = {name: value.reshape(2, 6, *value.shape[1:])
               for name, value in guide.sample_latents(12).items()}  # fmt: skip
    chains = bdl.Samples(latents)
    with pytest.warns(BdlWarning, match="hold 12 draws, and all are taken in place of 1000"):
        drawn = bdl.Predictive(model, chains, 1000).mean(x)["y"]
    torch.testing.assert_close(drawn, bdl.Predictive(model, chains).mean(x)["y"])
