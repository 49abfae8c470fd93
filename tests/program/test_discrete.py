"""Discrete sites summed out of programs, against brute force and hand-written sums."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bdl.distributions.parameters import parameters_of, rebuilt
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.handlers import cold as cold_posterior
from pyro_bdl.handlers import temper
from pyro_bdl.program import Program, record
from pyro_bdl.program.discrete.marginals import JointMarginal, Marginal
from pyro_bdl.program.trace import placeholder_for_observed
from pyro_bdl.tracing.jax.translate import to_jax

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
    with pyro.plate("data", 2):
        z = pyro.sample("z", dist.OneHotCategorical(_t(0.2, 0.3, 0.5)))
        count = pyro.sample("count", dist.Binomial(1, _t(0.3)))
        pyro.sample("y", dist.Normal((z * means).sum(-1) + count, 0.5), obs=y[:2])


PROGRAMS = (
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


@pytest.mark.parametrize("model", [mixture, chain, two_levels, features, spike])
def test_densities_survive_vmap_grad_and_make_fx(model):
    program = Program(model)
    torch.manual_seed(0)
    vectors = torch.randn(3, program.size, dtype=torch.float64)
    gradient = torch.func.grad(program.log_density)
    expected = torch.stack([gradient(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(gradient)(vectors), expected)
    torch.testing.assert_close(make_fx(gradient)(vectors[0])(vectors[1]), expected[1])


# Plates, scales and masks


def beside(y=Y):
    """A discrete site between statements that do not depend on it, and a mask that does."""
    with poutine.scale(scale=2.0):
        k = pyro.sample("k", dist.Bernoulli(_t(0.3)))
        mean = pyro.sample("mean", _normal())
        pyro.sample("a", dist.Normal(mean, 0.5), obs=y[0])
        with poutine.mask(mask=k > 0):
            pyro.sample("b", dist.Normal(mean, 0.7), obs=y[1])
        pyro.sample("c", dist.Normal(mean + k, 0.5), obs=y[2])


@pytest.mark.parametrize("model", [*PROGRAMS, beside], ids=lambda m: m.__name__)
def test_the_total_is_the_sum_of_the_marginals(model):
    program = Program(model if model is beside else temper(model, 0.7), Y)
    run = program.run(_latents(program))
    terms = [site.log_prob().sum() for site in (run.observed | run.factors).values()]
    torch.testing.assert_close(run.log_likelihood(), sum(terms), rtol=1e-12, atol=1e-12)


def test_a_mask_that_depends_on_a_discrete_site():
    program = Program(beside, Y)
    mean = _t(0.4)
    normal = [dist.Normal(mean, s).log_prob(y) for s, y in ((0.5, Y[0]), (0.7, Y[1]))]
    ends = dist.Normal(mean + _t([0.0, 1.0]), 0.5).log_prob(Y[2])
    joint = _t([0.7, 0.3]).log() + ends + torch.stack([_t(0.0), normal[1]])
    likelihood = program.log_likelihood({"mean": mean})
    torch.testing.assert_close(likelihood["a"], normal[0])
    torch.testing.assert_close(likelihood["b"] + likelihood["c"], joint.logsumexp(0))
    prior = _normal().log_prob(mean)
    expected = 2.0 * (prior + normal[0] + joint.logsumexp(0))
    torch.testing.assert_close(program.log_joint({"mean": mean}), expected)


def test_a_subsampled_plate_scales_the_log_of_a_local_sum():
    def model(y):
        means = pyro.sample("means", _normal(2.0, (3,)))
        with pyro.plate("data", 40, subsample=torch.arange(4)):
            z = pyro.sample("z", dist.Categorical(_t(0.2, 0.3, 0.5)))
            pyro.sample("y", dist.Normal(means[z], 0.5), obs=y)

    program = Program(model, Y)
    latents = _latents(program)
    each = dist.MixtureSameFamily(
        dist.Categorical(_t(0.2, 0.3, 0.5)), dist.Normal(latents["means"], 0.5)
    ).log_prob(Y)
    run = program.run(latents)
    torch.testing.assert_close(run.log_likelihood(), 10 * each.sum())
    torch.testing.assert_close(program.log_likelihood(latents)["y"], each)
    assert (run.observed["y"].scale, run.observed["y"].subsampling) == (10.0, 10.0)


def subsampled_switch(y=Y):
    means = pyro.sample("means", _normal(2.0, (2,)))
    k = pyro.sample("k", dist.Categorical(_t(0.3, 0.7)))
    with pyro.plate("data", 8, subsample=torch.arange(4)):
        pyro.sample("y", dist.Normal(means[k], 0.5), obs=y)


def test_a_subsampled_plate_scales_the_data_inside_of_a_global_sum():
    program = Program(subsampled_switch)
    latents = _latents(program)
    terms = 2 * dist.Normal(latents["means"][:, None], 0.5).log_prob(Y).sum(-1)
    expected = (_t(0.3, 0.7).log() + terms).logsumexp(0)
    site = program.run(latents).observed["y"]
    assert isinstance(site.distribution, JointMarginal)
    torch.testing.assert_close(site.log_prob(), expected)
    assert site.scale == site.subsampling == 1.0
    found = program.responsibilities(latents)["k"]
    torch.testing.assert_close(found, (_t(0.3, 0.7).log() + terms).softmax(0))


def test_temperatures_scale_the_log_of_the_sum():
    latents = _latents(Program(mixture))
    warm, cold = Program(temper(mixture, 2.0)), Program(cold_posterior(mixture, 2.0))
    plain = Program(mixture)
    prior, joint = plain.log_prior(latents), plain.log_joint(latents)
    torch.testing.assert_close(warm.log_joint(latents), prior + (joint - prior) / 2)
    torch.testing.assert_close(cold.log_joint(latents), joint / 2)


def lengths(y):
    """Chains of their own lengths in a plate."""
    means = pyro.sample("means", _normal(2.0, (2,)))
    moves = pyro.sample("moves", _normal(shape=(2, 2)))
    with pyro.plate("chains", y.shape[1]) as which:
        z = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            with poutine.mask(mask=t < 1 + which):
                z = pyro.sample(f"z{t}", dist.Categorical(logits=moves[z]))
                pyro.sample(f"y{t}", dist.Normal(means[z], 0.5), obs=y[t])


def test_chains_in_a_plate_have_the_density_of_the_forward_algorithm():
    torch.manual_seed(0)
    y = torch.randn(3, 3, dtype=torch.float64)
    program = Program(lengths, y)
    latents = _latents(program)
    moves = latents["moves"].log_softmax(-1)
    emitted = dist.Normal(latents["means"], 0.5).log_prob(y[..., None])
    for chain_number in range(3):
        forward = moves[0] + emitted[0, chain_number]
        for t in range(1, 1 + chain_number):
            forward = (forward[:, None] + moves).logsumexp(0) + emitted[t, chain_number]
        terms = program.log_likelihood(latents).values()
        torch.testing.assert_close(sum(term[chain_number] for term in terms), forward.logsumexp(0))


def test_missing_labels_are_summed_out():
    labels = torch.tensor([0, 1, 1, 0])
    known = torch.tensor([True, True, False, False])

    def model(x, labels):
        means = pyro.sample("means", _normal(2.0, (2,)))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(_t(0.4, 0.6)), obs=labels, obs_mask=known)
            pyro.sample("x", dist.Normal(means[z], 0.5), obs=x)

    program = Program(model, Y, labels)
    latents = _latents(program)
    table = _t(0.4, 0.6).log() + dist.Normal(latents["means"], 0.5).log_prob(Y[:, None])
    each = torch.where(known, table[range(4), labels], table.logsumexp(-1))
    torch.testing.assert_close(program.run(latents).log_likelihood(), each.sum())


def test_a_classifier_with_labels_missing_has_those_of_the_others():
    known = torch.tensor([True, False, True, True])

    def model(x, labels):
        w = pyro.sample("w", _normal())
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=w * x), obs=labels, obs_mask=known)

    labels = _t(0.0, 1.0, 1.0, 0.0)
    program = Program(model, Y, labels)
    latents = _latents(program)
    expected = dist.Bernoulli(logits=latents["w"] * Y).log_prob(labels)[known].sum()
    torch.testing.assert_close(program.run(latents).log_likelihood(), expected)


# What else sums over the same sites


@pytest.mark.parametrize("model", [mixture, chain])
def test_gradients_under_jax_are_those_of_torch(model):
    program = Program(model)
    vector = program.unconstrain(_latents(program))
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(to_jax(program.log_density, vector)))
        found = torch.tensor(np.array(gradient(jnp.asarray(vector.numpy()))))
    torch.testing.assert_close(found, torch.func.grad(program.log_density)(vector))


# Distributions


def test_a_local_marginal_is_the_mixture():
    program = Program(mixture)
    latents = _latents(program)
    marginal = program.run(latents).observed["y"].distribution
    assert isinstance(marginal, Marginal)
    expected = dist.MixtureSameFamily(
        dist.Categorical(logits=latents["logits"]).expand([4]),
        dist.Normal(latents["means"], 0.5).expand([4, 3]),
    )
    again = rebuilt(marginal, parameters_of(marginal))
    for found in (marginal, again, marginal.expand([4])):
        assert found.batch_shape == (4,)
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.variance, expected.variance)
        torch.testing.assert_close(found.log_prob(Y + 1), expected.log_prob(Y + 1))


def test_features_of_a_row_are_one_event_of_its_mixture():
    program = Program(features)
    latents = _latents(program)
    marginal = program.run(latents).observed["y"].distribution
    assert (marginal.batch_shape, marginal.event_shape) == ((2,), (2,))
    torch.testing.assert_close(marginal.mean, (_t(0.6, 0.4) @ latents["means"]).expand(2, 2))
    mixed = marginal._mixture()
    torch.testing.assert_close(mixed.log_prob(Y.reshape(2, 2)), marginal.log_prob(Y.reshape(2, 2)))


def test_draws_of_data_that_share_the_switch_of_their_column():
    def columns():
        means = pyro.sample("means", _normal(2.0, (2,)))
        with pyro.plate("columns", 3, dim=-1):
            z = pyro.sample("z", dist.Categorical(_t(0.3, 0.7)))
            with pyro.plate("rows", 2, dim=-2):
                pyro.sample("y", dist.Normal(means[z], 0.5), obs=Y[:2, None].expand(2, 3))

    torch.manual_seed(0)
    marginal = Program(columns).run({"means": _t(-30.0, 50.0)}).observed["y"].distribution
    high = marginal.sample((400,)) > 10
    assert high.shape == (400, 2, 3)
    assert (high[:, 0] == high[:, 1]).all()
    assert (high[:, 0].double().mean(0) - 0.7).abs().max() < 4 * math.sqrt(0.21 / 400)


def test_a_site_without_its_data_has_its_marginal():
    program = Program(mixture)
    latents = _latents(program)
    run = record(mixture, latents, (None,), draw=placeholder_for_observed)
    assert list(run.observed) == ["y"] and run.open and not run.followed
    site = run.observed["y"]
    assert site.value is None
    weights = latents["logits"].softmax(-1)
    torch.testing.assert_close(site.distribution.mean, (weights @ latents["means"]).expand(4))


def test_a_discrete_target_without_a_value_is_left_open():
    def model(x, y=None):
        w = pyro.sample("w", _normal())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w * x), obs=y)
            pyro.deterministic("f", w * x)

    run = record(model, {"w": _t(1.0)}, (Y,), draw=placeholder_for_observed)
    assert list(run.observed) == ["y"] and run.discrete is None and run.open
    torch.testing.assert_close(run.observed["y"].distribution.logits, Y)


# What cannot be summed out


def _switch(fn, likelihood=lambda k: dist.Normal(k, 1.0), **options):
    def model():
        k = pyro.sample("k", fn, **options)
        pyro.sample("y", likelihood(k), obs=Y[0])

    return model


COIN = dist.Bernoulli(_t(0.3))


def loop_of_a_plate():
    for i in pyro.plate("cells", 2):
        k = pyro.sample(f"k{i}", COIN)
        pyro.sample(f"y{i}", dist.Normal(k, 1.0), obs=Y[i])


def loose():
    k = pyro.sample("k", COIN.expand([4]))
    with pyro.plate("data", 4):
        pyro.sample("y", dist.Normal(k, 1.0), obs=Y)


def outside():
    with pyro.plate("data", 4):
        k = pyro.sample("k", COIN)
    pyro.sample("y", dist.Normal(k, 1.0), obs=Y)


def crossing():
    rows, columns = pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 2, dim=-1)
    with rows:
        a = pyro.sample("a", COIN)
    with columns:
        b = pyro.sample("b", COIN)
    with rows, columns:
        pyro.sample("y", dist.Normal(a + b, 1.0), obs=Y.reshape(2, 2))


def scaled():
    with poutine.scale(scale=3.0):
        k = pyro.sample("k", COIN)
    pyro.sample("y", dist.Normal(k, 1.0), obs=Y[0])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_switch(dist.Poisson(_t(3.0))), r"'k' \(Poisson\).*cannot be enumerated"),
        (_switch(COIN, infer={"enumerate": "sequential"}), "'k'.*sequential enumeration"),
        (loop_of_a_plate, "'k0'.*sequential plate 'cells'"),
        (loose, "'k'.*no plate's"),
        (outside, "'y'.*'k'.*'data'"),
        (crossing, "'a'.*'b'.*cross"),
        (scaled, "'k'.*scale 3"),
    ],
)
def test_what_is_refused(model, words):
    with pytest.raises(UnsupportedProgramError, match=words):
        Program(model).log_joint({})
