"""Milliseconds a training step of a guide: Pyro, plain, compiled, in JAX, by hand in torch and JAX.

All sides take steps of Adam on minibatches of 128 rows, drawn anew in each. Sides by hand and
NumPyro's take the same step on the same network, with its weights in two flat vectors (location
and scale). A step is the slope between two lengths of a run, in JAX ten times as long as elsewhere,
since each run traces the program; "first" is the seconds of a run of so
many steps with tracing and compilation, of our JAX side, in a process that has not compiled it.
"""

import math
import time

import compiled as shapes
import harness
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as ndist
import numpyro.infer
import pyro
import torch
from pyro.infer import autoguide
from torch import nn

import pyro_bdl as bdl

ROWS, BATCH, MEMBERS = 1024, 128, 5
_IN_JAX = ("JAX", "JAX by hand", "NumPyro")
GUIDES = {
    "mean-field": bdl.guides.AutoMeanField,
    "MAP": bdl.guides.AutoMAP,
    "low-rank": lambda model: bdl.guides.AutoLowRank(model, rank=5),
    "matrix normal": bdl.guides.AutoMatrixNormal,
    "dropout": lambda model: bdl.guides.AutoMCDropout(model, p=0.1),
    "ensemble": lambda model: bdl.guides.AutoEnsemble(model, size=MEMBERS),
}
PYROS = {
    "mean-field": autoguide.AutoNormal,
    "MAP": autoguide.AutoDelta,
    "low-rank": lambda model: autoguide.AutoLowRankMultivariateNormal(model, rank=5),
}


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def problem(name):
    """The network, whether it is regression, inputs and targets."""
    torch.manual_seed(0)
    if name == "8-50-50-1":
        x = torch.randn(ROWS, 8)
        return shapes.mlp(8, 50, 50, 1), True, x, x[:, 0].sin()
    images, labels = torch.rand(ROWS, 784), torch.randint(10, (ROWS,))
    if name == "LeNet":
        return lenet(), False, images.view(-1, 1, 28, 28), labels
    return shapes.mlp(784, 100, 100, 10, activation=nn.ReLU), False, images, labels


def program(net, regression):
    kind = bdl.models.Regression if regression else bdl.models.Classification
    options = {"noise": pyro.distributions.LogNormal(0.0, 1.0)} if regression else {}
    return kind(bdl.bayesianize(net, bdl.priors.Normal(1.0)), num_data=ROWS, **options)


def ours(guide, backend, compile_elbo, case):
    """A run of so many steps; program and guide are new each time."""

    def run(steps):
        net, regression, x, y = case
        model = program(net, regression)
        particles = MEMBERS if guide == "ensemble" else 1
        kind = bdl.elbo.CompiledELBO if compile_elbo else bdl.elbo.TemperedTraceMeanField_ELBO
        bdl.training.train(
            model, GUIDES[guide](model), x, y, steps=steps, batch_size=BATCH, backend=backend,
            elbo=kind(num_particles=particles),
        )  # fmt: skip

    return run


def pyros(guide, case):
    def run(steps):
        pyro.clear_param_store()
        net, regression, x, y = case
        model = program(net, regression)
        svi = pyro.infer.SVI(
            model, PYROS[guide](model), pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO()
        )
        for _ in range(steps):
            rows = torch.randperm(ROWS)[:BATCH]
            svi.step(x[rows], y[rows])

    return run


def torch_by_hand(guide, case):
    """Mean-field or MAP on flat vectors with fused Adam."""

    def run(steps):
        net, regression, x, y = case
        vectors = shapes.ByHand(net, regression)
        if guide == "MAP":
            vectors.free = torch.full_like(vectors.loc, -math.inf)
        tensors = [v for v in (vectors.loc, vectors.free) if v.requires_grad]
        adam = torch.optim.Adam(tensors, lr=0.01, fused=True)
        for _ in range(steps):
            rows = torch.randint(ROWS, (BATCH,))
            adam.zero_grad()
            loss = map_loss(vectors, x[rows], y[rows]) if guide == "MAP" else None
            loss = vectors.loss(x[rows], y[rows]) if loss is None else loss
            loss.backward()
            adam.step()

    return run


def map_loss(vectors, x, y):
    parts = vectors.loc.split(vectors.sizes + ([1] if vectors.regression else []))
    weights = [part.view(shape) for part, shape in zip(parts, vectors.shapes, strict=False)]
    output = shapes.forward_by_hand(vectors.net, weights, x)
    penalty = 0.5 * vectors.loc.square().sum()
    if not vectors.regression:
        return penalty + nn.functional.cross_entropy(output, y, reduction="sum")
    error = (y - output.squeeze(-1)) / parts[-1].exp()
    return penalty + (0.5 * error.square().sum() + len(y) * parts[-1]).squeeze()


def jax_network(net):
    """The network as a function of a flat vector of weights and inputs, in JAX."""
    sizes = [p.shape for p in net.parameters()]
    ends = np.cumsum([shape.numel() for shape in sizes])

    def apply(vector, x):
        left = iter(
            [vector[end - s.numel() : end].reshape(s) for end, s in zip(ends, sizes, strict=True)]
        )
        for layer in net:
            match layer:
                case nn.Linear():
                    weight = next(left)
                    x = x @ weight.T + next(left)
                case nn.Conv2d():
                    weight, pad = next(left), layer.padding[0]
                    x = jax.lax.conv_general_dilated(x, weight, (1, 1), [(pad, pad)] * 2)
                    x = x + next(left)[:, None, None]
                case nn.MaxPool2d():
                    window = (1, 1, 2, 2)
                    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
                case nn.Flatten():
                    x = x.reshape(len(x), -1)
                case nn.Tanh():
                    x = jnp.tanh(x)
                case nn.ReLU():
                    x = jax.nn.relu(x)
        return x

    return apply, int(ends[-1])


def jax_by_hand(guide, case):
    """Mean-field or MAP in one ``lax.scan`` over steps, with Adam written out."""
    net, regression, x, y = case
    apply, size = jax_network(net)
    size += regression
    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def loss(parameters, key, x, y):
        loc, kl = parameters["loc"], 0.0
        if guide == "mean-field":
            scale = jax.nn.softplus(parameters["free"])
            kl = 0.5 * (scale**2 + loc**2 - 1).sum() - jnp.log(scale).sum()
            loc = loc + scale * jax.random.normal(key, loc.shape)
        else:
            kl = 0.5 * (loc**2).sum()
        output = apply(loc, x)
        if not regression:
            return kl - jnp.take_along_axis(jax.nn.log_softmax(output), y[:, None], 1).sum()
        error = (y - output[:, 0]) / jnp.exp(loc[-1])
        return kl + 0.5 * (error**2).sum() + len(y) * loc[-1]

    @jax.jit
    def train(parameters, key, steps):
        def step(t, carry):
            p, m, v, key = carry
            key, noise, pick = jax.random.split(key, 3)
            rows = jax.random.randint(pick, (BATCH,), 0, ROWS)
            g = jax.grad(loss)(p, noise, x[rows], y[rows])
            m = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
            v = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b * b, v, g)
            c1, c2 = 1 - 0.9 ** (t + 1.0), 1 - 0.999 ** (t + 1.0)
            p = jax.tree.map(
                lambda w, a, b: w - 0.01 * (a / c1) / (jnp.sqrt(b / c2) + 1e-8), p, m, v
            )
            return p, m, v, key

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return jax.lax.fori_loop(0, steps, step, (parameters, zeros, zeros, key))

    def run(steps):
        parameters = {"loc": jnp.full(size, 0.01)}
        if guide == "mean-field":
            parameters["free"] = jnp.full(size, -3.0)
        key = jax.random.key(0, impl="threefry2x32")
        jax.block_until_ready(train(parameters, key, steps))

    return run


def numpyros(case):
    """NumPyro's SVI with AutoNormal on the same model written by hand."""
    net, regression, x, y = case
    apply, size = jax_network(net)
    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def model(x, y):
        w = numpyro.sample("w", ndist.Normal(jnp.zeros(size), 1.0).to_event(1))
        noise = numpyro.sample("noise", ndist.LogNormal(0.0, 1.0)) if regression else None
        with numpyro.plate("data", ROWS, subsample_size=BATCH):
            rows_x, rows_y = numpyro.subsample(x, event_dim=x.ndim - 1), numpyro.subsample(y, 0)
            output = apply(w, rows_x)
            if regression:
                numpyro.sample("y", ndist.Normal(output[:, 0], noise), obs=rows_y)
            else:
                numpyro.sample("y", ndist.Categorical(logits=output), obs=rows_y)

    guide = numpyro.infer.autoguide.AutoNormal(model)
    svi = numpyro.infer.SVI(
        model, guide, numpyro.optim.Adam(0.01), numpyro.infer.TraceMeanField_ELBO()
    )

    def run(steps):
        jax.block_until_ready(svi.run(jax.random.key(0), steps, x, y, progress_bar=False).params)

    return run


def slope(run, short, long, compiles):
    """Seconds of processor time a step, between runs of two lengths, which are compiled before."""
    times = []
    for steps in (short, long, short, long) if compiles else (short, short, long):
        start = time.process_time()
        run(steps)
        times.append(time.process_time() - start)
    return (times[-1] - times[-2]) / (long - short)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["8-50-50-1", "784-100-100-10", "LeNet"])
    parser.add_argument("--guides", nargs="+", default=list(GUIDES))
    parser.add_argument("--steps", type=int, default=3000, help="of the sides in JAX")
    parser.add_argument("--torch-steps", type=int, default=300, help="of the other sides")
    parser.set_defaults(threads=1, repeats=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.cases:
        case = problem(name)
        long = max(2, options.torch_steps)  # many: each run of "compiled" traces anew, in a second
        short = max(1, long // 3)
        for guide in options.guides:
            in_jax = ours(guide, "jax", False, case)
            start = time.process_time()
            in_jax(options.steps)
            first = time.process_time() - start
            sides = {
                "plain": (ours(guide, "torch", False, case), short, long),
                "compiled": (ours(guide, "torch", True, case), short, long),
                "JAX": (in_jax, options.steps, 10 * options.steps),
            }
            if guide in PYROS:
                sides["Pyro"] = pyros(guide, case), max(1, short // 3), max(2, long // 3)
            if guide in ("mean-field", "MAP"):
                sides["torch by hand"] = torch_by_hand(guide, case), short, long
                by_hand = jax_by_hand(guide, case)
                by_hand(2)
                sides["JAX by hand"] = by_hand, options.steps, 10 * options.steps
            if guide == "mean-field":
                sides["NumPyro"] = numpyros(case), options.steps, 10 * options.steps
            rounds = [
                {side: slope(*work, side in _IN_JAX) for side, work in sides.items()}
                for _ in range(options.repeats)
            ]
            times = {s: float(np.median([r[s] for r in rounds])) * 1e3 for s in sides}
            where = f"{name}, {guide}"
            results[f"{where}: JAX, first {options.steps} steps, s"] = first
            results |= {f"{where}: {side}, ms/step": value for side, value in times.items()}
            for side, value in times.items():
                if side != "JAX":
                    results[f"{where}: ratio {side} to JAX"] = value / times["JAX"]
    harness.show("training: processor time of a step, batch 128", results, options.json)


if __name__ == "__main__":
    main()
