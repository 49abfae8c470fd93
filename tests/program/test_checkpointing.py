"""Networks that checkpoint their activations have the posterior of those that do not."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import SGD
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import pyro_bdl as bdl
from pyro_bdl.nn import checkpoint
from pyro_bdl.program import Program


class _Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.way, self.calls = way, []

    def _body(self, x):
        self.calls.append(torch.is_grad_enabled())
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return self._body(x) if self.way is None else self.way(self._body, x)


class _Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.start = nn.Linear(2, 3)
        self.blocks = nn.ModuleList([_Block(way) for _ in range(2)])
        self.end = nn.Linear(3, 1)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def _program(way):
    torch.manual_seed(0)
    return bdl.models.Regression(bdl.bayesianize(_Net(way)), noise=dist.HalfNormal(1.0), num_data=6)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, generator=generator), torch.randn(6, 1, generator=generator)


def _calls(model):
    return sum(len(m.calls) for m in model.modules() if isinstance(m, _Block))


@pytest.mark.parametrize("particles", [1, 2])
def test_elbo_has_the_gradient_of_the_network_without_checkpoints(data, particles):
    gradients, calls = [], []
    for way in (None, checkpoint):
        pyro.clear_param_store()
        model = _program(way)
        guide = bdl.guides.AutoMeanField(model)
        guide.prototype(*data)
        before = _calls(model)
        torch.manual_seed(2)
        Trace_ELBO(num_particles=particles).differentiable_loss(model, guide, *data).backward()
        calls.append(_calls(model) - before)
        gradients.append([p.grad for p in guide.parameters()])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    assert calls == [2 * particles, 4 * particles]  # computed again in the backward pass


def test_the_density_of_mcmc_has_its_gradient(data):
    found = []
    for way in (None, checkpoint):
        program = Program(_program(way), *data)
        point = program.unconstrain(program.initial).requires_grad_()
        found.append(torch.autograd.grad(program.log_density(point), point)[0])
        found.append(torch.autograd.grad(program.compile()(point), point)[0])
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0])


def test_second_derivatives(data):
    found = []
    for way in (None, checkpoint):
        bnn = bdl.bayesianize(_Net(way))
        generator = torch.Generator().manual_seed(3)
        values = {
            name: torch.randn(bnn.get_buffer(f"network.{name}").shape, generator=generator)
            for name in bnn.sites
        }
        leaves = [value.requires_grad_() for value in values.values()]
        with pyro.poutine.condition(data=values):
            total = bnn(data[0]).square().sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        scalar = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(scalar, leaves))
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_compiled_steps_and_laplace_are_those_without_checkpoints(data):
    losses, variances = [], []
    for way in (None, checkpoint):
        pyro.clear_param_store()
        model = _program(way)
        guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
        elbo = bdl.elbo.CompiledELBO(num_particles=2)
        svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
        torch.manual_seed(2)
        losses.append([svi.step(*data) for _ in range(4)])
        variances.append(guide.laplace_approximation(data).variances())
    assert losses[1] == pytest.approx(losses[0])
    torch.testing.assert_close(*variances)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_torchs_own_checkpoint_is_refused(data, reentrant):
    x, _ = data
    bnn = bdl.bayesianize(_Net(partial(torch_checkpoint, use_reentrant=reentrant)))
    weights = {f"{name}": bnn.get_buffer(f"network.{name}") for name in bnn.sites}
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    with (
        pytest.raises((RuntimeError, ValueError), match=r"call pyro_bdl\.nn\.checkpoint"),
        pyro.poutine.condition(data=leaves),
    ):
        bnn(x)
    with torch.no_grad():
        bnn(x)
    net, plain = _Net(checkpoint), _Net(None)  # outside of bayesianize as torch's
    plain.load_state_dict(net.state_dict())
    net(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(*([p.grad for p in n.parameters()] for n in (net, plain)))
    assert _calls(net) == 4
