"""One observation of all rows: a MultivariateNormal, Gaussian processes, sparse regression."""

import math

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import LinearizedPredictive, Predictive, Samples, compare, guides, mcmc
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError

X = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
Y = torch.sin(3 * X[:, 0])


def covariance(x, length):
    distances = (x - x.T).square() / length.square()[..., None, None]
    return (-0.5 * distances).exp() + 0.1 * torch.eye(len(x), dtype=x.dtype)


def process(x, y=None):
    length = pyro.sample("length", dist.LogNormal(x.new_tensor(0.0), 0.5))
    mean = x.new_zeros(len(x))
    likelihood = dist.MultivariateNormal(mean, covariance_matrix=covariance(x, length))
    pyro.sample("y", likelihood, obs=y)


def line(joint):
    def program(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_tensor(0.0), 1.0))
        f = pyro.deterministic("f", w * x[:, 0])
        if joint:
            pyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)
        else:
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    return program


def lengths(count=12):
    torch.manual_seed(1)
    return Samples({"length": 0.5 + torch.rand(2, count, dtype=torch.float64)})


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_nlpd_is_the_joint_density_per_row(scale):
    posterior = lengths()
    found = compare(process, {"a": posterior}, X, Y, reference=None, units=(scale, 2.0)).numbers()[
        "a"
    ]
    densities = [
        dist.MultivariateNormal(torch.zeros_like(Y), covariance(X, length)).log_prob(Y)
        for length in posterior.flat()["length"]
    ]
    exact = math.log(len(densities)) - torch.stack(densities).logsumexp(0).item()
    assert found["nlpd"] == pytest.approx(exact / len(X) + math.log(scale), rel=1e-9)
    mean = -torch.stack(densities).mean().item()
    assert found["expected_nll"] == pytest.approx(mean / len(X) + math.log(scale), rel=1e-9)
    assert found["rmse"] == pytest.approx(scale * Y.square().mean().sqrt().item(), rel=1e-9)


def test_all_but_the_density_is_as_of_independent_rows():
    torch.manual_seed(0)
    posteriors = {
        name: Samples({"w": torch.randn(2, 30, dtype=torch.float64)}) for name in ("a", "b")
    }
    rows = []
    for joint in (True, False):
        found = compare(line(joint), posteriors, X, Y, reference="b", ood=X + 3).numbers()["a"]
        rows.append(
            {
                key: value
                for key, value in found.items()
                if not key.startswith(("nlpd", "expected_nll", "verdict", "draw_s"))
            }
        )
    assert rows[0].keys() == rows[1].keys()
    for key, value in rows[0].items():
        other = rows[1][key]
        exact = isinstance(value, float)
        assert value == (pytest.approx(other, rel=1e-9) if exact else other), key


def test_of_a_fixed_mean_the_targets_are_compared():
    """The function of a process is integrated out, so its mean would agree for every posterior."""
    theirs = Samples({"length": 3 + lengths(200).latents["length"]})
    row = compare(process, {"a": lengths(200), "b": theirs}, X, Y, reference="b").numbers()["a"]
    assert row["sd_ratio"] == pytest.approx(1.0, abs=0.1)  # the marginals are the same
    assert row["energy"] > 5 * row["energy_se"]  # but not the correlations
    wide = Samples({"w": torch.randn(2, 50, dtype=torch.float64)})
    found = compare(line(joint=True), {"a": wide}, X, Y, reference=None)
    assert torch.allclose(found.evaluations["a"].function[0], wide.flat()["w"][0] * X[:, 0])


def test_chains_of_a_process_that_disagree_are_found_out():
    """Draws of the target would hide it: they are mostly noise."""
    values = lengths(50).latents["length"]
    apart = Samples({"length": values + torch.tensor([[0.0], [3.0]], dtype=torch.float64)})
    rows = [compare(process, {"a": q}, X, Y, reference="a") for q in (lengths(50), apart)]
    assert rows[0].numbers()["a"]["rhat"] < 1.1 < 1.5 < rows[1].numbers()["a"]["rhat"]
    assert rows[1].warnings and "R-hat" in rows[1].warnings[0]


def test_one_draw_has_the_density_of_independent_rows():
    same = Samples({"w": torch.full((1, 4), 0.3, dtype=torch.float64)})
    found = [compare(line(j), {"a": same}, X, Y, reference=None).numbers()["a"] for j in (0, 1)]
    assert found[1]["nlpd"] == pytest.approx(found[0]["nlpd"], rel=1e-12)


def test_no_row_can_be_left_out_and_it_is_said():
    with pytest.warns(BdlWarning, match="'y' is one joint observation of all rows"):
        found = compare(process, {"a": lengths()}, X, Y, reference=None, train=(X, Y))
    assert "elpd_loo" not in found.numbers()["a"]


def test_laplace_of_a_process():
    guide = guides.AutoLaplaceGGN(process, structure="full").prototype(X, Y)
    laplace = guide.laplace_approximation((X, Y))
    found = compare(process, {"laplace": laplace}, X, Y, reference=None, num_samples=20)
    assert math.isfinite(found.numbers()["laplace"]["nlpd"])
    assert LinearizedPredictive(process, laplace, 5)(X)["y"].shape == (5, 7)


def regression(x, y):
    kernel = gp.kernels.RBF(1).double()
    kernel.lengthscale = pyro.nn.PyroSample(dist.LogNormal(x.new_tensor(0.0), 0.5))
    return gp.models.GPRegression(x, y, kernel, noise=x.new_tensor(0.1))


def sparse(approx):
    def build(x, y):
        kernel = gp.kernels.RBF(1).double()
        kernel.lengthscale = pyro.nn.PyroSample(dist.LogNormal(x.new_tensor(0.0), 0.5))
        inducing = torch.linspace(-1, 1, 3, dtype=x.dtype)[:, None]
        return gp.models.SparseGPRegression(
            x, y, kernel, Xu=inducing, noise=x.new_tensor(0.1), approx=approx
        )

    return build


MODELS = {"exact": regression} | {name: sparse(name) for name in ("VFE", "FITC", "DTC")}


def of_data(process):
    """The process as a program of its data."""

    def program(x, y):
        process.set_data(x, y)
        return process.model()

    return program


@pytest.mark.parametrize("name", MODELS)
def test_processes_of_pyro_pass_through_compare_and_predictive(name):
    process = MODELS[name](X, Y)
    program = of_data(process)
    guide = guides.AutoMeanField(program).prototype(X, Y)
    row = compare(program, {"a": guide}, X, Y, reference=None, num_samples=20).numbers()["a"]
    assert math.isfinite(row["nlpd"]) and row["crps"] > 0
    held = guides.AutoMeanField(process.model).prototype()
    drawn = Predictive(process.model, held, 200)()["y"]
    assert drawn.shape == (200, 7)
    assert 0.5 < drawn.std() < 2 and not torch.equal(drawn[0], drawn[1])


def test_predictions_that_need_targets_say_so():
    program = of_data(regression(X, Y))
    guide = guides.AutoMeanField(program).prototype(X, Y)
    with pytest.raises(UnsupportedProgramError, match="samples nothing without its targets"):
        Predictive(program, guide, 3)(X, None)
    assert Predictive(program, guide, 3)(X, Y)["y"].shape == (3, 7)


def test_a_distribution_that_is_not_drawn_with_targets_must_be_sampled_without():
    def program(x, y):
        w = pyro.sample("w", dist.Normal(x.new_tensor(0.0), 1.0))
        if y is not None:
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.FoldedDistribution(dist.Normal(w * x[:, 0], 1.0)), obs=y)

    draws = Samples({"w": torch.randn(1, 10, dtype=torch.float64)})
    with pytest.raises(UnsupportedProgramError, match="does not sample the site 'y' where"):
        compare(program, {"a": draws}, X, Y.abs(), reference=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "VFE"])
def test_nuts_samples_processes_of_pyro(name):
    program = of_data(MODELS[name](X, Y))
    samples = mcmc.sample(program, X, Y, num_warmup=100, num_samples=100, num_chains=2, seed=0)
    grid = torch.linspace(-4, 4, 400, dtype=torch.float64)
    with torch.no_grad():
        density = [
            pyro.poutine.trace(pyro.poutine.condition(program, {"kernel.lengthscale": u.exp()}))
            .get_trace(X, Y)
            .log_prob_sum()
            + u
            for u in grid.unbind()
        ]
    mean = (torch.stack(density).softmax(0) * grid).sum().item()
    assert samples.latents["kernel.lengthscale"].log().mean() == pytest.approx(mean, abs=0.15)
