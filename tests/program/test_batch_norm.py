"""BatchNorm: statistics of every draw, and training of several draws at once."""

import copy
import math
import warnings

import pytest
import torch
from helpers import second_device
from torch import nn
from torch.optim.swa_utils import update_bn

import pyro_bdl as bdl
from pyro_bdl.guides import AutoEnsemble, AutoLaplaceGGN, AutoMAP, AutoMeanField
from pyro_bdl.program.batch_norm import leaving_running_statistics, update_running_statistics
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.utils.module_state import Modules


def network():
    return nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1),
        nn.BatchNorm1d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 1),
    ).double()


def problem(net=None):
    torch.manual_seed(0)
    x = 2.0 * torch.randn(30, 1, 4, dtype=torch.float64) + 1.0
    y = x.mean((1, 2)).sin()
    net = network() if net is None else net
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=30), net, x, y


def state(model):
    return (
        {name: value.clone() for name, value in model.named_buffers()},
        [(part.training, getattr(part, "momentum", None)) for part in model.modules()],
    )


def same(a, b):
    return a[1] == b[1] and all(torch.equal(b[0][name], value) for name, value in a[0].items())


def torchs(net, draw, batches, inputs):
    """The output of torch's network with these weights, its statistics set by ``update_bn``."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(draw[name])
    update_bn(batches, net)
    return net.eval()(inputs)[:, 0].detach()


# Prediction


@pytest.fixture(params=["samples", "mean-field", "ensemble"])
def posterior(request):
    model, net, x, y = problem()
    model.network.network(x)  # statistics that are not those of any draw
    if request.param == "mean-field":
        guide = AutoMeanField(model, init_scale=0.3).prototype(x, y)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guide = AutoEnsemble(model, size=6).prototype(x, y)
    # the guide's own draws, fixed, so that torch can have the same
    draws = {name: value.detach() for name, value in guide.sample_latents(6).items()}
    if request.param == "samples":
        result = bdl.Samples({name: value[None] for name, value in draws.items()})
    else:
        guide.sample_latents = lambda count: draws
        result = guide
    return model, net, x, y, result, draws


@pytest.mark.parametrize(
    "in_batches, memory",
    [(False, 16 * 2**20), (True, 1)],
    ids=["at once", "in batches, one by one"],
)
def test_every_draw_has_the_statistics_that_torch_gives_it(posterior, in_batches, memory):
    model, net, x, y, result, draws = posterior
    inputs = torch.randn(7, 1, 4, dtype=torch.float64)
    given = [(x[:10], y[:10]), (x[10:], y[10:])] if in_batches else (x, y)
    batches = [x[:10], x[10:]] if in_batches else [x]
    before = state(model)
    predictive = bdl.Predictive(model, result, 6, batch_norm_data=given, memory=memory)
    found = predictive(inputs)["f"]
    assert found.shape == (6, 7)
    for i in range(6):
        draw = {name: value[i] for name, value in draws.items()}
        torch.testing.assert_close(found[i], torchs(net, draw, batches, inputs))
    torch.testing.assert_close(predictive.mean(inputs)["y"], found)
    assert same(before, state(model)) and model.training
    plain = bdl.Predictive(model, result, 6)(inputs)["f"]
    assert (plain - found).abs().max() > 0.05


def test_compare_scores_draws_with_their_own_statistics(posterior):
    model, _, x, y, result, _ = posterior
    inputs, targets = torch.randn(7, 1, 4, dtype=torch.float64), torch.randn(7).double()
    given = {"train": (x, y), "reference": None, "num_samples": 6}
    found = bdl.compare(model, {"q": result}, inputs, targets, batch_norm_data=(x, y), **given)
    own = bdl.Predictive(model, result, 6, batch_norm_data=(x, y))
    torch.testing.assert_close(found.evaluations["q"].function, own(inputs)["f"])
    expected = -(own.log_likelihood(inputs, targets)["y"].logsumexp(0) - math.log(6)).mean()
    assert found.numbers()["q"]["nlpd"] == pytest.approx(expected.item())
    plain = bdl.compare(model, {"q": result}, inputs, targets, **given)
    assert (plain.evaluations["q"].function - own(inputs)["f"]).abs().max() > 0.05


def test_dropout_stays_off_and_other_layers_in_their_mode():
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model, net, x, y = problem(net.double())
    x = x[:, 0]
    guide = AutoMAP(model).prototype(x, y)
    found = bdl.Predictive(model, guide, 1, batch_norm_data=(x, y))(x)["f"][0]
    without = copy.deepcopy(net)
    without[1].p = 0.0
    expected = torchs(without, {k: v[0] for k, v in guide.sample_latents(1).items()}, [x], x)
    torch.testing.assert_close(found, expected)
    assert model.network.network[1].training


def test_all_is_as_before_after_an_error():
    model, _, x, y = problem()
    guide = AutoMAP(model).prototype(x, y)
    before = state(model)

    def breaks():
        yield x, y
        raise KeyError("midway")

    class Loader:
        def __iter__(self):
            return breaks()

    with pytest.raises(KeyError, match="midway"):
        bdl.Predictive(model, guide, 2, batch_norm_data=Loader())(x)
    assert same(before, state(model))
    with pytest.raises(RuntimeError):
        bdl.Predictive(model, guide, 2, batch_norm_data=(x, y))(x[:, :, :2])
    assert same(before, state(model))
    plain = problem(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double())[0]
    with pytest.raises(ValueError, match=r"no BatchNorm layer .*leave it out"):
        bdl.Predictive(plain, AutoMAP(plain).prototype(x, y), 2, batch_norm_data=(x, y))(x)


# Training


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("calls", [1, 2])
def test_vmap_updates_statistics_as_a_loop_does(momentum, calls):
    layer = nn.BatchNorm1d(3, momentum=momentum).double()
    x, scale = torch.randn(8, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)

    def function(draw):
        result = x
        for _ in range(calls):
            result = layer(result * draw["scale"] + 1.0)
        return result

    layer(x)  # some statistics to begin with
    other = copy.deepcopy(layer)
    found = DrawMap(modules=Modules(layer))(function, {"scale": scale})
    layer, at_once = other, layer
    expected = torch.stack([function({"scale": row}) for row in scale])
    torch.testing.assert_close(found, expected)
    for name, value in other.named_buffers():
        torch.testing.assert_close(getattr(at_once, name), value)
    assert at_once.num_batches_tracked == 1 + 4 * calls


def test_each_draw_has_its_own_random_numbers():
    found = DrawMap()(lambda draw: draw["a"] + torch.rand(()), {"a": torch.zeros(3)})
    assert len(found.unique()) == 3


@pytest.mark.filterwarnings("ignore:var_mean")
def test_statistics_come_back_after_an_error():
    layer = nn.BatchNorm1d(3)
    before = {name: id(value) for name, value in layer.named_buffers()}
    with pytest.raises(ValueError, match="channel"), leaving_running_statistics(layer):
        layer(torch.ones(1, 3))
    assert {name: id(value) for name, value in layer.named_buffers()} == before
    with leaving_running_statistics(layer) as calls:
        layer.eval()(torch.ones(1, 3))
    assert not calls
    update_running_statistics(calls)


def test_an_ensemble_trains_at_once_as_one_by_one():
    """Members with BatchNorm in training mode, by vmap, without falling back to a loop."""
    model, _, x, y = problem()
    with pytest.warns(bdl.errors.BdlWarning, match="batch_norm_data"):
        ensemble = AutoEnsemble(model, size=3).prototype(x, y)
    starts = ensemble.locs.detach().clone()
    order = [torch.randperm(30)[:10] for _ in range(40)]

    def trained(guide, particles):
        elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=particles)
        optimizer = torch.optim.Adam(guide.parameters(), lr=0.02, eps=1e-20)
        for rows in order:
            optimizer.zero_grad()
            elbo.differentiable_loss(model, guide, x[rows], y[rows]).backward()
            optimizer.step()
        return guide

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(ensemble, 3)
    for k in range(3):
        alone = AutoLaplaceGGN(model).prototype(x, y)
        alone.loc.data.copy_(starts[k])
        trained(alone, 1)
        torch.testing.assert_close(ensemble.locs[k], alone.loc, rtol=1e-5, atol=1e-5)
    predictive = bdl.Predictive(model, ensemble, 3, batch_norm_data=(x, y))
    error = (predictive.mean(x)["y"].mean(0) - y).square().mean()
    assert error < 0.5 * y.var()


def test_on_another_device(device):
    model, net, x, y = problem()
    model, x, y = (second_device.moved(value, device) for value in (model, x, y))
    net, inputs = (net if x.dtype == torch.float64 else net.float()), x.cpu()
    guide = AutoMeanField(model, init_scale=0.3).prototype(x, y)
    draws = {name: value.detach() for name, value in guide.sample_latents(4).items()}
    samples = bdl.Samples({name: value[None] for name, value in draws.items()})
    found = bdl.Predictive(model, samples, batch_norm_data=(x, y))(x)["f"]
    for i in range(4):
        draw = {name: value[i].cpu() for name, value in draws.items()}
        torch.testing.assert_close(found[i].cpu(), torchs(net, draw, [inputs], inputs))
    elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.differentiable_loss(model, guide, x, y).backward()
