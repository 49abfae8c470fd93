"""KL divergences against quadrature and closed forms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam
from scipy.integrate import quad
from torch import nn
from torch.distributions import constraints, kl_divergence

from pyro_bdl import Program, bayesianize, priors
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.guides.kl import (
    diagonal_normal_kl,
    entropy,
    mean_field_kl,
    sampled_kl,
)
from pyro_bdl.program import Site
from pyro_bdl.program.layout import marginal

D = torch.float64


def _t(value):
    return torch.tensor(value, dtype=D)


def _quadrature(q, p):
    """KL over the logarithm of the positive variable."""

    def integrand(u):
        w = _t(u).exp()
        log_q = q.log_prob(w)
        return (log_q.exp() * (log_q - p.log_prob(w)) * w).item()

    center, width = q.loc.item(), q.scale.item()
    return quad(integrand, center - 12 * width, center + 12 * width, epsabs=1e-12, limit=200)[0]


PRIORS = {
    "HalfNormal": dist.HalfNormal(_t(0.7)),
    "Gamma": dist.Gamma(_t(2.5), _t(1.5)),
    "Exponential": dist.Exponential(_t(1.5)),
    "InverseGamma": dist.InverseGamma(_t(2.5), _t(1.5)),
    "LogNormal": dist.LogNormal(_t(0.3), _t(0.6)),
}


@pytest.mark.parametrize("loc,scale", [(-0.4, 0.3), (0.5, 0.9)])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_lognormal_kls_are_the_integral(prior, loc, scale):
    """KL(q || p) = E_q[log q - log p] by quadrature."""
    q = dist.LogNormal(_t(loc), _t(scale))
    expected = _quadrature(q, prior)
    assert kl_divergence(q, prior).item() == pytest.approx(expected, abs=1e-8)
    many = kl_divergence(q.expand([3]).to_event(1), prior.expand([3]).to_event(1))
    assert many.item() == pytest.approx(3 * expected, abs=1e-7)


def _sites(distribution, value, scale=1.0, mask=None):
    return {"w": Site(distribution, value, scale, mask)}


def test_normal_sites_and_their_plates():
    """log(t / s) + (s^2 + (m - n)^2) / (2 t^2) - 1/2 (Kingma & Welling 2014, appendix B)."""
    w = torch.randn(4, 3, dtype=D)
    q = dist.Normal(w, 0.3).to_event(1)
    p = dist.Normal(torch.zeros(4, 3, dtype=D), 2.0).to_event(1)
    expected = (math.log(2 / 0.3) + (0.09 + w**2) / 8 - 0.5).sum()
    torch.testing.assert_close(mean_field_kl(_sites(q, w), _sites(p, w)), expected)
    scaled = mean_field_kl(_sites(q, w, 5.0), _sites(p, w, 5.0))
    torch.testing.assert_close(scaled, 5 * expected)


def test_scales_that_differ_weigh_each_term():
    """s_q E[log q] - s_p E[log p], as a cold program under a plain guide has it."""
    w = torch.randn(3, dtype=D)
    q, p = dist.Normal(w, 0.3).to_event(1), dist.Normal(0.0 * w, 2.0).to_event(1)
    e_log_q = -q.entropy()
    e_log_p = -(0.5 * math.log(2 * math.pi) + math.log(2) + (0.09 + w**2) / 8).sum()
    value = mean_field_kl(_sites(q, w, 1.0), _sites(p, w, 4.0))
    torch.testing.assert_close(value, e_log_q - 4.0 * e_log_p)


def test_masks_and_unknown_pairs_are_taken_at_the_draw():
    w = torch.randn(4, dtype=D).abs()
    q, p = dist.LogNormal(_t(0.0), _t(1.0)).expand([4]), dist.HalfCauchy(_t(1.0)).expand([4])
    mask = torch.tensor([True, False, True, True])
    at_draw = q.log_prob(w) - p.log_prob(w)
    torch.testing.assert_close(mean_field_kl(_sites(q, w), _sites(p, w)), at_draw.sum())
    masked = mean_field_kl(_sites(q, w, 1.0, mask), _sites(p, w, 1.0, mask))
    torch.testing.assert_close(masked, at_draw[mask].sum())


def test_a_delta_with_a_density_is_taken_at_the_draw():
    w = _t(0.5)
    q, p = dist.Delta(w, log_density=_t(-1.7)), dist.LogNormal(_t(0.0), _t(1.0))
    torch.testing.assert_close(mean_field_kl(_sites(q, w), _sites(p, w)), -1.7 - p.log_prob(w))
    torch.testing.assert_close(sampled_kl(_sites(q, w), _sites(p, w)), -1.7 - p.log_prob(w))


def test_auxiliary_and_missing_sites():
    a, b = _t(0.3), _t(-0.2)
    q = {"aux": Site(dist.Normal(_t(0.0), _t(1.0)), a, 1.0, None)}
    p = {"w": Site(dist.Normal(_t(0.0), _t(2.0)), b, 1.0, None)}
    expected = q["aux"].log_prob() - p["w"].log_prob()
    torch.testing.assert_close(mean_field_kl(q, p), expected)
    torch.testing.assert_close(sampled_kl(q, p), expected)


def everything():
    pyro.sample("a", dist.Normal(_t([0.5, -0.5]), _t(2.0)).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(_t(0.7)))
    pyro.sample("b", dist.Normal(_t(0.0), s))
    pyro.sample("student", dist.StudentT(_t(4.0), _t(0.0), _t(1.0)).expand([2]).to_event(1))
    pyro.sample("simplex", dist.Dirichlet(_t([1.0, 2.0, 3.0])))
    pyro.sample("c", dist.Normal(_t(1.0), _t(3.0)).expand([2, 2]).to_event(2))
    with pyro.plate("data", 3):
        pyro.sample("local", dist.LogNormal(_t(0.1), _t(0.4)))


def _everything():
    program = Program(everything)
    u, scale = torch.randn(program.size, dtype=D), 0.3 * torch.rand(program.size, dtype=D) + 0.1
    loc = 0.5 * torch.randn(program.size, dtype=D)
    values, _ = program.constrain(u)
    run = program.run(values)
    q = {}
    for name, latent in program.latents.items():
        part, shape = program.slices[name], latent.unconstrained_shape
        fn = marginal(latent, loc[part].view(shape), scale[part].view(shape))
        q[name] = Site(fn.to_event(latent.event_dim - fn.event_dim), values[name], 1.0, None)
    return program, loc, scale, values, run, q


def test_the_flat_closed_form_is_the_one_by_site():
    program, loc, scale, _, run, q = _everything()
    flat = diagonal_normal_kl(program.layout, loc, scale, run.latents)
    torch.testing.assert_close(flat, mean_field_kl(q, run.latents), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("one_prior", [False, True])
def test_the_kl_of_many_weights_near_the_prior_does_not_cancel(one_prior):
    """The KL of 10^6 weights with q = Normal(0, (1 + 1e-4)^2) is 0.01 nats, in float32 too."""
    size = 1_000_000

    def wide():
        loc = torch.tensor(0.0).expand(size) if one_prior else torch.zeros(size)
        pyro.sample("w", dist.Normal(loc, torch.tensor(0.3)).to_event(1))

    program = Program(wide)
    scale, zero = torch.full((size,), 0.3 * (1 + 1e-4)), torch.zeros(size)
    prior = program.run(program.initial).latents
    found = diagonal_normal_kl(program.layout, zero, scale, prior)
    r = (scale.double() / torch.tensor(0.3).double()).square()
    assert found.item() == pytest.approx(0.5 * (r - 1 - r.log()).sum().item(), rel=0.01)


def test_entropy():
    w = torch.rand(3, dtype=D)
    q = {
        "normal": Site(dist.Normal(w, 0.3).to_event(1), w, 2.0, None),
        "none": Site(
            dist.TransformedDistribution(dist.Normal(w, 0.3), [dist.transforms.SigmoidTransform()]),
            w,
            1.0,
            None,
        ),
    }
    expected = 2 * 3 * (0.5 + 0.5 * math.log(2 * math.pi) + math.log(0.3))
    expected -= q["none"].distribution.log_prob(w).sum()
    torch.testing.assert_close(entropy(q), expected)
    nothing = {"w": Site(dist.Delta(w, event_dim=1), w, 1.0, None)}
    assert entropy(nothing) == 0.0


def test_constant_priors_are_read_once_and_others_in_every_step():
    """The KL follows another prior of the network, and a scale that is learned or set in place."""
    net, x = nn.Linear(3, 1).double(), torch.randn(5, 3, dtype=D)
    learned = PyroParam(torch.tensor(0.7, dtype=D), constraints.positive)
    width = torch.tensor(1.5, dtype=D)

    def in_place(name, module, parameter):
        return dist.Normal(torch.zeros((), dtype=D), width)

    changes = {
        "constant": (priors.Normal(2.0), lambda bnn: setattr(bnn, "prior", priors.Normal(0.5))),
        "learned": (priors.Normal(learned), lambda bnn: None),
        "in place": (in_place, lambda bnn: width.mul_(3.0)),
    }
    for prior, change in changes.values():
        bnn = bayesianize(net, prior)
        guide = AutoMeanField(bnn).prototype(x)
        for _ in range(3):
            vector = guide.sample_vectors(1)[0]
            latents, log_det = guide.layout.constrain(vector)
            run = Program(bnn, x).run(latents)
            means, scales = map(guide.layout.unflatten, guide.loc_and_scale())
            expected = sum(
                kl_divergence(
                    dist.Normal(means[name], scales[name]), site.distribution.base_dist
                ).sum()
                for name, site in run.latents.items()
            )
            found = guide.kl(vector, log_det, run)
            torch.testing.assert_close(found, expected)
            change(bnn)
