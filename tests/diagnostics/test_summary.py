"""Convergence of each site, of the function, within chains, and in words."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.diagnostics import (
    ess,
    explain_chains,
    function_draws,
    mcse,
    rhat,
    summary,
    within_ess,
    within_rhat,
)
from pyro_bdl.program.samples import Samples


@pytest.fixture
def latents():
    weight = torch.randn(4, 200, 3, 5, dtype=torch.float64)
    weight[0, :, 2, 1] += 3  # one weight whose first chain is apart
    bias = torch.randn(4, 200, 5)
    bias[..., 2] = 1.0
    return {"weight": weight, "bias": bias, "noise": torch.rand(4, 200)}


def test_rows_describe_the_numbers_of_each_site(latents):
    found = summary(Samples(latents, {"num_steps": torch.full((4, 200), 3)}, {"seconds": 4.0}))
    table = found.table
    assert list(table.index) == ["weight", "bias", "noise", "all"]
    ratio, bulk = rhat(latents["weight"]).flatten(), ess(latents["weight"]).flatten()
    expected = {
        "size": 15,
        "no_rhat": 0,
        "rhat_max": ratio.max(),
        "rhat_median": ratio.quantile(0.5),
        "rhat_95": ratio.quantile(0.95),
        "rhat_share": (ratio > 1.01).double().mean(),
        "ess_bulk_min": bulk.min(),
        "ess_bulk_05": bulk.quantile(0.05),
        "ess_bulk_share": (bulk < 400).double().mean(),
        "per_second": bulk.min() / 4,
        "per_1000_gradients": 1000 * bulk.min() / 2400,
    }
    row = table.loc["weight"]
    assert all(math.isclose(row[key], value) for key, value in expected.items())
    assert list(table["worst"]) == ["[2, 1]", table.loc["bias", "worst"], "", "weight"]
    assert list(table["size"]) == [15, 5, 1, 21] and table.loc["bias", "no_rhat"] == 1
    assert table.loc["all", "rhat_max"] == row["rhat_max"]
    torch.testing.assert_close(found.by_site["weight"].rhat, rhat(latents["weight"]))


def test_limits_output_and_a_single_chain(latents):
    found = summary(latents, rhat_limit=100.0, ess_limit=0.0)
    assert (found.table[["rhat_share", "ess_bulk_share"]] == 0).all(axis=None)
    assert "R-hat above 100" in str(found) and "[2, 1]" in repr(found)
    one = summary({"w": torch.randn(1, 50, 3)})
    row = one.table.loc["w"]
    assert row["no_rhat"] == 3 and math.isnan(row["rhat_max"]) and row["ess_bulk_min"] > 0
    assert "per_second" not in one.table


def test_numbers_of_small_sites_are_printed_one_by_one(latents):
    """Mean, sd, quantiles, errors and convergence of every number; small sites are printed."""
    found = summary(latents, {"f": latents["noise"] ** 2})
    columns = ["mean", "mcse", "sd", "5 %", "95 %", "rhat", "ess_bulk", "ess_tail"]
    assert list(found.numbers) == columns and len(found.numbers) == 15 + 5 + 1 + 1
    draws = latents["weight"][..., 2, 1]
    expected = [
        draws.mean(), mcse(draws), draws.std(), draws.quantile(0.05), draws.quantile(0.95),
        rhat(draws), ess(draws), ess(draws, kind="tail"),
    ]  # fmt: skip
    row = found.numbers.loc["weight[2, 1]"]
    assert row.to_list() == pytest.approx([float(value) for value in expected], rel=1e-12)
    squares = latents["noise"].double() ** 2
    assert found.numbers.loc["f", "mean"] == pytest.approx(squares.mean().item())
    lines = str(found).splitlines()
    shown = {line.split()[0] for line in lines if line}
    assert {*(f"bias[{i}]" for i in range(5)), "noise", "f", "weight", "all"} <= shown
    assert "weight[2," not in str(found) and "weight[2," in str(summary(latents, sites="wei*"))
    every = {"encoder.layers.0.self_attention.in_proj_weight": torch.randn(4, 100, 9, 9, 9)}
    stats = {"diverging": torch.zeros(4, 100), "energy": torch.randn(4, 100).double()}
    stats["num_steps"] = torch.full((4, 100), 255)
    info = {"seconds": 3.0, "options": {"max_tree_depth": 8}}
    long = str(summary(Samples(every | {"mu": 1e6 * torch.randn(4, 100)}, stats, info)))
    assert max(map(len, long.splitlines())) <= 100


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
    assert summary(functions).table.loc["y", "rhat_max"] < 1.05


class Squared(torch.nn.Module):
    """f = w^2, which does not know the sign of w."""

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w**2, 1.0), obs=y)


def chains(*centers, drift=0.0, held=1):
    """200 draws a chain around its center, each held for some iterations."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(centers), 200 // held, 1, generator=generator, dtype=torch.float64)
    noise = noise.repeat_interleave(held, 1)
    path = drift * torch.linspace(-1, 1, 200, dtype=torch.float64)[None, :, None]
    return Samples({"w": torch.tensor(centers)[:, None, None].double() + 0.1 * noise + path})


X = torch.ones(3, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    "samples, words",
    [
        (chains(2.0, 2.0), "The chains agree."),
        (chains(2.0, -2.0), "symmetries of the network"),
        (chains(2.0, -4.0), "separate modes"),
        (chains(2.0, -4.0, drift=1.0), "not even each on its own"),
        (
            chains(2.0, -2.0, held=4),
            "(5 % quantile), and R-hat needs 200: its mean",
        ),
    ],
)
def test_what_the_chains_say(samples, words):
    """Draws held for four iterations agree, and are too few to trust that."""
    answer = explain_chains(Squared(), samples, X)
    assert words in answer
    assert ("Nothing here speaks against predictions" in answer) == ("symmetries" in words)


def test_latents_may_be_scalars():
    def scalar(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w**2, 1.0), obs=y)

    samples = chains(2.0, -2.0)
    of_scalars = explain_chains(scalar, Samples({"w": samples.latents["w"][..., 0]}), X)
    assert of_scalars == explain_chains(Squared(), samples, X)


def test_divergences_energy_and_saturated_trees_are_printed(latents):
    energy = torch.randn(4, 200).double()
    energy[2] = energy[2].cumsum(0)  # a random walk, which the momenta hardly move
    diverging, steps = torch.zeros(4, 200, dtype=torch.bool), torch.full((4, 200), 7)
    diverging[0, :3], steps[:, :50] = True, 255
    stats = {"diverging": diverging, "energy": energy, "num_steps": steps}
    found = summary(Samples(latents, stats, {"options": {"max_tree_depth": 8}}))
    slow = energy[2].diff().square().mean() / energy[2].var()
    assert found.sampler == {
        "divergences": 3.0, "bfmi": pytest.approx(slow.item()), "saturated": 0.25
    }  # fmt: skip
    text = str(found)
    assert "divergences: 3" in text and "BFMI: 0.0" in text and "25.0% of the draws" in text
    capped = summary(Samples(latents, {"num_steps": steps}, {"options": {"max_steps": 255}}))
    assert capped.sampler == {"saturated": 0.25}
    assert summary(latents).sampler == {} and not str(summary(latents)).endswith("\n")


def test_divergent_chains_are_told_of_funnels_before_anything_else():
    diverging = torch.zeros(2, 100, dtype=torch.bool)
    diverging[1, 4] = True
    plain = Samples({"w": torch.randn(2, 100, 1)})
    text = explain_chains(Squared(), Samples(plain.latents, {"diverging": diverging}), X)
    told = text.index("1 draw ended in a divergence")
    assert told < text.index("LocScaleReparam") < text.index("smaller steps")
    assert "divergence" not in explain_chains(Squared(), plain, X)


def test_within_chains_is_rhat_of_the_halves():
    draws = chains(0.0, 5.0, drift=1.0).latents["w"]
    found = within_rhat(draws)
    for chain, value in zip(draws, found, strict=True):
        halves = torch.stack(chain.chunk(2))
        # the halves as chains of their own would be split again: equal without that split
        assert value.shape == (1,) and float(value) > 1.5 and float(rhat(halves)) > 1.5
    assert (within_rhat(chains(0.0, 5.0).latents["w"]) < 1.05).all()


def test_ess_within_chains_does_not_count_their_distance():
    draws = chains(0.0, 5.0).latents["w"]
    found = within_ess(draws)
    assert found.shape == (2, 1) and torch.equal(found[1], ess(draws[1:]))
    assert float(found.sum()) > 10 * float(ess(draws))
