"""Distances of predictive distributions, the parts of their uncertainty, and AUROC."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.distributions import Categorical, Normal, kl_divergence

from pyro_bdl import metrics
from pyro_bdl.metrics.uncertainty import placements


def test_class_distances_by_hand():
    """Agreement and total variation (Izmailov et al. 2021)."""
    a = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]])
    b = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]])
    assert metrics.agreement(a, b) == 0.5
    assert metrics.total_variation(a, b) == pytest.approx((0.1 + 0.3) / 2)


def test_categorical_kl_is_that_of_the_mean_probabilities():
    """1/N sum_n sum_c q_nc log(q_nc / p_nc) (Kullback & Leibler 1951)."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 7, 3).double().softmax(-1), torch.randn(9, 7, 3).double().softmax(-1)
    exact = kl_divergence(Categorical(b.mean(0)), Categorical(a.mean(0))).mean()
    torch.testing.assert_close(metrics.categorical_kl(a, b), exact)
    assert metrics.categorical_kl(a, a) == 0


def test_categorical_kl_of_what_is_ruled_out_is_large_and_finite():
    never, possible = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.5, 0.5]]])
    assert 40 < metrics.categorical_kl(never, possible) < 50
    assert metrics.categorical_kl(possible, never) == pytest.approx(math.log(2))


def test_gaussian_kl_is_exact_between_normals():
    """1/2 [v_b / v_a + (m_a - m_b)^2 / v_a - 1 + log(v_a / v_b)] (Kullback & Leibler 1951)."""
    torch.manual_seed(0)
    means, variances = torch.randn(2, 6).double(), torch.rand(2, 6).double() + 0.1
    a, b = (Normal(m, v.sqrt()) for m, v in zip(means, variances, strict=True))
    found = metrics.gaussian_kl(means[0], variances[0], means[1], variances[1])
    torch.testing.assert_close(found, kl_divergence(b, a).mean())


def test_entropy_parts_add_up_to_the_predictive_entropy():
    """H[E p] = E H[p] + I(y; w) (Houlsby et al. 2011; Depeweg et al. 2018, section 3)."""
    torch.manual_seed(0)
    p = torch.randn(30, 6, 4).double().mul(2).softmax(-1)
    parts = metrics.entropy_parts(p)
    exact = torch.distributions.Categorical(p.mean(0)).entropy()
    torch.testing.assert_close(parts.total, exact)
    inside = torch.distributions.Categorical(p).entropy().mean(0)
    torch.testing.assert_close(parts.aleatoric, inside)
    assert (parts.epistemic > 0).all()


def test_entropy_parts_of_extremes():
    certain_but_apart = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    aleatoric, epistemic = metrics.entropy_parts(certain_but_apart)
    assert aleatoric == 0 and epistemic == pytest.approx(math.log(2))
    coin = torch.full((9, 1, 2), 0.5)
    aleatoric, epistemic = metrics.entropy_parts(coin)
    assert aleatoric == pytest.approx(math.log(2)) and epistemic == 0


def test_variance_parts_add_up_to_the_variance_of_a_mixture():
    """Var[y] = E Var[y | w] + Var E[y | w] (Depeweg et al. 2018, section 3)."""
    torch.manual_seed(0)
    mean, noise = torch.randn(40, 5).double(), torch.rand(40, 5).double()
    parts = metrics.variance_parts(mean, noise)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(5, 40).double()),
        torch.distributions.Normal(mean.T, noise.sqrt().T),
    )
    torch.testing.assert_close(parts.total, mixture.variance)
    torch.testing.assert_close(parts.aleatoric, noise.mean(0))
    assert (metrics.variance_parts(mean[:1].expand(9, 5), noise[:9]).epistemic == 0).all()


def test_auroc_equals_scikit_learn_with_ties():
    """P(s < s') + P(s = s') / 2 (Hanley & McNeil 1982)."""
    torch.manual_seed(0)
    known, new = torch.randint(0, 8, (50,)).double(), torch.randint(2, 10, (3, 10)).double()
    labels = torch.cat([torch.zeros(50), torch.ones(30)])
    expected = roc_auc_score(labels, torch.cat([known, new.flatten()]))
    assert metrics.auroc(known, new) == pytest.approx(expected, rel=1e-12)
    assert metrics.auroc(known, known) == 0.5 and metrics.auroc(known, new + 99) == 1
    assert metrics.auroc(known, torch.tensor([1.0, torch.nan])).isnan()


def test_placements_are_shares_of_pairs_and_give_the_variance_of_the_auroc():
    known, new = torch.tensor([0.0, 1.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 0.5])
    pairs = (known[:, None] < new).double() + 0.5 * (known[:, None] == new)
    here, there = placements(known, new)
    torch.testing.assert_close(here, pairs.mean(1))
    torch.testing.assert_close(there, pairs.mean(0))
    made = torch.Generator().manual_seed(0)
    areas, variances = [], []
    for _ in range(500):
        here, there = placements(
            torch.randn(60, generator=made), 1 + torch.randn(40, generator=made)
        )
        areas.append(here.mean())
        variances.append(here.var() / 60 + there.var() / 40)
    assert torch.stack(variances).mean() == pytest.approx(float(torch.stack(areas).var()), rel=0.2)


def test_precision_and_false_positives_by_hand():
    """Precision is 1 at recall 1/2 and 2/3 at 1; 19 of 20 other inputs reach 1.5, as half of the
    known ones do."""
    known, new = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([[1.5], [3.0]])
    assert metrics.aupr(known, new) == pytest.approx(1 / 2 + 2 / 3 / 2)
    assert metrics.aupr(known, known[:1].expand(1)) == pytest.approx(1 / 4)
    assert metrics.aupr(torch.ones(3), torch.ones(1)) == 1 / 4
    new = torch.tensor([0.5, 1.5, *[5.0] * 18])
    assert metrics.fpr95(torch.arange(4.0), new) == 0.5
    assert metrics.fpr95(known, new + 9) == 0 and metrics.fpr95(torch.ones(3), torch.ones(1)) == 1
    ends = torch.tensor([-torch.inf, 1.0, 2.0]), torch.tensor([1.5, torch.inf])
    assert metrics.aupr(*ends) == metrics.aupr(known, torch.tensor([1.5, 3.0]))
    assert metrics.fpr95(*ends) == metrics.fpr95(known, torch.tensor([1.5, 3.0]))
    for metric in (metrics.aupr, metrics.fpr95):
        assert metric(known, torch.tensor([1.0, torch.nan])).isnan()


def test_the_area_under_risk_and_coverage_by_hand():
    """Risks 0, 1/2 and 2/3 in the order of the scores; of equal scores the mean error."""
    score, error = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([True, False, True])
    assert metrics.aurc(score, error) == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)
    assert metrics.aurc(-score, error) == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert metrics.aurc(torch.ones(3), error) == pytest.approx(2 / 3)
    tied = metrics.aurc(torch.tensor([0.0, 0.0, 1.0]), error)  # half of either order
    assert tied == pytest.approx((1 / 2 + 1 / 2 + 2 / 3) / 3)
    assert metrics.aurc(score.log() * 0, error).isnan()
