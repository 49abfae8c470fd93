"""``sgmcmc`` on programs: exact posteriors, minibatches, schedules, and how it ends."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import second_device
from pyro.infer.autoguide.initialization import init_to_value
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides.subnetwork import SubsetNormal
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.module_state import vmappable

KERNELS = {kind.name: kind for kind in StochasticKernel.__subclasses__()}
QUICK = {"num_warmup": 4, "num_samples": 6, "progress": False}


class Linear(nn.Module):
    """w ~ Normal(0, 1) of five numbers, y ~ Normal(x w, 0.5)."""

    def __init__(self, num_data=None):
        super().__init__()
        self.num_data = num_data

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, dtype=x.dtype), 1.0).to_event(1))
        rows = torch.arange(len(x))
        with pyro.plate("data", self.num_data or len(x), subsample=rows):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def linear_data(rows=20, curvature=4.0):
    """Correlated inputs for which the posterior's precision has eigenvalues from 1 to 4."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    spread = torch.linspace(0, curvature - 1, 5, dtype=torch.float64).sqrt()
    x = 0.5 * (left * spread) @ right
    y = x @ torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    return x, y + 0.5 * torch.randn(rows, generator=generator, dtype=torch.float64)


X, Y = linear_data()


def assert_moments(draws, mean, covariance, errors=3.0):
    """Mean and covariance within so many Monte Carlo standard errors, each of which is small."""
    offset = draws - mean
    products = offset[..., :, None] * offset[..., None, :]
    assert (offset.mean((0, 1)).abs() < errors * bdl.diagnostics.mcse(offset)).all()
    error = bdl.diagnostics.mcse(products)
    assert (error < 0.06 * covariance.diagonal().max()).all()
    assert ((products.mean((0, 1)) - covariance).abs() < errors * error).all()


def sampled(model, data, method="sghmc", **options):
    """Chains of a kernel by its name; its options are those that it has fields for."""
    options = QUICK | {"step_size": 0.01, "thinning": 2} | options
    kind = KERNELS[method]
    own = {name: options.pop(name) for name in list(options) if name in kind.__dataclass_fields__}
    return bdl.mcmc.sgmcmc(model, data, kernel=kind(**own), **options)


# --------------------------------------------------------------------------- the stationary density

EXACT = {
    "sgld": {"step_size": 0.01, "thinning": 10, "num_warmup": 200},
    "psgld": {"step_size": 0.01, "thinning": 10, "num_warmup": 400},
    "sghmc": {"step_size": 0.2, "thinning": 8, "num_warmup": 100, "friction": 0.1},
    "sgnht": {"step_size": 0.04, "thinning": 10, "num_warmup": 150, "friction": 0.1},
    "smile": {"step_size": 0.05, "thinning": 10, "num_warmup": 100, "friction": 0.15},
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.slow if m in ("psgld", "sgnht") else ()) for m in EXACT],
)
def test_gaussian_posterior(method, exact_posterior):
    """The posterior N(m, C) of Bayesian linear regression (Bishop 2006, equations 3.50 and
    3.51)."""
    samples = sampled(Linear(), (X, Y), method=method, num_chains=800, num_samples=15, seed=1,
                      **EXACT[method])  # fmt: skip
    mean, covariance = exact_posterior(X, Y)
    assert_moments(samples.latents["w"], mean, covariance)
    stats = samples.stats
    assert set(stats) >= {"step_size", "potential_energy", "configurational_temperature"}
    assert all(value.shape == (800, 15) for value in stats.values())
    # E[-(u - u_0)' grad log p] = P T and E[p'p] = P T, up to the step size.
    for name in ("configurational_temperature", "kinetic_temperature"):
        if name in stats:
            found, error = stats[name].mean(), bdl.diagnostics.mcse(stats[name][..., None])
            assert abs(found - 1) < 4 * error + 0.1
    assert ("kinetic_temperature" in stats) == (method in ("sghmc", "sgnht"))


@pytest.mark.parametrize("method", ["sgld", "sghmc", "sgnht", "smile"])
def test_temperature_scales_deviations_by_its_root(method, exact_posterior):
    """On a Normal posterior, from its mean and with the same noise, exactly."""
    mean, _ = exact_posterior(X, Y)
    runs = [
        sampled(Linear(), (X, Y), method=method, init={"w": mean}, temperature=t, num_chains=2)
        for t in (1.0, 0.04)
    ]
    warm, cold = (run.latents["w"] - mean for run in runs)
    assert torch.allclose(cold, 0.2 * warm, atol=1e-12) and warm.abs().max() > 0.05


# -------------------------------------------------------------------------------------- minibatches


def test_mean_of_the_minibatch_gradients_is_the_full_gradient():
    """E[(N / B) sum over a batch] (Welling & Teh 2011, equation 4)."""
    batches = MinibatchSource((X, Y), 4)
    program = Program(Linear(num_data=20), *batches.first[0])
    batches.check_scale(program)
    u = torch.randn(5, dtype=torch.float64)
    for _ in range(2):
        one_pass = [args for args, _ in batches.one_pass()]
        rows = torch.cat([batch[0] for batch in one_pass])
        assert torch.equal(rows.sort(0).values, X.sort(0).values)
        gradients = [
            torch.func.grad(lambda u, batch=batch: program.log_density(u, *batch))(u)
            for batch in one_pass
        ]
        full = torch.func.grad(Program(Linear(), X, Y).log_density)(u)
        assert torch.allclose(torch.stack(gradients).mean(0), full)
        assert not torch.allclose(gradients[0], full, rtol=0.01)


@pytest.mark.parametrize("kind, method", [("tuple", "sgld"), ("loader", "sghmc")])
def test_linear_regression_by_minibatches(method, kind, exact_posterior):
    """200 rows in batches of 50: a likelihood not scaled by N/B would give sds twice as wide."""
    x, y = linear_data(rows=200)
    model, options = Linear(num_data=200), {"batch_size": 50}
    data = (x, y)
    if kind == "loader":
        data, options = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True), {}
    options |= {"step_size": 0.01, "friction": 0.2} if kind == "loader" else {"step_size": 0.03}
    samples = sampled(model, data, method=method, num_chains=100, num_samples=25, num_warmup=100,
                      thinning=5, **options)  # fmt: skip
    mean, covariance = exact_posterior(x, y)
    draws = samples.latents["w"].flatten(0, 1)
    sd = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 0.2 * sd).all()
    assert (draws.std(0) / sd - 1).abs().max() < 0.2
    assert samples.info["batch_size"] == 50


def test_full_batch_as_a_tuple_a_list_of_one_and_a_dict():
    runs = [sampled(Linear(), data) for data in ((X, Y), [(X, Y)], {"x": X, "y": Y})]
    assert torch.equal(runs[0].latents["w"], runs[1].latents["w"])
    assert torch.equal(runs[0].latents["w"], runs[2].latents["w"])
    again = sampled(Linear(), (X, Y), batch_size=100)
    assert torch.equal(runs[0].latents["w"], again.latents["w"])


HALVES = [(X[:10], Y[:10]), (X[10:], Y[10:])]


def picking(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(5, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", 20, subsample_size=5) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=None if y is None else y[i])


@pytest.mark.parametrize(
    ("model", "data", "options", "error", "words"),
    [
        (Linear(), (X, Y), {"batch_size": 5}, ValueError, "5 rows as all data.*num_data=20"),
        (Linear(), HALVES, {}, ValueError, "10 rows as all data.*num_data=N"),
        (Linear(50), (X, Y), {"batch_size": 5}, ValueError, "states 50 data, but data holds 20"),
        (Linear(50), (X, Y), {}, ValueError, "states 50 data, but uses 20 of one batch"),
        (Linear(50), HALVES, {}, BdlWarning, "states 50 data, but a pass .* holds 20"),
        (picking, (X, Y), {}, ValueError, "uses 5 of one batch of 20.*without subsample_size"),
    ],
)
def test_programs_that_do_not_know_how_many_data_there_are(model, data, options, error, words):
    expect = pytest.warns if error is BdlWarning else pytest.raises
    with expect(error, match=words):
        sampled(model, data, **options)


def test_a_site_that_is_not_scaled_beside_one_that_is():
    def two(x, y=None, z=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, dtype=x.dtype), 1.0).to_event(1))
        rows = torch.arange(len(x))
        with pyro.plate("a", 20, subsample=rows):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        with pyro.plate("b", len(x)):
            pyro.sample("z", dist.Normal(x @ w, 0.5), obs=z)

    with pytest.raises(ValueError, match=r"observed site 'z' treats a minibatch of 5.*size=20"):
        sampled(two, (X, Y, Y), batch_size=5)


def test_latent_for_each_datum():
    class Local(nn.Module):
        def __init__(self, num_data):
            super().__init__()
            self.num_data = num_data

        def forward(self, y):
            with pyro.plate("data", self.num_data, subsample=torch.arange(len(y))):
                z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
                pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    y = torch.randn(6)
    assert sampled(Local(6), (y,)).latents["z"].shape == (1, 6, 6)
    expected = "'z' has a value for every row, which minibatches"
    with pytest.raises(UnsupportedProgramError, match=expected):
        sampled(Local(6), (y,), batch_size=2)


# ------------------------------------------------------------------------------ steps and schedules


@pytest.mark.parametrize("method", list(KERNELS))
def test_thinning_and_warmup_leave_out_draws_and_nothing_else(method):
    """The potential energy is that of the draw."""
    options = {"method": method, "num_chains": 2}
    every = sampled(Linear(), (X, Y), **options, num_warmup=4, num_samples=18, thinning=1)
    third = sampled(Linear(), (X, Y), **options, num_warmup=4, num_samples=6, thinning=3)
    assert torch.equal(third.latents["w"], every.latents["w"][:, 2::3])
    assert third.info["steps"] == every.info["steps"] == 22
    for name, value in third.stats.items():
        assert torch.equal(value, every.stats[name][:, 2::3])
    density = Program(Linear(), X, Y).log_joint({"w": third.latents["w"][1, 5]})
    assert -density.item() == pytest.approx(third.stats["potential_energy"][1, 5].item())


def test_cyclical_steps_explore_without_noise_and_draw_in_the_rest(exact_posterior, tmp_path):
    schedule = bdl.mcmc.Cyclical(0.1, period=10, exploration=0.55)
    start = {"w": torch.full((5,), 2.0, dtype=X.dtype)}
    samples = sampled(
        Linear(), (X, Y), method="sgld", step_size=schedule, init=start, num_chains=500,
        num_warmup=0, num_samples=8, thinning=1,
    )  # fmt: skip
    steps = [6, 7, 8, 9, 16, 17, 18, 19]
    exact = torch.tensor([schedule(step) for step in steps], dtype=X.dtype)
    assert torch.allclose(samples.stats["step_size"], exact.expand(500, 8))
    mean, covariance = exact_posterior(X, Y)
    precision, position = torch.linalg.inv(covariance), start["w"]
    for step in range(7):
        position = position + schedule(step) * precision @ (mean - position)
    noise = (samples.latents["w"][:, 0] - position) / math.sqrt(2 * schedule(6))
    assert noise.mean().abs() < 4 / 2500**0.5 and abs(noise.var() - 1) < 4 * (2 / 2500) ** 0.5
    assert samples.info["steps"] == 20
    loaded = bdl.Samples.load(samples.save(tmp_path / "draws.safetensors"))
    assert loaded.info == samples.info and "Cyclical(peak=0.1" in str(loaded.info["options"])


@pytest.mark.parametrize("method", list(KERNELS))
def test_same_seed_same_draws(method):
    runs = [
        sampled(Linear(num_data=20), (X, Y), method=method, seed=seed, num_chains=2,
                batch_size=5)
        for seed in (5, 5, 6)
    ]  # fmt: skip
    first, again, other = (run.latents["w"] for run in runs)
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()
    assert not torch.isclose(first[0], first[1]).any()


def test_suggested_step_size_is_a_fraction_of_the_inverse_curvature():
    """eps = fraction / lambda, lambda the largest eigenvalue of the Hessian."""
    at = {"w": torch.zeros(5, dtype=X.dtype)}
    step = bdl.mcmc.suggest_step_size(Linear(), (X, Y), at=at, fraction=0.3)
    assert step == pytest.approx(0.3 / 4.0, rel=0.01)
    part = bdl.mcmc.suggest_step_size(Linear(num_data=20), (X, Y), at=at, batch_size=5)
    gram = 4 * X[:5].T @ X[:5] / 0.25 + torch.eye(5)
    assert part == pytest.approx(0.1 / torch.linalg.eigvalsh(gram)[-1].item(), rel=0.01)
    with pytest.raises(ValueError, match="fraction must be positive"):
        bdl.mcmc.suggest_step_size(Linear(), (X, Y), at=at, fraction=0.0)


def test_suggested_step_size_reaches_through_attention():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    network = bdl.bayesianize(attention)

    def model(x, y=None):
        mean = network(x, x, x, need_weights=False)[0].sum((1, 2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    at = {name: value.detach() for name, value in attention.named_parameters()}
    y = torch.ones(6, dtype=torch.float64)
    step = bdl.mcmc.suggest_step_size(model, (x, y), at=at, fraction=1.0)

    program = Program(model, x, y)
    with vmappable():
        hessian = torch.func.hessian(program.log_density)(program.unconstrain(at))
    largest = torch.linalg.eigvalsh(hessian).abs().max().item()
    assert step == pytest.approx(1 / largest, rel=0.01)


# -------------------------------------------------------------------------------------- how it ends


def test_diverging_step_size_stops_and_keeps_the_draws_before_it():
    options = {"step_size": lambda step: 0.01 if step < 30 else 1e4, "thinning": 3}
    with pytest.warns(BdlWarning, match=r"chain \d diverged at step 3\d: use a smaller step_size"):
        samples = sampled(Linear(), (X, Y), **options, num_warmup=0, num_samples=50, num_chains=3)
    assert samples.num_draws == 10
    assert samples.latents["w"].abs().max() < 10
    assert "diverged" in samples.info["failure"] and samples.info["steps"] >= 31
    with pytest.raises(ValueError, match=r"diverged at step 3\d.*no draw before it"):
        sampled(Linear(), (X, Y), **options, num_warmup=40, num_samples=50)


def test_batch_that_is_not_finite_is_named():
    bad = Y.clone()
    bad[12] = math.nan
    batches = [(X[:5], Y[:5]), (X[5:10], Y[5:10]), (X[10:15], bad[10:15]), (X[15:], Y[15:])]
    options = {"num_warmup": 0, "thinning": 1}
    with pytest.warns(BdlWarning, match="a batch at step 2 is bad: y holds NaN .* in rows 2"):
        samples = sampled(Linear(num_data=20), batches, **options)
    assert samples.num_draws == 1
    with pytest.raises(ValueError, match="y holds NaN or infinity in rows 12"):
        sampled(Linear(num_data=20), (X, bad), batch_size=5)


def interrupted_at(step):
    def step_size(now):
        if now == step:
            raise KeyboardInterrupt
        return 0.01

    return step_size


def test_interrupt_keeps_the_draws_made():
    options = {"num_samples": 50, "num_warmup": 5, "thinning": 3, "num_chains": 2}
    whole = sampled(Linear(), (X, Y), **options)
    with pytest.warns(BdlWarning, match="interrupted: 4 of 50 draws per chain were made"):
        samples = sampled(Linear(), (X, Y), **options, step_size=interrupted_at(18))
    assert torch.equal(samples.latents["w"], whole.latents["w"][:, :4])
    assert samples.info["interrupted"] and samples.stats["potential_energy"].shape == (2, 4)
    with pytest.raises(KeyboardInterrupt):
        sampled(Linear(), (X, Y), **options, step_size=interrupted_at(7))


# ------------------------------------------------------------------------------ networks and starts


def regression(network=None, rows=12):
    torch.manual_seed(0)
    network = network or nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return bdl.models.Regression(bdl.bayesianize(network)), torch.randn(rows, 3), torch.randn(rows)


def test_each_chain_starts_from_its_own_draw_of_samples():
    starts = torch.randn(4, 1, 5, dtype=X.dtype)
    samples = sampled(
        Linear(), (X, Y), init=bdl.Samples({"w": starts}), num_chains=4, step_size=1e-20
    )
    assert torch.allclose(samples.latents["w"][:, 0], starts[:, 0], atol=1e-6)


def test_subset_moves_and_the_rest_stays(exact_posterior):
    model, at = Linear(), torch.linspace(-1, 1, 5, dtype=X.dtype)
    source = bdl.guides.AutoSubnetwork(model, init_loc_fn=init_to_value(values={"w": at}))
    source.prototype(X, Y)
    guide = SubsetNormal(source, Subset(source.layout, torch.tensor([1, 3])), 0.1)
    samples = sampled(model, (X, Y), subset=guide, num_chains=800, num_samples=15, **EXACT["sghmc"])
    draws = samples.latents["w"]
    fixed = torch.tensor([0, 2, 4])
    assert torch.equal(draws[..., fixed], at[fixed].expand(800, 15, 3))
    mean, covariance = exact_posterior(X, Y)
    precision, chosen = torch.linalg.inv(covariance), torch.tensor([1, 3])
    inner = torch.linalg.inv(precision[chosen][:, chosen])
    coupled = precision[chosen][:, fixed] @ (at - mean)[fixed]
    assert_moments(draws[..., chosen], mean[chosen] - inner @ coupled, inner)


# ---------------------------------------------------------------------------------------- bad input


def own_data():
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Normal(w, 1.0), obs=Y)


@pytest.mark.parametrize(
    ("data", "wrong", "error", "words"),
    [
        ((X, Y), {"step_size": 0.0}, ValueError, "step_size must be positive and finite, got 0"),
        ((X, Y), {"step_size": math.nan}, ValueError, "step_size must be positive"),
        (
            (X, Y),
            {"step_size": lambda step: -1.0},
            ValueError,
            "step_size at step 0 must be positive",
        ),
        ((X, Y), {"temperature": 0.0}, ValueError, "temperature must be positive"),
        ((X, Y), {"num_samples": 0}, ValueError, "num_samples must be at least 1"),
        ((X, Y), {"num_samples": 10**13}, MemoryError, "keep fewer draws"),
        ((X, Y), {"thinning": 0}, ValueError, "thinning must be at least 1"),
        ((X, Y), {"method": "psgld", "num_warmup": 1}, ValueError, "num_warmup must be at least 2"),
        ((X, Y), {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ((X,), {}, UnsupportedProgramError, "no observed site"),
        (HALVES, {"batch_size": 5}, ValueError, "batch_size is for data given as"),
        ((X, Y[:3]), {"batch_size": 5}, ValueError, "has 3 rows beside one of 20"),
    ],
)
def test_refusals(data, wrong, error, words):
    with pytest.raises(error, match=words):
        sampled(Linear(), data, **wrong)


def test_a_program_without_arguments():
    with pytest.raises(ValueError, match=r"holds no batch.*\[\(\)\] for a program without"):
        sampled(own_data, ())
    assert sampled(own_data, [()], step_size=1e-3).latents["w"].shape == (1, 6)


@pytest.mark.parametrize("method", list(KERNELS))
def test_on_another_device(method, device):
    x, y = (second_device.moved(value, device) for value in linear_data())

    def program(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(5).to(x), 1.0).to_event(1))
        with pyro.plate("data", 20, subsample=torch.arange(len(x), device=x.device)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    batch = 10
    runs = [
        sampled(program, (x, y), method=method, num_chains=2, batch_size=batch) for _ in range(2)
    ]
    assert runs[0].latents["w"].device.type == device.type and runs[0].latents["w"].isfinite().all()
    assert torch.equal(runs[0].latents["w"], runs[1].latents["w"])


def test_a_step_size_that_diverges_is_halved_in_the_warmup():
    """Curvature 100: Langevin dynamics is stable below 0.02, and 0.5 is halved five times."""

    def narrow(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 0.1).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * 0 + w.sum() * 0, 1.0), obs=y)

    data = torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    options = {"step_size": 0.5, "method": "sgld", "num_samples": 400, "num_warmup": 300}
    options["init"] = {"w": torch.zeros(2).double()}
    samples = sampled(narrow, data, adapt_step_size=True, **options)
    assert samples.info["step_size_factor"] == 1 / 32
    assert (samples.stats["step_size"] == 0.5 / 32).all()
    assert samples.num_draws == 400
    with pytest.raises(ValueError, match="diverged"):
        sampled(narrow, data, **options)


@pytest.mark.parametrize("points", [(0.0, 1.0), (1.0, 0.0)])
def test_a_curvature_that_is_not_finite_gives_no_step_size(points):
    """The second derivative of |w|^1.5 at 0 is inf * 0. max(c, nan) is c, and max(nan, c) is NaN:
    whatever the order, the point is named."""

    def program(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        pyro.factor("power", -w.abs().pow(1.5))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    at = bdl.Samples({"w": torch.tensor([points], dtype=X.dtype)}, {}, {})
    with pytest.raises(ValueError, match=rf"at point {points.index(0.0)} .* is nan"):
        bdl.mcmc.suggest_step_size(program, (X, Y), at=at, num_points=2)
