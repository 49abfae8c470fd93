"""Flipout: what data share, and what they do not."""

import torch
import torch.nn.functional as F

from pyro_bdl.estimators import flipout

D = torch.float64


def test_data_of_one_draw_have_fair_independent_signs_and_share_their_size(layer):
    """One input: |z - m x| is the same for all data, its sign is not. Source: Wen et al. 2018,
    equation 4."""
    made = layer(lambda x, w: F.linear(x, w), torch.tensor([2.0], dtype=D), w=(1, 1))
    rows = made.runs(flipout(), 20_000, 13)[..., 0] - 2.0 * made.q["w"].loc.item()
    torch.testing.assert_close(rows.abs(), rows[:, :1].abs().expand_as(rows))
    signs = rows.sign()
    assert (signs.mean(0).abs() < 5 / 20_000**0.5).all()
    products = signs.T @ signs / 20_000 - torch.eye(13, dtype=D)
    assert (products.abs() < 5 / 20_000**0.5).all()


def test_channels_keep_their_signs_over_an_image(layer):
    made = layer(lambda x, w: F.conv1d(x, w), torch.ones(1, 5, dtype=D), w=(1, 1, 1))
    rows = made.runs(flipout(), 20, 3)
    torch.testing.assert_close(rows, rows[..., :1].expand_as(rows))
