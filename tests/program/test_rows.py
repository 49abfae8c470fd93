"""Rows of data alone and together: what is compared, when, and what a program has to declare."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import LinearizedPredictive, Program
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer, AutoMeanField, AutoSubnetwork
from pyro_bdl.optim import GaussNewton_ELBO
from pyro_bdl.program.trace import record

pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
DEPEND = "depend on each other"


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def linear(features):
    """y_n = w . features(x)_n with noise 0.5, and the rows of its design matrix."""

    def model(x, y=None, *flags):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(features(x, *flags) @ w, 0.5), obs=y)

    return model


def group_means(x):
    """The mean over all rows with the same last number."""
    same = (x[:, None, 2] == x[:, 2]).double()
    return (same / same.sum(1, keepdim=True)) @ x[:, :2]


def gated(x):
    """A mean over the rows, where a gate is open."""
    return x[:, :2] + (x[:, 2:] > 90.0) * x[:, :2].mean(0)


def by_maximum(x):
    return x[:, :2] / x[:, :2].abs().amax(0)


def last_if_many(x):
    return x[:, :2] + (x[-1:, :2] if len(x) > 16 else 0.0)


X = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
X[:, 2] = torch.arange(40) % 20  # pairs (n, n + 20)
X[35, 2] = 100.0
X[30, 0] = 9.0
Y = X[:, 0].sin()
COUPLED = {f.__name__: f for f in (group_means, gated, by_maximum, last_if_many)}


def precision(design):
    return design.T @ design / 0.25 + torch.eye(2)


def dense(posterior):
    return torch.linalg.inv(posterior.precision.solve(torch.eye(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_round_as_the_weights_do_whatever_the_output_is_cast_to(dtype):
    """A difference of 1e-5 of the outputs is the rounding of float32, and none of float64."""
    net = bdl.bayesianize(nn.Linear(3, 3).to(dtype))

    def model(x, y=None):
        logits = (net(x) + (1e-5 * x[:, :1] if len(x) > 1 else 0.0) * torch.arange(3)).double()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    x, y = torch.randn(20, 3, dtype=dtype), torch.randint(3, (20,))
    guide = AutoLaplaceGGN(model, structure="kron").prototype(x, y)
    if dtype == torch.float64:
        with pytest.raises(UnsupportedProgramError, match=DEPEND):
            guide.laplace_approximation((x, y))
    else:
        assert guide.laplace_approximation((x, y)).num_data == 20


# Curvature


def of_all_rows(x, y=None):
    """A plate that holds all rows, also where the program gets one of them."""
    w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("data", 50, subsample=Y[:5]):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.filterwarnings("ignore:.*#number-of-data")
def test_a_plate_with_all_cells_for_one_row_is_refused_or_declared():
    guide = AutoLaplaceGGN(of_all_rows, structure="full").prototype(X[:5], Y[:5])
    with pytest.raises(UnsupportedProgramError, match="'y' has 5 cells for one row"):
        guide.laplace_approximation((X[:5], Y[:5]))
    posterior = guide.laplace_approximation((X[:5], Y[:5]), rows="together")
    assert posterior.variances().item() == pytest.approx(1 / 51)
    elbo = TemperedTraceMeanField_ELBO(estimator="local_reparameterization")
    with pytest.raises(UnsupportedProgramError, match="'y' has 5 cells for one row"):
        elbo.loss(of_all_rows, AutoMeanField(of_all_rows), X[:5], Y[:5])


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_depend_on_each_other_anywhere_are_refused_or_declared(name):
    features = COUPLED[name]
    guide = AutoLaplaceGGN(linear(features), structure="full").prototype(X, Y)
    with pytest.raises(UnsupportedProgramError, match=rf'{DEPEND}.*site \'y\'.*rows="together"'):
        guide.laplace_approximation((X, Y))
    with pytest.raises(UnsupportedProgramError, match=DEPEND):
        Program(linear(features), X, Y).check(rows="alone")
    found = guide.laplace_approximation((X, Y), rows="together")
    torch.testing.assert_close(dense(found), precision(features(X)))
    moments = LinearizedPredictive(linear(features), found).parameter_moments(X)["y"]
    spread = (features(X) @ torch.linalg.inv(precision(features(X))) * features(X)).sum(1)
    torch.testing.assert_close(moments.variance["loc"], spread)


def test_groups_that_meet_in_a_later_batch_are_refused():
    alone = [(X[i : i + 5], Y[i : i + 5]) for i in (0, 5, 10)]
    guide = AutoLaplaceGGN(linear(group_means), structure="full").prototype(*alone[0])
    guide.laplace_approximation(alone)
    pairs = torch.tensor([15, 35 - 1, 14])
    with pytest.raises(UnsupportedProgramError, match=r"row 1 alone.*beside the 3 rows"):
        guide.laplace_approximation([*alone, (X[pairs], Y[pairs])])


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_outputs_are_compared_relative_to_their_own_size(scale):
    """A small output that depends on other rows stands beside a large one."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        centered = (x[:, 0] - x[:, 0].mean()) * w[1]
        means = torch.stack([scale * (1.0 + 0.01 * x[:, 0] * w[0]), centered], 1)
        noise = torch.tensor([scale, 1.0])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(means, noise).to_event(1), obs=y)

    guide = AutoLaplaceGGN(model, structure="full").prototype(X, X[:, :2])
    with torch.no_grad():
        guide.loc.copy_(torch.ones(2))
    with pytest.raises(UnsupportedProgramError, match=DEPEND):
        guide.laplace_approximation((X, X[:, :2]))
    found = guide.laplace_approximation((X, X[:, :2]), rows="together").variances()[1]
    centered = X[:, 0] - X[:, 0].mean()
    torch.testing.assert_close(found, 1.0 / (1.0 + centered.square().sum()))


def flagged(x, center=False):
    return x[:, :2] - x[:, :2].mean(0) if center else x[:, :2]


@pytest.mark.parametrize("before", [1, 4])
def test_arguments_that_are_no_tensors_have_rows_of_their_own(before):
    """Whatever was called before: with the flag the rows depend on each other."""
    model = linear(flagged)
    guide = AutoLaplaceGGN(model, structure="full").prototype(X, Y)
    posterior = guide.laplace_approximation((X, Y))
    predictive = LinearizedPredictive(model, posterior)
    Program(model, X, Y, False).check(rows="alone")
    for _ in range(before):
        predictive.parameter_moments(X)
    with pytest.raises(UnsupportedProgramError, match=DEPEND):
        predictive.parameter_moments(X, None, True)
    batches = [(X[:5], Y[:5], False)] * before + [(X[5:], Y[5:], True)]
    with pytest.raises(UnsupportedProgramError, match=DEPEND):
        guide.laplace_approximation(batches)
    found = guide.laplace_approximation(batches, rows="together")
    design = torch.cat([*[X[:5, :2]] * before, flagged(X[5:], True)])
    torch.testing.assert_close(dense(found), precision(design))


def test_predictions_compare_the_first_batch_of_each_kind_and_number_of_rows():
    """The network runs once in later ones; what was refused is refused again."""
    calls = []

    def features(x):
        calls.append(len(x))
        return group_means(x)

    model = linear(features)
    guide = AutoLaplaceGGN(model, structure="full").prototype(X[:5], Y[:5])
    predictive = LinearizedPredictive(model, guide.laplace_approximation((X[:5], Y[:5])))
    for _ in range(3):  # rows n and n + 20 are of one group
        with pytest.raises(UnsupportedProgramError, match=DEPEND):
            predictive.parameter_moments(X)
    for rows, expected in ((7, [7, 1]), (7, [1]), (6, [6, 1]), (7, [1])):
        calls.clear()
        moments = predictive.parameter_moments(X[:rows])["y"]
        assert calls == expected
        torch.testing.assert_close(moments.mean["loc"], X[:rows, :2] @ predictive.posterior.loc)


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_the_batch_are_declared(track, affine):
    norm = nn.BatchNorm1d(2, affine=affine, track_running_stats=track)
    net = nn.Sequential(nn.Linear(3, 2), norm, nn.Linear(2, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5)
    guide = AutoLaplaceGGN(model, structure="full").prototype(X, Y)
    if track:
        guide.laplace_approximation((X, Y))
        return
    with pytest.raises(UnsupportedProgramError, match='rows="together"'):
        guide.laplace_approximation((X, Y))
    posterior = guide.laplace_approximation((X, Y), rows="together")
    program = Program(model.eval(), X, Y)

    def f(vector):
        return program.run(program.constrain(vector)[0]).deterministic["f"].reshape(-1)

    rows = torch.autograd.functional.jacobian(f, guide.loc.detach())
    torch.testing.assert_close(posterior.curvature.matrix, rows.T @ rows / 0.25)


def test_a_program_of_so_many_rows_and_no_others_is_declared():
    offsets = torch.linspace(0, 1, 40)
    model = linear(lambda x: x[:, :2] + offsets[:, None])
    guide = AutoLaplaceGGN(model, structure="full").prototype(X, Y)
    with pytest.raises(UnsupportedProgramError, match=r'cannot run on one.*rows="together"'):
        guide.laplace_approximation((X, Y))
    found = guide.laplace_approximation((X, Y), rows="together")
    torch.testing.assert_close(dense(found), precision(X[:, :2] + offsets[:, None]))


def test_a_plate_of_fixed_size_takes_its_rows_from_the_statements():
    """No declaration: each row has its own index in the plate."""
    offsets = torch.linspace(0, 1, 40)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 40) as index:
            design = x[:, :2] * (1.0 + offsets[index])[:, None]
            pyro.sample("y", dist.Normal(design @ w, 0.5), obs=y)

    posterior = AutoLaplaceGGN(model, structure="full").laplace_approximation((X, Y))
    torch.testing.assert_close(dense(posterior), precision(X[:, :2] * (1.0 + offsets)[:, None]))


def test_a_scale_by_hand_is_that_of_the_batch():
    """poutine.scale(N / rows): a row alone would be scaled by N."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)), poutine.scale(scale=80 / len(x)):
            pyro.sample("y", dist.Normal(x[:, :2] @ w, 0.5), obs=y)

    posterior = AutoLaplaceGGN(model, structure="full").laplace_approximation((X, Y))
    torch.testing.assert_close(dense(posterior), 2 * X[:, :2].T @ X[:, :2] / 0.25 + torch.eye(2))


SINGLE = [name for name, kind in STRUCTURES.items() if kind.curvature.takes_single_rows]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_of_single_rows_refuse_rows_together(structure):
    guide = AutoLaplaceGGN(linear(group_means), structure=structure, rows="together")
    if structure in SINGLE:
        with pytest.raises(UnsupportedProgramError, match=f'"{structure}" takes the rows'):
            guide.laplace_approximation((X, Y))
    else:
        assert torch.isfinite(guide.laplace_approximation((X, Y)).sample_vectors(2)).all()


@pytest.mark.parametrize(
    "guide",
    [
        lambda model: AutoSubnetwork(model, size=2, rows="together"),
        lambda model: AutoLastLayer(model, rows="together"),
        lambda model: AutoLaplaceGGN(model, structure="full", rows="together"),
    ],
)
def test_guides_keep_what_is_declared(guide, tmp_path):
    model = linear(group_means)
    posterior = guide(model).laplace_approximation((X, Y))
    path = posterior.save(tmp_path / "posterior")
    for found in (posterior, bdl.load_posterior(path, model)):
        torch.testing.assert_close(dense(found), precision(group_means(X)))
        assert found.config.rows == "together"
        assert torch.isfinite(
            LinearizedPredictive(model, found).parameter_moments(X)["y"].mean["loc"]
        ).all()


def test_an_unknown_declaration_is_named():
    with pytest.raises(ValueError, match="rows must be one of 'alone', 'together', got 'batch'"):
        AutoLaplaceGGN(linear(flagged), rows="batch")


# Estimators and squares of gradients, in the first pass over the data


def _elbo(name):
    if name == "squares":
        return GaussNewton_ELBO()
    kind = CompiledELBO if name == "compiled" else TemperedTraceMeanField_ELBO
    return kind(estimator="flipout")


@pytest.mark.parametrize("name", ["estimator", "compiled", "squares"])
def test_the_first_pass_over_the_data_is_compared(name):
    """Each batch until N rows were seen, and no more; of squares in training mode the value has a
    run of its own."""
    net = nn.Linear(2, 1)
    calls = []

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            calls.append(len(x))
            return self.net(group_means(x))

    model = bdl.models.Regression(bdl.bayesianize(Grouped()), noise=0.5, num_data=40)
    guide = AutoMeanField(model).prototype(X, Y)
    bound = _elbo(name)
    loss = bound(model, guide)
    loss(X[:19], Y[:19])
    pairs = torch.tensor([0, 20, 3])
    with pytest.raises(UnsupportedProgramError, match=DEPEND):
        loss(X[pairs], Y[pairs])
    for _ in range(4):
        loss(X[:10], Y[:10])
    calls.clear()
    loss(X[:10], Y[:10])
    assert calls == {"estimator": [1], "squares": [1, 10], "compiled": []}[name]


@pytest.mark.parametrize("estimator", ["flipout", "local_reparameterization"])
@pytest.mark.parametrize("first", [-1.0, 1.0])
def test_a_term_counts_by_its_plates_whatever_its_value(estimator, first):
    """A penalty of a latent that is 0 at the first draw, and a bonus for each datum."""
    bnn = bdl.bayesianize(nn.Linear(2, 1))

    def model(x, y=None):
        s = pyro.sample("s", dist.Normal(torch.zeros(()), 1.0))
        pyro.factor("penalty", -10.0 * s.relu())
        f = bnn(x[:, :2])[:, 0]
        with pyro.plate("data", len(x)):
            pyro.factor("bonus", s.relu().expand(len(x)))
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = AutoMeanField(model, init_scale=1e-9).prototype(X, Y)
    place, found = guide.layout.slices["s"], []
    for each in (None, estimator):
        elbo = TemperedTraceMeanField_ELBO(estimator=each)
        for value in (first, 3.0):
            with torch.no_grad():
                guide.loc[place] = value
            elbo.loss(model, guide, X, Y)
        found.append(float(elbo.expected_log_likelihood))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("estimator", ["flipout", "local_reparameterization"])
def test_a_term_of_the_rows_outside_of_their_plate_is_refused(estimator):
    """Even where it is 0 at the first draw."""
    bnn = bdl.bayesianize(nn.Linear(2, 1))

    def model(x, y=None):
        f = bnn(x[:, :2])[:, 0]
        pyro.factor("penalty", -(f - 1e6).relu().sum())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = AutoMeanField(model).prototype(X, Y)
    with pytest.raises(UnsupportedProgramError, match="'penalty' depends on the rows but stands"):
        TemperedTraceMeanField_ELBO(estimator=estimator).loss(model, guide, X, Y)


# Random numbers are told from rows that depend on each other


@pytest.mark.parametrize("rows", ["alone", "together"])
def test_random_numbers_besides_the_statements(rows):
    model = linear(lambda x: x[:, :2] + torch.randn(2))
    with pytest.raises(UnsupportedProgramError, match=r"'y' is .* in one run and .* in another"):
        AutoLaplaceGGN(model, structure="full", rows=rows).laplace_approximation((X, Y))
    assert record(model, {"w": torch.zeros(2)}, (X, Y)).observed
