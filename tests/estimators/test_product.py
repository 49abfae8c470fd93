"""Operations of a network as products of data with latents: outputs of every kind of layer under
both estimators have the moments that plain draws have, datum by datum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_bdl.estimators import flipout, local_reparameterization

D = torch.float64

COUNT = 6000


def conv(function, pad=None, **settings):
    def run(x, w, b=None):
        return function(x if pad is None else F.pad(x, *pad), w, b, **settings)

    return run


def module(net):
    def run(x, **latents):
        return torch.func.functional_call(net, latents, (x,))

    return run


CIRCULAR = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2, dtype=D)


def sequence_first(x, w, b):
    return F.linear(x.transpose(0, 1), w, b).transpose(0, 1)


X = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=D)
IMAGE = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(2), dtype=D)
TOKENS = torch.tensor([3, 1, 3, 0])
V = X[0, :3]
FIXED = torch.randn(2, 3, dtype=D, generator=torch.Generator().manual_seed(4))

LAYERS = {
    "linear": (F.linear, V, dict(weight=(2, 3), bias=2)),
    "linear without bias": (F.linear, V, dict(weight=(2, 3))),
    "linear, latent bias alone": (lambda x, b: F.linear(x, FIXED, b), V, dict(b=2)),
    "linear, constant bias": (lambda x, w: F.linear(x, w, FIXED[:, 0]), V, dict(w=(2, 3))),
    "module": (module(nn.Linear(3, 2, dtype=D)), V, dict(weight=(2, 3), bias=2)),
    "sequence": (F.linear, X, dict(weight=(2, 7), bias=2)),
    "sequence, latent bias alone": (lambda x, b: F.linear(x, X, b), X, dict(b=2)),
    "sequence first": (sequence_first, X, dict(w=(2, 7), b=2)),
    "x @ w": (lambda x, w: x @ w, V, dict(w=(3, 2))),
    "x @ vector": (lambda x, w: (x @ w)[:, None], V, dict(w=3)),
    "mv": (lambda x, w: torch.mv(x, w)[:, None], V, dict(w=3)),
    "vector @ x.T": (lambda x, w: (w @ x.T)[:, None], V, dict(w=3)),
    "linear, a vector": (lambda x, w: F.linear(x, w)[:, None], V, dict(w=3)),
    "x @ w.T": (lambda x, w: torch.matmul(x, w.T), V, dict(w=(2, 3))),
    "w @ x.T": (lambda x, w: (w @ x.T).T, V, dict(w=(2, 3))),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), V, dict(w=(3, 2), b=2)),
    "einsum": (lambda x, w: torch.einsum("oi,bi->bo", w, x), V, dict(w=(2, 3))),
    "einsum of a sequence": (
        lambda x, w: torch.einsum("bct,ocd->bodt", x, w),
        X,
        dict(w=(2, 2, 2)),
    ),
    "parts of a weight": (
        lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
        V,
        dict(w=(4, 3)),
    ),
    "conv1d": (conv(F.conv1d, stride=2, padding=1), X, dict(w=(3, 2, 3), b=3)),
    "conv1d, dilated, same": (conv(F.conv1d, dilation=2, padding="same"), X, dict(w=(2, 2, 3))),
    "conv1d, reflected": (conv(F.conv1d, pad=((1, 1), "reflect")), X, dict(w=(2, 2, 3), b=2)),
    "conv1d, one position": (conv(F.conv1d), X, dict(w=(2, 2, 7), b=2)),
    "conv2d, groups": (conv(F.conv2d, groups=2), IMAGE, dict(w=(4, 2, 3, 2), b=4)),
    "conv2d, circular": (module(CIRCULAR), IMAGE, dict(weight=(4, 2, 3, 3), bias=4)),
    "conv3d": (conv(F.conv3d, padding=(1, 0, 0)), IMAGE[None], dict(w=(2, 1, 3, 3, 3), b=2)),
    "embedding": (F.embedding, TOKENS[0], dict(weight=(5, 2))),
    "embedding of a sequence": (F.embedding, TOKENS, dict(weight=(5, 2))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_local_reparameterization_has_the_exact_moments(name, layer):
    """Data of one run are independent of each other. E z = op(a, m) and Cov z from op(a, s eps)
    (Kingma, Salimans & Welling 2015, equation 6)."""
    function, x, shapes = LAYERS[name]
    made = layer(function, x, **shapes)
    (rows,) = made.runs(local_reparameterization(), 1, COUNT)
    made.has_moments_of(rows)


@pytest.mark.parametrize("name", LAYERS)
def test_flipout_has_the_exact_moments(name, layer):
    """Data of one run share the size of w - m: so many runs, one datum each. w_n = m + d * t_n r_n'
    has the moments of w (Wen et al. 2018, equation 4)."""
    function, x, shapes = LAYERS[name]
    made = layer(function, x, **shapes)
    made.has_moments_of(made.runs(flipout(), COUNT)[:, 0])


def attention(batch_first, **options):
    net = nn.MultiheadAttention(4, 2, batch_first=batch_first, dtype=D, **options)
    names = [name for name, _ in net.named_parameters()]

    def run(x, **latents):
        x = x if batch_first else x.transpose(0, 1)
        values = {name: latents[name.replace(".", "_")] for name in names}
        key = x[..., :3] if options else x
        result = torch.func.functional_call(net, values, (x, key, key), strict=True)[0]
        return result if batch_first else result.transpose(0, 1)

    return run, {name.replace(".", "_"): p.shape for name, p in net.named_parameters()}


@pytest.mark.parametrize("estimator", [local_reparameterization, flipout])
@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 3}], ids=["packed", "separate"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(layer, estimator, options, batch_first):
    """Attention is not affine in its projections: compared with plain draws."""
    function, shapes = attention(batch_first, **options)
    made = layer(function, 0.5 * torch.randn(3, 4, dtype=D), **shapes)
    rows, plain = made.runs(estimator(), 3000, 2).flatten(0, 1).flatten(1), made.plain(6000)
    plain = plain.flatten(1)
    for power in (lambda z: z, lambda z: (z[:, :, None] * z[:, None, :]).flatten(1)):
        a, b = power(rows - plain.mean(0)), power(plain - plain.mean(0))
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error).all()
