"""Named latents in a comparison: their distances, the groups that they decide, and their names."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bdl as bdl

X = torch.linspace(-1, 1, 20)


def hierarchy(x, y=None):
    """A function that knows only mu: tau and raw are the prior's."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 3):
        pyro.sample("raw", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mu * x, 1.0), obs=y)


def _draws(seed, scale=1.0, shift=0.0, count=1000):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(2, count, *shape, generator=generator)

    tau = scale * normal().abs()
    return bdl.Samples({"mu": 0.2 * normal(), "tau": tau, "raw": normal(3) + shift})


@pytest.fixture(scope="module")
def comparison():
    posteriors = {
        "nuts": _draws(0), "same": _draws(1), "wide": _draws(2, scale=3.0),
        "off": _draws(3, shift=torch.tensor([0.0, 0.0, 2.0])),
    }  # fmt: skip
    return bdl.compare(hierarchy, posteriors, X, X)


def test_a_posterior_with_a_far_latent_is_far(comparison):
    groups = {name: judgment.group for name, judgment in comparison.judgments.items()}
    assert groups["same"] in ("alike", "usable")
    assert groups["wide"] == groups["off"] == "far"
    assert "wide (" in comparison.summary.split("Far: ")[1]
    assert "tau is far" in comparison.summary and "raw[2] is far" in comparison.summary
    assert "for the latent tau: tau is far" in comparison.verdicts["wide"]
    assert "latent" not in comparison.verdicts["same"]
    assert list(comparison.table.loc[["wide", "off"], "latent"]) == ["tau", "raw[2]"]


def test_the_distances_are_those_of_the_laws(comparison):
    """W1 of a scaled half Normal is the difference of the means, that of a shift the shift."""
    table = comparison.latents
    assert list(table.loc["nuts"].index) == ["mu", "tau", "raw[0]", "raw[1]", "raw[2]"]
    assert table.loc["nuts", "w1"].isna().all()
    mean, sd = (2 / torch.pi) ** 0.5, (1 - 2 / torch.pi) ** 0.5
    for posterior, latent, expected in (
        ("wide", "tau", 2 * mean / sd), ("off", "raw[2]", 2.0), ("same", "mu", 0.0)
    ):  # fmt: skip
        row = table.loc[(posterior, latent)]
        assert row["w1"] == pytest.approx(expected, abs=4 * row["w1_se"])
        assert row["w1_se"] < 0.1
    row = table.loc[("wide", "tau")]
    assert row["mean"] == pytest.approx(3 * mean, rel=0.1)
    assert row["sd"] == pytest.approx(3 * sd, rel=0.1)


class Held(bdl.guides.AutoMeanField):
    """The exact law of mu, with tau held at one value and the rest as in the prior."""

    tau = 0.6

    def sample_latents(self, num_samples):
        torch.manual_seed(5)
        draws = {
            name: value.flatten(0, 1)[:num_samples] for name, value in _draws(5).latents.items()
        }
        return draws | {"tau": torch.full((num_samples,), self.tau)}


@pytest.mark.parametrize("tau", [0.6, 6.0])
def test_a_latent_that_is_not_drawn_is_no_distribution_and_decides_nothing(tau):
    """Its distance is that from the mean, sqrt(2 / pi), in sds of the half Normal."""
    guide = Held(hierarchy).prototype(X, X)
    guide.tau = tau
    posteriors = {"nuts": _draws(0), "held": guide}
    found = bdl.compare(hierarchy, posteriors, X, X, latents=["mu", "tau"])
    assert found.judgments["held"].group in ("alike", "usable")
    assert "tau held at a point, " in found.summary and "far" not in found.summary.lower()
    row, number = found.latents.loc[("held", "tau")], found.table.loc["held", "latent_off"]
    exact = abs(tau - (2 / torch.pi) ** 0.5) / (1 - 2 / torch.pi) ** 0.5
    assert row["off"] == number == pytest.approx(exact, abs=4 * row["off_se"])
    assert row["off_se"] < 0.3 and row[["w1", "w1_se"]].isna().all()
    assert found.table.loc["held", "latent"] == "mu"
    (finding,) = (f for f in found.judgments["held"].findings if f.key == "latent_off")
    assert finding.words.endswith("sds off the reference's mean: tau") and not finding.fault
    assert math.isinf(finding.limits[1])


def test_a_chain_that_stands_still_is_compared_as_a_distribution():
    stuck = _draws(1).latents | {"tau": torch.full((2, 1000), 0.6)}
    posteriors = {"nuts": _draws(0), "stuck": bdl.Samples(stuck)}
    found = bdl.compare(hierarchy, posteriors, X, X, latents=["tau"])
    assert found.judgments["stuck"].group == "far" and "tau is far" in found.summary


def test_too_few_draws_leave_it_undecided():
    """Beyond half of a point's distance as the draws show it, and not clearly."""
    posteriors = {"nuts": _draws(0), "off": _draws(1, shift=0.45, count=12)}
    found = bdl.compare(hierarchy, posteriors, X, X, latents=["raw"])
    row = found.table.loc["off"]
    assert row["latent_beyond"] == 1 and row["latent_far"] == 0
    assert found.judgments["off"].group == "undecided"


def test_they_are_chosen_by_name():
    posteriors = {"nuts": _draws(0, count=200), "wide": _draws(2, scale=3.0, count=200)}
    found = bdl.compare(hierarchy, posteriors, X, X, latents="mu")
    assert found.judgments["wide"].group in ("alike", "usable")
    assert set(found.latents.index.get_level_values("latent")) == {"mu"}
    assert bdl.compare(hierarchy, posteriors, X, X, latents=[]).latents.empty
    with pytest.raises(ValueError, match=r"latents='nu' is no latent .* 'mu', 'tau', 'raw'"):
        bdl.compare(hierarchy, posteriors, X, X, latents=["nu"])


class Plain(PyroModule):
    def __init__(self):
        super().__init__()
        self.layer = PyroModule[nn.Linear](1, 1)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 1]).to_event(2))
        self.sigma = PyroSample(dist.HalfNormal(1.0))

    def forward(self, x, y=None):
        f = self.layer(x)[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, self.sigma), obs=y)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: bdl.models.Regression(bdl.bayesianize(nn.Linear(1, 1))), {"noise"}),
        (lambda: bdl.models.Regression(
            bdl.bayesianize(nn.Linear(1, 1), prior=bdl.priors.Horseshoe())
        ), {"noise"}),
        (Plain, {"sigma"}),
    ],
    ids=["bayesianize", "horseshoe", "PyroModule"],
)  # fmt: skip
def test_weights_of_networks_are_left_out(model, named, tmp_path):
    model, x = model(), X[:, None]
    guide = bdl.guides.AutoMeanField(model).prototype(x, X)
    evaluation = bdl.evaluate(model, guide, x, X, num_samples=50)
    assert {name.split("[")[0] for name in evaluation.latent_names} == named
    assert evaluation.latents.shape == (50, len(evaluation.latent_names))
    again = bdl.Evaluation.load(evaluation.save(tmp_path / "evaluation"))
    assert again.latent_names == evaluation.latent_names
    assert torch.equal(again.latents, evaluation.latents)


def centered_at(mean, sd):
    def program(y=None):
        mu = pyro.sample("mu", dist.Normal(torch.tensor(mean).double(), sd))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    return program


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 10.0), (4.0, 0.3)])
def test_prior_sensitivity_of_chains_and_what_is_said_of_it(mean, sd, tmp_path):
    """Draws of the exact posterior; the numbers are those of ``diagnostics.prior_sensitivity``."""
    torch.manual_seed(0)
    y = (1.0 + torch.randn(20)).double()
    precision = sd**-2 + 20
    at = (mean / sd**2 + y.sum()) / precision
    mu = at + precision**-0.5 * torch.randn(4, 500).double()
    program, samples = centered_at(mean, sd), bdl.Samples({"mu": mu})
    guide = bdl.guides.AutoMeanField(program).prototype(y)
    walk = bdl.Samples(samples.latents, info={"kernel": "sghmc", "batch_size": 5})
    found = bdl.compare(program, {"nuts": samples, "vi": guide, "walk": walk}, y, train=(y,))
    alone = bdl.diagnostics.prior_sensitivity(program, samples, y).loc["mu"]
    row = found.table.loc["nuts"]
    assert row["prior_sensitivity"] == pytest.approx(alone["prior"])
    assert row["prior_sensitivity_se"] == pytest.approx(alone["prior_se"])
    assert row["prior_sensitive"] == "mu"
    columns = ["prior", "prior_se", "likelihood", "likelihood_se", "diagnosis"]
    assert found.latents.loc[("nuts", "mu"), columns].to_list() == alone[columns].to_list()
    assert found.table.loc[["vi", "walk"], "prior_sensitivity"].isna().all()
    said = [note for note in found.notes if "depend on the prior" in note]
    assert len(said) == (sd == 0.3)
    assert all("mu (" in note and "may be in conflict" in note for note in said)
    path = found.evaluations["nuts"].save(tmp_path / "nuts.safetensors")
    assert bdl.Evaluation.load(path).sensitivity == found.evaluations["nuts"].sensitivity
    without = bdl.compare(program, {"nuts": samples}, y)
    assert "prior_sensitivity" not in without.table and without.notes == ()
