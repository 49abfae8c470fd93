"""The contract of ready guides, those made from others included."""

import copy
import pickle

import pytest
import torch
from helpers import reference_draws, second_device

# around points that nobody trained
pytestmark = pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum")

# Ready guides, those made from others included


def test_ready_guides_draw_values_of_every_site(guide, linear):
    _, x, y = linear
    shapes = {name: latent.shape for name, latent in guide.layout.latents.items()}
    assert shapes == {"w": (1, 2), "s": (), "shift": shapes["shift"]}
    values, draws = guide(x, y), guide.sample_latents(6)
    assert {name: value.shape for name, value in values.items()} == shapes
    assert {name: value.shape for name, value in draws.items()} == {
        name: (6, *shape) for name, shape in shapes.items()
    }
    assert (draws["s"] > 0).all() and draws["w"].dtype == torch.float64


def test_ready_guides_draw_the_numbers_of_this_release(guide, request):
    reference_draws.check(request.node.callspec.params["guide"], guide.sample_latents(3))


def _are_quantiles(found, draws, levels, steps):
    """Check that shares of draws below quantiles are the levels, up to steps of a share."""
    slack = 5 * (0.25 / len(draws)) ** 0.5 + steps
    for level, value in zip(levels, found, strict=True):
        edge = 1e-9 * value.abs()
        assert ((draws <= value + edge).double().mean(0) >= level - slack).all()
        assert ((draws < value - edge).double().mean(0) <= level + slack).all()


def test_ready_guides_have_the_quantiles_of_their_draws(guide):
    levels = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64)
    steps = 1 / guide.num_members if guide.num_members > 1 else 0.0  # points are interpolated
    found = guide.vector_quantiles(levels)
    _are_quantiles(found, guide.sample_vectors(4000), levels, steps)
    assert torch.equal(guide.vector_quantiles(levels), found)  # also those of draws
    draws, found = guide.sample_latents(4000), guide.quantiles(levels)
    for name, value in found.items():
        _are_quantiles(value, draws[name], levels, steps)


def test_ready_guides_have_the_density_and_the_entropy_of_their_draws(dense):
    """E_q[r(u) / q(u)] = 1 for a normalized r that is narrower than q; H(q) = -E[log q(w)]."""
    draws = dense.sample_vectors(4000)
    center, covariance = draws.mean(0), torch.cov(draws.T)
    narrow = torch.distributions.MultivariateNormal(center, 0.5 * covariance)
    log_det = dense.layout.constrain(draws)[1]
    with dense.cached_parameters():
        for value in (dense.log_density, dense.entropy):
            value(draws[0], log_det[0])  # which reads the parameters
        log_q = torch.vmap(dense.log_density)(draws, log_det).detach()
        entropies = torch.vmap(dense.entropy)(draws, log_det).detach()
    ratios = (narrow.log_prob(draws) - log_q - log_det).exp()
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / 4000**0.5
    error = ((log_q.var() + entropies.var()) / 4000).sqrt()
    assert abs(entropies.mean() + log_q.mean()) < 5 * error


def test_ready_guides_have_the_moments_of_their_draws(guide):
    draws, mean, variances = guide.sample_vectors(4000), guide.location(), guide.variances()
    error = (variances / 4000).sqrt()
    assert ((draws.mean(0) - mean).abs() <= 5 * error + 1e-9).all()
    torch.testing.assert_close(draws.var(0), variances, rtol=0.15, atol=1e-9)


def test_ready_guides_hold_no_arguments(guide):
    assert not {"_INPUT", "_RETURN"} & guide.prototype_trace.nodes.keys()


def test_ready_guides_hold_no_graph(guide):
    """A graph would keep the activations of the data in memory."""
    state = guide.state_dict(keep_vars=True)
    assert [name for name, value in state.items() if value.grad_fn is not None] == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
def test_ready_guides_are_copied(guide, how):
    clone = copy.deepcopy(guide) if how != "pickle" else pickle.loads(pickle.dumps(guide))
    if how == "state":
        state = {name: value.clone() for name, value in guide.state_dict().items()}
        with torch.no_grad():
            for tensor in clone.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(1.1)
        clone.load_state_dict(state)
    torch.testing.assert_close(clone.location(), guide.location())
    torch.testing.assert_close(clone.variances(), guide.variances())
    found = []
    for each in (guide, clone):
        torch.manual_seed(1)
        found.append(each.sample_vectors(3))
    torch.testing.assert_close(*found)


def test_ready_guides_move_to_another_device(guide, device):
    moved = second_device.moved(guide, device)
    draws, quantiles = moved.sample_vectors(3), moved.quantiles([0.1])
    assert draws.device.type == device.type
    assert {value.device.type for value in quantiles.values()} == {device.type}
    here = copy.deepcopy(guide).to(draws.dtype)
    # with layers these are variances of 4096 draws, of each device's own random numbers
    error = 5 * (2 / 4096) ** 0.5 if getattr(guide, "layers", ()) else 1e-7
    torch.testing.assert_close(moved.variances().cpu(), here.variances(), rtol=error, atol=1e-7)
