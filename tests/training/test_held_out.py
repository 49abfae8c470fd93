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
    with pytest.raises(ValueError, match="a share between 0 and 1, got 1"):
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
