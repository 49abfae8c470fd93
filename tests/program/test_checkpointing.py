"""Networks that checkpoint their activations have the posterior of those that do not."""

import threading
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from pyro.optim import SGD
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pyro_bdl as bdl
from pyro_bdl.mcmc.jax.translate import to_jax
from pyro_bdl.program import Program
from pyro_bdl.program.checkpointing import kept_for_recomputation


class _Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.reentrant, self.calls = reentrant, []

    def _body(self, x):
        self.calls.append(torch.is_grad_enabled())
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self._body(x)
        return checkpoint(self._body, x, use_reentrant=self.reentrant)


class _Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.start = nn.Linear(2, 3)
        self.blocks = nn.ModuleList([_Block(reentrant) for _ in range(2)])
        self.end = nn.Linear(3, 1)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def _program(reentrant):
    torch.manual_seed(0)
    return bdl.models.Regression(
        bdl.bayesianize(_Net(reentrant)), noise=dist.HalfNormal(1.0), num_data=6
    )


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, generator=generator), torch.randn(6, 1, generator=generator)


def _calls(model):
    return sum(len(m.calls) for m in model.modules() if isinstance(m, _Block))


WAYS = [True, False]


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("reentrant", WAYS)
def test_elbo_has_the_gradient_of_the_network_without_checkpoints(data, reentrant, particles):
    gradients, calls = [], []
    for way in (None, reentrant):
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


@pytest.mark.parametrize("reentrant", WAYS)
@pytest.mark.parametrize(
    "elbo", [bdl.elbo.TemperedTraceMeanField_ELBO, bdl.elbo.CompiledELBO], ids=["plain", "compiled"]
)
@pytest.mark.parametrize("particles", [1, 2])
def test_svi_steps_are_those_without_checkpoints(data, reentrant, elbo, particles):
    losses = []
    for way in (None, reentrant):
        pyro.clear_param_store()
        model = _program(way)
        guide = bdl.guides.AutoMeanField(model)
        svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo(num_particles=particles))
        torch.manual_seed(2)
        losses.append([svi.step(*data) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0])


@pytest.mark.parametrize("reentrant", WAYS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_laplace_is_that_without_checkpoints(data, reentrant, structure):
    found = []
    for way in (None, reentrant):
        pyro.clear_param_store()
        model = _program(way)
        guide = bdl.guides.AutoLaplaceGGN(model, structure=structure)
        svi = SVI(model, guide, SGD({"lr": 1e-3}), Trace_ELBO())
        svi.step(*data)
        posterior = guide.laplace_approximation(data)
        found.append(posterior.variances())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("reentrant", WAYS)
def test_the_density_of_mcmc_has_its_gradient_in_torch_and_jax(data, reentrant):
    found = []
    for way in (None, reentrant):
        program = Program(_program(way), *data)
        point = program.unconstrain(program.initial).requires_grad_()
        found.append(torch.autograd.grad(program.log_density(point), point)[0])
    density = to_jax(lambda vector: program.log_density(vector), point.detach())
    with jax.enable_x64(True):
        translated = jax.grad(density)(jnp.asarray(point.detach().numpy()))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(torch.from_numpy(np.array(translated)), found[0])


@pytest.mark.parametrize("reentrant", WAYS)
def test_weights_sampled_in_a_checkpoint_keep_their_values(data, reentrant):
    x, y = data

    class Sampled(PyroModule):
        def __init__(self, reentrant):
            super().__init__()
            self.layer = PyroModule[nn.Linear](2, 1, bias=False)
            self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
            self.end = PyroSample(dist.Normal(0.0, 1.0))
            self.reentrant = reentrant

        def forward(self, x, y):
            x = x.requires_grad_()
            f = (
                self.layer(x)
                if reentrant is None
                else checkpoint(self.layer, x, use_reentrant=reentrant)
            )
            mean = (f.tanh() * self.end)[:, 0]
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    found = []
    for way in (None, reentrant):
        program = Program(Sampled(way), x, y[:, 0])
        point = torch.tensor([0.3, -0.4, 0.5], requires_grad=True)
        found.append(torch.autograd.grad(program.log_density(point), point)[0])
    torch.testing.assert_close(found[1], found[0])


def test_second_derivatives_and_segments(data):
    x, _ = data
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    bnn = bdl.bayesianize(net)

    class Segments(nn.Module):
        def __init__(self, net, reentrant):
            super().__init__()
            self.net, self.reentrant = net, reentrant

        def forward(self, x):
            if self.reentrant is None:
                return self.net(x)
            return checkpoint_sequential(self.net, 2, x, use_reentrant=self.reentrant)

    values = {
        f"net.{name}": torch.randn_like(bnn.get_buffer(f"network.{name}")) for name in bnn.sites
    }
    found = []
    for reentrant in (None, True, False):
        bnn = bdl.bayesianize(Segments(net, reentrant))
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        with pyro.poutine.condition(data=leaves):
            total = bnn(x).square().sum()
        first = torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        scalar = sum(g.square().sum() for g in first)
        found.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(leaves.values()))])
        )
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def _torchs_own():
    """The functions of torch's module, where no substitution holds."""
    names = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
    names += ("_checkpoint_without_reentrant_generator_impl",)
    return [getattr(torch.utils.checkpoint, name, None) for name in names]


def test_torch_is_as_it_was_outside_of_runs(data):
    before = _torchs_own()
    assert {value.__module__ for value in before if value is not None} == {"torch.utils.checkpoint"}
    model = _program(False)
    program = Program(model, *data)
    density = program.log_density(torch.zeros(program.size, requires_grad=True))
    assert _torchs_own() == before
    density.backward()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(6, 5))
    assert _torchs_own() == before


def test_runs_of_two_threads_that_overlap_leave_torch_as_it_was(data):
    """The one that began first ends first, and the other one still computes again."""
    before, inside, done = _torchs_own(), threading.Event(), threading.Event()

    def first():
        with kept_for_recomputation(nullcontext):
            inside.set()
            done.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    used = []

    @contextmanager
    def marked():
        used.append(True)
        yield

    x = data[0].clone().requires_grad_()
    net = _Net(False)
    with kept_for_recomputation(marked):
        done.set()
        thread.join()
        total = net(x).sum()
    assert _torchs_own() == before
    total.backward()
    assert used == [True, True]  # one for each block


@pytest.mark.parametrize("reentrant", WAYS)
def test_other_networks_checkpoint_as_ever(data, reentrant):
    x = data[0].clone().requires_grad_()
    net, plain = _Net(reentrant), _Net(None)
    plain.load_state_dict(net.state_dict())
    net(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert _calls(net) == 4
    if reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            torch.autograd.grad(net(x).sum(), x)
