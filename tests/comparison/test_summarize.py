"""A trained network beside posteriors around it: numbers, errors, the answer, refusals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl
from pyro_bdl.comparison.networks import at_temperature
from pyro_bdl.comparison.summarize import answer_of
from pyro_bdl.errors import ArgumentError, UnsupportedProgramError
from pyro_bdl.metrics.calibration import calibration_error_by_chance

DATA = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=DATA)


def classes(rows):
    x = randn(rows, 3)
    return x, (x[:, 0] + 0.5 * randn(rows) > 0).long() + (x[:, 1] > 0.5).long()


def numbers(rows):
    x = randn(rows, 3)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * randn(rows)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(1)
    net, (x, y) = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)), classes(200)
    adam = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(150):
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    return net.eval(), (x, y)


def test_rows_of_a_classifier(classifier):
    net, train = classifier
    (x, y), held_out, other = classes(300), classes(150), 3 * randn(100, 3)
    summary = bdl.summarize(
        net, DataLoader(TensorDataset(*train), batch_size=50), held_out=held_out, test=(x, y),
        other=other, ensemble=[nn.Sequential(nn.Flatten(), nn.Linear(3, 3))], num_samples=40,
    )  # fmt: skip
    table = summary.table
    assert list(table.index) == [
        "softmax", "temperature scaling", "Laplace", "last layer", "ensemble of 2"
    ]  # fmt: skip
    with torch.no_grad():
        p, q = (net(inputs).double().softmax(-1) for inputs in (x, other))
    right = (p.argmax(1) == y).double()
    own = table.loc["softmax"]
    assert own["accuracy"] == pytest.approx(float(right.mean()))
    assert own["accuracy_se"] == pytest.approx(float(right.std()) / 300**0.5, rel=0.2)
    losses = -p.gather(1, y[:, None])[:, 0].log()
    assert own["nlpd"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert own["nlpd_se"] == pytest.approx(float(losses.std()) / 300**0.5, rel=0.2)
    assert own["ece"] == pytest.approx(
        float(bdl.metrics.expected_calibration_error(p, y)), abs=1e-5
    )
    entropy = [-torch.xlogy(part, part).sum(1) for part in (p, q)]
    assert own["auroc"] == pytest.approx(float(bdl.metrics.auroc(*entropy)), abs=1e-4)
    above = (entropy[0][:, None] < entropy[1]).double()  # DeLong et al. (1988)
    error = (above.mean(1).var() / 300 + above.mean(0).var() / 100).sqrt()
    assert own["auroc_se"] == pytest.approx(float(error), rel=0.1)
    chosen = torch.randint(300, (300, 300), generator=DATA)
    again = [bdl.metrics.expected_calibration_error(p[rows], y[rows]) for rows in chosen]
    error = math.hypot(float(torch.stack(again).std()), calibration_error_by_chance(p))
    assert own["ece_se"] == pytest.approx(error, rel=0.1)

    model, posterior = summary.posteriors["Laplace"]
    point = bdl.guides.AutoMAP(model).prototype(*train)
    T = bdl.calibration.temperature_scaling(model, point, *held_out, num_samples=2)
    tempered = T.probabilities(p).double().gather(1, y[:, None])[:, 0]
    assert table.loc["temperature scaling", "nlpd"] == pytest.approx(
        float(-tempered.log().mean()), rel=1e-4
    )
    compared = bdl.compare(model, dict(summary.posteriors), x, y, reference=None, num_samples=20)
    cheap = ["softmax", "temperature scaling"]
    assert list(compared.table.loc[cheap, "nlpd"]) == pytest.approx(list(table.loc[cheap, "nlpd"]))
    drawn = bdl.evaluate(model, posterior, x, y, num_samples=1000).scores["nlpd"]
    laplace = table.loc["Laplace"]
    assert abs(laplace["nlpd"] - drawn) < 4 * laplace["nlpd_se"]
    assert posterior.held_out.rows == 150
    assert table.loc["ensemble of 2"].drop("seconds").notna().all()
    assert summary.answer in str(summary).replace("\n", " ")


def test_rows_of_a_regression_network():
    torch.manual_seed(2)
    net, train = nn.Linear(3, 1), numbers(40)
    solution = torch.linalg.lstsq(
        torch.cat([train[0], torch.ones(40, 1)], 1), train[1][:, None]
    ).solution
    with torch.no_grad():
        net.weight.copy_(solution[:3].T)
        net.bias.copy_(solution[3])
    held_out, (x, y) = numbers(200), numbers(400)
    summary = bdl.summarize(net, train, held_out=held_out, test=(x, y), other=20 * randn(100, 3))
    table = summary.table
    assert list(table.index) == ["network", "Laplace", "last layer"]
    with torch.no_grad():
        errors, of_held_out = net(x)[:, 0] - y, net(held_out[0])[:, 0] - held_out[1]
    noise = of_held_out.square().mean().sqrt()
    normal = torch.distributions.Normal(0.0, noise)
    own = table.loc["network"]
    assert own["rmse"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-4)
    assert own["nlpd"] == pytest.approx(float(-normal.log_prob(errors).mean()), rel=1e-4)
    inside = (errors.abs() < 1.6449 * noise).double()
    assert own["coverage"] == pytest.approx(float(inside.mean()))
    assert own["auroc"] == pytest.approx(0.5)  # the same width everywhere
    assert table.loc["Laplace", "auroc"] > 0.9
    assert "separate other inputs from test inputs better" in summary.answer


def test_noise_that_depends_on_the_input():
    torch.manual_seed(3)
    net, train = nn.Linear(3, 2), numbers(60)
    prior = bdl.priors.Normal.from_weight_decay(1e-2, 60)
    model = bdl.models.HeteroscedasticRegression(bdl.bayesianize(net, prior), floor=0.01)
    (x, y) = numbers(200)
    summary = bdl.summarize(model, train, held_out=numbers(50), test=(x, y), num_samples=20)
    with torch.no_grad():
        mean, raw = net(x).T
    normal = torch.distributions.Normal(mean, nn.functional.softplus(raw) + 0.01)
    own = summary.table.loc["network"]
    assert own["nlpd"] == pytest.approx(float(-normal.log_prob(y).mean()), rel=1e-4)
    assert list(summary.table.index)[:2] == ["network", "temperature scaling"]
    assert "auroc" not in summary.table
    assert "nothing is said of these" in summary.answer


@pytest.mark.parametrize(
    ("end", "name"), [(nn.Softmax(-1), "softmax"), (nn.Sequential(nn.Sigmoid()), "sigmoid")]
)
def test_a_network_that_ends_in_probabilities_is_refused(end, name):
    data = classes(20)
    with pytest.raises(ArgumentError, match=f"ends in {name}"):
        bdl.summarize(nn.Sequential(nn.Linear(3, 3), end), data, held_out=data, test=data)


def test_refusals():
    x, y = numbers(20)
    data = x, y
    with pytest.raises(ArgumentError, match="HeteroscedasticRegression"):
        bdl.summarize(nn.Linear(3, 2), data, held_out=data, test=data)
    model = bdl.models.Regression(bdl.bayesianize(nn.Linear(3, 1)))
    with pytest.raises(UnsupportedProgramError, match="'noise'"):
        bdl.summarize(model, data, held_out=data, test=data)
    model = bdl.models.PoissonRegression(bdl.bayesianize(nn.Linear(3, 1)))
    counts = x, y.abs().round()
    with pytest.raises(UnsupportedProgramError, match="Poisson"):
        bdl.summarize(model, counts, held_out=counts, test=counts)


def classified(logits, y):
    """The evaluation of draws of logits (S, N, C); of a network alone, 20 equal ones."""
    net = nn.Linear(1, logits.shape[-1])
    known = bdl.PredictiveDraws(logits.expand(max(len(logits), 20), -1, -1).softmax(-1))
    model = bdl.models.Classification(bdl.bayesianize(net))
    return bdl.evaluate(model, known, torch.zeros(len(y), 1), y)


def test_what_is_better_is_said():
    torch.manual_seed(0)
    f = 2 * randn(1, 400, 3)
    y = torch.distributions.Categorical(logits=f[0]).sample()
    draws = f + 0.1 * randn(40, 400, 3)
    found = {"softmax": classified(4 * f, y), "Laplace": classified(draws, y)}
    answer = answer_of(found, ["softmax"])
    assert "errors, Laplace (NLPD lower by" in answer
    assert "has better probabilities than softmax." in answer
    swapped = {"softmax": found["Laplace"], "Laplace": found["softmax"]}
    answer = answer_of(swapped, ["softmax"])
    assert "no posterior has better probabilities than softmax. Laplace (NLPD higher by" in answer


def test_a_share_of_one_has_an_error():
    logits, y = 5.0 * torch.eye(3).repeat(10, 1)[None], torch.arange(3).repeat(10)
    found = classified(logits, y).points["accuracy"]
    assert found.number == 1.0
    error = (32 / 34 * 2 / 34 / 33) ** 0.5
    assert found.error == pytest.approx(error)
    assert found.difference(found)[1] > error


def test_members_are_the_whole_prediction():
    net, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x, y = classes(80)
    summary = bdl.summarize(
        net, classes(60), held_out=classes(50), test=(x, y), ensemble=[second], laplace={}
    )
    with torch.no_grad():
        p = torch.stack([n(x).double().softmax(-1) for n in (net, second)]).mean(0)
    losses = -p.gather(1, y[:, None])[:, 0].log()
    row = summary.table.loc["ensemble of 2"]
    assert row["nlpd"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert row["nlpd_se"] == pytest.approx(float(losses.std()) / 80**0.5, rel=1e-5)
    with pytest.raises(ArgumentError, match="network 1 of the ensemble predicts"):
        bdl.summarize(
            net, classes(60), held_out=classes(50), test=(x, y), ensemble=[nn.Linear(3, 4)],
            laplace={},
        )  # fmt: skip


LOGITS, LABELS = randn(20, 3), torch.arange(20) % 3
OBSERVATIONS = {
    "categorical": (lambda f: dist.Categorical(logits=f), LABELS),
    "probabilities": (lambda f: dist.Categorical(f.softmax(-1)), LABELS),
    "one-hot": (lambda f: dist.OneHotCategorical(logits=f), torch.eye(3)[LABELS]),
    "bernoulli": (lambda f: dist.Bernoulli(logits=f).to_event(1), torch.eye(3)[LABELS]),
    "normal": (lambda f: dist.Normal(f, f.exp()).to_event(1), LOGITS + 1),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_observation_at_a_temperature(name):
    """p(y)^(1 / T), normalized; of a Normal T times the variance."""
    observation, y = OBSERVATIONS[name]

    def model(f, y):
        with pyro.plate("rows", len(f)):
            pyro.sample("y", observation(f), obs=y)

    if name == "normal":
        expected = dist.Normal(LOGITS, 2**0.5 * LOGITS.exp()).to_event(1).log_prob(y)
    else:
        expected = observation(LOGITS / 2).log_prob(y)
    site = pyro.poutine.trace(at_temperature(model, 2.0, ["y"])).get_trace(LOGITS, y).nodes["y"]
    torch.testing.assert_close(site["fn"].log_prob(y), expected)
