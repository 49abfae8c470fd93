"""Square roots of Fisher information against Monte Carlo with error bars, and exact sums."""

import pyro.distributions as dist
import pytest
import torch
from helpers.families import FAMILIES, covariance, triangle
from torch import tensor

from pyro_bdl.curvature.fisher import (
    cell_roots,
    cell_weights,
    check_information,
    empirical_columns,
    exact_columns,
    num_data,
    sampled_columns,
    site_parameters,
)
from pyro_bdl.distributions.parameters import parameters_of
from pyro_bdl.program import Site


def T(value):
    return tensor(value, dtype=torch.float64)


LOGITS = T([0.3, -1.2, 2.0])


def information(base, names):
    """S S' of all the parameters together, flattened."""
    used = {name: value for name, value in parameters_of(base).items() if name in names}
    roots = cell_roots(base, used)
    zeros = {name: torch.zeros_like(value) for name, value in used.items()}
    columns = [torch.cat([{**zeros, **r}[name].reshape(-1) for name in used]) for r in roots]
    root = torch.stack(columns, 1)
    return root @ root.T, list(used)


def test_categorical():
    """F = diag(p) - p p' for logits (Martens 2020)."""
    p = LOGITS.softmax(-1)
    given_logits = information(dist.Categorical(logits=LOGITS), ["logits"])[0]
    torch.testing.assert_close(given_logits, torch.diag(p) - p.outer(p))
    for base in (dist.Categorical(probs=p), dist.OneHotCategorical(probs=p)):
        torch.testing.assert_close(information(base, ["probs"])[0], torch.diag(1 / p))
    of_five = information(dist.Multinomial(5, logits=LOGITS), ["probs"])[0]
    torch.testing.assert_close(of_five, torch.diag(5 / p))


def test_dirichlet():
    """F = diag(psi'(a)) - psi'(sum of a)."""
    a = T([0.5, 2.0, 1.3])
    psi = torch.special.polygamma
    exact = torch.diag(psi(1, a)) - psi(1, a.sum())
    torch.testing.assert_close(information(dist.Dirichlet(a), ["concentration"])[0], exact)


def test_logits_and_probabilities_are_one_information():
    """J' F J is the same in both parametrizations, also after log_prob has derived the other.
    Fisher information is covariant."""
    logits = LOGITS.expand(4, 3).clone().requires_grad_()
    for first, second in (
        (dist.Categorical(logits=logits), dist.Categorical(probs=logits.softmax(-1))),
        (dist.Bernoulli(logits=logits), dist.Bernoulli(probs=logits.sigmoid())),
        (dist.Categorical(logits=logits), dist.OneHotCategorical(logits=logits)),
    ):
        found = []
        for base in (first, second):
            base.log_prob(base.sample())  # derives logits and keeps them
            site = Site(base, None, 1.0, None)
            (name,) = site_parameters(site)
            assert name == ("logits" if base is first else "probs"), base
            rows = [
                torch.autograd.grad(getattr(base, name), logits, column[name], retain_graph=True)[0]
                for column in exact_columns(site)
            ]
            found.append(sum(r.reshape(-1)[:, None] * r.reshape(-1)[None, :] for r in rows))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("logits", [-100.0, 100.0, 800.0])
def test_saturated_outputs_have_finite_roots(logits):
    for dtype in (torch.float32, torch.float64):
        value = torch.tensor([logits, 0.0], dtype=dtype)
        for base in (
            dist.Categorical(logits=value),
            dist.Categorical(probs=value.softmax(-1)),
            dist.Bernoulli(logits=value),
            dist.Bernoulli(probs=value.sigmoid()),
            dist.Poisson(value.clamp(max=50).exp()),
        ):
            for root in cell_roots(base, parameters_of(base)):
                assert all(torch.isfinite(part).all() for part in root.values())


# Sites


def outer(columns, name="loc"):
    """sum over columns of c c' for each datum, over its cells: (n, cells, cells)."""
    columns = torch.stack([column[name].flatten(1) for column in columns])
    return torch.einsum("kni,knj->nij", columns, columns)


def site(distribution, scale=1.0, mask=None, subsampling=1.0, value=None):
    return Site(distribution, value, scale, mask, subsampling)


def grad(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_every_cell_has_columns_of_its_own():
    loc, scale = grad(4, 2, 3), torch.rand(4, 2, 3) + 0.5
    found = outer(exact_columns(site(dist.Normal(loc, scale).to_event(2))))
    torch.testing.assert_close(found, torch.diag_embed(scale.flatten(1) ** -2))


def test_a_single_number_is_one_datum():
    s = site(dist.Normal(torch.tensor(0.3, requires_grad=True), 2.0))
    assert num_data(s) == 1
    (column,) = exact_columns(s)
    torch.testing.assert_close(column["loc"], torch.tensor(0.5))


@pytest.mark.parametrize("cells", [3, 4])  # as many as data, too
def test_masks_and_temperatures_weigh_their_own_axes(cells):
    loc = grad(4, cells)
    normal = dist.Normal(loc, 1.0)
    per_datum = torch.tensor([True, False, True, True])
    per_cell = torch.rand(4, cells) > 0.5
    row = torch.rand(cells) > 0.3
    scales = torch.tensor([0.5, 1.0, 2.0, 3.0])
    close = torch.testing.assert_close
    event = normal.to_event(1)
    expected = per_datum.double()[:, None].expand(4, cells)
    close(cell_weights(site(event, mask=per_datum)) ** 2, expected)
    close(cell_weights(site(event.mask(per_datum))) ** 2, expected)
    close(cell_weights(site(normal.mask(per_cell).to_event(1))) ** 2, per_cell.double())
    close(cell_weights(site(normal.mask(row).to_event(1))) ** 2, row.double().expand(4, cells))
    close(cell_weights(site(event, scale=scales)) ** 2, scales[:, None].expand(4, cells))
    close(cell_weights(site(normal, scale=6.0, subsampling=3.0)) ** 2, torch.full((4, cells), 2.0))
    both = cell_weights(site(normal.mask(per_cell).to_event(1), scale=2.0, mask=per_datum)) ** 2
    close(both, 2.0 * per_cell * per_datum[:, None])
    close(cell_weights(site(normal, mask=False)), torch.zeros(4, cells))
    weights = cell_weights(site(event, mask=per_datum)) ** 2
    close(outer(exact_columns(site(event, mask=per_datum))), torch.diag_embed(weights))


def test_the_empirical_columns_are_scores():
    """The empirical Fisher uses the scores at the observed values (Martens 2020)."""
    loc, y = grad(5, 2), torch.randn(5, 2)
    s = site(dist.Normal(loc, 0.5).to_event(1), scale=4.0, value=y)
    (column,) = empirical_columns(s)
    torch.testing.assert_close(column["loc"], 2.0 * (y - loc.detach()) / 0.25)


def test_sampled_columns_converge():
    """E[S S'] = F for scores of drawn observations (Martens 2020)."""
    torch.manual_seed(0)
    logits = grad(3, 4).detach().repeat_interleave(200, 0).requires_grad_()
    s = site(dist.Categorical(logits=logits), scale=2.0)
    draws = 100
    columns = torch.stack([c["logits"] for c in sampled_columns(s, draws)])
    products = draws * torch.einsum("kni,knj->knij", columns, columns)
    products = products.unflatten(1, (3, 200)).transpose(1, 2).flatten(0, 1)
    draws = len(products)
    p = logits.detach()[::200].softmax(-1)
    expected = 2.0 * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    error = products.std(0) / draws**0.5
    assert ((products.mean(0) - expected).abs() < 5 * error).all()
    assert (error < 0.02).all()


def test_cells_of_zero_inflated_counts():
    """Their batch shape is a tuple once a plate has expanded them."""
    gate = torch.zeros(3, 2, requires_grad=True)
    base = dist.ZeroInflatedPoisson(torch.ones(3, 2), gate_logits=gate).expand((3, 2))
    columns = list(exact_columns(Site(base, None, 1.0, None)))
    assert [tuple(column["gate_logits"].shape) for column in columns] == [(3, 2)] * 2


# From the latents through the constructor


# Their information is exact; that of the others is an estimate by 512 draws.
EXACT = {
    "Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel", "StudentT", "Gamma", "Beta",
    "Dirichlet", "Exponential", "HalfNormal", "Poisson", "Bernoulli", "Binomial", "Categorical",
    "MultivariateNormal", "LowRankMultivariateNormal", "NegativeBinomial, logits",
    "NegativeBinomial, probs",
}  # fmt: skip


def pulled_back(distribution, latents):
    """J' F J for one datum's latents."""
    observed = site(distribution)
    used, total = site_parameters(observed), 0.0
    for column in exact_columns(observed):
        (gradient,) = torch.autograd.grad(
            [used[name] for name in column], latents, list(column.values()), retain_graph=True
        )
        total = total + gradient.outer(gradient)
    return total


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "Uniform"])  # whose support moves
def test_every_family_against_drawn_scores_of_the_latents(name):
    """J' F J = E[s s'] with the score s = d log p(y | w) / d w (Fisher 1925)."""
    torch.manual_seed(3)
    size, make = FAMILIES[name]
    latents = torch.linspace(-0.4, 0.5, size, dtype=torch.float64).requires_grad_()
    found = pulled_back(make(latents[None]), latents)
    draws = 20_000
    each = latents.detach().expand(draws, size).clone().requires_grad_()
    with torch.no_grad():
        values = make(each).sample()
    (scores,) = torch.autograd.grad(make(each).log_prob(values).sum(), each)
    products = scores[:, :, None] * scores[:, None, :]
    slack = 5 * products.std(0) / draws**0.5
    if EXACT.isdisjoint({name, name.split(",")[0]}):
        slack = slack * (1.0 + (draws / 512) ** 0.5)
    assert ((found - products.mean(0)).abs() <= slack + 1e-9).all(), (found, products.mean(0))
    assert found.diagonal().min() > 1e-3


def test_multivariate_normals_are_exact_in_every_parameterization():
    """F_ij = tr(P dS_i P dS_j) / 2 + dm_i' P dm_j, P the inverse of the covariance S. Source: Kay
    1993, Fundamentals of statistical signal processing, equation 3.31."""
    latents = torch.linspace(-0.4, 0.5, 6, dtype=torch.float64).requires_grad_()
    low_rank = FAMILIES["LowRankMultivariateNormal"][1]
    kinds = {
        "scale_tril": lambda w: dist.MultivariateNormal(w[..., 3:5], scale_tril=triangle(w)),
        "covariance": lambda w: dist.MultivariateNormal(w[..., 3:5], covariance(w)),
        "precision": lambda w: dist.MultivariateNormal(
            w[..., 3:5], precision_matrix=covariance(w)
        ),
        "low rank": low_rank,
    }  # fmt: skip
    for make in kinds.values():
        found = pulled_back(make(latents[None]), latents)
        moved = torch.autograd.functional.jacobian
        changes = moved(lambda w: make(w).covariance_matrix, latents).movedim(-1, 0)  # noqa: B023
        means = moved(lambda w: make(w).loc, latents)  # noqa: B023
        precision = make(latents).covariance_matrix.detach().inverse()
        scaled = precision @ changes
        expected = 0.5 * torch.einsum("iab,jba->ij", scaled, scaled) + means.T @ precision @ means
        torch.testing.assert_close(found, expected)


def test_the_number_of_draws_of_an_estimate_is_settable():
    torch.manual_seed(0)
    scale = torch.full((1,), 1.3, dtype=torch.float64, requires_grad=True)
    observed = site(dist.Weibull(scale, T([2.0])))
    exact = (2.0 / 1.3) ** 2

    def error(draws):
        (column,) = exact_columns(observed, draws)
        return abs(float(column["scale"].square()) - exact)

    assert sum(error(4) for _ in range(20)) > 5 * sum(error(4000) for _ in range(20))
    cutpoints = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)[None].requires_grad_()
    many = list(exact_columns(site(dist.DirichletMultinomial(cutpoints.exp(), 5)), 5))
    assert len(many) == 5  # the scores themselves, which are fewer than the parameters


def test_a_support_that_moves_or_a_density_that_does_not_is_refused():
    one = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = torch.full((3,), 0.5, dtype=torch.float64)
    for moving in (dist.Uniform(-one, one), dist.Pareto(0.1 * one, T(2.0))):
        with pytest.raises(ValueError, match="depends on the latents"):
            check_information("y", site(moving, value=y))
    with pytest.raises(ValueError, match="no gradient in its v"):
        list(exact_columns(site(dist.Delta(one))))
    with pytest.raises(ValueError, match="the targets of site 'y' depend on the latents"):
        check_information("y", site(dist.Normal(T(0.0), one), value=y - one))


class Shifted(dist.Normal):
    """A Normal with a tensor that is not one of its arguments."""

    def __init__(self, loc, scale, shift=0.0, validate_args=None):
        self.shift = shift
        super().__init__(loc, scale, validate_args=validate_args)

    def log_prob(self, value):
        return super().log_prob(value - self.shift)


def test_a_tensor_that_cannot_be_read_off_is_refused():
    one = torch.ones(3, dtype=torch.float64, requires_grad=True)
    check_information("y", site(Shifted(one, T(1.0)), value=torch.zeros(3).double()))
    with pytest.raises(ValueError, match=r"site 'y' \(Shifted\) is not determined by its"):
        check_information("y", site(Shifted(one, T(1.0), one), value=torch.zeros(3).double()))
