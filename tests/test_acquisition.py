"""Information of labels, against sums over all joint labels."""

import itertools

import pytest
import torch

from pyro_bdl import acquisition

CLASSES = 3


def draws(count, rows, seed=0, spread=1.5, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, rows, classes, generator=generator, dtype=torch.float64)
    return (spread * noise).softmax(-1)


def information(p, rows):
    """I(labels of rows; w), by all joint labels."""
    each = p.shape[0]
    total = 0.0
    for labels in itertools.product(range(p.shape[2]), repeat=len(rows)):
        joint = torch.ones(each, dtype=p.dtype)
        for row, label in zip(rows, labels, strict=True):
            joint = joint * p[:, row, label]
        total += torch.special.entr(joint.mean()) - torch.special.entr(joint).mean()
    return float(total)


def test_bald_is_the_information_of_one_label():
    p = draws(7, 5)
    expected = [information(p, [row]) for row in range(5)]
    assert acquisition.bald(p).tolist() == pytest.approx(expected, abs=1e-12)


def test_epig_is_the_mean_information_about_the_labels_of_targets():
    p, q = draws(6, 4), draws(6, 5, seed=1)
    joint = torch.einsum("snc,smd->nmcd", p, q) / 6
    product = p.mean(0)[:, None, :, None] * q.mean(0)[None, :, None, :]
    expected = (joint * (joint / product).log()).sum((-2, -1)).mean(1)
    assert acquisition.epig(p, q).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_a_target_that_tells_the_weights_makes_epig_bald():
    p = draws(CLASSES, 4)
    told = torch.eye(CLASSES, dtype=torch.float64)[:, None]  # its label is the number of the draw
    assert acquisition.epig(p, told).tolist() == pytest.approx(
        acquisition.bald(p).tolist(), abs=1e-12
    )


def test_batches_are_chosen_by_their_joint_information():
    p = draws(5, 6)
    chosen = acquisition.batch_bald(p, 4)
    rows = chosen.rows.tolist()
    for size in range(1, 5):
        others = [row for row in range(6) if row not in rows[: size - 1]]
        best = max(others, key=lambda row: information(p, [*rows[: size - 1], row]))
        assert rows[size - 1] == best
        expected = information(p, rows[:size])
        assert float(chosen.information[size - 1]) == pytest.approx(expected, abs=1e-12)


def test_drawn_labels_tell_what_all_of_them_tell():
    p = draws(5, 8, classes=2)
    exact = acquisition.batch_bald(p, 6)
    drawn = acquisition.batch_bald(p, 6, num_configurations=2000)
    assert drawn.rows[:5].tolist() == exact.rows[:5].tolist()
    few = acquisition.batch_bald(p, 6, num_configurations=16)  # drawn from the fifth row on
    errors = (few.information[4:] - exact.information[4:]).abs()
    assert not torch.equal(few.information, exact.information) and float(errors.max()) < 0.3
    many = torch.stack(
        [acquisition.batch_bald(p, 5, num_configurations=16, seed=seed).information[4]
         for seed in range(300)]
    )  # fmt: skip
    assert float(many.min()) > 0.0


def test_a_copy_of_a_row_is_not_chosen_beside_it():
    p = draws(4, 1, spread=400.0).repeat(1, 3, 1)  # each draw is sure of its label
    p = torch.cat([p, draws(4, 2, seed=1, spread=0.7)], 1)
    assert acquisition.bald(p).argsort(descending=True)[:3].sort().values.tolist() == [0, 1, 2]
    assert acquisition.batch_bald(p, 2).rows[1] >= 3


@pytest.mark.parametrize("count", [10, 40])
def test_errors_of_few_draws_are_as_large_as_is_said(count):
    p, q = draws(4000 * count, 1, spread=0.3), draws(4000 * count, 1, seed=1, spread=0.3)
    whole, other = float(acquisition.bald(p)), float(acquisition.bald(q))
    parts = [acquisition.bald(part) for part in p.split(count)]
    assert 1.0 - float(torch.stack(parts).mean()) / whole == pytest.approx(1 / count, rel=0.15)
    pairs = zip(p.split(count), q.split(count), strict=True)
    by_chance = torch.stack([acquisition.epig(*pair) for pair in pairs])
    assert float(by_chance.mean()) == pytest.approx(2 * whole * other / count, rel=0.15)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: acquisition.bald(torch.rand(3, 2)), "draws of class probabilities"),
        (lambda: acquisition.epig(draws(3, 2), draws(4, 2)), "from the 3 draws"),
        (lambda: acquisition.batch_bald(draws(3, 2), 3), "from 1 to 2"),
        (lambda: acquisition.batch_bald(draws(3, 2), 0), "from 1 to 2"),
    ],
)
def test_refusals(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
