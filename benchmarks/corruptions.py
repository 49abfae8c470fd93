"""Images made worse step by step: noise, blur and loss of contrast at five strengths.

The kinds are three of those of Hendrycks & Dietterich (2019, "Benchmarking neural network
robustness to common corruptions and perturbations"); noise and contrast have their strengths for
ImageNet. A blur is as wide as the strength says in pixels, so that it suits images of about 30.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)  # the sd, as a share of the range
BLUR = (0.5, 1.0, 1.5, 2.0, 3.0)  # the sd of the kernel, in pixels
CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)  # the share that is left


def corrupt(
    x: Tensor,
    kind: str,
    severity: int,
    *,
    generator: torch.Generator | None = None,
    value_range: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Corrupt images; what leaves the range of values (low, high) is clipped to it.

    - "noise": x + sd (high - low) e with e ~ N(0, 1) for every value, sd = 0.08, 0.12, 0.18, 0.26
      and 0.38.
    - "blur": a Gaussian kernel with an sd of 0.5, 1, 1.5, 2 and 3 pixels, cut off at three sds;
      beyond the border stands its nearest pixel.
    - "contrast": c x + (1 - c) m with the mean m of each image's channel, c = 0.4, 0.3, 0.2, 0.1
      and 0.05.

    :param x: ``(N, H, W)`` or ``(N, C, H, W)``, floating point, with values in the range.
    :param kind: "noise", "blur" or "contrast".
    :param severity: 1 to 5.
    :param generator: of the noise, on the device of ``x``; torch's default if None.
    :param value_range: low and high, the least and the largest value that a pixel can have.
    :returns: as ``x``, in its dtype and on its device.
    :raises ValueError: for another kind, severity or shape, and for values outside the range.
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"kind={kind!r} is unknown; choose {', '.join(CORRUPTIONS)}")
    if severity not in range(1, 6):
        raise ValueError(f"severity={severity!r} must be 1, 2, 3, 4 or 5")
    if x.ndim not in (3, 4) or not x.is_floating_point():
        raise ValueError(
            "x must be floating point images (N, H, W) or (N, C, H, W), but has shape "
            f"{tuple(x.shape)} and dtype {x.dtype}"
        )
    low, high = value_range
    if x.numel() and not bool(((x >= low) & (x <= high)).all()):
        raise ValueError(
            f"x has values outside value_range=({low:g}, {high:g}): give the range of its pixels"
        )
    changed = CORRUPTIONS[kind]((x - low) / (high - low), severity - 1, generator)
    return low + (high - low) * changed.clamp(0.0, 1.0)


def _noise(x: Tensor, strength: int, generator: torch.Generator | None) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return x + NOISE[strength] * noise


def _blur(x: Tensor, strength: int, generator: torch.Generator | None) -> Tensor:
    sd = BLUR[strength]
    reach = math.ceil(3.0 * sd)
    place = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    kernel = (-0.5 * (place / sd).square()).softmax(0)
    images = x.reshape(-1, 1, *x.shape[-2:])
    images = nn.functional.pad(images, (reach,) * 4, mode="replicate")
    images = nn.functional.conv2d(images, kernel.reshape(1, 1, 1, -1))
    return nn.functional.conv2d(images, kernel.reshape(1, 1, -1, 1)).reshape(x.shape)


def _contrast(x: Tensor, strength: int, generator: torch.Generator | None) -> Tensor:
    return x.mean((-2, -1), keepdim=True).lerp(x, CONTRAST[strength])


CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator | None], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
}
