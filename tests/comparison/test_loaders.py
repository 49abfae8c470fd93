"""Comparison, export and predictions by a loader are those by the tensors in its order."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl
from pyro_bdl.errors import ArgumentError, BdlWarning

N, SIZE = 23, 5
FORMS = {
    "loader": lambda *data: DataLoader(TensorDataset(*data), batch_size=SIZE),
    "list": lambda *data: list(zip(*(part.split(SIZE) for part in data), strict=True)),
    "function": lambda *data: lambda: iter(FORMS["list"](*data)),
}


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = torch.randn(N, 2)
    y = x.sum(1) + 0.1 * torch.randn(N)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1)
    guide = bdl.guides.AutoLaplaceGGN(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        bdl.training.train(model, guide, x, y, steps=50, learning_rate=0.05)
        posteriors = {"laplace": guide.laplace_approximation((x, y)), "point": guide}
    return model, posteriors, x, y


@pytest.mark.parametrize("form", FORMS)
def test_a_comparison(form, fitted):
    model, posteriors, x, y = fitted
    batches = FORMS[form](x, y)
    options = {"reference": "laplace", "num_samples": 40, "ood": x + 3.0}
    expected = bdl.compare(model, posteriors, x, y, train=(x, y), **options)
    options["ood"] = FORMS[form](x + 3.0)
    found = bdl.compare(model, posteriors, batches, train=batches, **options)
    of_time = ("draw_seconds",)
    numbers = expected.table.select_dtypes("number").columns.difference(of_time)
    assert len(numbers) > 30
    torch.testing.assert_close(
        torch.tensor(found.table[numbers].values),
        torch.tensor(expected.table[numbers].values),
        equal_nan=True,
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_export(form, fitted):
    model, posteriors, x, y = fitted
    expected = bdl.to_arviz(model, posteriors["laplace"], x, y, num_samples=20)
    found = bdl.to_arviz(model, posteriors["laplace"], FORMS[form](x, y), num_samples=20)
    for group in ("posterior", "log_likelihood", "observed_data", "constant_data"):
        for name, values in expected[group].data_vars.items():
            assert (found[group][name] == values).all()


@pytest.mark.parametrize("method", ["__call__", "mean", "draw_moments", "log_likelihood"])
@pytest.mark.parametrize("kind", ["laplace", "point", "samples", "variational"])
def test_predictions_in_batches_are_about_the_same_draws(method, kind, fitted):
    model, posteriors, x, y = fitted
    posterior = posteriors.get(kind)
    if kind in ("samples", "variational"):
        posterior = bdl.guides.AutoMeanField(model).prototype(x, y)
    if kind == "samples":
        draws = posterior.sample_latents(10)
        posterior = bdl.Samples({name: value[None] for name, value in draws.items()})
    make = bdl.LinearizedPredictive if kind == "laplace" else bdl.Predictive
    predictive = make(model, posterior, 10).at_fixed_draws(x, y)
    parts = list(predictive.in_batches(FORMS["loader"](x, y), method))
    assert len(parts) == 5
    whole = getattr(predictive, method)(x, y)
    name = "f" if method == "__call__" else "y"  # the noise of y is drawn anew
    found, expected = [part[name] for part in parts], whole[name]
    if method == "draw_moments":
        found, expected = [part.mean for part in found], expected.mean
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_draws_that_are_not_fixed_are_made_once_for_all_batches(fitted):
    model, _, x, y = fitted
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    same = [(x[:4], y[:4])] * 2
    first, second = bdl.Predictive(model, guide, 10).in_batches(same)
    assert torch.equal(first["f"], second["f"])


def test_batches_by_name_are_refused_where_targets_are_last(fitted):
    model, posteriors, x, y = fitted
    batches = [{"x": x, "y": y}] * 2
    with pytest.raises(ArgumentError, match=r"batches of test are dicts by name \(x, y\)"):
        bdl.compare(model, posteriors, batches, reference=None)
    found = bdl.to_arviz(model, posteriors["point"], batches, num_samples=5)
    assert found["observed_data"]["y"].shape == (2 * N,)
