"""Near, between and beyond the training inputs, and the verdict on a posterior narrow there."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.comparison.setting import regions


def test_two_clusters_on_a_line():
    train = torch.cat([torch.linspace(-2, -1, 40), torch.linspace(1, 2, 40)])[:, None]
    test = torch.tensor([[-1.5], [-1.01], [0.0], [0.8], [1.7], [2.01], [3.0], [-9.0]])
    found = regions((test,), (train,))
    assert found["near"].tolist() == [True, True, False, False, True, True, False, False]
    assert found["between"].nonzero().flatten().tolist() == [2, 3]
    assert found["beyond"].nonzero().flatten().tolist() == [6, 7]


def test_features_count_in_their_sds_and_one_outlier_feature_is_beyond():
    torch.manual_seed(0)
    train = torch.rand(400, 2) * torch.tensor([1.0, 1000.0])
    test = torch.tensor([[0.5, 500.0], [0.5, 3000.0], [3.0, 500.0]])
    found = regions((test,), (train,))
    assert found["near"].tolist() == [True, False, False]
    assert found["beyond"].tolist() == [False, True, True]
    scaled = regions((test * 7 + 3,), (train * 7 + 3,))
    assert all(torch.equal(scaled[name], found[name]) for name in found)


@pytest.mark.parametrize("beyond, near", [(2.5, True), (3.3, False)])
def test_near_is_twice_the_95_quantile_of_the_distances_between_neighbors(beyond, near):
    """19 neighbors at 1 and one at 12: the quantile is 1 + 0.05 (12 - 1) = 1.55."""
    train = torch.cat([torch.arange(19.0), torch.tensor([30.0])])[:, None]
    found = regions((torch.tensor([[18 + beyond]]),), (train,))
    assert found["near"].tolist() == [near] and found["between"].tolist() == [not near]


def test_the_ends_of_the_training_range_are_within_it():
    train = torch.cat([torch.rand(200, 2), torch.tensor([[50.0, 50.0]])])
    found = regions((torch.tensor([[50.0, 0.5], [50.1, 0.5]]),), (train,))
    assert found["between"].tolist() == [True, False] == [not b for b in found["beyond"].tolist()]


def test_what_has_no_distance_has_no_regions():
    whole = torch.zeros(5, 1, dtype=torch.long)
    assert regions((whole,), (whole,)) == {}
    assert regions((torch.zeros(5, 1),), (torch.zeros(2, 1),)) == {}


def gap_model(x, y=None):
    """f(x) = w0 + w1 b(x) with a bump b in the gap, which the data do not see."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * (-8 * x[:, 0].square()).exp())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.1), obs=y)


def test_overconfidence_in_the_gap_is_named():
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2, -1, 40), torch.linspace(1, 2, 40)])[:, None]
    test = torch.linspace(-2, 2, 81)[:, None]
    draws = torch.randn(4, 500, 2) * torch.tensor([0.05, 1.0])
    narrow = draws.flip(1) * torch.tensor([1.0, 0.1])
    posteriors = {"vi": bdl.Samples({"w": narrow}), "nuts": bdl.Samples({"w": draws})}
    found = bdl.compare(gap_model, posteriors, test, torch.zeros(81), train=(x, torch.zeros(80)))
    row = found.numbers()["vi"]
    assert row["sd_ratio_between"] < 0.3 and row["sd_ratio_near"] > 0.8
    assert "sd_ratio_beyond" not in row
    gravest = found.judgments["vi"].findings[0]
    assert (gravest.key, gravest.says) == ("sd_ratio_between", "below")
    assert gravest.value == row["sd_ratio_between"] and "between the training" in gravest.words
    assert "between" in found.to_text(details=True)
