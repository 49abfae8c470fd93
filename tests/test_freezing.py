"""``freeze``: the numbers of a predictive, without Pyro, for any number of rows."""

import logging

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.export import Dim

import pyro_bdl as bdl

ANY_ROWS = ({0: Dim("n")},)


def by_hand(x, y=None):
    weights = pyro.sample("w", dist.Normal(torch.zeros(4, 1), 1.0).to_event(2))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((x @ weights)[:, 0], scale), obs=y)


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip
    return bdl.models.Classification(bdl.bayesianize(net)), torch.randn(9, 1, 6, 6)


def attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
    return bdl.models.Classification(bdl.bayesianize(net)), torch.randn(9, 3, 4)


def perceptron():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return bdl.models.HeteroscedasticRegression(bdl.bayesianize(net)), torch.randn(9, 4)


PROGRAMS = {
    "by hand": lambda: (by_hand, torch.randn(9, 4)),
    "perceptron": perceptron,
    "convolutions": convolutions,
    "attention": attention,
}


def problem(name):
    model, x = PROGRAMS[name]()
    classes = isinstance(model, bdl.models.Classification)
    return model, x, torch.randint(3, (9,)) if classes else torch.randn(9)


def drawn(model, x, y, draws=4):
    """``Samples`` of a mean-field guide that was not trained."""
    latents = bdl.guides.AutoMeanField(model).prototype(x, y).sample_latents(draws)
    return bdl.Samples({name: value[None] for name, value in latents.items()})


def pair(result):
    """Mean and sd; of classes the probabilities alone."""
    return result if isinstance(result, tuple | list) else (result,)


def close(found, expected):
    for value, other in zip(pair(found), pair(expected), strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_predictive(name, monkeypatch):
    model, x, y = problem(name)
    samples = drawn(model, x, y)
    frozen = bdl.freeze(model, samples, x[:1], draws=4)
    moments = bdl.Predictive(model, samples).moments(x)["y"]
    monkeypatch.setattr(pyro, "sample", None)  # not needed any more
    expected = moments.mean, moments.variance.sqrt()
    for rows in (9, 1, 4):
        close(frozen(x[:rows]), tuple(v[:rows] for v in expected)[: len(pair(frozen(x)))])


@pytest.mark.parametrize(("name", "linearized"), [("perceptron", True), ("convolutions", False)])
def test_export_and_compile_with_any_number_of_rows(name, linearized):
    model, x, y = problem(name)
    posterior = drawn(model, x, y)
    if linearized:
        guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(x, y)
        posterior = guide.laplace_approximation((x, y))
    frozen = bdl.freeze(model, posterior, x, draws=4)
    exported = torch.export.export(frozen, (x,), dynamic_shapes=ANY_ROWS).module()
    compiled = torch.compile(frozen, backend="aot_eager")
    for rows in (9, 1, 4):
        close(exported(x[:rows]), frozen(x[:rows]))
        close(compiled(x[:rows]), frozen(x[:rows]))


def test_onnx(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model, x, y = problem("convolutions")
    frozen = bdl.freeze(model, drawn(model, x, y), x, draws=4)
    file = str(tmp_path / "frozen.onnx")
    torch.onnx.export(frozen, (x,), file, dynamo=True, dynamic_shapes=ANY_ROWS, verbose=False)
    session = runtime.InferenceSession(file)
    (name,) = (entry.name for entry in session.get_inputs())
    for rows in (9, 1, 4):
        (found,) = session.run(None, {name: x[:rows].numpy()})
        close(torch.from_numpy(found), frozen(x[:rows]))


def test_the_state_is_in_the_state_dict():
    model, x, y = problem("perceptron")
    frozen, other = (bdl.freeze(model, drawn(model, x, y), x, draws=4) for _ in range(2))
    assert (frozen(x)[0] - other(x)[0]).abs().max() > 1e-3
    other.load_state_dict(frozen.state_dict())
    close(other(x), frozen(x))


def test_laplace_is_linearized_around_its_exact_mean():
    model, x, y = problem("perceptron")
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    count = 2000
    means, noise = bdl.freeze(model, posterior, x, draws=count).at_draws(x)
    exact = bdl.LinearizedPredictive(model, posterior).moments(x)["y"]
    torch.testing.assert_close(means.mean(0), exact.mean["loc"], atol=1e-4, rtol=1e-4)
    # the variance of S Normal draws has a relative standard error of sqrt(2 / S)
    ratio = means.var(0) / exact.variance["loc"]
    assert (ratio - 1).abs().max() < 5 * (2 / count) ** 0.5
    log_scale = noise.log() / 2
    torch.testing.assert_close(log_scale.mean(0), exact.mean["scale"], atol=1e-4, rtol=1e-4)


def with_two_sites(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(weight * x, 1.0), obs=y)
        pyro.sample("b", dist.Normal(-weight * x, 1.0), obs=y)


def branching(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(weight * x if x.sum() > 0 else x, 1.0), obs=y)


def of_three_rows(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(weight * x if len(x) == 3 else x, 1.0), obs=y)


def without_moments(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.LogisticNormal(weight * x[:, None], torch.ones(2)), obs=y)


@pytest.mark.parametrize(
    "model, words",
    [
        (without_moments, "random numbers"),
        (with_two_sites, "site="),
        (branching, "control flow"),
        (of_three_rows, "number of rows"),
    ],
)
def test_refusals(model, words):
    samples = bdl.Samples({"w": torch.ones(1, 3)})
    with pytest.raises(bdl.errors.UnsupportedProgramError, match=words):
        bdl.freeze(model, samples, torch.randn(4), draws=3)


def test_a_site_by_name():
    samples = bdl.Samples({"w": torch.tensor([[1.0, 2.0]])})
    x = torch.randn(4)
    mean, _ = bdl.freeze(with_two_sites, samples, x, draws=2, site="b")(x)
    torch.testing.assert_close(mean, -1.5 * x)
