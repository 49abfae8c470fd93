"""Checks of other devices on a machine that has none: where tensors are made.

A tensor made without ``device=`` stands on torch's default device, which is neither that of the
program's tensors nor, after ``torch.set_default_device``, the CPU.
"""

import ast
import copy
import warnings
from inspect import signature
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import second_device
from helpers.calls import OF_THE_PROGRAM, Case, results
from pyro.nn import PyroParam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import metrics
from pyro_bdl.distributions.copies import moved_like
from pyro_bdl.guides import AutoMCDropout, AutoMeanField
from pyro_bdl.mcmc.stochastic_gradient.minibatches import MinibatchSource
from pyro_bdl.scales import hyperparameter
from pyro_bdl.utils.random_state import fixed_normal
from pyro_bdl.utils.trees import tree_leaves

POSITIVE = dist.constraints.positive
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


# The second device, with float64 and without


def _numbers(device):
    """Arguments of the metrics, by their names, float32."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(40, 12, generator=generator)
    other = draws.flip(0) * 1.3 + 0.2
    p, q = (value.reshape(40, 4, 3).softmax(-1) for value in (draws, other))
    known = {
        "draws": draws, "a": draws, "b": other, "y": other[0], "score": draws[0],
        "other": other[1], "error": (other[2] > 0).float(), "mean": draws.mean(0),
        "variance": draws.var(0), "noise": other.square(), "probabilities": p.mean(0),
        "log_likelihood": -draws.square(),
    }  # fmt: skip
    moments = {"a_mean": 0, "a_variance": 1, "b_mean": 2, "b_variance": 3}
    known |= {name: draws[number].square() + 0.1 for name, number in moments.items()}
    labels, of_draws = torch.tensor([0, 1, 2, 1]), {"a": p, "b": q, "probabilities": p}
    known = {name: value.to(device) for name, value in known.items()}
    return known, labels.to(device), {name: value.to(device) for name, value in of_draws.items()}


def test_deep_convolutions_keep_their_rows_apart(device):  # which a GPU rounds to TF32
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.SiLU()]
    for _ in range(12):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.SiLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(16, 3, 8, 8), torch.randint(3, (16,))
    model = bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0))).to(device)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = guide.laplace_approximation((x.to(device), y.to(device)))
    assert posterior.median()["0.weight"].device.type == device.type


@pytest.mark.parametrize("name", metrics.__all__)
def test_a_metric_says_the_same_on_every_device(name, device):
    function, results = getattr(metrics, name), []
    for there in ("cpu", device):
        known, labels, of_draws = _numbers(there)
        names = [n for n, p in signature(function).parameters.items() if p.default is p.empty]
        if name in ("agreement", "categorical_kl", "total_variation", "entropy_parts"):
            known |= of_draws
        if "probabilities" in names:
            known["y"] = labels
        if name == "variance_parts":
            known["mean"] = known["draws"]
        torch.manual_seed(0)
        found = function(*(known[n] for n in names))
        results.append([value.cpu() for value in tree_leaves(found)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12, equal_nan=True)


def _problem(task, device):
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    slope = x[:, 0] + 0.3 * torch.randn(30)
    y = slope if task == "regression" else (slope > 0).long()
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1 if task == "regression" else 2))
    network = bdl.bayesianize(net, bdl.priors.Normal(PyroParam(torch.tensor(1.0), POSITIVE)))
    if task == "regression":
        model = bdl.models.Regression(network, noise=PyroParam(torch.tensor(0.5), POSITIVE))
    else:
        model = bdl.models.Classification(network)
    return model.to(device), x.to(device), y.to(device)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["full", pytest.param("kron", marks=pytest.mark.slow)])
def test_approximation_evidence_and_comparison_say_the_same(task, structure, device):
    results, mode = [], None
    for there in ("cpu", device):
        model, x, y = _problem(task, there)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guide = bdl.guides.AutoLaplaceGGN(model, structure=structure).prototype(x, y)
            if mode is None:
                bdl.training.train(model, guide, x, y, steps=300, progress=False)
                mode = guide.loc.detach().clone()
                start = copy.deepcopy(model.state_dict())
            model.load_state_dict(start)
            with torch.no_grad():
                guide.loc.copy_(mode)
            laplace = guide.laplace_approximation((x, y))
            found = [bdl.evidence.log_marginal_likelihood(laplace)]
            for options in ({"linearized": True}, {"method": "gradient", "steps": 5}):
                fitted = guide.laplace_approximation((x, y))
                found.append(bdl.evidence.maximize(fitted, **options).log_evidence)
            wide = guide.laplace_approximation((x[:20], y[:20]), held_out=(x[20:], y[20:]))
            predictive = bdl.LinearizedPredictive(model, laplace, 40)
            found += [wide.width, predictive.log_density(x, y)["y"].sum()]
            comparison = bdl.compare(
                model, {"map": guide, "laplace": laplace}, x, y, reference="laplace", num_samples=40
            )
        table = comparison.table
        assert table.loc[["map", "laplace"], "nlpd"].notna().all()
        results.append(torch.tensor([float(value) for value in found]))
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", OF_THE_PROGRAM)
def test_a_call_says_the_same_on_every_device(name, device):
    here, there = results(name, Case()), results(name, Case(device=device))
    if device.type == second_device.NAME:  # whose random numbers are those of the CPU
        there = [value.to("cpu", one.dtype) for value, one in zip(there, here, strict=True)]
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)
    assert all(value.isfinite().all() for value in there)
