"""Export to ArviZ, on whichever version is installed."""

import json
import warnings

import arviz
import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray
from helpers.conjugate import Conjugate, with_ones
from matplotlib import pyplot
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import Samples, to_arviz
from pyro_bdl.errors import BdlWarning

matplotlib.use("Agg")

OLD = arviz.__version__.startswith("0.")
N = 12
GROUPS = {
    "posterior",
    "sample_stats",
    "log_prior",
    "log_likelihood",
    "posterior_predictive",
    "prior",
    "prior_predictive",
    "observed_data",
    "constant_data",
}


def _data(dtype=torch.float32):
    x = torch.linspace(-1, 1, 2 * N, dtype=dtype).reshape(N, 2)
    return x, (3 * x[:, 0]).sin()


def _model(dtype=torch.float32, **options):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    options.setdefault("noise", dist.HalfNormal(torch.tensor(1.0, dtype=dtype)))
    return bdl.models.Regression(bdl.bayesianize(net), **options)


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x, y = _data()
    model = _model()
    return model, bdl.guides.AutoMeanField(model).prototype(x, y), x, y


@pytest.fixture(scope="module")
def chains():
    torch.manual_seed(0)
    model, (x, y) = _model(), _data()
    samples = bdl.mcmc.sample(
        model, x, y, num_warmup=60, num_samples=50, num_chains=2, progress=False
    )
    return model, samples, x, y


def _names(data):
    return set(data.groups()) if OLD else set(data.children)


# What it holds


def test_a_guides_groups_hold_its_draws_and_densities(fitted):
    model, guide, x, y = fitted
    data = to_arviz(model, guide, x, y, num_samples=7, prior_samples=3)
    assert _names(data) == GROUPS
    posterior = data["posterior"]
    assert posterior["0.weight"].shape == (1, 7, 3, 2)
    assert posterior["noise"].shape == (1, 7)
    assert data["prior"]["0.weight"].shape == (1, 3, 3, 2)
    assert data["prior_predictive"]["y"].shape == (1, 3, N)
    assert "say nothing" in posterior.attrs["draws"]
    np.testing.assert_array_equal(data["observed_data"]["y"], y)
    np.testing.assert_array_equal(data["constant_data"]["x"], x)
    assert set(data["constant_data"].data_vars) == {"x"}
    program = bdl.Program(model, x, y)
    for i in range(7):
        draw = {name: torch.tensor(posterior[name].values[0, i]) for name in program.latents}
        vector = program.unconstrain(draw)
        expected = program.log_likelihood(draw)["y"]
        found = data["log_likelihood"]["y"].values[0, i]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        lp = program.log_density(vector).item()
        assert data["sample_stats"]["lp"].values[0, i] == pytest.approx(lp, rel=1e-5)
        log_q = dist.Normal(guide.loc, guide.scale).log_prob(vector).sum().item()
        assert data["sample_stats"]["log_q"].values[0, i] == pytest.approx(log_q, rel=1e-4)
        mean = program.run(draw).deterministic["f"]
        np.testing.assert_allclose(data["posterior"]["f"].values[0, i], mean, rtol=1e-4, atol=1e-5)


def test_samples_keep_chains_and_statistics(chains):
    model, samples, x, y = chains
    data = to_arviz(model, samples, x, y, prior_samples=5)
    assert _names(data) == GROUPS
    for name, value in samples.latents.items():
        np.testing.assert_array_equal(data["posterior"][name], value)
    stats = data["sample_stats"]
    np.testing.assert_allclose(stats["lp"], -samples.stats["potential_energy"], rtol=1e-4)
    np.testing.assert_array_equal(stats["n_steps"], samples.stats["num_steps"])
    np.testing.assert_array_equal(stats["acceptance_rate"], samples.stats["accept_prob"])
    assert (stats["n_steps"] < 2 ** stats["tree_depth"]).all()
    assert (stats["n_steps"] >= 2 ** (stats["tree_depth"] - 1)).all()
    assert data["posterior"].attrs["kernel"] == "nuts"
    flat = bdl.Predictive(model, samples).log_likelihood(x, y)["y"]
    np.testing.assert_array_equal(data["log_likelihood"]["y"].values.reshape(-1, N), flat.numpy())


def test_lp_is_of_all_data_at_the_draws_of_any_chains():
    """Chains on minibatches know the density on a part of the data alone, others none."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 2), torch.randn(40)
    model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(2, 1)), noise=0.5, num_data=40)
    kernel = bdl.mcmc.SGHMC(step_size=1e-3)
    chains = bdl.mcmc.sgmcmc(
        model, (x, y), kernel=kernel, num_warmup=5, num_samples=4, num_chains=2, batch_size=5
    )
    weight, bias = chains.latents["weight"], chains.latents["bias"]
    normal = torch.distributions.Normal
    lp = normal(torch.einsum("cdoi,ni->cdn", weight, x) + bias, 0.5).log_prob(y).sum(-1)
    lp += normal(0.0, 1.0).log_prob(torch.cat([weight[:, :, 0], bias], -1)).sum(-1)
    for samples in (chains, bdl.Samples(chains.latents)):
        stats = to_arviz(model, samples, x, y, prior_samples=0)["sample_stats"]
        np.testing.assert_allclose(stats["lp"], lp, rtol=1e-5)
        assert "potential_energy" not in stats


def test_other_guides(fitted):
    """A point has no density, and Pyro's own guides have draws alone."""
    model, _, x, y = fitted
    theirs = pyro.infer.autoguide.AutoNormal(model)
    theirs(x, y)
    for guide in (bdl.guides.AutoMAP(model).prototype(x, y), theirs):
        data = to_arviz(model, guide, x, y, num_samples=4, prior_samples=0)
        assert _names(data) == GROUPS - {"prior", "prior_predictive"}
        assert ("log_q" in data["sample_stats"].data_vars) == (guide is theirs)


def test_a_laplace_approximation_predicts_by_the_linearised_network():
    torch.manual_seed(0)
    x, y = _data(torch.float64)
    model = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1).double()), noise=0.5)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # not at its maximum
        laplace = guide.laplace_approximation((x, y))
    data = to_arviz(model, laplace, x, y, num_samples=4000, prior_samples=0)
    sd = Conjugate(with_ones(x), y, 0.5).predictive(with_ones(x))[1].diagonal().sqrt()
    found = data["posterior"]["f"].values[0].std(0)
    np.testing.assert_allclose(found, sd, rtol=5 / np.sqrt(2 * 4000))


def _linear_posterior(kind, x, y):
    """A posterior of a linear program, whose linearization is itself."""
    model = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1).double()), noise=0.5)
    makers = {
        "mean-field": lambda: bdl.guides.AutoMeanField(model),
        "last layer": lambda: bdl.guides.AutoVariationalLastLayer(model),
    }
    if kind in makers:
        return model, makers[kind]().prototype(x, y)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    laplace = guide.laplace_approximation((x, y))
    if kind == "mixture":
        other = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(x, y)
        return model, bdl.guides.MixtureGuide(
            [laplace, other.laplace_approximation((x, y))], [0.7, 0.3]
        )
    return model, laplace


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")  # not at its maximum
@pytest.mark.parametrize("kind", ["mean-field", "last layer", "laplace", "mixture"])
def test_all_groups_are_about_the_same_draws(kind):
    torch.manual_seed(0)
    x, y = _data(torch.float64)
    model, posterior = _linear_posterior(kind, x, y)
    data, again = (to_arviz(model, posterior, x, y, num_samples=41, prior_samples=0) for _ in "ab")
    latents = {n: torch.tensor(v.values[0]) for n, v in data["posterior"].data_vars.items()}
    f = torch.tensor(data["posterior"]["f"].values[0])
    weights = (latents["weight"] @ x.mT)[:, 0] + latents["bias"]
    torch.testing.assert_close(f, weights, rtol=1e-10, atol=1e-12)
    density = torch.tensor(data["log_likelihood"]["y"].values[0])
    torch.testing.assert_close(density, dist.Normal(f, 0.5).log_prob(y), rtol=1e-10, atol=1e-12)
    drawn = torch.tensor(data["posterior_predictive"]["y"].values[0])
    noise = (drawn - f) / 0.5
    assert noise.std().item() == pytest.approx(1, abs=5 / np.sqrt(2 * 41 * N))
    assert abs(np.corrcoef(noise[:, 0], f[:, 0])[0, 1]) < 0.6
    np.testing.assert_array_equal(again["posterior_predictive"]["y"], drawn[None])


def test_draws_of_a_linearized_network_are_its_exported_functions():
    torch.manual_seed(0)
    x, y = _data(torch.float64)
    model = _model(torch.float64, noise=0.3)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    bdl.training.train(model, guide, x, y, steps=20, learning_rate=0.05)
    laplace = guide.laplace_approximation((x, y))
    data = to_arviz(model, laplace, x, y, num_samples=9, prior_samples=0)
    program = bdl.Program(model, x, y)
    center = laplace.location().detach()

    def function(vector):
        return program.run(program.constrain(vector)[0]).deterministic["f"]

    jacobian = torch.func.jacrev(function)(center)
    draws = {n: torch.tensor(data["posterior"][n].values[0]) for n in program.latents}
    offsets = torch.stack([program.unconstrain({n: v[i] for n, v in draws.items()}) - center
                           for i in range(9)])  # fmt: skip
    expected = function(center) + offsets @ jacobian.mT
    found = torch.tensor(data["posterior"]["f"].values[0])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    density = torch.tensor(data["log_likelihood"]["y"].values[0])
    torch.testing.assert_close(density, dist.Normal(found, 0.3).log_prob(y), rtol=1e-8, atol=1e-8)


# Names of dimensions


def plates(x, groups, y=None, z=None):
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        mean = pyro.deterministic("mean", level[groups] + x)
        pyro.sample("y", dist.Normal(mean, scale[0]), obs=y)
        both = torch.stack([mean, -mean], -1)
        pyro.sample("z", dist.Normal(both, scale[1]).to_event(1), obs=z)


def _plates_data():
    x = torch.linspace(-1, 1, 6)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    return x, groups, x + 0.1, torch.stack([x, -x], -1)


def test_plates_name_the_dimensions_of_their_sites():
    data = _plates_data()
    guide = bdl.guides.AutoMeanField(plates).prototype(*data)
    found = to_arviz(plates, guide, *data, num_samples=5, prior_samples=4)
    assert found["posterior"]["level"].dims == ("chain", "draw", "groups")
    assert found["posterior"]["scale"].dims == ("chain", "draw", "scale_dim_0")
    assert found["log_likelihood"]["y"].dims == ("chain", "draw", "data")
    assert found["log_likelihood"]["z"].dims == ("chain", "draw", "data")
    assert found["posterior_predictive"]["z"].dims == ("chain", "draw", "data", "z_dim_1")
    assert found["posterior"]["mean"].dims == ("chain", "draw", "data")
    assert found["observed_data"]["z"].dims == ("data", "z_dim_1")
    assert set(found["constant_data"].data_vars) == {"x", "groups"}
    assert found["prior"]["level"].dims == ("chain", "draw", "groups")


def test_dims_and_coords_are_the_users():
    data = _plates_data()
    guide = bdl.guides.AutoMeanField(plates).prototype(*data)
    found = to_arviz(
        plates, guide, *data, num_samples=5, prior_samples=0,
        dims={"scale": ["which"]}, coords={"which": ["y", "z"], "groups": list("abc")},
    )  # fmt: skip
    assert list(found["posterior"]["scale"].coords["which"].values) == ["y", "z"]
    assert found["posterior"]["level"].sel(groups="b").shape == (1, 5)
    with pytest.raises(ValueError, match=r"dims\['scale'\] has 2 names"):
        to_arviz(plates, guide, *data, dims={"scale": ["a", "b"]})
    with pytest.raises(ValueError, match="'groups' of site 'level' has length 3, but 2"):
        to_arviz(plates, guide, *data, coords={"groups": ["a", "b"]})


def test_some_sites_only(fitted):
    model, guide, x, y = fitted
    data = to_arviz(model, guide, x, y, num_samples=3, prior_samples=2, sites=["2.*", "noise"])
    assert set(data["posterior"].data_vars) == {"2.weight", "2.bias", "noise"}
    assert set(data["prior"].data_vars) == {"2.weight", "2.bias", "noise"}
    with pytest.raises(ValueError, match=r"sites='3\.\*' matches no latent or deterministic site"):
        to_arviz(model, guide, x, y, sites="3.*")


def test_deterministic_sites_are_in_posterior_and_prior():
    """By their names in ``sites``, with the plate's name for a dimension, and of the same draws."""
    data = _plates_data()
    guide = bdl.guides.AutoMeanField(plates).prototype(*data)
    found = to_arviz(plates, guide, *data, num_samples=5, prior_samples=4, sites=["mean", "level"])
    x, groups = data[0].numpy(), data[1].numpy()
    for group in ("posterior", "prior"):
        assert set(found[group].data_vars) == {"mean", "level"}
        mean = found[group]["level"].values[..., groups] + x
        np.testing.assert_allclose(found[group]["mean"], mean, rtol=1e-5, atol=1e-6)
        assert found[group]["mean"].dims == ("chain", "draw", "data")
    assert set(found["posterior_predictive"].data_vars) == {"y", "z"}
    assert set(found["prior_predictive"].data_vars) == {"y", "z"}


def _all_priors(x, y=None):
    """Events, plates, a declared factor of the prior, and a half of the groups."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    w = pyro.sample("w", dist.LKJCholesky(3, torch.tensor(2.0)))
    with pyro.plate("groups", 4):
        level = pyro.sample("level", dist.Normal(scale[0], scale[1]))
        both = pyro.sample("both", dist.Normal(torch.zeros(4, 2), 1.0).to_event(1))
    bdl.priors.factor("order", -level.square().sum())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(level.sum() * x + both.sum() + w[1, 0], 1.0), obs=y)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_prior_by_site_adds_up(temperature):
    x = torch.linspace(-1, 1, 5)
    model = bdl.handlers.temper(_all_priors, temperature) if temperature != 1 else _all_priors
    guide = bdl.guides.AutoMeanField(model).prototype(x, x)
    data = to_arviz(
        model, guide, x, x, num_samples=6, prior_samples=0, dims={"both": ["groups", "k"]}
    )
    shapes = {n: v.dims[2:] for n, v in data["log_prior"].data_vars.items()}
    assert shapes == {
        "scale": (), "w": (), "level": ("groups",), "both": ("groups",), "order": ()
    }  # fmt: skip
    draws = {n: torch.tensor(v.values[0]) for n, v in data["posterior"].data_vars.items()}
    scale, level = draws["scale"], draws["level"]
    expected = dist.Normal(scale[:, :1], scale[:, 1:]).log_prob(level)
    np.testing.assert_allclose(data["log_prior"]["level"].values[0], expected, rtol=1e-5)
    total = sum(v.values.reshape(1, 6, -1).sum(-1)[0] for v in data["log_prior"].values())
    program = bdl.Program(model, x, x)
    each = [program.log_prior({n: v[i] for n, v in draws.items()}).item() for i in range(6)]
    np.testing.assert_allclose(total, each, rtol=1e-5)


def test_the_prior_alone():
    data = _plates_data()
    found = to_arviz(plates, None, *data, prior_samples=30, seed=3)
    assert _names(found) == {"prior", "prior_predictive", "observed_data", "constant_data"}
    assert found["prior"]["mean"].dims == ("chain", "draw", "data")
    assert found["prior_predictive"]["y"].shape == (1, 30, 6)
    guide = bdl.guides.AutoMeanField(plates).prototype(*data)
    other = to_arviz(plates, guide, *data, num_samples=2, prior_samples=30, seed=3)
    assert _names(other) - _names(found) == {
        "posterior", "posterior_predictive", "sample_stats", "log_prior", "log_likelihood"
    }  # fmt: skip
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="cannot be sampled: the factor"):
        to_arviz(_all_priors, None, data[0], data[0])
    with pytest.raises(ValueError, match="prior_samples"):
        to_arviz(plates, None, *data, prior_samples=0)


def test_classes_and_keyword_arguments():
    x, y = torch.randn(10, 2), torch.arange(10) % 3
    model = bdl.models.Classification(bdl.bayesianize(nn.Linear(2, 3)))
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    data = to_arviz(model, guide, x, num_samples=6, prior_samples=2, model_kwargs={"y": y})
    assert data["observed_data"]["y"].dtype.kind == "i"
    assert data["posterior_predictive"]["y"].dtype.kind == "i"
    assert data["posterior_predictive"]["y"].shape == (1, 6, 10)
    assert len(np.unique(data["posterior_predictive"]["y"])) == 3
    assert set(data["constant_data"].data_vars) == {"x"}


# Types of numbers, files


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_gradients(fitted, dtype):
    model, guide, x, y = fitted
    samples = Samples({k: v[None].requires_grad_() for k, v in guide.sample_latents(6).items()})
    labels = bdl.arviz_export.Labels(_trace(model, x, y), {}, {})
    halves = {k: v.to(dtype) for k, v in samples.latents.items()}
    stored = labels.dataset(halves, ("chain", "draw"), seen={})["noise"]
    assert stored.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    np.testing.assert_array_equal(stored, halves["noise"].detach().to(torch.float64))
    assert to_arviz(model, samples, x, y, prior_samples=0)["posterior"]["noise"].shape == (1, 6)


def _trace(model, x, y):
    return bdl.program.program.trace_once(model, (x, y), {}).trace


def test_netcdf_and_back(fitted, tmp_path):
    model, guide, x, y = fitted
    data = to_arviz(model, guide, x, y, num_samples=5, prior_samples=2)
    path = str(tmp_path / "posterior.nc")
    data.to_netcdf(path)
    again = arviz.from_netcdf(path) if OLD else xarray.open_datatree(path)
    assert _names(again) == _names(data)
    for group in GROUPS:
        for name in data[group].data_vars:
            np.testing.assert_array_equal(again[group][name], data[group][name])
            assert again[group][name].dims == data[group][name].dims
        assert again[group].attrs["inference_library"] == "pyro_bdl"


# ArviZ's functions


def schools(sigma, y=None):
    """Eight schools, not centered: the effects are a deterministic site, another is in no plate."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * raw)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)
    pyro.deterministic("spread", theta.max() - theta.min())


SIGMA = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
EFFECTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])


@pytest.fixture(scope="module")
def hierarchy():
    """Chains with all statistics of NUTS, as ArviZ is given them."""
    torch.manual_seed(0)
    latents = {
        "mu": 4 + 3 * torch.randn(2, 200),
        "tau": (1 + 0.5 * torch.randn(2, 200)).exp(),
        "raw": torch.randn(2, 200, 8),
    }
    stats = {
        "potential_energy": torch.randn(2, 200),
        "energy": torch.randn(2, 200),
        "num_steps": torch.full((2, 200), 7),
        "diverging": torch.arange(400).reshape(2, 200) % 50 == 0,
    }
    info = {"kernel": "nuts", "ended_early": False, "options": {"max_tree_depth": 8}}
    samples = Samples(latents, stats, info)
    return to_arviz(schools, samples, SIGMA, EFFECTS, prior_samples=50)


NAMED = {"var_names": ["mu", "tau", "theta"]}
USUAL_CALLS = {
    "summary": lambda data: arviz.summary(data, **NAMED),
    "forest": lambda data: arviz.plot_forest(data, var_names=["theta", "spread"], combined=True),
    "trace": lambda data: arviz.plot_trace(data, **NAMED),
    "rank": lambda data: arviz.plot_rank(data, **NAMED),
    "loo": lambda data: arviz.loo(data, pointwise=True),
    "khat": lambda data: arviz.plot_khat(arviz.loo(data, pointwise=True)),
    "compare": lambda data: arviz.compare({"a": data, "b": data}),
    "energy": lambda data: arviz.plot_energy(data),
}
USUAL_CALLS |= (
    {
        "ppc": lambda data: arviz.plot_ppc(data, num_pp_samples=20),
        "prior ppc": lambda data: arviz.plot_ppc(data, group="prior", num_pp_samples=20),
        "bpv": lambda data: arviz.plot_bpv(data),
        "loo_pit": lambda data: arviz.plot_loo_pit(data, y="y"),
        "pair": lambda data: arviz.plot_pair(data, var_names=["mu", "tau"], divergences=True),
    }
    if OLD
    else {
        "ppc": lambda data: arviz.plot_ppc_dist(data),
        "prior ppc": lambda data: arviz.plot_ppc_dist(data, group="prior_predictive"),
        "ppc_pit": lambda data: arviz.plot_ppc_pit(data),
        "loo_pit": lambda data: arviz.plot_loo_pit(data),
        "pair": lambda data: arviz.plot_pair(
            data, var_names=["mu", "tau"], visuals={"divergence": True}
        ),
        "psense": lambda data: arviz.psense_summary(data, var_names=["mu", "tau"]),
        "psense by site": lambda data: arviz.psense_summary(data, prior_var_names=["tau"]),
        "plot_psense": lambda data: arviz.plot_psense_dist(data, var_names=["mu", "tau"]),
    }
)


@pytest.mark.parametrize("name", USUAL_CALLS)
@pytest.mark.filterwarnings("ignore")
def test_the_usual_calls(hierarchy, name):
    """With no names but those of the program's own sites."""
    found = USUAL_CALLS[name](hierarchy)
    if name == "summary":
        theta = hierarchy["posterior"]["theta"]
        assert list(found.index) == ["mu", "tau", *(f"theta[{i}]" for i in range(8))]
        mean = float(theta[..., 3].mean())
        assert float(found["mean"]["theta[3]"]) == pytest.approx(mean, abs=0.06)
        assert theta.dims == ("chain", "draw", "schools")
    pyplot.close("all")


def test_the_files_of_an_export(hierarchy, tmp_path):
    """All that a sampler says of itself can be written."""
    path = str(tmp_path / "schools.nc")
    hierarchy.to_netcdf(path)
    again = arviz.from_netcdf(path) if OLD else xarray.open_datatree(path)
    assert again["posterior"].attrs["kernel"] == "nuts"
    assert json.loads(again["posterior"].attrs["options"]) == {"max_tree_depth": 8}
    np.testing.assert_array_equal(
        again["sample_stats"]["diverging"], hierarchy["sample_stats"]["diverging"]
    )


# What it refuses, and what it leaves alone


def test_a_posterior_of_another_program(fitted, chains):
    model, _, x, y = fitted
    latents = dict(chains[1].latents)
    latents["extra"] = latents["noise"]
    latents["0.bias"] = latents["0.bias"][..., :2]
    del latents["2.bias"]
    with pytest.raises(
        ValueError,
        match=r"for: '2\.bias'; sites .* not have: 'extra'; other shapes: '0\.bias' \(2,\)",
    ):
        to_arviz(model, Samples(latents), x, y)


def test_targets_are_needed(fitted):
    model, guide, x, _ = fitted
    with pytest.raises(bdl.errors.UnsupportedProgramError, match=r"no observed|discrete|targets"):
        to_arviz(model, guide, x)


def test_a_likelihood_that_is_a_factor():
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("score", -(w - x).square().sum())

    x = torch.randn(4)
    guide = bdl.guides.AutoMeanField(model).prototype(x)
    data = to_arviz(model, guide, x, num_samples=5, prior_samples=3)
    assert _names(data) == {"posterior", "sample_stats", "log_prior", "prior", "constant_data"}
    w = torch.from_numpy(data["posterior"]["w"].values)[0]
    expected = dist.Normal(0.0, 1.0).log_prob(w) - (w[:, None] - x).square().sum(-1)
    np.testing.assert_allclose(data["sample_stats"]["lp"].values[0], expected, rtol=1e-5)


def test_an_improper_prior_is_left_out():
    def improper(y=None):
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        level = pyro.sample("level", flat)
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    samples = Samples({"level": torch.randn(2, 10)})
    y = torch.randn(3)
    with pytest.warns(BdlWarning, match="the prior cannot be sampled"):
        data = to_arviz(improper, samples, y)
    assert "prior" not in _names(data)


# Data that masks leave out


def _masked(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, 0.5).mask(seen), obs=y)


def _imputed(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, 0.5), obs=y, obs_mask=seen)


def _some_numbers(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        cells = torch.stack([seen, seen & (x > 0)], -1)
        d = dist.Normal(torch.stack([w * x, w * x], -1), 0.5).mask(cells).to_event(1)
        return pyro.sample("y", d, obs=None if y is None else torch.stack([y, y], -1))


def _in_two_plates(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)), pyro.plate("numbers", 2):
        cells = torch.stack([seen, seen & (x > 0)])
        d = dist.Normal(torch.stack([w * x, w * x]), 0.5).mask(cells)
        return pyro.sample("y", d, obs=None if y is None else torch.stack([y, y]))


@pytest.mark.parametrize(
    ("model", "site"), [(_masked, "y"), (_imputed, "y_observed"), (_some_numbers, "y")]
)
def test_data_that_were_not_seen_are_left_out(model, site):
    x = torch.linspace(-1, 1, 12)
    seen = torch.arange(12) % 3 > 0
    y = torch.where(seen, x, torch.tensor(99.0))
    draws = bdl.Samples({"w": torch.randn(2, 30)})
    result = bdl.to_arviz(
        model, draws, x, seen, y, prior_samples=0, coords={"data": [f"row {i}" for i in range(12)]}
    )
    rows = seen.nonzero().flatten().tolist()
    for group in ("log_likelihood", "observed_data", "posterior_predictive"):
        values = result[group][site]
        assert list(values[f"{site}_seen"].values) == [f"row {i}" for i in rows], group
        assert json.loads(result[group].attrs["seen"])[site][0] == (
            8 if model is not _some_numbers else 8 + int((seen & (x > 0)).sum())
        )
    w = draws.latents["w"][..., None]
    expected = dist.Normal(w * x, 0.5).log_prob(y)
    if model is _some_numbers:
        expected = expected * (1 + (x > 0))
        assert result["observed_data"][site].isnull().sum() == int((seen & (x <= 0)).sum())
    else:
        assert not (result["observed_data"][site] > 2).any()
    found = torch.as_tensor(result["log_likelihood"][site].values)
    torch.testing.assert_close(found, expected[..., seen])
    arviz.loo(result, var_name=site)


def test_cells_that_were_not_seen_are_left_out_of_all():
    x = torch.linspace(-1, 1, 12)
    seen = torch.arange(12) % 3 > 0
    draws = bdl.Samples({"w": torch.randn(1, 30)})
    result = bdl.to_arviz(_in_two_plates, draws, x, seen, x, prior_samples=0)
    cells = torch.stack([seen, seen & (x > 0)])
    assert result["log_likelihood"]["y"].dims == ("chain", "draw", "y_seen")
    assert result["log_likelihood"]["y_seen"].values.tolist() == (
        cells.flatten().nonzero().flatten().tolist()
    )
    assert result["observed_data"]["y"].shape == (int(cells.sum()),)
