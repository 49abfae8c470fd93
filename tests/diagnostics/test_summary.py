"""Convergence of each site, and of the function."""

import math

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.diagnostics import ess, function_draws, rhat, summary
from pyro_bdl.samples import Samples


@pytest.fixture
def latents():
    weight = torch.randn(4, 200, 3, 5, dtype=torch.float64)
    weight[0, :, 2, 1] += 3  # one weight whose first chain is apart
    bias = torch.randn(4, 200, 5)
    bias[..., 2] = 1.0
    return {"weight": weight, "bias": bias, "noise": torch.rand(4, 200)}


def test_rows_describe_the_numbers_of_each_site(latents):
    found = summary(Samples(latents))
    rows = {row["site"]: row for row in found.rows}
    assert list(rows) == ["weight", "bias", "noise", "all"]
    ratio, bulk = rhat(latents["weight"]).flatten(), ess(latents["weight"]).flatten()
    row = rows["weight"]
    assert row["size"] == 15 and row["no_rhat"] == 0
    assert math.isclose(row["rhat_max"], ratio.max())
    assert math.isclose(row["rhat_median"], ratio.quantile(0.5))
    assert math.isclose(row["rhat_95"], ratio.quantile(0.95))
    assert math.isclose(row["rhat_share"], (ratio > 1.01).double().mean())
    assert math.isclose(row["ess_bulk_min"], bulk.min())
    assert math.isclose(row["ess_bulk_05"], bulk.quantile(0.05))
    assert math.isclose(row["ess_bulk_share"], (bulk < 400).double().mean())
    assert row["worst"] == "[2, 1]"
    assert rows["bias"]["no_rhat"] == 1
    assert rows["noise"]["size"] == 1 and rows["noise"]["worst"] == ""
    assert rows["all"]["size"] == 21 and rows["all"]["worst"] == "weight"
    assert rows["all"]["rhat_max"] == row["rhat_max"]
    torch.testing.assert_close(found.by_site["weight"].rhat, rhat(latents["weight"]))


def test_limits_and_output(latents, tmp_path):
    found = summary(latents, rhat_limit=100.0, ess_limit=0.0)
    assert all(row["rhat_share"] == 0 and row["ess_bulk_share"] == 0 for row in found.rows)
    text = str(found)
    assert "R-hat above 100" in text and "[2, 1]" in text and repr(found) == text
    lines = found.to_csv(tmp_path / "summary.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("site,size,no_rhat,rhat_median")


def test_one_chain_and_one_site():
    found = summary({"w": torch.randn(1, 50, 3)})
    (row,) = found.rows
    assert row["no_rhat"] == 3 and row["rhat_max"] is None and row["ess_bulk_min"] > 0
    assert "–" in str(found)


def test_bad_input(latents):
    with pytest.raises(ValueError, match=r"same \(chains, draws\), got .*'short': \(2, 200\)"):
        summary({**latents, "short": torch.randn(2, 200)})
    with pytest.raises(ValueError, match="no site"):
        summary({})
    with pytest.raises(ValueError, match="site 'w' has shape"):
        summary({"w": torch.randn(4, 3)})
    with pytest.raises(TypeError, match="site 'w' must be a torch tensor"):
        summary({"w": [1.0]})


def test_permuted_units_spoil_weights_and_not_functions():
    """Two chains explore the same function; in the second one the hidden units are swapped."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    model = bdl.models.Regression(bdl.bayesianize(net.double(), bdl.priors.Normal(1.0)), noise=0.1)
    size = {name: p.shape for name, p in net.named_parameters()}
    latents = {
        name: 0.1 * torch.randn(2, 200, *shape, dtype=torch.float64) for name, shape in size.items()
    }
    hidden = torch.tensor([1.0, -2.0], dtype=torch.float64)
    latents["0.weight"] += hidden[:, None]
    for name in ("0.weight", "0.bias"):
        latents[name][1] = latents[name][1].flip(1)
    latents["2.weight"][1] = latents["2.weight"][1].flip(2)
    samples = Samples(latents)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    functions = function_draws(model, samples, x)
    assert functions["y"].shape == (2, 200, 7)
    weights = {key: value[1, 17] for key, value in latents.items()}
    expected = torch.func.functional_call(net, weights, (x,)).squeeze(-1)
    torch.testing.assert_close(functions["y"][1, 17], expected)
    assert summary(samples).by_site["0.weight"].rhat.min() > 1.5
    assert summary(functions).rows[0]["rhat_max"] < 1.05


def test_draws_of_a_guide_form_no_chain(conjugate):
    guide = bdl.guides.AutoMeanField(conjugate.model)
    with pytest.raises(TypeError, match="samples must be Samples, got AutoMeanField"):
        function_draws(conjugate.model, guide, conjugate.x)
