"""Early stopping on rows that are held back from training."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.training.descent import Training
from pyro_bdl.training.held_out import EarlyStopping, HeldOut
from pyro_bdl.training.svi import train


class Mean(torch.nn.Module):
    """y ~ Normal(w, 1), w ~ Normal(0, 1)."""

    num_data = 20

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", 20, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def data():
    y = torch.linspace(-1, 2, 20, dtype=torch.float64)
    return y[:, None], y


def ensemble(*values):
    guide = bdl.guides.AutoEnsemble(Mean(), size=len(values))
    guide.prototype(*data())
    with torch.no_grad():
        guide.locs.copy_(torch.tensor(values, dtype=torch.float64)[:, None])
    return guide


def test_the_parts_are_all_rows():
    x, y = data()
    (x_kept, y_kept), (_, y_back) = HeldOut(0.25).split((x, y))
    assert len(y_kept) == 15 and len(y_back) == 5
    assert torch.equal(torch.cat([y_kept, y_back]).sort().values, y)
    assert torch.equal(x_kept[:, 0], y_kept)
    with pytest.raises(ValueError, match="leave rows on both sides"):
        HeldOut(0.01).split((x, y))
    with pytest.raises(ValueError, match="the share of rows, must lie between 0 and 1"):
        HeldOut(1)


def test_each_member_keeps_its_own_best_step():
    """The score is the exact mean log likelihood; the best parameters come back."""
    x, y = data()
    guide = ensemble(0.0, 3.0)
    options = HeldOut(0.2, patience=1, check_every=1)
    held = EarlyStopping(Mean(), guide, (x[:4], y[:4]), options, 5)
    path = [(0.0, 3.0), (-0.7, 5.0), (1.0, -0.8), (2.0, 0.0), (3.0, 1.0)]
    done = []
    for step, values in enumerate(path):
        with torch.no_grad():
            guide.locs.copy_(torch.tensor(values, dtype=torch.float64)[:, None])
        held.after(step)
        done.append(held.done)
    expected = dist.Normal(torch.tensor(path)[..., None].double(), 1.0).log_prob(y[:4]).mean(-1)
    assert done == [False, False, False, True, True]
    run = held.restored(Training(torch.zeros(5), 4, False))
    assert torch.allclose(run.held_out, expected) and run.best_steps.tolist() == [1, 2]
    assert guide.locs[:, 0].tolist() == [-0.7, -0.8]


def test_training_ends_at_the_best_step_and_knows_all_rows():
    x, y = data()
    guide = ensemble(-4.0, 6.0)
    torch.manual_seed(0)
    found = train(
        Mean(), guide, x, y, steps=400, held_out=HeldOut(0.3, patience=2, check_every=5),
        learning_rate=0.3, batch_size=7,
    )  # fmt: skip
    assert len(found.losses) < 400
    assert found.held_out.shape[1] == 2
    assert torch.equal(found.best_steps, 5 * (found.held_out.argmax(0) + 1))


def test_a_guide_of_one_posterior_is_stopped_by_its_predictive_density():
    x, y = data()
    guide = bdl.guides.AutoMeanField(Mean())
    found = train(Mean(), guide, x, y, steps=20, held_out=HeldOut(0.3, check_every=10))
    assert found.held_out.shape == (2, 1)
    assert found.held_out.isfinite().all()
    first, last = (f"{found.losses[place]:.5g}" for place in (0, -1))
    step = found.best_steps.item()
    assert repr(found).startswith("Training(20 steps of ")
    assert repr(found).endswith(f"rows, loss {first} to {last}, parameters of step {step})")


def stating(how, num_data):
    """y ~ Normal(w x, 0.5), w ~ Normal(0, 1), in a program that states N in one of three ways."""
    if how == "num_data":
        net = bdl.bayesianize(torch.nn.Linear(1, 1, bias=False, dtype=torch.float64))
        return bdl.models.Regression(net, noise=0.5, num_data=num_data)

    def model(x, y=None):
        w = pyro.sample("weight", dist.Normal(x.new_zeros(1, 1), 1.0).to_event(2))
        # a plate of another kind, of which each run sees a part
        with pyro.plate("all", 7, subsample_size=2, dim=-2), pyro.plate("part", 2, dim=-1):
            pyro.sample("other", dist.Normal(0.0, 1.0), obs=x.new_zeros(2, 2))
        size = {"plate": num_data, "rows": len(x)}[how]
        with pyro.plate("data", size, subsample_size=len(x), dim=-1):
            pyro.sample("y", dist.Normal((x @ w)[:, 0], 0.5), obs=y)

    return model


def line():
    torch.manual_seed(3)
    x = torch.randn(60, 1, dtype=torch.float64)
    return x, x[:, 0] + 0.5 * torch.randn(60, dtype=torch.float64)


STATED = [("num_data", None), ("num_data", 9), ("plate", None), ("plate", 9), ("rows", None)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("how", "batch_size"), STATED)
def test_the_objective_is_that_of_the_rows_that_are_kept(how, batch_size, compiled):
    """-log p(w) - K/B sum_b log p(y_b | w) at the start, K = 36 the rows that are kept; a plate of
    another kind counts in full."""
    x = torch.full((60, 1), 1.3, dtype=torch.float64)
    y = x[:, 0] - 2.0  # all rows alike, so that any batch will do
    model = stating(how, 60)
    guide = bdl.guides.AutoMAP(model).prototype(x, y)
    w = guide.median()["weight"].reshape(()).clone()
    elbo = bdl.elbo.CompiledELBO() if compiled else None
    run = train(
        model, guide, x, y, steps=1, held_out=HeldOut(0.4, check_every=1), batch_size=batch_size,
        elbo=elbo,
    )  # fmt: skip
    joint = dist.Normal(0.0, 1.0).log_prob(w) + 36 * dist.Normal(1.3 * w, 0.5).log_prob(y[0])
    if how != "num_data":
        joint = joint + 4 * 7 / 2 * dist.Normal(0.0, 1.0).log_prob(torch.zeros(()))
    assert run.losses[0].item() == pytest.approx(-joint.item())


@pytest.mark.parametrize(("how", "batch_size"), STATED)
def test_the_optimum_is_the_posterior_of_the_rows_that_are_kept(how, batch_size):
    """1 / sd^2 = 1 + sum_k x_k^2 / 0.25, mean = sd^2 sum_k x_k y_k / 0.25."""
    x, y = line()
    model = stating(how, 60)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    options = HeldOut(0.4, check_every=200)
    train(
        model, guide, x, y, steps=200, learning_rate=0.1, held_out=options,
        batch_size=batch_size, elbo=bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=4),
    )  # fmt: skip
    (x_kept, y_kept), _ = options.split((x, y))
    precision = 1 + x_kept.square().sum() / 0.25
    assert guide.scale.item() == pytest.approx(precision.rsqrt().item(), rel=0.1)
    mean = (x_kept[:, 0] @ y_kept / 0.25 / precision).item()
    assert guide.loc.item() == pytest.approx(mean, abs=0.03)


def test_latents_of_single_rows_and_no_rows_are_refused():
    x, y = line()

    def local(x, y=None):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    with pytest.raises(bdl.errors.UnsupportedProgramError, match="'z' has a value for every row"):
        train(local, bdl.guides.AutoMeanField(local), x, y, steps=1, held_out=0.2)

    def alone():
        local(x, y)

    with pytest.raises(ValueError, match="held_out needs data among"):
        train(alone, bdl.guides.AutoMeanField(alone), steps=1, held_out=0.2)


FAMILIES = ["AutoMAP", "AutoEnsemble"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [(0,), (2,), (4,), (0, 1, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_that_is_not_finite_is_never_the_best(family, where, bad):
    """The others decide, whenever it comes; it counts against the patience, and is said."""
    x, y = data()
    model = Spread()
    guide = getattr(bdl.guides, family)(model).prototype(x, y)
    held = EarlyStopping(model, guide, (x, y), HeldOut(0.5, patience=3, check_every=1), 5)
    scores = [-3.0, -4.0, -2.0, -1.0, -5.0]
    for place in where:
        scores[place] = bad
    held._score = lambda: torch.tensor([scores[len(held.scores)]], dtype=torch.float64)
    for step in range(5):
        with torch.no_grad():
            model.s.fill_(step + 1.0)
        held.after(step)
        assert not held.done or where == (0, 1, 4)
    with pytest.warns(bdl.errors.BdlWarning, match="never the best") as told:
        run = held.restored(Training(torch.zeros(5), 20, False))
    assert f"at {len(where)} of 5 checks, after steps {', '.join(map(str, where))}:" in str(
        told[0].message
    )
    assert run.best_steps.tolist() == [3] and model.s.item() == 4.0
    assert run.best_scores.tolist() == [-1.0]


def test_members_of_an_ensemble_without_a_finite_score_keep_their_own_best():
    """log N(y; w, 1) of a member at NaN is NaN, and the other member's step is its own."""
    x, y = data()
    guide = ensemble(0.0, 0.0)
    held = EarlyStopping(Mean(), guide, (x[:4], y[:4]), HeldOut(0.2, check_every=1), 3)
    path = [(torch.nan, 3.0), (-0.7, torch.nan), (4.0, -0.8)]
    for step, values in enumerate(path):
        with torch.no_grad():
            guide.locs.copy_(torch.tensor(values, dtype=torch.float64)[:, None])
        held.after(step)
    with pytest.warns(bdl.errors.BdlWarning, match="2 of 3 checks, after steps 0, 1:"):
        run = held.restored(Training(torch.zeros(3), 4, False))
    assert run.best_steps.tolist() == [1, 2] and guide.locs[:, 0].tolist() == [-0.7, -0.8]
    expected = [dist.Normal(w, 1.0).log_prob(y[:4]).mean().item() for w in (-0.7, -0.8)]
    assert run.best_scores.tolist() == pytest.approx(expected)


class Spread(torch.nn.Module):
    """y ~ Normal(w, s), w ~ Normal(0, 1); a buffer counts the calls."""

    def __init__(self):
        super().__init__()
        self.s = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, self.s), obs=y)


@pytest.mark.parametrize("family", [bdl.guides.AutoMAP, bdl.guides.AutoEnsemble])
def test_the_program_comes_back_with_the_guide(family):
    """The pair that is left has the best score that was seen."""
    x, y = data()
    model = Spread()
    guide = family(model)
    guide.prototype(x, y)
    held = EarlyStopping(model, guide, (x, y), HeldOut(0.5, check_every=1), 4)
    for step, s in enumerate((1.0, 0.9, 1e-3)):
        with torch.no_grad():
            model.s.fill_(s)
            model.calls.fill_(step)
            for parameter in guide.parameters():
                parameter.fill_(0.5 + 0.01 * step)
        held.after(step)
    run = held.restored(Training(torch.zeros(4), 20, False))
    assert run.best_steps.tolist() == [1]
    assert (model.s.item(), model.calls.item()) == (0.9, 1.0)
    held.after(3)
    assert held.scores[3].item() == held.scores[1].item() == held.table.max()


def test_rows_that_a_mask_leaves_out_are_not_scored():
    x, y = data()
    seen = torch.arange(4) > 0

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w, 1.0).mask(seen), obs=y)

    guide = bdl.guides.AutoMAP(model).prototype(x[:4], y[:4])
    with torch.no_grad():
        guide.loc.fill_(0.3)
    held = EarlyStopping(model, guide, (x[:4], y[:4]), HeldOut(0.2, check_every=1), 1)
    held.after(1)
    exact = dist.Normal(0.3, 1.0).log_prob(y[1:4]).mean()
    torch.testing.assert_close(held.table[0, 0], exact)


def test_rows_in_a_plate_that_is_not_the_first_dimension():
    """Targets (N, 2) that the program observes as (2, N), of which a mask leaves out some rows: the
    score is the mean of the other rows' densities, each the sum over its two numbers."""
    torch.manual_seed(0)
    x, y, seen = torch.randn(6), torch.randn(6, 2), torch.arange(6) > 2

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        numbers, rows = pyro.plate("numbers", 2, dim=-2), pyro.plate("data", len(x), dim=-1)
        with numbers, rows, pyro.poutine.mask(mask=seen.expand(2, 6)):
            pyro.sample("y", dist.Normal(w[:, None] * x, 0.5), obs=y.T)

    guide = bdl.guides.AutoMAP(model).prototype(x, y)
    stopping = EarlyStopping(model, guide, (x, y), HeldOut(0.5), 1)
    stopping.after(0)
    density = dist.Normal(guide.median()["w"] * x[:, None], 0.5).log_prob(y).sum(1)
    torch.testing.assert_close(stopping.table[0, 0], density[seen].mean())
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="no plate of an observed site"):
        EarlyStopping(joint, bdl.guides.AutoMAP(joint), (x, y), HeldOut(0.5), 1)


def joint(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(w * x, 0.5).to_event(1), obs=y[:, 0])
