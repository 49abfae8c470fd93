"""Weight priors: closed forms, shapes, hyperparameters as sites or learned parameters."""

import contextlib
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.parameters import learned
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_bdl import Program, bayesianize, models, priors
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.program import record


def _net(dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def _log_normal(w, scale):
    return dist.Normal(torch.zeros_like(w), scale).log_prob(w)


CLOSED_FORMS = {
    "normal": (priors.Normal(0.7), lambda w: _log_normal(w, 0.7)),
    "fan-in": (
        priors.FanIn(1.3),
        lambda w: _log_normal(w, 1.3 / math.sqrt(w.shape[1]) if w.dim() > 1 else 1.3),
    ),
    "laplace": (priors.Laplace(0.4), lambda w: -w.abs() / 0.4 - math.log(0.8)),
    "student": (priors.StudentT(3.0, 0.5), lambda w: dist.StudentT(3.0, 0.0, 0.5).log_prob(w)),
}


@pytest.mark.parametrize("kind", CLOSED_FORMS)
def test_log_densities_are_the_closed_forms(kind):
    (prior, closed_form), dtype = CLOSED_FORMS[kind], torch.float64
    bnn = bayesianize(_net(dtype), prior)
    run = record(bnn, {}, (torch.randn(5, 3, dtype=dtype),))
    for name, value in _net().named_parameters():
        site = run.latents[name]
        assert site.value.shape == value.shape
        assert site.value.dtype == dtype
        assert site.distribution.event_shape == value.shape
        torch.testing.assert_close(site.log_prob(), closed_form(site.value).sum())


def test_fan_in_counts_what_a_unit_sees():
    """Normal(0, gain^2 / fan_in) (Neal 1996, section 2.1)."""
    w = torch.zeros(6, 2, 3, 3)
    conv, embedding = nn.Conv2d(4, 6, 3, groups=2), nn.Embedding(6, 8)
    prior = priors.FanIn(2.0)
    torch.testing.assert_close(prior("", conv, w).base_dist.scale[0, 0, 0, 0].item(), 2 / 18**0.5)
    assert (prior("", embedding, embedding.weight).base_dist.scale == 2.0).all()


SCALED = {
    "Normal": priors.Normal,
    "FanIn": priors.FanIn,
    "Laplace": priors.Laplace,
    "StudentT": lambda scale: priors.StudentT(4.0, scale),
    "StudentT df": lambda df: priors.StudentT(df, 1.0),
    "Horseshoe": priors.Horseshoe,
}


@pytest.fixture(params=SCALED.values(), ids=SCALED.keys())
def scaled(request):
    return request.param


def test_a_hyperprior_is_one_site_that_all_weights_share(scaled):
    dtype = torch.float64
    bnn = bayesianize(_net(dtype), scaled(dist.Gamma(2.0, 3.0)))
    run = record(bnn, {}, (torch.randn(5, 3, dtype=dtype),))
    (hyper,) = [name for name in run.latents if name.startswith("prior.")]
    assert run.latents[hyper].value.dtype == dtype
    assert run.latents[hyper].value.shape == ()
    assert list(run.latents).index(hyper) == 0
    values = {name: site.value for name, site in run.latents.items()}
    moved = record(bnn, values | {hyper: values[hyper] * 2}, (torch.randn(5, 3, dtype=dtype),))
    changed = {
        name
        for name, site in run.latents.items()
        if not torch.equal(site.log_prob(), moved.latents[name].log_prob())
    }
    users = [name for name in run.latents if name.endswith("global_scale")] or [
        name for name, _ in _net().named_parameters()
    ]
    assert changed == {hyper, *users}


def test_the_hierarchical_density_by_hand():
    bnn = bayesianize(nn.Linear(2, 1, bias=False), priors.Normal(dist.HalfNormal(2.0)))
    program = Program(bnn, torch.zeros(1, 2))
    w, s = torch.tensor([[0.3, -0.8]]), torch.tensor(0.6)
    expected = _log_normal(w, 0.6).sum() + dist.HalfNormal(2.0).log_prob(s)
    torch.testing.assert_close(program.log_prior({"weight": w, "prior.scale": s}), expected)


def _regression(prior, dtype=torch.float32):
    return models.Regression(bayesianize(_net(dtype), prior), noise=0.5)


def test_a_learned_scale_gets_a_gradient(scaled):
    dtype = torch.float64
    model = _regression(scaled(learned(2.0)), dtype)
    x, y = torch.randn(6, 3, dtype=dtype), torch.randn(6, 2, dtype=dtype)
    guide = AutoMeanField(model).prototype(x, y)
    for site in record(model.network, {}, (x,)).latents.values():
        parts = [p for p in vars(site.distribution.base_dist).values() if torch.is_tensor(p)]
        assert {part.dtype for part in parts} <= {dtype}
    loss = TemperedTraceMeanField_ELBO()(model, guide)(x, y)
    assert loss.dtype == dtype
    loss.backward()
    (hyper,) = [p for name, p in model.named_parameters() if "hyper" in name]
    assert hyper.grad is not None and hyper.grad != 0


def test_per_layer_has_one_hyperparameter_per_layer():
    x = torch.randn(2, 3)
    bnn = bayesianize(_net(), priors.PerLayer(priors.Normal(dist.HalfNormal(1.0))))
    run = record(bnn, {}, (x,))
    assert [n for n in run.latents if "prior" in n] == ["0.prior.scale", "2.prior.scale"]
    values = {name: site.value for name, site in run.latents.items()}
    moved = record(bnn, values | {"0.prior.scale": values["0.prior.scale"] + 1}, (x,))
    changed = {
        name
        for name in values
        if not torch.equal(run.latents[name].log_prob(), moved.latents[name].log_prob())
    }
    assert changed == {"0.prior.scale", "0.weight", "0.bias"}
    learning = bayesianize(_net(), priors.PerLayer(priors.Normal(learned(2.0))))
    assert len(list(learning.parameters())) == 2
    assert list(record(learning, {}, (x,)).latents) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    rule = priors.ByName({"*": priors.Normal(dist.HalfNormal(1.0))})
    run = record(bayesianize(_net(), priors.PerLayer(rule), name="net"), {}, (x,))
    assert sum(name.endswith("scale") for name in run.latents) == 2
    assert next(iter(run.latents)).startswith("net.")


def test_by_name():
    x = torch.randn(2, 3)
    rules = {
        "0.*": priors.Normal(dist.HalfNormal(1.0)),
        "*.weight": priors.Laplace(dist.HalfNormal(2.0)),
        "2.bias": None,
    }
    bnn = bayesianize(_net(), priors.ByName(rules))
    run = record(bnn, {}, (x,))
    assert list(run.latents) == [
        "prior[0.*].scale",
        "0.weight",
        "0.bias",
        "prior[*.weight].scale",
        "2.weight",
    ]
    assert bnn.learnable == ("2.bias",)
    assert isinstance(run.latents["2.weight"].distribution.base_dist, dist.Laplace)


def test_horseshoe_by_hand():
    """Source: Carvalho, Polson & Scott 2010."""
    bnn = bayesianize(nn.Linear(2, 1, bias=False), priors.Horseshoe(0.5))
    program = Program(bnn, torch.zeros(1, 2))
    assert list(program.latents) == ["weight.global_scale", "weight.local_scale", "weight"]
    assert program.latents["weight.local_scale"].shape == (1, 2)
    tau, local, w = torch.tensor(0.3), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.1, -0.7]])
    expected = (
        dist.HalfCauchy(0.5).log_prob(tau)
        + dist.HalfCauchy(1.0).log_prob(local).sum()
        + dist.Normal(0.0, tau * local).log_prob(w).sum()
    )
    values = {"weight.global_scale": tau, "weight.local_scale": local, "weight": w}
    torch.testing.assert_close(program.log_prior(values), expected)


def test_any_callable_is_a_prior():
    def prior(name, module, parameter):
        if name.endswith("bias"):
            return None
        assert isinstance(module, nn.Linear)
        mixture = dist.Normal(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.1]))
        return dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), mixture)

    bnn = bayesianize(_net(torch.float64), prior)
    assert bnn.sites == ("0.weight", "2.weight")
    model = models.Regression(bnn, noise=0.5)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    program = Program(model, x, y)
    vectors = torch.randn(3, program.size, dtype=torch.float64)
    w = program.constrain(vectors[0])[0]["0.weight"]
    by_hand = torch.logaddexp(_log_normal(w, 1.0), _log_normal(w, 0.1)) - math.log(2)
    site = program.run(program.constrain(vectors[0])[0]).latents["0.weight"]
    torch.testing.assert_close(site.log_prob(), by_hand.sum())
    loop = torch.stack([program.log_density(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(program.log_density)(vectors), loop)
    TemperedTraceMeanField_ELBO()(model, AutoMeanField(model))(x, y).backward()


def test_rules_of_layers_share_nothing():
    """Two PerLayer rules for the same layers: each with a scale of its own."""
    rules = {"*.weight": priors.PerLayer(priors.Normal(learned(0.5)))}
    rules["*.bias"] = priors.PerLayer(priors.Normal(learned(3.0)))
    model = _regression(priors.ByName(rules))
    latents = record(model.network, {}, (torch.randn(2, 3),)).latents
    scales = {
        name: site.distribution.base_dist.scale.mean().item() for name, site in latents.items()
    }
    expected = {"0.weight": 0.5, "0.bias": 3.0, "2.weight": 0.5, "2.bias": 3.0}
    assert scales == pytest.approx(expected)
    names = [name for name, _ in model.named_parameters() if "hyper" in name]
    assert len(names) == 4


# Layers whose scale does not matter


class _Residual(nn.Module):
    """x + norm(inner(x)): ``inner`` is normalized, ``outer`` is not."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x):
        x = self.outer(x)
        return x + self.norm(self.inner(x))


class _Stream(nn.Module):
    """A residual stream that is normalized where it is read: ``embed``, ``start`` and ``down`` can
    be scaled together. So can ``up``, without biases, if ``down`` is scaled the other way."""

    def __init__(self):
        super().__init__()
        self.embed, self.start = nn.Linear(3, 4), nn.Parameter(torch.randn(4))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x) + self.start
        x = x + self.down(self.up(self.norms[0](x)).relu())
        return self.head(self.norms[1](x))


NORMALIZED = {
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
        ),
        (8, 1, 6, 6),
        ("0",),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)),
        (8, 3),
        ("0",),
    ),
    "two": (
        lambda: nn.Sequential(
            nn.Linear(3, 5),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(5, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 2),
        ),
        (8, 3),
        ("0", "4"),
    ),
    "tanh in between": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)),
        (8, 3),
        (),
    ),
    "residual": (_Residual, (8, 3), ("inner",)),
    "residual stream": (_Stream, (8, 3), ("start + embed + down",)),
}


@pytest.mark.parametrize("kind", NORMALIZED)
def test_layers_before_a_normalization_are_found(kind):
    make, shape, expected = NORMALIZED[kind]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    found = priors.PerNormalizedGroup(priors.Normal(learned(0.5)), net, x)
    assert found.groups == expected
    assert all(torch.equal(net.state_dict()[key], value) for key, value in state.items())
    assert all(module.training for module in net.modules())
    model = models.Regression(bayesianize(net, found))
    names = {name for name, _ in model.named_parameters() if "hyper" in name}
    labels = ["".join(c if c.isalnum() else "_" for c in group) for group in expected]
    kept = {f"network.hyper_{label}_prior_scale_unconstrained" for label in labels}
    assert names == kept | {"network.hyper_prior_scale_unconstrained"}


def test_a_group_has_its_own_scale():
    make, shape, _ = NORMALIZED["linear"]
    net, x = make(), torch.randn(shape)
    prior = priors.PerNormalizedGroup(priors.Normal(learned(0.5)), net, x)
    bnn = bayesianize(net, prior)
    with torch.no_grad():
        bnn.hyper_0_prior_scale_unconstrained.fill_(math.log(3.0))
    latents = record(bnn, {}, (x,)).latents
    for name, site in latents.items():
        expected = 3.0 if name.startswith("0.") else 0.5
        assert site.distribution.base_dist.scale.mean().item() == pytest.approx(expected)
    assert not prior.constant
    assert priors.PerNormalizedGroup(priors.Normal(0.5), net, x).constant


# Numbers made learnable


@pytest.mark.parametrize(
    ("prior", "name"),
    [
        (priors.Normal(0.7), "scale"),
        (priors.FanIn(0.7), "gain"),
        (priors.Laplace(0.7), "scale"),
        (priors.StudentT(3.0, 0.7), "scale"),
        (priors.Horseshoe(0.7), "scale"),
        (priors.Moped(0.7), "delta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_learnable(prior, name):
    found = priors.learnable(prior)
    declared = getattr(found, name)
    assert type(found) is type(prior) and isinstance(declared, PyroParam)
    assert declared.init_value.item() == pytest.approx(0.7)
    assert declared.constraint is constraints.positive
    assert getattr(prior, name) == 0.7 and not found.constant
    assert priors.learnable(found) is found


def test_learnable_inside_others():
    rules = {"*.weight": priors.FanIn(0.7), "*.bias": priors.Normal(0.2), "*": None}
    found = priors.learnable(priors.ByName(rules))
    assert list(found.rules) == list(rules) and found.rules["*"] is None
    assert found.rules["*.bias"].scale.init_value.item() == pytest.approx(0.2)
    labels = {rule.label for rule in found.rules.values() if rule is not None}
    assert labels == {"prior[*.weight]", "prior[*.bias]"}
    layers = priors.learnable(priors.PerLayer(priors.Normal(0.3)))
    assert isinstance(layers.prior.scale, PyroParam)
    net, x = NORMALIZED["linear"][0](), torch.randn(8, 3)
    groups = priors.learnable(priors.PerNormalizedGroup(priors.Normal(0.3), net, x))
    assert isinstance(groups.prior.scale, PyroParam) and groups.groups == ("0",)


@pytest.mark.parametrize(
    ("prior", "has_scale"),
    [
        (priors.Normal(0.7), True),
        (priors.Normal(dist.HalfNormal(1.0)), False),
        (lambda *a: None, False),
        (priors.PerLayer(priors.FanIn(0.7)), True),
        (priors.ByName({"*.weight": priors.FanIn(0.7), "*": None}), True),
        (priors.ByName({"*.weight": priors.FanIn(0.7), "*": lambda *a: None}), False),
    ],
)
def test_whether_a_prior_has_a_scale(prior, has_scale):
    assert priors.has_scale(prior) == has_scale
    with contextlib.nullcontext() if has_scale else pytest.raises(TypeError, match=SCALELESS):
        priors.learnable(prior)


# Around a pretrained network


def test_pretrained_is_centered_at_the_networks_values():
    net = _net()
    bnn = bayesianize(net, priors.Pretrained(0.3))
    run = record(bnn, {}, (torch.randn(5, 3),))
    for name, value in net.named_parameters():
        site = run.latents[name]
        expected = _log_normal(site.value - value.detach(), 0.3).sum()
        torch.testing.assert_close(site.log_prob(), expected)


def test_moped_scales_with_the_networks_values():
    """Normal(w0, (delta max(|w0|, floor))^2) (Krishnan et al. 2020, section 3)."""
    net = _net()
    with torch.no_grad():
        net[0].bias.zero_()
    bnn = bayesianize(net, priors.Moped(0.2, floor=0.01))
    run = record(bnn, {}, (torch.randn(5, 3),))
    for name, value in net.named_parameters():
        normal = run.latents[name].distribution.base_dist
        torch.testing.assert_close(normal.loc, value.detach())
        torch.testing.assert_close(normal.scale, 0.2 * value.detach().abs().clamp(min=0.01))
    assert run.latents["0.bias"].distribution.base_dist.scale.min() > 0


@pytest.mark.parametrize(
    "prior", [priors.Pretrained(0.3), priors.Moped(0.2)], ids=["pretrained", "moped"]
)
@pytest.mark.parametrize("assign", [False, True])
def test_they_follow_values_that_are_loaded(prior, assign):
    bnn, other = bayesianize(_net(), prior), bayesianize(_net(), prior)
    record(bnn, {}, (torch.randn(5, 3),))
    bnn.load_state_dict(other.state_dict(), assign=assign)
    mine, theirs = (record(b, {}, (torch.randn(5, 3),)).latents for b in (bnn, other))
    for name, site in mine.items():
        for attribute in ("loc", "scale"):
            torch.testing.assert_close(
                getattr(site.distribution.base_dist, attribute),
                getattr(theirs[name].distribution.base_dist, attribute),
            )


def test_matrix_normal_is_the_dense_normal():
    """Covariance scale^2 U kron V of the flattened weight (Gupta & Nagar 1999)."""
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64)
    columns = root @ root.mT + torch.eye(3, dtype=torch.float64)
    rows = torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=torch.float64)
    layer = nn.Linear(3, 2).double()
    found = priors.MatrixNormal(columns, rows, scale=0.7)("weight", layer, layer.weight)
    dense = dist.MultivariateNormal(
        torch.zeros(6, dtype=torch.float64), 0.49 * torch.kron(rows, columns)
    )
    w = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(found.log_prob(w), dense.log_prob(w.flatten()))
    model = bayesianize(layer, priors.ByName({"*": priors.MatrixNormal(columns, scale=0.7)}))
    bias = priors.MatrixNormal(columns, scale=0.7)("bias", layer, layer.bias)
    torch.testing.assert_close(
        bias.log_prob(torch.ones(2, dtype=torch.float64)),
        dist.Normal(0.0, 0.7).log_prob(torch.ones(2, dtype=torch.float64)).sum(),
    )
    drawn = pyro.poutine.trace(model).get_trace(torch.zeros(1, 3, dtype=torch.float64))
    assert drawn.nodes["weight"]["value"].shape == (2, 3)


# Refusals


def _of_weight(prior):
    layer = nn.Linear(3, 2)
    return prior("weight", layer, layer.weight)


SCALELESS = "has no scale, gain or delta that is a number"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: priors.Normal("wide"), "scale must be a number"),
        (lambda: priors.StudentT(df=0.0), "df must be positive"),
        (lambda: priors.Moped(floor=0.0), "floor must be positive"),
        (lambda: priors.ByName({}), "at least one rule"),
        (lambda: priors.ByName({"0.*": dist.Normal(0.0, 1.0)}), r"ByName\['0\.\*'\] must be"),
        (
            lambda: bayesianize(_net(), lambda name, value: None),
            r"called with \(name, module, parameter\), but takes \(name, value\)",
        ),
        (lambda: priors.PerLayer(lambda *a: None), "PerLayer takes one of the priors"),
        (lambda: priors.PerNormalizedGroup(priors.Normal(1.0), _net()), "needs some inputs"),
        (lambda: priors.learnable(lambda *a: None), SCALELESS),
        (lambda: priors.learnable(priors.Normal(dist.HalfNormal(1.0))), SCALELESS),
        (lambda: _of_weight(priors.MatrixNormal(torch.eye(4))), "columns has 4 columns"),
        (lambda: priors.MatrixNormal(rows=-torch.eye(2)), "rows must be positive definite"),
        (lambda: priors.MatrixNormal(torch.ones(2, 3)), "columns must be a square matrix"),
    ],
)
def test_refusals(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_scales(value):
    for kind in (priors.Normal, priors.FanIn, priors.Laplace, priors.Horseshoe, priors.Moped):
        with pytest.raises(ValueError, match="positive and finite"):
            kind(value)


def _log_prior(network, value=1.0):
    program = Program(network, torch.zeros(3, 2))
    ones = {name: torch.full_like(v, value) for name, v in program.initial.items()}
    return float(program.log_prior(ones))


def _exact(sd, loc=0.0):
    return float(3 * dist.Normal(loc, sd).log_prob(torch.tensor(1.0)))


def test_another_prior_counts_at_once():
    network = bayesianize(torch.nn.Linear(2, 1), priors.Normal(1.0))
    assert _log_prior(network) == pytest.approx(_exact(1.0))
    network.prior = priors.Normal(10.0)
    assert _log_prior(network) == pytest.approx(_exact(10.0))
    network.prior.scale = 3.0
    assert _log_prior(network) == pytest.approx(_exact(3.0))
    network.prior = priors.ByName({"weight": priors.Normal(2.0), "*": priors.Normal(2.0)})
    network.prior.rules["*"].scale = network.prior.rules["weight"].scale = 0.7
    assert _log_prior(network) == pytest.approx(_exact(0.7))


def test_another_prior_begins_with_its_own_hyperparameters():
    def learned(start):
        return priors.Normal(PyroParam(torch.tensor(start), dist.constraints.positive))

    network = bayesianize(torch.nn.Linear(2, 1), learned(2.0))
    assert _log_prior(network) == pytest.approx(_exact(2.0))
    network.prior = learned(5.0)
    assert _log_prior(network) == pytest.approx(_exact(5.0))
    network.prior = priors.Normal(3.0)
    assert _log_prior(network) == pytest.approx(_exact(3.0))
    assert not [name for name, _ in network.named_parameters() if "hyper" in name]
    for bad, error in ((lambda *_: None, ValueError), (dist.Normal(0.0, 1.0), TypeError)):
        with pytest.raises(error):
            network.prior = bad
    assert _log_prior(network) == pytest.approx(_exact(3.0))  # nothing has changed


class Around(priors.Prior):
    """A prior of a user's, around the network's values."""

    def __call__(self, name, module, parameter):
        return dist.Normal(parameter.detach().clone(), 1.0).to_event(parameter.dim())


class AroundToo(priors.Normal):
    __call__ = Around.__call__


class Declared(Around):
    constant = True

    def __call__(self, name, module, parameter):
        return dist.Normal(torch.zeros_like(parameter), 2.0).to_event(parameter.dim())


@pytest.mark.parametrize("kind", [Around, AroundToo])
def test_a_prior_of_a_users_is_made_in_each_run(kind):
    network = bayesianize(torch.nn.Linear(2, 1), kind())
    _log_prior(network)
    network.load_state_dict({k: torch.full_like(v, 5.0) for k, v in network.state_dict().items()})
    assert _log_prior(network) == pytest.approx(_exact(1.0, loc=5.0))


def test_which_priors_are_made_once():
    class Plain(priors.Normal):
        """A name alone."""

    assert Plain(2.0).constant and Declared().constant and priors.FanIn().constant
    assert not Around().constant and not AroundToo().constant and not priors.ARD().constant
    assert _log_prior(bayesianize(torch.nn.Linear(2, 1), Declared())) == pytest.approx(_exact(2.0))
    calls = []

    class Counted(Declared):
        constant = True

        def __call__(self, *args):
            calls.append(args)
            return super().__call__(*args)

    network = bayesianize(torch.nn.Linear(2, 1), Counted())
    _log_prior(network)
    count = len(calls)
    _log_prior(network)
    assert len(calls) == count
