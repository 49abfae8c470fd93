"""IVON and VOGN against exact optima of mean-field, and what they keep and refuse."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from pyro import poutine
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

import pyro_bdl as bdl
from pyro_bdl.elbo import Step, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO, InSVI

# The optimizer, its ELBO, and draws for a quiet gradient
PAIRS = {
    "ivon": (IVON, TemperedTraceMeanField_ELBO),
    "ivon, sampled KL": (IVON, TemperedTrace_ELBO),
    "vogn": (VOGN, functools.partial(GaussNewton_ELBO, curvature="ggn")),
}
DRAWS = {IVON: 8, VOGN: 1}
N, P, NOISE = 40, 3, 0.5


@pytest.fixture(params=PAIRS, ids=list(PAIRS))
def pair(request):
    return PAIRS[request.param]


def _linear(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(N, P, dtype=dtype) @ torch.tensor(
        [[1.0, 0.4, 0.0], [0.0, 1.0, -0.3], [0.0, 0.0, 0.5]], dtype=dtype
    )
    y = x.sum(1) + NOISE * torch.randn(N, dtype=dtype)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(P, dtype=dtype), 1.0).to_event(1))
        mean = x @ w
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, NOISE), obs=y)

    return model, x, y


def _optimum(x, y, temperature=1.0):
    """Mean and precisions of the best diagonal Normal: those of the tempered posterior."""
    exact = Conjugate(x, y, NOISE, eta=temperature)
    return exact.mean, exact.precision.diagonal()


def _run(optimizer, loss, guide, x, y, steps):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        step = loss.take_step(x, y)
        step.backward()
        optimizer.step(step)
        schedule.step()


# How IVON's estimate of the Hessian loses the noise of a large gradient


@pytest.mark.parametrize("estimator", [None, "flipout"])
def test_the_control_variate_is_the_noise_of_the_draw(estimator):
    """E[g e] = 0 for standard Normal noise e that is independent of g."""
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    optimizer = IVON(guide)
    loss = TemperedTraceMeanField_ELBO(num_particles=3, estimator=estimator)(model, guide)
    for _ in range(2):
        optimizer.zero_grad()
        step = loss.take_step(x, y)
        step.backward()
        draw, scale = step.draw, guide.scale.detach()
        assert (draw is None) == (estimator is not None)
        noise = None if draw is None else (draw - guide.loc.detach()) / scale
        gradient = guide.scale_unconstrained.grad / -torch.expm1(-scale)
        mean = optimizer.state[guide.loc].get("momentum", torch.zeros(P)) / (1 - 0.9)
        optimizer.step(step)
    steadied = gradient if noise is None else gradient - mean * noise
    # The precision that the gradient asks for, and the step toward it, written out.
    precision = scale.square().reciprocal()
    change = 0.01 * ((steadied + 1 / scale) / scale - precision)
    expected = precision + change + change.square() / (2 * precision)
    torch.testing.assert_close(guide.scale.detach(), expected.rsqrt())


# Gradients that are added up over micro-batches


def _two_steps(pair, batches, seeds, particles=1):
    """Location and scale after two steps, each over batches of rows and seeds of their noise."""
    optimizer, elbo = pair
    model, *data = _linear()
    guide = AutoMeanField(model).prototype(*data)
    mover, loss = optimizer(guide), elbo(num_particles=particles)(model, guide)
    loss(*data)  # the first call also checks the program, and draws for it
    for number in range(2):
        mover.zero_grad()
        for rows, seed in zip(batches, seeds, strict=True):
            if seed is not None:
                torch.manual_seed(10 * number + seed)
            step = loss.take_step(*(value[rows] for value in data))
            step.backward(1 / len(batches))
            mover.add(step)
        mover.step()
    return guide.loc.detach(), guide.scale.detach()


def test_micro_batches_at_one_noise_are_one_batch(pair):
    parts = [slice(start, start + N // 4) for start in range(0, N, N // 4)]
    whole = _two_steps(pair, [slice(None)], [1])
    torch.testing.assert_close(_two_steps(pair, parts, [1, 1, 1, 1]), whole, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["ivon", "ivon, sampled KL"])
def test_micro_batches_with_noise_of_their_own_are_particles(name):
    """The control variate is that of the mean noise: the second step has a momentum."""
    everything = [slice(None)] * 4
    several = _two_steps(PAIRS[name], everything, [1, None, None, None])
    at_once = _two_steps(PAIRS[name], everything[:1], [1], particles=4)
    torch.testing.assert_close(several, at_once, rtol=1e-10, atol=0)


def test_ivon_by_hand_under_autocast_and_accumulation():
    """Products in bfloat16, all else in float32."""
    model, x, y = _linear(torch.float32)
    guide = AutoMeanField(model).prototype(x, y)
    loc, scale = guide.loc.detach().clone(), guide.scale.detach().clone()
    optimizer, loss = IVON(guide), TemperedTraceMeanField_ELBO()(model, guide)
    loss(x, y)
    momentum, parts = torch.zeros(P), [slice(0, N // 2), slice(N // 2, N)]
    for step in range(1, 3):
        optimizer.zero_grad()
        for rows in parts:
            torch.manual_seed(step + rows.stop)
            with torch.autocast("cpu", torch.bfloat16):
                part = loss.take_step(x[rows], y[rows])
            part.backward(0.5)
            optimizer.add(part)
        optimizer.step()
        leaves, noises, total = (loc.requires_grad_(), scale.requires_grad_()), [], 0.0
        for rows in parts:
            torch.manual_seed(step + rows.stop)
            noises.append(torch.randn(P))
            mean = (x[rows].bfloat16() @ (loc + scale * noises[-1]).bfloat16()).float()
            kl = 0.5 * (loc.square() + scale.square() - 1).sum() - scale.log().sum()
            errors = ((y[rows] - mean) / NOISE).square().sum()
            total = total + (errors + kl) / 2  # N / B = 2 times the rows' half squares
        of_loc, of_scale = torch.autograd.grad(total, leaves)
        loc, scale = loc.detach(), scale.detach()
        average = momentum / (1 - 0.9 ** max(1, step - 1))
        change = (of_scale - average * (sum(noises) / 2)) * scale * 0.01
        scale = scale * (1 + change + change.square() / 2).rsqrt()
        momentum = 0.9 * momentum + 0.1 * of_loc
        deviations = (momentum / (1 - 0.9**step) * scale).clamp(-10, 10)
        loc = loc - 0.1 * deviations * scale
    assert guide.loc.dtype == guide.scale.dtype == torch.float32
    torch.testing.assert_close(guide.loc.detach(), loc, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(guide.scale.detach(), scale, rtol=1e-5, atol=0)


# Where they arrive


@pytest.mark.parametrize(
    ("name", "options"), [("vogn", {"temperature": 0.1}), ("ivon", {"cold_temperature": 0.1})]
)
def test_the_optimum_of_mean_field_is_reached(name, options):
    """The optimum has precision diag(L) (Bishop 2006, section 10.1.2), in cold mode over T."""
    optimizer, elbo = PAIRS[name]
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    torch.manual_seed(1)
    loss = elbo(num_particles=DRAWS[optimizer], **options)(model, guide)
    _run(optimizer(guide), loss, guide, x, y, 600)
    mean, precision = _optimum(x, y, options.get("temperature", 1.0))
    sd = (options.get("cold_temperature", 1.0) / precision).sqrt()
    assert ((guide.loc - mean).abs() < 0.3 * sd).all()  # VOGN has one draw a step: sd 0.1
    # The last hundred steps' draws average the precision: IVON's estimate has a relative sd of
    # about sqrt(2 / 800 (1 + correlations)), VOGN's none at all.
    torch.testing.assert_close(guide.scale.detach(), sd, rtol=0.1, atol=0)


def test_vogns_default_is_at_rest_at_the_exact_precision():
    """Squares of drawn targets average to x' x / sigma^2; those of the observed ones do not."""
    model, x, y = _linear()
    mean, precision = _optimum(x, y)
    guide = AutoMeanField(model, init_loc_fn=lambda site: mean).prototype(x, y)
    guide.scale = precision.rsqrt()
    squares = (y - x @ mean).square() + x.square() @ precision.reciprocal()  # E_q of residuals
    observed = (1 + squares @ x.square() / NOISE**4) / precision - 1
    assert observed.min() < -0.2
    exact = torch.zeros_like(observed)
    for expected, options in ((exact, {}), (observed, {"curvature": "empirical-fisher"})):
        torch.manual_seed(1)
        loss = GaussNewton_ELBO(num_particles=50, **options)(model, guide)(x, y)
        (free,) = torch.autograd.grad(loss, [guide.scale_unconstrained])
        change = free / -torch.expm1(-guide.scale) * guide.scale
        # A draw of N = 40 targets has a relative sd of about 0.4, and there are 50 of them.
        torch.testing.assert_close(change.detach(), expected, rtol=0, atol=0.15)


# The Gauss-Newton gradient


def _net_model(num_data=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    noise = PyroParam(torch.tensor(0.4, dtype=torch.float64), constraints.positive)
    return bdl.models.Regression(bdl.bayesianize(net), noise=noise, num_data=num_data)


@pytest.mark.parametrize("steps", [1, 2])
def test_its_value_and_other_gradients_are_the_elbos(steps):
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = _net_model(num_data=30)
    guide = AutoMeanField(model).prototype(x, y)
    found = {}
    for kind in (TemperedTraceMeanField_ELBO, GaussNewton_ELBO):
        loss = kind(0.5, num_particles=1)(model, guide)
        for _ in range(steps):  # the first finds out whether one run of the program is enough
            torch.manual_seed(1)
            value = loss(x, y)
        names = [name for name, _ in loss.named_parameters() if "scale_unc" not in name]
        chosen = [p for name, p in loss.named_parameters() if name in names]
        assert any("noise" in name for name in names)
        found[kind] = value, torch.autograd.grad(value, chosen)
    (a, b) = found.values()
    torch.testing.assert_close(a[0], b[0])
    for first, second in zip(a[1], b[1], strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("constrained", [False, True])
def test_the_gradient_in_the_scales_is_by_squares(constrained):
    """sum_n g_n^2 s (Khan et al. 2018, section 3.1; Osawa et al. 2019)."""
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    noise = dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)) if constrained else 0.4
    model = _net_model(30)
    model = bdl.models.Regression(model.network, noise=noise, num_data=30)
    guide = AutoMeanField(model).prototype(x, y)
    loss = GaussNewton_ELBO(curvature="empirical-fisher")(model, guide)
    loss(x, y)  # the first call also checks the program, and draws for it
    torch.manual_seed(1)
    (found,) = torch.autograd.grad(loss(x, y), [guide.scale_unconstrained])
    program = bdl.Program(model, x, y)
    torch.manual_seed(1)
    vector = guide.sample_vectors(1)[0].detach()
    scale = guide.scale.detach().clone().requires_grad_()
    squares = torch.zeros_like(vector)
    for n in range(6):
        gradient = torch.func.grad(
            lambda u, n=n: program.log_likelihood(program.constrain(u)[0], x, y)["y"][n]
        )(vector)
        squares += gradient.square() * 30 / 6
    latents, log_det = program.constrain(
        guide.loc.detach() + scale * ((vector - guide.loc) / scale).detach()
    )
    run = program.run(latents, x, y)
    with guide.at_parameters({"loc": guide.loc.detach(), "scale": scale}):
        kl = guide.kl(program.unconstrain(latents), log_det, run)
    (by_kl,) = torch.autograd.grad(kl, scale)
    expected = (squares * scale + by_kl) * torch.sigmoid(guide.scale_unconstrained)
    torch.testing.assert_close(found, expected.detach())


def test_each_observed_site_has_its_own_scale_of_the_data():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
        pyro.sample("known", dist.Normal(w[0], 0.5), obs=torch.tensor(0.3, dtype=x.dtype))
        with pyro.plate("data", 40, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x * w[1], 1.0), obs=y)

    x = torch.ones(4, dtype=torch.float64)
    guide = AutoMeanField(model).prototype(x, 0 * x)
    loss = GaussNewton_ELBO(curvature="ggn")(model, guide)(x, 0 * x)
    (found,) = torch.autograd.grad(loss, [guide.scale_unconstrained])
    scale = guide.scale.detach()
    precision = torch.tensor([1 / 0.5**2, 40.0], dtype=torch.float64) + 1.0
    expected = (precision * scale - 1 / scale) * torch.sigmoid(guide.scale_unconstrained)
    torch.testing.assert_close(found, expected.detach())


def hierarchical(x, y, weight=1.0):
    zero = torch.zeros((), dtype=x.dtype)
    width = pyro.sample("width", dist.LogNormal(zero, 0.5))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), width).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(zero, 0.5))
    seen = torch.arange(len(x)) > 1
    with pyro.plate("data", 30, subsample_size=len(x)), poutine.scale(scale=weight):
        pyro.sample("y", dist.Normal(x @ w, noise).mask(seen), obs=y)


def tempered(x, y):
    hierarchical(x, y, weight=0.3)


def of_two_sites(x, y):
    hierarchical(x, y)
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
    with pyro.plate("counts", 30, subsample_size=len(x)):
        pyro.sample("n", dist.Poisson((x[:, 0] * b).exp()), obs=y.abs().round())


@pytest.mark.parametrize("model", [hierarchical, tempered, of_two_sites])
@pytest.mark.parametrize("cold", [False, True])
def test_one_run_gives_what_two_give(model, cold):
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    guide = AutoMeanField(model).prototype(x, y)
    temperature = {"cold_temperature": 0.5} if cold else {"temperature": 0.5}
    elbo = GaussNewton_ELBO(**temperature, rows="together")  # the mask is not an argument
    loss, found = elbo(model, guide), []
    for passes in (0, 5):  # in the first pass over the data, with two runs, and after it
        for _ in range(passes):
            loss(x, y)
        torch.manual_seed(2)
        value = loss(x, y)
        found.append((value, *torch.autograd.grad(value, [guide.loc, guide.scale_unconstrained])))
    for two, one in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


class _Counted(nn.Linear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_program_in_evaluation_mode_runs_once(rate):
    x, y = torch.randn(6, 2), torch.randn(6)
    net = nn.Sequential(_Counted(2, 8), nn.Dropout(rate), nn.Tanh(), nn.Linear(8, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=dist.HalfNormal(1.0), num_data=30)
    guide = AutoMeanField(model).prototype(x, y)
    loss, plain = GaussNewton_ELBO()(model, guide), TemperedTraceMeanField_ELBO()(model, guide)
    for _ in range(5):  # the first pass over the data
        loss(x, y), plain(x, y)
    for mode, runs in ((True, 2), (False, 1)):
        model.train(mode)
        loss(x, y)
        torch.manual_seed(1)
        _Counted.calls = 0
        value = loss(x, y)
        assert _Counted.calls == runs
        torch.manual_seed(1)
        torch.testing.assert_close(value, plain(x, y))


class _Centered(nn.Module):
    """Statistics of the batch, in training and for large inputs alone."""

    def forward(self, x):
        return x - x.mean(0) if self.training and x.abs().max() > 3 else x


def test_a_module_that_computes_otherwise_late_in_training():
    """Its inputs are large only when the weights have become so, after the first pass."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 2).clamp(-2, 2), torch.randn(12)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), _Centered(), nn.Linear(2, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5, num_data=12)
    guide = AutoMeanField(model, init_scale=1e-3).prototype(x, y)
    loss, plain = GaussNewton_ELBO()(model, guide), TemperedTraceMeanField_ELBO()(model, guide)
    with torch.no_grad():
        guide.loc.fill_(0.1)
    for number in range(12):
        values = []
        for elbo in (loss, plain):
            torch.manual_seed(number)
            values.append(elbo(x[number % 2 :: 2], y[number % 2 :: 2]))
        torch.testing.assert_close(*values)
        with torch.no_grad():
            guide.loc.fill_(0.1 if number < 8 else 10.0)


def test_running_statistics_move_once_a_step():
    x, y = torch.randn(6, 2), torch.randn(6)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    bnn = bdl.bayesianize(net)
    model = bdl.models.Regression(bnn, noise=0.5, num_data=6)
    guide = AutoMeanField(model).prototype(x, y)
    loss = GaussNewton_ELBO()(model, guide)
    (norm,) = (m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    for _ in range(3):
        before = int(norm.num_batches_tracked)
        loss(x, y).backward()
        assert int(norm.num_batches_tracked) == before + 1


# In the loop, saved and restored


def test_pyros_svi_takes_them(pair):
    optimizer, elbo = pair
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    svi = InSVI(model, guide, optimizer(guide), elbo(num_particles=2))
    losses = [svi.step(x, y) for _ in range(40)]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize("elbo", [TemperedTraceMeanField_ELBO, bdl.elbo.CompiledELBO])
def test_the_temperature_is_that_of_the_elbos_step(elbo):
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    loss = elbo(lambda step: 0.5 / (step + 1))(model, guide)
    for step in range(3):
        assert loss.take_step(x, y).temperature == 0.5 / (step + 1)


def test_a_finite_gradient_whose_sum_overflows():
    model, x, y = _linear(torch.float32)
    guide = AutoMeanField(model).prototype(x, y)
    optimizer, before = IVON(guide), guide.loc.detach().clone()
    step = TemperedTraceMeanField_ELBO().take_step(model, guide, x, y)
    step.backward()
    guide.loc.grad.fill_(3e38)
    optimizer.step(step)
    assert torch.isfinite(guide.loc).all() and (guide.loc < before).all()


def test_svi_goes_on_after_a_step_that_failed():
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    svi = InSVI(model, guide, IVON(guide), TemperedTraceMeanField_ELBO())
    overflow = guide.loc.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(RuntimeError, match="is not finite"):
        svi.step(x, y)
    overflow.remove()
    before = guide.loc.detach().clone()
    assert math.isfinite(svi.step(x, y))
    assert not torch.equal(guide.loc, before)


def test_a_programs_own_parameters_need_an_optimizer_too():
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = _net_model()
    guide = AutoMeanField(model).prototype(x, y)
    svi = InSVI(model, guide, IVON(guide), TemperedTraceMeanField_ELBO())
    with pytest.raises(ValueError, match="1 parameters are not the optimizer's"):
        svi.step(x, y)
    others = pyro.optim.Adam({"lr": 0.01})
    svi = InSVI(model, guide, IVON(guide), TemperedTraceMeanField_ELBO(), others)
    before = model.noise.item()
    svi.step(x, y)
    assert model.noise.item() != before


def test_the_precision_is_averaged_over_more_steps_as_the_learning_rate_falls(pair):
    optimizer, elbo = pair
    model, x, y = _linear()

    def growth(*rates):
        """The relative change of the precision in the last of some steps."""
        torch.manual_seed(0)
        guide = AutoMeanField(model).prototype(x, y)
        mover, loss = optimizer(guide), elbo()(model, guide)
        loss(x, y)  # the first call also checks the program, and draws for it
        torch.manual_seed(0)
        for lr in rates:
            before = guide.scale.detach()
            mover.param_groups[0]["lr"] = lr
            mover.zero_grad()
            step = loss.take_step(x, y)
            step.backward()
            mover.step(step)
        return (before / guide.scale.detach()).square() - 1.0

    torch.testing.assert_close(growth(0.02), growth(0.1))  # a warm-up has the whole rate
    whole, less = growth(0.1, 0.1), growth(0.1, 0.03)
    torch.testing.assert_close(less, 0.3**0.5 * whole, rtol=0.05, atol=1e-3)


def test_steps_follow_the_learning_rate_and_the_clip():
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    optimizer = IVON(guide, lr=0.01, clip=2.0)
    before = guide.loc.detach().clone()
    step = TemperedTraceMeanField_ELBO().take_step(model, guide, x, y)
    step.backward(1e6)
    optimizer.step(step)
    assert ((guide.loc - before).abs() <= 0.01 * 2.0 * guide.scale * (1 + 1e-6)).all()


# What goes wrong


def test_a_guide_is_left_as_it_was_where_something_fails(pair):
    optimizer, elbo = pair
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    optimizer = optimizer(guide)
    loss = elbo()(model, guide)
    _run(optimizer, loss, guide, x, y, 3)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    state = optimizer.state_dict()["state"][0]["step"]
    step = loss.take_step(x, y)
    step.backward()
    guide.loc.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="gradient at step 4 is not finite"):
        optimizer.step(step)
    with pytest.raises(ValueError, match="y holds NaN or infinity"):
        elbo()(model, guide)(x, y / 0)
    for name, value in guide.state_dict().items():
        assert torch.equal(value, before[name])
    assert optimizer.state_dict()["state"][0]["step"] == state


def _guide(model, x, y, **options):
    return AutoMeanField(model, **options).prototype(x, y)


_VECTORS = "a separate location and scale for each weight"
REFUSALS = {
    "no parameters": (RuntimeError, "no parameters yet", lambda *p: IVON(AutoMeanField(p[0]))),
    "lr": (ValueError, "lr must lie in \\(0, inf], got 0", lambda *p: IVON(_guide(*p), lr=0)),
    "betas": (
        ValueError, r"betas\[1\] must lie in \[0, 1\), got 1.0",
        lambda *p: VOGN(_guide(*p), betas=(0.9, 1.0)),
    ),
    "guide": (
        TypeError, "moves an AutoMeanField's vectors, got AutoLaplaceGGN",
        lambda *p: IVON(AutoLaplaceGGN(p[0]).prototype(*p[1:])),
    ),
    "layers": (ValueError, _VECTORS, lambda *p: IVON(_guide(*p, scale="per-layer"))),
    "fixed": (ValueError, _VECTORS, lambda *p: IVON(_guide(*p, train_loc=False))),
    "bounded": (ValueError, "without max_scale", lambda *p: VOGN(_guide(*p, max_scale=0.5))),
    "step": (
        RuntimeError, r"call step.backward\(\) before the step",
        lambda *p: IVON(_guide(*p)).step(Step(torch.zeros(()))),
    ),
    "elbo": (
        TypeError, "GaussNewton_ELBO is for an AutoMeanField",
        lambda *p: GaussNewton_ELBO()(p[0], AutoLaplaceGGN(p[0]).prototype(*p[1:]))(*p[1:]),
    ),
    "group": (
        ValueError, "IVON moves a guide's location and scale and no other",
        lambda *p: IVON(_guide(*p)).add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused(case):
    error, words, call = REFUSALS[case]
    with pytest.raises(error, match=words):
        call(*_linear())


def test_vogn_without_its_elbo_says_so():
    model, x, y = _linear()
    guide = AutoMeanField(model).prototype(x, y)
    loss = TemperedTraceMeanField_ELBO()(model, guide)
    with pytest.raises(RuntimeError, match="train VOGN with the loss of a GaussNewton_ELBO"):
        _run(VOGN(guide), loss, guide, x, y, 100)


def test_on_another_device(pair, device):
    optimizer, elbo = pair
    x, y = torch.randn(6, 2).to(device), torch.randn(6).to(device)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.4).to(device)
    guide = AutoMeanField(model).prototype(x, y)
    _run(optimizer(guide), elbo()(model, guide), guide, x, y, 5)
    assert guide.loc.device.type == device.type
