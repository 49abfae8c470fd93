"""Mixed precision: the network's forward pass in bfloat16, parameters and KL in float32."""

import pyro.distributions as dist
import pytest
import torch
from helpers.guide_programs import X, Y
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoLowRank, AutoMeanField

pytestmark = pytest.mark.usefixtures("compiled")
HALF = torch.bfloat16


class Net(nn.Module):
    """A network that records what dtype its layers compute in."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 16), nn.Linear(16, 1)
        self.seen = set()

    def forward(self, x):
        hidden = self.first(x)
        self.seen.add(hidden.dtype)
        return self.last(hidden.tanh())


def program(device="cpu"):
    torch.manual_seed(0)
    bnn = bdl.bayesianize(Net(), bdl.priors.Normal(1.0))
    seen = next(module.seen for module in bnn.modules() if hasattr(module, "seen"))
    return bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0), num_data=60).to(device), seen


def trained(elbo, kind=AutoMeanField, *, cast=True, steps=5, device="cpu"):
    """Losses, KLs, gradients of the last step and the guide of some steps of SGD."""
    model, seen = program(device)
    x, y = X.to(device), Y.to(device)
    guide = kind(model).prototype(x, y)
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-4)
    losses, kls = [], []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, HALF, enabled=cast):
            loss = elbo.differentiable_loss(model, guide, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        kls.append(elbo.kl)
    gradients = torch.cat([p.grad.reshape(-1) for p in guide.parameters()])
    return torch.stack(losses), torch.stack(kls), gradients, guide, seen


@pytest.mark.parametrize("options", [{}, {"estimator": "local_reparameterization"}])
def test_the_forward_pass_is_cast_and_nothing_else(options):
    full = trained(TemperedTraceMeanField_ELBO(**options), cast=False)
    half = trained(TemperedTraceMeanField_ELBO(**options))
    if not options:
        assert HALF in half[-1] and HALF not in full[-1]
    assert {value.dtype for value in (*half[:3], *half[3].parameters())} == {torch.float32}
    assert not torch.equal(half[0], full[0])
    torch.testing.assert_close(half[0], full[0], rtol=0.01, atol=0.0)
    assert (half[2] - full[2]).norm() < 0.03 * full[2].norm()


@pytest.mark.parametrize("bound", [TemperedTrace_ELBO, TemperedTraceMeanField_ELBO])
@pytest.mark.parametrize("kind", [AutoMeanField, AutoLowRank])
def test_the_kl_is_that_of_float32_to_the_last_bit(kind, bound):
    half = trained(bound(), kind, steps=1)
    full = trained(bound(), kind, steps=1, cast=False)
    assert torch.equal(half[1], full[1])


def test_the_compiled_bound_takes_the_same_steps():
    elbo = CompiledELBO()
    found = trained(elbo)
    expected = trained(TemperedTraceMeanField_ELBO())
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (elbo.num_traces, elbo.num_replays) == (1, 2)
    assert {p.dtype for p in found[3].parameters()} == {torch.float32}


def test_each_precision_has_its_own_graph():
    model, _ = program()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo, plain = CompiledELBO(), TemperedTraceMeanField_ELBO()
    for step, cast in enumerate([True, False] * 4):
        losses = []
        for bound in (elbo, plain):
            torch.manual_seed(step)
            with torch.autocast("cpu", HALF, enabled=cast):
                losses.append(bound.differentiable_loss(model, guide, X, Y))
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)
    assert (elbo.num_traces, elbo.num_replays) == (2, 2)


def test_parameters_of_the_program_are_cast_anew_in_a_graph():
    """A cast that autocast keeps is a tensor from outside the trace."""
    torch.manual_seed(0)
    layer, last = nn.Linear(2, 8), bdl.bayesianize(nn.Linear(8, 1), bdl.priors.Normal(1.0))
    model = bdl.models.Regression(nn.Sequential(layer, last), noise=0.3)
    guide = AutoMeanField(model).prototype(X, Y)
    elbo, plain = CompiledELBO(), TemperedTraceMeanField_ELBO()
    gradients = []
    for bound in (elbo, plain):
        with torch.autocast("cpu", HALF):
            for step in range(4):
                torch.manual_seed(step)
                layer.zero_grad()
                bound.differentiable_loss(model, guide, X, Y).backward()
        gradients.append(layer.weight.grad)
    assert elbo.num_replays == 1
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [TemperedTraceMeanField_ELBO, CompiledELBO])
def test_on_another_device(bound, device):
    full = trained(TemperedTraceMeanField_ELBO(), cast=False, device=device)
    half = trained(bound(), device=device)
    torch.testing.assert_close(half[0], full[0], rtol=0.01, atol=0.0)
    assert {p.dtype for p in half[3].parameters()} == {torch.float32}
