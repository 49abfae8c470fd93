"""SWAG: the moments of the snapshots, the density, what is refused, MultiSWAG."""

import copy
import io
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoMultiSWAG, AutoSWAG
from pyro_bdl.training import collect_swag, estimate_elbo, train


def problem(rows=40, dtype=torch.float64, num_data=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator, dtype=dtype)
    y = x[:, 0].sin() + 0.1 * torch.randn(rows, generator=generator, dtype=dtype)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return bdl.models.Regression(bdl.bayesianize(net), num_data=num_data), x, y


def put_through(guide, vectors):
    """Snapshots at given points."""
    (parameter,) = guide.parameters()
    for vector in vectors:
        parameter.data.copy_(vector)
        guide.collect()
    return guide


@pytest.fixture
def walked():
    """A guide of rank 6, and the 9 points at which its snapshots were taken."""
    model, x, y = problem()
    guide = AutoSWAG(model, rank=6).prototype(x, y)
    vectors = torch.randn(9, guide.layout.size, dtype=torch.float64) + 3.0
    return put_through(guide, vectors), vectors


def covariance(guide):
    """From the guide's own parts."""
    return torch.diag(guide.diagonal) + guide.factor.mT @ guide.factor


# Moments


def test_of_more_snapshots_the_last_make_the_low_rank_part(walked):
    """1/2 (diag(v) + D' D / (K - 1)) (Maddox et al. 2019, equation 1)."""
    guide, vectors = walked
    swag = guide.swag_approximation(scale=0.5)
    mean = vectors.mean(0)
    deviations = vectors[-6:] - mean
    expected = 0.25 * (torch.diag(vectors.var(0)) + deviations.mT @ deviations / 5)
    torch.testing.assert_close(covariance(swag), expected)
    torch.testing.assert_close(swag.variances(), expected.diagonal())
    fewer = guide.swag_approximation(rank=3)
    deviations = vectors[-3:] - mean
    expected = 0.5 * (torch.diag(vectors.var(0)) + deviations.mT @ deviations / 2)
    torch.testing.assert_close(covariance(fewer), expected)


def test_moments_of_small_steps_far_from_zero_in_single_precision():
    """The sum of squares minus the squared mean would lose all digits here."""
    model, x, y = problem(dtype=torch.float32)
    guide = AutoSWAG(model, rank=0).prototype(x, y)
    steps = torch.randn(30, guide.layout.size, dtype=torch.float64)
    put_through(guide, 100.0 + 1e-3 * steps)
    swag = guide.swag_approximation(rank=0)
    kept = (100.0 + 1e-3 * steps).float().double()  # what single precision holds of them
    torch.testing.assert_close(swag.variances().double(), kept.var(0), rtol=2e-2, atol=0)


@pytest.mark.parametrize("rank", [6, 0])
def test_the_density_is_that_of_the_dense_normal(walked, rank):
    guide, vectors = walked
    swag = guide.swag_approximation(rank=rank, scale=0.7)
    if not rank:  # SWAG-diagonal (Maddox et al. 2019, section 3.2)
        torch.testing.assert_close(covariance(swag), 0.7 * torch.diag(vectors.var(0)))
    dense = torch.distributions.MultivariateNormal(swag.location(), covariance(swag))
    for vector in swag.sample_vectors(3):
        log_det = swag.layout.constrain(vector)[1]
        expected = dense.log_prob(vector)
        torch.testing.assert_close(swag.log_density(vector, log_det), expected - log_det)
        torch.testing.assert_close(swag.get_posterior().log_prob(vector), expected)
    draws = swag.sample_vectors(4)
    by_vmap = torch.vmap(lambda u: swag.log_density(u, u.new_zeros(())))(draws)
    torch.testing.assert_close(by_vmap, dense.log_prob(draws))


def test_a_weight_that_no_snapshot_moved(walked):
    guide, vectors = walked
    vectors[:, 3] = 1.5
    guide.discard()
    swag = put_through(guide, vectors).swag_approximation()
    assert not swag.has_density
    draws = swag.sample_vectors(50)
    torch.testing.assert_close(draws[:, 3], torch.full((50,), 1.5, dtype=torch.float64))
    assert torch.isfinite(draws).all()
    for call in (lambda: swag.log_density(draws[0], draws.new_zeros(())), swag.get_posterior):
        with pytest.raises(ValueError, match=r"variance of 1 of \d+ numbers is zero.*'0.weight'"):
            call()


# In use


def test_saved_and_loaded_with_the_snapshots(walked):
    guide, vectors = walked
    model, x, y = problem()
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    other = AutoSWAG(model, rank=6)
    other.load_state_dict(torch.load(file, weights_only=True))
    other.prototype(x, y)
    expected, found = guide.swag_approximation(), other.swag_approximation()
    assert torch.equal(found.location(), expected.location())
    assert torch.equal(found.factor, expected.factor)
    put_through(other, vectors[:1])  # goes on where the first left off
    assert int(other.snapshots.count) == 10 and int(guide.snapshots.count) == 9
    wrong = AutoSWAG(model, rank=5)
    wrong.load_state_dict(guide.state_dict())
    with pytest.raises(RuntimeError, match=r"snapshots\.recent"):
        wrong.prototype(x, y)


# The loop


def to_the_map(minimize, model, guide, x, y):
    elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=getattr(guide, "size", 1))
    minimize(guide.parameters(), lambda: elbo.differentiable_loss(model, guide, x, y))


def test_steps_of_sgd_are_on_the_loss_per_datum():
    """One weight, y ~ N(w, 1), w ~ N(0, t^2): with rate a a batch of B of N rows takes w to
    w - a (mean of w - y over the batch + w / (t^2 N)). Every pass has each row once."""
    size, batch, rate, prior = 40, 8, 0.2, 3.0
    y, batches = torch.randn(size, dtype=torch.float64), []

    class Mean(nn.Module):
        num_data = size

        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), prior))
            if torch.is_grad_enabled():  # a step, not a look at the loss
                batches.append(x)
            with pyro.plate("data", size, subsample=x):
                pyro.sample("y", dist.Normal(w, 1.0).expand([len(x)]), obs=y)

    model, x = Mean(), torch.arange(size)
    guide = AutoSWAG(model, rank=0).prototype(x, y)
    w = guide.loc.item()
    collect_swag(
        model, guide, x, y, snapshots=4, every=5, learning_rate=rate, momentum=0.0,
        batch_size=batch,
    )  # fmt: skip
    del batches[:1]  # the look before the steps
    assert len(batches) == 20
    orders = [torch.cat(batches[i : i + 5]) for i in range(0, 20, 5)]
    assert all(torch.equal(order.sort().values, x) for order in orders)
    assert not any(map(torch.equal, orders[1:], orders))
    snapshots = []
    for number, rows in enumerate(batches, 1):
        w = w - rate * ((w - y[rows]).mean() + w / prior**2 / size)
        if number % 5 == 0:
            snapshots.append(w)
    swag, expected = guide.swag_approximation(rank=0), torch.stack(snapshots)
    torch.testing.assert_close(swag.location()[0], expected.mean())
    torch.testing.assert_close(swag.variances()[0], expected.var())


def test_the_cycle_of_the_learning_rate(monkeypatch):
    """With t = 1/4, 2/4, 3/4, 1 in cycles of 4 steps. a(i) = (1 - t) a_1 + t a_2 (Izmailov et al.
    2018, section 3.1)."""
    model, x, y = problem(num_data=40)
    guide = AutoSWAG(model, rank=2).prototype(x, y)
    rates, seen = [], []
    step, collect = torch.optim.SGD.step, guide.collect

    def spied(self, closure=None):
        rates.append(self.param_groups[0]["lr"])
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", spied)
    guide.__dict__["collect"] = lambda: seen.append(len(rates)) or collect()
    collect_swag(
        model, guide, x, y, snapshots=2, every=4, learning_rate=1e-3, final_learning_rate=1e-4
    )
    expected = [7.75e-4, 5.5e-4, 3.25e-4, 1e-4]
    assert rates == pytest.approx(2 * expected)
    assert seen == [4, 8]


@pytest.mark.parametrize("kind", [AutoSWAG, AutoMultiSWAG])
def test_a_step_that_diverges(kind):
    model, x, y = problem(num_data=40)
    guide = kind(model, rank=2).prototype(x, y)
    guide.collect()
    (parameter,) = guide.parameters()
    before = parameter.detach().clone()
    with pytest.raises(ValueError, match=r"diverged within \d+ steps .*1 snapshots"):
        collect_swag(model, guide, x, y, learning_rate=1e30)
    assert torch.equal(parameter, before)
    assert int(guide.snapshots.count) == 1
    assert torch.isfinite(guide.snapshots.mean).all()


def test_rates_that_diverge_leave_no_running_statistics():
    """The rates 1 and 0.3 are given up; the statistics are those of the rate taken alone."""
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64)
    y = x[:, 0].sin()
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1, num_data=40)
    guide = AutoSWAG(model, rank=2).prototype(x, y)
    at_start = [copy.deepcopy(module.state_dict()) for module in (model, guide)]

    def statistics(**options):
        for module, state in zip((model, guide), at_start, strict=True):
            module.load_state_dict(state)
        torch.manual_seed(1)
        run = collect_swag(model, guide, x, y, snapshots=2, batch_size=40, **options)
        return run, {name: v.clone() for name, v in model.named_buffers() if "running" in name}

    run, found = statistics()
    assert run.learning_rate < 0.3
    _, alone = statistics(learning_rate=run.learning_rate)
    assert found and all(torch.equal(found[name], alone[name]) for name in alone)
    with pytest.raises(ValueError, match="diverged"):
        collect_swag(model, guide, x, y, learning_rate=1e30)
    assert all(torch.equal(v, alone[name]) for name, v in model.named_buffers() if name in alone)


def test_interrupted_it_keeps_the_snapshots(monkeypatch):
    model, x, y = problem(num_data=40)
    guide = AutoSWAG(model, rank=2).prototype(x, y)
    collect = guide.collect

    def stops():
        if collect() == 3:
            raise KeyboardInterrupt

    guide.__dict__["collect"] = stops
    with pytest.warns(bdl.errors.BdlWarning, match="interrupted after 30 of 400"):
        run = collect_swag(model, guide, x, y, learning_rate=1e-4)
    assert run.interrupted and len(run.losses) == 30
    assert guide.swag_approximation().sample_vectors(2).shape == (2, guide.layout.size)


# MultiSWAG


def test_members_of_a_multi_swag_are_swags():
    """Every member's moments are those that it would have alone."""
    model, x, y = problem()
    guide = AutoMultiSWAG(model, size=3, rank=4).prototype(x, y)
    points = torch.randn(6, 3, guide.layout.size, dtype=torch.float64)
    mixture = put_through(guide, points).swag_approximation(scale=0.5)
    for k, member in enumerate(mixture.members):
        alone = put_through(AutoSWAG(model, rank=4).prototype(x, y), points[:, k])
        expected = alone.swag_approximation(scale=0.5)
        torch.testing.assert_close(member.location(), expected.location())
        torch.testing.assert_close(covariance(member), covariance(expected))
    diagonal = guide.swag_approximation(rank=0).members[2]
    torch.testing.assert_close(diagonal.variances(), points[:, 2].var(0))


def test_members_move_as_they_would_alone():
    """SGD of all members at once, and of each alone, from the same minibatches."""
    model, x, y = problem(num_data=40)
    guide = AutoMultiSWAG(model, size=3, rank=2).prototype(x, y)
    starts = guide.locs.detach().clone()
    settings = {"snapshots": 2, "learning_rate": 1e-3}
    torch.manual_seed(7)  # of the minibatches
    collect_swag(model, guide, x, y, **settings)
    for k in range(3):
        alone = AutoSWAG(model, rank=2).prototype(x, y)
        alone.loc.data.copy_(starts[k])
        torch.manual_seed(7)
        collect_swag(model, alone, x, y, **settings)
        torch.testing.assert_close(guide.locs[k], alone.loc, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(guide.snapshots.mean[k], alone.snapshots.mean)
    assert (guide.locs - starts).abs().max() > 0.001


# Refusals


@pytest.mark.parametrize(
    ("taken", "options", "words"),
    [
        (0, {}, "at least 6 snapshots, and there are 0"),
        (4, {}, "at least 6 snapshots, and there are 4"),
        (1, {"rank": 0}, "at least 2 snapshots"),
        (9, {"rank": 1}, "from 2 to the guide's 6, got 1"),
        (9, {"rank": 7}, "from 2 to the guide's 6, got 7"),
        *((9, {"scale": s}, "scale must be positive") for s in (0.0, float("inf"), float("nan"))),
    ],
)
def test_approximations_that_cannot_be(walked, taken, options, words):
    guide, vectors = walked
    guide.discard()
    with pytest.raises(ValueError, match=words):
        put_through(guide, vectors[:taken]).swag_approximation(**options)


def test_programs_and_guides_that_the_loop_refuses():
    model, x, y = problem()
    with pytest.raises(ValueError, match="num_data=40"):
        collect_swag(model, AutoSWAG(model), x, y)


def test_a_snapshot_that_is_not_finite(walked):
    guide, vectors = walked
    before = guide.snapshots.mean.clone()
    with pytest.raises(ValueError, match="snapshot 10 holds NaN"):
        put_through(guide, [vectors[0] * float("nan")])
    assert torch.equal(guide.snapshots.mean, before) and int(guide.snapshots.count) == 9


@pytest.mark.parametrize("kind", [AutoSWAG, pytest.param(AutoMultiSWAG, marks=pytest.mark.slow)])
def test_a_rate_that_is_too_high_is_told(minimize, kind):
    """From the MAP the loss rises little at a low rate, by far more than P / 2 near the highest
    at which SGD is stable."""
    model, x, y = problem(num_data=40)
    guide = kind(model, rank=2, **({} if kind is AutoSWAG else {"size": 2})).prototype(x, y)
    to_the_map(minimize, model, guide, x, y)
    state = {name: value.clone() for name, value in guide.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect_swag(model, guide, x, y, snapshots=3, learning_rate=1e-5)
    guide.load_state_dict(state)
    with pytest.warns(BdlWarning, match=r"loss rose by \d+ nats.*explains 9: learning_rate=0.001"):
        collect_swag(model, guide, x, y, snapshots=8, learning_rate=1e-3)


@pytest.mark.parametrize("family", [AutoSWAG, pytest.param(AutoMultiSWAG, marks=pytest.mark.slow)])
def test_the_rate_is_the_highest_at_which_the_loss_rises_by_p_over_2(family):
    """A linear regression with P = 3: -log p(u, y) lies P / 2 above its minimum on average."""
    torch.manual_seed(0)
    x = torch.randn(60, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3 * torch.randn(60).double()
    net = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=60)
    guide = family(model, rank=4)
    train(model, guide, x, y, steps=150, learning_rate=0.1)
    start = [parameter.detach().clone() for parameter in guide.parameters()]
    guide.collect()  # a snapshot from before stays
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = collect_swag(model, guide, x, y, snapshots=10)
    members = getattr(guide, "size", 1)
    assert int(guide.snapshots.count) == 11 and len(run.losses) == 100
    point = bdl.guides.AutoMAP(model).prototype(x, y)
    for parameter, value in zip(guide.parameters(), start, strict=True):
        parameter.data.copy_(value)
    point.loc.data.copy_(guide.location())
    lowest = -estimate_elbo(model, point, x, y, num_particles=1)
    rise = run.losses.mean().item() * 60 / members - lowest
    assert 0 < rise < 1.6


@pytest.fixture
def wide():
    """A network of far more weights than data, at its maximum."""
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 64)[:, None]
    y = (x[:, 0] * 6.0).sin() > 0.0
    net = torch.nn.Sequential(
        *(torch.nn.Linear(1, 70), torch.nn.Tanh(), torch.nn.Linear(70, 70), torch.nn.Tanh()),
        torch.nn.Linear(70, 2),
    )
    prior = bdl.priors.Normal(3.0)
    model = bdl.models.Classification(bdl.bayesianize(net, prior), num_data=64)
    guide = AutoSWAG(model, rank=5)
    train(model, guide, x, y.long(), steps=800, learning_rate=0.01, batch_size=32)
    return model, guide, x, y.long()


def test_the_mean_of_the_snapshots_stays_at_the_maximum_of_more_weights_than_data(wide):
    """P / 2 is 42 nats for each datum, far above the loss of chance, which is 0.7."""
    model, guide, x, y = wide
    point = {name: value.clone() for name, value in guide.median().items()}
    before = log_likelihood(model, point, x, y)
    run = collect_swag(model, guide, x, y, snapshots=16, batch_size=16)
    mean = guide.swag_approximation(rank=0).median()
    assert before > -0.1 * 64  # it fits
    assert log_likelihood(model, mean, x, y) > before - 0.2 * 64
    assert run.learning_rate < 1.0


def test_a_run_whose_mean_is_not_at_the_maximum_is_told():
    """-log p(y | w) = 0.9 tanh(w)^2: the first step at rate 10 ends where it is flat, 0.9 nats
    above the minimum, which is less than P = 1, but so is the mean of the snapshots."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 100.0))
        with pyro.plate("data", 1):
            pyro.sample("y", dist.Normal(1.8**0.5 * w.tanh() * x, 1.0), obs=y)

    x, y = torch.ones(1), torch.zeros(1)
    guide = AutoSWAG(model, rank=2).prototype(x, y)
    options = {"snapshots": 8, "momentum": 0.0}
    with torch.no_grad():
        guide.loc.fill_(0.3)
    with pytest.warns(BdlWarning, match="1 nats higher at the mean of the snapshots"):
        collect_swag(model, guide, x, y, learning_rate=10.0, **options)
    with torch.no_grad():
        guide.loc.fill_(0.3)
    run = collect_swag(model, guide, x, y, **options)
    assert run.learning_rate == 1.0 and guide.loc.abs() < 0.3


def log_likelihood(model, point, x, y):
    with torch.no_grad():
        found = bdl.Predictive(model, {name: value[None] for name, value in point.items()})
        return float(found.mean(x)["y"][0].gather(-1, y[:, None]).log().sum())
