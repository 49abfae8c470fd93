"""Programs that hold their data themselves and take no arguments."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from guides.conftest import TRAINED

import pyro_bdl as bdl

D = {"dtype": torch.float64}
X = torch.linspace(-1, 1, 30, **D)
Y = 1.5 * X + 0.5 * torch.sin(40 * X)
PRECISION = 1 + (X @ X).item() / 0.25
MEAN = (X @ Y).item() / 0.25 / PRECISION


def model():
    w = pyro.sample("w", dist.Normal(torch.zeros((), **D), 1.0))
    with pyro.plate("data", 30):
        return pyro.sample("y", dist.Normal(w * X, 0.5), obs=Y)


def log_evidence():
    covariance = 0.25 * torch.eye(30, **D) + torch.outer(X, X)
    return dist.MultivariateNormal(torch.zeros(30, **D), covariance).log_prob(Y).item()


def trained(family, **options):
    guide = family(model, **options)
    run = bdl.training.train(model, guide, steps=100, learning_rate=0.1)
    assert len(run.losses) == 100
    return guide


@pytest.mark.parametrize("family", [*TRAINED, bdl.guides.AutoEnsemble], ids=lambda f: f.__name__)
def test_every_guide_trains(family):
    guide = trained(family)
    assert guide.sample_latents(50)["w"].mean().item() == pytest.approx(MEAN, abs=0.15)


def laplace():
    return trained(bdl.guides.AutoLaplaceGGN).laplace_approximation([()])


def by_swag():
    guide = trained(bdl.guides.AutoSWAG, rank=2)
    bdl.training.collect_swag(model, guide, snapshots=4, learning_rate=1e-3)
    return guide.swag_approximation().location().item()


def held_out():
    guide = trained(bdl.guides.AutoLaplaceGGN)
    return guide.laplace_approximation([()], held_out=[()]).location().item()


NUTS = {"num_warmup": 30, "num_samples": 100, "progress": False}
MEANS = {
    "Laplace": lambda: laplace().location().item(),
    "held-out width": held_out,
    "subnetwork": lambda: (
        trained(bdl.guides.AutoSubnetwork).laplace_approximation([()]).location().item()
    ),
    "SWAG": by_swag,
    "Pathfinder": lambda: bdl.guides.AutoPathfinder(model).prototype().location().item(),
    "NUTS": lambda: bdl.mcmc.sample(model, **NUTS).latents["w"].mean().item(),
    "chains of a subnetwork": lambda: (
        bdl.mcmc.sample(
            model,
            subset=trained(bdl.guides.AutoSubnetwork).laplace_approximation([()]),
            **NUTS,
        ).latents["w"].mean().item()
    ),
    "train_by_evidence": lambda: (
        bdl.evidence.train_by_evidence(
            model, bdl.guides.AutoLaplaceGGN(model), steps=100, learning_rate=0.1
        )[0].location().item()
    ),
    "sgmcmc": lambda: (
        bdl.mcmc.sgmcmc(
            model, [()], kernel=bdl.mcmc.SGHMC(step_size=2e-3), num_warmup=200, num_samples=500,
            progress=False,
        ).latents["w"].mean().item()
    ),
    "linearized predictive": lambda: (
        (bdl.LinearizedPredictive(model, laplace()).moments()["y"].mean @ X / (X @ X)).item()
    ),
}  # fmt: skip


CHAINS = {"NUTS", "chains of a subnetwork"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in CHAINS else ()) for name in MEANS],
)
def test_every_way_to_the_posterior_has_its_mean(name):
    assert MEANS[name]() == pytest.approx(MEAN, abs=0.1)


def exact_guide():
    guide = bdl.guides.AutoMeanField(model).prototype()
    with torch.no_grad():
        guide.loc.fill_(MEAN)
        guide.scale = torch.full((1,), PRECISION**-0.5, **D)
    return guide


EVIDENCE = {
    "estimate_elbo": lambda: bdl.training.estimate_elbo(model, exact_guide()),
    "Laplace": lambda: bdl.evidence.log_marginal_likelihood(laplace()).item(),
    "importance": lambda: bdl.importance.ratios(model, exact_guide()).log_evidence,
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_the_evidence_is_exact(name):
    assert EVIDENCE[name]() == pytest.approx(log_evidence(), abs=0.1 if "elbo" in name else 0.02)


def test_the_rest_runs(tmp_path):
    guide = exact_guide()
    assert bdl.Predictive(model, guide, 7)()["y"].shape == (7, 30)
    assert bdl.to_arviz(model, guide)["posterior"]["w"].shape[0] == 1
    assert bdl.training.collapse(model, guide).kl > 0
    loaded = bdl.load_posterior(guide.save(tmp_path / "guide.bdl"), model)
    assert loaded.location().item() == pytest.approx(MEAN)
    elbo = bdl.elbo.CompiledELBO()
    run = bdl.training.train(model, guide, steps=4, elbo=elbo, checkpoint=tmp_path / "state")
    assert run.losses.isfinite().all()


def test_what_needs_rows_says_so():
    guide = exact_guide()
    with pytest.raises(bdl.errors.ArgumentError, match="freeze needs the program's arguments"):
        bdl.freeze(model, guide, draws=2)
    with pytest.raises(
        bdl.errors.ArgumentError, match="batch_size=5 is for data among the program's arguments"
    ):
        bdl.training.train(model, guide, steps=1, batch_size=5)
    with pytest.raises(ValueError, match=r"\[\(\)\] for a program without arguments"):
        bdl.guides.AutoLaplaceGGN(model).laplace_approximation(())
    with pytest.raises(ValueError, match="test must hold inputs and, last, targets"):
        bdl.compare(model, {"guide": guide}, reference=None)
    flipout = bdl.elbo.TemperedTraceMeanField_ELBO(estimator="flipout")
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="arguments of the program"):
        bdl.training.train(model, guide, steps=1, elbo=flipout)
