"""Selectors of subnetworks: counts, scores by hand, and sets of layers."""

import pyro
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.guides import selectors
from pyro_bdl.guides.selectors import Trained, number_of
from pyro_bdl.program.batches import Batches


@pytest.fixture
def trained():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    bnn = bdl.bayesianize(net)
    model = bdl.models.Regression(bnn, noise=0.3)
    x, y = torch.randn(12, 2), torch.randn(12)
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    return Trained(guide, Batches((x, y)))


@pytest.mark.parametrize(
    ("size", "count"),
    [(3, 3), (13, 13), (0.5, 6), (1.0, 13)],
)
def test_sizes(size, count):
    assert number_of(size, 13) == count


def test_a_score_of_nan_is_refused_and_not_chosen(trained):
    """``topk`` would take NaN first."""

    class Own(selectors.Selector):
        def scores(self, trained):
            scores = torch.arange(13.0)
            scores[[2, 5]] = torch.nan
            return scores

    with pytest.raises(ValueError, match=r"Own gives 2 of 13 numbers the score NaN, at .* 2, 5:"):
        Own()(trained, 4)


def test_magnitude(trained):
    chosen = selectors.LargestMagnitude()(trained, 4)
    vector = trained.vector.abs()
    others = torch.ones_like(vector, dtype=torch.bool)
    others[chosen] = False
    assert vector[chosen].min() >= vector[others].max()
    assert chosen.tolist() == sorted(chosen.tolist())


def test_variance_is_that_of_the_diagonal_laplace_approximation(trained):
    """Source: Daxberger et al. 2021."""
    x, y = trained.batches.first()[0]
    with pytest.warns(bdl.errors.BdlWarning, match="maximum"):
        diagonal = trained.guide.laplace_approximation((x, y), structure="diag")
    expected = diagonal.variances().topk(5).indices.sort().values
    assert torch.equal(selectors.LargestVariance()(trained, 5), expected)


def test_variance_of_a_given_guide(trained):
    model = trained.guide.program_model
    x, y = trained.batches.first()[0]
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    scale = torch.linspace(0.1, 1.0, 13)
    guide.scale = scale
    assert selectors.LargestVariance(guide)(trained, 3).tolist() == [10, 11, 12]


def test_random_follows_its_seed(trained):
    first = selectors.Random(1)(trained, 6)
    assert torch.equal(first, selectors.Random(1)(trained, 6))
    assert not torch.equal(first, selectors.Random(2)(trained, 6))
    assert len(first.unique()) == 6


def test_layers(trained):
    slices = trained.guide.layout.slices
    last = [*range(*slices["2.weight"].indices(13)), *range(*slices["2.bias"].indices(13))]
    module = trained.guide.program_model.network.network[2]
    for selection in ("last-layer", module, "2.*", ["2.weight", "2.bias"]):
        assert selectors.Sites(selection)(trained, None).tolist() == sorted(last)
    biases = selectors.Sites(lambda name, latent: name.endswith("bias"))(trained, None)
    assert len(biases) == 4
    largest = selectors.Sites("last-layer")(trained, 1)
    assert trained.vector[largest].abs() == trained.vector[torch.tensor(last)].abs().max()


def test_what_is_not_there(trained):
    with pytest.raises(ValueError, match="needs a size"):
        selectors.LargestMagnitude()(trained, None)
    with pytest.raises(ValueError, match="not a latent site"):
        selectors.Sites("3.weight")(trained, None)


def closed_form_trained(scales):
    """A linear regression with noise 0.5 and, for each weight, a prior scale of its own."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator) * torch.tensor([1.0, 0.1, 3.0])

    def prior(name, module, parameter):
        return pyro.distributions.Normal(0.0, scales.reshape(parameter.shape))

    net = nn.Linear(3, 1, bias=False)
    model = bdl.models.Regression(bdl.bayesianize(net, prior), noise=0.5)
    y = x.sum(1)
    guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
    return Trained(guide, Batches((x, y))), x.square().sum(0) / 0.25


def test_predictive_variance_is_curvature_over_prior_precision():
    """h / (h + l), ordered as h / l (MacKay 1992)."""
    scales = torch.tensor([1.0, 4.0, 0.01])
    trained, curvature = closed_form_trained(scales)
    found = selectors.LargestPredictiveVariance().scores(trained)
    torch.testing.assert_close(found, curvature * scales**2)
    share = curvature / (curvature + scales**-2)  # the order is the same
    assert found.argsort().tolist() == share.argsort().tolist() == [2, 1, 0]


def test_a_weight_without_effect_is_first_by_variance_and_last_by_predictive_variance():
    trained, _ = closed_form_trained(torch.ones(3))
    x = trained.batches.first()[0][0]
    x[:, 1] = 0.0
    assert selectors.LargestVariance()(trained, 1).tolist() == [1]
    assert selectors.LargestPredictiveVariance()(trained, 2).tolist() == [0, 2]
