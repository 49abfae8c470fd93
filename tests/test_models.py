"""The ready-made programs have the documented densities."""

import math
import warnings
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_bdl import Predictive, Program, Samples, bayesianize, handlers, models
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, AutoMeanField
from pyro_bdl.program import record

D = torch.float64
N = 6


def _bnn(outputs, inputs=2):
    net = nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs)).to(D)
    return bayesianize(net)


def _heteroscedastic(y, out):
    f, raw = (half.squeeze(-1) for half in out.chunk(2, -1))
    return dist.Normal(f, nn.functional.softplus(raw)).log_prob(y).reshape(N, -1).sum(-1)


REAL, COUNTS = torch.randn(N, dtype=D), torch.tensor([0.0, 1, 4, 2, 0, 7], dtype=D)
PAIRS = torch.randn(N, 2, dtype=D)
CLASSES, BITS = torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([0, 1, 1, 0, 1, 0])
CASES = {
    "regression": (
        lambda **k: models.Regression(_bnn(1), noise=0.3, **k),
        REAL,
        lambda y, out: dist.Normal(out[:, 0], 0.3).log_prob(y),
    ),
    "regression, two targets": (
        lambda **k: models.Regression(_bnn(2), noise=0.3, **k),
        PAIRS,
        lambda y, out: dist.Normal(out, 0.3).log_prob(y).sum(-1),
    ),
    "heteroscedastic": (
        lambda **k: models.HeteroscedasticRegression(_bnn(2), **k),
        REAL,
        _heteroscedastic,
    ),
    "heteroscedastic, two targets": (
        lambda **k: models.HeteroscedasticRegression(_bnn(4), **k),
        PAIRS,
        _heteroscedastic,
    ),
    "student, two targets": (
        lambda **k: models.StudentTRegression(_bnn(2), noise=0.3, df=3.0, **k),
        PAIRS,
        lambda y, out: dist.StudentT(3.0, out, 0.3).log_prob(y).sum(-1),
    ),
    "classification": (
        lambda **k: models.Classification(_bnn(3), **k),
        CLASSES,
        lambda y, out: out.log_softmax(-1)[torch.arange(N), y],
    ),
    "binary, booleans": (
        lambda **k: models.BinaryClassification(_bnn(1), **k),
        BITS.bool(),
        lambda y, out: nn.functional.logsigmoid(torch.where(y, 1, -1) * out[:, 0]),
    ),
    "poisson": (
        lambda **k: models.PoissonRegression(_bnn(1), **k),
        COUNTS,
        lambda y, out: dist.Poisson(out[:, 0].exp()).log_prob(y),
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


def _output(model, latents, x):
    bnn = model.network
    return record(bnn, {name: latents[name] for name in bnn.sites}, (x,)).result


def _draw(program):
    return program.constrain(0.5 * torch.randn(program.size, dtype=D))[0]


def test_the_log_likelihood_by_hand(case):
    make, y, by_hand = case
    model, x = make(), torch.randn(N, 2, dtype=D)
    program = Program(model, x, y)
    latents = _draw(program)
    likelihood = program.log_likelihood(latents)["y"]
    assert likelihood.shape == (N,)
    expected = by_hand(y, _output(model, latents, x))
    torch.testing.assert_close(likelihood, expected, rtol=1e-10, atol=1e-12)
    f = program.run(latents).deterministic["f"]
    assert f.shape[0] == N
    assert torch.equal(f, program.run(latents, x).deterministic["f"])
    assert program.log_likelihood(latents, x[:1], y[:1])["y"].shape == (1,)
    if y.dim() == 1:
        assert torch.equal(program.log_likelihood(latents, x, y[:, None])["y"], likelihood)


def test_minibatches_count_for_all_data(case):
    make, y, _ = case
    model, x = make(num_data=3 * N), torch.randn(N, 2, dtype=D)
    program = Program(model, x, y)
    latents = _draw(program)
    prior = program.log_prior(latents)
    per_datum = program.log_likelihood(latents)["y"]
    torch.testing.assert_close(program.log_joint(latents), prior + 3.0 * per_datum.sum())
    halves = [program.log_joint(latents, x[i : i + 3], y[i : i + 3]) for i in (0, 3)]
    torch.testing.assert_close(sum(halves) / 2, program.log_joint(latents))


def test_a_batch_beyond_num_data(case):
    make, y, _ = case
    model = make(num_data=N - 1)
    with pytest.raises(ValueError, match=f"num_data is {N - 1}.*{N} rows"):
        model(torch.randn(N, 2, dtype=D), y)
    with pytest.raises(ValueError, match="num_data must be at least 1, got 0"):
        make(num_data=0)
    for bad in (2.5, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"num_data must be a whole number, got {bad}"):
            make(num_data=bad)
    for bad in ("10", True):
        with pytest.raises(TypeError, match=f"num_data must be a whole number, got {bad!r}"):
            make(num_data=bad)
    for good in (1e5, np.int64(100_000), torch.tensor(100_000)):
        assert make(num_data=good).num_data == 100_000


def test_shapes_without_targets(case):
    make, y, _ = case
    model, x = make(num_data=100), torch.randn(N, 2, dtype=D)
    trace = poutine.trace(model).get_trace(x)
    drawn = trace.nodes["y"]
    assert not drawn["is_observed"]
    assert drawn["value"].shape == y.shape
    assert drawn["scale"] == 1.0
    assert drawn["fn"].batch_shape == (N,)
    support = drawn["fn"].support
    assert support.check(drawn["value"]).all()
    trace.nodes["y"]["fn"].log_prob(y.to(drawn["value"].dtype))  # a target that it would take
    drawn = Predictive(model, AutoMeanField(model).prototype(x, y), 5)(x[:4])["y"]
    assert drawn.shape == (5, 4, *y.shape[1:]) and drawn.dtype == trace.nodes["y"]["value"].dtype


def test_wrong_target_shapes_name_both(case):
    make, y, _ = case
    model, x = make(), torch.randn(N, 2, dtype=D)
    for wrong in (
        y[:-1],
        torch.stack([y, y, y], -1),
        y[:, None, None].expand(N, 2, 2, *y.shape[1:]),
    ):
        with pytest.raises(ValueError, match="y has shape"):
            model(x, wrong)


def test_device_is_followed(case):
    make, y, _ = case
    model, x = make().to("meta"), torch.randn(N, 2, dtype=D, device="meta")
    run = record(model, {}, (x, y.to("meta")))
    assert run.observed["y"].log_prob().device.type == "meta"
    assert {site.value.device.type for site in run.latents.values()} == {"meta"}


def test_inferred_and_learned_noise_follow_the_device():
    x = torch.randn(N, 2, dtype=D, device="meta")
    for noise in (dist.HalfNormal(1.0), PyroParam(torch.tensor(1.0), constraints.positive)):
        run = record(models.Regression(_bnn(1), noise=noise).to("meta"), {}, (x, x[:, 0]))
        assert run.observed["y"].distribution.scale.device.type == "meta"


# Hyperparameters


def test_an_inferred_noise_by_hand():
    model, x = models.Regression(_bnn(1), noise=dist.HalfNormal(2.0)), torch.randn(N, 2, dtype=D)
    program = Program(model, x, REAL)
    assert program.latents["noise"].dtype == D
    default = Program(models.Regression(_bnn(1)), x, REAL).run(program.initial).latents["noise"]
    assert isinstance(default.distribution, dist.HalfNormal) and default.distribution.scale == 1.0
    latents = _draw(program)
    standard = dist.Normal(torch.zeros((), dtype=D), 1.0)
    weights = sum(standard.log_prob(latents[n]).sum() for n in model.network.sites)
    s = latents["noise"]
    half_normal = dist.HalfNormal(torch.tensor(2.0, dtype=D)).log_prob(s)
    torch.testing.assert_close(program.log_prior(latents), weights + half_normal)
    expected = dist.Normal(_output(model, latents, x)[:, 0], s).log_prob(REAL)
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected)


@pytest.mark.parametrize("start", [0.7, torch.tensor(0.7)], ids=["number", "tensor"])
def test_a_learned_noise(start):
    noise = PyroParam(start, constraints.positive)
    model = models.StudentTRegression(_bnn(1), noise=noise, df=dist.Gamma(4.0, 1.0))
    x = torch.randn(N, 2, dtype=D)
    program = Program(model, x, REAL)
    assert {"df"} == set(program.latents) - set(model.network.sites)
    latents = _draw(program)
    f = _output(model, latents, x)[:, 0]
    expected = dist.StudentT(latents["df"], f, 0.7).log_prob(REAL)
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected, rtol=1e-6, atol=1e-6)
    program.log_joint(latents).backward()
    assert model.noise_unconstrained.grad != 0
    assert "noise_unconstrained" in model.state_dict()


# Errors that say what to do

XS = torch.randn(N, 2, dtype=D)
HALVES = "two outputs per target"


@pytest.mark.parametrize(
    "call, words",
    [
        *(
            (lambda bad=bad: models.Regression(_bnn(1), noise=bad), "noise must be positive")
            for bad in (0.0, -1.0, math.nan, math.inf)
        ),
        (lambda: models.StudentTRegression(_bnn(1), df=0.0), "df must be positive"),
        (lambda: models.Regression(_bnn(1), noise="loud"), "noise must be a number"),
        (lambda: models.Regression(_bnn(2), noise=[0.1, 0.2, 0.3])(XS), "noise holds 3 numbers"),
        (lambda: models.StudentTRegression(_bnn(2), noise=[0.1, -0.2]), "positive finite numbers"),
        (lambda: models.HeteroscedasticRegression(_bnn(2), floor=0.0), "floor must be positive"),
        (lambda: models.HeteroscedasticRegression(_bnn(3))(XS), HALVES),
        (lambda: models.HeteroscedasticRegression(_bnn(1))(XS, XS[:, 0]), HALVES),
        (lambda: models.Classification(_bnn(1))(XS), "per class.*BinaryClassification"),
        (lambda: models.Classification(_bnn(1))(XS, CLASSES), "per class.*BinaryClassification"),
        (lambda: models.Classification(_bnn(3))(XS, CLASSES.to(D)), "integers"),
        (lambda: models.Regression(_bnn(1), noise=1.0)(XS, REAL.tolist()), "tensor"),
        (lambda: models.Regression(_bnn(1), noise=0.3)(XS, REAL[:1]), "y has shape"),
        (lambda: models.Regression(_bnn(1), noise=1.0)(XS[:0], REAL[:0]), "no rows"),
        (lambda: Program(models.Regression(_bnn(1)), XS, BITS.bool()), r"boolean.*y\.float\(\)"),
    ],
)
def test_refusals(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize(
    "model,y",
    [
        (lambda: models.Classification(_bnn(3)), CLASSES + 1),
        (lambda: models.BinaryClassification(_bnn(1)), BITS + 1),
        (lambda: models.PoissonRegression(_bnn(1)), COUNTS - 1),
    ],
    ids=["classes", "bits", "counts"],
)
def test_targets_outside_the_support_are_told_at_the_first_step(model, y):
    model = model()
    x = torch.randn(N, 2, dtype=D)
    with pytest.raises(ValueError, match="support"):
        TemperedTrace_ELBO()(model, AutoMAP(model))(x, y)
    with pytest.raises(ValueError, match="support"):
        Program(model, x, y)


def test_a_sequence_of_outputs_per_row():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3).to(D)

        def forward(self, x):
            return self.linear(x)

    x, y = torch.randn(4, 5, 2, dtype=D), torch.randint(3, (4, 5))
    model = models.Classification(bayesianize(Net()))
    program = Program(model, x, y)
    latents = _draw(program)
    out = _output(model, latents, x)
    expected = out.log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1)
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected)


def test_a_hand_written_network_fits_too():
    class Net(PyroModule):
        def forward(self, x):
            w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
            return x @ w

    x = torch.randn(N, 2, dtype=D)
    program = Program(handlers.temper(models.Regression(Net(), noise=0.5), 0.5), x, REAL)
    w = torch.randn(2, dtype=D)
    prior = dist.Normal(torch.zeros((), dtype=D), 1.0).log_prob(w).sum()
    expected = prior + 2 * dist.Normal(x @ w, 0.5).log_prob(REAL).sum()
    torch.testing.assert_close(program.log_joint({"w": w}), expected)


# Networks that take keywords and give more than a tensor


@dataclass
class _Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class _Keywords(nn.Module):
    """Takes keywords; gives ``kind`` of its two results."""

    def __init__(self, kind=_Output):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(2, 3).to(D)

    def forward(self, points, mask=None):
        hidden = self.linear(points if mask is None else points * mask)
        return self.kind(hidden.sin(), hidden)


class _Whole(nn.Module):
    """Takes a dict as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3).to(D)

    def forward(self, x):
        return self.linear(x["points"] * x["mask"]).sin()


def _masked():
    mask = (torch.arange(2 * N).reshape(N, 2) % 3).to(D)
    return {"points": torch.randn(N, 2, dtype=D), "mask": mask}


@pytest.mark.parametrize("net", [_Keywords(), _Whole()], ids=["keywords", "whole"])
def test_a_dict_is_the_networks_keywords_or_its_argument(net):
    x = _masked()
    model = models.Classification(bayesianize(net))
    program = Program(model, UserDict(x), CLASSES)
    latents = _draw(program)
    weight, bias = latents["linear.weight"], latents["linear.bias"]
    output = nn.functional.linear(x["points"] * x["mask"], weight, bias).sin()
    expected = output.log_softmax(-1)[torch.arange(N), CLASSES]
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected)
    torch.testing.assert_close(program.log_likelihood(latents, x, CLASSES)["y"], expected)
    if isinstance(net, _Keywords):
        for args, kwargs in (((), x), ((x["points"],), {"mask": x["mask"]})):
            found = program.log_likelihood(latents, *args, y=CLASSES, **kwargs)["y"]
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "kind,output",
    [
        (_Output, None),
        (_Output, "logits"),
        (lambda f, h: {"logits": f, "hidden": h}, None),
        (lambda f, h: (h, f), 1),
        (lambda f, h: {"a": {"b": f}}, lambda found: found["a"]["b"]),
        (lambda f, h: SimpleNamespace(f=f), "f"),
    ],
    ids=["default", "attribute", "key", "place", "function", "other name"],
)
def test_the_output_that_is_f(kind, output):
    net, x = _Keywords(kind), torch.randn(N, 2, dtype=D)
    f = Predictive(models.Classification(bayesianize(net), output=output), _at_net(net))(x)["f"]
    torch.testing.assert_close(f[0], net.linear(x).sin())


def _at_net(net):
    values = {name: value.detach()[None, None] for name, value in net.named_parameters()}
    return Samples(values)


@pytest.mark.parametrize("output", [None, "logits", 7, "hidden"])
def test_an_output_that_is_not_there_is_named(output):
    net = _Keywords(lambda f, h: SimpleNamespace(f=f, hidden=None))
    model = models.Classification(bayesianize(net), output=output)
    with pytest.raises(TypeError, match=f"SimpleNamespace without a tensor {output or 'logits'!r}"):
        model(torch.randn(N, 2, dtype=D))
    with pytest.raises(TypeError, match="network's inputs"):
        model(y=CLASSES)


NOISES = torch.tensor([0.3, 2.0], dtype=D)


@pytest.mark.parametrize(
    "noise",
    [[0.3, 2.0], NOISES, PyroParam(NOISES.clone(), constraints.positive), dist.HalfNormal(NOISES)],
    ids=["numbers", "tensor", "learned", "inferred"],
)
def test_each_target_has_its_own_noise(noise):
    model, x = models.Regression(_bnn(2), noise=noise), torch.randn(N, 2, dtype=D)
    with pyro.validation_enabled():
        program = Program(model, x, PAIRS)
    latents = _draw(program)
    scale = latents.get("noise", NOISES)
    assert scale.shape == (2,)
    expected = dist.Normal(_output(model, latents, x), scale).log_prob(PAIRS).sum(-1)
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected)
    if "noise" in latents:
        prior = program.run(latents).latents["noise"]
        assert prior.log_prob().shape == ()
        expected = dist.HalfNormal(NOISES).log_prob(scale).sum()
        torch.testing.assert_close(prior.log_prob(), expected)


def test_the_noise_of_a_heteroscedastic_network_has_a_floor():
    x = torch.randn(5, 2, dtype=D)
    model = models.HeteroscedasticRegression(_bnn(2), floor=0.3)
    trace = pyro.poutine.trace(model).get_trace(x)
    raw = trace.nodes["noise"]["value"] - 0.3
    assert (raw > 0).all()
    distribution = base_distribution(trace.nodes["y"]["fn"])
    assert torch.equal(distribution.scale.flatten(), trace.nodes["noise"]["value"].flatten())


# What the network returns


class _Squeezed(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

    def forward(self, x):
        return self.layer(x).squeeze()


def test_a_network_that_squeezes_takes_a_batch_of_one_row():
    net = _Squeezed().to(D)
    model = models.Regression(bayesianize(net), noise=0.3, num_data=5)
    kind = {name: value.detach() for name, value in net.named_parameters()}
    y = torch.randn(5, dtype=D)
    whole = Program(model, XS[:5], y).log_likelihood(kind)["y"]
    for row in range(5):
        part = Program(model, XS[row : row + 1], y[row : row + 1]).log_likelihood(kind)["y"]
        torch.testing.assert_close(part, whole[row : row + 1])
    guide = AutoMeanField(model).prototype(XS[:5], y)
    for start in (0, 3):  # the last batch of a loader has one row
        rows = slice(start, start + 4)
        assert TemperedTrace_ELBO().loss(model, guide, XS[:5][rows], y[rows]) > 0
    full, kron = (
        AutoLaplaceGGN(model, structure=name).laplace_approximation((XS[:5], y))
        for name in ("full", "kron")
    )
    torch.testing.assert_close(full.location(), kron.location())
    features = torch.cat([XS[:5], torch.ones(5, 1, dtype=D)], 1)
    exact = features.T @ features / 0.3**2 + torch.eye(3, dtype=D)
    torch.testing.assert_close(full.variances(), exact.inverse().diagonal())


def test_one_number_for_several_rows_is_refused():
    class Summed(_Squeezed):
        def forward(self, x):
            return self.layer(x).sum()

    model = models.Regression(bayesianize(Summed().to(D)), noise=0.3)
    with pytest.raises(ValueError, match="a single number for 6 rows"):
        Program(model, XS, REAL)


ENDS = {
    "softmax": (3, lambda z: z.softmax(-1), True),
    "a module": (3, nn.Softmax(-1), True),
    "in a view": (3, lambda z: torch.softmax(z[None], -1)[0], True),
    "log-softmax": (3, nn.LogSoftmax(-1), False),
    "attention": (3, lambda z: z.softmax(-1) @ torch.ones(3, 3, dtype=D), False),
    "logits": (3, nn.Identity(), False),
    "sigmoid": (1, nn.Sigmoid(), True),
    "squeezed": (1, lambda z: torch.sigmoid(z).squeeze(-1), True),
}


@pytest.mark.parametrize("name", ENDS)
def test_probabilities_in_the_place_of_logits_are_told_once(name):
    outputs, end, told = ENDS[name]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, outputs)

        def forward(self, x):
            return end(self.layer(x))

    kind = models.Classification if outputs > 1 else models.BinaryClassification
    model = kind(bayesianize(Net().to(D)))
    y = CLASSES if outputs > 1 else BITS
    for first in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Program(model, XS, y)
        found = [str(w.message) for w in caught if "takes logits" in str(w.message)]
        assert len(found) == (told and first)


def test_probabilities_of_a_head_are_told_and_other_outputs_are_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 4)

        def forward(self, x):
            z = self.layer(x)
            return {"share": z[:, :1].sigmoid(), "kind": z[:, 1:].softmax(-1)}

    heads = {"share": models.Regression(noise=0.1), "kind": models.Classification()}
    model = models.MultiOutput(bayesianize(Net().to(D)), heads)
    with pytest.warns(BdlWarning, match=r"y\['kind'\] are probabilities .*softmax.*Classification"):
        Program(model, XS, {"share": REAL, "kind": CLASSES})
