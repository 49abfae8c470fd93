"""A program's pure functions equal Pyro's own trace and survive torch's transformations."""

import threading
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn
from torch.distributions import constraints
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bdl import Program, bayesianize
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.program import record

X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
Y = torch.sin(3 * X)
N = len(X)


def _one(value=1.0):
    return torch.tensor(value, dtype=torch.float64)


def hierarchical(x, y=None):
    tau = pyro.sample("tau", dist.HalfNormal(_one(2.0)))
    noise = pyro.sample("noise", dist.LogNormal(_one(0.0), _one(0.5)))
    w = pyro.sample("w", dist.Normal(_one(0.0), tau).expand([3]).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * x + w[2] * x**2)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def constrained(x, y=None):
    p = pyro.sample("simplex", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)))
    u = pyro.sample("unit", dist.Beta(_one(2.0), _one(3.0)))
    r = pyro.sample("rates", dist.Gamma(_one(2.0), _one(1.0)).expand([2]).to_event(1))
    chol = pyro.sample("chol", dist.LKJCholesky(3, _one(2.0)))
    i = pyro.sample("interval", dist.Uniform(_one(-1.0), _one(2.0)))
    with pyro.plate("data", len(x)):
        mean = p[0] * x + u * x**2 + chol[2, 1] + i
        return pyro.sample("y", dist.Normal(mean, r.sum()), obs=y)


def several(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()).expand([2]).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("a", dist.Normal(w[0] * x, _one()), obs=y)
        pyro.sample("b", dist.Poisson((w[1] * x).exp()), obs=None if y is None else y.abs().round())
    with pyro.plate("other", 2):
        pyro.sample("c", dist.Normal(w, _one(0.3)).mask(True), obs=w.new_ones(2))


def nested(x, y=None):
    with pyro.plate("columns", 2, dim=-1):
        m = pyro.sample("m", dist.Normal(_one(0.0), _one()))
        with pyro.plate("rows", len(x), dim=-2):
            z = pyro.sample("z", dist.Normal(m, _one(0.5)))
            pyro.sample("y", dist.Normal(z, _one(0.1)), obs=None if y is None else y[:, None])


def minibatch(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    index = torch.tensor([4, 1])
    with pyro.plate("data", len(x), subsample=index) as i:
        pyro.sample("y", dist.Normal(w * x[i], _one(0.2)), obs=None if y is None else y[i])


def local_minibatch(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("data", len(x), subsample=torch.tensor([3, 0, 5])) as i:
        z = pyro.sample("z", dist.Normal(w, _one(0.5)))
        pyro.sample("y", dist.Normal(z * x[i], _one(0.2)), obs=None if y is None else y[i])


def factored(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()).expand([2]).to_event(1))
    pyro.factor("penalty", -(w**4).sum())
    with pyro.plate("data", len(x)), poutine.scale(scale=0.25):
        pyro.sample("y", dist.Normal(w[0] + w[1] * x, _one()), obs=y)


def masked(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("data", len(x)):
        with poutine.mask(mask=x > 0):
            pyro.sample("y", dist.Normal(w * x, _one()), obs=y)
        pyro.sample("half", dist.Normal(w, _one()).mask(x < 0.5), obs=y)


def partly_observed(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, _one()), obs=y, obs_mask=x > 0)


def with_params(x, y=None):
    scale = pyro.param("scale", _one(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.StudentT(_one(4.0), _one(0.0), scale))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, _one()), obs=y)


class Module(PyroModule):
    def __init__(self):
        super().__init__()
        self.noise = PyroParam(_one(0.3), constraints.positive)
        self.linear = PyroModule[nn.Linear](1, 1).double()
        self.linear.weight = PyroSample(dist.Normal(_one(0.0), _one()).expand([1, 1]).to_event(2))

    def forward(self, x, y=None):
        f = self.linear(x[:, None])[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)


def _bayesian():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    bnn = bayesianize(net)

    def model(x, y=None):
        f = bnn(x[:, None])[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, _one(0.3)), obs=y)

    return model


PROGRAMS = {
    "hierarchical": hierarchical,
    "constrained": constrained,
    "several observed sites": several,
    "nested plates": nested,
    "minibatch": minibatch,
    "local latents in a minibatch": local_minibatch,
    "factor and scale": factored,
    "masks": masked,
    "obs_mask": partly_observed,
    "param": with_params,
    "PyroModule": Module(),
    "conditioned": pyro.condition(hierarchical, {"tau": _one(0.8)}),
    "bayesianized": _bayesian(),
}


@pytest.fixture(params=PROGRAMS.values(), ids=PROGRAMS.keys())
def model(request):
    return request.param


@pytest.fixture
def program(model):
    return Program(model, X, Y)


def _latents(program, n=None):
    size = (program.size,) if n is None else (n, program.size)
    vector = 0.5 * torch.randn(size, dtype=torch.float64)
    return vector, program.constrain(vector)[0]


def _trace(program, latents):
    conditioned = poutine.condition(program.model, data=latents)
    trace = poutine.trace(conditioned).get_trace(*program.args)
    trace.compute_log_prob()
    return trace


def test_the_densities_are_those_of_pyros_trace(program):
    vector, latents = _latents(program)
    trace = _trace(program, latents)
    prior = sum(trace.nodes[name]["log_prob_sum"] for name in program.latents)
    torch.testing.assert_close(program.log_prior(latents), prior, rtol=1e-12, atol=0)
    total = trace.log_prob_sum(lambda name, node: not name.endswith("_unobserved"))
    torch.testing.assert_close(program.log_joint(latents), total, rtol=1e-12, atol=0)
    log_det = program.constrain(vector)[1]
    torch.testing.assert_close(program.log_density(vector), total + log_det, rtol=1e-12, atol=0)
    terms = program.log_density_terms(vector)
    torch.testing.assert_close(sum(terms.values()), total, rtol=1e-12, atol=0)
    likelihood = program.log_likelihood(latents)
    observations = program.observations(latents)
    assert set(likelihood) == set(program.observed) == set(observations)
    for name, value in likelihood.items():
        node = trace.nodes[name]
        expected = node["unscaled_log_prob"]
        mask = node["mask"]
        expected = expected if mask is None else torch.where(mask, expected, 0.0)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        assert observations[name].scale == node["scale"]
        scaled = observations[name].log_prob().sum()
        torch.testing.assert_close(scaled, node["log_prob_sum"], rtol=1e-12, atol=0)


def test_the_log_density_of_a_batch_counts_each_datum_once():
    """A temperature of 1/2, a mask of the first row, and a plate of twelve data for four."""

    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, subsample=torch.arange(4)), poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(loc, 0.3).mask(torch.arange(4) > 0), obs=y)

    y, loc = torch.randn(4), torch.tensor(0.7)
    site = record(model, {"loc": loc}, (y,)).observed["y"]
    expected = 0.5 * dist.Normal(loc, 0.3).log_prob(y)[1:].sum()
    torch.testing.assert_close(site.batch_log_prob(), expected)
    torch.testing.assert_close(site.log_prob().sum(), 3 * expected)


def test_vmap_equals_a_loop(program):
    vectors, _ = _latents(program, 4)
    expected = torch.stack([program.log_density(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(program.log_density)(vectors), expected)


def test_grad_jvp_and_vjp_equal_autograd(program):
    vector, _ = _latents(program)
    direction = torch.randn_like(vector)
    leaf = vector.clone().requires_grad_()
    (expected,) = torch.autograd.grad(program.log_density(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(program.log_density)(vector), expected)
    value, slope = torch.func.jvp(program.log_density, (vector,), (direction,))
    torch.testing.assert_close(slope, expected @ direction)
    value, pull = torch.func.vjp(program.log_density, vector)
    torch.testing.assert_close(pull(torch.ones_like(value))[0], expected)
    h = torch.func.vmap(torch.func.grad(program.log_density))(vector.expand(2, -1))
    torch.testing.assert_close(h, expected.expand(2, -1))


def test_make_fx_traces_density_and_gradient(program):
    vector, _ = _latents(program)
    other, _ = _latents(program)
    function = torch.func.grad_and_value(program.log_density)
    graph = make_fx(function)(vector)
    torch.testing.assert_close(graph(other), function(other))


def test_the_log_determinant_is_that_of_the_jacobian():
    program = Program(constrained, X, Y)
    vector, _ = _latents(program)
    expected = 0.0
    for name, latent in program.latents.items():
        part = program.slices[name]

        def free(u, name=name, part=part):
            value = program.constrain(torch.cat([vector[: part.start], u, vector[part.stop :]]))[0]
            value = value[name]
            if name == "simplex":
                return value[:-1]  # the last entry follows from the others
            if name == "chol":
                return torch.stack([value[1, 0], value[2, 0], value[2, 1]])
            return value.reshape(-1)

        expected += torch.func.jacrev(free)(vector[part]).slogdet().logabsdet
        assert latent.size == part.stop - part.start
    torch.testing.assert_close(program.constrain(vector)[1], expected)
    sizes = {name: latent.size for name, latent in program.latents.items()}
    assert sizes == {"simplex": 2, "unit": 1, "rates": 2, "chol": 3, "interval": 1}


def test_what_a_program_consists_of():
    program = Program(hierarchical, X, Y)
    assert tuple(program.latents) == ("tau", "noise", "w")
    assert program.observed == ("y",)
    assert program.deterministic == ("f",)
    assert program.plates == {"data": (N, N)}
    assert Program(minibatch, X, Y).plates == {"data": (N, 2)}
    assert Program(factored, X, Y).factors == ("penalty",)
    assert Program(nested, X, Y).latents["z"].plates == ("columns", "rows")


def test_new_arguments_and_open_targets():
    program = Program(hierarchical, X, Y)
    _, latents = _latents(program)
    x = torch.tensor([0.5, -0.5], dtype=torch.float64)
    site = program.observations(latents, x)["y"]
    w = latents["w"]
    torch.testing.assert_close(site.distribution.loc, w[0] + w[1] * x + w[2] * x**2)
    assert site.value is None
    assert program.log_likelihood(latents, x) == {}
    y = torch.zeros(2, dtype=torch.float64)
    expected = dist.Normal(site.distribution.loc, latents["noise"]).log_prob(y)
    torch.testing.assert_close(program.log_likelihood(latents, x, y)["y"], expected)


def test_a_target_that_is_not_given_keeps_dtype_and_shape():
    def open_event(x, y=None):
        w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
        with pyro.plate("data", len(x)):
            mean = torch.stack([w * x, x], -1)
            return pyro.sample("y", dist.Normal(mean, _one()).to_event(1), obs=y)

    program = Program(open_event, X, torch.stack([Y, Y], -1))
    result = program.run({"w": _one()}, X).result
    assert result.dtype == torch.float64
    assert result.shape == (N, 2)


def test_a_random_subsample_is_drawn_once():
    """A pure function gives the same value at the same latents."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
        with pyro.plate("data", len(x), subsample_size=2) as i:
            pyro.sample("y", dist.Normal(w * x[i], _one(0.2)), obs=y[i])

    program = Program(model, X, Y)
    latents = {"w": _one(0.3)}
    values = {program.log_joint(latents).item() for _ in range(10)}
    assert len(values) == 1
    every = [
        program.log_joint(latents | {"data": torch.tensor([i, (i + 1) % N])}) for i in range(N)
    ]
    full = dist.Normal(0.3 * X, 0.2).log_prob(Y).sum() + dist.Normal(0.0, 1.0).log_prob(_one(0.3))
    torch.testing.assert_close(sum(every) / N, full)
    assert program.observations(latents)["y"].scale == N / 2
    torch.vmap(program.log_density)(torch.zeros(3, 1, dtype=torch.float64))


def test_handlers_outside_do_not_reach_in():
    program = Program(hierarchical, X, Y)
    _, latents = _latents(program)
    with poutine.scale(scale=7.0), poutine.trace() as tracer:
        inside = program.log_joint(latents)
    assert torch.equal(inside, program.log_joint(latents))
    assert not tracer.trace.nodes


def test_validation_stays_as_it_was():
    program = Program(hierarchical, X, Y)
    _, latents = _latents(program)
    with pyro.validation_enabled(True):
        program.log_joint(latents)
        with pytest.raises(ValueError):
            dist.Normal(0.0, -1.0)

    def broken(x):
        raise RuntimeError("midway")

    with pyro.validation_enabled(True):
        with pytest.raises(RuntimeError, match="midway"):
            record(broken, {}, (X,))
        with pytest.raises(ValueError):
            dist.Normal(0.0, -1.0)


def test_distributions_made_with_validation_do_not_stop_vmap():
    shared = dist.Normal(torch.zeros(2), torch.ones(2), validate_args=True).to_event(1)
    mixture = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2), validate_args=True),
        dist.Normal(torch.zeros(2), torch.ones(2), validate_args=True),
        validate_args=True,
    )

    def model():
        w = pyro.sample("w", shared)
        pyro.sample("m", mixture)
        pyro.sample("y", dist.Normal(w.sum(), 1.0, validate_args=True), obs=torch.tensor(0.3))

    program = Program(model)
    vectors = torch.randn(3, program.size)
    expected = torch.stack([program.log_density(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(program.log_density)(vectors), expected)
    assert shared.base_dist._validate_args  # the user's own object is as it was


# What cannot be read


def on_a_sphere(x, y):
    z = pyro.sample("z", dist.ProjectedNormal(torch.ones(3, dtype=y.dtype)))
    pyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y[0])


def counting(x, y):
    k = pyro.sample("k", dist.Poisson(_one(3.0)))  # its values are floats
    pyro.sample("y", dist.Normal(k, 1.0), obs=y[0])


def bounded_by_a_latent(x, y):
    top = pyro.sample("top", dist.HalfNormal(_one()))
    w = pyro.sample("w", dist.Uniform(_one(0.0), top))
    pyro.sample("y", dist.Normal(w, _one()), obs=y[0])


def in_a_loop(x, y):
    for i in pyro.plate("steps", 3):
        w = pyro.sample(f"w{i}", dist.Normal(_one(0.0), _one()))
    pyro.sample("y", dist.Normal(w, _one()), obs=y[0])


def classifier(x, y=None):
    w = pyro.sample("w", dist.Normal(_one(0.0), _one()))
    with pyro.plate("data", len(x)):
        pyro.sample("k", dist.Bernoulli(logits=w * x), obs=y)


def twice(x, y):
    for _ in range(2):
        pyro.sample("w", dist.Normal(_one(0.0), _one()))
    pyro.sample("y", dist.Normal(_one(0.0), _one()), obs=y[0])


def other_values(x, y):
    pyro.sample("v", dist.Delta(pyro.sample("w", dist.Normal(0.0, 1.0))), obs=torch.ones(()))


def _networks(*names, in_plate=False):
    networks = [bayesianize(nn.Linear(1, 1).double(), name=name) for name in names]

    def model(x, y):
        with pyro.plate("data", len(x)) if in_plate else nullcontext():
            f = sum(network(x[:, None]) for network in networks)[:, 0]
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    return model


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda x, y: classifier(x), "'k' is discrete.* pass the targets"),
        (on_a_sphere, r"'z' \(ProjectedNormal\) .*bijection"),
        (counting, r"discrete latent site 'k' \(Poisson\)"),
        (bounded_by_a_latent, "support of site 'w' depends"),
        (in_a_loop, "'w0' is in the sequential plate 'steps'"),
        (twice, "two statements are named 'w': give each its own name"),
        (_networks("", ""), "two statements are named 'weight'"),
        (_networks("net", in_plate=True), "'net.weight' .*plate 'data'.* outside the plate"),
        (other_values, "'v' observes values that its Delta"),
    ],
)
def test_programs_that_are_refused(model, message):
    with pytest.raises(UnsupportedProgramError, match=message):
        Program(model, X, Y)


def test_what_is_fixed_is_not_refused():
    fixed = poutine.condition(bounded_by_a_latent, {"top": _one(1.0)})
    assert Program(fixed, X, Y).size == 1
    with pytest.raises(UnsupportedProgramError, match="'w'"):
        record(twice, {"w": _one()}, (X, Y))


class Inside(PyroModule):
    def __init__(self, layer, *args):
        super().__init__()
        self.layer = PyroModule[layer](*args)
        for name, value in list(self.layer.named_parameters()):
            prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
            setattr(self.layer, name, PyroSample(prior))

    def forward(self, x, y=None):
        with pyro.plate("data", len(x)):
            f = self.layer(x).flatten(1).sum(-1)
            return pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def test_hand_written_weights_in_a_plate_are_named():
    with pytest.raises(RuntimeError) as raised:
        Program(Inside(nn.Conv2d, 2, 2, 3), torch.randn(6, 2, 5, 5), torch.zeros(6))
    note = "\n".join(raised.value.__notes__)
    assert all(word in note for word in ("'layer.weight'", "'data'", "outside the plate"))


def test_other_errors_of_a_program_with_local_latents_stay_themselves():
    def model(x, y):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        Program(model, X, Y)
    (note,) = caught.value.__notes__
    assert "'z'" in note and "outside the plate" in note


def test_no_observed_site():
    program = Program(lambda: pyro.sample("w", dist.Normal(0.0, 1.0)))
    for check in (program.require_observed, program.check):
        with pytest.raises(UnsupportedProgramError, match="no observed site"):
            check()
    Program(factored, X, Y).require_observed()
    expected = dist.Normal(0.0, 1.0).log_prob(torch.zeros(()))
    torch.testing.assert_close(program.log_prior({"w": torch.tensor(0.0)}), expected)


def test_missing_latents_and_wrong_shapes_are_named():
    program = Program(hierarchical, X, Y)
    _, latents = _latents(program)
    del latents["noise"]
    for function in (program.log_prior, program.log_joint, program.unconstrain, program.flatten):
        with pytest.raises(KeyError, match="noise"):
            function(latents)
    with pytest.raises(ValueError, match="5 numbers"):
        program.unflatten(torch.zeros(4))
    with pytest.raises(ValueError, match=r"'w'.*\(3,\)"):
        program.flatten(program.initial | {"w": torch.zeros(2)})


def test_the_density_of_an_observed_delta_counts_as_a_factor():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("v", dist.Delta(w.exp(), log_density=w), obs=w.exp())
        pyro.sample("u", dist.Delta(2 * w), obs=2 * w)

    program = Program(model)
    assert (program.deterministic, program.factors) == (("v", "u"), ("v",))
    w = torch.tensor(0.3)
    expected = dist.Normal(0.0, 1.0).log_prob(w) + w
    torch.testing.assert_close(program.log_joint({"w": w}), expected)


def test_a_statement_of_another_thread_is_refused():
    """Pyro's stack of handlers is one for all threads: its site would land in this program."""
    failures = []

    def other():
        try:
            pyro.sample("other", dist.Normal(0.0, 1.0))
        except RuntimeError as error:
            failures.append(str(error))

    def program():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.0))

    found = record(program, {})
    assert set(found.latents) == {"w"}
    assert len(failures) == 1 and "'other' is of another thread" in failures[0]


@pytest.mark.parametrize("targets", [{"y": torch.zeros(3)}, [0.0, 1.0, 2.0], 1.0])
def test_targets_that_are_no_tensor_are_refused_by_name(targets):
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("target", dist.Normal(w * x, 1.0), obs=y)

    with pytest.raises(
        ArgumentError, match=f"'target' must be a tensor, got {type(targets).__name__}"
    ):
        Program(model, torch.zeros(3), targets)
