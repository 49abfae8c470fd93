"""What a program observes is read from its statements, whatever the numbers are."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.comparison import kind as kinds
from pyro_bdl.comparison.kind import observed
from pyro_bdl.errors import UnsupportedProgramError

pytestmark = pytest.mark.usefixtures("double")


def draws(size=2, center=0.0):
    torch.manual_seed(3)
    return bdl.Samples({"w": center + torch.randn(1, 20, size)})


def weights(size=2):
    return pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).to_event(1))


def nlpd(density):
    return -(density.logsumexp(0) - torch.tensor(float(len(density))).log()).mean().item()


def line(x, y=None):
    w = weights()
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def targets_first(y, x):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x * w[0], 0.5), obs=y)


def transposed(x, y):
    """Targets (N, 2), observed as (2, N): the data are the cells of both plates."""
    w = weights()
    with pyro.plate("numbers", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(w[:, None] * x, 0.5), obs=y.T)


def copied(x, y):
    w = weights()
    with pyro.plate("numbers", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(w[:, None] * x, 0.5), obs=y.T.exp().log())


def without_plate(x, y=None):
    return pyro.sample("y", dist.Normal(x @ weights(), 0.5), obs=y)


def pairs(x, y):
    """Two sites in one plate, of a program that takes an even number of rows."""
    w = weights()
    if len(x) % 2:
        raise ValueError("an even number of rows, please")
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(x * w[0], 0.5), obs=y["a"])
        pyro.sample("b", dist.Normal(x * w[1], 0.5), obs=y["b"])


def groups(one, two):
    w = weights()
    for name, y in (("one", one), ("two", two)):
        with pyro.plate(name, len(y)):
            pyro.sample(f"y {name}", dist.Normal(w[0], 0.5), obs=y)


def sequences_in_time(y):
    """Time first: (T, C), one plate of the sequences."""
    w = weights()
    with pyro.plate("sequences", y.shape[1]):
        for t in range(len(y)):
            pyro.sample(f"y{t}", dist.Normal(w[t % 2], 0.5), obs=y[t])


def joint(x, y=None):
    return pyro.sample("y", dist.Normal(x @ weights(), 0.5).to_event(1), obs=y)


SQUARE = torch.tensor([[0.3, -1.0], [-1.0, 0.8]]).double()  # equals its transpose
X, Y = torch.linspace(-1, 1, 12).double().reshape(6, 2), torch.linspace(-2, 1, 6).double()
ROWS = {
    "a plate": (line, (X, Y), True),
    "a plate, of a copy": (
        lambda x, y=None: line(x, None if y is None else y.clone()),
        (X, Y),
        True,
    ),
    "inputs that equal the targets": (targets_first, (Y, Y.clone()), True),
    "other inputs": (targets_first, (Y, Y + 1), True),
    "transposed": (transposed, (torch.ones(3), torch.randn(3, 2)), False),
    "transposed, symmetric": (transposed, (torch.ones(2).double(), SQUARE), False),
    "transposed, all equal": (transposed, (torch.ones(3), torch.zeros(3, 2)), False),
    "transposed copy, all equal": (copied, (torch.ones(3), torch.zeros(3, 2)), False),
    "no plate, the argument itself": (without_plate, (X, Y), True),
    "no plate, a column of it": (lambda x, y: without_plate(x, y[:, 1]), (X, X.clone()), True),
    "several sites": (pairs, (Y, {"a": Y, "b": Y}), True),
    "as many rows at the second site": (groups, (Y, Y + 1), False),
    "as many steps as sequences": (sequences_in_time, (SQUARE,), False),
    "joint": (joint, (X, Y), True),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_those_of_a_plate_or_of_a_view(case):
    model, args, by_rows = ROWS[case]
    found = observed(model, args, draws())
    assert found.kind.by_rows is by_rows
    assert found.kind.is_joint is (case == "joint")
    parts = observed(model, args, draws(), draws=2**19)  # in batches of two rows
    assert parts.kind.by_rows is by_rows
    torch.testing.assert_close(parts.y, found.y)


def test_inputs_that_equal_the_targets_are_no_targets():
    found = bdl.evaluate(targets_first, draws(), Y, Y.clone(), progress=False).scores
    w = draws().flat()["w"][:, :1]
    assert found["nlpd"] == pytest.approx(nlpd(dist.Normal(Y * w, 0.5).log_prob(Y)), rel=1e-9)


@pytest.mark.parametrize(
    "y", [SQUARE, SQUARE + 0.5 * torch.ones(2, 2).triu(1)], ids=["equal", "not"]
)
def test_the_cells_of_transposed_targets_are_scored_one_by_one(y):
    found = bdl.evaluate(transposed, draws(), torch.ones(2), y, progress=False)
    w = draws().flat()["w"][:, :, None]
    density = dist.Normal(w.expand(-1, 2, 2), 0.5).log_prob(y.T)
    assert found.scores["nlpd"] == pytest.approx(nlpd(density.flatten(1)), rel=1e-9)
    assert found.rows == 4


def test_folds_of_a_program_that_takes_even_numbers_of_rows():
    data = Y, {"a": Y + 0.1, "b": -Y}
    found = bdl.k_fold(lambda *rows: (pairs, draws()), *data, folds=3, progress=False)
    w = draws().flat()["w"]
    density = sum(
        dist.Normal(Y * w[:, [k]], 0.5).log_prob(data[1][name]) for k, name in enumerate("ab")
    )
    assert found.elpd == pytest.approx(-6 * nlpd(density), rel=1e-9)


def _bent(x, y=None):
    """A joint observation whose mean depends on the latent beyond 3 only."""
    w = pyro.sample("w", dist.Normal(torch.zeros(()), 0.1))
    mean = (w - 3).relu() * x[:, 0]
    noise = torch.eye(len(x)) * (1 + 0.1 * w.square())
    pyro.sample("y", dist.MultivariateNormal(mean, noise), obs=y)


def _process(x, y=None):
    length = pyro.sample("w", dist.LogNormal(torch.zeros(()), 0.1))
    kernel = (-((x - x.T) / length).square()).exp() + torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), kernel), obs=y)


@pytest.mark.parametrize(("model", "fixed"), [(_bent, False), (_process, True)])
def test_a_mean_is_fixed_where_no_latent_enters_it(model, fixed):
    posterior = bdl.Samples({"w": 4.0 + torch.rand(1, 20)})
    x = torch.linspace(-1, 1, 5)[:, None]
    found = bdl.evaluate(model, posterior, x, x[:, 0], progress=False)
    assert observed(model, (x, x[:, 0]), posterior).kind.fixed_mean is fixed
    mean = (posterior.latents["w"][0, :, None] - 3).relu() * x[:, 0]
    assert torch.allclose(found.function, mean) is not fixed


def test_a_plate_over_the_rows_of_the_first_batch_only_holds_no_rows():
    def model(x, y):
        w, rows = weights(), max(2, len(x))
        with pyro.plate("data", rows):
            pyro.sample("y", dist.Normal(x.new_zeros(rows) + w[0], 0.5), obs=y.exp().expand(rows))

    data = torch.ones(3), torch.ones(3)
    assert observed(model, data, draws()).kind.by_rows
    parts = observed(model, data, draws(), draws=2**19)
    assert len(parts.y) == 3
    with pytest.raises(UnsupportedProgramError, match="plates without a cell for each row"):
        observed(model, data, draws(), parts.kind, draws=2**19)


def test_one_run_on_each_batch_reads_all(monkeypatch):
    rows = []

    def model(x, y=None):
        rows.append(len(x))
        return line(x, y)

    observed(model, (X, Y), draws())
    assert rows == [6]
    rows.clear()
    monkeypatch.setattr(kinds, "_DRAWS_AT_ONCE", 8 * 1000 * 4)
    found = observed(model, (X, Y), draws())
    assert rows == [4, 2]
    assert torch.equal(found.y, Y)


@pytest.mark.filterwarnings("ignore:k-hat")
def test_sites_that_are_named_are_scored_alone():
    """Two sites in one plate: the score of one is that of the program of this one."""
    data, w = (Y, {"a": Y + 0.1, "b": -Y}), 0.1 * draws(2 * 5).latents["w"].reshape(100, 2)
    posterior = bdl.Samples({"w": w[None]})
    options = {"train": data, "progress": False}
    found = bdl.evaluate(pairs, posterior, *data, observed="b", **options)
    density = dist.Normal(Y * w[:, 1:], 0.5).log_prob(-Y)
    assert found.scores["nlpd"] == pytest.approx(nlpd(density), rel=1e-9)
    torch.testing.assert_close(found.y, -Y)
    assert torch.equal(found.loo.pointwise, bdl.diagnostics.loo(density[None]).pointwise)
    both = bdl.evaluate(pairs, posterior, *data, observed=("b", "a"), **options).scores["nlpd"]
    assert both == pytest.approx(bdl.evaluate(pairs, posterior, *data, **options).scores["nlpd"])
    with pytest.raises(ValueError, match=r"observed='c' is no observed site .* 'a', 'b'"):
        bdl.evaluate(pairs, posterior, *data, observed="c", progress=False)


def test_observed_inputs_of_which_some_are_missing_are_no_targets():
    """NLPD is that of y, as log mean p(y | x, w) has it; of both where both are named."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0), obs=x, obs_mask=x < 9)
            pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)

    torch.manual_seed(0)
    x, y = torch.randn(12), torch.randn(12)
    x[::4] = 10.0
    draws = {"w": torch.randn(100), "x_unobserved": torch.randn(100, 12)}
    filled = torch.where(x < 9, x, draws["x_unobserved"])
    density = dist.Normal(filled * draws["w"][:, None], 0.5).log_prob(y)
    found = bdl.compare(model, {"q": draws}, x, y, reference=None)
    assert found.table.loc["q", "nlpd"] == pytest.approx(nlpd(density), rel=1e-5)
    assert found.first.seen is None and "'x_observed' are inputs" in " ".join(found.notes)
    both = bdl.evaluate(model, draws, x, y, observed=("x_observed", "y"))
    assert both.seen == (21, 24) and not both.observed_inputs
