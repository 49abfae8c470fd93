"""The posteriors of ``posteriordb.py`` as Pyro programs, from the text of their Stan programs.

``POSTERIORS`` has for each name what reads its ``data.json`` and the program, which is called with
what was read. A flat prior is an ``ImproperUniform`` on the support that Stan declares. Numbers of
the reference are named after sites, as in ``beta[2]``; ``derived`` gives those that are no site.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Posterior:
    """A posterior of the collection.

    :param program: called with what ``read`` gives, the targets last.
    :param read: the arguments from the contents of ``data.json``.
    :param derived: numbers of the reference that are no site, from the latents.
    :param discrete: the sites that have to be summed out.
    :param target_accept: the acceptance probability that NUTS aims at.
    """

    program: Callable
    read: Callable[[Data], tuple]
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda latents: {}
    discrete: tuple[str, ...] = ()
    target_accept: float = 0.8


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def normal(scale: float, *shape: int) -> Any:
    return dist.Normal(number(0.0), scale).expand(shape).to_event(len(shape))


def flat(support: Any, *shape: int) -> Any:
    """A flat prior for one number or vector; its values have the default type of torch."""
    return dist.ImproperUniform(support, (), shape)


def columns(data: Data, *names: str) -> Tensor:
    """A design matrix: ones, and the columns named."""
    parts = [vector(data[name]) for name in names]
    return torch.stack([torch.ones_like(parts[0]), *parts], 1)


# ------------------------------------------------------------------------- linear regressions


def ark(lags, y):
    """An autoregression of order K."""
    alpha = pyro.sample("alpha", normal(10.0))
    beta = pyro.sample("beta", normal(10.0, lags.shape[1]))
    sigma = pyro.sample("sigma", dist.HalfCauchy(number(2.5)))
    with pyro.plate("times", len(lags)):
        pyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y)


def read_ark(data):
    order, y = data["K"], vector(data["y"])
    lags = [y[order - lag : len(y) - lag] for lag in range(1, order + 1)]
    return torch.stack(lags, 1), y[order:]


def diamonds(x, y):
    """A regression on centered columns, as brms writes it."""
    b = pyro.sample("b", normal(1.0, x.shape[1]))
    intercept = pyro.sample("Intercept", dist.StudentT(number(3.0), 8.0, 10.0))
    sigma = pyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(number(3.0), 0.0, 10.0)))
    with pyro.plate("data", len(x)):
        pyro.sample("Y", dist.Normal(intercept + x @ b, sigma), obs=y)


def read_diamonds(data):
    x = vector(data["X"])[:, 1:]
    return x - x.mean(0), vector(data["Y"])


def earnings(x, y):
    """A regression with flat priors."""
    beta = pyro.sample("beta", flat(constraints.real_vector, 2))
    sigma = pyro.sample("sigma", flat(constraints.positive))
    with pyro.plate("data", len(x)):
        pyro.sample("earn", dist.Normal(x @ beta, sigma), obs=y)


def kidscore(x, y):
    """A regression with flat priors but for the noise, for ``interaction`` and ``momiq``."""
    beta = pyro.sample("beta", flat(constraints.real_vector, x.shape[1]))
    sigma = pyro.sample("sigma", dist.HalfCauchy(number(2.5)))
    with pyro.plate("data", len(x)):
        pyro.sample("kid_score", dist.Normal(x @ beta, sigma), obs=y)


def read_interaction(data):
    x = columns(data, "mom_hs", "mom_iq")
    return torch.cat([x, x[:, 1:2] * x[:, 2:3]], 1), vector(data["kid_score"])


def mesquite(x, y):
    """A regression with flat priors on seven columns."""
    beta = pyro.sample("beta", flat(constraints.real_vector, 7))
    sigma = pyro.sample("sigma", flat(constraints.positive))
    with pyro.plate("data", len(x)):
        pyro.sample("weight", dist.Normal(x @ beta, sigma), obs=y)


def nes(x, y):
    """A regression with flat priors on nine columns, of which three are levels of age."""
    beta = pyro.sample("beta", flat(constraints.real_vector, 9))
    sigma = pyro.sample("sigma", flat(constraints.positive))
    with pyro.plate("data", len(x)):
        pyro.sample("partyid7", dist.Normal(x @ beta, sigma), obs=y)


def read_nes(data):
    age = torch.tensor(data["age_discrete"])
    ages = torch.stack([(age == level).double() for level in (2, 3, 4)], 1)
    before = columns(data, "real_ideo", "race_adj")
    after = columns(data, "educ1", "gender", "income")[:, 1:]
    return torch.cat([before, ages, after], 1), vector(data["partyid7"])


def blr(x, y):
    """A regression with a Normal prior on coefficients and on the noise, for both data sets."""
    beta = pyro.sample("beta", normal(10.0, x.shape[1]))
    sigma = pyro.sample("sigma", dist.HalfNormal(number(10.0)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


# ------------------------------------------------------------------------------- hierarchies


def eight_schools_centered(sigma, y):
    mu = pyro.sample("mu", normal(5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(number(5.0)))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(sigma, y):
    mu = pyro.sample("mu", normal(5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(number(5.0)))
    with pyro.plate("schools", len(y)):
        theta_trans = pyro.sample("theta_trans", normal(1.0))
        pyro.sample("y", dist.Normal(theta_trans * tau + mu, sigma), obs=y)


def schools(latents):
    """The effects of the schools, (..., 8), of the program without a center."""
    scaled = latents["theta_trans"] * latents["tau"][..., None]
    return {"theta": scaled + latents["mu"][..., None]}


# ------------------------------------------------------------------------------ a Gaussian process


def gp_regr(x, y):
    """Covariance alpha^2 exp(-(x - x')^2 / (2 rho^2)), and sigma, a variance, on the diagonal."""
    rho = pyro.sample("rho", dist.Gamma(number(25.0), 4.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(number(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(number(1.0)))
    distance = (x[:, None] - x) / rho
    covariance = alpha.square() * torch.exp(-0.5 * distance.square())
    covariance = covariance + sigma * torch.eye(len(x), dtype=x.dtype)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros_like(x), covariance), obs=y)


# ---------------------------------------------------------------------------- discrete latents


def low_dim_gauss_mix(y):
    """A mixture of two Normals, whose component is a site of each datum."""
    mu = pyro.sample("mu", flat(constraints.ordered_vector, 2))
    pyro.factor("prior_mu", dist.Normal(number(0.0), 2.0).log_prob(mu).sum())
    sigma = pyro.sample("sigma", dist.HalfNormal(number(2.0)).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(number(5.0), 5.0))
    weights = torch.stack([theta, 1 - theta])
    with pyro.plate("data", len(y)):
        k = pyro.sample("component", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(mu[k], sigma[k]), obs=y)


def hmm_example(y):
    """A hidden Markov chain of two states, whose first state has the weight 1 whatever it is."""
    flat_simplex = dist.Dirichlet(torch.ones(2, dtype=torch.float64))
    theta1 = pyro.sample("theta1", flat_simplex)
    theta2 = pyro.sample("theta2", flat_simplex)
    mu = pyro.sample("mu", flat(constraints.positive_ordered_vector, 2))
    pyro.factor("prior_mu", dist.Normal(vector([3.0, 10.0]), 1.0).log_prob(mu).sum())
    theta = torch.stack([theta1, theta2])
    state = None
    for time in pyro.markov(range(len(y))):
        weights = torch.full((2,), 0.5, dtype=torch.float64) if state is None else theta[state]
        state = pyro.sample(
            f"state_{time}", dist.Categorical(weights), infer={"enumerate": "parallel"}
        )
        pyro.sample(f"y_{time}", dist.Normal(mu[state], 1.0), obs=y[time])


def read_schools(data):
    return vector(data["sigma"]), vector(data["y"])


POSTERIORS = {
    "arK-arK": Posterior(ark, read_ark),
    "diamonds-diamonds": Posterior(diamonds, read_diamonds),
    "earnings-earn_height": Posterior(
        earnings, lambda d: (columns(d, "height"), vector(d["earn"]))
    ),
    "eight_schools-eight_schools_centered": Posterior(
        eight_schools_centered, read_schools, target_accept=0.99
    ),
    "eight_schools-eight_schools_noncentered": Posterior(
        eight_schools_noncentered, read_schools, derived=schools, target_accept=0.95
    ),
    "gp_pois_regr-gp_regr": Posterior(gp_regr, lambda d: (vector(d["x"]), vector(d["y"]))),
    "hmm_example-hmm_example": Posterior(
        hmm_example, lambda d: (vector(d["y"]),), discrete=("state_0", "state_1")
    ),
    "kidiq-kidscore_interaction": Posterior(kidscore, read_interaction),
    "kidiq-kidscore_momiq": Posterior(
        kidscore, lambda d: (columns(d, "mom_iq"), vector(d["kid_score"]))
    ),
    "low_dim_gauss_mix-low_dim_gauss_mix": Posterior(
        low_dim_gauss_mix, lambda d: (vector(d["y"]),), discrete=("component",)
    ),
    "mesquite-mesquite": Posterior(
        mesquite,
        lambda d: (
            columns(d, "diam1", "diam2", "canopy_height", "total_height", "density", "group"),
            vector(d["weight"]),
        ),
    ),
    "nes1980-nes": Posterior(nes, read_nes),
    "sblrc-blr": Posterior(blr, lambda d: (vector(d["X"]), vector(d["y"]))),
    "sblri-blr": Posterior(blr, lambda d: (vector(d["X"]), vector(d["y"]))),
}
