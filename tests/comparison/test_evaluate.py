"""Units, kinds of observations and of programs, test data of any size, and sampler diagnostics."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import (
    Costs,
    LinearizedPredictive,
    Samples,
    bayesianize,
    compare,
    guides,
    handlers,
    models,
    priors,
    working_memory,
)
from pyro_bdl.app.figures import CAPTIONS
from pyro_bdl.errors import BdlWarning

X = torch.linspace(-1, 1, 9)[:, None]
CLASSES = torch.arange(9) % 2


def normal_draws(chains=2, draws=50, seed=0, **shapes):
    torch.manual_seed(seed)
    return Samples({name: torch.randn(chains, draws, *shape) for name, shape in shapes.items()})


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.deterministic("f", w[0] + w[1] * x[:, 0])
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def labels(kind):
    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        logits = torch.stack([torch.zeros(len(x)), w[0] + w[1] * x[:, 0]], -1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", kind(logits), obs=y)

    return program


def test_units_scale_everything_but_ratios():
    draws = {"a": normal_draws(w=(2,)), "b": normal_draws(w=(2,), seed=1)}
    y = X[:, 0]
    plain = compare(line, draws, X, y, reference="b").numbers()["a"]
    scaled = compare(line, draws, X, y, reference="b", units=(10.0, 3.0))
    row = scaled.numbers()["a"]
    for key in ("rmse", "crps", "mean_error", "sd_error", "wasserstein"):
        assert row[key] == pytest.approx(10 * plain[key], rel=1e-4)
    for key in ("coverage", "sd_ratio", "mean_shift"):
        assert row[key] == pytest.approx(plain[key], rel=1e-4)
    assert row["nlpd"] == pytest.approx(plain["nlpd"] + math.log(10), rel=1e-4)
    assert torch.allclose(scaled.y, 10 * y + 3)


def test_the_three_ways_to_write_two_classes_agree():
    draws = {"a": normal_draws(w=(2,)), "b": normal_draws(w=(2,), seed=1)}
    bernoulli = labels(lambda logits: dist.Bernoulli(logits=logits[:, 1]))
    categorical = labels(lambda logits: dist.Categorical(logits=logits))
    one_hot = labels(lambda logits: dist.OneHotCategorical(logits=logits))
    found = [
        compare(program, draws, X, y, reference="b").numbers()["a"]
        for program, y in (
            (bernoulli, CLASSES.float()),
            (categorical, CLASSES),
            (one_hot, torch.nn.functional.one_hot(CLASSES).float()),
        )
    ]
    numbers = [
        [v for k, v in row.items() if isinstance(v, float) and k != "draw_seconds"] for row in found
    ]
    assert len(numbers[0]) >= 10
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)
    assert numbers[2] == pytest.approx(numbers[0], rel=1e-4)


def test_scores_do_not_depend_on_the_parts():
    draws, y = {"a": normal_draws(w=(2,))}, X[:, 0]
    whole = compare(line, draws, X, y, reference=None).numbers()["a"]
    with working_memory(8 * 250):
        parts = compare(line, draws, X, y, reference=None).numbers()["a"]
    for key in ("rmse", "nlpd"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5)
    assert parts["crps"] == pytest.approx(whole["crps"], rel=0.1)


def test_more_test_rows_than_training_rows_and_a_handler():
    model = models.Regression(
        bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0)), noise=1.0, num_data=4
    )
    draws = normal_draws(weight=(1, 1), bias=(1,))
    rows = [
        compare(program, {"a": draws}, X, X, reference=None).numbers()["a"]
        for program in (model, handlers.temper(model, 0.1))
    ]
    assert rows[0]["nlpd"] == pytest.approx(rows[1]["nlpd"])


def test_several_inputs_and_targets_without_f():
    def program(x, z, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x * w + z, 1.0).to_event(1), obs=y)

    y = torch.zeros(9, 2)
    found = compare(program, {"a": normal_draws(w=(2,))}, X, X, y, reference=None)
    assert found.evaluations["a"].function.shape == (100, 9, 2)
    assert found.evaluations["a"].mean.shape == (9, 2)
    assert 0 < found.numbers()["a"]["rmse"] < 2


def test_chains_that_disagree_are_found_out():
    draws = normal_draws(w=(2,), draws=200)
    apart = Samples({"w": draws.latents["w"] + 5 * torch.arange(2.0)[:, None, None]})
    diverging = torch.zeros(2, 200, dtype=torch.bool)
    diverging[0, :3] = True
    stats = {"diverging": diverging, "num_steps": torch.full((2, 200), 5)}
    good = Samples(draws.latents, stats, {"seconds": 2.5})
    found = compare(line, {"good": good, "apart": apart}, X, X[:, 0], reference=None)
    rows = found.numbers()
    assert rows["good"]["rhat"] < 1.02 and rows["good"]["ess_low"] > 200
    assert rows["good"]["divergences"] == 3 and rows["good"]["seconds"] == 2.5
    assert rows["good"]["ess_per_second"] == rows["good"]["ess_median"] / 2.5
    assert rows["good"]["ess_per_gradient"] == 1000 * rows["good"]["ess_median"] / 2000
    assert "ess_per_second" not in rows["apart"] and "ess_per_gradient" not in rows["apart"]
    assert rows["apart"]["rhat"] > 1.5 and "not converged" in found.verdicts["apart"]


def test_the_same_seed_gives_the_same_table_and_leaves_the_generator():
    draws, y = {"a": normal_draws(w=(2,))}, X[:, 0]
    state = torch.get_rng_state()
    tables = [compare(line, draws, X, y, reference="a", seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    same, again, other = (table.table.drop(columns="draw_seconds") for table in tables)
    assert same.equals(again) and not same.equals(other)


def test_figures_and_text_of_every_task():
    draws = {"a": normal_draws(w=(2,)), "b": normal_draws(w=(2,), seed=1)}
    costs = {"a": Costs(seconds=1.0), "b": Costs(seconds=2.0)}
    number = compare(line, draws, X, X[:, 0], reference="b", costs=costs)
    program = labels(lambda logits: dist.Categorical(logits=logits))
    label = compare(program, draws, X, CLASSES, reference="b", costs=costs)
    shared, chains = ["function_space", "cost"], ["trace", "ranks"]
    assert list(number.figures()) == ["bands", "forest", "calibration", "pit", *shared, *chains]
    assert list(label.figures()) == ["bands", "forest", "calibration", *shared, *chains]
    assert set(CAPTIONS) >= set(number.figures())
    alone = compare(line, {"a": draws["a"]}, X, X[:, 0], reference=None)
    assert list(alone.figures()) == ["bands", "calibration", "pit"]
    assert "distance" not in str(alone) and "W1" not in str(alone)
    narrow = number.to_text(60)
    assert max(map(len, narrow.split("\n\na  ")[0].splitlines())) <= 60
    for column in number.table.attrs["columns"]:
        assert column.title in narrow and column.title in str(number)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"posteriors": {}}, "posteriors is empty"),
        ({"reference": "c"}, r"reference 'c' is not among the posteriors \('a'\)"),
        ({"costs": {"c": Costs()}}, "costs has 'c'"),
        ({"y": X[:4, 0]}, "same number of rows"),
        ({"y": torch.zeros(9, 3)}, r"y_test has shape \(9, 3\), but the program predicts \(9,\)"),
        ({"y": X[:, 0] * torch.nan}, "y_test holds NaN"),
        (
            {"posteriors": {"a": normal_draws(v=(2,))}},
            "'a': the posterior is of another program .no value for: 'w'; .* not have: 'v'",
        ),
        ({"num_samples": 1}, "num_samples must be at least 2"),
        ({"units": (0.0, 1.0)}, "units must be .scale, shift. with a positive"),
    ],
)
def test_bad_input_is_told(change, words):
    given = {"posteriors": {"a": normal_draws(w=(2,))}, "y": X[:, 0], "reference": None} | change
    posteriors, y = given.pop("posteriors"), given.pop("y")
    with pytest.raises(ValueError, match=words):
        compare(line, posteriors, X, y, **given)


def test_what_is_no_posterior_is_told():
    with pytest.raises(TypeError, match="posterior 'a': a posterior is a guide or Samples"):
        compare(line, {"a": 3.0}, X, X[:, 0], reference=None)


def test_a_program_without_an_observed_site_is_told():
    def program(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match="a program with an observed site: pass the targets last"):
        compare(program, {"a": normal_draws(w=(2,))}, X, X[:, 0], reference=None)


# Laplace: the linearised program


def _laplace(model, x, y, **options):
    guide = guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with torch.no_grad():
        guide.loc += 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation((x, y), **options)


def test_laplace_is_scored_as_the_linear_model():
    """A wide posterior: f is Gaussian, which the network at its draws is not."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = models.Regression(bayesianize(net), noise=0.3)
    y = X[:, 0]
    posterior = _laplace(model, X[:3], y[:3])
    found = compare(model, {"laplace": posterior}, X, y, reference=None, num_samples=20000)
    moments = LinearizedPredictive(model, posterior).moments(X)["y"]
    mean, variance = moments.mean["loc"], moments.predictive_variance
    said = found.evaluations["laplace"]
    error = (variance / 20000).sqrt()
    assert ((said.mean - mean).abs() < 6 * error).all()
    assert said.function.shape == (20000, 9) == said.predictions.shape
    assert ((said.function.var(0) / moments.variance["loc"] - 1).abs() < 0.1).all()
    assert ((said.predictions.var(0) / variance - 1).abs() < 0.1).all()
    row = found.numbers()["laplace"]
    exact = -dist.Normal(mean, variance.sqrt()).log_prob(y).mean()
    assert row["nlpd"] == pytest.approx(exact.item(), abs=0.02)
    assert row["rmse"] == pytest.approx((mean - y).square().mean().sqrt().item(), abs=0.02)


@pytest.mark.parametrize("kind", ["bernoulli", "categorical", "one-hot"])
def test_laplace_of_classes(kind):
    observe = {
        "bernoulli": lambda logits: dist.Bernoulli(logits=logits[:, 1]),
        "categorical": lambda logits: dist.Categorical(logits=logits),
        "one-hot": lambda logits: dist.OneHotCategorical(logits=logits),
    }[kind]
    y = {"bernoulli": CLASSES.float(), "categorical": CLASSES, "one-hot": torch.eye(2)[CLASSES]}
    program = labels(observe)
    posterior = _laplace(program, X, y[kind])
    found = compare(program, {"a": posterior}, X, y[kind], reference=None, num_samples=4000)
    said, row = found.evaluations["a"], found.numbers()["a"]
    probit = LinearizedPredictive(program, posterior).probabilities(X)["y"]
    ones = probit if kind == "bernoulli" else probit[:, 1]
    assert said.mean.shape == (9, 2) and (said.mean[:, 1] - ones).abs().max() < 0.05
    assert 0 <= row["accuracy"] <= 1 and row["nlpd"] > 0 and "ece" in row


def test_laplace_of_a_part_of_the_latents():
    """The others stay at the MAP; parts of the test data say what all say."""
    posterior = _laplace(line, X, X[:, 0], subset=torch.tensor([1]))
    found = [compare(line, {"a": posterior}, X, X[:, 0], reference=None, num_samples=3000)]
    with working_memory(8 * 3000 * 2):
        found.append(compare(line, {"a": posterior}, X, X[:, 0], reference=None, num_samples=3000))
    spread = found[0].evaluations["a"].function.std(0)
    torch.testing.assert_close(spread, spread[-1] * X[:, 0].abs(), rtol=1e-4, atol=1e-5)
    first, second = (table.numbers()["a"] for table in found)
    for key in ("rmse", "nlpd", "crps"):
        assert first[key] == pytest.approx(second[key], rel=0.05)


@pytest.mark.parametrize("mixed", [False, True])
def test_all_numbers_of_the_linear_model_are_about_the_same_functions(mixed):
    """f, its mean and noise, predictions and densities come from the same draws."""
    posterior = _laplace(line, X, X[:, 0])
    if mixed:
        posterior = guides.MixtureGuide([posterior, _laplace(line, X[:4], X[:4, 0])])
    found = compare(line, {"a": posterior}, X, X[:, 0], reference=None, num_samples=50)
    said, row = found.evaluations["a"], found.numbers()["a"]
    torch.testing.assert_close(said.function, said.expected)
    assert ((said.predictions - said.function) / 0.5).std() == pytest.approx(1.0, abs=0.15)
    density = dist.Normal(said.function, said.noise.sqrt()).log_prob(X[:, 0])
    exact = math.log(50) - density.double().logsumexp(0)
    assert row["nlpd"] == pytest.approx(exact.mean().item(), rel=1e-5)
    with working_memory(8 * 50 * 2):  # in parts
        parts = compare(line, {"a": posterior}, X, X[:, 0], reference=None, num_samples=50)
    assert parts.numbers()["a"]["nlpd"] == pytest.approx(row["nlpd"], rel=1e-5)
