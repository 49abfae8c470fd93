"""Passes over data: what is refused, and what is not changed."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.linearized_programs import case
from pyro import poutine

from pyro_bdl import working_memory
from pyro_bdl.curvature import LowRank
from pyro_bdl.curvature import config as config_module
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset

# Refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CurvatureConfig("kfac"), "structure must be one of 'kron'"),
        (lambda: CurvatureConfig(curvature="fisher"), "curvature must be one of"),
        (lambda: CurvatureConfig("kron", "hessian"), 'needs structure="full"'),
        (lambda: CurvatureConfig(num_draws=0), "num_draws must be at least 1"),
        (lambda: LowRank(rank=0), "rank must be at least 1"),
    ],
)
def test_configs(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def without_observations(x):
    return pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def a_factor(x):
    pyro.factor("score", -(without_observations(x) * x).sum().square())


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (without_observations, ValueError, "no observed site"),
        (a_factor, UnsupportedProgramError, r"in the factor 'score'.*obs="),
    ],
)
def test_programs_without_observations(oracle, structures, model, kind, words):
    program, vector = oracle.program(model, torch.ones(3))
    for structure in structures:
        with pytest.raises(kind, match=words):
            oracle.fit(program, vector, torch.ones(3), structure=structure)


def test_data_of_the_program_itself_are_named_where_single_rows_are_needed(oracle):
    """Not the site whose data are the rows, which comes first."""

    def model(y):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(b[0], 1.0), obs=y)
        with pyro.plate("calibration", 3):
            pyro.sample("c", dist.Normal(b[1], 1.0), obs=torch.ones(3, dtype=y.dtype))

    y = torch.arange(4.0)
    program, vector = oracle.program(model, y)
    with pytest.raises(UnsupportedProgramError, match="site 'c' has 3 data beside the 4 rows"):
        oracle.fit(program, vector, y, structure="kron")


def test_missing_targets(oracle):
    model, x, y = case("several outputs")
    program, vector = oracle.program(model, x, y)
    with pytest.raises(ValueError, match=r"site 'y' has no observation.*targets"):
        oracle.fit(program, vector, x, structure="full")


def test_data_and_outputs_that_are_not_finite(oracle):
    model, x, y = case("several outputs")
    program, vector = oracle.program(model, x, y)
    with pytest.raises(ValueError, match=r"log likelihood at the MAP is -inf.*not finite"):
        oracle.fit(program, 1e200 * vector, (x, y), structure="full")
    x = x.clone()
    x[1, 1] = float("nan")
    with pytest.raises(ValueError, match=r"batch 0 .*: x holds NaN or infinity in rows 1, col"):
        oracle.fit(program, vector, (x, y), structure="full")


@pytest.mark.parametrize(
    "structure,curvature", [("full", "ggn"), ("full", "hessian"), ("kron", "ggn")]
)
def test_targets_outside_their_support_in_a_later_batch(oracle, structure, curvature):
    """A Bernoulli's density is finite at 2."""
    model, x, _ = case("bernoulli")
    y = (torch.arange(len(x)) % 2).to(x)
    program, vector = oracle.program(model, x, y)
    batches = [(x, y), (x, y + 1.0)]
    first = ", ".join(str(len(x) + n) for n in range(1, len(x), 2))
    with pytest.raises(ValueError, match=f"outside the support .* in rows {first}: correct"):
        oracle.fit(program, vector, batches, structure=structure, curvature=curvature)


def _own_targets(x, y):
    """The targets of a closure, beside other inputs."""
    pyro.sample("y", dist.Normal(_weight() * x, 1.0).to_event(1), obs=TARGETS)


def _no_arguments(x, y):
    w = _weight()
    with pyro.plate("data", 4):
        pyro.sample("y", dist.Normal(w, 1.0), obs=2.0 * TARGETS)


def _an_anchor(x, y):
    w = _weight()
    pyro.sample("anchor", dist.Normal(w, 0.1), obs=torch.tensor(0.2))
    pyro.sample("y", dist.Normal(w * x, 1.0).to_event(1), obs=y)


def _copied_targets(x, y):
    """Targets of a closure, computed anew in each run."""
    w = _weight()
    with pyro.plate("data", 4):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=TARGETS.clone())


def _appended_targets(x, y):
    """Rows of a closure behind those of the arguments."""
    _plain(torch.cat([x, TARGETS]), torch.cat([y, 2.0 * TARGETS]))


def _written_targets(x, y):
    """Targets of the arguments in the first places of a buffer."""
    values = 2.0 * TARGETS.repeat(2)
    values[: len(y)] = y
    _plain(torch.cat([x, TARGETS]), values)


def _plain(x, y):
    w = _weight()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def _conditioned(x, y):
    return poutine.condition(_plain, {"y": TARGETS})(x, None)


def _chosen_rows(x, y):
    """Targets from a table of the program's, at indices among the data."""
    _plain(x, TARGETS[x.long()])


def _repeated(x, y):
    """The same targets for two copies of the inputs, of which one counts nothing."""
    w, both = _weight(), torch.stack([x, 0.0 * x])
    with pyro.plate("copies", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(w * both, 1.0), obs=y.expand(2, -1))


def _residuals(x, y):
    """Observed zeros, which the program makes, of other rows in each batch."""
    mean = _weight() * x - y
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.zeros(len(x)))


def _weight():
    return pyro.sample("w", dist.Normal(0.0, 1.0))


TARGETS = torch.tensor([0.3, 1.0, -0.5, 2.0])


OWN = [_own_targets, _copied_targets, _no_arguments, _an_anchor, _appended_targets]
OWN += [_written_targets, _conditioned]


@pytest.mark.parametrize("model", [*OWN, _residuals, _chosen_rows, _repeated])
def test_targets_of_the_program_in_several_batches(oracle, model):
    x, y = torch.tensor([1.0, 2.0, 0.0, 3.0]), torch.tensor([0.2, 0.4, 0.1, -0.3])
    program, vector = oracle.program(model, x, y)
    options = {"structure": "full", "rows": "together"}
    first = oracle.fit(program, vector, (x, y), **options)
    assert torch.isfinite(first.curvature.matrix).all()
    batches = [(x, y), (x.flip(0), y + 1)]
    if model not in OWN:
        found = oracle.fit(program, vector, batches, **options).curvature.matrix
        torch.testing.assert_close(found, 2 * x.square().sum().reshape(1, 1))
        return
    with pytest.raises(UnsupportedProgramError, match="count them again in each batch: pass them"):
        oracle.fit(program, vector, batches, **options)


@pytest.mark.parametrize("model", [_conditioned, _copied_targets])
def test_targets_of_the_program_beside_single_rows(oracle, model):
    x = torch.tensor([1.0, 2.0, 0.0, 3.0])
    program, vector = oracle.program(model, x, x)
    whole = oracle.fit(program, vector, (x, x), structure="full", rows="together")
    torch.testing.assert_close(whole.curvature.matrix, x.square().sum().reshape(1, 1))
    with pytest.raises(UnsupportedProgramError, match="all of them beside each row: pass them"):
        oracle.fit(program, vector, (x, x), structure="full")


def test_values_that_broadcast_against_their_distribution_count_each(oracle):
    def model(y=None):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(m, 0.5), obs=y)

    program, vector = oracle.program(model, torch.randn(4))
    found = oracle.fit(program, vector, (torch.randn(4),), structure="full")
    assert found.num_data == 4
    torch.testing.assert_close(found.curvature.matrix, torch.full((1, 1), 4 / 0.5**2))


def test_distributions_that_cannot_be_read(oracle):
    def mixture(y=None):
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        parts = [dist.Normal(m[i].expand(4), 1.0) for i in range(2)]
        with pyro.plate("data", 4):
            mask = torch.tensor([True, False, True, False])
            pyro.sample("y", dist.MaskedMixture(mask, *parts), obs=y)

    program, vector = oracle.program(mixture, torch.randn(4))
    y = torch.randn(4)
    with pytest.raises(ValueError, match=r"'y' is not known.*ExpandedDistribution.*hessian"):
        oracle.fit(program, vector, (y,), structure="full", rows="together")
    hessian = {"structure": "full", "curvature": "hessian", "rows": "together"}
    found = oracle.fit(program, vector, (y,), **hessian)
    assert torch.isfinite(found.curvature.matrix).all()


class Around(dist.Normal):
    """A distribution of a user's own, with other arguments."""

    def __init__(self, where):
        super().__init__(where, 1.0)

    def expand(self, batch_shape, _instance=None):
        return Around(self.loc.expand(batch_shape))


def test_distributions_that_cannot_be_made_again(oracle):
    def model(y=None):
        m = pyro.sample("m", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", 4):
            pyro.sample("y", Around(m), obs=y)

    program, vector = oracle.program(model, torch.ones(4))
    with pytest.raises(ValueError, match=r"Fisher information of Around.*loc, scale.*hessian"):
        oracle.fit(program, vector, (torch.ones(4),), structure="diag", rows="together")
    hessian = {"structure": "full", "curvature": "hessian", "rows": "together"}
    found = oracle.fit(program, vector, (torch.ones(4),), **hessian)
    torch.testing.assert_close(found.curvature.matrix, torch.eye(4))


def test_memory_is_checked_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(config_module, "available_memory", lambda device: 2**21)
    like = torch.zeros(0)
    check_memory(CurvatureConfig("kron"), 10**9, like)
    check_memory(CurvatureConfig("diag"), 10**4, like)
    check_memory(CurvatureConfig("full"), 100, like)
    with pytest.raises(
        MemoryError, match=r'"full" over 10,000 latents.*"kron" or "ekfac" or "diag",'
    ):
        check_memory(CurvatureConfig("full"), 10_000, like)
    with pytest.raises(MemoryError, match=r'"low_rank".*"kron" or "ekfac" or "diag",'):
        check_memory(CurvatureConfig("low_rank"), 10_000, like)
    monkeypatch.setattr(config_module, "available_memory", lambda device: None)
    check_memory(CurvatureConfig("full"), 10**6, like)


def test_under_no_grad(oracle):
    model, x, y = case("latent noise, several")
    program, vector = oracle.program(model, x, y)
    for curvature in ("ggn", "hessian", "empirical-fisher"):
        options = {"structure": "full", "curvature": curvature}
        expected = oracle.fit(program, vector, (x, y), **options)
        with torch.no_grad():
            found = oracle.fit(program, vector, (x, y), **options)
        torch.testing.assert_close(found.curvature.matrix, expected.curvature.matrix)
        torch.testing.assert_close(found.gradient, expected.gradient)


def test_the_bar_waits_for_passes_that_take_long(oracle, capsys, monkeypatch):
    model, x, y = case("several outputs")
    program, vector = oracle.program(model, x, y)
    config, at = CurvatureConfig("ekfac"), ProgramAtPoint(model, Subset(program.layout), vector)
    fit_curvature(at, (x, y), config, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a second at each look
    fit_curvature(at, (x, y), config, progress=True)
    assert "curvature, pass 2 of 2" in capsys.readouterr().err
    oracle.fit(program, vector, (x, y), structure="ekfac")
    assert capsys.readouterr().err == ""


def test_an_observation_of_no_datum_counts_once():
    """Each piece of a batch would count it again."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("z", dist.Normal(w, 0.5), obs=torch.tensor(0.3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x, y = torch.randn(8), torch.randn(8)
    program = Program(model, x, y)
    config = CurvatureConfig(structure="full")
    at = ProgramAtPoint(model, Subset(program.layout), torch.zeros(1))
    with working_memory(1):
        fitted = fit_curvature(at, (x, y), config)
    expected = x.square().sum()[None, None] + 4.0
    torch.testing.assert_close(fitted.curvature.matrix, expected)
