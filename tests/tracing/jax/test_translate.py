import re

import jax
import jax.numpy as jnp
import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from pyro_bdl.errors import MissingOperatorError
from pyro_bdl.tracing.jax.translate import loss_to_jax, to_jax

# Types, constants, results ----------------------------------------------------------------------

PROMOTIONS = {
    "integer division": lambda z: torch.arange(3) / 2 + z,
    "integers": lambda z: (z > 0) + torch.arange(3),
    "sum of booleans": lambda z: (z > 0).sum(),
    "mean in double": lambda z: z.sum(dtype=torch.float64),
    "zero-dimensional double": lambda z: z * torch.tensor(0.1, dtype=torch.float64),
    "double": lambda z: z * torch.ones(3, dtype=torch.float64),
    "bfloat16": lambda z: z.bfloat16() * torch.ones(3, dtype=torch.bfloat16),
    "weak scalar": lambda z: z.bfloat16() * 2.5,
    "conversion": lambda z: (10 * z).long() // 3,
    "full like": lambda z: torch.full_like(z, 2) * torch.zeros_like(z, dtype=torch.float64),
}


@pytest.mark.parametrize("case", PROMOTIONS)
def test_dtypes_follow_torch(case):
    point = torch.tensor([0.3, -0.2, 1.7])
    expected = PROMOTIONS[case](point)
    with jax.enable_x64(True):
        actual = to_jax(PROMOTIONS[case], point)(jnp.asarray(point.numpy()))
    assert str(actual.dtype) == str(expected.dtype).removeprefix("torch.")
    np.testing.assert_allclose(actual.astype("float32"), expected.float(), 1e-6)


def test_results_may_be_nested_and_inputs_several():
    def function(x, y):
        return {"sum": (x + y, [y.sum()]), "input": x, "constant": torch.arange(3), "number": 2}

    x, y = torch.arange(3.0), torch.ones(2, 3)
    result = jax.jit(to_jax(function, x, y))(x.numpy(), y.numpy())
    assert jax.tree.map(jnp.shape, result) == {
        "sum": ((2, 3), [()]), "input": (3,), "constant": (3,), "number": ()
    }  # fmt: skip
    np.testing.assert_array_equal(result["sum"][0], x + y)
    np.testing.assert_array_equal(result["constant"], [0, 1, 2])


def test_parameters_are_constants_and_stay_what_they_were():
    weight = nn.Parameter(torch.arange(3.0))
    f = to_jax(lambda z: (weight * z).sum(), torch.ones(3))
    with torch.no_grad():
        weight.zero_()
    np.testing.assert_allclose(f(jnp.ones(3)), 3.0)


def test_detached_parts_have_no_gradient():
    f = to_jax(lambda z: (z.detach() * z).sum(), torch.ones(2))
    np.testing.assert_allclose(jax.grad(f)(jnp.array([2.0, 3.0])), [2.0, 3.0])


def derivative(z, create_graph=True):
    """d/dx sum(tanh(z x)) at x = 1, with a constant of the user's beside it."""
    with torch.enable_grad():
        x = torch.ones(3).requires_grad_()
        y = torch.tanh(z * x).sum()
        return torch.autograd.grad(y, x, create_graph=create_graph)[0]


def added_by_data(z):
    """As the jitter of ``pyro.ops.tensor_utils.safe_cholesky``."""
    x = z.clone()
    x.data[1:].add_(0.5 * x.data[0])
    return x


DIFFERENTIATED = {
    "a derivative": lambda z: derivative(z).sum(),
    "beside a detach": lambda z: (derivative(z) * z.detach() + 1e4 * z).sum(),
    "beside data": lambda z: (derivative(z) * z.data + z.prod()).sum(),
    "beside a new tensor": lambda z: (derivative(z) * z.new_tensor(z) * z).sum(),
    "a constant one": lambda z: (derivative(z, create_graph=False) * z).sum(),
    "straight through": lambda z: (
        derivative(z) * (torch.nn.functional.hardtanh(z) - z.detach() + z)
    ).sum(),
    "a Jacobian": lambda z: torch.func.jacrev(lambda x: (x * z).sin())(torch.ones(3)).sum(),
    "added by data": lambda z: added_by_data(z).pow(3).sum(),
    "by torch.func": lambda z: (
        torch.func.grad(lambda x: torch.tanh(z * x * x.detach()).sum())(torch.ones(3)) * z
    ).sum(),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradients_go_through_derivatives_but_not_through_a_detach(case):
    function, point = DIFFERENTIATED[case], torch.tensor([0.3, -1.2, 0.7])
    leaf = point.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf), leaf)
    weights = point.clone().requires_grad_()
    loss = loss_to_jax(lambda _: function(weights), [weights], [torch.ones(())])
    for gradient in (
        jax.grad(to_jax(function, point))(point.numpy()),
        jax.grad(lambda z: loss.function([z], loss.constants, None, jnp.ones(())))(point.numpy()),
    ):
        np.testing.assert_allclose(gradient, expected, 1e-5, 1e-6)


def test_control_flow_may_depend_on_constants():
    data = torch.arange(3.0)
    f = to_jax(lambda z: z.sum() * data.max().item() if (data >= 0).all() else z, torch.ones(2))
    np.testing.assert_allclose(f(jnp.ones(2)), 4.0)


def test_distributions_made_outside_to_validate_are_refused():
    prior = dist.Normal(torch.zeros(2), torch.ones(2), validate_args=True)
    with pytest.raises(MissingOperatorError, match=r"reads numbers .* in line \d+ of"):
        to_jax(lambda z: prior.log_prob(z).sum(), torch.ones(2))


def test_what_constants_alone_determine_is_computed_once():
    data = torch.arange(3.0)
    f = to_jax(lambda z: (z * torch.lgamma(data + 1)).sum() + data.exp().sum(), torch.ones(3))
    program = str(jax.make_jaxpr(f)(jnp.ones(3)))
    assert "lgamma" not in program and "exp" not in program


def test_equal_constants_are_stored_once():
    first, second = torch.arange(3.0), torch.arange(3.0)
    f = to_jax(lambda z: (z * first).sum() + (z - second).prod(), torch.ones(3))
    assert len(jax.make_jaxpr(f)(jnp.ones(3)).consts) == 1


LARGE = torch.arange(300) * 10**9
WIDE = {
    "float64": lambda z: ((z.double() + 1.6e9) - 1.6e9).sum() * z.sum(),
    "a constant": lambda z: (((z > 0).long() + LARGE[1:4]) % 7).sum() * z.sum(),
    "many constants": lambda z: ((LARGE[:, None] + LARGE) % 7).float().mean() * z.sum(),
    "a product": lambda z: ((z > 0).long() * 2_000_000_000 * 3 % 7).sum() * z.sum(),
    "a sum": lambda z: (((z > 0).long() * 2_000_000_000).cumsum(0) % 7).sum() * z.sum(),
    "a conversion": lambda z: ((z * 1e10).long() % 1000).sum() * z.sum(),
    "filled": lambda z: (torch.full_like(z.long().clamp(0, 1), 5 * 10**9) % 7).sum() * z.sum(),
}


@pytest.mark.parametrize("case", WIDE)
def test_numbers_of_64_bits_are_those_of_torch_or_refused(case):
    point = torch.tensor([0.3, -0.2, 1.7])
    f = to_jax(WIDE[case], point)
    with pytest.raises(TypeError, match=r"enable_x64\(True\)"):
        f(point.numpy())
    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(f)(point.numpy())
        double = f.in_double()(point.double().numpy())
    assert double.dtype == jnp.float64
    leaf = point.clone().requires_grad_()
    expected = WIDE[case](leaf)
    (slope,) = torch.autograd.grad(expected, leaf)
    np.testing.assert_allclose([value, double], expected.item(), 1e-6)
    np.testing.assert_allclose(gradient, slope, 1e-6)


REFUSED = {  # what is said
    "multilabel_margin_loss": lambda z: F.multilabel_margin_loss(
        z[0, 0], torch.tensor([2, -1, 0, 0])
    ),
    "multi_margin_loss": lambda z: F.multi_margin_loss(z[0, 0], torch.tensor(2)),
    "in place by .data": lambda z: (z.clone().data.mul_(2) * z).sum(),
    "use detach()": lambda z: (z.clone().detach_() * z).sum(),
    "result number 1": lambda z: F.max_pool2d(z, 2, return_indices=True)[1].sum() * z.sum(),
    "a torch.Generator": lambda z: (
        z * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    ).sum(),
    "scale_grad_by_freq": lambda z: F.embedding(
        torch.tensor([1, 1]), z[0], scale_grad_by_freq=True
    ).sum(),
    "the reduction 'prod'": lambda z: (
        z[0].scatter_reduce(0, torch.tensor([[0, 0, 1, 1]]), z[0], "prod").sum()
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_uses_that_have_no_translation_are_refused_in_a_sentence(said):
    with pytest.raises(MissingOperatorError, match=re.escape(said)) as caught:
        to_jax(REFUSED[said], torch.ones(1, 4, 4))
    assert str(caught.value).startswith(caught.value.op) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda z, k: (z * (k - 1 > 3)).sum() + k.argmax() + (z > 0).sum(),
        lambda z, k: (
            z[k % 3].sum() + torch.zeros_like(k).scatter(0, k % 3, 5).sum() * z[z.argsort()]
        ),
    ],
)
def test_small_integers_need_no_64_bits(function):
    f = to_jax(function, torch.ones(3), torch.arange(3))
    assert not f.wide


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.adaptive_avg_pool2d(F.conv2d(x, torch.ones(2, 3, 2, 2)), 1),
        lambda x: x.as_strided((2, 3), (3, 1)),
        lambda x: x[1:].as_strided((3,), (2,)),
    ],
)
def test_tensors_in_another_order_in_memory(function):
    x = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0)).movedim(-1, 1)
    translated = to_jax(function, x)
    assert_close(torch.from_numpy(np.array(translated(x.numpy()))), function(x))
    gradient = jax.grad(lambda x: translated(x).sum())(x.numpy())
    expected = torch.autograd.grad(function(leaf := x.clone().requires_grad_()).sum(), leaf)[0]
    assert_close(torch.from_numpy(np.array(gradient)), expected)


def test_strides_beyond_a_tensor_are_refused():
    with pytest.raises(MissingOperatorError, match="reaches beyond its tensor"):
        to_jax(lambda x: x[1:].as_strided((2,), (1,), 0), torch.ones(3))


def test_a_missing_operator_is_named():
    with pytest.raises(MissingOperatorError, match="special_airy_ai") as caught:
        to_jax(lambda z: torch.special.airy_ai(z).sum(), torch.ones(2))
    assert caught.value.op == "aten.special_airy_ai.default"
    assert caught.value.site is None


def test_an_unsupported_use_of_an_operator_is_named():
    with pytest.raises(MissingOperatorError) as caught:
        to_jax(lambda z: z[z > 0].sum(), torch.ones(2))
    assert caught.value.op == "aten.index.Tensor"


@pytest.mark.parametrize(
    "function",
    [
        lambda z: nn.Dropout(0.5)(z).sum(),
        lambda z: (z * F.dropout(torch.ones(2), training=True)).sum(),
        lambda z: F.rrelu(z, training=True).sum(),
        lambda z: (z + torch.randn(2)).sum(),
        lambda z: (z * dist.Bernoulli(0.5).sample((2,))).sum(),
    ],
    ids=["dropout", "dropout of data", "rrelu", "randn", "sample"],
)
def test_a_random_operator_is_told(function):
    with pytest.raises(MissingOperatorError, match=r"random.*train mode"):
        to_jax(function, torch.ones(2))


def test_unused_draws_do_no_harm():
    f = to_jax(lambda z: (torch.randn(2), z.sum())[1], torch.ones(2))
    np.testing.assert_allclose(f(jnp.ones(2)), 2.0)


def branch_on_written(z):
    out = torch.zeros(2)
    out[0] = z[0]
    return z.sum() if out.sum() > 0 else -z.sum()


@pytest.mark.parametrize("function", [lambda z: z.sum() if z[0] > 0 else z, branch_on_written])
def test_control_flow_on_latents_is_refused(function):
    with pytest.raises(MissingOperatorError, match="control flow"):
        to_jax(function, torch.ones(2))


def test_changing_a_tensor_outside_is_refused():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(MissingOperatorError, match="in place"):
        to_jax(lambda z: norm(z).sum(), torch.randn(3, 2))


def test_arguments_are_checked():
    f = to_jax(lambda z: z.sum(), torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"float64.*enable_x64"):
        f(jnp.ones(2))
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        f(jnp.ones(3))
    with pytest.raises(TypeError, match="1 arrays"):
        f(jnp.ones(2), jnp.ones(2))
