"""Draws of a large diagonal Normal on the CPU whose gradients take one pass over the weights.

The draw is u = m + s eps with s = softplus(r), and a site with the prior Normal(n, t^2) has

    KL = sum_i e_i + e_i^2 / 2 - log(1 + e_i) + (m_i - n)^2 / (2 t^2),    e = s / t - 1.

With the gradient g in u, the gradients are g + (m - n) / t^2 in m and (g eps + s / t^2 - 1 / s)
sigmoid(r) in r. Autograd alone makes a vector of each term, which takes most of the time and of the
memory of a step. Here the KL is a sum that only leaves its coefficients for the backward pass,
which computes both gradients piece by piece, in pieces that fit in the processor's cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from pyro_bdl.program.layout import Layout
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.memory import empty_on_large_pages

Prior = tuple[Tensor, Tensor]

_PIECE = 2**17


def standard_normal(like: Tensor) -> Tensor:
    """Standard Normal numbers with the shape of a vector, those of ``torch.randn``."""
    if is_transformed():
        return torch.randn(like.shape, dtype=like.dtype, device=like.device)
    return empty_on_large_pages(like).normal_()


class LargeDraw:
    """A draw u and what the KL needs, in parts for each site.

    :param loc: m, (P,).
    :param free: r, (P,).
    :param noise: eps, (P,).
    """

    def __init__(self, layout: Layout, loc: Tensor, free: Tensor, noise: Tensor) -> None:
        sizes = [latent.size for latent in layout.latents.values()]
        self._priors: dict[int, Prior] = {}
        self.vector, self._coefficients, *parts = _Draw.apply(self._priors, sizes, loc, free, noise)
        count = len(sizes)
        values, locs, scales = (parts[n * count : (n + 1) * count] for n in range(3))
        self._places = {name: number for number, name in enumerate(layout.latents)}
        self.values = {
            name: value.view(latent.unconstrained_shape)
            for (name, latent), value in zip(layout.latents.items(), values, strict=True)
        }
        self.locs = dict(zip(layout.latents, locs, strict=True))
        self.scales = dict(zip(layout.latents, scales, strict=True))

    def kl(self, name: str, center: Tensor, width: Tensor) -> Tensor:
        """KL of a site, once for each draw, from the prior Normal(n, t^2), a scalar.

        :param center: n, a scalar.
        :param width: t, a scalar.
        """
        place = self._places[name]
        loc, scale = self.locs[name], self.scales[name]
        self._priors[place] = center.detach(), width.detach()
        of_scales, squares = _Sums.apply(
            self._coefficients[place], loc.detach(), scale.detach(), center, width
        )
        return (of_scales + 0.5 * squares / width.double().square()).to(loc.dtype)


class _Draw(torch.autograd.Function):
    """u, two coefficients of the KL for each site, and u, m and s in parts.

    ``priors`` is filled later: the site's number -> n and t, for each site whose KL was taken.
    """

    @staticmethod
    def forward(
        ctx: Any,
        priors: dict[int, Prior],
        sizes: list[int],
        loc: Tensor,
        free: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, ...]:
        vector, scale = large_draw(loc.detach(), free.detach(), noise)
        ctx.save_for_backward(loc, free, scale, noise)
        ctx.set_materialize_grads(False)
        ctx.priors, ctx.sizes = priors, sizes
        coefficients = torch.zeros(len(sizes), 2, dtype=torch.float64, device=loc.device)
        parts = [p for each in (vector, loc, scale) for p in each.detach().split(sizes)]
        return vector, coefficients, *parts

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, of_vector: Tensor | None, coefficients: Tensor | None, *of_parts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        loc, free, scale, noise = ctx.saved_tensors
        count = len(ctx.sizes)
        of_draw, of_loc, of_scale = (list(of_parts[n * count : (n + 1) * count]) for n in range(3))
        if of_vector is not None:
            pairs = zip(of_draw, of_vector.split(ctx.sizes), strict=True)
            of_draw = [whole if part is None else part + whole for part, whole in pairs]
        if coefficients is None:
            coefficients = torch.zeros(count, 2, dtype=torch.float64, device=loc.device)
        priors = [ctx.priors.get(number, (None, None)) for number in range(count)]
        centers, widths = ([pair[n] for pair in priors] for n in range(2))
        gradients = large_gradients(
            loc.detach(), free.detach(), scale, noise, ctx.sizes,
            of_draw, of_loc, of_scale, coefficients, centers, widths, ctx.needs_input_grad[2],
        )  # fmt: skip
        of_m, of_r = gradients
        return None, None, of_m if ctx.needs_input_grad[2] else None, of_r, None


class _Sums(torch.autograd.Function):
    """The sums over a site of e + e^2 / 2 - log(1 + e) and of (m - n)^2.

    The gradients in m and s are left to ``_Draw``, by the coefficients.
    """

    @staticmethod
    def forward(
        ctx: Any, coefficients: Tensor, loc: Tensor, scale: Tensor, center: Tensor, width: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums = large_sums(loc, scale, center.detach(), width.detach())
        ctx.save_for_backward(sums, width)
        return sums[0].clone(), sums[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_scales: Tensor, squares: Tensor) -> tuple:  # type: ignore[override]
        sums, width = ctx.saved_tensors
        center = (-2 * squares * sums[2]).to(width.dtype)
        return (
            torch.stack([of_scales, squares]),
            None,
            None,
            center,
            (-of_scales * sums[3] / width).to(width.dtype),
        )


# The operators. A trace keeps each as one node.


def _pieces(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, _PIECE):
        yield slice(first, min(first + _PIECE, stop))


@custom_op("pyro_bdl::large_draw", mutates_args=())
def large_draw(loc: Tensor, free: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """u = m + s eps and s = softplus(r), both (P,)."""
    vector, scale = empty_on_large_pages(loc), empty_on_large_pages(loc)
    for piece in _pieces(0, len(loc)):
        torch.ops.aten.softplus.out(free[piece], out=scale[piece])
        torch.addcmul(loc[piece], scale[piece], noise[piece], out=vector[piece])
    return vector, scale


@large_draw.register_fake
def _(loc: Tensor, free: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(loc), torch.empty_like(loc)


@custom_op("pyro_bdl::large_sums", mutates_args=())
def large_sums(loc: Tensor, scale: Tensor, center: Tensor, width: Tensor) -> Tensor:
    """The sums of e + e^2 / 2 - log(1 + e), (m - n)^2, m - n and 2 e + e^2, (4,) in float64."""
    n, t = center.item(), width.item()
    totals = torch.zeros(4, dtype=torch.float64, device=loc.device)
    one, two = (torch.empty_like(loc[:_PIECE]) for _ in range(2))
    for piece in _pieces(0, len(loc)):
        m, s = loc[piece], scale[piece]
        a, b = one[: len(s)], two[: len(s)]
        torch.div(s, t, out=a)
        torch.log(a, out=b)
        a.sub_(1)
        square = torch.dot(a, a)
        difference = torch.sub(a, b, out=b).sum() + 0.5 * square
        rest = 2 * a.sum() + square
        apart = m if n == 0 else torch.sub(m, n, out=b)
        totals += torch.stack([difference, torch.dot(apart, apart), apart.sum(), rest])
    return totals


@large_sums.register_fake
def _(loc: Tensor, scale: Tensor, center: Tensor, width: Tensor) -> Tensor:
    return loc.new_empty(4, dtype=torch.float64)


@custom_op("pyro_bdl::large_gradients", mutates_args=())
def large_gradients(
    loc: Tensor,
    free: Tensor,
    scale: Tensor,
    noise: Tensor,
    sizes: Sequence[int],
    of_draw: Sequence[Tensor | None],
    of_loc: Sequence[Tensor | None],
    of_scale: Sequence[Tensor | None],
    coefficients: Tensor,
    centers: Sequence[Tensor | None],
    widths: Sequence[Tensor | None],
    with_loc: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients in m and r, from those in the parts of u, m and s and in the sums of the KL.

    :param coefficients: (sites, 2), the gradients in the two sums of ``_Sums``.
    :param with_loc: whether the first gradient is asked for; it is empty if not.
    """
    of_m = empty_on_large_pages(loc) if with_loc else loc.new_empty(0)
    of_r = empty_on_large_pages(loc)
    spare, start = torch.empty_like(loc[:_PIECE]), 0
    for number, size in enumerate(sizes):
        center, width = centers[number], widths[number]
        n, t = (0.0, 1.0) if center is None or width is None else (center.item(), width.item())
        of_sum, of_squares = coefficients[number].tolist()
        given = [of[number] for of in (of_draw, of_loc, of_scale)]
        g, g_m, g_s = (None if part is None else part.reshape(-1) for part in given)
        for piece in _pieces(start, start + size):
            part = slice(piece.start - start, piece.stop - start)
            s, r = scale[piece], of_r[piece]
            scratch = spare[: len(s)]
            if with_loc:
                m = of_m[piece]
                torch.mul(loc[piece], 2 * of_squares, out=m)
                if n != 0:
                    m.sub_(2 * of_squares * n)
                for more in (g, g_m):
                    if more is not None:
                        m.add_(more[part])
            torch.reciprocal(s, out=scratch)
            torch.mul(scratch, -of_sum, out=r)
            r.add_(s, alpha=of_sum / t**2)
            if g is not None:
                r.addcmul_(g[part], noise[piece])
            if g_s is not None:
                r.add_(g_s[part])
            r.mul_(torch.sigmoid(free[piece], out=scratch))
        start += size
    return of_m, of_r


@large_gradients.register_fake
def _(
    loc: Tensor, free: Tensor, scale: Tensor, noise: Tensor, sizes: Any, of_draw: Any, of_loc: Any,
    of_scale: Any, coefficients: Tensor, centers: Any, widths: Any, with_loc: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(loc) if with_loc else loc.new_empty(0), torch.empty_like(loc)
