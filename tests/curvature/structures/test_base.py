"""The algebra that all structures share, against dense matrices."""

import copy
import functools
import math
import weakref
from dataclasses import asdict, replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature import LowRank
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.fit import fit_curvature
from pyro_bdl.curvature.jacobian.jacobian import BlockPosition, DenseBlock, Jacobian
from pyro_bdl.curvature.jacobian.linearization import VJP
from pyro_bdl.curvature.prior import PriorPrecision
from pyro_bdl.curvature.structures import STRUCTURES, structure_of
from pyro_bdl.curvature.structures.base import log_prob
from pyro_bdl.curvature.structures.diagonal import DiagonalPrecision
from pyro_bdl.curvature.structures.full import FullPrecision
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils import linear_algebra
from pyro_bdl.utils.linear_algebra import cholesky
from pyro_bdl.utils.trees import tree_leaves

# networks that torch cannot vectorize
pytestmark = pytest.mark.filterwarnings("ignore:.*#one-by-one")


class Tied(nn.Module):
    """Shared entries, a look-up, a norm, a scale, attention in part, a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.a = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.rand(3))
        self.r = nn.RNN(3, 3, batch_first=True)

    def forward(self, x):
        h = self.norm(self.a(self.a(self.embed(x)).tanh()) * self.scale)
        return self.r(h)[0][:, -1] @ self.a.weight[:2].T


def network(name):
    torch.manual_seed(4)
    if name == "mlp":
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3)
    if name == "conv":
        conv = nn.Conv2d(2, 4, 3, groups=2, padding=1)
        return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)), torch.randn(
            4, 2, 3, 3
        )
    if name == "attention":
        layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2))
        return net, torch.randn(5, 3, 4)
    if name == "wide":  # factors of fewer vectors than half their size
        return nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 2)), torch.randn(2, 9)
    if name == "wide table":
        return nn.Sequential(nn.Embedding(4, 9), nn.Flatten(), nn.Linear(9, 2)), torch.tensor(
            [[3], [1]]
        )
    if name == "wide conv":
        conv = nn.Conv1d(8, 12, 3, groups=2)
        return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)), torch.randn(2, 8, 4)
    return Tied(), torch.randint(0, 5, (6, 4))


class Case:
    """A precision, what it is as a matrix, and a Jacobian at the same point."""

    def __init__(self, oracle, name, structure, varied=False):
        net, x = network(name)
        model = models.Regression(bayesianize(net))
        y = torch.randn(len(x), 2)
        program, vector = oracle.program(model, x, y)
        subset = Subset(program.layout)
        config = CurvatureConfig(LowRank(5) if structure == "low_rank" else structure)
        at = ProgramAtPoint(model, subset, vector)
        self.curvature = fit_curvature(at, (x, y), config).curvature
        diagonal = torch.rand(program.size) + 0.5 if varied else torch.full((program.size,), 0.7)
        self.prior = PriorPrecision(diagonal)
        self.precision = self.curvature.with_prior(self.prior)
        self.size, self.sites = program.size, program.slices
        self.matrix = self.by_quadratic()
        linearization = at.linearize((x, y), {})
        vjp = VJP(linearization, [linearization.run.deterministic["f"]], len(x))
        columns = [[torch.eye(2)[k].expand(len(x), 2)] for k in range(2)]
        self.jacobian = vjp.jacobian(columns)

    def by_quadratic(self):
        """The matrix of the quadratic form, by polarization."""
        eye = torch.eye(self.size)
        single = self.precision.quadratic(eye)
        pairs = self.precision.quadratic(eye[:, None] + eye[None])
        return 0.5 * (pairs - single[:, None] - single[None])


@functools.cache
def _cached(oracle, name, structure):
    return Case(oracle, name, structure)


def made(oracle, name, structure):
    """A case of which there is one for all tests."""
    result = _cached(oracle, name, structure)
    torch.manual_seed(0)  # the test draws alike, whether it made the case or not
    return result


@pytest.fixture(params=["mlp", "conv", "attention", "tied", "wide", "wide table", "wide conv"])
def case(request, oracle, structure):
    return made(oracle, request.param, structure)


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_is_one_class(name):
    """Fields that the passes over data ask for, and an empty curvature."""
    structure = STRUCTURES[name]()
    kind = structure.curvature
    assert structure.name == name and structure_of(name) == structure
    assert structure_of(asdict(structure)) == structure  # as in files
    assert kind.passes >= 1 and structure.memory(10, torch.zeros(0)) >= 0
    assert kind.makes in ("rows", "entries", "factors")
    layout = Program(lambda: pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))).layout
    curvature = structure.empty(Subset(layout), torch.zeros(0), None)
    assert curvature.size == 4 and curvature.finish(None) is curvature
    torch.testing.assert_close(curvature.diagonal(), torch.zeros(4))
    precision = curvature.with_prior(PriorPrecision(torch.full((4,), 2.0)))
    torch.testing.assert_close(precision.variances(), torch.full((4,), 0.5))
    assert precision.independent >= (name == "diag") and precision.dense >= (name == "full")
    assert not (precision.independent and precision.dense)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_says_what_it_makes_of_a_datum(oracle, name, monkeypatch):
    """Rows over all latents are made by those alone that say so."""
    made_rows, rows = [], Jacobian.rows
    monkeypatch.setattr(Jacobian, "rows", lambda self: made_rows.append(1) or rows(self))
    net, x = network("attention")
    program, vector = oracle.program(models.Regression(bayesianize(net)), x, torch.zeros(5, 2))
    at = ProgramAtPoint(program.model, Subset(program.layout), vector)
    fitted = fit_curvature(at, (x, torch.zeros(5, 2)), CurvatureConfig(name)).curvature
    assert (not made_rows) or fitted.makes == "rows"


def test_log_determinant(case):
    """log det of the precision, as in the evidence (MacKay 1992, equation 2.3)."""
    torch.testing.assert_close(case.precision.logdet(), torch.logdet(case.matrix))


@pytest.mark.parametrize("count", [1, 2])
def test_log_determinants_from_eigenvalues(case, count):
    """One prior precision for all latents, or for every other site another one."""
    sites = list(case.sites.items())
    groups = [dict(sites[k::count]) for k in range(count)]
    spectra = case.curvature.spectra(groups)
    if spectra is None:
        return
    numbers, diagonal = torch.tensor([0.3, 2.0])[:count], torch.empty(case.size)
    uniform, expected = {}, torch.zeros(())
    for group, values, number in zip(groups, spectra, numbers, strict=True):
        assert len(values) == sum(part.stop - part.start for part in group.values())
        expected = expected + (0.8 * values + number).log().sum()
        for site, part in group.items():
            diagonal[part], uniform[site] = number, number
    posterior = case.curvature.with_prior(PriorPrecision(diagonal, uniform=uniform), 0.8)
    torch.testing.assert_close(posterior.logdet(), expected)


def test_variances_are_the_diagonal_of_the_inverse(case):
    expected = torch.linalg.inv(case.matrix).diagonal()
    torch.testing.assert_close(case.precision.variances(), expected, rtol=1e-9, atol=1e-10)
    for weights in (torch.full_like(expected, 0.7), torch.rand_like(expected)):
        trace = case.precision.weighted_trace(weights)
        torch.testing.assert_close(trace, weights @ expected, rtol=1e-9, atol=1e-10)


def test_covariances_of_functions(case):
    """J C J', the covariance of the linearized outputs (Immer et al. 2021)."""
    rows = case.jacobian.rows().transpose(0, 1)  # (n, K, p)
    covariance = torch.linalg.inv(case.matrix)
    expected = rows @ covariance @ rows.mT
    found = case.precision.covariance(case.jacobian)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    flat = rows.flatten(0, 1)
    own = case.precision.output_variances(case.jacobian)
    torch.testing.assert_close(own, expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)
    joint = case.precision.joint_covariance(case.jacobian)
    torch.testing.assert_close(joint, flat @ covariance @ flat.T, rtol=1e-9, atol=1e-10)


def test_precision_is_curvature_plus_prior(case):
    torch.testing.assert_close(
        case.matrix.diagonal(), case.curvature.diagonal() + 0.7, rtol=1e-9, atol=1e-9
    )
    twice = case.curvature.with_prior(case.prior, 2.0)
    torch.testing.assert_close(
        twice.quadratic(torch.eye(case.size)), 2 * case.curvature.diagonal() + 0.7
    )


def test_solve(case):
    x = torch.randn(2, 3, case.size)
    expected = x @ torch.linalg.inv(case.matrix)
    torch.testing.assert_close(case.precision.solve(x), expected, rtol=1e-9, atol=1e-9)


def test_densities(case):
    x = 0.1 * torch.randn(3, case.size)
    normal = torch.distributions.MultivariateNormal(
        torch.zeros(case.size), precision_matrix=case.matrix
    )
    torch.testing.assert_close(log_prob(case.precision, x), normal.log_prob(x))


@pytest.mark.parametrize("name", ["mlp", "tied", "wide", "wide table"])
def test_the_covariance_of_draws(oracle, structure, name):
    case = made(oracle, name, structure)
    draws = case.precision.sample(20_000)
    expected = torch.linalg.inv(case.matrix)
    variances = expected.diagonal()
    error = ((variances[:, None] * variances + expected.square()) / len(draws)).sqrt()
    found = draws.T @ draws / len(draws)
    assert ((found - expected).abs() <= 5.5 * error).all()
    assert (draws.mean(0).abs() <= 5 * (variances / len(draws)).sqrt()).all()


def test_functions_of_draws_and_rows_in_other_blocks(case):
    """Draws as their vectors; the same Jacobian as rows over whole sites."""
    draws = case.precision.draw(3)
    assert len(draws) == 3
    vectors = draws.vectors()
    torch.testing.assert_close(draws.apply(case.jacobian), case.jacobian.apply(vectors))
    rows = case.jacobian.rows()
    blocks = [
        DenseBlock(BlockPosition((name, -1), part), rows[..., part])
        for name, part in case.sites.items()
    ]
    other = replace(case.jacobian, blocks=blocks)
    close = torch.testing.assert_close
    close(draws.apply(other), case.jacobian.apply(vectors))
    close(case.precision.covariance(other), case.precision.covariance(case.jacobian))
    close(case.precision.joint_covariance(other), case.precision.joint_covariance(case.jacobian))
    own = case.precision.output_variances(other)
    close(own, case.precision.output_variances(case.jacobian).expand_as(own))


@pytest.mark.parametrize("name", ["mlp", "tied", "wide", "wide table"])
def test_a_prior_that_varies_among_weights(oracle, structure, name):
    case = Case(oracle, name, structure, varied=True)
    diagonal = case.curvature.diagonal() + case.prior.diagonal
    if structure in ("kron", "ekfac"):  # in the eigenbasis: the trace of every block is kept
        for position, _ in case.precision.blocks:
            where = position.indices
            torch.testing.assert_close(case.matrix.diagonal()[where].sum(), diagonal[where].sum())
    else:
        torch.testing.assert_close(case.matrix.diagonal(), diagonal)
    torch.testing.assert_close(case.precision.logdet(), torch.logdet(case.matrix))
    expected = torch.linalg.inv(case.matrix).diagonal()
    torch.testing.assert_close(case.precision.variances(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(oracle, structure, dtype):
    case = made(oracle, "mlp", structure)
    expected = case.precision.variances()
    curvature = copy.deepcopy(case.curvature).to(dtype)
    precision = curvature.with_prior(PriorPrecision(case.prior.diagonal.to(dtype)))
    x = torch.zeros(2, case.size, dtype=dtype)
    for value in (
        precision.logdet(),
        precision.sample(2),
        precision.quadratic(x),
        precision.variances(),
        precision.solve(x),
    ):
        assert value.dtype == dtype
    torch.testing.assert_close(precision.variances().double(), expected, rtol=1e-3, atol=1e-5)


# Factorization


def test_jitter_only_after_a_failure_and_said():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(cholesky(matrix, "it"), matrix.sqrt(), rtol=1e-15, atol=0.0)
    singular = torch.ones(3, 3)
    with pytest.warns(BdlWarning, match=r"it is not positive definite in float64.*added") as caught:
        factor = cholesky(singular, "it")
    assert len(caught) == 1
    assert (factor @ factor.T - singular).abs().max() < 1e-10
    assert cholesky(matrix.float(), "it").dtype == torch.float64


def test_what_cannot_be_factorized():
    with pytest.raises(ValueError, match=r"lowest eigenvalue -1\).*Gauss-Newton"):
        cholesky(torch.diag(torch.tensor([1.0, -1.0])), "it")
    with pytest.raises(ValueError, match="it holds NaN or infinity"):
        cholesky(torch.tensor([[float("nan")]]), "it")
    with pytest.raises(ValueError, match=r"lowest entry 0\).*finite variance"):
        DiagonalPrecision(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="not positive"):
        DiagonalPrecision(torch.tensor([1.0, float("nan")]))


def test_a_badly_scaled_matrix_in_float32():
    """Factors in float64 resolve 1e-6 beside 1e6; float32 does not."""
    q = torch.linalg.qr(torch.randn(4, 4))[0]
    matrix = q @ torch.diag(torch.tensor([1e4, 1.0, 1.0, 1e-2])) @ q.T
    precision = FullPrecision(matrix.float())
    exact = torch.linalg.inv(matrix.float().double()).diagonal()
    torch.testing.assert_close(precision.variances().double(), exact, rtol=1e-5, atol=0)
    assert math.isfinite(precision.logdet())


# Memory


class Peak(TorchDispatchMode):
    """The most bytes that tensors, made in it, have at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _note(self, storage):
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.known:
            return

        def freed():
            self.now -= size
            self.known.discard(place)

        self.now += size
        self.known.add(place)
        weakref.finalize(storage, freed)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_memory_is_what_a_fit_takes(structure, dtype, monkeypatch):
    monkeypatch.setattr(linear_algebra, "is_transformed", lambda: False)  # the mode is no trace
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 60, dtype=dtype), nn.Tanh(), nn.Linear(60, 2, dtype=dtype))
    x, y = torch.randn(20, 30, dtype=dtype), torch.randn(20, 2, dtype=dtype)
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 20, 2)]
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    size, kind = guide.require_layout().size, STRUCTURES[structure]()
    with Peak() as peak:
        posterior = guide.laplace_approximation(batches)
        posterior.precision.variances()
        posterior.precision.sample(4)
        posterior.precision.logdet()
    stated = 1.1 * kind.memory(size, x, 40 if kind.stores_rows else 0)
    if stated:
        assert 0.7 * stated < peak.most < 1.02 * stated
    else:
        assert peak.most < 30 * size * x.element_size()
