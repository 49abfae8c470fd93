"""The contract of a program: errors name the argument or the parameter that breaks it."""

import functools
import math

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField
from pyro_bdl.program import record
from pyro_bdl.program.check import check_finite, named_arguments, on_whole_data
from pyro_bdl.program.program import Program
from pyro_bdl.program.supports import check_support
from pyro_bdl.training import train

X, Y = torch.randn(12, 2), torch.randn(12)


@pytest.fixture(scope="module")
def model():
    return bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1)), num_data=12)


# Arguments of the wrong kind

CALLS = {
    "Predictive": lambda model, x, y: bdl.Predictive(
        model, AutoMeanField(model).prototype(X, Y), 3
    )(x, y),
    "log_likelihood": lambda model, x, y: bdl.Predictive(
        model, AutoMeanField(model).prototype(X, Y), 3
    ).log_likelihood(x, y),
    "prototype": lambda model, x, y: AutoMeanField(model).prototype(x, y),
    "train": lambda model, x, y: train(model, AutoMeanField(model), x, y, steps=1),
    "estimate_elbo": lambda model, x, y: bdl.training.estimate_elbo(
        model, AutoMeanField(model), x, y
    ),
    "svi": lambda model, x, y: pyro.infer.SVI(
        model, AutoMeanField(model), pyro.optim.Adam({}), pyro.infer.Trace_ELBO()
    ).step(x, y),
    "laplace": lambda model, x, y: (
        AutoLaplaceGGN(model, structure="diag").prototype(X, Y).laplace_approximation((x, y))
    ),
    "nuts": lambda model, x, y: bdl.mcmc.sample(model, x, y, num_warmup=1, num_samples=1),
    "sgmcmc": lambda model, x, y: bdl.mcmc.sgmcmc(
        model, (x, y), kernel=bdl.mcmc.SGLD(step_size=1e-4)
    ),
}
KINDS = {
    "numpy": (X.numpy(), Y.numpy(), r"x is a numpy ndarray.*torch\.as_tensor"),
    "pandas": (pd.DataFrame(X.numpy()), pd.Series(Y.numpy()), "x is a pandas DataFrame"),
    "lists": (X.tolist(), Y.tolist(), "x is a list of numbers"),
    "double": (
        X.double(),
        Y.double(),
        r"x has dtype torch\.float64, and the weights have torch\.float32: pass x\.to\(",
    ),
}


@pytest.mark.parametrize(
    ("call", "kind"),
    [(c, k) for c in CALLS for k in ("numpy", "double")]
    + [("svi", kind) for kind in ("pandas", "lists")],
)
def test_an_argument_of_the_wrong_kind_is_named(model, call, kind):
    x, y, message = KINDS[kind]
    with pytest.raises(ArgumentError, match=message):
        CALLS[call](model, x, y)


@pytest.mark.parametrize("num_particles", [1, 2])
def test_it_is_named_at_a_later_step_too(model, num_particles):
    loss = TemperedTrace_ELBO(num_particles=num_particles)(model, AutoMeanField(model))
    loss(X, Y).backward()
    for x, y, message in KINDS.values():
        with pytest.raises(TypeError, match=message):
            loss(x, y)


def test_compare_and_passes_over_data_take_tensors(model):
    guide = AutoMeanField(model).prototype(X, Y)
    compare = functools.partial(bdl.compare, model, {"a": guide}, reference=None, num_samples=3)
    for kind in ("numpy", "pandas", "lists"):
        x, y, _ = KINDS[kind]
        with pytest.raises(TypeError, match=r"x_test must be a tensor, got .*torch\.as_tensor"):
            compare(x, y)
        with pytest.raises(TypeError, match="y_train must be a tensor"):
            compare(X, Y, train=(X, y))
        data = (x, y) if kind == "lists" else x
        with pytest.raises(TypeError, match=r"(of tensors, got (DataFrame|ndarray)|is a list)"):
            AutoLaplaceGGN(model).laplace_approximation(data)
    with pytest.raises(ArgumentError, match=r"x has dtype torch\.float64"):
        compare(X.double(), Y)


def test_what_a_program_takes_is_no_fault(model):
    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x[0])):
            given = None if y is None else torch.as_tensor(y)
            pyro.sample("y", dist.Normal(torch.as_tensor(x[0]) @ w, 1.0), obs=given)

    x, y = [X.numpy()], Y.numpy()
    guide = AutoMeanField(program).prototype(x, y)
    assert bdl.Predictive(program, guide, 3)(x)["y"].shape == (3, 12)
    with pytest.raises(RuntimeError, match="size mismatch"):
        AutoMeanField(program).prototype([X[:, :1]], Y)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        AutoMeanField(model).prototype(torch.randn(12, 3), Y)


@pytest.mark.parametrize("elbo", [TemperedTrace_ELBO(), CompiledELBO()])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:CompiledELBO runs .* sparse tensor:UserWarning")
def test_sparse_inputs(model, elbo):
    guide = AutoMeanField(model).prototype(X, Y)
    losses = []
    for x in (X, X.to_sparse(), X.to_sparse_csr()):
        torch.manual_seed(0)
        losses.append(elbo.loss_and_grads(model, guide, x, Y))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    bad = X.index_fill(0, torch.tensor(3), math.nan).to_sparse()
    with pytest.raises(ValueError, match="x holds NaN or infinity in rows 3"):
        elbo.loss_and_grads(model, guide, bad, Y)
    with pytest.raises(TypeError, match=r"x is sparse.* pass x\.to_dense\(\)"):
        AutoLaplaceGGN(model, structure="full").laplace_approximation([(X.to_sparse(), Y)])


def test_names_under_handlers(model):
    def program(x, *rest, **named):
        return x

    for wrapped in (
        model,
        bdl.handlers.temper(model, 0.5),
        bdl.nn.with_prior(model, AutoMeanField(model).prototype(X, Y)),
        poutine.block(poutine.scale(model, 2.0)),
        on_whole_data(bdl.handlers.cold(model, 0.5)),
        AutoMeanField(model).model,
    ):
        assert list(named_arguments(wrapped, (X, Y), {})) == ["x", "y"]
    names = list(named_arguments(program, (X, Y, Y), {"z": X}))
    assert names == ["x", "argument 1", "argument 2", "z"]
    assert list(named_arguments(program, (), {"z": X})) == ["z"]
    for unnamed in (lambda *a: a, functools.partial(program, X)):
        assert list(named_arguments(unnamed, (X,), {})) == ["argument 0"]
    assert list(named_arguments(lambda x: x, (X, Y), {})) == ["argument 0", "argument 1"]
    assert np.shares_memory(named_arguments(model, (X,), {})["x"].numpy(), X.numpy())


# Values


def test_masked_targets_may_lie_anywhere():
    def program(y, mask):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(1.0), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate).mask(mask), obs=y)

    y, mask = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="in rows 2: correct"):
        check_support(record(program, {}, (y, mask)))
    check_support(record(program, {}, (y[:2], mask[:2])))
    with pytest.raises(ValueError, match=r"y holds NaN .*where a mask leaves them out"):
        check_finite(lambda y: None, (torch.tensor([1.0, math.nan]),), {})


@pytest.mark.parametrize(
    "top",
    [
        lambda a: a.exp(),
        lambda a: 1.0 + torch.relu(a - 2.0),  # the same around the start
        lambda a: 1.0 + (a > 0.2).float(),
    ],
    ids=["moving", "at rest", "a step"],
)
def test_a_support_that_depends_on_another_latent_is_refused(top):
    def program(y=None):
        a = pyro.sample("a", dist.Normal(0.0, 0.01))
        b = pyro.sample("b", dist.Uniform(0.0, top(a)))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    with pytest.raises(UnsupportedProgramError, match="the support of site 'b' depends on other"):
        Program(program, torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore:Singular sample")  # of torch's Wishart, at any df
def test_a_support_without_a_bijection_is_refused_before_a_guide_starts_there():
    def program(y):
        precision = pyro.sample("precision", dist.Wishart(torch.tensor(50.0), torch.eye(2)))
        with pyro.plate("data", len(y)):
            normal = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision)
            pyro.sample("y", normal, obs=y)

    for use in (Program, lambda model, y: bdl.guides.AutoMeanField(model).prototype(y)):
        with pytest.raises(UnsupportedProgramError, match=r"'precision' \(Wishart\) is not the"):
            use(program, torch.randn(5, 2))


def test_a_support_that_moves_with_a_latent_is_no_fault_of_the_data():
    def program(y):
        top = pyro.sample("top", dist.LogNormal(torch.tensor(0.0), 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    check_support(record(program, {"top": torch.tensor(1.0)}, (torch.tensor([0.5, 2.0]),)))


def test_additive_masks_are_no_bad_data():
    def program(x, mask, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        attention = (x @ x.mT + mask).softmax(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(attention @ x @ w, 1.0), obs=y)

    x, y, mask = X[:4], Y[:4], nn.Transformer.generate_square_subsequent_mask(4)
    guide = AutoMeanField(program)
    assert math.isfinite(TemperedTrace_ELBO().loss(program, guide, x, mask, y))
    with_nan = mask.index_fill(0, torch.tensor(1), torch.nan)
    for bad in (-mask, with_nan, mask + 1.0, torch.full_like(mask, -math.inf)):
        with pytest.raises(ValueError, match="mask holds NaN or infinity"):
            check_finite(program, (x, bad, y), {})


# Inference mode


@pytest.mark.parametrize("elbo", [TemperedTrace_ELBO(), CompiledELBO()])
def test_a_step_in_inference_mode_is_refused(model, elbo):
    with torch.inference_mode():
        guide = AutoMeanField(model).prototype(X, Y)
        with pytest.raises(RuntimeError, match="train outside of it"):
            elbo.loss_and_grads(model, guide, X, Y)
        assert math.isfinite(elbo.loss(model, guide, X, Y))
    assert not guide.loc.is_inference()  # it can be trained
    elbo.loss_and_grads(model, guide, X, Y)
    with torch.no_grad():
        assert AutoMeanField(model).prototype(X, Y).loc.requires_grad


# Sharded parameters


@pytest.fixture
def sharded():
    """A layer with a weight in pieces, on a group of one process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    layer = nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    yield layer
    torch.distributed.destroy_process_group()


class FullyShardedDataParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self._flat_param = nn.Parameter(torch.zeros(8))


def test_sharded_parameters_are_named(sharded):
    class Program(PyroModule):
        def __init__(self):
            super().__init__()
            self.features = sharded
            self.w = PyroSample(dist.Normal(torch.zeros(2), 1.0).to_event(1))

        def forward(self, x, y=None):
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(self.features(x) @ self.w, 1.0), obs=y)

    advice = r"is sharded over processes .*DataParallel_ELBO.*AutoLastLayer"
    with pytest.raises(UnsupportedProgramError, match=f"'weight' of Linear {advice}"):
        bdl.bayesianize(nn.Sequential(sharded, nn.Tanh()))
    with pytest.raises(UnsupportedProgramError, match=f"'weight' of Linear {advice}"):
        AutoMeanField(Program()).prototype(torch.ones(4, 3), torch.ones(4))
    with pytest.raises(UnsupportedProgramError, match=advice):
        bdl.bayesianize(FullyShardedDataParallel())
