"""The table: known predictives, every kind of posterior and of observation, and refusals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import GRID, Shifted, labels, line, normal, row_of, shift, weights

import pyro_bdl as bdl
from pyro_bdl import Samples, compare
from pyro_bdl.comparison.columns import with_error
from pyro_bdl.errors import BdlWarning, UnusableDrawsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum"),  # around points that nobody trained
    pytest.mark.filterwarnings("ignore:.*#one-by-one"),  # networks that torch cannot vectorize
]

Y, CLASSES = GRID[:, 0], torch.arange(9) % 2


def test_scores_of_a_known_predictive():
    y = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0])
    row = row_of(shift, normal(0.0, 1.0), torch.zeros(5, 1), y)
    predictive, standard = dist.Normal(0.0, math.sqrt(2)), dist.Normal(0.0, 1.0)
    assert math.isclose(row["rmse"], y.square().mean().sqrt(), rel_tol=2e-2)
    assert math.isclose(row["nlpd"], -predictive.log_prob(y).mean(), rel_tol=1e-2)
    z = y / math.sqrt(2)
    crps = z * (2 * standard.cdf(z) - 1) + 2 * standard.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    assert math.isclose(row["crps"], (math.sqrt(2) * crps).mean(), rel_tol=2e-2)
    assert row["coverage"] == 1.0


def test_one_function_that_is_all_right_or_all_wrong_is_no_fault_of_its_interval():
    """All targets depend on one number, so that a coverage is 90 % or zero."""

    def shared(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 0.01), obs=y)

    for truth in (0.7, 2.5):
        y = truth + 0.01 * torch.randn(50)
        found = compare(shared, {"exact": normal(0.0, 1.0)}, torch.zeros(50, 1), y, reference=None)
        row = found.numbers()["exact"]
        assert row["coverage"] == pytest.approx(1.0 if truth < 1 else 0.0, abs=0.01)
        assert [row["coverage_from"], row["coverage_to"]] == [0, 1]
        assert "interval holds" not in found.verdicts["exact"]


def test_no_line_is_wider_than_asked_for():
    draws = {"a": normal(1.0, 0.5), "a-rather-long-name": normal(0.0, 1.0)}
    x, y = torch.zeros(5, 1), torch.zeros(5)
    found = compare(shift, draws, x, y, reference="a-rather-long-name")
    text = found.to_text(80)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()).count(" ".join(found.verdicts["a"].split())) == 1
    assert found.verdicts["a"] in found.to_text(None)
    for key in ("mean_error", "sd_error", "wasserstein", "sd_ratio"):  # with Monte Carlo errors
        row = found.numbers()["a"]
        assert with_error(row[key], row[f"{key}_se"]) in text
    assert all(column.title in text for column in found.table.attrs["columns"])


def test_units_scale_everything_but_ratios():
    draws = {"a": weights(2), "b": weights(2, seed=1)}
    plain = compare(line, draws, GRID, Y, reference="b").numbers()["a"]
    scaled = compare(line, draws, GRID, Y, reference="b", units=(10.0, 3.0))
    row = scaled.numbers()["a"]
    for key in ("rmse", "crps", "mean_error", "sd_error", "wasserstein"):
        assert row[key] == pytest.approx(10 * plain[key], rel=1e-4)
    for key in ("coverage", "sd_ratio", "mean_shift"):
        assert row[key] == pytest.approx(plain[key], rel=1e-4)
    assert row["nlpd"] == pytest.approx(plain["nlpd"] + math.log(10), rel=1e-4)
    assert torch.allclose(scaled.y, 10 * Y + 3)


def test_the_same_seed_gives_the_same_table():
    tables = [compare(line, {"a": weights(2)}, GRID, Y, reference="a", seed=s) for s in (0, 0, 1)]
    same, again, other = (table.table.drop(columns="draw_seconds") for table in tables)
    assert same.equals(again) and not same.equals(other)


# ---------------------------------------------------------------- posteriors and observations


def test_the_three_ways_to_write_two_classes_agree():
    draws = {"a": weights(2), "b": weights(2, seed=1)}
    ways = (
        (lambda logits: dist.Bernoulli(logits=logits[:, 1]), CLASSES.float()),
        (lambda logits: dist.Categorical(logits=logits), CLASSES),
        (lambda logits: dist.OneHotCategorical(logits=logits), torch.eye(2)[CLASSES]),
    )
    numbers = []
    for kind, y in ways:
        row = compare(labels(kind), draws, GRID, y, reference="b").numbers()["a"]
        row.pop("draw_seconds")
        assert row.pop("temperature") == pytest.approx(0.277, abs=1e-3)  # of 9 points: rounding
        row.pop("temperature_se")
        numbers.append([value for value in row.values() if isinstance(value, float)])
    assert len(numbers[0]) >= 10
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)
    assert numbers[2] == pytest.approx(numbers[0], rel=1e-4)


def test_more_test_rows_than_training_rows_and_a_handler():
    network = bdl.bayesianize(torch.nn.Linear(1, 1), bdl.priors.Normal(1.0))
    model = bdl.models.Regression(network, noise=1.0, num_data=4)
    draws = {"weight": torch.randn(2, 50, 1, 1), "bias": torch.randn(2, 50, 1)}
    rows = [
        row_of(program, Samples(draws), GRID, GRID)
        for program in (model, bdl.handlers.temper(model, 0.1))
    ]
    assert rows[0]["nlpd"] == pytest.approx(rows[1]["nlpd"])


def test_several_inputs_and_targets_without_f():
    def program(x, z, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x * w + z, 1.0).to_event(1), obs=y)

    found = compare(program, {"a": weights(2)}, GRID, GRID, torch.zeros(9, 2), reference=None)
    assert found.evaluations["a"].function.shape == (100, 9, 2)
    assert found.evaluations["a"].mean.shape == (9, 2) and 0 < found.numbers()["a"]["rmse"] < 2


def test_chains_that_disagree_are_found_out():
    draws = weights(2, count=200).latents["w"]
    apart = Samples({"w": draws + 5 * torch.arange(2.0)[:, None, None]})
    diverging = torch.zeros(2, 200, dtype=torch.bool)
    diverging[0, :3] = True
    stats = {"diverging": diverging, "num_steps": torch.full((2, 200), 5)}
    good = Samples({"w": draws}, stats, {"seconds": 2.5})
    found = compare(line, {"good": good, "apart": apart}, GRID, Y, reference=None)
    row, other = (found.numbers()[name] for name in ("good", "apart"))
    assert row["rhat"] < 1.02 and row["ess_low"] > 200
    assert row["divergences"] == 3 and row["seconds"] == 2.5 and row["divergent"] == 3 / 400
    assert row["ess_per_second"] == row["ess_median"] / 2.5
    assert row["ess_per_gradient"] == 1000 * row["ess_median"] / 2000
    assert "ess_per_second" not in other and "ess_per_gradient" not in other
    assert other["rhat"] > 1.5 and "not converged" in found.verdicts["apart"]


def network_with(observation):
    net = bdl.bayesianize(torch.nn.Linear(2, 1))

    def model(x, y=None):
        f = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", observation(f), obs=y)

    return model


def test_laplace_of_a_likelihood_that_has_no_linear_model_goes_through_the_network():
    x, y = torch.randn(30, 2), torch.rand(30) + 0.5
    model = network_with(lambda f: Shifted(f, 1.0))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    with pytest.warns(BdlWarning, match="does not know Shifted .* the draws of the posterior"):
        assert row_of(model, posterior, x, y, num_samples=20)["rmse"] > 0
    with pytest.warns(
        BdlWarning, match="does not know Shifted .* the draws of the posterior go through"
    ):
        data = bdl.to_arviz(model, posterior, x, y, num_samples=20)
    assert data.posterior_predictive["y"].shape == (1, 20, 30)


def test_ordinal_targets_are_classes():
    x = torch.randn(60, 2)
    model = network_with(lambda f: dist.OrderedLogistic(f, torch.tensor([-1.0, 1.0])))
    y = (x[:, 0] > -1).long() + (x[:, 0] > 1).long()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    found = row_of(model, guide.laplace_approximation((x, y)), x, y, num_samples=20)
    assert 0 <= found["accuracy"] <= 1 and found["nlpd"] > 0


def test_counts_have_a_uniform_transform():
    def counts(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((w[0] + w[1] * x[:, 0]).exp()), obs=y)

    x = torch.randn(800, 1)
    rate = (0.5 + 0.3 * x[:, 0]).exp()
    known = Samples({"w": torch.tensor([0.5, 0.3]).repeat(2, 300, 1)})
    found = compare(counts, {"a": known}, x, torch.poisson(rate), reference=None)
    assert found.numbers()["a"]["pit"] < 1.63 / math.sqrt(800)
    assert found.evaluations["a"].pit.shape == (800,)
    assert found.numbers()["a"]["aleatoric"] == pytest.approx(rate.mean().sqrt().item(), rel=0.02)


def test_integer_targets_are_numbers_as_well(recwarn):
    whole = torch.arange(9) % 3
    rows = [row_of(line, weights(2), GRID, y, train=(GRID, y)) for y in (whole, whole.float())]
    for row in rows:
        row.pop("draw_seconds")
    assert rows[0] == rows[1] and not [w for w in recwarn if w.category is BdlWarning]


def test_inputs_from_elsewhere_are_told_apart():
    """The sd of a line grows with |x|; that of a constant function does not."""
    wide, flat = weights(2), Samples({"w": weights(2).latents["w"] * torch.tensor([1.0, 0.0])})
    options = {"reference": None, "ood": 5 + torch.rand(30, 1)}
    rows = compare(line, {"wide": wide, "flat": flat}, GRID, Y, **options).numbers()
    assert rows["wide"]["auroc"] == 1 == rows["wide"]["auroc_epistemic"]
    assert rows["flat"]["auroc"] == pytest.approx(0.5, abs=0.01)
    coin = labels(lambda logits: dist.Categorical(logits=logits))
    row = compare(coin, {"wide": wide}, GRID, CLASSES, **options).numbers()["wide"]
    assert row["auroc_epistemic"] > 0.9 and 0 <= row["auroc"] <= 1
    assert rows["wide"]["aupr"] == pytest.approx(1) and rows["wide"]["fpr95"] == 0
    assert rows["flat"]["aupr"] == pytest.approx(30 / 39, abs=0.02) and rows["flat"]["fpr95"] > 0.9
    assert 0 <= row["aurc"] <= 1


# ---------------------------------------------------------------- draws that cannot be used


def roots(x, y=None):
    """f = sqrt(w), NaN for negative draws."""
    w = pyro.sample("w", dist.Normal(torch.tensor(1.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w.sqrt().expand(len(x)), 1.0), obs=y)


def root_labels(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.tensor(1.0), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=w.sqrt().expand(len(x))), obs=y)


def positive(bad=None):
    values = torch.rand(2, 20) + 0.5
    if bad is not None:
        values[1, 3] = bad
    return Samples({"w": values})


@pytest.mark.parametrize(
    "program, y, bad, words",
    [
        (shift, Y, math.nan, "values of the site 'w'"),
        (shift, Y, math.inf, "values of the site 'w'"),
        (roots, Y, -1.0, ""),
        (root_labels, CLASSES.float(), -1.0, ""),
    ],
)
def test_draws_that_are_not_finite_are_refused_by_name_and_number(program, y, bad, words):
    with pytest.raises(UnusableDrawsError) as raised:
        compare(program, {"good": positive(), "odd": positive(bad)}, GRID, y, reference="good")
    assert raised.value.posterior == "odd" and words in str(raised.value)
    assert "posterior 'odd': 1 of 40 draws (the first is number 23, counted from 0)" in str(
        raised.value
    )


def test_a_distribution_without_a_mean_is_no_fault_of_the_draws():
    """The mean of a Cauchy is NaN for all latents; its draws are finite."""

    def heavy(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Cauchy(w.expand(len(x)), 1.0), obs=y)

    found = compare(heavy, {"a": positive(), "b": positive()}, GRID, Y, reference="b").numbers()
    assert found["a"]["nlpd"] > 0 and found["a"]["crps"] > 0 and "rmse" not in found["a"]
