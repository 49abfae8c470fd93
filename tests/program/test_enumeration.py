"""Discrete sites summed out of programs, against brute force and hand-written sums."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bdl.program import Program

Y = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64)


def _t(*values):
    return torch.tensor(values if len(values) != 1 else values[0], dtype=torch.float64)


def _normal(scale=1.0, shape=()):
    return dist.Normal(torch.zeros(shape, dtype=torch.float64), scale).to_event(len(shape))


def mixture(y=Y):
    """A weight and a mean for each component; a component for each datum."""
    logits = pyro.sample("logits", _normal(shape=(3,)))
    means = pyro.sample("means", _normal(2.0, (3,)))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(logits=logits))
        return pyro.sample("y", dist.Normal(means[z], 0.5), obs=y)


def global_switch(y=Y):
    """One switch for all data, which stand in no plate."""
    means = pyro.sample("means", _normal(2.0, (2,)))
    k = pyro.sample("k", dist.Bernoulli(_t(0.3)))
    pyro.sample("y", dist.Normal(torch.where(k > 0, means[0], means[1]), 0.5), obs=y)


def chain(y=Y):
    """A hidden Markov chain of 4 steps and 3 states."""
    means = pyro.sample("means", _normal(2.0, (3,)))
    moves = pyro.sample("moves", _normal(shape=(3, 3)))
    z = None
    for t in pyro.markov(range(len(Y))):
        z = pyro.sample(f"z{t}", dist.Categorical(logits=moves[0] if z is None else moves[z]))
        pyro.sample(f"y{t}", dist.Normal(means[z], 0.5), obs=None if y is None else y[t])


def states_first(y=Y):
    """The same chain with all its states before its data, without ``pyro.markov``."""
    means = pyro.sample("means", _normal(2.0, (3,)))
    moves = pyro.sample("moves", _normal(shape=(3, 3)))
    states = []
    for t in range(len(Y)):
        logits = moves[states[-1]] if states else moves[0]
        states.append(pyro.sample(f"z{t}", dist.Categorical(logits=logits)))
    for t, z in enumerate(states):
        pyro.sample(f"y{t}", dist.Normal(means[z], 0.5), obs=y[t])


def second_order(y=Y):
    means = pyro.sample("means", _normal(2.0, (2, 2)))
    moves = pyro.sample("moves", _normal(shape=(2, 2, 2)))
    before, z = torch.tensor(0), torch.tensor(1)
    for t in pyro.markov(range(len(Y)), history=2):
        new = pyro.sample(f"z{t}", dist.Categorical(logits=Vindex(moves)[before, z]))
        before, z = z, new
        pyro.sample(f"y{t}", dist.Normal(Vindex(means)[before, z], 0.5), obs=y[t])


def two_levels(y=Y):
    """A class of the whole, a class of each group and of each datum in it."""
    means = pyro.sample("means", _normal(2.0, (2, 2)))
    logits = pyro.sample("logits", _normal(shape=(2, 2)))
    top = pyro.sample("top", dist.Bernoulli(_t(0.4))).long()
    with pyro.plate("groups", 2, dim=-1):
        group = pyro.sample("group", dist.Categorical(logits=logits[top]))
        with pyro.plate("rows", 2, dim=-2):
            low = pyro.sample("low", dist.Categorical(logits=logits[group]))
            pyro.sample("y", dist.Normal(Vindex(means)[group, low], 0.5), obs=y.reshape(2, 2))


def features(y=Y):
    """A class of each row, whose two features are independent given it."""
    means = pyro.sample("means", _normal(2.0, (2, 2)))
    with pyro.plate("rows", 2, dim=-2):
        z = pyro.sample("z", dist.Bernoulli(_t(0.4))).long()
        with pyro.plate("features", 2, dim=-1):
            which = torch.arange(2)
            pyro.sample("y", dist.Normal(Vindex(means)[z, which], 0.5), obs=y.reshape(2, 2))


def two_sites(y=Y):
    """Two observations of each datum, which share its class."""
    means = pyro.sample("means", _normal(2.0, (2,)))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Bernoulli(_t(0.4))).long()
        pyro.sample("a", dist.Normal(means[z], 0.5), obs=y)
        pyro.sample("b", dist.Poisson(means[z].exp()), obs=y.abs().round())


def spike(y=Y):
    """A latent whose prior depends on a discrete site, which is used again."""
    k = pyro.sample("k", dist.Bernoulli(_t(0.3)))
    w = pyro.sample("w", dist.Normal(_t(0.0), 0.1 + k))
    pyro.sample("y", dist.Normal(w * (1 + k), 0.5), obs=y)
    pyro.factor("f", -0.1 * k * w.square())


def masked_chain(y=Y):
    """A chain whose last step is missing."""
    means = pyro.sample("means", _normal(2.0, (2,)))
    moves = pyro.sample("moves", _normal(shape=(2, 2)))
    z = torch.tensor(0)
    for t in pyro.markov(range(len(Y))):
        with poutine.mask(mask=torch.tensor(t < 3)):
            z = pyro.sample(f"z{t}", dist.Categorical(logits=moves[z]))
            pyro.sample(f"y{t}", dist.Normal(means[z], 0.5), obs=y[t])


def one_hot(y=Y):
    means = pyro.sample("means", _normal(2.0, (3,)))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.OneHotCategorical(_t(0.2, 0.3, 0.5)))
        count = pyro.sample("count", dist.Binomial(2, _t(0.3)))
        pyro.sample("y", dist.Normal((z * means).sum(-1) + count, 0.5), obs=y)


PROGRAMS = (
    mixture,
    global_switch,
    chain,
    states_first,
    second_order,
    two_levels,
    features,
    two_sites,
    spike,
    masked_chain,
    one_hot,
)


def _latents(program, seed=1):
    torch.manual_seed(seed)
    return program.constrain(torch.randn(program.size, dtype=torch.float64))[0]


def _assignments(program, model, args):
    """All values of all discrete sites."""
    trace = poutine.trace(poutine.condition(model, program.initial)).get_trace(*args)
    columns = []
    for name in program.discrete:
        fn = trace.nodes[name]["fn"]
        if trace.nodes[name]["mask"] is not None and not trace.nodes[name]["mask"]:
            columns.append([(name, trace.nodes[name]["value"])])
            continue
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *fn.event_shape)
        cells = itertools.product(values, repeat=fn.batch_shape.numel())
        columns.append([(name, torch.stack(cell).reshape(fn.shape())) for cell in cells])
    return [dict(row) for row in itertools.product(*columns)]


def _brute_force(program, model, latents, args=()):
    """log p(w, y, z) for all z."""
    rows = _assignments(program, model, args)
    found = []
    for row in rows:
        conditioned = poutine.condition(model, {**latents, **row})
        found.append(poutine.trace(conditioned).get_trace(*args).log_prob_sum())
    return rows, torch.stack(found)


@pytest.mark.parametrize("model", PROGRAMS, ids=lambda m: m.__name__)
def test_sums_and_posteriors_are_those_of_brute_force(model):
    program = Program(model)
    latents = _latents(program)
    rows, terms = _brute_force(program, model, latents)
    torch.testing.assert_close(program.log_joint(latents), terms.logsumexp(0))
    run = program.run(latents)
    parts = [site.unscaled_log_prob().sum() for site in run.observed.values()]
    parts += [site.unscaled_log_prob().sum() for site in run.factors.values()]
    torch.testing.assert_close(sum(parts), terms.logsumexp(0) - program.log_prior(latents))
    weights = terms.softmax(0)
    responsibilities = program.responsibilities(latents)
    assert tuple(responsibilities) == program.discrete
    for name, found in responsibilities.items():
        if model is masked_chain and name == "z3":  # a masked site has no density
            continue
        support = run.discrete.support(name)
        expected = torch.zeros_like(found)
        for weight, row in zip(weights, rows, strict=True):
            hits = row[name].unsqueeze(found.dim() - 1) == support
            expected += weight * hits.reshape(*found.shape, -1).all(-1)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("model", PROGRAMS, ids=lambda m: m.__name__)
def test_densities_survive_vmap_grad_and_make_fx(model):
    program = Program(model)
    torch.manual_seed(0)
    vectors = torch.randn(3, program.size, dtype=torch.float64)
    gradient = torch.func.grad(program.log_density)
    expected = torch.stack([gradient(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(gradient)(vectors), expected)
    if model is not one_hot:  # a Binomial reads its count as a number
        torch.testing.assert_close(make_fx(gradient)(vectors[0])(vectors[1]), expected[1])
