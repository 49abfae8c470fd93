"""How often the verdicts of ``compare`` are right, where the posterior is known.

    python benchmarks/verdicts.py                   # conjugate regression, minutes
    python benchmarks/verdicts.py --network         # also a small network, whose truth is long NUTS
    python benchmarks/verdicts.py --quick           # 20 repetitions

Six posteriors of 1000 draws are compared with a reference of exact draws: exact ones, the sd of
the function times 0.7, 0.85 and 1.2, its mean off by 0.3 and 0.6 sd. Each repetition draws all of
them anew. The references: independent draws of four chains (4 x 500, 4 x 100, 4 x 25, 4 x 2, 4 x
1), and four chains of 500 draws with an autocorrelation of 0.9 (about 105 effective draws). The
table shows how often each posterior is called alike, undecided, usable and far, and how often the
reference is said not to have converged, or doubted for any reason. "False" is how often a fault is
found in the exact draws, and "worse" how often one of three sets of exact draws, the reference's
and two of 1000, is said to predict worse than another without a reference. A share p of n
repetitions has a standard error of sqrt(p (1 - p) / n), at most 3.5 % of 200.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from harness import machine, parser
from torch import Tensor, nn

import pyro_bdl as bdl
from pyro_bdl.comparison import distances

# Name to the factor of the sd, and the shift of the mean in sds.
POSTERIORS = {
    "exact": (1.0, 0.0),
    "sd x 0.7": (0.7, 0.0),
    "sd x 0.85": (0.85, 0.0),
    "sd x 1.2": (1.2, 0.0),
    "mean + 0.3 sd": (1.0, 0.3),
    "mean + 0.6 sd": (1.0, 0.6),
}
# Name to the draws of each of four chains, and their autocorrelation.
REFERENCES = {
    "4 x 500": (500, 0.0),
    "4 x 100": (100, 0.0),
    "4 x 25": (25, 0.0),
    "4 x 2": (2, 0.0),
    "4 x 1": (1, 0.0),
    "4 x 500, rho 0.9": (500, 0.9),
}
GROUPS = ("alike", "undecided", "usable", "far")
DRAWS, CHAINS = 1000, 4

Truth = Callable[[int, float], tuple[dict[str, Tensor], Tensor]]


def regression(x: Tensor, y: Tensor | None = None) -> None:
    """f = x w, w ~ Normal(0, I); y ~ Normal(f, 0.5)."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]).to(x), 1.0).to_event(1))
    f = pyro.deterministic("f", x @ w)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def conjugate() -> tuple[Callable, Tensor, Tensor, Truth]:
    """The program, test data, and exact draws of ``regression`` on 20 data with three inputs."""
    torch.manual_seed(0)
    x, x_test = torch.randn(20, 3).double(), torch.randn(8, 3).double()
    weights = torch.tensor([1.0, -0.5, 0.3]).double()
    y, y_test = (part @ weights + 0.5 * torch.randn(len(part)) for part in (x, x_test))
    precision = torch.eye(3).double() + x.mT @ x / 0.25
    mean = torch.linalg.solve(precision, x.mT @ y / 0.25)
    root = torch.linalg.cholesky(torch.linalg.inv(precision))

    def draw(count: int, rho: float) -> tuple[dict[str, Tensor], Tensor]:
        steps = torch.randn(CHAINS, count, 3).double()
        for t in range(1, count if rho else 0):
            steps[:, t] = rho * steps[:, t - 1] + (1 - rho**2) ** 0.5 * steps[:, t]
        w = mean + steps @ root.mT
        return {"w": w}, (w @ x_test.mT).flatten(0, 1)

    return regression, x_test, y_test, draw


def network(draws: int) -> tuple[Callable, Tensor, Tensor, Truth]:
    """A network 1-8-1, test data, and draws from the pool of four long chains of NUTS.

    Correlated chains stay at a draw with probability rho, which gives rho^t at lag t.
    """
    torch.manual_seed(0)
    x, x_test = torch.rand(30, 1) * 4 - 2, torch.linspace(-2.5, 2.5, 8)[:, None]
    y, y_test = ((2 * part).sin().squeeze(1) + 0.2 * torch.randn(len(part)) for part in (x, x_test))
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model = bdl.models.Regression(bdl.bayesianize(net, bdl.priors.FanIn(1.5)), noise=0.2)
    pool = bdl.mcmc.sample(
        model, x, y, num_warmup=draws // 5, num_samples=draws, num_chains=CHAINS, progress=False
    )
    f = bdl.Predictive(model, pool).mean(x_test, None)["y"]
    print("pool:", f"R-hat {bdl.diagnostics.rhat(f.unflatten(0, (CHAINS, -1))).max():.4f}")
    latents = pool.flat()

    def draw(count: int, rho: float) -> tuple[dict[str, Tensor], Tensor]:
        places = torch.randint(len(f), (CHAINS, count))
        moves = torch.rand(CHAINS, count) >= rho
        moves[:, 0] = True
        last = torch.where(moves, torch.arange(count), 0).cummax(1).values
        places = places.gather(1, last)
        return {name: value[places] for name, value in latents.items()}, f[places.flatten()]

    return model, x_test, y_test, draw


def repeat(truth: tuple[Callable, Tensor, Tensor, Truth], reference: str, count: int) -> Any:
    """The rates of one reference over some repetitions."""
    model, x, y, draw = truth
    size, rho = REFERENCES[reference]
    groups: dict[str, Counter] = {name: Counter() for name in POSTERIORS}
    said = Counter({"not converged": 0, "doubtful": 0, "false": 0, "worse": 0})
    mean, sd = (lambda f: (f.mean(0), f.std(0)))(draw(10000, 0.0)[1])
    for seed in range(count):
        torch.manual_seed(seed)
        posteriors: dict[str, Any] = {}
        for name, (factor, shift) in POSTERIORS.items():
            f = draw(DRAWS // CHAINS, 0.0)[1]
            posteriors[name] = bdl.PredictiveDraws(mean + factor * (f - mean) + shift * sd)
        posteriors["nuts"] = bdl.Samples(draw(size, rho)[0])
        found = bdl.compare(model, posteriors, x, y, progress=False)
        for name, counter in groups.items():
            counter[found.judgments[name].group] += 1
        said["not converged"] += "not converged" in found.summary + found.verdicts["nuts"]
        said["doubtful"] += bool(found.warnings)
        said["false"] += any(finding.fault for finding in found.judgments["exact"].findings)
        equal = {name: bdl.Samples(draw(DRAWS // CHAINS, 0.0)[0]) for name in ("a", "b")}
        equal["nuts"] = posteriors["nuts"]
        alone = bdl.compare(model, equal, x, y, reference=None, progress=False)
        said["worse"] += any(judgment.group == "worse" for judgment in alone.judgments.values())
    return {
        "groups": {n: {g: c[g] / count for g in GROUPS} for n, c in groups.items()},
        "reference": {key: number / count for key, number in said.items()},
    }


def to_text(title: str, rates: dict[str, Any]) -> str:
    """The rates in percent as a table in Markdown."""
    names = list(POSTERIORS)
    head = f"| {title}: alike / undecided / usable / far, % | {' | '.join(names)} |"
    shown = next(iter(rates.values()))["reference"]
    lines = [f"{head} {' | '.join(shown)} |", "|---" * (len(names) + len(shown) + 1) + "|"]
    for reference, found in rates.items():
        cells = [
            " / ".join(f"{100 * found['groups'][name][group]:.0f}" for group in GROUPS)
            for name in names
        ]
        cells += [f"{100 * value:.0f}" for value in found["reference"].values()]
        lines.append(f"| {reference} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--repetitions", type=int, default=200)
    options.add_argument("--references", nargs="+", default=list(REFERENCES))
    options.add_argument("--network", action="store_true", help="also the network")
    options.add_argument("--nuts", type=int, default=10000, help="draws of each of its chains")
    options.add_argument("--quick", action="store_true", help="20 repetitions")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    # The energy distance and MMD, of all pairs of draws, are read by no verdict.
    kept = (m for m in distances.ALL_DISTANCES if m.of not in ("few draws", "scaled"))
    distances.ALL_DISTANCES = tuple(kept)
    count = 20 if given.quick else given.repetitions
    truths: dict[str, Any] = {"conjugate": conjugate}
    if given.network:
        truths["network"] = lambda: network(1000 if given.quick else given.nuts)
    results: dict[str, Any] = {}
    started = time.perf_counter()
    for title, make in truths.items():
        truth = make()
        results[title] = {name: repeat(truth, name, count) for name in given.references}
        if not given.json:
            print(f"{to_text(title, results[title])}\n", flush=True)
    seconds = time.perf_counter() - started
    if given.json:
        print(json.dumps({"machine": machine(), "seconds": seconds} | results))
    else:
        print(f"{count} repetitions in {seconds:.0f} s; {machine()}")


if __name__ == "__main__":
    main()
