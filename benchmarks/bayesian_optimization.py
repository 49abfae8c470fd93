"""Bayesian optimization by BoTorch with a Gaussian process and with posteriors of a network.

    python benchmarks/bayesian_optimization.py --threads 1 --rows runs.jsonl --figure regret.png

Each run starts from 2 d + 2 Sobol points and adds a point that maximizes qLogEI in each step. All
surrogates know the noise of the observations. ``nuts``, ``laplace`` (full), ``last layer`` and
``ensemble`` (anchored) are posteriors of one program, a d-30-30-1 tanh network under a fixed prior;
``gp`` is BoTorch's ``SingleTaskGP``. Data are padded to one number of rows with a noise of 1e6, so
that NUTS and the loss are compiled once in a run. ``--rows`` keeps finished runs in a file, and a
later call goes on with those that are missing.

``--spread`` runs no search: it prints the mean sd of f in the cube and at its corners, after the
first points of the first seed.

The regret of a step is the distance from the optimum of the best point so far, without noise.
"""

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling.get_sampler import get_sampler
from botorch.test_functions import Branin, Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from harness import parse_sizes, parser, read_rows, show, write_rows
from numpyro.infer.hmc import hmc
from pyro.nn import PyroModule
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bdl as bdl
from pyro_bdl.contrib.botorch import PosteriorModel
from pyro_bdl.plots import styles

DRAWS, WARMUP, DEPTH = 64, 64, 6  # of NUTS, whose chain goes on from the last step's
FAR = 1e6  # the noise of rows that are no data
MEMBERS = 10
HIDDEN = 30


class Task(NamedTuple):
    """A function on the unit cube to be maximized, and the noise of its observations."""

    inputs: int
    function: Callable[[Tensor], Tensor]
    best: float
    noise: float


def island(x: Tensor) -> Tensor:
    """A smooth function with a hill that rises with a jump."""
    smooth = 0.5 * (5.0 * x[..., 0]).sin() * (3.0 * x[..., 1]).cos()
    distance = (x - x.new_tensor([0.7, 0.8])).square().sum(-1)
    return smooth + torch.where(distance < 0.15**2, 1.5 - 20.0 * distance, 0.0)


def tasks() -> dict[str, Task]:
    branin, hartmann = Branin(negate=True), Hartmann(dim=6, negate=True)
    low, high = branin.bounds
    side = torch.linspace(0.0, 1.0, 2001)
    highest = island(torch.cartesian_prod(side, side)).max().item()
    return {
        "Branin": Task(2, lambda x: branin(low + (high - low) * x), branin.optimal_value, 1.0),
        "Hartmann-6": Task(6, hartmann, hartmann.optimal_value, 0.05),
        "jump": Task(2, island, highest, 0.1),
    }


class Network(PyroModule):
    """y ~ Normal(f(x), sd), with the inputs in [-1, 1]."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        widths = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        net = nn.Sequential(widths[0], nn.Tanh(), widths[1], nn.Tanh(), widths[2])
        self.network = bdl.bayesianize(net, bdl.priors.FanIn(2.0))

    def forward(self, x: Tensor, sd: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        f = pyro.deterministic("f", self.network(2.0 * x - 1.0).squeeze(-1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, torch.ones_like(f) if sd is None else sd), obs=y)
        return f


class Surrogate:
    """A model fitted to data (n, d), (n, 1) in each step of one run; it may go on from the last."""

    def __init__(self, task: Task, options: argparse.Namespace) -> None:
        self.task, self.options = task, options
        self.rows = 2 * task.inputs + 2 + options.steps
        self.first = True

    def fit(self, x: Tensor, y: Tensor) -> Any:
        scale = Standardize(m=1)
        standard = scale(y)[0]
        sd = (self.task.noise / scale.stdvs.squeeze()).expand(len(x))
        scale.eval()
        posterior = self.posterior(x, sd, standard.squeeze(-1))
        self.first = False
        return PosteriorModel(self.program, posterior, outcome_transform=scale)

    @functools.cached_property
    def program(self) -> Network:
        return Network(self.task.inputs)

    def posterior(self, x: Tensor, sd: Tensor, y: Tensor) -> Any:
        raise NotImplementedError

    def padded(self, x: Tensor, sd: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The data with further rows that say nothing."""
        more = self.rows - len(x)
        return (
            torch.cat([x, x.new_zeros(more, x.shape[1])]),
            torch.cat([sd, sd.new_full((more,), FAR)]),
            torch.cat([y, y.new_zeros(more)]),
        )


class Process(Surrogate):
    def fit(self, x: Tensor, y: Tensor) -> Any:
        variance = torch.full_like(y, self.task.noise**2)
        model = SingleTaskGP(x, y, variance, outcome_transform=Standardize(m=1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model


class Nuts(Surrogate):
    start: Any = None

    @functools.cached_property
    def run(self) -> Any:
        x = torch.rand(self.rows, self.task.inputs)
        program = bdl.Program(self.program, x, torch.ones(self.rows), torch.zeros(self.rows))
        self.density = density = program.to_jax()
        init, step = hmc(potential_fn_gen=lambda *data: lambda u: -density(u, *data), algo="NUTS")

        def chain(key: Any, start: Any, *data: Any) -> Any:
            state = init(
                start, num_warmup=WARMUP, rng_key=key, model_args=data, max_tree_depth=DEPTH
            )
            advance = lambda state, _: ((s := step(state, data, {})), s.z)  # noqa: E731
            return jax.lax.scan(advance, state, length=WARMUP + DRAWS)[1][WARMUP:]

        return jax.jit(chain)

    def posterior(self, x: Tensor, sd: Tensor, y: Tensor) -> Any:
        with jax.enable_x64(True):
            data, run = self.padded(x, sd, y), self.run
            start = jnp.asarray(self.density.initial) if self.start is None else self.start
            key = jax.random.PRNGKey(len(x))
            vectors = run(key, start, *(jnp.asarray(value.numpy()) for value in data))
            self.start = vectors[-1]
            return self.density.samples(np.asarray(vectors))


class Laplace(Surrogate):
    particles = 1

    @functools.cached_property
    def elbo(self) -> Any:
        return bdl.elbo.CompiledELBO(num_particles=self.particles)

    def train(self, *data: Tensor) -> None:
        """Go on from the last weights; the graph of the loss is traced once."""
        steps = self.options.first_steps if self.first else self.options.later_steps
        options: dict[str, Any] = {"steps": steps, "learning_rate": 0.02, "elbo": self.elbo}
        bdl.training.train(self.program, self.guide, *self.padded(*data), **options)

    @functools.cached_property
    def guide(self) -> Any:
        return bdl.guides.AutoLaplaceGGN(self.program, structure="full")

    def posterior(self, *data: Tensor) -> Any:
        self.train(*data)
        return self.guide.laplace_approximation(data)


class LastLayer(Laplace):
    @functools.cached_property
    def guide(self) -> Any:
        return bdl.guides.AutoLastLayer(self.program)


class Ensemble(Laplace):
    particles = MEMBERS

    @functools.cached_property
    def guide(self) -> Any:
        return bdl.guides.AutoEnsemble(self.program, size=MEMBERS, anchored=True)

    def posterior(self, *data: Tensor) -> Any:
        self.train(*data)
        members = self.guide.sample_latents(MEMBERS)
        return bdl.Samples({name: value[None] for name, value in members.items()})


SURROGATES: dict[str, type[Surrogate]] = {
    "gp": Process,
    "nuts": Nuts,
    "laplace": Laplace,
    "last layer": LastLayer,
    "ensemble": Ensemble,
}


class Start(NamedTuple):
    """The cube, the first points and their observations, and a function that makes more."""

    box: Tensor
    x: Tensor
    y: Tensor
    observed: Callable[[Tensor], Tensor]


def start(task: Task, seed: int) -> Start:
    torch.manual_seed(seed)
    noise = torch.Generator("cpu").manual_seed(seed)
    box = torch.stack([torch.zeros(task.inputs), torch.ones(task.inputs)])
    x = draw_sobol_samples(box, 2 * task.inputs + 2, 1, seed=seed).squeeze(1)

    def observed(x: Tensor) -> Tensor:
        value = task.function(x)
        return (value + task.noise * torch.randn(value.shape, generator=noise))[:, None]

    return Start(box, x, observed(x), observed)


def spread(task: Task, surrogate: Surrogate, seed: int) -> dict[str, float]:
    """The mean sd of f at 200 random points of the cube and of its corners."""
    first = start(task, seed)
    model = surrogate.fit(first.x, first.y)
    cube = torch.rand(200, task.inputs)
    with torch.no_grad():
        sds = [model.posterior(x).variance.sqrt().mean().item() for x in (cube, cube.round())]
    return {"sd in the cube": sds[0], "sd at its corners": sds[1]}


def run(task: Task, surrogate: Surrogate, seed: int, options: argparse.Namespace) -> list[float]:
    """Regrets after the first points and after each step."""
    box, x, y, observed = start(task, seed)
    regrets = [task.best - task.function(x).max().item()]
    for _ in range(options.steps):
        model = surrogate.fit(x, y)
        with torch.no_grad():
            now = model.posterior(x)
            best = now.mean.max()
        sampler = get_sampler(now, torch.Size([options.samples]), seed=seed)
        acquisition = qLogExpectedImprovement(model, best_f=best, sampler=sampler)
        new, _ = optimize_acqf(
            acquisition, box, q=1, num_restarts=4, raw_samples=32,
            options={"maxiter": options.iterations},
        )  # fmt: skip
        x, y = torch.cat([x, new]), torch.cat([y, observed(new)])
        regrets.append(task.best - task.function(x).max().item())
    return regrets


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median and the range of the last regrets, and the median CPU seconds of a step."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["surrogate"]), []).append(row)
    result = {}
    for (task, surrogate), runs in groups.items():
        last = [one["regrets"][-1] for one in runs]
        seconds = statistics.median(one["CPU seconds"] / (len(one["regrets"]) - 1) for one in runs)
        result[f"{task}, {surrogate}"] = {
            "runs": len(runs),
            "regret": statistics.median(last),
            "least": min(last),
            "most": max(last),
            "CPU seconds a step": seconds,
        }
    return result


def figure(rows: list[dict[str, Any]], path: str) -> None:
    """Regrets by step, a panel for each task: the median over the runs, and each run thin."""
    from matplotlib.figure import Figure

    panels = [name for name in tasks() if any(row["task"] == name for row in rows)]
    looks = styles(list(SURROGATES))
    drawn = Figure(figsize=(3.3 * len(panels), 2.9), layout="constrained")
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    lines = {}
    for ax, task in zip(axes, panels, strict=True):
        for surrogate, look in looks.items():
            of_both = [r for r in rows if (r["task"], r["surrogate"]) == (task, surrogate)]
            if not of_both:
                continue
            regrets = np.array([row["regrets"] for row in of_both]).clip(1e-4)
            for one in regrets:
                ax.plot(one, color=look["color"], lw=0.6, alpha=0.4)
            median = np.median(regrets, 0)
            (lines[surrogate],) = ax.plot(median, color=look["color"], lw=2.0)
        of_task = [max(row["regrets"][-1], 1e-4) for row in rows if row["task"] == task]
        ax.set(xlabel="points added")
        ax.set(yscale="log") if 20 * min(of_task) < max(of_task) else ax.set(ylim=(0, None))
        ax.set_title(task, loc="left", fontsize=11, fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("regret")
    drawn.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=5, frameon=False
    )
    drawn.savefig(path, dpi=110)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--rows", type=Path, help="a file that keeps finished runs, as JSON lines")
    args.add_argument("--figure", help="draw the regrets of all runs in the file")
    args.add_argument("--surrogates", nargs="+", default=list(SURROGATES), choices=SURROGATES)
    args.add_argument("--tasks", nargs="+", default=list(tasks()), choices=tasks())
    args.add_argument("--first-seed", type=int, default=0)
    args.add_argument("--spread", action="store_true", help="the sd of f after the first points")
    options = parse_sizes(
        args,
        {
            "seeds": (5, 1, "runs of each surrogate"),
            "steps": (30, 2, "points that are added"),
            "samples": (128, 16, "draws of f in qLogEI"),
            "first_steps": (1000, 20, "of Adam, before the first point"),
            "iterations": (30, 5, "of L-BFGS, which maximizes qLogEI"),
            "later_steps": (200, 20, "of Adam, before each other point"),
        },
    )
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    if options.spread:
        sds = {
            f"{name}, {surrogate}": spread(
                tasks()[name], SURROGATES[surrogate](tasks()[name], options), options.first_seed
            )
            for name in options.tasks
            for surrogate in options.surrogates
        }
        show("sd of f after the first points", sds, options.json)
        return
    rows = [r for r in read_rows(options.rows) if len(r["regrets"]) == options.steps + 1]
    done = {(row["task"], row["surrogate"], row["seed"]) for row in rows}
    plan = [
        (task, surrogate, seed)
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for task in options.tasks
        for surrogate in options.surrogates
        if (task, surrogate, seed) not in done
    ]
    for task, surrogate, seed in tqdm(plan, disable=options.json):
        started = time.process_time()
        torch.manual_seed(seed)
        regrets = run(tasks()[task], SURROGATES[surrogate](tasks()[task], options), seed, options)
        seconds = time.process_time() - started
        row = {"task": task, "surrogate": surrogate, "seed": seed, "regrets": regrets}
        rows.append(row | {"CPU seconds": seconds})
        write_rows(options.rows, rows[-1:])
    results = summary(rows)
    show("Bayesian optimization", results, options.json)
    if options.figure:
        figure(rows, options.figure)


if __name__ == "__main__":
    main()
