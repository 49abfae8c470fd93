"""The evidence of small networks: tempered sequential Monte Carlo beside Laplace approximations.

    python benchmarks/tempered_evidence.py --quick
    python benchmarks/tempered_evidence.py --rows rows.jsonl

Networks 1-H-1 of tanh units with prior N(0, sd^2) on all numbers and a known noise, on --data rows
of a sine. ``bdl.mcmc.tempered_smc`` gives log p(y) with its error over runs. The Laplace
approximation (full Hessian or Gauss-Newton matrix) is that of the best of --starts modes, and the
same plus log(2^H H!), which counts the mode's copies by sign changes and permutations of the units.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import harness
import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_bdl as bdl

NOISE = 0.2


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, rows, dtype=torch.float64)[:, None]
    noise = NOISE * torch.randn(rows, generator=generator, dtype=torch.float64)
    return x, (2 * x).sin().squeeze(-1) + noise


def program(width: int, sd: float) -> Any:
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return bdl.models.Regression(bdl.bayesianize(net, bdl.priors.Normal(sd)), noise=NOISE)


def laplace(model: Any, x: Tensor, y: Tensor, seed: int, steps: int) -> dict[str, float]:
    """The log evidence around one mode, by both matrices; -inf where that is no maximum."""
    pyro.set_rng_seed(seed)
    target = bdl.Program(model, x, y)
    mode = target.unconstrain(target.initial).detach().requires_grad_()
    solver = torch.optim.LBFGS(
        [mode], max_iter=steps, history_size=50, line_search_fn="strong_wolfe",
        tolerance_grad=1e-9, tolerance_change=1e-14,
    )  # fmt: skip

    def loss() -> Tensor:
        solver.zero_grad()
        value = -target.log_density(mode)
        value.backward()
        return value

    solver.step(loss)
    mode = mode.detach()
    hessian = torch.autograd.functional.hessian(lambda u: -target.log_density(u), mode)
    values = torch.linalg.eigvalsh(hessian)
    value = float(target.log_density(mode)) + 0.5 * len(mode) * math.log(2 * math.pi)
    positive = bool((values > 0).all())
    start = init_to_value(values=target.constrain(mode)[0])
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full", init_loc_fn=start)
    posterior = guide.laplace_approximation((x, y))
    return {
        "Hessian": value - 0.5 * float(values.log().sum()) if positive else -math.inf,
        "Gauss-Newton": float(bdl.evidence.log_marginal_likelihood(posterior).detach()),
    }


def run(width: int, sd: float, options: argparse.Namespace) -> dict[str, Any]:
    x, y = data(options.data)
    model = program(width, sd)
    start = time.process_time()
    samples = bdl.mcmc.tempered_smc(
        model, x, y, num_samples=options.particles, num_chains=options.runs, moves=options.moves,
        progress=False,
    )  # fmt: skip
    row = {
        "width": width,
        "sd": sd,
        "SMC": samples.info["log_evidence"],
        "error": samples.info["log_evidence_error"],
        "seconds": time.process_time() - start,
    }
    start = time.process_time()
    each = [laplace(model, x, y, seed, options.steps) for seed in range(options.starts)]
    row |= {name: max(one[name] for one in each) for name in each[0]}
    row["copies"] = width * math.log(2) + math.lgamma(width + 1)
    row["seconds of Laplace"] = (time.process_time() - start) / options.starts
    return row


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--sds", type=float, nargs="+")
    sizes = {
        "data": (40, 10, "rows"),
        "particles": (200, 50, "of each run"),
        "runs": (8, 2, "of the particles"),
        "moves": (3, 2, "iterations at each temperature"),
        "starts": (10, 1, "of the Laplace approximation"),
        "steps": (2000, 20, "of the optimization, at most"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    done = harness.read_rows(options.rows)
    known = {(row["width"], row["sd"]) for row in done}
    for width in options.widths or ([2] if options.quick else [1, 2, 4, 8]):
        for sd in options.sds or ([1.0] if options.quick else [1.0, 2.0]):
            if (width, sd) not in known:
                row = run(width, sd, options)
                harness.write_rows(options.rows, [row])
                done.append(row)
                if not options.json:
                    print(json.dumps(row), flush=True)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "rows": done}))
        return
    print(harness.machine())
    for row in done:
        laplaces = ", ".join(
            f"{name} {row[name]:.2f} ({row[name] + row['copies']:.2f} of all copies)"
            for name in ("Hessian", "Gauss-Newton")
        )
        print(
            f"width {row['width']}, prior sd {row['sd']}: SMC {row['SMC']:.2f} ± {row['error']:.2f}"
            f" in {row['seconds']:.0f} s, {laplaces} in {row['seconds of Laplace']:.1f} s"
        )


if __name__ == "__main__":
    main()
