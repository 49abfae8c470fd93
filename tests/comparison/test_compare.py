"""The table: exact distances, every kind of posterior, and the command from end to end."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import pyro_bdl as bdl
from pyro_bdl import posteriors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.tables import with_error

QUICK = ["--steps", "20", "--chains", "2", "--warmup", "20", "--draws", "20", "--hidden", "4"]
QUICK += ["--max-tree-depth", "3"]


def shift(x, y=None):
    """f = w for every input; y ~ Normal(f, 1)."""
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
    f = pyro.deterministic("f", w.expand(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


def normal_samples(mean, sd, count=4000):
    quantiles = (torch.arange(count) + 0.5) / count
    draws = mean + sd * torch.special.ndtri(quantiles)[torch.randperm(count)]
    return bdl.Samples({"w": draws.reshape(4, -1)})


def test_distances_between_normals_are_exact():
    x, y = torch.zeros(5, 1), torch.zeros(5)
    table = bdl.compare(
        shift,
        {"a": normal_samples(1.0, 0.5), "nuts": normal_samples(0.0, 1.0)},
        x,
        y,
        reference="nuts",
    ).numbers()
    row = table["a"]
    assert math.isclose(row["mean_error"], 1.0, rel_tol=1e-3)
    assert math.isclose(row["sd_error"], 0.5, rel_tol=1e-2)
    assert math.isclose(row["sd_ratio"], 0.5, rel_tol=1e-2)
    # W1 = E|1 - 0.5 z|, the mean of a folded Normal(1, 0.5)
    exact = 0.5 * math.sqrt(2 / math.pi) * math.exp(-2) + math.erf(math.sqrt(2))
    assert math.isclose(row["wasserstein"], exact, rel_tol=1e-2)


def test_scores_of_a_known_predictive():
    x, y = torch.zeros(5, 1), torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0])
    row = bdl.compare(shift, {"a": normal_samples(0.0, 1.0)}, x, y, reference=None).numbers()["a"]
    predictive = dist.Normal(0.0, math.sqrt(2))
    assert math.isclose(row["rmse"], y.square().mean().sqrt(), rel_tol=2e-2)
    assert math.isclose(row["nlpd"], -predictive.log_prob(y).mean(), rel_tol=1e-2)
    z = y / math.sqrt(2)
    standard = dist.Normal(0.0, 1.0)
    crps = z * (2 * standard.cdf(z) - 1) + 2 * standard.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    assert math.isclose(row["crps"], (math.sqrt(2) * crps).mean(), rel_tol=2e-2)
    assert row["coverage"] == 1.0


def test_one_function_that_is_all_right_or_all_wrong_is_no_fault_of_its_interval():
    """All targets depend on one number, so that a coverage is 90 % or zero."""

    def shared(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 0.01), obs=y)

    x, draws = torch.zeros(50, 1), {"exact": normal_samples(0.0, 1.0)}
    for truth in (0.7, 2.5):
        y = truth + 0.01 * torch.randn(50)
        found = bdl.compare(shared, draws, x, y, reference=None)
        row = found.numbers()["exact"]
        assert row["coverage"] == pytest.approx(1.0 if truth < 1 else 0.0, abs=0.01)
        said = bdl.metrics.coverage_range(found.evaluations["exact"].predictions)
        assert [row["coverage_from"], row["coverage_to"]] == said.tolist() == [0, 1]
        assert "interval holds" not in found.verdicts["exact"]
    assert {"coverage_from", "coverage_to"} <= {
        column.key for column in found.table.attrs["details"]
    }


def test_no_line_is_wider_than_asked_for():
    draws = {"a": normal_samples(1.0, 0.5), "a-rather-long-name": normal_samples(0.0, 1.0)}
    found = bdl.compare(
        shift, draws, torch.zeros(5, 1), torch.zeros(5), reference="a-rather-long-name"
    )
    text = found.to_text(80)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).count(" ".join(found.verdicts["a"].split())) == 1
    assert found.verdicts["a"] in found.to_text(None)
    for key in ("mean_error", "sd_error", "wasserstein", "sd_ratio"):  # with Monte Carlo errors
        row = found.numbers()["a"]
        assert with_error(row[key], row[f"{key}_se"]) in text


def test_a_posterior_is_as_far_from_itself_as_its_halves():
    same = normal_samples(0.0, 1.0)
    found = bdl.compare(
        shift, {"same": same, "nuts": same}, torch.zeros(3, 1), torch.zeros(3), reference="nuts"
    )
    assert found.numbers()["same"]["wasserstein"] == 0.0
    assert 0 < [*found.numbers().values()][-1]["wasserstein"] < 0.1


def test_guides_of_both_houses_and_classes(tmp_path):
    net = bdl.bayesianize(torch.nn.Linear(2, 3))
    model = bdl.models.Classification(net)
    x, y = torch.randn(30, 2), torch.arange(30) % 3
    ours, theirs = bdl.guides.AutoMeanField(model).prototype(x, y), AutoNormal(model)
    theirs(x, y)
    found = bdl.compare(model, {"a": ours, "b": theirs}, x, y, reference="a", num_samples=50)
    row = found.numbers()["b"]
    assert 0 <= row["agreement"] <= 1 and 0 <= row["total_variation"] <= 1
    assert 0 <= row["accuracy"] <= 1 and row["brier"] > 0
    found.table.to_csv(tmp_path / "table.csv")
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 4
    assert "a" in str(found)


def test_laplace_beside_the_others():
    """A guide of another prior than the program's, as evidence leaves it."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 2), torch.randn(10)
    model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(2, 1)), noise=0.5)
    fits = {
        name: posteriors.fit(
            name, posteriors.Problem(model, x, y), posteriors.Options(steps=50, rounds=2)
        )
        for name in ("mean-field", "laplace-full")
    }
    found = bdl.compare(
        model,
        {name: fit.posterior for name, fit in fits.items()},
        x,
        y,
        reference="mean-field",
        costs={name: fit.costs for name, fit in fits.items()},
    ).numbers()
    assert "log_evidence" not in found["mean-field"]
    assert found["laplace-full"]["log_evidence"] == fits["laplace-full"].log_evidence < 0
    assert 0 < found["laplace-full"]["wasserstein"] < 0.5


def test_laplace_of_a_likelihood_that_has_no_linear_model_goes_through_the_network():
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    net = bdl.bayesianize(torch.nn.Linear(2, 1))

    def model(x, y=None):
        degrees = net(x)[:, 0].exp()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Chi2(degrees), obs=y)

    y = torch.rand(30) + 0.5
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    with pytest.warns(BdlWarning, match="does not know Chi2 .* the draws of the posterior"):
        found = bdl.compare(model, {"laplace": posterior}, x, y, reference=None, num_samples=20)
    assert found.numbers()["laplace"]["rmse"] > 0
    with pytest.warns(BdlWarning, match="does not know Chi2 .* the draws of the guide go through"):
        data = bdl.to_arviz(model, posterior, x, y, num_samples=20)
    assert data.posterior_predictive["y"].shape == (1, 20, 30)


def test_ordinal_targets_are_classes():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    net = bdl.bayesianize(torch.nn.Linear(2, 1))

    def model(x, y=None):
        f = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.OrderedLogistic(f, torch.tensor([-1.0, 1.0])), obs=y)

    y = (x[:, 0] > -1).long() + (x[:, 0] > 1).long()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posteriors = {"map": guide, "laplace": guide.laplace_approximation((x, y))}
    found = bdl.compare(model, posteriors, x, y, reference=None, num_samples=20).numbers()
    assert 0 <= found["laplace"]["accuracy"] <= 1 and found["laplace"]["nlpd"] > 0
