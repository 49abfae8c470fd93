"""Discrete sites summed out by ``Program`` against the same sums written by hand.

A mixture of K Normals with a component for each of N data: once with ``pyro.sample("z",
dist.Categorical(...))`` in the plate, once with ``dist.MixtureSameFamily``. A hidden Markov chain
of 20 steps and K states: once with ``pyro.markov``, once with the forward algorithm in log space.
Timed is the gradient of the log density in the unconstrained latents: in torch, the program run
statement by statement; by ``Program.compile``, as Pyro's samplers call it; under JAX's compiler, as
NUTS does; and a step of mean-field VI by ``CompiledELBO``. The ratio is enumeration to hand, in
processor time.

In torch three more sides run: the forward algorithm with one ``pyro.factor`` a step, so a program
of statements as the enumerated one is; the enumerated program with its discrete sites given, where
nothing is summed and only its statements cost; and Pyro's ``TraceEnum_ELBO`` of the same program
with a point guide.
"""

import math
import time

import harness
import jax
import jax.numpy as jnp
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta
from pyro.optim import Adam

from pyro_bdl import Program
from pyro_bdl.elbo import CompiledELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.tracing.jax.translate import to_jax

NOISE = 0.5


def priors(components, *extra):
    zeros = torch.zeros(*extra, components)
    logits = pyro.sample("logits", dist.Normal(zeros, 1.0).to_event(zeros.dim()))
    means = pyro.sample("means", dist.Normal(torch.zeros(components), 2.0).to_event(1))
    return logits, means


def mixture(components):
    def model(y):
        logits, means = priors(components)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(logits=logits))
            pyro.sample("y", dist.Normal(means[z], NOISE), obs=y)

    return model


def mixture_by_hand(components):
    def model(y):
        logits, means = priors(components)
        weights = dist.Categorical(logits=logits)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(means, NOISE)), obs=y)

    return model


def chain(states):
    def model(y):
        logits, means = priors(states, states)
        with pyro.plate("chains", y.shape[1]):
            z = torch.tensor(0)
            for t in pyro.markov(range(len(y))):
                z = pyro.sample(f"z{t}", dist.Categorical(logits=logits[z]))
                pyro.sample(f"y{t}", dist.Normal(means[z], NOISE), obs=y[t])

    return model


def chain_by_hand(states):
    def model(y):
        logits, means = priors(states, states)
        moves = logits.log_softmax(-1)
        emitted = dist.Normal(means, NOISE).log_prob(y[..., None])
        forward = moves[0] + emitted[0]
        for t in range(1, len(y)):
            forward = (forward[..., None] + moves).logsumexp(-2) + emitted[t]
        pyro.factor("y", forward.logsumexp(-1).sum())

    return model


def chain_by_factors(states):
    def model(y):
        logits, means = priors(states, states)
        moves = logits.log_softmax(-1)
        forward, before = moves[0], 0.0
        with pyro.plate("chains", y.shape[1]):
            for t in range(len(y)):
                forward = forward + dist.Normal(means, NOISE).log_prob(y[t][:, None])
                now = forward.logsumexp(-1)
                pyro.factor(f"y{t}", now - before)
                forward, before = (forward[..., None] + moves).logsumexp(-2), now

    return model


def with_states_given(states, y):
    drawn = torch.randint(states, y.shape)
    return poutine.condition(chain(states), {f"z{t}": row for t, row in enumerate(drawn)})


def gradient_of(density, vector):
    leaf = vector.clone().requires_grad_()
    density(leaf).backward()
    return leaf.grad


def in_torch(model, y, calls):
    """The gradient in torch."""
    program = Program(model, y)
    vector = 0.1 * torch.arange(program.size, dtype=y.dtype).sin()

    def plain():
        for _ in range(calls):
            gradient_of(program.log_density, vector)

    return plain


def by_pyro(model, y, calls):
    """The gradient of Pyro's TraceEnum_ELBO with a point guide."""
    pyro.clear_param_store()
    guide = AutoDelta(poutine.block(model, expose=["logits", "means"]))
    guide(y)
    elbo, model = TraceEnum_ELBO(max_plate_nesting=1), config_enumerate(model)

    def plain():
        for _ in range(calls):
            elbo.differentiable_loss(model, guide, y).backward()

    return plain


def gradients(model, y, calls):
    """The gradient in torch, as a graph and under JAX, a compiled step, and the gradient at one
    point."""
    program = Program(model, y)
    vector = 0.1 * torch.arange(program.size, dtype=y.dtype).sin()
    compiled = jax.jit(jax.grad(to_jax(program.log_density, vector)))
    point = jnp.asarray(vector.numpy())
    density = program.compile()

    def graph():
        for _ in range(calls):
            gradient_of(density, vector)

    def under_jax():
        for _ in range(calls):
            compiled(point).block_until_ready()

    svi = SVI(model, AutoMeanField(model), Adam({"lr": 1e-3}), CompiledELBO())
    for _ in range(3):
        svi.step(y)

    def compiled_steps():
        for _ in range(calls):
            svi.step(y)

    sides = in_torch(model, y, calls), graph, under_jax, compiled_steps
    return *sides, gradient_of(program.log_density, vector)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer data and rounds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 10, 50], help="K")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, repeats, calls = (2000, 3, 5) if options.quick else (10_000, 2 * options.repeats + 1, 10)
    settings = {
        f"mixture, {rows} data": (mixture, mixture_by_hand, torch.randn(rows)),
        f"chain, {rows // 100} times 20 steps": (
            chain,
            chain_by_hand,
            torch.randn(20, rows // 100),
        ),
    }
    results = {}
    for title, (enumerated, by_hand, y) in settings.items():
        for size in options.sizes:
            ours, theirs = (gradients(make(size), y, calls) for make in (enumerated, by_hand))
            torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-3, atol=1e-2)
            for place, name in enumerate(("torch", "compile", "JAX", "CompiledELBO")):
                sides = {"enumerated": ours[place], "by hand": theirs[place]}
                if name == "torch":
                    sides["Pyro"] = by_pyro(enumerated(size), y, calls)
                    if enumerated is chain:
                        sides["by factors"] = in_torch(chain_by_factors(size), y, calls)
                        sides["states given"] = in_torch(with_states_given(size, y), y, calls)
                if name == "compile":
                    sides["by hand, uncompiled"] = theirs[0]
                seconds = harness.in_turns(sides, repeats, clock=time.process_time)
                ms = {side: 1e3 * value / calls for side, value in seconds.items()}
                start = f"{title}, K = {size}, {name}"
                results |= {f"{start}, {side}, ms": value for side, value in ms.items()}
                results[f"{start}: ratio"] = ms["enumerated"] / ms["by hand"]
                for side in ("Pyro", "by factors", "states given", "by hand, uncompiled"):
                    if side in ms:
                        results[f"{start}: ratio to {side}"] = ms["enumerated"] / ms[side]
    ratios = [value for key, value in results.items() if key.endswith("ratio")]
    results["ratios, geometric mean"] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    results["ratios, largest"] = max(ratios)
    harness.show("enumeration: gradient of the log density", results, options.json)


if __name__ == "__main__":
    main()
