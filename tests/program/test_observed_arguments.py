"""Which arguments of a program are its targets."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.program import Program
from pyro_bdl.program.observed_arguments import TargetArguments


def two_sites(x, left=None, right=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("left", dist.Normal(w * x[:, 0], 1.0), obs=left)
        pyro.sample("right", dist.Normal(-w * x[:, 0], 1.0), obs=right)


def reshaped(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=None if y is None else y.reshape(-1))


def test_arguments_of_the_same_numbers_are_told_apart():
    x, left, right = torch.ones(4, 1), torch.ones(4), torch.ones(4)
    targets = TargetArguments(Program(two_sites, x, left, right=right))
    assert [targets.site_of(value) for value in (x, left, right)] == [None, "left", "right"]
    (inputs, first), named = targets.with_values(
        {"left": torch.full((4,), 2.0), "right": torch.full((4,), 3.0)}
    )
    assert inputs is x
    assert first.tolist() == [2.0] * 4 and named["right"].tolist() == [3.0] * 4
    targets.require_arguments()


def test_an_input_with_the_numbers_of_a_reshaped_target_stays():
    """An autoencoder that observes its input, passed a second time."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            f = dist.Normal(w * x.flatten(1), 1.0).to_event(1)
            pyro.sample("seen", f, obs=None if y is None else y.flatten(1))

    x = torch.randn(3, 2, 2)
    for y in (x, x.clone(), x.flatten(1)):  # the same object, equal numbers, a view
        targets = TargetArguments(Program(model, x, y))
        (inputs, replaced), _ = targets.with_values({"seen": torch.zeros(3, 4)})
        assert torch.equal(inputs, x) and replaced.shape == y.shape and not replaced.any()
        assert targets.removed()[0][1] is None


@pytest.mark.parametrize("model", [bdl.models.BinaryClassification, bdl.models.PoissonRegression])
def test_a_target_that_is_cast_is_found_by_its_name(model):
    model = model(bdl.bayesianize(torch.nn.Linear(1, 1)))
    x = torch.tensor([[0.0], [1.0], [1.0]])
    targets = TargetArguments(Program(model, x, x[:, 0].long()))
    assert targets.removed()[0][1] is None and targets.removed()[0][0] is x
    with pytest.raises(ValueError, match="'y' are not an argument"):
        TargetArguments(Program(lambda x, t: model(x, t), x, x[:, 0].long())).require_arguments()


def test_a_program_that_does_not_run_without_its_targets_keeps_them():
    def counts_by_its_target(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    x, y = torch.ones(4), torch.arange(4.0)
    assert TargetArguments(Program(counts_by_its_target, y)).removed()[0][0] is y
    targets = TargetArguments(Program(reshaped, x, y[:, None]))
    assert targets.removed()[0][1] is None and targets.site_of(x) is None
