"""HMC and NUTS of both backends against exact posteriors, and what surrounds them."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl.contrib import pyro_mcmc
from pyro_bdl.errors import BdlWarning, MissingOperatorError, UnsupportedProgramError
from pyro_bdl.handlers import cold, temper
from pyro_bdl.mcmc import HMC, NUTS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#divergences"),  # chains of a few draws
    pytest.mark.filterwarnings("ignore:.*#uncompiled"),  # steps far from any mode
    pytest.mark.filterwarnings("ignore:.*#stuck-chains"),  # which start where they stay
]

BACKENDS = ("numpyro", "pyro")
QUICK = {
    "kernel": NUTS(max_tree_depth=4), "num_warmup": 30, "num_samples": 20, "progress": False,
}  # fmt: skip


def linear_model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def linear_data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=dtype)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    return x, y + 0.5 * torch.randn(20, generator=generator, dtype=dtype)


X, Y = linear_data()


def assert_moments(samples, mean, covariance):
    """Each mean within 5 Monte Carlo standard errors, each sd within 15 %, each correlation within
    4 errors of independent draws, which are at most 1 / sqrt(their number)."""
    draws = samples.latents["w"]
    error = bdl.diagnostics.mcse(draws)
    flat = draws.flatten(0, 1)
    assert ((flat.mean(0) - mean).abs() < 5 * error).all()
    assert (flat.std(0) / covariance.diagonal().sqrt() - 1).abs().max() < 0.15
    correlation = torch.corrcoef(flat.T)
    exact = covariance / torch.outer(covariance.diagonal().sqrt(), covariance.diagonal().sqrt())
    assert (correlation - exact).abs().max() < 4 / len(flat) ** 0.5


@pytest.fixture(scope="module")
def quick():
    """One quick run of each backend on the linear model, of seed 5."""
    return {b: bdl.mcmc.sample(linear_model, X, Y, backend=b, seed=5, **QUICK) for b in BACKENDS}


def _as_it_is(model):
    return model


TEMPERED, COLD = partial(temper, temperature=0.1), partial(cold, temperature=0.25)


@pytest.mark.parametrize(
    ("backend", "kernel", "handler"),
    [
        ("numpyro", NUTS(max_tree_depth=5), COLD),
        ("numpyro", HMC(trajectory_length=1.5), TEMPERED),
        ("pyro", HMC(trajectory_length=1.5), _as_it_is),
        ("numpyro", HMC(), _as_it_is),
        pytest.param("pyro", HMC(), _as_it_is, marks=pytest.mark.slow),
        pytest.param("numpyro", NUTS(max_tree_depth=5), _as_it_is, marks=pytest.mark.slow),
        pytest.param("pyro", NUTS(max_tree_depth=5), TEMPERED, marks=pytest.mark.slow),
    ],
)
def test_conjugate_posterior(backend, kernel, handler, exact_posterior):
    """A cold posterior has the mean and a quarter of the covariance."""
    samples = bdl.mcmc.sample(
        handler(linear_model), X, Y, kernel=kernel, backend=backend, num_warmup=100,
        num_samples=400 if backend == "numpyro" else 250,
        num_chains=2 if backend == "numpyro" else 1, seed=3, progress=False,
    )  # fmt: skip
    mean, covariance = exact_posterior(X, Y, 0.1 if handler is TEMPERED else 1.0)
    assert_moments(samples, mean, covariance * (0.25 if handler is COLD else 1.0))


def positive_model(y):
    rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_constrained_latent_has_its_exact_posterior(backend):
    y = torch.tensor([3.0, 1.0, 4.0, 2.0])
    samples = bdl.mcmc.sample(
        positive_model, y, backend=backend, num_warmup=100, num_samples=250, progress=False
    )
    draws = samples.latents["rate"].double()
    exact = dist.Gamma(torch.tensor(12.0), 5.0)
    assert (draws > 0).all()
    assert abs(draws.mean() - exact.mean) < 5 * bdl.diagnostics.mcse(draws)
    assert abs(draws.std() / exact.stddev - 1) < 0.2


def mlp(inputs, outputs):
    return bdl.bayesianize(
        nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)),
        bdl.priors.PerLayer(bdl.priors.Normal(dist.HalfCauchy(1.0))),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_draws_and_another_seed_others(backend, quick):
    same, other = (
        bdl.mcmc.sample(linear_model, X, Y, backend=backend, seed=s, **QUICK) for s in (5, 6)
    )
    assert torch.equal(quick[backend].latents["w"], same.latents["w"])
    assert not torch.equal(quick[backend].latents["w"], other.latents["w"])


@pytest.mark.filterwarnings("error:interrupted")
def test_chain_methods_give_different_chains_and_the_same_draws():
    runs = [
        bdl.mcmc.sample(linear_model, X, Y, num_chains=3, chain_method=method, **QUICK)
        for method in ("vectorized", "parallel")
    ]
    for samples in runs:
        assert not samples.info["interrupted"]  # by nobody
        assert samples.latents["w"].shape == (3, 20, 3)
        assert samples.latents["w"].dtype == torch.float64
        assert all(value.shape == (3, 20) for value in samples.stats.values())
        assert not torch.equal(samples.latents["w"][0], samples.latents["w"][1])
    vectorized, parallel = (samples.latents["w"] for samples in runs)
    torch.testing.assert_close(parallel[:, :3], vectorized[:, :3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_mean_what_they_say(backend, quick):
    samples = quick[backend]
    stats = samples.stats
    program = bdl.Program(linear_model, X, Y)
    for i in (0, 19):
        density = program.log_joint({"w": samples.latents["w"][0, i]})
        assert math.isclose(-float(density), float(stats["potential_energy"][0, i]), rel_tol=1e-6)
    assert (stats["energy"] > stats["potential_energy"].min()).all()
    assert ((stats["accept_prob"] >= 0) & (stats["accept_prob"] <= 1)).all()
    assert ((stats["num_steps"] >= 1) & (stats["num_steps"] <= 16)).all()
    assert (stats["step_size"] > 0).all() and stats["step_size"].unique().numel() == 1
    assert stats["diverging"].dtype == torch.bool
    assert samples.info["backend"] == backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length, steps", [(6.0, (19, 20)), (0.1, (9, 11)), (None, (1, 20))])
def test_the_steps_of_a_trajectory_are_capped(backend, length, steps):
    """At a step size of 0.01 the first length needs 600 steps."""
    kernel = HMC(step_size=0.01, max_steps=20, trajectory_length=length)
    samples = bdl.mcmc.sample(
        linear_model, X, Y, kernel=kernel, num_warmup=2, num_samples=4, backend=backend,
        progress=False,
    )  # fmt: skip
    found = samples.stats["num_steps"]
    assert ((found >= steps[0]) & (found <= steps[1])).all()


def funnel(y):
    log_sd = pyro.sample("log_sd", dist.Normal(torch.tensor(0.0), 6.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, log_sd.exp()))
        pyro.sample("y", dist.Normal(z, 10.0), obs=y)


def test_divergences_are_reported():
    samples = bdl.mcmc.sample(
        funnel, torch.zeros(5), num_warmup=40, num_samples=60,
        kernel=NUTS(max_tree_depth=6, target_accept=0.3), progress=False,
    )  # fmt: skip
    assert samples.stats["diverging"].any()


def regression(rows=12):
    torch.manual_seed(0)
    model = bdl.models.Regression(mlp(3, 1))
    return model, torch.randn(rows, 3), torch.randn(rows)


@pytest.mark.parametrize("init", ["prior", "network", "guide", "point", "samples", "dict"])
def test_starting_points(init):
    model, x, y = regression()
    program = bdl.Program(model, x, y)
    start = {
        "guide": bdl.guides.AutoMeanField(model).prototype(x, y),
        "point": bdl.guides.AutoMAP(model).prototype(x, y),
        "samples": bdl.Samples({k: v.expand(2, 3, *v.shape) for k, v in program.initial.items()}),
        "dict": program.initial,
    }.get(init, init)
    options = {"num_warmup": 2, "num_samples": 3, "progress": False}
    options["kernel"] = NUTS(max_tree_depth=2)
    samples = bdl.mcmc.sample(model, x, y, init=start, num_chains=2, backend="pyro", **options)
    assert samples.latents["noise"].shape == (2, 3)


def test_interrupt_keeps_the_draws_made_pyro(monkeypatch):
    updates = iter(range(40))

    def update(size):
        if next(updates, None) is None:
            raise KeyboardInterrupt

    bar = SimpleNamespace(update=update, close=lambda: None)
    monkeypatch.setattr(pyro_mcmc, "progress_bar", lambda *_: bar)
    with pytest.warns(BdlWarning, match="interrupted"):
        samples = bdl.mcmc.sample(
            linear_model, X, Y, backend="pyro", num_warmup=30, num_samples=50, progress=False
        )
    assert samples.num_draws == 10


def branching(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
    slope = torch.mode(w * torch.ones(4), 0).values
    with pyro.plate("data", len(x)):
        pyro.sample("why", dist.Normal(slope * x, 1.0), obs=y)


def test_missing_operator_names_operator_site_and_way_out():
    x = torch.randn(4)
    with pytest.raises(MissingOperatorError, match='backend="pyro"') as caught:
        bdl.mcmc.sample(branching, x, x, **QUICK)
    assert caught.value.site == "why" and "mode" in caught.value.op
    assert "why" in str(caught.value)
    samples = bdl.mcmc.sample(branching, x, x, backend="pyro", **QUICK)
    assert samples.latents["w"].shape == (1, 20)


def discrete(x, y=None):
    pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


BROKEN = X.clone().index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(math.nan).double())


def bits():
    model = bdl.models.BinaryClassification(bdl.bayesianize(nn.Linear(2, 1)))
    return model, torch.randn(3, 2), torch.tensor([2, -1, 1])


def part_of_the_data():
    model, inputs, targets = regression()
    model.num_data = 100
    return model, inputs, targets


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        (lambda: (linear_model, X), UnsupportedProgramError, "no observed site"),
        (lambda: (discrete, X, torch.tensor(1.0)), UnsupportedProgramError, "no continuous latent"),
        (lambda: (linear_model, BROKEN, Y), ValueError, "x holds NaN .* in rows 4, columns 1"),
        (bits, ValueError, r"outside the support.* in rows 0, 1"),
        (part_of_the_data, ValueError, "'data' has size 100 but holds 12"),
    ],
)
def test_bad_programs(program, error, words):
    with pytest.raises(error, match=words):
        bdl.mcmc.sample(*program(), **QUICK)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kernel": "gibbs"}, "kernel must be one of nuts, hmc"),
        ({"backend": "stan"}, "backend must be one of 'numpyro'"),
        ({"chain_method": "gpu"}, "chain_method must be one of"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"num_chains": 0}, "num_chains must be at least 1"),
        ({"num_warmup": 2.5}, "num_warmup must be a whole number, got 2.5"),
        ({"kernel": NUTS(inverse_mass=torch.ones(5))}, "inverse_mass must have shape"),
        ({"kernel": "mams", "backend": "pyro"}, "JAX only"),
        ({"init": "unifrom"}, "init must be .*'uniform'.* got 'unifrom'"),
        ({"init": torch.zeros(3)}, "init must be .* got Tensor"),
        ({"init": {"v": torch.zeros(3)}}, "no value for the latent site 'w'"),
        ({"init": {"w": torch.full((3,), math.inf).double()}}, "no starting point with a finite"),
        ({"init": {"w": torch.full((3,), math.nan)}}, "site 'w' outside of its support"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"seed": 2**64}, "seed must be from 0 to"),
    ],
)
def test_bad_arguments(wrong, words):
    with pytest.raises(ValueError, match=words):
        bdl.mcmc.sample(linear_model, X, Y, **(QUICK | wrong))


@pytest.mark.parametrize("numbers", [[0, 1, 2], np.arange(3.0), torch.arange(3).double()])
def test_starts_and_seeds_of_any_type(numbers):
    options = QUICK | {"num_warmup": 0, "num_samples": 1, "num_chains": 1, "kernel": "mams"}
    starts = [
        bdl.mcmc.sample(linear_model, X, Y, init={"w": value}, seed=seed, **options)
        for value, seed in ((torch.arange(3.0), 3), (numbers, np.int64(3)))
    ]
    assert torch.equal(*(start.latents["w"] for start in starts))


@pytest.mark.parametrize(
    "metric", [[[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.5], [0.0, 1.0]], np.ones((2, 2)), np.eye(3)[:2]]
)
def test_a_metric_is_a_covariance(metric):
    with pytest.raises(ValueError, match="symmetric and positive definite"):
        NUTS(inverse_mass=metric)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load(tmp_path, dtype):
    samples = bdl.Samples(
        {"a.b": torch.randn(2, 3, 4, dtype=dtype), "noise": torch.rand(2, 3, dtype=dtype)},
        {"diverging": torch.tensor([[True, False, True]] * 2), "num_steps": torch.ones(2, 3).int()},
        {"kernel": "nuts", "seconds": 1.5},
    )
    loaded = bdl.Samples.load(samples.save(tmp_path / "draws.safetensors"))
    assert list(loaded.latents) == ["a.b", "noise"]
    for name, value in samples.latents.items():
        assert (
            torch.equal(value, loaded.latents[name]) and value.dtype == loaded.latents[name].dtype
        )
    for name, value in samples.stats.items():
        assert torch.equal(value, loaded.stats[name]) and value.dtype == loaded.stats[name].dtype
    assert loaded.info == samples.info


def test_samples_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        bdl.Samples.load(tmp_path / "nothing.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    for name in ("other.safetensors", "text.safetensors", "empty.safetensors"):
        if name != "other.safetensors":
            (tmp_path / name).write_text("text" if "text" in name else "")
        with pytest.raises(ValueError, match=f"{name}' is no file of samples"):
            bdl.Samples.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"same \(chains, draws\)"):
        bdl.Samples({"w": torch.randn(2, 5), "v": torch.randn(2, 6)})


def test_flat_goes_chain_after_chain_and_thins_evenly():
    samples = bdl.Samples({"w": torch.arange(12.0).reshape(2, 6)})
    assert samples.flat()["w"].tolist() == list(range(12))
    assert samples.flat(4)["w"].tolist() == [0, 3, 6, 9]
    with pytest.raises(ValueError, match="num_samples must be from 1 to 12"):
        samples.flat(13)


def test_programs_that_call_autograd_have_the_draws_of_the_derivative_written_out():
    """f(x) = sum tanh(w x) by f'(x) ~ N, as in physics-informed networks. A program's own detach
    keeps the gradient of torch."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)

    def program(derivative, stopped=False):
        def model(y=None):
            prior = dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0)
            w = pyro.sample("w", prior.to_event(1))
            w = w + w.detach() - w.detach() if stopped else w
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(derivative(w), 0.5), obs=y)

        return model

    def by_autograd(w):
        t = x.clone().requires_grad_(True)
        with torch.enable_grad():
            f = (w[:, None] * t).tanh().sum()
            return torch.autograd.grad(f, t, create_graph=True)[0]

    def by_hand(w):
        return (w[:, None] / (w[:, None] * x).cosh().square()).sum(0)

    options = {
        "kernel": HMC(trajectory_length=0.5), "num_warmup": 20, "num_samples": 5,
        "progress": False, "init": {"w": torch.ones(2)},
    }  # fmt: skip
    expected, *found = (
        bdl.mcmc.sample(each, x.cos(), **options).latents["w"]
        for each in (program(by_hand), program(by_autograd), program(by_autograd, stopped=True))
    )
    for draws in found:
        torch.testing.assert_close(draws, expected, rtol=1e-6, atol=1e-6)


def flat(y):
    """The scale's posterior density is s^-n exp(-sum y^2 / (2 s^2)): 1 / s^2 is a Gamma."""
    scale = pyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    other = pyro.sample("other", dist.HalfNormal(1.0).mask(False))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)
        pyro.sample("z", dist.Normal(0.0, other), obs=y)


def test_improper_priors():
    """E[1 / s^2] of a Gamma((n - 1) / 2, sum y^2 / 2)."""
    y = torch.linspace(-2.0, 2.0, 9)
    samples = bdl.mcmc.sample(
        flat, y, num_warmup=50, num_samples=100, num_chains=1, seed=0,
        progress=False,
    )  # fmt: skip
    for name in ("scale", "other"):
        draws = samples.latents[name].square().reciprocal()[..., None]
        error = 5 * bdl.diagnostics.mcse(draws)
        assert abs(draws.mean() - 8 / y.square().sum()) < error
