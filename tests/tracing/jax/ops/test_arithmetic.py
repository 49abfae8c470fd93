"""Values and gradients of translated operators equal torch's: by module, by distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import constraints
from torch import nn
from torch.distributions import biject_to, transform_to

from pyro_bdl.tracing.jax.translate import to_jax

DTYPES = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="f32", marks=pytest.mark.slow),
     pytest.param(torch.float64, id="f64")],
)  # fmt: skip


# Compiling takes most of the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture
def default(dtype):
    """Constants made by a case have the case's dtype."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def reference(function, point):
    point = point.detach().clone().requires_grad_()
    value = function(point)
    (gradient,) = torch.autograd.grad(value, point)
    return value.detach().numpy(), gradient.numpy()


def assert_close(actual, expected, tolerance):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    np.testing.assert_allclose(actual, expected, tolerance, tolerance * np.abs(expected).max())


def assert_same(function, points):
    """Value and gradient, jitted and, in float64, mapped over the points."""
    tolerance = TOLERANCE[points.dtype]
    expected = [reference(function, point) for point in points]
    double = points.dtype == torch.float64
    with jax.enable_x64(double):
        both = jax.value_and_grad(to_jax(function, points[0]))
        run = jax.jit(jax.vmap(both) if double else both, compiler_options=QUICK)
        actual = run(jnp.asarray(points.numpy() if double else points[0].numpy()))
    for part in range(2):
        stacked = np.stack([pair[part] for pair in expected]) if double else expected[0][part]
        assert_close(actual[part], stacked, tolerance)


# Modules ----------------------------------------------------------------------------------------


def density(module, *inputs):
    """A scalar of a module's output as a function of its flat weights."""
    shapes = {name: p.shape for name, p in module.named_parameters()}

    def function(flat):
        parts = flat.split([shape.numel() for shape in shapes.values()])
        weights = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        output = torch.func.functional_call(module, weights, inputs)
        output = output[0] if isinstance(output, tuple) else output
        scores = torch.arange(1, output.numel() + 1, dtype=output.dtype).sqrt()
        return (torch.sin(output) * scores.view(output.shape)).sum()

    return function, sum(shape.numel() for shape in shapes.values())


def conv(*modules, shape=(2, 2, 7, 7)):
    return lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), *modules), torch.randn(shape))


def conv1d(*modules):
    return lambda: (nn.Sequential(nn.Conv1d(2, 4, 3), *modules), torch.randn(2, 2, 9))


def self_attention(**options):
    def make():
        x = torch.randn(2, 3, 4)
        return nn.MultiheadAttention(4, 2, batch_first=True, **options), x, x, x

    return make


def bags(**options):
    index, offsets = torch.tensor([0, 2, 1, 4, 2, 2, 3]), torch.tensor([0, 3, 3, 6])
    return lambda: (nn.EmbeddingBag(5, 3, **options), index, offsets)


class Blind(nn.Module):
    """Attention whose first query may attend to nothing."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(4, 12)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
        return F.scaled_dot_product_attention(*self.inward(x).chunk(3, -1), attn_mask=mask)


class Transformed(nn.Module):
    """A spatial transformer: the sampling grid is a function of weights."""

    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 6)

    def forward(self, x):
        grid = F.affine_grid(self.affine(x[:, 0, 0, :4]).view(-1, 2, 3), x.shape, False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


class Spectral(nn.Module):
    """The layer of a Fourier neural operator."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.kernel = norm, nn.Parameter(torch.randn(3, 3, 2))

    def forward(self, x):
        modes = torch.fft.rfft2(x, norm=self.norm)[..., :3, :3]
        modes = torch.fft.ifft(modes * torch.view_as_complex(self.kernel), norm=self.norm)
        return torch.fft.irfft2(modes * torch.polar(modes.abs(), modes.angle()), (6, 5))


class Causal(nn.TransformerEncoderLayer):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


MODULES = {
    "Linear-narrow": lambda: (nn.Linear(3, 2), torch.randn(12, 3)),
    "Bilinear": lambda: (nn.Bilinear(3, 2, 2), torch.randn(4, 3), torch.randn(4, 2)),
    "Conv2d": lambda: (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(2, 4, 7, 6)),
    "Conv3d": lambda: (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), torch.randn(1, 2, 3, 4, 3)),
    "ConvTranspose2d": lambda: (
        nn.ConvTranspose2d(4, 6, (3, 2), 2, padding=1, output_padding=1, groups=2),
        torch.randn(2, 4, 4, 5),
    ),
    "Embedding": lambda: (nn.Embedding(5, 3, padding_idx=1), torch.tensor([[0, 1], [2, 2]])),
    "EmbeddingBag-sum": bags(mode="sum"),
    "EmbeddingBag-mean": bags(mode="mean", padding_idx=2),
    "EmbeddingBag-max": bags(mode="max", padding_idx=2, include_last_offset=True),
    "LayerNorm": lambda: (nn.LayerNorm((2, 3)), torch.randn(4, 2, 3)),
    "RMSNorm": lambda: (nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), torch.randn(4, 3)),
    "GroupNorm": conv(nn.GroupNorm(2, 4)),
    "BatchNorm1d": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)),
        torch.randn(4, 3),
    ),
    "MultiheadAttention": self_attention(),
    "TransformerEncoderLayer-causal": lambda: (
        Causal(4, 2, 8, batch_first=True, norm_first=True, activation="gelu"),
        torch.randn(2, 3, 4),
    ),
    "GRU": lambda: (nn.GRU(3, 2, 2, bidirectional=True, batch_first=True), torch.randn(2, 2, 3)),
    "LSTM": lambda: (nn.LSTM(3, 2, bidirectional=True), torch.randn(2, 2, 3)),
    "MaxPool1d": conv1d(nn.MaxPool1d(2)),
    "MaxPool2d": conv(nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "MaxPool2d-dilated": conv(nn.MaxPool2d(2, 1, dilation=2)),
    "AvgPool2d": conv(nn.AvgPool2d(2, padding=1, ceil_mode=True)),
    "AvgPool2d-exclusive": conv(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)),
    "AdaptiveAvgPool2d": conv(nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten()),
    "AdaptiveMaxPool2d": conv(nn.AdaptiveMaxPool2d((3, 2))),
    "LPPool2d": conv(nn.LPPool2d(2, 2)),
    "Upsample-bilinear": conv(nn.Upsample(scale_factor=1.5, mode="bilinear")),
    "Upsample-bicubic": conv(nn.Upsample(scale_factor=1.5, mode="bicubic")),
    "Pads": conv(nn.ZeroPad2d((1, 0, 2, -1)), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1)),
    "PixelShuffle": conv(nn.PixelShuffle(2), nn.Dropout(0.5)),
    "LocalResponseNorm": conv(nn.LocalResponseNorm(2)),
    "attention-blind": lambda: (Blind(), torch.randn(2, 3, 4)),
    "grid_sample": lambda: (Transformed(), torch.randn(2, 1, 5, 6)),
    "fft": lambda: (Spectral("backward"), torch.randn(2, 6, 5)),
}

ACTIVATIONS = [
    nn.ELU(), nn.Hardshrink(), nn.Hardtanh(), nn.Hardswish(), nn.LeakyReLU(), nn.LogSigmoid(),
    nn.PReLU(), nn.ReLU(), nn.ReLU6(), nn.RReLU(), nn.SELU(), nn.CELU(0.5), nn.GELU(), nn.SiLU(),
    nn.Sigmoid(), nn.Mish(), nn.Softplus(2.0), nn.Softshrink(), nn.Softsign(), nn.Tanh(),
    nn.Tanhshrink(), nn.Threshold(0.1, 0.2), nn.GLU(), nn.Softmin(1), nn.Softmax(1),
    nn.LogSoftmax(1), nn.GELU("tanh"), nn.CosineSimilarity(),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("case", MODULES)
def test_modules(case, dtype, default):
    module, *inputs = MODULES[case]()
    function, size = density(module.eval().to(dtype), *inputs)
    assert_same(function, torch.randn(2, size))


@pytest.mark.parametrize(
    "rows, inputs, units, narrow",
    [(128, 32, 40, 1), (127, 32, 40, 0), (400, 65, 65, 0), (400, 1, 32, 0), (400, 32, 1, 0)],
)
def test_narrow_layers_on_many_rows_are_turned_around(rows, inputs, units, narrow, monkeypatch):
    """On a CPU; ``test_modules`` compares both orders with torch."""
    x, weights = torch.randn(rows, inputs), torch.randn(units, inputs)
    point = jnp.asarray(weights.numpy())
    for backend, expected in (("cpu", narrow), ("gpu", 0)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        f = to_jax(lambda w: F.linear(x, w, torch.ones(units)), weights)
        assert str(jax.make_jaxpr(f)(point)).count("optimization_barrier") == 2 * expected


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_activations(activation, dtype, default):
    def function(flat):
        arguments = (flat, flat.flip(1)) if isinstance(activation, nn.CosineSimilarity) else (flat,)
        output = activation.eval().to(dtype)(*arguments)
        return (output * torch.arange(1, output.numel() + 1).view(output.shape).sqrt()).sum()

    assert_same(function, 2 * torch.randn(2, 3, 4))


@DTYPES
def test_hard_sigmoid(dtype, default):
    # torch's own derivative of hardsigmoid holds 1/6 in float32.
    point = torch.linspace(-4, 4, 9)
    value, gradient = reference(lambda z: (F.relu6(z + 3) / 6).sum(), point)
    with jax.enable_x64(dtype == torch.float64):
        f = to_jax(lambda z: F.hardsigmoid(z).sum(), point)
        actual = jax.value_and_grad(f)(jnp.asarray(point.numpy()))
    assert_close(actual[0], value, TOLERANCE[dtype])
    assert_close(actual[1], gradient, TOLERANCE[dtype])


# Distributions ----------------------------------------------------------------------------------


def covariance(scale):
    return scale * (torch.eye(3) + 0.3)


# The parameters (how many of them) are positive latents too.
PRIORS = {
    "StudentT": (3, lambda a, b, c: dist.StudentT(a, b, c)),
    "HalfCauchy": (1, lambda a: dist.HalfCauchy(a)),
    "Gamma": (2, lambda a, b: dist.Gamma(a, b)),
    "Dirichlet": (3, lambda a, b, c: dist.Dirichlet(torch.stack([a, b, c]))),
    "Kumaraswamy": (2, lambda a, b: dist.Kumaraswamy(a, b)),
    "VonMises": (2, lambda a, b: dist.VonMises(a, b)),
    "LowRankMultivariateNormal": (2, lambda a, b: dist.LowRankMultivariateNormal(
        torch.zeros(3), torch.arange(6.0).view(3, 2) * a, b.expand(3))),
    "OMTMultivariateNormal": (1, lambda a: dist.OMTMultivariateNormal(
        torch.zeros(3), torch.linalg.cholesky(covariance(a)))),
    "MixtureOfDiagNormals": (2, lambda a, b: dist.MixtureOfDiagNormals(
        torch.arange(6.0).view(2, 3) * a, torch.ones(2, 3) * b, torch.stack([a, b]))),
    "LKJ": (1, lambda a: dist.LKJ(3, a)),
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("case", PRIORS)
def test_priors(case, dtype, default):
    count, make = PRIORS[case]
    support = make(*torch.ones(count)).support
    shape = biject_to(support).inverse_shape(make(*torch.ones(count)).shape())

    def function(flat):
        prior = make(*flat[:count].exp())
        transform = biject_to(prior.support)
        latent = flat[count:].view(shape)
        value = transform(latent)
        jacobian = transform.log_abs_det_jacobian(latent, value)
        return prior.log_prob(value).sum() + jacobian.sum() + 0 * flat.sum()

    assert_same(function, 0.7 * torch.randn(2, count + shape.numel()))


SUPPORTS = {
    "positive": constraints.positive,
    "simplex": constraints.simplex,
    "ordered": constraints.ordered_vector,
    "lower_cholesky": constraints.lower_cholesky,
    "corr_matrix": constraints.corr_matrix,
    "positive_definite": constraints.positive_definite,
}
SQUARE = {"softplus_lower_cholesky", "lower_cholesky", "positive_definite"}


@DTYPES
@pytest.mark.parametrize("case", SUPPORTS)
def test_transforms(case, dtype, default):
    support = SUPPORTS[case]
    shape = (3, 3) if case in SQUARE else (3,)
    transform = transform_to(support) if case in SQUARE else biject_to(support)

    def function(latent):
        value = transform(latent)
        scores = torch.arange(1, value.numel() + 1, dtype=value.dtype).view(value.shape)
        if case in SQUARE:
            return (value * scores).sum()
        return (value * scores).sum() + transform.log_abs_det_jacobian(latent, value).sum()

    assert_same(function, torch.randn(2, *shape))


def mixture(z):
    components = dist.Normal(z[:2], z[2:4].exp())
    return dist.MixtureSameFamily(dist.Categorical(logits=z[4:6]), components).log_prob(z[:3])


def from_all_over(z):
    """Special functions, at arguments from 0.01 to 30."""
    x = (0.01 + z.cumsum(0).abs()) ** 2
    functions = [
        torch.lgamma, torch.erfc, torch.special.entr, torch.special.ndtr, torch.special.log_ndtr,
        torch.special.erfcx,
        torch.special.i0e, torch.special.i1e, lambda x: torch.special.log_ndtr(-x),
        lambda x: torch.igamma(torch.full_like(x, 2), x), lambda x: torch.special.xlog1py(x, x),
        lambda x: torch.logit(x / 100), lambda x: torch.mvlgamma(x + 1, 3), torch.digamma,
        lambda x: torch.erfinv(x / 100), lambda x: torch.special.ndtri(x / 100), torch.sinc,
    ]  # fmt: skip
    return torch.cat([function(x) for function in functions])


def in_place(z):
    out = torch.zeros(4)
    out[1] = z[0]
    out[2:] += z[1:3]
    out.mul_(z[2]).exp_()
    masked = z.clone()
    masked[z > 0] = 0.5
    masked[torch.tensor([0, 1])] = z[2:4]
    return out.sum() + masked.sum()


COUNTS = torch.tensor([0, 1, 4])
TARGETS = torch.tensor([2, 0])
OBSERVATIONS = {
    "Normal": lambda z: dist.Normal(z[:3], z[3:].exp()).log_prob(torch.ones(3)),
    "Categorical-probs": lambda z: dist.Categorical(z.view(2, 3).softmax(1)).log_prob(TARGETS),
    "OneHotCategorical": lambda z: dist.OneHotCategorical(logits=z.view(2, 3)).log_prob(
        F.one_hot(TARGETS)),
    "Multinomial": lambda z: dist.Multinomial(5, logits=z[:3]).log_prob(COUNTS),
    "ZeroInflatedNegativeBinomial": lambda z: dist.ZeroInflatedNegativeBinomial(
        z[:3].exp(), logits=z[3:], gate=z[0].sigmoid()).log_prob(COUNTS),
    "OrderedLogistic": lambda z: dist.OrderedLogistic(
        z[:2], z[2:].exp().cumsum(0)).log_prob(TARGETS),
    "MultivariateNormal": lambda z: dist.MultivariateNormal(
        z[:3], covariance(z[3].exp())).log_prob(torch.ones(2, 3)),
    "MixtureSameFamily": mixture,
    "linear algebra": lambda z: (
        torch.logdet(covariance(z[0].exp())) + torch.det(covariance(z[1]))
        + torch.linalg.solve(covariance(z[2]), z[:3]).sum() + torch.inverse(covariance(z[3])).sum()
        + torch.linalg.eigvalsh(torch.diag(z[:3]) + covariance(0.1)).square().sum()
        + torch.cholesky_solve(z.view(3, 2), torch.linalg.cholesky(covariance(1.0))).sum()
        + torch.linalg.pinv(z.view(3, 2)).sum() + torch.linalg.svdvals(z.view(3, 2)).sum()
        + torch.matrix_exp(covariance(z[4])).sum()),
    "pinv": lambda z: torch.stack([
        torch.linalg.pinv(z.view(3, 2) * torch.tensor([1.0, 0.3]), atol=atol, rtol=rtol).sum()
        for atol, rtol in ((0.9, 0.0), (0.0, 0.5), (1e-6, 1e-6))]),
    "picking": lambda z: (
        z.view(2, 3).median(1).values.prod() * z.view(2, 3).kthvalue(2, 0, keepdim=True).values
        * torch.combinations(z)[7].prod() + torch.bucketize(z[:3], torch.ones(2)) * z[:3]),
    "scatter_reduce": lambda z: torch.stack([
        z[:4].scatter_reduce(0, torch.tensor([0, 0, 3]), z[3:], how, include_self=own)
        for how in ("sum", "mean", "amax", "amin") for own in (True, False)]).cos(),
    "shapes": lambda z: (
        z.roll(1)[0] * z.unfold(0, 2, 1).flip(0)[1] + torch.stack([z, z]).unbind(1)[2]
        + z.view(2, 3).tril().diagonal().sum() * z.repeat(2).chunk(4)[1].prod()
        + torch.cat([z, torch.empty(0)]).topk(2)[0].sum() * z.sort()[0][1] * z.median() * z.std()
        + torch.zeros(6).scatter_add(0, torch.tensor([0, 0, 3]), z[:3])[0] * z.cumprod(0)[3]
        + torch.logcumsumexp(z, 0)[4] * z.index_select(0, COUNTS).var() * z[1::2].amax()),
    "in place": in_place,
    "special functions": from_all_over,
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("case", OBSERVATIONS)
def test_observations(case, dtype, default):
    assert_same(lambda z: OBSERVATIONS[case](z).sum(), torch.randn(2, 6))


# Where derivatives are delicate -----------------------------------------------------------------

EDGES = {
    "square root": lambda z: torch.where(z > 0, torch.where(z > 0, z, 1).sqrt(), 0),
    "logarithm": lambda z: torch.where(z > 0, torch.where(z > 0, z, 1).log(), z),
    "Bernoulli": lambda z: dist.Bernoulli(logits=100 * z).log_prob(torch.ones_like(z)),
    "Binomial": lambda z: dist.Binomial(3, logits=100 * z).log_prob(torch.ones(4)),
    "Categorical": lambda z: dist.Categorical(logits=100 * z.view(2, 2)).log_prob(
        torch.tensor([1, 1])
    ),
}


@pytest.mark.parametrize("case", EDGES)
def test_edges(case):
    point = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64)
    value, gradient = reference(lambda z: EDGES[case](z).sum(), point)
    assert np.isfinite(gradient).all()
    with jax.enable_x64(True):
        both = jax.value_and_grad(to_jax(lambda z: EDGES[case](z).sum(), point))
        actual = jax.jit(both, compiler_options=QUICK)(jnp.asarray(point.numpy()))
    assert_close(actual[0], value, 1e-10)
    assert_close(actual[1], gradient, 1e-10)


def test_clamp_has_a_subgradient_at_its_bounds():
    """1 as in torch 2.13; torch 2.15 has 0 there."""
    point = torch.tensor([0.0, -0.5, 1.0, -1.0])
    gradient = jax.grad(to_jax(lambda z: z.clamp(-1, 0).sum(), point))(jnp.asarray(point.numpy()))
    np.testing.assert_array_equal(gradient, [1, 1, 0, 1])
