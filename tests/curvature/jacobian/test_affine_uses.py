"""The mode that records affine operations: views, matched and unmatched uses, errors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_bdl.curvature.jacobian.affine_uses import UseRecorder, patches


def seen(function, **latents):
    """The affine uses of latents in a function, and the sites that enter otherwise."""
    for latent in latents.values():
        latent.requires_grad_()
    with UseRecorder(latents) as operations:
        function(**latents)
    affine = [use for use in operations.uses if use.kind != "dense"]
    return affine, {use.site for use in operations.uses if use.kind == "dense"}


W, X = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.T.T,
        lambda w: w.mT.transpose(0, 1),
        lambda w: w.view(2, 2, 3).flatten(0, 1),
        lambda w: w.reshape(-1).unflatten(0, (4, 3)),
        lambda w: w.chunk(2)[1],
        lambda w: w.split(3)[0],
        lambda w: w.unbind(0)[2][None],
        lambda w: w[1:3],
        lambda w: w[[2, 0]],
        lambda w: w[:, [1, 0, 2]],
        lambda w: w.permute(1, 0).t(),
        lambda w: w.narrow(0, 1, 2),
        lambda w: w.unsqueeze(0).squeeze(0),
        lambda w: w.float().double(),
        lambda w: w.contiguous().clone(),
        lambda w: list(w)[3][None],
        lambda w: w.movedim(0, 1).swapaxes(0, 1),
    ],
)
def test_views_are_followed(view):
    """A view's indices are the view of the indices."""
    uses, unmatched = seen(lambda w: F.linear(X, view(w)), w=W.clone())
    (use,) = uses
    assert not unmatched
    numbers = view(torch.arange(12).double().reshape(4, 3)).long()
    found = torch.arange(12) if use.indices is None else use.indices.reshape(-1)
    assert torch.equal(found, numbers.reshape(-1))
    assert use.shape == (1, *numbers.shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda w: F.linear(X, w.exp()),
        lambda w: F.linear(X, w / w.norm()),
        lambda w: F.linear(X, torch.stack([w, w]).sum(0)),
        lambda w: torch.einsum("ni,oi->nio", X, w),
        lambda w: F.linear(w, w),
        lambda w: w @ w.T,
        lambda w: w * w,
        lambda w: X[:4] * w,
        lambda w: X[:4] - w,
        lambda w: torch.max(w, dim=0),
        lambda w: F.linear(w, torch.randn(2, 3)),
        lambda w: torch.add(torch.randn(4, 3), w, alpha=2),
        lambda w: torch.addmm(w, torch.randn(4, 2), torch.randn(2, 3)),
    ],
)
def test_other_uses_are_told(function):
    _, unmatched = seen(function, w=W.clone())
    assert unmatched == {"w"}


@pytest.mark.parametrize(
    "function",
    [
        lambda w: F.linear(X, w.detach()),
        lambda w: w.data * 2,
        lambda w: (w.shape, w.dim(), w.dtype, w.requires_grad, len(w), w.numel()),
        lambda w: torch.zeros_like(w) + X[:4],
        lambda w: (w > 0).sum(),
        lambda w: str(w),
    ],
)
def test_what_has_no_gradient_is_no_use(function):
    uses, unmatched = seen(function, w=W.clone())
    assert not uses and not unmatched


def test_attention_is_seen_into():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    latents = {name: p.detach().clone() for name, p in attention.named_parameters()}
    x = torch.randn(5, 3, 4)
    uses, unmatched = seen(
        lambda **values: torch.func.functional_call(attention, values, (x, x, x)), **latents
    )
    assert not unmatched
    assert {use.site for use in uses} == set(latents)
    assert all(use.kind == "product" for use in uses)


def test_statistics_of_the_batch_are_refused():
    weight = torch.ones(3)
    with pytest.raises(ValueError, match="makes data depend on each other"):
        seen(lambda w: F.batch_norm(X, None, None, w, training=True), w=weight)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"dilation": 2, "padding": 1},
        {"padding": "same"},
        {"padding": "same", "dilation": 2},
        {"padding": "valid"},
        {"stride": (1, 2, 3), "padding": (2, 1, 0), "dilation": (2, 1, 2)},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_patches_times_the_kernel_is_the_convolution(dims, groups, options):
    torch.manual_seed(0)
    kernel = (2, 3, 2)[:dims]
    options = {k: v[:dims] if isinstance(v, tuple) else v for k, v in options.items()}
    images, weight = torch.randn(2, 4, *(7, 6, 5)[:dims]), torch.randn(6, 4 // groups, *kernel)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    expected = convolution(images, weight, groups=groups, **options)

    def spread(value):
        return value if isinstance(value, tuple) else (value,) * dims

    found = patches(
        images,
        kernel=kernel,
        stride=spread(options.get("stride", 1)),
        dilation=spread(options.get("dilation", 1)),
        padding=options.get("padding", 0),
        groups=groups,
    )
    rows = weight.reshape(groups, 6 // groups, -1)
    found = torch.einsum("ntgi,goi->ngot", found, rows).reshape(expected.shape)
    torch.testing.assert_close(found, expected)
