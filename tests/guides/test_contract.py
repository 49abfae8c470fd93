"""The contract of every guide, whatever its family; ``conftest.py`` has the registry."""

import gc
import math
import pickle
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import second_device
from helpers.guide_programs import (
    ELBOS,
    SHAPES,
    X,
    Y,
    constrained,
    losses_of,
    regression,
    trained,
)
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoNormal,
    init_to_feasible,
    init_to_mean,
    init_to_value,
)
from torch import nn
from torch.distributions import constraints

from pyro_bdl import Predictive, bayesianize, models
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMAP, AutoMeanField

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#dropout"),  # programs without hidden units to drop
    pytest.mark.filterwarnings("ignore:.*#last-layer-draws"),  # outputs without a closed form
]


@pytest.fixture(params=ELBOS, ids=lambda elbo: elbo.__name__)
def elbo(request):
    return request.param


TWO_BOUNDS = pytest.mark.parametrize(
    "elbo", [Trace_ELBO, TemperedTraceMeanField_ELBO], indirect=True, ids=lambda e: e.__name__
)


# Every optimizer and every bound


def test_a_step_under_every_bound_lowers_the_loss_of_the_same_draw(kind, elbo):
    """By its slope along the gradient, to first order."""
    model = regression()
    guide = kind(model).prototype(X, Y)
    loss = elbo()(model, guide)

    def value():
        pyro.set_rng_seed(3)
        return loss(X, Y)

    before = value()
    before.backward()
    step = 1e-3 / sum(p.grad.square().sum() for p in guide.parameters()).sqrt()
    with torch.no_grad():
        for parameter in guide.parameters():
            assert parameter.grad.isfinite().all()
            parameter.sub_(step * parameter.grad)
    slope = 1e-3 * 1e-3 / step
    assert (before - value()).item() == pytest.approx(slope.item(), rel=0.2, abs=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        pyro.optim.Adam({"lr": 0.05}),
        pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.999}),
        pyro.optim.PyroOptim(torch.optim.SGD, {"lr": 1e-3}),
    ],
    ids=["Adam", "ClippedAdam", "SGD"],
)
def test_pyros_optimizers_move_every_parameter(kind, optimizer):
    model = regression()
    guide = kind(model).prototype(X, Y)
    before = {name: p.clone() for name, p in guide.named_parameters()}
    SVI(model, guide, optimizer, TemperedTraceMeanField_ELBO()).step(X, Y)
    for name, parameter in guide.named_parameters():
        moved = parameter != before[name]
        if name.startswith(("row", "column")):  # triangular: what is above counts for nothing
            moved = moved[torch.ones_like(moved).tril()]
        assert moved.all()


def test_torchs_optimizers_see_the_parameters_after_prototype(kind, elbo):
    model = regression()
    guide = kind(model)
    assert list(elbo()(model, guide).parameters()) == []
    assert guide.prototype(X, Y) is guide
    loss = elbo()(model, guide)
    parameters = list(loss.parameters())
    assert {id(p) for p in parameters} == {id(p) for p in guide.parameters()}
    assert parameters
    adam = torch.optim.Adam(parameters, lr=0.05)
    before = [p.detach().clone() for p in parameters]
    loss(X, Y).backward()
    adam.step()
    assert not any(map(torch.equal, parameters, before))


def test_the_parameters_are_flat_vectors(kind):
    guide = kind(constrained).prototype()
    assert guide.layout.size == 2 + 1 + 2 + 1 + 4
    for name, parameter in guide.named_parameters():
        assert parameter.shape == ((10, guide.rank) if name == "factor" else (10,))


# Sample statements


def test_the_sites_are_the_programs(kind):
    guide = kind(constrained)
    program = poutine.trace(constrained).get_trace()
    trace = poutine.trace(guide).get_trace()
    values = guide()
    for name, shape in SHAPES.items():
        mine, its = trace.nodes[name], program.nodes[name]
        assert mine["fn"].batch_shape == its["fn"].batch_shape
        assert mine["fn"].event_shape == its["fn"].event_shape
        assert its["fn"].support.check(mine["value"]).all()
        assert mine["cond_indep_stack"] == its["cond_indep_stack"]
        assert values[name].shape == shape
        assert mine["fn"].has_rsample
    assert set(values) == set(SHAPES)


def test_the_density_is_that_of_the_sample_statements(kind):
    guide = kind(constrained).prototype()
    trace = poutine.trace(guide).get_trace()
    total = trace.log_prob_sum()
    vector = guide.layout.unconstrain({name: trace.nodes[name]["value"] for name in SHAPES})
    log_det = guide.layout.constrain(vector)[1]
    torch.testing.assert_close(guide.log_density(vector, log_det), total, rtol=1e-4, atol=1e-3)


# Data


def test_it_keeps_few_rows_of_the_data(kind):
    """Neither the guide nor a pickle of it holds the first data."""
    x, y = torch.randn(40, 2), torch.randn(40)
    guide, held = kind(model := regression(num_data=40)), [weakref.ref(x), weakref.ref(y)]
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TemperedTrace_ELBO()).step(x, y)
    stored = pickle.dumps(guide)
    assert x.numpy().tobytes()[64:] not in stored and y.numpy().tobytes()[64:] not in stored
    assert [len(rows) for rows in guide.example_rows[0]] == [2, 2]
    del x, y
    gc.collect()
    assert [ref() for ref in held] == [None, None]


# Summaries


def test_median_and_quantiles(kind):
    guide = kind(constrained).prototype()
    median = guide.median()
    assert {name: value.shape for name, value in median.items()} == SHAPES
    quantiles = guide.quantiles([0.1, 0.5, 0.9])
    for name, value in quantiles.items():
        assert value.shape == (3, *SHAPES[name])
        assert not value.requires_grad
        assert (value[0] <= value[1]).all() and (value[1] <= value[2]).all()
        if name in ("positive", "unit", "z"):
            torch.testing.assert_close(value[1], median[name])
        assert guide.layout.latents[name].support.check(median[name]).all()
    median["unit"].zero_()
    assert guide.median()["unit"] > 0  # a copy
    torch.testing.assert_close(guide.quantiles(torch.tensor([0.5]))["z"][0], median["z"])
    for bad in ([-0.1], [0.5, 1.5]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            guide.quantiles(bad)


def test_quantiles_on_a_simplex_are_marginal():
    """The quantiles of Dirichlet-like numbers are those of each number alone."""
    guide = AutoMeanField(constrained, init_scale=1.5).prototype()
    draws, levels = guide.sample_latents(20000), torch.tensor([0.1, 0.5, 0.9])
    for name in ("simplex", "chol"):
        for level, value in zip(levels, guide.quantiles(levels)[name], strict=True):
            below = (draws[name] <= value).float().mean(0)
            error = (level * (1 - level) * (1 / 4096 + 1 / 20000)).sqrt()
            moves = draws[name].std(0) > 0
            assert ((below - level).abs() < 5 * error)[moves].all()


def test_before_the_first_run_it_says_what_to_do(kind):
    for call in (
        lambda guide: guide.median(),
        lambda guide: guide.quantiles([0.5]),
        lambda guide: guide.sample_latents(3),
    ):
        with pytest.raises(RuntimeError, match=r"prototype"):
            call(kind(regression()))


# Starting points


def test_it_starts_from_the_network(kind):
    model = regression()
    guide = kind(model).prototype(X, Y)
    center = guide.layout.constrain(guide.location())[0]
    for name, value in model.network.network.named_buffers():
        assert torch.equal(center[name], value)


@pytest.mark.parametrize(
    "init", [init_to_feasible, init_to_mean, init_to_value(values={"noise": torch.tensor(0.7)})]
)
def test_pyros_initializations(kind, init):
    guide = kind(regression(), init_loc_fn=init)
    median = guide.median(X, Y)
    assert median["noise"] > 0
    if init is init_to_mean:
        assert (median["0.weight"] == 0).all()
        torch.testing.assert_close(median["noise"], torch.tensor((2 / math.pi) ** 0.5))
    elif init is not init_to_feasible:
        torch.testing.assert_close(median["noise"], torch.tensor(0.7))


def test_hidden_units_of_a_hand_written_network_start_different(kind):
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(50, 4), 1.0).to_event(2))
        b = pyro.sample("b", dist.Normal(torch.zeros(50), 1.0).to_event(1))
        tight = pyro.sample("tight", dist.Normal(torch.zeros(5, 4), 1e-3).to_event(2))
        pyro.sample("y", dist.Normal(w.sum() + b.sum() + tight.sum(), 1.0), obs=y[0])

    median = kind(model).median(X, Y)
    assert len(median["w"].unique()) == 200
    assert median["w"].std().item() == pytest.approx(0.5, rel=0.25)  # 1 / sqrt(fan-in 4)
    assert median["tight"].abs().max() < 1e-2


# Reproducible, in either precision, and without a trace


@TWO_BOUNDS
def test_seeds(kind, elbo):
    def run():
        pyro.clear_param_store()
        pyro.set_rng_seed(4)
        model = regression()
        guide = kind(model)
        losses = losses_of(guide, model, elbo(), 2)
        return losses, Predictive(model, guide, 3)(X)["y"]

    (a, draws), (b, again) = run(), run()
    assert a == b
    assert torch.equal(draws, again)


@TWO_BOUNDS
def test_double_precision(kind, elbo):
    model = regression(torch.float64)
    guide = kind(model)
    losses_of(guide, model, elbo(), 3, x=X.double(), y=Y.double())
    assert {p.dtype for p in guide.parameters()} == {torch.float64}
    assert {v.dtype for v in guide.sample_latents(2).values()} == {torch.float64}
    assert {v.dtype for v in guide().values()} == {torch.float64}


def test_a_guide_follows_double(kind):
    model = regression()
    guide = trained(kind, model)
    guide.double()
    model.double()
    assert math.isfinite(TemperedTrace_ELBO().loss(model, guide, X.double(), Y.double()))
    assert guide.median()["0.weight"].dtype == torch.float64


def test_on_another_device(kind, elbo, device):
    losses = []
    for there in ("cpu", device):
        pyro.set_rng_seed(3)
        model = regression().to(there)
        guide, x, y = kind(model), X.to(there), Y.to(there)
        losses.append(losses_of(guide, model, elbo(), 3, x=x, y=y))
    if device.type == second_device.NAME:  # whose random numbers are those of the CPU
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert all(map(math.isfinite, losses[1]))
    assert {v.device.type for v in guide.sample_latents(2).values()} == {device.type}
    assert {v.device.type for v in guide.quantiles([0.5]).values()} == {device.type}
    assert Predictive(model, guide, 3)(x)["y"].device.type == device.type


def _with_batchnorm():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    return models.Regression(bayesianize(net), noise=0.5)


def _buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def test_prototype_moves_nothing(kind):
    model = _with_batchnorm()
    before, modes = _buffers(model), [part.training for part in model.modules()]
    guide = kind(model).prototype(X, Y)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert [part.training for part in model.modules()] == modes
    for call in (guide.median, lambda: guide.sample_latents(2), lambda: guide.quantiles([0.5])):
        call()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    losses_of(guide, model, TemperedTrace_ELBO(), 3)
    assert (
        model.network.network[1].num_batches_tracked == 3
    )  # the check of the first step left none


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 1)
        self.broken = True

    def forward(self, x):
        x = self.norm(x)
        if self.broken:
            raise RuntimeError("midway")
        return self.linear(x)


def test_an_error_midway_leaves_no_trace(kind, elbo):
    model = models.Regression(bayesianize(Breaks()), noise=0.5)
    before = _buffers(model)
    guide = kind(model)
    for call in (lambda: guide.prototype(X, Y), lambda: elbo()(model, guide)(X, Y)):
        with pytest.raises(RuntimeError, match="midway"):
            call()
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(part.training for part in model.modules())
    assert not poutine.runtime._PYRO_STACK
    model.network.network.broken = False
    assert math.isfinite(elbo()(model, guide)(X, Y).item())


# In company


@pytest.mark.parametrize(
    "other, bound",
    [
        (AutoNormal, Trace_ELBO),
        (AutoDelta, TemperedTrace_ELBO),
        (AutoNormal, TemperedTraceMeanField_ELBO),
    ],
    ids=lambda part: part.__name__,
)
def test_inside_a_guide_list(kind, other, bound):
    model = regression()
    guide = AutoGuideList(model)
    guide.append(kind(poutine.block(model, hide=["noise", "2.weight"])))
    guide.append(other(poutine.block(model, expose=["noise", "2.weight"])))
    losses = losses_of(guide, model, bound(), 2)
    assert all(map(math.isfinite, losses))
    assert set(guide.median()) == {"noise", "0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(guide[0].layout.latents) == {"0.weight", "0.bias", "2.bias"}
    if other is AutoNormal:  # AutoDelta has none
        assert len(guide.quantiles([0.1, 0.9])["0.weight"]) == 2
    predicted = Predictive(model, guide, 4)(X)
    assert predicted["y"].shape == (4, 6)


def local(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 2, dim=-2):
        m = pyro.sample("m", dist.LogNormal(0.0, torch.tensor(1.0)))
        with pyro.plate("data", 6, subsample_size=3, dim=-1) as i:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            s = pyro.sample("s", dist.Dirichlet(torch.ones(3)))
            mean = m * (z * w).sum(-1) + s[..., 0]
            pyro.sample("y", dist.Normal(mean, 1.0), obs=None if y is None else y[i])


def _plates(x, y=None):
    return pyro.plate("data", 6, subsample_size=3, dim=-1)


@TWO_BOUNDS
def test_local_latents_in_a_subsampled_plate(kind, elbo):
    guide = kind(local, create_plates=_plates)
    losses = losses_of(guide, local, elbo(), 2)
    assert all(map(math.isfinite, losses))
    shapes = {name: value.shape for name, value in guide.median().items()}
    assert shapes == {"w": (2,), "m": (2, 1), "z": (2, 6, 2), "s": (2, 6, 3)}
    assert guide.layout.size == 2 + 2 + 24 + 24
    draws = guide.sample_latents(5)
    assert draws["z"].shape == (5, 2, 6, 2)
    trace = poutine.trace(guide).get_trace(X, Y)
    assert trace.nodes["z"]["value"].shape == (2, 3, 2)
    assert trace.nodes["z"]["scale"] == 2.0
    index = trace.nodes["data"]["value"]
    if kind is AutoMAP:
        torch.testing.assert_close(trace.nodes["s"]["value"], guide.median()["s"][:, index])


def test_local_latents_without_plates_given(kind):
    """As in Pyro's guides, plates are made with the program's own subsample size."""
    guide = kind(local)
    losses = losses_of(guide, local, TemperedTrace_ELBO(), 2)
    assert all(map(math.isfinite, losses))


def test_only_what_was_drawn_is_moved(kind):
    guide = kind(local, create_plates=_plates).prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO()
    elbo.loss(local, guide, X, Y)
    loss = elbo.differentiable_loss(local, guide, X, Y)
    loss.backward()
    gradient = guide.layout.unflatten(guide.loc.grad)["z"]
    moved = (gradient != 0).any(-1).any(0)
    assert moved.sum() == 3


# Refusals


def test_a_program_without_latents(kind):
    with pytest.raises(ValueError, match="no latent site"):
        kind(lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))).prototype()


def improper(y=None):
    scale = pyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    weight = pyro.sample("weight", dist.ImproperUniform(constraints.real, (), (2, 3)))
    with pyro.plate("data", 4):
        pyro.sample("y", dist.Normal(weight.sum(), scale), obs=torch.arange(4.0))


@pytest.mark.parametrize("init", [None, init_to_feasible, init_to_mean])
def test_improper_priors_have_a_start(kind, init):
    guide = kind(improper) if init is None else kind(improper, init_loc_fn=init)
    losses = [
        SVI(improper, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO()).step() for _ in range(3)
    ]
    assert all(map(math.isfinite, losses))
    weight = guide.median()["weight"]
    assert (weight.std() > 0.1) == (init is None)  # hidden units are not all alike
