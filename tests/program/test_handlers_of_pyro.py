"""Pyro's handlers around a program.

The density is that of Pyro's own trace, in torch and in JAX, or the program is refused by name.
"""

import warnings

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import init_to_value
from pyro.infer.reparam import AutoReparam, LocScaleReparam

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.tracing.jax.translate import to_jax

X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
Y = torch.tensor([0.1, -0.3, 0.2, 0.5, 0.4, 0.9], dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, True, False])


pytestmark = pytest.mark.usefixtures("double")


def model(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(a * x, s), obs=y)


def local(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(a, s))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def with_param(x, y=None):
    a = pyro.param("a", torch.tensor(0.3))
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a * x, s), obs=y)


def replayed():
    with pyro.poutine.block():
        trace = poutine.trace(model).get_trace(X, Y)
    return poutine.replay(model, trace)


def masked(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)), poutine.mask(mask=MASK):
        z = pyro.sample("z", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def block_in_program(x, y=None):
    with poutine.block():
        pyro.sample("y_seen", dist.Normal(0.0, 1.0), obs=torch.tensor(0.2))
    return model(x, y)


WORK = {
    "block observed": lambda: poutine.block(two_observed, hide=["z"]),
    "block inside": lambda: block_in_program,
    "condition a latent": lambda: poutine.condition(model, {"s": torch.tensor(1.3)}),
    "condition the target": lambda: lambda x, y: poutine.condition(model, {"y": y})(x),
    "do": lambda: poutine.do(model, {"s": torch.tensor(1.3)}),
    "scale": lambda: poutine.scale(model, 0.3),
    "scale by a tensor": lambda: poutine.scale(model, torch.tensor(0.3)),
    "mask": lambda: masked,
    "mask all": lambda: poutine.mask(model, mask=False),
    "reparam": lambda: poutine.reparam(local, {"z": LocScaleReparam(0.0)}),
    "AutoReparam": lambda: AutoReparam()(local),
    "substitute": lambda: poutine.substitute(with_param, {"a": torch.tensor(0.7)}),
    "lift": lambda: poutine.lift(with_param, prior={"a": dist.Normal(0.0, 1.0)}),
    "infer_config": lambda: poutine.infer_config(model, lambda site: {"any": 1}),
    "replay": replayed,
    "seed": lambda: poutine.seed(model, 1),
    "broadcast": lambda: poutine.broadcast(local),
}


def two_observed(x, y=None):
    model(x, y)
    pyro.sample("z", dist.Normal(0.0, 1.0), obs=torch.tensor(0.4))


each = pytest.mark.parametrize("name", WORK)


@each
def test_the_density_is_that_of_pyros_trace(name):
    wrapped = WORK[name]()
    program = bdl.Program(wrapped, X, Y)
    vector = program.unconstrain(program.initial).detach() + 0.2
    latents, log_det = program.constrain(vector)
    trace = poutine.trace(poutine.condition(wrapped, latents)).get_trace(X, Y)
    expected = trace.log_prob_sum().detach()
    torch.testing.assert_close(program.log_joint(latents).detach(), expected)
    program.check()
    if "reparam" in name.lower():  # what it replaces is no observation
        assert program.observed == ("y",) and "z" in program.deterministic and not program.factors
    with jax.enable_x64(True):
        found = to_jax(program.log_density, vector)(vector.numpy())
        np.testing.assert_allclose(found, (expected + log_det).item(), rtol=1e-10)


@each
def test_guides_and_bounds(name):
    """Compiled and plain ELBO agree with Pyro's at a point, where no noise is left."""
    wrapped = WORK[name]()
    start = init_to_value(values={"a": torch.tensor(0.25), "s": torch.tensor(0.5)})
    guide = bdl.guides.AutoMAP(wrapped, init_loc_fn=start).prototype(X, Y)
    if name in ("scale", "infer_config"):  # init_loc_fn reaches the sites under handlers
        median = {site: value.item() for site, value in guide.median().items()}
        assert median == pytest.approx({"a": 0.25, "s": 0.5})
    trace = poutine.trace(poutine.condition(wrapped, guide.median())).get_trace(X, Y)
    expected = -trace.log_prob_sum().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        for bound in (bdl.elbo.TemperedTrace_ELBO(), bdl.elbo.TemperedTraceMeanField_ELBO()):
            assert bound.loss(wrapped, guide, X, Y) == pytest.approx(expected, rel=1e-9)
        compiled = bdl.elbo.CompiledELBO()
        for _ in range(3):  # traced, compared, run alone
            value = compiled.differentiable_loss(wrapped, guide, X, Y).item()
            assert value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("options", [{"hide": ["a"]}, {"expose": ["s", "y", "data"]}], ids=str)
@pytest.mark.filterwarnings("ignore:.*#one-by-one")  # its draws are in place
def test_a_hidden_latent_is_refused(options):
    wrapped = poutine.block(model, **options)
    message = r"'y' is .* in another at the same latents.* poutine\.block"
    program = bdl.Program(wrapped, X, Y)
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedProgramError, match=message):
        program.check()
    assert torch.equal(torch.get_rng_state(), state)
    for backend in ("pyro", "numpyro"):
        with pytest.raises(UnsupportedProgramError, match=message):
            bdl.mcmc.sample(wrapped, X, Y, backend=backend, progress=False)
    with pytest.raises(UnsupportedProgramError, match=message):
        bdl.guides.AutoLaplaceGGN(wrapped).laplace_approximation((X, Y))
    assert "a" not in poutine.trace(wrapped).get_trace(X, Y).nodes  # the block is as it was


def test_targets_that_are_no_data_any_more_are_refused_by_name():
    for wrapped in (poutine.uncondition(model), poutine.block(model, hide=["y"])):
        with pytest.raises(UnsupportedProgramError, match="no observed site"):
            bdl.mcmc.sample(wrapped, X, Y, progress=False)
        with pytest.raises(UnsupportedProgramError, match="no observed site"):
            bdl.guides.AutoLaplaceGGN(wrapped).laplace_approximation((X, Y))


@pytest.mark.parametrize("counts, precision", [(True, 4.0), (False, 3.0)])
def test_a_scalar_under_a_mask_of_one_number_has_a_laplace_approximation(counts, precision):
    def masked(y):
        with poutine.mask(mask=torch.tensor(counts)):
            b = pyro.sample("b", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    y = torch.zeros(3)
    start = init_to_value(values={"b": torch.zeros(())})
    guide = bdl.guides.AutoLaplaceGGN(masked, structure="diag", init_loc_fn=start).prototype(y)
    found = guide.laplace_approximation((y,)).variances()
    torch.testing.assert_close(found, torch.tensor([1 / precision]))


@pytest.mark.parametrize("handler", [poutine.mask, poutine.scale])
def test_a_tensor_around_the_program_with_more_cells_than_a_latents_plates_is_named(handler):
    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    tensor = torch.ones(3) if handler is poutine.scale else torch.ones(3, dtype=torch.bool)
    with pytest.raises(UnsupportedProgramError, match=f"{handler.__name__} around the site 'w'"):
        bdl.Program(handler(model, tensor), torch.zeros(3))
