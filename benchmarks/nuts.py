"""NUTS on the 1-50-1 regression program with 100 data.

Log-density-and-gradient evaluations per second: Pyro's NUTS on the program, NumPyro's NUTS on
the same program translated to JAX (what ``bdl.mcmc.sample`` runs), and NumPyro's NUTS on a model
written by hand for NumPyro. The latter two are run by the same ``numpyro.infer.MCMC``, compiled
before the clock starts; wall time of the whole ``bdl.mcmc.sample`` call, translation and
compilation included, is given beside them.
"""

import time

import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as npdist
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc import MCMC, NUTS
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.tracing.jax.translate import to_jax

HIDDEN, DATA = 50, 100


def program():
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return bdl.models.Regression(
        bdl.bayesianize(net, bdl.priors.Normal(1.0)), noise=dist.HalfNormal(1.0)
    )


def by_hand(x, y):
    """The same model in NumPyro."""

    def normal(name, *shape):
        return numpyro.sample(name, npdist.Normal(0, 1).expand(shape).to_event(len(shape)))

    w1, b1 = normal("w1", HIDDEN, 1), normal("b1", HIDDEN)
    w2, b2 = normal("w2", 1, HIDDEN), normal("b2", 1)
    noise = numpyro.sample("noise", npdist.HalfNormal(1.0))
    mean = (jnp.tanh(x @ w1.T + b1) @ w2.T + b2)[:, 0]
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", npdist.Normal(mean, noise), obs=y)


def rate_of_pyro(model, x, y, draws: int, depth: int) -> float:
    """Gradient evaluations per second of Pyro's NUTS, warm-up included."""
    kernel = NUTS(model, max_tree_depth=depth)
    kernel.setup(draws, x, y)
    potential, calls = kernel.potential_fn, [0]

    def counted(parameters):
        calls[0] += 1
        return potential(parameters)

    kernel = NUTS(potential_fn=counted, max_tree_depth=depth)
    mcmc = MCMC(
        kernel,
        num_samples=draws,
        warmup_steps=draws,
        initial_params=dict(model_start(model, x, y)),
        disable_progbar=True,
    )
    start = time.perf_counter()
    mcmc.run()
    return calls[0] / (time.perf_counter() - start)


def model_start(model, x, y):
    program = bdl.Program(model, x, y)
    return program.unflatten(program.unconstrain(program.initial)).items()


class JaxRun:
    """One NUTS chain of NumPyro, warmed up and compiled; ``rate`` runs it on."""

    def __init__(self, kernel, args, init, warmup: int, draws: int) -> None:
        self.args = args
        self.mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=warmup, num_samples=draws, progress_bar=False
        )
        key = jax.random.PRNGKey(0)
        self.mcmc.warmup(key, *args, init_params=init, extra_fields=("num_steps",))
        self.rate()

    def rate(self) -> float:
        self.mcmc.post_warmup_state = self.mcmc.last_state
        start = time.perf_counter()
        self.mcmc.run(jax.random.PRNGKey(1), *self.args, extra_fields=("num_steps",))
        steps = np.asarray(self.mcmc.get_extra_fields()["num_steps"])
        return float(steps.sum() / (time.perf_counter() - start))


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--depth", type=int, default=8, help="maximal tree depth")
    parser.add_argument("--pyro-draws", type=int, default=5, help="Pyro's warm-up and draws")
    parser.set_defaults(threads=1)  # Pyro's side is slower on several
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    pyro.set_rng_seed(0)
    x = torch.linspace(-2, 2, DATA)[:, None]
    y = (2 * x).sin().squeeze(-1) + 0.1 * torch.randn(DATA)
    model = program()

    pyro_rate = rate_of_pyro(model, x, y, options.pyro_draws, options.depth)
    start = time.perf_counter()
    samples = bdl.mcmc.sample(
        model, x, y, num_warmup=options.warmup, num_samples=options.draws,
        kernel=bdl.mcmc.NUTS(max_tree_depth=options.depth), progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start

    target = bdl.Program(model, x, y)
    density = to_jax(target.log_density, torch.zeros(target.size))
    translated = JaxRun(
        numpyro.infer.NUTS(potential_fn=lambda u: -density(u), max_tree_depth=options.depth),
        (),
        jnp.asarray(target.unconstrain(target.initial).numpy()),
        options.warmup,
        options.draws,
    )
    kernel = numpyro.infer.NUTS(by_hand, max_tree_depth=options.depth)
    data = (jnp.asarray(x.numpy()), jnp.asarray(y.numpy()))
    hand = JaxRun(kernel, data, None, options.warmup, options.draws)
    pairs = [(translated.rate(), hand.rate()) for _ in range(options.repeats)]
    ours, theirs = (float(np.median(rates)) for rates in zip(*pairs, strict=True))
    results = {
        "Pyro NUTS, evaluations/s": pyro_rate,
        "NumPyro backend, evaluations/s": ours,
        "NumPyro by hand, evaluations/s": theirs,
        "ratio NumPyro backend : Pyro": ours / pyro_rate,
        "time per evaluation, backend : by hand": float(np.median([h / o for o, h in pairs])),
        f"bdl.mcmc.sample, {options.warmup} + {options.draws} draws, seconds in all": seconds,
        "evaluations in those draws": int(samples.stats["num_steps"].sum()),
    }
    harness.show("nuts: 1-50-1, 100 data, one chain", results, options.json)


if __name__ == "__main__":
    main()
