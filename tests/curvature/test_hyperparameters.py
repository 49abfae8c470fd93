"""A program's hyperparameters: which there are, what they scale, and how they are set."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.parameters import learned
from pyro.distributions import constraints
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.curvature.hyperparameters import (
    Hyperparameter,
    followed,
    owners_of_priors,
    prior_normals,
    read,
    read_at_center,
    restored_on_error,
    scales,
)
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program.saved import example_rows
from pyro_bdl.program.subset import select

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10
Y = torch.arange(6.0, dtype=torch.float64)


def reading_of(model, selection=None):
    guide = AutoLaplaceGGN(model).prototype(X, Y)
    subset = select(guide.layout, selection, model=model)
    return read(model, subset, guide.loc, (X, Y), {}), subset


def short(names):
    return [name.rpartition(".")[2] for name in names]


def regression(prior=None, noise=0.5, net=None):
    return models.Regression(bayesianize(net or nn.Linear(2, 1), prior), noise=noise)


# ParameterReading


def test_a_reading_has_the_parameters_and_their_graph():
    model = regression(priors.Normal(learned(0.7)), learned(0.5))
    reading, _ = reading_of(model)
    assert short(reading.parameters) == ["hyper_prior_scale", "noise"]
    for parameter, value in zip(reading.parameters.values(), (0.7, 0.5), strict=True):
        assert parameter.value.item() == pytest.approx(value)
        (slope,) = torch.autograd.grad(parameter.value, parameter.leaf)
        assert slope.item() == pytest.approx(value)  # of exp
        assert any(parameter.leaf is p for p in model.parameters())
    assert set(reading.leaves) == {"weight", "bias"}
    assert reading.run.observed["y"].value is not None


def test_each_statement_that_reads_a_parameter_is_seen():
    """As attributes of a module are read: anew, by each statement."""

    def read(name):
        return pyro.param(name, lambda: X.new_ones(()), constraint=constraints.positive)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), read("a")).to_event(1))
        v = pyro.sample("v", dist.Normal(x.new_zeros(2), read("a")).to_event(1))
        mean = read("b") * (x @ w) + x @ v
        pyro.sample("u", dist.Normal(0.0, read("b")))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    reading, subset = reading_of(model)
    assert owners_of_priors(reading, subset) == {"w": "a", "v": "a", "u": "b"}
    assert list(followed(reading)) == ["a"] and reading.in_likelihood == ["b"]


def test_frozen_and_plain_parameters():
    """A frozen PyroParam is not a parameter; a weight without a prior is one."""
    model = regression(priors.ByName({"weight": priors.Normal(learned(0.7))}), learned(0.5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("noise" not in name)
    reading, _ = reading_of(model)
    assert short(reading.parameters) == ["hyper_prior_weight__scale", "bias"]
    assert short(followed(reading)) == ["hyper_prior_weight__scale"]


# Setting


@pytest.mark.parametrize(
    ("constraint", "value", "kept"),
    [
        (constraints.positive, 2.5, 2.5),
        (constraints.softplus_positive, 2.5, 2.5),
        (constraints.interval(0.1, 3.0), 2.5, 2.5),
        (constraints.interval(0.1, 2.0), 2.5, 2.0),
        (constraints.interval(0.1, 2.0), 0.01, 0.1),
        (constraints.greater_than(1e-3), 1e-5, 1e-3),
        (constraints.greater_than_eq(1.0), 0.5, 1.0),
        (constraints.less_than(2.0), 5.0, 2.0),
        (constraints.real, -5.0, -5.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_set(constraint, value, kept, dtype):
    start = torch.tensor([1.5, 1.5], dtype=dtype)
    pyro.clear_param_store()
    pyro.param("p", start, constraint=constraint)
    now = pyro.param("p")
    leaf = now.unconstrained()
    Hyperparameter("p", now, leaf, constraint).set(torch.full((2,), value))
    found = pyro.param("p")
    assert found.unconstrained() is leaf and torch.isfinite(leaf).all()
    torch.testing.assert_close(
        found.detach(), torch.full((2,), kept, dtype=dtype), rtol=1e-5, atol=1e-5
    )
    assert constraint.check(found).all()


def test_values_come_back_after_an_error():
    reading, _ = reading_of(regression(priors.Normal(learned(0.7)), learned(0.5)))
    leaves = [p.leaf for p in reading.parameters.values()]
    before, refreshed = [leaf.detach().clone() for leaf in leaves], []
    with (
        pytest.raises(KeyboardInterrupt),
        restored_on_error(reading.parameters, lambda: refreshed.append(1)),
    ):
        for parameter in reading.parameters.values():
            parameter.set(torch.tensor(9.0))
        raise KeyboardInterrupt
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True)) and refreshed == [1]
    with restored_on_error(reading.parameters, lambda: refreshed.append(2)):
        next(iter(reading.parameters.values())).set(torch.tensor(9.0))
    assert not torch.equal(leaves[0], before[0]) and refreshed == [1]


# What they scale


def parameter(value):
    leaf = torch.as_tensor(value).clone().requires_grad_()
    return Hyperparameter("p", leaf * 1.0, leaf, constraints.positive)


def test_what_is_proportional():
    p = parameter([0.5, 2.0])
    for tensor in (p.value, 3 * p.value, p.value.repeat(4), p.value[0].expand(3), p.value / 7):
        assert scales(tensor, p)
    unit = torch.ones(2)
    for tensor in (p.value.square(), p.value + 1, p.value.sqrt(), unit, p.value.detach()):
        assert not scales(tensor, p)
    assert not scales(p.value + torch.tensor([1.0, -1.0]), p)  # whose sum is proportional
    assert not scales(p.value + 1e-3 * (p.value - p.value.detach()).square(), p)
    assert not scales(p.value * unit.requires_grad_(), p)  # two parameters have no one owner
    assert not scales(torch.ones(2, requires_grad=True), p)
    negative = parameter([-0.5, 2.0])
    assert not scales(negative.value, negative)


def test_owners_of_every_prior():
    prior = priors.ByName(
        {
            "0.weight": priors.FanIn(learned(0.5)),
            "0.bias": priors.Normal(learned([0.1, 0.2, 0.3])),
            "1.weight": priors.Laplace(learned(1.0)),
            "1.bias": priors.Normal(2.0),
        }
    )
    model = regression(prior, net=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    reading, subset = reading_of(model)
    found = owners_of_priors(reading, subset)
    assert {site: name.rpartition(".")[2] for site, name in found.items()} == {
        "0.weight": "hyper_prior_0_weight__gain",
        "0.bias": "hyper_prior_0_bias__scale",
    }
    normals = prior_normals(reading, subset)
    torch.testing.assert_close(normals["0.weight"][1].detach(), torch.full((6,), 0.5 / 2**0.5))
    torch.testing.assert_close(normals["1.bias"][1], torch.tensor([2.0]))
    assert "1.weight" not in normals
    normals = prior_normals(*reading_of(model, torch.tensor([1, 4, 6, 8])))
    assert normals["0.weight"][1].shape == (2,) and normals["0.bias"][0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(normals["0.bias"][1].detach(), torch.tensor([0.1, 0.3]))


def test_a_hyperprior_owns_nothing():
    """The scale is a latent: priors that depend on latents have no closed form."""
    reading, subset = reading_of(regression(priors.Normal(dist.HalfNormal(1.0))))
    assert owners_of_priors(reading, subset) == {} and reading.parameters == {}
    assert prior_normals(reading, subset) == {}


class Shifted(models.Regression):
    def likelihood(self, output):
        return dist.Normal(
            output, self._hyperparameter("noise", output) + torch.arange(len(output))
        )


class Scaled(models.Regression):
    def likelihood(self, output):
        noise = self._hyperparameter("noise", output)
        return dist.Normal(output, noise * (1.0 + torch.arange(len(output))))


class Squared(models.Regression):
    def likelihood(self, output):
        return dist.Normal(output, self._hyperparameter("noise", output).square())


@pytest.mark.parametrize(
    ("kind", "noise", "is_one", "is_owned"),
    [
        (models.Regression, "learned", True, True),
        (models.Regression, "fixed", True, False),
        (models.Regression, "latent", False, False),
        (models.StudentTRegression, "learned", False, False),
        (Shifted, "learned", False, False),
        (Scaled, "learned", True, True),
        (Squared, "learned", True, False),
    ],
)
def test_noise_that_is_one_number(kind, noise, is_one, is_owned):
    value = {"learned": learned(0.5), "fixed": 0.5, "latent": dist.HalfNormal(1.0)}[noise]
    reading, _ = reading_of(kind(bayesianize(nn.Linear(2, 1)), noise=value))
    found = reading.noise
    assert (found is not None) == is_one
    assert (found is not None and found.owner is not None) == is_owned
    assert found is None or found.site is reading.run.observed["y"]
    is_learned = noise == "learned"
    assert short(followed(reading)) == ["noise"] * (is_learned and is_one)
    assert short(reading.in_likelihood) == ["noise"] * (is_learned and not is_one)


def test_two_observations_have_no_common_noise():
    bnn = bayesianize(nn.Linear(2, 1))

    def model(x, y=None):
        f = bnn(x)[:, 0]
        noise = pyro.param("noise", torch.tensor(0.5), constraint=constraints.positive)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, noise), obs=y)
            pyro.sample("z", dist.Normal(f, 1.0), obs=y)

    reading, _ = reading_of(model)
    assert reading.noise is None and list(reading.parameters) == ["noise"]
    several = models.Regression(bayesianize(nn.Linear(2, 2)), noise=learned([0.5, 1.0]))
    guide = AutoLaplaceGGN(several).prototype(X, X)
    reading = read_at_center(several, guide)
    assert reading.noise is None and short(reading.in_likelihood) == ["noise"]


# A few rows


def test_two_rows_are_enough_where_the_program_takes_them():
    model = regression()
    guide = AutoLaplaceGGN(model).prototype(X, Y)
    few, _ = example_rows(model, guide.layout, guide.loc, ((X, Y), {}))
    assert torch.equal(few[0], X[:2]) and torch.equal(few[1], Y[:2])
    short, _ = example_rows(model, guide.layout, guide.loc, ((X[:1], Y[:1]), {}))
    assert len(short[0]) == 1
    offsets = torch.zeros(6)

    def whole(x, y=None):
        return model(x, None if y is None else y + offsets)

    guide = AutoLaplaceGGN(whole).prototype(X, Y)
    all_rows, _ = example_rows(whole, guide.layout, guide.loc, ((X, Y), {}))
    assert len(all_rows[0]) == 6
