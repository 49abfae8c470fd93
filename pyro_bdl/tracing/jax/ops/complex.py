"""ATen operators in JAX: complex numbers and Fourier transforms."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pyro_bdl.tracing.jax.ops.registry import OPERATORS, aten, register, table

# torch's codes for the normalization: divide by nothing, the square root of the length, the length.
NORMS = ("backward", "ortho", "forward")

table({
    "complex": lambda real, imag: lax.complex(*jnp.broadcast_arrays(real, imag)),
    "real": jnp.real, "imag": jnp.imag,
    "_conj": jnp.conj, "_conj_physical": jnp.conj, "conj_physical": jnp.conj,
})  # fmt: skip


@register(aten.polar)
def _polar(radius, angle):
    # torch's gradient in a radius of 0 is 0.
    radius = jnp.where(radius == 0, lax.stop_gradient(radius), radius)
    return lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))


@register(aten.angle)
def _angle(x):
    if jnp.iscomplexobj(x):
        return OPERATORS[aten.atan2](x.imag, x.real)
    return jnp.where(x != x, x, jnp.where(x < 0, np.pi, 0))


@register(aten.view_as_real)
def _view_as_real(x):
    return jnp.stack([x.real, x.imag], -1)


@register(aten.view_as_complex)
def _view_as_complex(x):
    return lax.complex(x[..., 0], x[..., 1])


@register(aten._fft_r2c)
def _fft_r2c(x, dim, normalization, onesided):
    return (jnp.fft.rfftn if onesided else jnp.fft.fftn)(x, axes=dim, norm=NORMS[normalization])


@register(aten._fft_c2c)
def _fft_c2c(x, dim, normalization, forward):
    if forward:
        return jnp.fft.fftn(x, axes=dim, norm=NORMS[normalization])
    # torch's code is for this transform, jnp's norm for the pair of transforms.
    return jnp.fft.ifftn(x, axes=dim, norm=NORMS[::-1][normalization])


@register(aten._fft_c2r)
def _fft_c2r(x, dim, normalization, last_dim_size):
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    return jnp.fft.irfftn(x, sizes, dim, norm=NORMS[::-1][normalization])
