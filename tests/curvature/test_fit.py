"""Curvature over data: against dense sums by formula, in batches and parts, tempered and masked."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from helpers.linearized_programs import case, net
from torch import nn
from torch.func import functional_call

from pyro_bdl import bayesianize, handlers, models, working_memory
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.program import Program, record

KINDS = ["several outputs", "latent noise, several", "heteroscedastic", "categorical", "pixels"]
KINDS += ["bernoulli", "poisson"]


@pytest.mark.parametrize("kind", KINDS)
def test_full_diagonal_and_low_rank_by_formula(oracle, kind):
    """The generalized Gauss-Newton matrix sum_n J_n' F_n J_n (Schraudolph 2002; Martens 2020).
    Randomized subspace iteration is exact at full rank (Halko, Martinsson & Tropp 2011, algorithm
    4.4)."""
    model, x, y = case(kind)
    program, vector = oracle.program(model, x, y)
    expected, close = oracle.ggn(program, vector), torch.testing.assert_close
    found = oracle.fit(program, vector, (x, y), structure="full")
    close(found.curvature.matrix, expected, rtol=1e-10, atol=1e-10)
    assert found.num_data == 6
    diagonal = oracle.fit(program, vector, (x, y), structure="diag").curvature.values
    close(diagonal, expected.diagonal(), rtol=1e-10, atol=1e-10)
    low_rank = oracle.fit(program, vector, (x, y), structure="low_rank", rank=999).curvature
    found = low_rank.vectors * low_rank.values @ low_rank.vectors.T
    close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_kron_of_one_datum_is_the_block_diagonal(oracle, kind):
    """(a a') kron (g g') is exact for one datum (Martens & Grosse 2015, section 3)."""
    if kind == "pixels":
        pytest.skip("a convolution has several positions")
    model, x, y = case(kind)
    program, vector = oracle.program(model, x[:1], y[:1])
    expected = oracle.ggn(program, vector)
    for structure in ("kron", "ekfac"):
        curvature = oracle.fit(program, vector, (x[:1], y[:1]), structure=structure).curvature
        seen = set()
        for part in curvature.parts.values():
            where = part.position.index_tensor(torch.device("cpu"))
            block = expected[where][:, where]
            torch.testing.assert_close(part.matrix(), block, rtol=1e-9, atol=1e-10)
            seen |= set(where.tolist())
        assert seen == set(expected.diagonal().nonzero()[:, 0].tolist())


def test_kron_of_deep_linear_networks_is_the_block_diagonal(oracle):
    """With Gaussian noise and one output the back-propagated g are the same for every datum.
    Kronecker factors are then exact (Bernacchia, Lengyel & Hennequin 2018)."""
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    model, data = oracle.regression(deep, torch.randn(7, 3))
    program, vector = oracle.program(model, *data)
    expected = oracle.ggn(program, vector)
    for structure in ("kron", "ekfac"):
        curvature = oracle.fit(program, vector, data, structure=structure).curvature
        assert len(curvature.parts) == 6
        for part in curvature.parts.values():
            where = part.position.index_tensor(torch.device("cpu"))
            torch.testing.assert_close(part.matrix(), expected[where][:, where])


# Data


def total(curvature):
    """A curvature as a matrix, by polarization of the precision's quadratic form."""
    eye = torch.eye(curvature.size)
    quadratic = curvature.with_prior(PriorPrecision(torch.ones(curvature.size))).quadratic
    single = quadratic(eye)
    pairs = quadratic(eye[:, None] + eye)
    return 0.5 * (pairs - single[:, None] - single) - eye


def test_batches_and_copies_add_up(oracle, structure):
    model, x, y = case("categorical")
    program, vector = oracle.program(model, x, y)
    whole = oracle.fit(program, vector, (x, y), structure=structure, rank=99)
    close = torch.testing.assert_close
    for sizes, copies in (([6], 1), ([2, 4], 1), ([1, 1, 1, 3], 1), ([18], 3)):
        batches = list(
            zip(x.repeat(copies, 1).split(sizes), y.repeat(copies).split(sizes), strict=True)
        )
        found = oracle.fit(program, vector, batches, structure=structure, rank=99)
        close(total(found.curvature), copies * total(whole.curvature), rtol=1e-10, atol=1e-10)
        close(found.log_likelihood, copies * whole.log_likelihood)
        close(found.gradient, copies * whole.gradient)
        assert found.num_data == 6 * copies


@pytest.mark.parametrize("kind", ["categorical", "pixels"])
def test_parts_that_fit_in_memory_add_up(oracle, structure, kind, monkeypatch):
    model, x, y = case(kind)
    x, y = x.repeat(2, 1), y.repeat(2, *(1,) * (y.dim() - 1))
    program, vector = oracle.program(model, x, y)
    whole = oracle.fit(program, vector, (x, y), structure=structure, rank=99)
    parts = []
    original = ProgramAtPoint.linearizations

    def counted(*args, **kwargs):
        for part in original(*args, **kwargs):
            parts.append(len(part.args[0]))
            yield part

    monkeypatch.setattr(ProgramAtPoint, "linearizations", counted)
    with working_memory(600):
        split = oracle.fit(program, vector, (x, y), structure=structure, rank=99)
    assert max(parts) < 12
    torch.testing.assert_close(total(split.curvature), total(whole.curvature), rtol=1e-9, atol=1e-9)


def test_a_program_that_needs_all_of_its_data_is_not_cut(oracle):
    """Rows that depend on each other, and a factor, which counts once for all data."""

    def centered(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x - x.mean(0)) @ w, 1.0), obs=y)

    def with_factor(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("constraint", -10 * w.sum() ** 2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8)
    program, vector = oracle.program(centered, x, y)
    with working_memory(1):
        with pytest.raises(UnsupportedProgramError, match=r'depend on each other.*"together"'):
            oracle.fit(program, vector, (x, y), structure="full")
        options = {"structure": "full", "rows": "together"}
        found = oracle.fit(program, vector, (x, y), **options).curvature.matrix
    torch.testing.assert_close(found, torch.cov(x.T, correction=0) * 8)
    program, vector = oracle.program(with_factor, x, y)
    with working_memory(1):
        found = oracle.fit(program, vector, (x, y), structure="full", curvature="hessian")
    torch.testing.assert_close(found.curvature.matrix, x.T @ x + 20 * torch.ones(3, 3))


def test_two_sites_with_different_numbers_of_data(oracle, structures):
    """One network, called twice; not all arguments have the same rows."""
    bnn = bayesianize(net(1))

    def model(x, y=None, z=None):
        f, g = once(bnn, (x, x[:4] + 1.0))
        with pyro.plate("first", 6):
            pyro.sample("y", dist.Normal(f[:, 0], 0.5), obs=y)
        with pyro.plate("second", 4):
            pyro.sample("z", dist.Poisson(g[:, 0].exp()), obs=z)

    torch.manual_seed(0)
    data = torch.randn(6, 3), torch.randn(6), torch.poisson(torch.ones(4))
    program, vector = oracle.program(model, *data)
    expected = oracle.ggn(program, vector)
    for structure in structures:
        if structure in ("kron", "ekfac"):
            with pytest.raises(UnsupportedProgramError, match="site 'z' has 4 data beside the 6"):
                oracle.fit(program, vector, data, structure=structure)
            continue
        found = oracle.fit(program, vector, data, structure=structure, rank=99)
        matrix = total(found.curvature)
        if structure in ("full", "low_rank", "kernel"):
            torch.testing.assert_close(matrix, expected)
        else:
            torch.testing.assert_close(matrix.diagonal(), expected.diagonal())


def once(bnn, inputs):
    """The network at several inputs, its weights sampled once."""
    values = bnn._sample()
    return [functional_call(bnn.network, values, (x,)) for x in inputs]


def test_sites_that_use_the_same_entries_differently(oracle, structures):
    """A matrix as a product for one site, as a product and a scale for the other."""

    def model(x, y=None, z=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(F.linear(x, w), 1.0).to_event(1), obs=y)
            other = (F.linear(x, w)[:, :, None] * w).sum((1, 2))
            pyro.sample("z", dist.Normal(other, 1.0), obs=z)

    torch.manual_seed(0)
    data = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5)
    program, vector = oracle.program(model, *data)
    expected = oracle.ggn(program, vector)
    for structure in structures:
        curvature = oracle.fit(program, vector, data, structure=structure, rank=99).curvature
        matrix = total(curvature)
        if structure in ("kron", "ekfac"):
            assert [part.position.size for part in curvature._disjoint()] == [6]
        elif structure == "diag":
            torch.testing.assert_close(matrix.diagonal(), expected.diagonal())
        else:
            torch.testing.assert_close(matrix, expected)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_masks_and_temperatures(oracle, structure):
    torch.manual_seed(0)
    bnn = bayesianize(net(3))
    rows = torch.tensor([True, False, True])
    cells = torch.rand(3, 3) > 0.4

    def model(x, y=None):
        f = bnn(x)
        with pyro.plate("data", 3), pyro.poutine.mask(mask=rows):
            pyro.sample("y", dist.Normal(f, 1.0).mask(cells).to_event(1), obs=y)

    data = torch.randn(3, 3), torch.randn(3, 3)
    tempered = handlers.temper(model, 0.1)
    program, vector = oracle.program(tempered, *data)
    weights = {"y": 10.0 * cells * rows[:, None]}
    expected = oracle.ggn(program, vector, weights)
    found = oracle.fit(program, vector, data, structure=structure, rows="together")
    expected = expected if structure == "full" else torch.diag(expected.diagonal())
    torch.testing.assert_close(total(found.curvature), expected)
    torch.testing.assert_close(
        found.log_likelihood, program.run(program.constrain(vector)[0]).log_likelihood()
    )


def test_minibatches_of_a_program_that_says_how_many_data_there_are(oracle, structures):
    """With all batches each datum counts once; with some, sums are scaled up with a warning."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    bnn, close = bayesianize(net(2)), torch.testing.assert_close
    model, plain = (models.Regression(bnn, noise=0.4, num_data=n) for n in (6, None))
    program, vector = oracle.program(plain, x, y)
    expected = oracle.fit(program, vector, (x, y), structure="full")
    program = Program(model, x[:2], y[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        batches = list(zip(x.split(2), y.split(2), strict=True))
        found = oracle.fit(program, vector, batches, structure="full")
    close(found.curvature.matrix, expected.curvature.matrix)
    close(found.log_likelihood, expected.log_likelihood)
    close(found.gradient, expected.gradient)
    for structure in structures:
        options = {"structure": structure, "rank": 99}
        half = oracle.fit(Program(plain, x[:3], y[:3]), vector, (x[:3], y[:3]), **options)
        with pytest.warns(BdlWarning, match="states 6 data, but 3 were passed"):
            part = oracle.fit(program, vector, (x[:3], y[:3]), **options)
        close(part.log_likelihood, 2 * half.log_likelihood)
        close(part.gradient, 2 * half.gradient)
        close(total(part.curvature), 2 * total(half.curvature))


def test_a_scale_that_rounds_up_is_not_of_more_data(oracle):
    x, y = torch.randn(27, 3), torch.randn(27, 2)
    assert 13 * (27 / 13) > 27
    program, vector = oracle.program(models.Regression(bayesianize(net(2)), num_data=27), x, y)
    batches = [(x[:13], y[:13]), (x[13:], y[13:])]
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        assert oracle.fit(program, vector, batches, structure="diag").factor == 1.0


def test_a_site_that_is_not_scaled_beside_one_that_is(oracle):
    def two(x, y=None, z=None, size=20):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("a", 20, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        with pyro.plate("b", size, subsample=torch.arange(len(x))):
            pyro.sample("z", dist.Normal(x @ w, 0.5), obs=z)

    x, y = torch.randn(20, 3), torch.randn(20)
    batches = [(a, b, b) for a, b in zip(x.split(5), y.split(5), strict=True)]
    program, vector = oracle.program(two, *batches[0])
    oracle.fit(program, vector, batches)
    with pytest.warns(BdlWarning, match="states 40 data"):
        oracle.fit(program, vector, [(*batch, 40) for batch in batches])
    with pytest.raises(ValueError, match=r"site 'z' treats a minibatch of 5 rows.*plate size=20"):
        oracle.fit(program, vector, [(*batch, 5) for batch in batches])


def test_a_plate_that_draws_its_own_subsample(oracle):
    """All passes, and all derivatives within one, use the same draw."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 8, subsample_size=4) as index:
            pyro.sample("y", dist.Normal((x[index] * w.exp()).sum(1), 1.0), obs=y[index])

    program, vector = oracle.program(model)
    found = []
    for structure in ("full", "low_rank", "kernel"):
        pyro.set_rng_seed(3)
        with pytest.warns(BdlWarning, match="states 8 data, but 4 were passed"):
            found.append(oracle.fit(program, vector, [()], structure=structure, rank=3))
    pyro.set_rng_seed(3)
    index = record(model, program.constrain(vector)[0]).subsamples["data"]
    rows = x[index] * vector.exp()
    torch.testing.assert_close(found[0].curvature.matrix, 2 * rows.T @ rows)
    torch.testing.assert_close(total(found[1].curvature), 2 * rows.T @ rows)


# Kinds of curvature


def test_the_monte_carlo_fisher_converges(oracle):
    """Scores of drawn observations estimate sum_n J_n' F_n J_n (Martens 2020)."""
    model, x, y = case("categorical")
    program, vector = oracle.program(model, x, y)
    expected = oracle.ggn(program, vector)
    options = {"structure": "full", "curvature": "ggn-mc", "num_draws": 50}
    found = torch.stack(
        [oracle.fit(program, vector, (x, y), **options).curvature.matrix for _ in range(10)]
    )
    error = found.std(0) / 10**0.5
    assert ((found.mean(0) - expected).abs() <= 6 * error + 1e-12).all()


@pytest.mark.parametrize("structure", ["diag", "ekfac", "low_rank"])
def test_passes_share_their_draws(oracle, structure):
    model, x, y = case("categorical")
    program, vector = oracle.program(model, x, y)
    torch.manual_seed(5)
    expected = oracle.fit(program, vector, (x, y), structure="full", curvature="ggn-mc")
    torch.manual_seed(5)
    found = oracle.fit(
        program, vector, (x, y), structure=structure, curvature="ggn-mc", rank=99
    ).curvature
    full = expected.curvature.matrix
    if structure == "low_rank":
        torch.testing.assert_close(total(found), full)
    else:
        torch.testing.assert_close(found.diagonal().sum(), full.trace())


def test_the_empirical_fisher_is_the_outer_product_of_scores(oracle):
    """sum_n g_n g_n' with g_n the gradient of log p(y_n | w) (Martens 2020)."""
    model, x, y = case("latent noise, several")
    program, vector = oracle.program(model, x, y)

    def likelihood(u):
        return program.log_likelihood(program.constrain(u)[0])["y"]

    scores = torch.autograd.functional.jacobian(likelihood, vector)
    found = oracle.fit(program, vector, (x, y), structure="full", curvature="empirical-fisher")
    torch.testing.assert_close(found.curvature.matrix, scores.T @ scores)
    torch.testing.assert_close(found.gradient, scores.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_hessian(oracle, kind):
    model, x, y = case(kind)
    program, vector = oracle.program(model, x, y)

    def likelihood(u):
        return sum(v.sum() for v in program.log_likelihood(program.constrain(u)[0]).values())

    expected = -torch.autograd.functional.hessian(likelihood, vector)
    options = {"structure": "full", "curvature": "hessian"}
    batches = list(zip(x.split(4), y.split(4), strict=True))
    for data in ((x, y), batches):
        found = oracle.fit(program, vector, data, **options).curvature.matrix
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    some = torch.tensor([0, 3, 7, program.size - 1])
    found = oracle.fit(program, vector, (x, y), some, **options).curvature.matrix
    torch.testing.assert_close(found, expected[some][:, some], rtol=1e-9, atol=1e-9)


# Subsets


@pytest.mark.parametrize("structure", ["full", "diag", "low_rank", "kernel"])
def test_a_part_of_the_latents(oracle, structure):
    model, x, y = case("latent noise, several")
    program, vector = oracle.program(model, x, y)
    expected = oracle.ggn(program, vector)
    some = torch.randperm(program.size)[:11].sort().values
    found = total(oracle.fit(program, vector, (x, y), some, structure=structure, rank=99).curvature)
    expected = expected[some][:, some]
    expected = torch.diag(expected.diagonal()) if structure == "diag" else expected
    torch.testing.assert_close(found, expected)
    every = torch.arange(program.size)
    a = total(oracle.fit(program, vector, (x, y), every, structure=structure, rank=99).curvature)
    b = total(oracle.fit(program, vector, (x, y), structure=structure, rank=99).curvature)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_factors_want_whole_sites(oracle, structure):
    model, x, y = case("several outputs")
    program, vector = oracle.program(model, x, y)
    whole = oracle.fit(program, vector, (x, y), structure=structure).curvature
    sites = torch.cat(
        [torch.arange(program.size)[program.slices[n]] for n in ("0.bias", "2.weight")]
    )
    some = oracle.fit(program, vector, (x, y), sites, structure=structure).curvature
    torch.testing.assert_close(total(some), total(whole)[sites][:, sites])
    with pytest.raises(ValueError, match=r"'0.weight' has no Kronecker factors.*whole sites"):
        oracle.fit(program, vector, (x, y), torch.tensor([0, 1]), structure=structure)


# Each batch has its own data axes


def _gated(x, y):
    """Rows interact where a gate is open, in the second batch only."""
    w = pyro.sample("w", dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))
    h = torch.nn.functional.linear(x, w)[:, 0]
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(h + torch.relu(x[:, 0]) * h.mean(), 0.5), obs=y)


def _steps_first(x, y):
    """As many steps as data, before the data; a first batch whose ReLUs are dead."""
    w = pyro.sample("w", dist.Normal(torch.ones(3, 2), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.ones(1, 3), 1.0).to_event(2))
    h = torch.relu(torch.nn.functional.linear(x.transpose(0, 1), w)).sum(0)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(torch.nn.functional.linear(h, v)[:, 0], 0.5), obs=y)


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("model", [_gated, _steps_first])
def test_axes_of_one_batch_are_not_those_of_the_next(oracle, model, structure):
    torch.manual_seed(0)
    x = torch.rand(12, 6, 2) if model is _steps_first else torch.rand(12, 2)
    x[:6] *= -1.0  # gates closed, or ReLUs dead
    y = torch.randn(12)
    program, _ = oracle.program(model, x, y)
    vector = torch.linspace(0.5, 1.5, program.size)
    parts = [(x[:6], y[:6]), (x[6:], y[6:])]
    for batches in (parts, parts[::-1]):
        rows = "together" if model is _gated else "alone"
        found = oracle.fit(program, vector, batches, structure=structure, rows=rows).curvature
        expected = sum(oracle.ggn(Program(model, *part), vector) for part in parts)
        if structure == "diag":
            torch.testing.assert_close(found.diagonal(), expected.diagonal())
        else:
            torch.testing.assert_close(found.matrix, expected)
