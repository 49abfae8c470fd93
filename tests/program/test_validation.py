"""Errors name bad data; masks and supports that depend on latents are accepted."""

import math
from functools import partial

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_bdl import bayesianize, models, training
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField
from pyro_bdl.handlers import temper
from pyro_bdl.nn import with_prior
from pyro_bdl.program import record
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.supports import check_support


def test_a_support_that_moves_with_a_latent_is_no_fault_of_the_data():
    def program(y):
        top = pyro.sample("top", dist.LogNormal(torch.tensor(0.0), 0.1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    run = record(program, {"top": torch.tensor(1.0)}, (torch.tensor([0.5, 2.0]),))
    check_support(run)


def test_masked_targets_may_lie_anywhere():
    def program(y, mask):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(1.0), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate).mask(mask), obs=y)

    y, mask = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="in rows 2: correct"):
        check_support(record(program, {}, (y, mask)))
    check_support(record(program, {}, (y[:2], mask[:2])))


def test_additive_masks_are_no_bad_data():
    def program(x, mask, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        attention = (x @ x.mT + mask).softmax(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(attention @ x @ w, 1.0), obs=y)

    x, y = torch.randn(4, 2), torch.randn(4)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    svi = SVI(program, AutoMeanField(program), pyro.optim.Adam({}), TemperedTrace_ELBO())
    assert math.isfinite(svi.step(x, mask, y))
    with_nan = mask.index_fill(0, torch.tensor(1), torch.nan)
    for bad in (-mask, with_nan, mask + 1.0, torch.full_like(mask, -math.inf)):
        with pytest.raises(ValueError, match="mask holds NaN or infinity"):
            check_finite(program, (x, bad, y), {})


def test_data_are_named_through_handlers():
    def program(x):
        pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))

    x = torch.tensor([0.0, math.nan])
    posterior = AutoMeanField(program).prototype(x)
    for handled in (temper(program, 0.5), with_prior(program, posterior)):
        with pytest.raises(ValueError, match="x holds NaN or infinity in rows 1"):
            check_finite(handled, (x,), {})


def test_values_that_a_mask_leaves_out_must_be_numbers():
    y = torch.tensor([1.0, float("nan")])
    with pytest.raises(ValueError, match=r"y holds NaN .*where a mask leaves them out"):
        check_finite(lambda y: None, (y,), {})


# Arguments of the wrong kind

X, Y = torch.randn(6, 2), torch.randn(6)
with torch.inference_mode():
    MADE_IN_INFERENCE = X.clone()

KINDS = {
    "numpy targets": (X, Y.numpy(), r"y is a numpy ndarray"),
    "double": (X.double(), Y, r"x has dtype torch\.float64, and the weights have torch\.float32"),
    "inference": (MADE_IN_INFERENCE, Y, r"x was made under .* pass x\.clone\(\)"),
}


def _program(**options):
    return models.Regression(bayesianize(nn.Linear(2, 1)), noise=0.5, **options)


def _first_step(model, x, y):
    SVI(model, AutoMeanField(model), pyro.optim.Adam({}), TemperedTrace_ELBO()).step(x, y)


@pytest.mark.parametrize("num_particles", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_of_the_wrong_kind_is_named_at_a_later_step_too(kind, num_particles):
    x, y, message = KINDS[kind]
    model = _program()
    loss = TemperedTrace_ELBO(num_particles=num_particles)(model, AutoMeanField(model))
    loss(X, Y).backward()
    with pytest.raises(TypeError, match=message):
        loss(x, y)


def test_training_takes_tensors():
    x, y, _ = KINDS["numpy targets"]
    model = _program()
    guide = AutoMeanField(model)
    for function in (partial(training.train, steps=1), training.estimate_elbo):
        with pytest.raises(TypeError, match="y is a "):
            function(model, guide, x, y)


@pytest.mark.parametrize("data", [pd.DataFrame(X.numpy()), X.numpy(), (X.tolist(), Y.tolist())])
def test_data_of_a_pass_are_tensors(data):
    with pytest.raises(TypeError, match=r"(of tensors, got (DataFrame|ndarray)|is a list)"):
        AutoLaplaceGGN(_program()).laplace_approximation(data)


def test_a_list_that_the_program_takes_is_no_fault():
    def program(parts, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(parts[0] @ w, 1.0), obs=y)

    _first_step(program, [X], Y)
    with pytest.raises(RuntimeError, match="size mismatch"):
        _first_step(program, [X[:, :1]], Y)


@pytest.mark.parametrize("elbo", [TemperedTrace_ELBO(), CompiledELBO()])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:CompiledELBO runs .* sparse tensor:UserWarning")
def test_sparse_inputs(elbo):
    model = _program()
    guide = AutoMeanField(model)
    losses = []
    for x in (X, X.to_sparse(), X.to_sparse_csr()):
        torch.manual_seed(0)
        losses.append(elbo.loss_and_grads(model, guide.prototype(X, Y), x, Y))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    bad = X.index_fill(0, torch.tensor(3), math.nan).to_sparse()
    with pytest.raises(ValueError, match="x holds NaN or infinity in rows 3"):
        elbo.loss_and_grads(model, guide, bad, Y)
    with pytest.raises(TypeError, match=r"x is sparse.* pass x\.to_dense\(\)"):
        AutoLaplaceGGN(model, structure="full").laplace_approximation([(X.to_sparse(), Y)])


# Inference mode


@pytest.mark.parametrize("elbo", [TemperedTrace_ELBO(), CompiledELBO()])
def test_a_step_in_inference_mode_is_refused(elbo):
    model = _program()
    guide = AutoMeanField(model)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="train outside of it"):
        elbo.loss_and_grads(model, guide, X, Y)
    elbo.loss_and_grads(model, guide, X, Y)
    with torch.inference_mode():
        assert math.isfinite(elbo.loss(model, guide, X, Y))


def test_a_guide_made_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        model = _program()
        guide = AutoMeanField(model).prototype(X, Y)
    assert not guide.loc.is_inference()
    TemperedTrace_ELBO()(model, guide)(X, Y).backward()
    torch.optim.Adam(guide.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert AutoMeanField(model).prototype(X, Y).loc.requires_grad
