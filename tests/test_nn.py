"""A bayesianized network computes the same outputs and does not change the user's network."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.networks import NETS, RECURRENT, WORDS, Tied, X, _own_values, small_mlp
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints
from torch.nn.utils import prune, weight_norm

from pyro_bdl import Program, bayesianize, models, priors
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoMatrixNormal, AutoMeanField
from pyro_bdl.program import record
from pyro_bdl.utils.module_state import vmappable


@pytest.fixture(params=NETS, ids=str)
def kind(request):
    return request.param


@pytest.fixture
def case(kind):
    make, shape = NETS[kind]
    net = make()
    for parameter in net.parameters():  # norm layers start at constants
        nn.init.normal_(parameter, std=0.5)
    return net, WORDS if shape is None else torch.randn(shape)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_at_the_networks_own_values_the_output_is_the_same(case, training):
    net, x = case
    net.train(training)
    bnn = bayesianize(net)
    assert bnn.training == training
    expected = copy.deepcopy(net)(x)
    torch.testing.assert_close(record(bnn, _own_values(bnn), (x,)).result, expected)
    torch.testing.assert_close(copy.deepcopy(bnn.network)(x), expected)


def test_the_output_follows_the_draw(case):
    """Every parameter is a site of its shape, and the output depends on all of them."""
    net, x = case
    bnn = bayesianize(net)
    latents = record(bayesianize(net, name="net"), {}, (x,)).latents
    shapes = {name: site.distribution.event_shape for name, site in latents.items()}
    assert shapes == {f"net.{name}": value.shape for name, value in net.named_parameters()}
    values = {name: value + torch.randn_like(value) for name, value in _own_values(bnn).items()}
    expected_net = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in expected_net.named_parameters():
            parameter.copy_(values[name])
    torch.testing.assert_close(record(bnn, values, (x,)).result, expected_net(x))


def test_the_users_net_is_untouched(case):
    net, x = case
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    net.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    identity = {name: id(value) for name, value in net.named_parameters()}
    bnn = bayesianize(net)
    bnn.train()
    calls.clear()
    values = {name: value.clone().requires_grad_() for name, value in _own_values(bnn).items()}
    record(bnn, values, (x,)).result.sum().backward()
    assert all(value.grad is not None for value in values.values())
    assert not net.training and not any(part.training for part in net.modules())
    assert {name: id(value) for name, value in net.named_parameters()} == identity
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert all(value.grad is None and value.requires_grad for value in net.parameters())
    assert len(net._forward_hooks) == 1
    net(x)
    with torch.no_grad():
        for value in bnn.network.state_dict().values():
            value.zero_()
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_the_copy_is_whole_again_after_an_error(case):
    net, x = case
    bnn = bayesianize(net)
    before = {name: (id(v), v.clone()) for name, v in bnn.state_dict(keep_vars=True).items()}

    def fail(*_):
        raise RuntimeError("midway")

    handle = list(bnn.network.modules())[-1].register_forward_hook(fail)
    handle_out = bnn.network.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="midway"):
        record(bnn, {}, (x,))
    handle.remove()
    handle_out.remove()
    after = bnn.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity, name
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(after[name], value)
    for module in bnn.modules():
        if isinstance(module, nn.RNNBase):
            for name, value in zip(module._flat_weights_names, module._flat_weights, strict=True):
                assert value is getattr(module, name)


def test_vmap_over_draws_is_a_loop_over_draws(kind, case):
    net, x = case
    bnn = bayesianize(net.eval())
    draws = {
        name: value + 0.3 * torch.randn(3, *value.shape) for name, value in _own_values(bnn).items()
    }

    def output(draw):
        return record(bnn, draw, (x,)).result

    loop = torch.stack([output({n: v[i] for n, v in draws.items()}) for i in range(3)])
    if kind in RECURRENT:  # torch has no batching rule for these
        with pytest.raises(RuntimeError, match="Batching rule"):
            torch.vmap(output)(draws)
        return
    with vmappable():
        torch.testing.assert_close(torch.vmap(output)(draws), loop)


@pytest.mark.parametrize("to", [torch.float64, torch.device("meta")], ids=str)
def test_dtype_and_device_are_followed(case, to):
    """A tensor that is left behind on another device than "meta" raises."""
    net, x = case
    x = x.to(to) if x.is_floating_point() or to == torch.device("meta") else x
    for prior in (priors.FanIn(1.5), priors.Normal(dist.HalfNormal(1.0))):
        run = record(bayesianize(net, prior).to(to), {}, (x,))
        densities = [site.log_prob() for site in run.latents.values()]
        for tensor in (run.result, *densities, *(site.value for site in run.latents.values())):
            assert to in (tensor.dtype, tensor.device)


def test_state_dict_has_the_nets_keys_and_travels(case):
    net, x = case
    bnn = bayesianize(net)
    state = bnn.state_dict()
    assert set(state) == {f"network.{name}" for name in net.state_dict()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fresh = bayesianize(other)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    output = record(fresh.eval(), _own_values(fresh), (x,)).result
    torch.testing.assert_close(output, net.eval()(x))
    torch.testing.assert_close(fresh.network(x), net(x))
    user = copy.deepcopy(other)
    user.load_state_dict({k.removeprefix("network."): v for k, v in state.items()})
    torch.testing.assert_close(user.eval()(x), net(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_stand_alone(case, how):
    net, x = case
    bnn = bayesianize(net).eval()
    record(bnn, {}, (x,))
    clone = copy.deepcopy(bnn) if how == "deepcopy" else pickle.loads(pickle.dumps(bnn))
    values = {n: v + 1.0 for n, v in _own_values(bnn).items()}
    expected = record(bnn, values, (x,)).result
    assert torch.equal(record(clone, values, (x,)).result, expected)
    with torch.no_grad():
        for value in clone.state_dict().values():
            value.zero_()
    torch.testing.assert_close(bnn.network(x), net.eval()(x))
    torch.testing.assert_close(clone.network(x), record(clone, _own_values(clone), (x,)).result)


def test_tied_weights_are_one_site_in_both_places():
    net = Tied()
    bnn = bayesianize(net)
    assert bnn.sites == ("embed.weight",)
    assert list(bnn.parameters()) == []
    assert bnn.network.out.weight is bnn.network.embed.weight
    value = torch.randn(7, 4)
    expected = value[WORDS].tanh() @ value.T
    torch.testing.assert_close(record(bnn, {"embed.weight": value}, (WORDS,)).result, expected)


@pytest.mark.parametrize("later", [False, True])
def test_frozen_parameters_stay_fixed(later):
    net = small_mlp()
    if not later:
        net[0].requires_grad_(False)
    bnn = bayesianize(net, priors.ByName({"*.weight": priors.Normal()}))
    bias = bnn.network[0].bias.requires_grad_(False)
    guide = _stepped(models.Regression(bnn, noise=0.5))
    assert set(guide.layout.latents) == ({"0.weight", "2.weight"} if later else {"2.weight"})
    assert torch.equal(bnn.network[0].bias, net[0].bias) and not bias.requires_grad
    assert torch.equal(bnn.network[0].weight, net[0].weight)
    assert not torch.equal(bnn.network[2].bias, net[2].bias)


def _stepped(model, elbo=None, steps=2):
    guide = AutoMeanField(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo or TemperedTrace_ELBO())
    for _ in range(steps):
        svi.step(torch.ones(8, 2), torch.full((8,), 5.0))
    return guide


def _partly():
    return bayesianize(small_mlp(), priors.ByName({"*.weight": priors.Normal(), "2.bias": None}))


@pytest.mark.parametrize("elbo", [TemperedTraceMeanField_ELBO(num_particles=2), Trace_ELBO()])
def test_parameters_without_a_prior_are_learned_by_pyro(elbo):
    """Copies and other programs have parameters of their own."""
    bnn = _partly()
    assert bnn.sites == ("0.weight", "2.weight")
    assert bnn.learnable == ("0.bias", "2.bias")
    first = models.Regression(bnn, noise=PyroParam(torch.tensor(1.0), constraints.positive))
    for model in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        before = set(pyro.get_param_store().keys())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        guide = _stepped(model, elbo)
        new = set(pyro.get_param_store().keys()) - before
        assert len(new) == 5  # two biases, the noise, and the guide's two vectors
        moved = {n for n, v in model.state_dict().items() if not torch.equal(v, state[n])}
        biases = {"network.network.0.bias", "network.network.2.bias"}
        assert moved == {*biases, "noise_unconstrained"} and guide.layout.size == 12
        own = model.network
        stored = pyro.get_param_store()[f"{own._own_name}.network.2.bias"]
        assert stored is own.network[2].bias


def test_parameters_without_a_prior_are_learned_by_torch():
    bnn = _partly()
    model = models.Regression(bnn, noise=PyroParam(torch.tensor(1.0), constraints.positive))
    x, y = torch.randn(8, 2), torch.full((8,), 5.0)
    guide = AutoMeanField(model).prototype(x, y)
    loss = TemperedTraceMeanField_ELBO()(model, guide)
    loss(x, y).backward()
    parameters = list(loss.parameters())
    assert len(parameters) == 5 and all(p.grad is not None for p in parameters)
    wanted = [bnn.network[0].bias, bnn.network[2].bias, guide.loc, guide.scale_unconstrained]
    assert {id(p) for p in wanted} < {id(p) for p in parameters}


def test_the_networks_values_are_where_the_guide_starts():
    """Those of the network, or those that are loaded later."""
    for loaded in (False, True):
        net = small_mlp()
        model = models.Regression(bayesianize(small_mlp() if loaded else net), noise=0.5)
        if loaded:
            model.network.network.load_state_dict(net.state_dict())
        median = AutoMeanField(model).prototype(torch.randn(4, 2), torch.randn(4)).median()
        assert all(torch.equal(median[name], value) for name, value in net.named_parameters())


def test_a_parametrized_module_keeps_its_parametrization():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    bnn = bayesianize(net)
    assert bnn.sites == (
        "bias",
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    )
    torch.testing.assert_close(record(bnn, _own_values(bnn), (x,)).result, net(x))


# Refusals


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        bayesianize(lambda x: x)
    with pytest.raises(ValueError, match="no parameter"):
        bayesianize(nn.Linear(1, 1), priors.ByName({"nothing": priors.Normal()}))
    with pytest.raises(ValueError, match=r"'weight'.*\(4,\).*\(1, 3\)"):
        bayesianize(nn.Linear(3, 1), lambda name, m, p: dist.Normal(torch.zeros(4), 1.0))
    with pytest.raises(TypeError, match=r"prior must be.* got the distribution Normal"):
        bayesianize(nn.Linear(3, 1), dist.Normal(0.0, 1.0))
    with pytest.raises(TypeError, match=r"prior must be.* got str"):
        bayesianize(nn.Linear(3, 1), "normal")
    with pytest.raises(TypeError, match="prior of 'weight' gave float"):
        bayesianize(nn.Linear(3, 1), lambda name, m, p: 1.0)


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.cfloat))
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        return self.linear((x * self.phase).real)


def _called(net, x):
    net(x)
    return net


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda n: torch.jit.trace(n, X)])
@pytest.mark.parametrize("part", [False, True])
def test_torchscript_is_refused(scripted, part):
    net = scripted(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"(its part '0'|it) is compiled to TorchScript"):
        bayesianize(nn.Sequential(net) if part else net)


def test_parameters_that_cannot_be_sampled_are_named():
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedProgramError, match=r"'0.weight' of LazyLinear .* call the net"):
        bayesianize(lazy)
    assert bayesianize(_called(lazy, X)).sites == ("0.weight", "0.bias")
    renormalized = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 1))
    with pytest.raises(UnsupportedProgramError, match=r"'0.weight' has max_norm"):
        bayesianize(renormalized)
    assert bayesianize(renormalized, where="1.*").sites == ("1.weight", "1.bias")
    with pytest.raises(UnsupportedProgramError, match="'phase' is complex"):
        bayesianize(_Complex())
    some = bayesianize(_Complex(), priors.ByName({"linear.*": priors.Normal(1.0)}))
    assert some.learnable == ("phase",) and some(X).shape == (len(X), 1)


@pytest.mark.parametrize(
    "hooked", [lambda m: prune.l1_unstructured(m, "weight", amount=0.5), weight_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weights_that_a_hook_computes_are_refused(hooked):
    net = nn.Sequential(nn.Linear(2, 2))
    hooked(net[0])
    with pytest.raises(UnsupportedProgramError, match=r"'0.weight' is computed .* by a hook"):
        bayesianize(net)
    if hooked is not weight_norm:
        prune.remove(net[0], "weight")
        assert set(bayesianize(net).sites) == {"0.weight", "0.bias"}


class _Empty(nn.Module):
    """Parameters without entries beside others."""

    def __init__(self):
        super().__init__()
        self.linear, self.none = nn.Linear(2, 1), nn.Linear(0, 1)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.linear(x) + self.none(x[:, :0]) + self.empty.sum()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("guide", [AutoMeanField, AutoMatrixNormal, "full", "diag", "kron"])
def test_parameters_without_entries(guide):
    model, y = models.Regression(bayesianize(_Empty().double()), noise=0.5), X[:, 0].double()
    if isinstance(guide, str):
        source = AutoLaplaceGGN(model, structure=guide)
        with pytest.warns(BdlWarning, match="not at a maximum"):
            posterior = source.laplace_approximation((X.double(), y))
    else:
        posterior = guide(model)
        TemperedTrace_ELBO()(model, posterior)(X.double(), y).backward()
    draws = posterior.sample_latents(3)
    assert draws["empty"].shape == (3, 0, 3) and draws["none.weight"].shape == (3, 1, 0)


def _replaced(bnn):
    bnn.network[0] = nn.Linear(2, 3)


def _added(bnn):
    bnn.network.append(nn.Linear(1, 1))


def _taken_out(bnn):
    bnn.network[2] = nn.Flatten()


@pytest.mark.parametrize(
    "change,message",
    [
        (_replaced, "'0.weight' came into the network after bayesianize"),
        (_added, "'3.weight' came into the network after bayesianize"),
        (_taken_out, "the weights '2.weight' was taken out"),
        (lambda bnn: setattr(bnn, "network", nn.Linear(2, 1)), "'weight' came into the network"),
    ],
)
def test_layers_that_are_changed_later_are_refused(change, message):
    bnn = bayesianize(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    copied = copy.deepcopy(bnn)
    change(bnn)
    with pytest.raises(UnsupportedProgramError, match=message):
        AutoMeanField(models.Regression(bnn)).prototype(X)
    assert Program(copied, X).size == 13
    change(copied)
    with pytest.raises(UnsupportedProgramError, match=message):
        Program(copied, X)


def test_layers_without_parameters_may_be_changed_later():
    bnn = bayesianize(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    bnn.network[1] = nn.Softplus()
    frozen = nn.Linear(1, 1).requires_grad_(False)
    bnn.network.append(frozen)
    with poutine.trace() as tracer:
        output = bnn(X)
    weights = {name: site["value"] for name, site in tracer.trace.nodes.items()}
    hidden = nn.functional.softplus(X @ weights["0.weight"].T + weights["0.bias"])
    expected = frozen(hidden @ weights["2.weight"].T + weights["2.bias"])
    torch.testing.assert_close(output, expected)


def test_pyros_plates_of_draws_are_refused():
    model = models.Regression(bayesianize(nn.Linear(3, 1)), noise=1.0)
    x, y = torch.randn(4, 3), torch.randn(4)
    elbo = pyro.infer.Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
    with pytest.raises(UnsupportedProgramError, match=r"pyro_bdl\.elbo .*pyro_bdl\.Predictive"):
        elbo.loss(model, AutoMeanField(model).prototype(x, y), x, y)
    with pytest.raises(UnsupportedProgramError, match=r"pyro_bdl\.elbo .*pyro_bdl\.Predictive"):
        pyro.infer.Predictive(model, num_samples=2, parallel=True)(x)
