"""Data in batches that are read as they are needed: a loader says what tensors of its order say."""

import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import pyro_bdl as bdl
from pyro_bdl.errors import ArgumentError, BdlWarning, FailedStepError
from pyro_bdl.training import checkpoint

N, SIZE = 22, 5  # the last batch has two rows
D = {"dtype": torch.float64}


@pytest.fixture
def data():
    torch.manual_seed(5)
    x = torch.randn(N, 2, **D)
    return x, x.sum(1) + 0.3 * torch.randn(N, **D)


def program(num_data=N):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1, bias=False, **D)
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=num_data)


def plain(x, y=None):
    """A program that states N by its plate."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", N, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


FORMS = {
    "loader": lambda x, y, size: DataLoader(TensorDataset(x, y), batch_size=size),
    "list": lambda x, y, size: list(zip(x.split(size), y.split(size), strict=True)),
    "iterable": lambda x, y, size: Batches(FORMS["list"](x, y, size)),
    "function": lambda x, y, size: lambda: iter(FORMS["list"](x, y, size)),
    "by name": lambda x, y, size: [
        {"x": a, "y": b} for a, b in FORMS["list"](x, y, size)
    ],
}  # fmt: skip


def by_hand(model, x, y, steps):
    """The MAP after steps of Adam under half a cosine on batches in their order, each of b rows
    with the factor N / b."""
    guide = bdl.guides.AutoMAP(model).prototype(x, y)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    batches = itertools.cycle(FORMS["list"](x, y, SIZE))
    losses = []
    for step, (a, b) in zip(range(steps), batches, strict=False):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        w = guide.location()
        prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
        likelihood = dist.Normal(a @ w, 0.3).log_prob(b).sum() * N / len(b)
        loss = -prior - likelihood
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return guide, torch.tensor(losses, **D)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [program, lambda: plain], ids=["num_data", "plate"])
def test_each_batch_is_a_step_with_the_factor_n_over_b(form, make, data):
    model = make()
    guide = bdl.guides.AutoMAP(model)
    torch.manual_seed(1)
    run = bdl.training.train(
        model, guide, FORMS[form](*data, SIZE), steps=12, learning_rate=0.05,
        optimizer=torch.optim.Adam(guide.prototype(*data).parameters(), lr=0.05),
    )  # fmt: skip
    torch.manual_seed(1)
    expected, losses = by_hand(make(), *data, 12)
    torch.testing.assert_close(run.losses, losses)
    torch.testing.assert_close(guide.location(), expected.location())
    assert run.batch_size == SIZE


@pytest.mark.parametrize(
    "family", ["AutoMeanField", "AutoEnsemble", "AutoMCDropout", "AutoLowRank"]
)
def test_one_batch_of_all_rows_trains_as_the_tensors_do(family, data):
    """Bit for bit, since the same random numbers are drawn."""
    found = []
    for given in (data, (list([data]),), (data,)):
        model = program(None)
        guide = getattr(bdl.guides, family)(model)
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            run = bdl.training.train(model, guide, *given, steps=7)
        found.append(run.losses)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_all_data_are_those_of_tensors(form, data):
    """The curvature, the ELBO of a point and the evidence, with a last batch of two rows."""
    model = program()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(*data)
    batches = FORMS[form](*data, SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        posterior = guide.laplace_approximation(batches)
    x, y = data
    inverse = posterior.precision.solve(torch.eye(2, **D))
    torch.testing.assert_close(inverse, Conjugate(x, y, 0.3).covariance)
    point = bdl.guides.AutoMAP(model).prototype(*data)
    w = point.location().detach()
    joint = dist.Normal(0.0, 1.0).log_prob(w).sum() + dist.Normal(x @ w, 0.3).log_prob(y).sum()
    assert bdl.training.estimate_elbo(model, point, batches) == pytest.approx(joint.item())
    posterior.fit_width(batches)  # held-out rows as batches
    assert posterior.held_out.rows == N


def test_evidence_and_snapshots_by_a_loader(data):
    x, y = data
    loader = DataLoader(TensorDataset(x, y), batch_size=11, shuffle=True)
    exact = Conjugate(x, y, 0.3).mean
    model = program()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    posterior, interrupted = bdl.evidence.train_by_evidence(
        model, guide, loader, steps=300, learning_rate=0.1
    )
    assert not interrupted and posterior.num_data == N
    torch.testing.assert_close(posterior.location(), exact, atol=0.05, rtol=0)
    swag = bdl.guides.AutoSWAG(model, rank=2)
    bdl.training.train(model, swag, loader, steps=300, learning_rate=0.1)
    run = bdl.training.collect_swag(model, swag, loader, snapshots=20)
    assert run.batch_size == 11 and len(run.losses) == 40  # two batches to a pass
    torch.testing.assert_close(swag.swag_approximation().location(), exact, atol=0.1, rtol=0)


# ------------------------------------------------------------------------------------ what is said


def train(model, data, **options):
    return bdl.training.train(model, bdl.guides.AutoMAP(model), data, steps=6, **options)


def test_a_program_that_states_no_number_of_data_is_refused_with_the_number(data):
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE)
    with pytest.raises(ValueError, match=f"5 rows as all data.*num_data={N}"):
        train(program(None), loader)
    with pytest.raises(ValueError, match=r"5 rows as all data.*num_data=N"):
        train(program(None), FORMS["function"](*data, SIZE))


def test_another_number_of_data_than_stated_is_said(data):
    """Once, and before the first pass where a loader declares it."""
    with pytest.warns(BdlWarning, match=f"states 100 data, and the data set holds {N}") as said:
        train(program(100), DataLoader(TensorDataset(*data), batch_size=SIZE))
    assert len(said) == 1
    with pytest.warns(BdlWarning, match=f"states 100 data, but a pass .* holds {N}"):
        train(program(100), FORMS["function"](*data, SIZE))


def test_the_rows_of_a_sampler_are_all_data(data):
    loader = DataLoader(TensorDataset(*data), SIZE, sampler=SubsetRandomSampler(range(15)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        train(program(15), loader)


def test_a_bad_row_is_named_before_a_step_is_taken_on_it(data):
    x, y = data
    y = y.clone()
    y[17] = torch.nan
    model = program()
    guide = bdl.guides.AutoMAP(model)
    with pytest.raises(ValueError, match=r"y .*row"):
        bdl.training.train(model, guide, FORMS["list"](x, y, SIZE), steps=6)
    assert guide.location().isfinite().all()


def test_what_is_for_tensors_is_refused_in_a_sentence(data):
    loader = DataLoader(TensorDataset(*data), batch_size=SIZE)
    with pytest.raises(ArgumentError, match="batch_size=4 is for rows of tensors"):
        train(program(), loader, batch_size=4)
    with pytest.raises(ArgumentError, match="held_out is for rows of tensors"):
        train(program(), loader, held_out=0.2)
    with pytest.raises(TypeError, match="ends after one pass"):
        train(program(), iter(loader))
    with pytest.warns(BdlWarning, match="in torch: the data are an iterable"):
        train(program(), loader, backend="jax")


def test_a_checkpoint_goes_on_within_a_pass(tmp_path, data, monkeypatch):
    """Bit for bit, in the loader's own random order."""

    def run(path, stop=None):
        torch.manual_seed(3)
        model = program()
        guide = bdl.guides.AutoMeanField(model)
        loader = DataLoader(TensorDataset(*data), batch_size=SIZE, shuffle=True)
        taken = 0

        def stopping():
            nonlocal taken
            for batch in loader:
                taken += 1
                if stop is not None and taken > stop:
                    raise KeyboardInterrupt
                yield batch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            run = bdl.training.train(model, guide, stopping, steps=13, checkpoint=path)
        return run, guide.location().detach()

    _, whole = run(None)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_SECONDS", 0.0)
        interrupted, _ = run(tmp_path / "run", stop=9)
    assert interrupted.interrupted
    torch.manual_seed(99)
    resumed, location = run(tmp_path / "run")
    assert len(resumed.losses) == 13
    assert torch.equal(location, whole)


def test_a_failing_step_names_the_batch(data):
    model = program()
    guide = bdl.guides.AutoMAP(model)
    huge = [(x, y * 1e200) for x, y in FORMS["list"](*data, SIZE)]
    with pytest.raises(FailedStepError, match="step 0"):
        bdl.training.train(model, guide, huge, steps=3)
