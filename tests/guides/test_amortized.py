"""Local latents in minibatches, by rows and by an encoder, against the linear-Gaussian model's
exact posterior: at it, the bound sticks to the evidence, whatever is drawn."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import nn

from pyro_bdl import Predictive
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoAmortized, AutoMAP, AutoMeanField

N, B, NOISE = 8, 3, 0.5
LOADINGS = torch.tensor([1.0, -0.7]).double()
X = torch.linspace(-2, 3, 2 * N, dtype=torch.float64).sin().reshape(N, 2)


def whole(x):
    """x_n ~ N(z_n a, s^2), z_n ~ N(0, 1); the plate picks rows itself."""
    with pyro.plate("data", N, subsample_size=B) as rows:
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        mean = z[:, None] * LOADINGS
        pyro.sample("x", dist.Normal(mean, NOISE).to_event(1), obs=x[rows])


def minibatch(x, rows=None):
    """The same, called with some rows, or with new data."""
    rows = torch.arange(len(x)) if rows is None else rows
    with pyro.plate("data", N, subsample=rows):
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        mean = pyro.deterministic("mean", z[:, None] * LOADINGS)
        pyro.sample("x", dist.Normal(mean, NOISE).to_event(1), obs=x)


def learned(x, rows=None):
    """With the loadings a latent."""
    a = pyro.sample("a", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    rows = torch.arange(len(x)) if rows is None else rows
    with pyro.plate("data", N, subsample=rows):
        z = pyro.sample("z", dist.LogNormal(x.new_zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z[:, None] * a, NOISE).to_event(1), obs=x)


VARIANCE = 1 / (1 + LOADINGS.square().sum() / NOISE**2)
MEAN = VARIANCE * X @ LOADINGS / NOISE**2
EVIDENCE = dist.MultivariateNormal(
    torch.zeros(2).double(), torch.outer(LOADINGS, LOADINGS) + NOISE**2 * torch.eye(2).double()
).log_prob(X)  # fmt: skip


class Encoder(nn.Module):
    """The exact posterior, as a linear encoder."""

    def __init__(self, rescaled=1.0):
        super().__init__()
        self.mean = nn.Linear(2, 1).double()
        self.log_scale = nn.Parameter(VARIANCE.log() / 2)
        with torch.no_grad():
            self.mean.weight.copy_(rescaled * VARIANCE * LOADINGS / NOISE**2)
            self.mean.bias.zero_()

    def forward(self, x, rows=None):
        mean = self.mean(x)[:, 0]
        return mean, self.log_scale.exp().expand(len(x))


def _rows_of(x, rows=None):
    return pyro.plate("data", N, subsample=torch.arange(len(x)) if rows is None else rows)


def _guides(kind):
    if kind == "encoder, whole":
        return whole, AutoAmortized(whole, {"z": Encoder()})
    if kind == "encoder, minibatch":
        guide = AutoAmortized(minibatch, {"z": Encoder()}, create_plates=_rows_of)
        return minibatch, guide
    model = whole if kind == "rows, whole" else minibatch
    guide = AutoMeanField(model, create_plates=None if model is whole else _rows_of)
    guide.prototype(X) if model is whole else guide.prototype(X[:B], torch.arange(B))
    with torch.no_grad():
        guide.loc.copy_(MEAN)
        guide.scale = VARIANCE.sqrt().expand(N).clone()
    return model, guide


KINDS = ["rows, whole", "rows, minibatch", "encoder, whole", "encoder, minibatch"]


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_exact_posterior_every_draw_is_the_evidence(kind):
    """N / B times that of the rows of the batch, and without any gradient."""
    model, guide = _guides(kind)
    elbo = TemperedTrace_ELBO(sticking_the_landing=True)
    rows = torch.tensor([6, 1, 3])
    if model is minibatch:
        loss = elbo.differentiable_loss(model, guide, X[rows], rows)
        torch.testing.assert_close(loss, -(N / B) * EVIDENCE[rows].sum())
    else:
        loss = elbo.differentiable_loss(model, guide, X)
        possible = [
            -(N / B) * EVIDENCE[list(some)].sum()
            for some in torch.combinations(torch.arange(N), B).tolist()
        ]
        assert min((loss - value).abs() for value in possible) < 1e-9
    gradients = torch.autograd.grad(loss, list(guide.parameters()))
    assert all(gradient.abs().max() < 1e-9 for gradient in gradients)


def _trained(elbo, steps):
    encoder = Encoder(rescaled=0.2)
    guide = AutoAmortized(minibatch, {"z": encoder}, create_plates=_rows_of)
    svi = pyro.infer.SVI(minibatch, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    pyro.set_rng_seed(0)
    return encoder, [svi.step(X, torch.arange(N)) for _ in range(steps)]


def test_training_goes_to_the_exact_posterior_compiled_as_well():
    _, plain = _trained(TemperedTraceMeanField_ELBO(), 3)
    encoder, losses = _trained(CompiledELBO(), 60)
    assert losses[:3] == pytest.approx(plain)
    expected = VARIANCE * LOADINGS / NOISE**2
    assert (encoder.mean.weight[0] - expected).norm() < 0.25 * expected.norm()


def test_rows_of_every_datum_need_all_data_to_predict():
    guide = AutoMeanField(minibatch, create_plates=_rows_of).prototype(X[:B], torch.arange(B))
    predictive = Predictive(minibatch, guide, num_samples=4)
    with pytest.raises(ValueError, match=r"other shapes: 'z' \(8,\) for \(3,\)"):
        predictive(X[:B])
    assert predictive(X)["x"].shape == (4, N, 2)


def test_new_data_have_latents_of_their_own():
    guide = AutoAmortized(minibatch, {"z": Encoder()}, create_plates=_rows_of).prototype(X[:B])
    new = torch.tensor([[1.0, 2.0], [0.3, -1.0]]).double()
    torch.testing.assert_close(guide.median(new)["z"], VARIANCE * new @ LOADINGS / NOISE**2)
    predicted = Predictive(minibatch, guide, num_samples=500)(new)
    assert predicted["x"].shape == (500, 2, 2)
    expected = (VARIANCE * new @ LOADINGS / NOISE**2)[:, None] * LOADINGS
    assert (predicted["mean"].mean(0) - expected).abs().max() < 5 * (VARIANCE / 500) ** 0.5


def test_the_first_step_of_svi_makes_the_parameters():
    guide = AutoAmortized(minibatch, {"z": Encoder()}, create_plates=_rows_of)
    svi = SVI(minibatch, guide, Adam({"lr": 0.0}), TemperedTrace_ELBO())
    assert math.isfinite(svi.step(X[:B]))


@pytest.mark.parametrize("guide", [AutoMeanField, AutoMAP])
def test_other_latents_have_a_guide_of_their_own(guide):
    """Local latents on another support, beside global ones."""
    both = AutoAmortized(learned, {"z": Encoder()}, guide=guide, create_plates=_rows_of)
    rows = torch.tensor([2, 5])
    before = both.prototype(X[:B]).rest.location().clone()
    names = {name for name, _ in both.named_parameters()}
    assert {"encoder_z.mean.weight", "rest.loc"} <= names
    svi = pyro.infer.SVI(learned, both, pyro.optim.Adam({"lr": 0.01}), TemperedTrace_ELBO())
    svi.step(X[rows], rows)
    assert (both.rest.location() != before).all()
    draw = both(X[rows], rows)
    assert draw["z"].shape == (2,) and (draw["z"] > 0).all() and draw["a"].shape == (2,)


def test_refusals():
    with pytest.raises(TypeError, match="mapping from local sites"):
        AutoAmortized(whole, Encoder())
    with pytest.raises(ValueError, match="'w' is no latent site of the program; it has 'z'"):
        AutoAmortized(whole, {"w": Encoder()}).prototype(X)
    with pytest.raises(UnsupportedProgramError, match="'a' stands in no plate"):
        AutoAmortized(learned, {"a": Encoder()}).prototype(X)
    with pytest.raises(ValueError, match=r"shapes \(8, 2\) and \(8, 2\)"):
        AutoAmortized(whole, {"z": lambda x: (x, x)})(X)
    with pytest.raises(ValueError, match="mean and standard deviation"):
        AutoAmortized(whole, {"z": lambda x: x})(X)
