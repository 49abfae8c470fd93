"""What follows a last layer: ``AutoVariationalLastLayer`` against plain Monte Carlo."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_bdl import bayesianize
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoVariationalLastLayer
from pyro_bdl.program.program import Program

N, K = 30, 2
torch.manual_seed(0)
X = torch.randn(N, 2, dtype=torch.float64)
TASK = torch.arange(N) // (N // 2)
Y = X.sum(1)
COUNTS = Y.abs().round()


class _Doubled(torch.autograd.Function):
    """An operation that torch's modes do not see."""

    @staticmethod
    def forward(ctx, z):
        return 2.0 * z.clamp(min=0.0)

    @staticmethod
    def backward(ctx, gradient):
        return 2.0 * gradient


def normal(location, noise=0.5):
    return lambda z, x, task: dist.Normal(location(z, x, task), noise)


def _masked(z, x, task):
    return dist.Normal(torch.where(z > 0, 1.0, 0.0)[:, 0] + z[:, 0], 0.5)


def _in_place(z, x, task):
    first = z[:, 0]
    z.mul_(2.0)
    return dist.Normal(first, 0.5)


def _iadd(z, x, task):
    z += x
    return dist.Normal(z[:, 0], 0.5)


def _set(z, x, task):
    z = z + 0.0
    z[:10, 0] = 3.0
    return dist.Normal(z[:, 0], 0.5)


def _buffer(z, x, task):
    result = torch.zeros(len(z), dtype=z.dtype)
    result[:] = z[:, 0].relu()
    return dist.Normal(result, 0.5)


def _branch(z, x, task):
    return dist.Normal(z[:, 0] if z.sum() > 0 else z[:, 1], 0.5)


# head -> p(y | z), targets, quadrature
HEADS = {
    "a selection": (normal(lambda z, x, task: z[:, 0]), Y, "exact"),
    "select": (normal(lambda z, x, task: z.select(1, 1)), Y, "exact"),
    "unbind, split": (normal(lambda z, x, task: z.split(1, 1)[1].squeeze(-1)), Y, "exact"),
    "transposed": (normal(lambda z, x, task: z.T[0]), Y, "exact"),
    "scaled and shifted": (normal(lambda z, x, task: 1.5 - 2 * z[:, 0] / 3.0), Y, "exact"),
    "with an input": (normal(lambda z, x, task: z[:, 0] + x[:, 0]), Y, "exact"),
    "times an input": (normal(lambda z, x, task: x[:, 1] * z[:, 0]), Y, "exact"),
    "gather by task": (normal(lambda z, x, task: z.gather(1, task[:, None])[:, 0]), Y, "exact"),
    "index by task": (normal(lambda z, x, task: z[torch.arange(len(z)), task]), Y, "exact"),
    "where by task": (normal(lambda z, x, task: torch.where(task > 0, *z.T)), Y, "draws"),
    "clamp": (normal(lambda z, x, task: z[:, 0].clamp(min=0.0)), Y, "draws"),
    "relu": (normal(lambda z, x, task: z[:, 0].relu()), Y, "draws"),
    "max": (normal(lambda z, x, task: torch.maximum(z[:, 0], z[:, 1])), Y, "draws"),
    "amax": (normal(lambda z, x, task: z.amax(1)), Y, "draws"),
    "sum": (normal(lambda z, x, task: z.sum(1)), Y, "draws"),
    "cumulative": (normal(lambda z, x, task: z.cumsum(0)[:, 0]), Y, "draws"),
    "sorted": (normal(lambda z, x, task: z.sort(0).values[:, 0]), Y, "draws"),
    "its own square": (normal(lambda z, x, task: z[:, 0] * z[:, 0]), Y, "draws"),
    "selected by itself": (
        normal(lambda z, x, task: z.gather(1, z.argmax(1, keepdim=True))[:, 0]), Y, "draws",
    ),
    "rounded": (normal(lambda z, x, task: z.to(torch.long).to(z.dtype)[:, 0]), Y, "draws"),
    "detached": (normal(lambda z, x, task: z[:, 0] + z.detach()[:, 1]), Y, "draws"),
    "unseen": (normal(lambda z, x, task: _Doubled.apply(z)[:, 0]), Y, "draws"),
    "and unseen": (normal(lambda z, x, task: z[:, 0] + _Doubled.apply(z)[:, 1]), Y, "draws"),
    "a mask of itself": (_masked, Y, "draws"),
    "in place": (_in_place, Y, "draws"),
    "in place, +=": (_iadd, Y, "draws"),
    "in place, some entries": (_set, Y, "draws"),
    "into a buffer": (_buffer, Y, "draws"),
    "a branch": (_branch, Y, "draws"),
    "location and scale": (
        lambda z, x, task: dist.Normal(z[:, 0], F.softplus(z[:, 1]) + 0.3), Y, "points",
    ),
    "scale and location": (
        lambda z, x, task: dist.Normal(z[:, 1], 0.3 + (0.3 * z[:, 0]).exp()), Y, "points",
    ),
    "scale of the same output": (
        lambda z, x, task: dist.Normal(z[:, 0], 0.3 + (0.3 * z[:, 0]).exp()), Y, "points",
    ),
    "scale of another row": (
        lambda z, x, task: dist.Normal(z[:, 0], 0.3 + F.softplus(z[:, 1].roll(1))), Y, "draws",
    ),
    "pairs by task": (
        lambda z, x, task: dist.Normal(
            z[torch.arange(len(z)), task], 0.3 + F.softplus(z[torch.arange(len(z)), 1 - task])
        ),
        Y,
        "draws",
    ),
    "rate, softplus": (lambda z, x, task: dist.Poisson(F.softplus(z[:, 0])), COUNTS, "points"),
    "rate, exp": (lambda z, x, task: dist.Poisson((0.5 * z[:, 0]).exp()), COUNTS, "points"),
    "mixture": (
        lambda z, x, task: dist.MixtureSameFamily(
            dist.Categorical(logits=x.new_zeros(2)), dist.Normal(z, 0.5)
        ),
        Y,
        "draws",
    ),
    "log-normal": (
        lambda z, x, task: dist.LogNormal(z[:, 0], 0.5), Y.abs() + 0.1, "points",
    ),
}  # fmt: skip


def program(head, outputs=K, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    with torch.no_grad():
        net[2].bias.fill_(1.0)  # where most of what follows is smooth
    bnn = bayesianize(net)

    def model(x, task, y=None):
        distribution = head(bnn(x), x, task)
        with pyro.plate("data", len(x)):
            pyro.sample("y", distribution, obs=y)

    return model


def ready(model, y, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide = AutoVariationalLastLayer(model, init_scale=0.4, **options).prototype(X, TASK, y)
    told = any(issubclass(w.category, BdlWarning) and "at draws" in str(w.message) for w in caught)
    assert told == (guide.quadrature == "draws")
    with torch.no_grad():
        guide.column = guide.column + 0.1 * torch.randn_like(guide.column).tril()
    return guide


def bound(model, guide, y, count=1):
    elbo = TemperedTraceMeanField_ELBO(num_particles=count)
    with torch.no_grad():
        elbo.loss(model, guide, X, TASK, y)
    return elbo.expected_log_likelihood.item()


def by_draws(model, guide, y, count=20000):
    """Mean and standard error of log p(y | w) over draws of the weights."""
    program = Program(model, X, TASK, y)
    totals = torch.vmap(program.log_likelihood)(guide.sample_latents(count))["y"].sum(1)
    return totals.mean().item(), totals.std().item() / count**0.5


@pytest.mark.parametrize("structure", ["dense", "matrix-normal"])
@pytest.mark.parametrize("name", HEADS)
def test_the_bound_is_the_mean_over_draws(name, structure):
    head, y, quadrature = HEADS[name]
    guide = ready(model := program(head), y, structure=structure)
    assert guide.quadrature == quadrature
    with torch.no_grad():
        if quadrature == "draws":  # the same draws of the weights, so that the mean is theirs
            torch.manual_seed(5)
            latents = guide.layout.constrain(guide.sample_vectors(1)[0])[0]
            expected = Program(model, X, TASK, y).log_likelihood(latents)["y"].sum().item()
            torch.manual_seed(5)
            assert bound(model, guide, y) == pytest.approx(expected, rel=1e-9)
        else:
            mean, error = by_draws(model, guide, y)
            assert abs(bound(model, guide, y) - mean) < 4 * error + 1e-4 * abs(mean)


@pytest.mark.parametrize(
    "link, function",
    [
        (torch.sigmoid, lambda z: torch.sigmoid(z)),
        (torch.sigmoid, lambda z: nn.Sigmoid()(z)),
        (lambda z: z.clamp(min=0.0) + 0.1, lambda z: z.clamp(min=0.0) + 0.1),
        ((torch.tanh, F.elu), lambda z: F.elu(torch.tanh(z)) + 2.0),
    ],
)
def test_a_declared_function_is_integrated(link, function):
    def head(z, x, task):
        return dist.Normal(function(z[:, 0]), 0.5)

    model = program(head)
    assert ready(model, Y).quadrature == "draws"
    guide = ready(model, Y, link=link)
    assert guide.quadrature == "points" and not guide.linearized
    with torch.no_grad():
        mean, error = by_draws(model, guide, Y)
    # a kink costs the quadrature some accuracy
    assert abs(bound(model, guide, Y) - mean) < 4 * error + 0.01 * abs(mean)


CLASSES = {
    "logits": (lambda z: dist.Categorical(logits=z), "bound"),
    "log-softmax": (lambda z: dist.Categorical(logits=z.log_softmax(-1)), "bound"),
    "a module": (lambda z: dist.Categorical(logits=nn.LogSoftmax(1)(z)), "bound"),
    "one-hot": (
        lambda z: dist.OneHotCategorical(logits=z - z.logsumexp(-1, keepdim=True)), "bound",
    ),
    "tempered": (lambda z: dist.Categorical(logits=z / 2.0), "draws"),
    "shifted": (lambda z: dist.Categorical(logits=z + torch.arange(3.0)), "draws"),
    "reversed": (lambda z: dist.Categorical(logits=z.flip(-1)), "draws"),
    "some of them": (lambda z: dist.Categorical(logits=z[:, :2]), "draws"),
    "in another order": (lambda z: dist.Categorical(logits=z[:, [2, 0, 1]]), "draws"),
    "over the data": (lambda z: dist.Categorical(logits=F.log_softmax(z, 0)), "draws"),
    "probabilities": (lambda z: dist.Categorical(probs=z.softmax(-1)), "draws"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_a_lower_bound(name):
    head, quadrature = CLASSES[name]
    y = torch.arange(N) % 2
    y = F.one_hot(y, 3).double() if name == "one-hot" else y
    model = program(lambda z, x, task: head(z), outputs=3)
    guide = ready(model, y)
    assert guide.quadrature == quadrature
    if quadrature == "bound":
        with torch.no_grad():
            mean, error = by_draws(model, guide, y)
        assert mean - 0.1 * abs(mean) < bound(model, guide, y) < mean + 4 * error


def test_a_program_that_changes_its_head_is_read_again():
    """A flag among the arguments, as of tasks that come one after another."""
    torch.manual_seed(1)
    bnn = bayesianize(nn.Linear(2, 2).double())

    def model(x, flag, y=None):
        z = bnn(x)
        if flag == "penalized":
            pyro.factor("penalty", -z.square().sum())
        f = {"penalized": z[:, 1], "one": z[:, 0], "other": z[:, 1], "both": torch.maximum(*z.T)}[
            flag
        ]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, F.softplus(z[:, 1]) if flag == "one" else 0.5), obs=y)

    guide = AutoVariationalLastLayer(model, init_scale=0.4).prototype(X, "other", Y)
    assert guide.quadrature == "exact"
    elbo = TemperedTraceMeanField_ELBO()
    for flag, expected in (("one", "points"), ("other", "exact"), ("one", "points")):
        with torch.no_grad():
            elbo.loss(model, guide, X, flag, Y)
            program = Program(model, X, flag, Y)
            draws = guide.sample_latents(20000)
            values = torch.vmap(program.log_likelihood)(draws)["y"].sum(1)
        assert guide.quadrature == expected
        error = values.std().item() / len(values) ** 0.5
        assert abs(elbo.expected_log_likelihood.item() - values.mean().item()) < 4 * error
    with pytest.warns(BdlWarning, match="more than the observations depends on the layer"):
        elbo.loss(model, guide, X, "penalized", Y)
    guide = AutoVariationalLastLayer(model).prototype(X, "other", Y)
    with pytest.warns(BdlWarning, match="at draws: the parameter 'loc'.*'maximum'"):
        elbo.loss(model, guide, X, "both", Y)
