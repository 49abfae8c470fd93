"""Checks of other devices on a machine that has none: where tensors are made.

A tensor made without ``device=`` stands on torch's default device, which is neither that of the
program's tensors nor, after ``torch.set_default_device``, the CPU.
"""

import ast
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributions.copies import moved_like
from pyro_bdl.guides import AutoMCDropout, AutoMeanField
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.scales import hyperparameter
from pyro_bdl.utils.random_state import fixed_normal

PACKAGE = Path(bdl.__file__).parent
FACTORIES = (
    "arange as_tensor asarray empty eye full linspace logspace normal ones rand randint randn "
    "randperm scalar_tensor tensor tril_indices triu_indices zeros"
)


def forgotten(source):
    """Lines of calls such as ``torch.zeros(3)``, which name no device."""
    factories = {f"torch.{name}" for name in FACTORIES.split()}
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    for call in calls:
        named = {keyword.arg for keyword in call.keywords}
        if ast.unparse(call.func) in factories and "device" not in named:
            yield f"{call.lineno}: {ast.unparse(call)}"


def test_every_tensor_is_made_on_a_device_that_is_named():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in forgotten(path.read_text())
    }
    assert not found, "name a device; what stays on the host has device='cpu': " + ", ".join(found)


# "meta" stands for a device below: tensors there have shapes and no values


def test_fixed_noise_is_the_same_on_every_device_and_leaves_the_generators_alone():
    like, state = torch.zeros(3, 4, dtype=torch.float64), torch.get_rng_state()
    noise = fixed_normal(like, seed=3)
    assert noise.dtype == torch.float64 and torch.equal(noise, fixed_normal(like, seed=3))
    assert not torch.equal(noise, fixed_normal(like, seed=4))
    with torch.device("meta"):
        assert torch.equal(noise, fixed_normal(like, seed=3))
    assert torch.equal(torch.get_rng_state(), state)


def test_learned_hyperparameters_stand_beside_the_network():
    with torch.device("meta"):
        net = nn.Linear(2, 1)
    start = PyroParam(torch.tensor(0.5), dist.constraints.positive)
    with pyro.validation_enabled(False):  # which reads values
        for prior in (bdl.priors.Normal(start), bdl.priors.FanIn(2.0)):
            model = bdl.models.Regression(bdl.bayesianize(net, prior), noise=start)
            assert model.noise.device.type == "meta"
            network = bdl.nn.with_prior(model, bdl.priors.learnable).network
            assert {parameter.device.type for parameter in network.parameters()} == {"meta"}


@pytest.mark.parametrize("value", [0.5, dist.HalfNormal(1.0)])
def test_numbers_of_priors_follow_the_weights(value):
    like = torch.empty(3, dtype=torch.float64, device="meta")
    if isinstance(value, float):
        found = hyperparameter(value, "noise", like)
    else:
        found = moved_like(value, like).scale
    assert found.device.type == "meta" and found.dtype == torch.float64 and found.shape == ()


def test_minibatches_are_drawn_where_the_data_are():
    x = torch.empty(6, 2, device="meta")
    data = MinibatchSource((x, x[:, 0]), batch_size=4)
    (found, _), _ = next(data.one_pass())
    assert found.device == x.device and found.shape == (4, 2)


def test_the_step_of_learned_rates_is_counted_on_the_host():
    """A guide that moves takes all but the counter along, which every step reads."""
    x, y = torch.randn(8, 2), torch.randn(8)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5)
    guide = AutoMCDropout(model, learn_p=True).prototype(x, y).to("meta")
    assert {p.device.type for p in guide.parameters()} == {"meta"}
    assert guide.steps.device.type == "cpu" and "steps" in guide.state_dict()


def test_indices_of_a_plate_may_stand_on_another_device(monkeypatch):
    """Pyro draws those of a subsampled plate on the CPU, wherever the data are."""

    def program(x, y=None):
        with pyro.plate("data", 6, subsample_size=3) as rows:
            z = pyro.sample("z", dist.Normal(x[rows], 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=None if y is None else y[rows])

    x = torch.randn(6)
    guide, seen = AutoMeanField(program).prototype(x, x), []
    plain = torch.Tensor.index_select

    def select(self, dim, index):
        seen.append(index)
        return plain(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", select)
    guide(x, x)
    assert seen and all(index.device == guide.loc.device for index in seen)


def test_latents_of_plain_numbers_stand_where_the_others_do():
    """Normal(0.0, 1.0) draws on the CPU, also for data elsewhere."""

    def program(x):
        pyro.sample("w", dist.Normal(torch.zeros_like(x), 1.0).to_event(1))
        with pyro.plate("levels", 3):
            pyro.sample("level", dist.Normal(0.0, 1.0))

    x = torch.empty(2, device="meta")
    with pyro.validation_enabled(False):
        found = bdl.Program(program, x)
        assert {value.device.type for value in found.initial.values()} == {"meta"}
        assert {latent.device.type for latent in found.latents.values()} == {"meta"}
        assert found.log_density(torch.empty(5, device="meta")).device.type == "meta"
