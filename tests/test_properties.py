"""What holds for any input, at inputs that hypothesis chooses: layouts, batches, distributions, CSV
files and saved files."""

import csv
import itertools

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.families import FAMILIES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import pyro_bdl as bdl
from pyro_bdl.curvature.fisher import cell_roots
from pyro_bdl.data import load_csv
from pyro_bdl.data.csv import read_csv
from pyro_bdl.distributions.moments import observation_moments
from pyro_bdl.distributions.parameters import (
    parameters_of,
    rebuilt,
    unconstrained_parameters,
    with_unconstrained,
)

D = {"dtype": torch.float64}
ONE = torch.ones((), **D)
SETTINGS = {
    "derandomize": True, "deadline": None, "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}  # fmt: skip


def examples(count):
    return settings(max_examples=count, **SETTINGS)


# Layouts

SUPPORTS = {
    "real": lambda shape: dist.Normal(ONE, 1.0).expand(shape),
    "positive": lambda shape: dist.Gamma(2 * ONE, 1.0).expand(shape),
    "interval": lambda shape: dist.Uniform(-ONE, 2 * ONE).expand(shape),
    "above": lambda shape: dist.Pareto(2 * ONE, 3 * ONE).expand(shape),
    "simplex": lambda shape: dist.Dirichlet(torch.ones(3, **D)).expand(shape),
    "factor": lambda shape: dist.LKJCholesky(2, 2 * ONE).expand(shape),
}
SITES = st.lists(
    st.tuples(st.sampled_from(list(SUPPORTS)), st.lists(st.integers(1, 3), max_size=2)),
    min_size=1, max_size=4,
)  # fmt: skip


def program_of(sites):
    def model():
        for i, (support, shape) in enumerate(sites):
            base = SUPPORTS[support](torch.Size(shape))
            pyro.sample(f"z{i}", base.to_event(len(shape)))

    return model


@examples(30)
@given(sites=SITES, batch=st.lists(st.integers(1, 3), max_size=2), seed=st.integers(0, 99))
def test_layouts_there_and_back(sites, batch, seed):
    """Vectors and supports are each other's inverse, and log |det dT/du| is that of autograd."""
    layout = bdl.Program(program_of(sites)).layout
    torch.manual_seed(seed)
    u = torch.randn(*batch, layout.size, **D)
    assert torch.equal(layout.flatten(layout.unflatten(u)), u)
    values, log_det = layout.constrain(u)
    for name, latent in layout.latents.items():
        assert values[name].shape == torch.Size(batch) + latent.shape
        assert latent.support.check(values[name]).all()
    torch.testing.assert_close(layout.unconstrain(values), u, rtol=1e-6, atol=1e-6)
    names = list(layout.latents)[::2]
    taken, others = layout.split(u, names)
    assert torch.equal(taken, layout.take(u, names))
    assert taken.shape[-1] + sum(part.shape[-1] for part in others.values()) == layout.size
    assume(all(support not in ("simplex", "factor") for support, _ in sites))
    one = u.reshape(-1, layout.size)[0]
    found = layout.constrain(one)[1]
    jacobian = torch.autograd.functional.jacobian(
        lambda v: torch.cat([part.reshape(-1) for part in layout.constrain(v)[0].values()]), one
    )
    torch.testing.assert_close(found, jacobian.slogdet().logabsdet)
    torch.testing.assert_close(log_det.reshape(-1)[0], found)


# Batches

X = torch.randn(9, 2, **D)
NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
MODEL = bdl.models.Regression(bdl.bayesianize(NET), noise=0.5, num_data=9)
Y = torch.randn(9, **D)
CUTS = st.sets(st.integers(1, 8), max_size=8)


def parts(*tensors, cuts):
    ends = [0, *sorted(cuts), 9]
    return [tuple(t[a:b] for t in tensors) for a, b in itertools.pairwise(ends)]


@pytest.fixture(scope="module")
def at_mode():
    guide = bdl.guides.AutoMeanField(MODEL, init_scale=0.2).prototype(X, Y)
    return guide, bdl.guides.AutoLaplaceGGN(MODEL).prototype(X, Y)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@examples(8)
@given(cuts=CUTS)
def test_any_split_has_the_same_curvature_and_likelihood(at_mode, structure, cuts):
    guide = at_mode[1]
    whole = guide.laplace_approximation((X, Y), structure=structure)
    found = guide.laplace_approximation(parts(X, Y, cuts=cuts), structure=structure)
    torch.testing.assert_close(found.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(found.variances(), whole.variances())
    torch.testing.assert_close(
        bdl.evidence.log_marginal_likelihood(found), bdl.evidence.log_marginal_likelihood(whole)
    )


@examples(10)
@given(cuts=CUTS, seed=st.integers(0, 99))
def test_any_split_has_the_same_predictions_and_estimate(at_mode, cuts, seed):
    guide, _ = at_mode
    draws = bdl.Samples({n: v[None] for n, v in guide.sample_latents(3).items()})
    predictive = bdl.Predictive(MODEL, draws)
    pieces = parts(X, Y, cuts=cuts)
    whole = predictive.log_likelihood(X, Y)["y"]
    found = torch.cat([predictive.log_likelihood(*part)["y"] for part in pieces], -1)
    torch.testing.assert_close(found, whole)
    point = bdl.guides.AutoMAP(MODEL).prototype(X, Y)
    bound = bdl.training.estimate_elbo(MODEL, point, X, Y, batch_size=9)
    size = max(len(part[0]) for part in pieces)
    found = bdl.training.estimate_elbo(MODEL, point, X, Y, batch_size=size)
    assert found == pytest.approx(bound, rel=1e-9)


# Distributions of up to three numbers of any sign

REALS = st.lists(st.floats(-1.5, 1.5), min_size=3, max_size=3)
LIGHT_TAILS = (
    "Normal", "LogNormal", "Laplace", "Gumbel", "StudentT", "Cauchy", "Gamma", "Beta",
    "Exponential", "HalfNormal", "Poisson", "Bernoulli, logits", "Bernoulli, probs",
    "Binomial, logits", "Geometric, logits", "NegativeBinomial, count", "Categorical, logits",
    "Weibull", "GammaPoisson", "ZeroInflatedPoisson",
)  # fmt: skip
NO_FISHER = {"Geometric, logits", "Weibull", "GammaPoisson", "ZeroInflatedPoisson"}
DRAWS = 4000


@pytest.mark.parametrize("name", LIGHT_TAILS)
@examples(8)
@given(numbers=REALS, seed=st.integers(0, 99))
def test_distributions_at_any_parameters(name, numbers, seed):
    """The density after a change of parameters and back; E[y], Var[y] and the Fisher information
    E[s s'], with the score s by autograd, within 6 standard errors."""
    torch.manual_seed(seed)
    size, make = FAMILIES[name]
    base = make(torch.tensor(numbers[:size], **D))
    y = base.sample((DRAWS,))
    density = base.log_prob(y)
    again = with_unconstrained(base, unconstrained_parameters(base))
    torch.testing.assert_close(again.log_prob(y), density)
    if name != "Cauchy":
        values = y if "Categorical" not in name else torch.nn.functional.one_hot(y, 3).to(density)
        mean, variance = observation_moments(base)
        within(values.mean(0), mean, values.std(0))
        squares = (values - mean).square()
        within(squares.mean(0), variance, squares.std(0))
    if name in NO_FISHER:
        return
    used = {n: v for n, v in parameters_of(base).items() if n != "total_count"}
    zeros = {n: torch.zeros_like(v) for n, v in used.items()}
    roots = [
        torch.cat([{**zeros, **root}[n].reshape(-1) for n in used])
        for root in cell_roots(base, used)
    ]
    root = torch.stack(roots, 1)
    leaves = {n: v.expand(DRAWS, *v.shape).clone().requires_grad_() for n, v in used.items()}
    every = {n: v.expand(DRAWS, *v.shape) for n, v in parameters_of(base).items()}
    rebuilt(base, every | leaves).log_prob(y).sum().backward()
    scores = torch.cat([leaf.grad.reshape(DRAWS, -1) for leaf in leaves.values()], 1)
    products = scores[:, :, None] * scores[:, None, :]
    within(products.mean(0), root @ root.T, products.std(0))


def within(found, expected, sd):
    error = 6 * sd / DRAWS**0.5 + 1e-9 * expected.abs()
    assert ((found - expected).abs() <= error).all(), (found, expected, error)


# CSV files

# A carriage return ends a row, as in all readers, and csv does not put it in quotes
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\ufeff")
TEXT = st.text(CHARACTERS, max_size=6)
TABLES = st.integers(2, 4).flatmap(
    lambda width: st.tuples(
        st.lists(TEXT.filter(str.strip), min_size=width, max_size=width, unique_by=str.strip),
        st.lists(st.lists(TEXT, min_size=width, max_size=width), min_size=1, max_size=5),
    )
)


@examples(60)
@given(
    table=TABLES,
    separator=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n"]),
    by_pandas=st.booleans(),
)
def test_any_table_of_texts_is_read_as_it_was_written(
    tmp_path, table, separator, quoting, end, by_pandas
):
    """Entries without the spaces around them, empty ones as missing."""
    header, rows = table
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        if by_pandas:
            options = {"sep": separator, "quoting": quoting, "lineterminator": end}
            pd.DataFrame(rows, columns=header).to_csv(file, index=False, **options)
        else:
            options = {"delimiter": separator, "quoting": quoting, "lineterminator": end}
            csv.writer(file, **options).writerows([header, *rows])
    found = read_csv(path, separator)
    assert list(found.columns) == [name.strip() for name in header]
    expected = [[entry.strip() or None for entry in row] for row in rows]
    assert found.astype(object).where(found.notna(), None).to_numpy().tolist() == expected


@examples(12)
@given(
    numbers=st.lists(
        st.floats(-1e6, 1e6, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-6),
        min_size=10, max_size=20,
    ),
    missing=st.sets(st.integers(0, 9), max_size=4),
    word=st.sampled_from(["", "NA", "nan", "null", "N/A"]),
    decimal=st.sampled_from([".", ","]),
)  # fmt: skip
def test_any_column_of_numbers_is_read_as_it_was_written(tmp_path, numbers, missing, word, decimal):
    """At the test rows, in the units of the file; missing entries become the training mean."""
    y = [0.5 + 1.25 * i for i in range(len(numbers))]
    frame = pd.DataFrame({"a": numbers, "y": y})
    frame.loc[sorted(missing), "a"] = None
    assume(frame["a"].nunique() > 5)
    path = tmp_path / "numbers.csv"
    frame.to_csv(path, sep=";", decimal=decimal, na_rep=word, index=False)
    data = load_csv(path, "y", separator=";", decimal=decimal, impute="mean")
    assert len(data.x_train) + len(data.x_test) == len(numbers)
    test = [row - 1 for row in data.test_rows]
    fill = frame["a"].drop(test).mean()
    expected = frame["a"].fillna(fill)
    assume(data.x_sd[0] > 1e-3 * expected.abs().max())  # single precision resolves the column
    for place, row in enumerate(test):
        point = data.point(place)
        assert point["target"] == pytest.approx(y[row], rel=1e-5)
        assert point["inputs"]["a"] == pytest.approx(expected[row], abs=1e-5 * data.x_sd[0] * 10)


# Saved files


@pytest.mark.parametrize(
    "kind", [bdl.guides.AutoMAP, bdl.guides.AutoMeanField, bdl.guides.AutoLowRank]
)
@examples(12)
@given(sites=SITES, seed=st.integers(0, 99))
def test_any_sites_come_back_bit_for_bit(tmp_path, kind, sites, seed):
    model = program_of(sites)
    guide = kind(model).prototype()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = bdl.load_posterior(guide.save(tmp_path / "guide"), model)
    draws = []
    for one in (guide, found):
        torch.manual_seed(1)
        draws.append(one.sample_latents(4))
    assert all(torch.equal(value, draws[1][name]) for name, value in draws[0].items())
    samples = bdl.Samples({name: value[None] for name, value in draws[0].items()})
    samples = samples.of_program(bdl.Program(model))
    again = bdl.load_posterior(samples.save(tmp_path / "samples"), model)
    assert all(torch.equal(value, again.latents[name]) for name, value in samples.latents.items())
