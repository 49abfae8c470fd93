"""The posteriors of ``posteriordb.py`` written by hand for NumPyro: the other side of its timings.

``MODELS`` has a model for each name, called with the same arguments as the Pyro program, as arrays
of JAX. Discrete latents are summed out by hand, as in the Stan programs.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints


def normal(scale, *shape):
    return dist.Normal(0.0, scale).expand(shape).to_event(len(shape))


def flat(support, *shape):
    return dist.ImproperUniform(support, (), shape)


def observe(name, mean, sigma, y):
    with numpyro.plate("data", len(y)):
        numpyro.sample(name, dist.Normal(mean, sigma), obs=y)


def ark(lags, y):
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = numpyro.sample("beta", normal(10.0, lags.shape[1]))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    observe("y", alpha + lags @ beta, sigma, y)


def diamonds(x, y):
    b = numpyro.sample("b", normal(1.0, x.shape[1]))
    intercept = numpyro.sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
    sigma = numpyro.sample("sigma", dist.FoldedDistribution(dist.StudentT(3.0, 0.0, 10.0)))
    observe("Y", intercept + x @ b, sigma, y)


def flat_regression(x, y):
    beta = numpyro.sample("beta", flat(constraints.real_vector, x.shape[1]))
    sigma = numpyro.sample("sigma", flat(constraints.positive))
    observe("y", x @ beta, sigma, y)


def kidscore(x, y):
    beta = numpyro.sample("beta", flat(constraints.real_vector, x.shape[1]))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    observe("kid_score", x @ beta, sigma, y)


def blr(x, y):
    beta = numpyro.sample("beta", normal(10.0, x.shape[1]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10.0))
    observe("y", x @ beta, sigma, y)


def eight_schools_centered(sigma, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(sigma, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        theta_trans = numpyro.sample("theta_trans", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta_trans * tau + mu, sigma), obs=y)


def gp_regr(x, y):
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    covariance = alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    covariance = covariance + sigma * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros_like(x), covariance), obs=y)


def low_dim_gauss_mix(y):
    mu = numpyro.sample("mu", flat(constraints.ordered_vector, 2))
    numpyro.factor("prior_mu", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = jnp.log(jnp.stack([theta, 1 - theta]))
    numpyro.factor("y", logsumexp(weights + dist.Normal(mu, sigma).log_prob(y[:, None]), -1).sum())


def hmm_example(y):
    theta1 = numpyro.sample("theta1", dist.Dirichlet(jnp.ones(2)))
    theta2 = numpyro.sample("theta2", dist.Dirichlet(jnp.ones(2)))
    mu = numpyro.sample("mu", flat(constraints.positive_ordered_vector, 2))
    numpyro.factor("prior_mu", dist.Normal(jnp.array([3.0, 10.0]), 1.0).log_prob(mu).sum())
    transition = jnp.log(jnp.stack([theta1, theta2]))
    density = dist.Normal(mu, 1.0).log_prob(y[:, None])

    def forward(gamma, at):
        return logsumexp(gamma[:, None] + transition, 0) + at, None

    gamma, _ = jax.lax.scan(forward, density[0], density[1:])
    numpyro.factor("y", logsumexp(gamma))


MODELS = {
    "arK-arK": ark,
    "diamonds-diamonds": diamonds,
    "earnings-earn_height": flat_regression,
    "eight_schools-eight_schools_centered": eight_schools_centered,
    "eight_schools-eight_schools_noncentered": eight_schools_noncentered,
    "gp_pois_regr-gp_regr": gp_regr,
    "hmm_example-hmm_example": hmm_example,
    "kidiq-kidscore_interaction": kidscore,
    "kidiq-kidscore_momiq": kidscore,
    "low_dim_gauss_mix-low_dim_gauss_mix": low_dim_gauss_mix,
    "mesquite-mesquite": flat_regression,
    "nes1980-nes": flat_regression,
    "sblrc-blr": blr,
    "sblri-blr": blr,
}
