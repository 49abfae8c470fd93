"""Ensembles: members trained at once equal members trained alone, mixtures, fresh starts."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=dtype)
    y = x[:, 0].sin() + 0.1 * torch.randn(40, generator=generator, dtype=dtype)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return bdl.models.Regression(bdl.bayesianize(net)), x, y


def trained(model, guide, x, y, particles, steps=50):
    # the mean over particles scales gradients, to which Adam is blind but for its eps
    elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=particles)
    optimizer = torch.optim.Adam(guide.prototype(x, y).parameters(), lr=0.02, eps=1e-20)
    for _ in range(steps):
        optimizer.zero_grad()
        elbo.differentiable_loss(model, guide, x, y).backward()
        optimizer.step()
    return guide


def test_members_at_once_are_members_alone():
    """Deep ensembles (Lakshminarayanan, Pritzel & Blundell 2017)."""
    pyro.set_rng_seed(0)
    model, x, y = problem(torch.float64)
    ensemble = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    starts = ensemble.locs.detach().clone()
    assert not torch.allclose(starts[0], starts[1])
    trained(model, ensemble, x, y, particles=3)
    for number in range(3):
        alone = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)
        alone.loc.data.copy_(starts[number])
        trained(model, alone, x, y, particles=1)
        torch.testing.assert_close(ensemble.locs[number], alone.loc, rtol=1e-5, atol=1e-5)
    assert (ensemble.locs - starts).abs().max() > 0.1


def test_draws_take_the_members_in_turn():
    model, x, y = problem()
    guide = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    drawn = guide.sample_vectors(7)
    assert torch.equal(drawn[:3], guide.locs) and torch.equal(drawn[6], guide.locs[0])
    rows = {tuple(row.tolist()) for row in guide.sample_vectors(2)}
    members = [tuple(row.tolist()) for row in guide.locs]
    assert len(rows) == 2 and rows <= set(members)
    torch.testing.assert_close(guide.location(), guide.locs.mean(0))
    torch.testing.assert_close(guide.variances(), guide.locs.var(0, correction=0))
    predictions = bdl.Predictive(model, guide, num_samples=6)(x)["f"]
    assert torch.equal(predictions[:3], predictions[3:])
    alone = {name: value[None, None] for name, value in guide.member(1).items()}
    torch.testing.assert_close(bdl.Predictive(model, bdl.Samples(alone))(x)["f"][0], predictions[1])


def test_predictions_and_scores_count_each_member_as_often():
    """Scores of 3 members are their averages, not of 34 + 33 + 33 draws, or 334 + 333 + 333."""
    model, x, y = problem(torch.float64)
    guide = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    latents = {name: draw.detach() for name, draw in guide.sample_latents(3).items()}
    member = bdl.Predictive(model, latents)
    expected = member.moments(x)["y"]
    of_default = bdl.Predictive(model, guide)
    assert of_default(x)["f"].shape == (99, 40)
    for found in (of_default.moments(x)["y"], of_default.at_fixed_draws(x).moments(x)["y"]):
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.variance, expected.variance)
    nlpd = bdl.metrics.negative_log_predictive_density(member.log_likelihood(x, y)["y"])
    for num_samples in (3, 10, 1000):
        scores = bdl.evaluate(model, guide, x, y, num_samples=num_samples).scores
        assert scores["nlpd"] == pytest.approx(float(nlpd), rel=1e-9)
    assert bdl.Predictive(model, guide, num_samples=10)(x)["f"].shape == (10, 40)


def test_starts_are_the_layers_own():
    """A fresh weight has the layer's own uniform distribution, not the network's values."""
    net = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 1))
    before = net[0].weight.detach().clone()
    model = bdl.models.Regression(bdl.bayesianize(net))
    x, y = torch.randn(3, 100), torch.randn(3)
    guide = bdl.guides.AutoEnsemble(model, size=2).prototype(x, y)
    weights = [guide.member(k)["0.weight"] for k in range(2)]
    for weight in weights:
        assert not torch.equal(weight, before)
        assert weight.abs().max() <= 0.1  # 1 / sqrt(fan in)
        assert abs(weight.std().item() - 0.1 / 3**0.5) < 1e-3  # error bar: 20 000 draws
    assert torch.equal(net[0].weight, before)
    assert torch.equal(model.network.network[0].weight, before)


@pytest.mark.parametrize("kind", ["AutoLowRank", "AutoMatrixNormal", "AutoMCDropout", "AutoSWAG"])
def test_members_become_guides_of_other_kinds(kind):
    model, x, y = problem()
    ensemble = bdl.guides.AutoEnsemble(model, size=2).prototype(x, y)
    guides = ensemble.as_guides(getattr(bdl.guides, kind))
    for number, guide in enumerate(guides):
        assert torch.equal(guide.location(), ensemble.locs[number])
        trained = pyro.infer.SVI(
            model, guide, pyro.optim.Adam({"lr": 0.01}), bdl.elbo.TemperedTraceMeanField_ELBO()
        )
        trained.step(x, y)
        assert not torch.equal(guide.location(), ensemble.locs[number])
    assert bdl.guides.MixtureGuide(guides).sample_vectors(3).shape == (3, ensemble.locs.shape[1])


def test_a_step_trains_all_members_by_default_and_fewer_are_said():
    model, x, y = problem()
    guide = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    start = guide.locs.detach().clone()
    bdl.training.train(model, guide, x, y, steps=1)
    assert ((guide.locs - start).abs().amax(1) > 0).all()
    with pytest.warns(BdlWarning, match="1 of the 3 members .* num_particles=3"):
        bdl.training.train(model, guide, x, y, steps=1, elbo=bdl.elbo.TemperedTraceMeanField_ELBO())


def test_a_loaded_state_without_parameters_and_a_printed_guide():
    model, x, y = problem()
    guide = bdl.guides.AutoEnsemble(model, size=3)
    assert repr(guide) == "AutoEnsemble(no parameters yet)"
    other = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    guide.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="keeps the loaded state until its first run"):
        guide.require_layout()
    assert repr(other) == "AutoEnsemble(34 latent numbers, 5 sites)"
    assert list(dir(bdl)) == sorted(bdl.__all__) and "plots" in bdl.__all__


def linear(kind=torch.float64):
    """y ~ N(X w, 0.5^2), w ~ N(m, t^2): data, and the precisions H of p(w | y) and L of p(w)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, generator=generator, dtype=kind)
    y = torch.randn(6, generator=generator, dtype=kind)
    loc = torch.tensor([0.5, -1.0, 0.0], dtype=kind)
    scale = torch.tensor([1.0, 0.5, 2.0], dtype=kind)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(loc, scale).to_event(1))
        pyro.sample("positive", dist.LogNormal(x.new_zeros(()), 1.0))  # keeps its prior
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((x * w).sum(-1), 0.5), obs=y)

    prior = torch.diag(scale**-2)
    return model, x, y, loc, prior + 4 * x.T @ x, prior


@pytest.mark.parametrize("bound", ["TemperedTrace_ELBO", "CompiledELBO", "Trace_ELBO"])
def test_an_anchored_member_has_the_optimum_of_its_anchor(bound, minimize):
    """w_k = H^-1 (X' y / s^2 + L a_k), under the bounds of this package and of Pyro."""
    model, x, y, _, posterior, prior = linear()
    ensemble = bdl.guides.AutoEnsemble(model, size=3, anchored=True).prototype(x, y)
    anchors = ensemble.anchors[:, :3]
    kind = Trace_ELBO if bound == "Trace_ELBO" else getattr(bdl.elbo, bound)
    more = {"vectorize_particles": True, "max_plate_nesting": 1} if kind is Trace_ELBO else {}
    elbo = kind(num_particles=3, **more)
    differentiable = elbo.differentiable_loss
    minimize(
        ensemble.parameters(),
        lambda: differentiable(model, ensemble, x, y),
        tolerance_grad=1e-12,
    )
    weights = ensemble.locs.detach()[:, :3]
    expected = torch.linalg.solve(posterior, 4 * x.T @ y[:, None] + prior @ anchors.T).T
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-3)
    with pyro.poutine.block():
        alike = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=3).loss(model, ensemble, x, y)
    assert elbo.loss(model, ensemble, x, y) == pytest.approx(alike, rel=1e-10)


def test_anchored_members_have_the_moments_of_the_posterior(minimize):
    """Mean m_N and covariance H^-1 L H^-1, of anchors from the prior; H^-1, of L^-1 H L^-1."""
    pyro.set_rng_seed(0)
    model, x, y, loc, posterior, prior = linear()
    size = 1000
    ensemble = bdl.guides.AutoEnsemble(model, size=size, anchored=True).prototype(x, y)
    elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=size)
    inverse = posterior.inverse()
    mean = inverse @ (4 * x.T @ y + prior @ loc)
    covariances = [inverse @ prior @ inverse, inverse]
    for covariance, of_anchors in zip(
        covariances, [None, prior.inverse() @ posterior @ prior.inverse()], strict=True
    ):
        if of_anchors is not None:
            root = torch.linalg.cholesky(of_anchors)
            ensemble.anchors[:, :3] = loc + torch.randn(size, 3, dtype=x.dtype) @ root.T
        minimize(
            ensemble.parameters(),
            lambda: elbo(model, ensemble)(x, y) * size,
            tolerance_grad=1e-12,
        )
        weights = ensemble.locs.detach()[:, :3]
        variances = covariance.diagonal()
        assert ((weights.mean(0) - mean).abs() < 4 * (variances / size).sqrt()).all()
        errors = ((variances[:, None] * variances + covariance.square()) / size).sqrt()
        assert ((weights.T.cov() - covariance).abs() < 4 * errors).all()


@pytest.mark.parametrize("prior", ["Laplace(1.0)", "Normal(dist.HalfNormal(1.0))"])
def test_anchors_are_for_fixed_normal_priors(prior):
    kind = eval(f"bdl.priors.{prior}")
    model = bdl.models.Regression(bdl.bayesianize(nn.Linear(2, 1), kind))
    ensemble = bdl.guides.AutoEnsemble(model, anchored=True)
    with pytest.raises(ValueError, match="is for Normal priors with fixed means and scales"):
        ensemble.prototype(torch.randn(3, 2), torch.randn(3))


def test_a_saved_ensemble_keeps_its_anchors(tmp_path):
    model, x, y, *_ = linear()
    ensemble = bdl.guides.AutoEnsemble(model, size=3, anchored=True).prototype(x, y)
    again = bdl.load_posterior(ensemble.save(tmp_path / "posterior"), model)
    assert torch.equal(again.anchors, ensemble.anchors)
