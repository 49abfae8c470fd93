"""Corrupted images against their formulas and scipy's filter."""

import math

import pytest
import torch
from scipy.ndimage import gaussian_filter

from pyro_bdl.data import corrupt
from pyro_bdl.data.corruptions import BLUR, CONTRAST, NOISE

IMAGES = torch.rand(3, 2, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SEVERITIES = range(1, 6)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_is_added_and_clipped(severity):
    found = corrupt(IMAGES, "noise", severity, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(
        IMAGES.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    expected = (IMAGES + NOISE[severity - 1] * noise).clamp(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_blur_is_scipys(severity):
    sd = BLUR[severity - 1]
    expected = gaussian_filter(
        IMAGES.numpy(), sd, mode="nearest", radius=math.ceil(3 * sd), axes=(-2, -1)
    )
    found = corrupt(IMAGES, "blur", severity)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_keeps_the_mean_and_shrinks_the_sd(severity):
    found, left = corrupt(IMAGES, "contrast", severity), CONTRAST[severity - 1]
    torch.testing.assert_close(found.mean((-2, -1)), IMAGES.mean((-2, -1)))
    torch.testing.assert_close(found.std((-2, -1)), left * IMAGES.std((-2, -1)))


@pytest.mark.parametrize("kind", ["noise", "blur", "contrast"])
def test_other_ranges_and_shapes_are_the_same_images(kind):
    def made(x, **choice):
        return corrupt(x, kind, 3, generator=torch.Generator().manual_seed(2), **choice)

    expected = made(IMAGES)
    scaled = made(7.0 * IMAGES - 2.0, value_range=(-2.0, 5.0))
    torch.testing.assert_close(scaled, 7.0 * expected - 2.0, rtol=0, atol=1e-12)
    flat = made(IMAGES.flatten(0, 1))  # (N, H, W)
    torch.testing.assert_close(flat, expected.flatten(0, 1), rtol=0, atol=1e-14)
    assert made(IMAGES.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "fog"}, "choose 'noise', 'blur' or 'contrast'"),
        ({"severity": 0}, "severity=0"),
        ({"x": IMAGES[0, 0]}, r"shape \(9, 7\)"),
        ({"x": 255 * IMAGES}, "outside value_range"),
    ],
)
def test_refusals(changes, message):
    given = {"x": IMAGES, "kind": "noise", "severity": 1} | changes
    with pytest.raises(ValueError, match=message):
        corrupt(**given)
