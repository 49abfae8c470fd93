"""Laplace approximations on all of MNIST and Fashion-MNIST, as published and beside laplace-torch.

    python benchmarks/published_laplace.py --data DATA --quick
    python benchmarks/published_laplace.py --data DATA --rows rows.jsonl --peer FOLDER

The protocol is that of the tables of "Variational linearized Laplace approximation" (Ortega et al.
2024, github Ludvins/Variational-LLA): a network 784-200-200-10 with tanh, dropout of 0.1 in
training, Adam, weight decay 1e-3, 20 000 steps of 100 rows; the prior's precision by the evidence;
test images of the other set are out of distribution, told by the predictive entropy. Both packages
get the same trained network, one thread and the probit of each class, and take turns in one
process; ``--peer`` is a folder where laplace-torch is installed (``pip install --no-deps --target
FOLDER laplace-torch`` and what it imports). Seconds are processor time of fit, evidence and
prediction of all test images of both sets.

Below stand posteriors of other kinds on the same networks: ensembles, Laplace around each of five
members, a width by 5000 held-out rows (the network is then trained on the other 55 000), SWAG, and
Laplace around the mean of SWAG's weights, which are collected once. With ``--rows FILE`` every row
is kept, and a run that was stopped goes on with those that are missing.
"""

import argparse
import copy
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from images import OTHER, Images, Part, predicted, scores_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trained_network import peer_laplace

import pyro_bdl as bdl
from pyro_bdl import priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.training import collect_swag

SCORES = ("NLL", "ECE", "OOD-AUROC")
PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {
    "mnist": {
        "MAP": (0.0759, 0.008, 0.905),
        "last layer, full": (0.0814, 0.015, 0.909),
        "last layer, kron": (0.0811, 0.015, 0.909),
        "all weights, kron": (0.0945, 0.029, 0.949),
        "all weights, diagonal": (0.1430, 0.072, 0.922),
        "ELLA": (0.0760, 0.008, 0.905),
        "VaLLA": (0.0748, 0.012, 0.929),
    },
    "fashion_mnist": {
        "MAP": (0.3733, 0.008, 0.874),
        "last layer, full": (0.3729, 0.008, 0.882),
        "last layer, kron": (0.3728, 0.008, 0.880),
        "all weights, kron": (0.3767, 0.014, 0.932),
        "all weights, diagonal": (0.3973, 0.043, 0.914),
        "ELLA": (0.3732, 0.008, 0.874),
        "VaLLA": (0.3485, 0.012, 0.949),
    },
}
STRUCTURES = {
    "last layer, full": ("full", "last-layer"),
    "last layer, kron": ("kron", "last-layer"),
    "all weights, kron": ("kron", None),
    "all weights, diagonal": ("diag", None),
}
THEIR_SUBSETS = {"last-layer": "last_layer", None: "all"}

Probabilities = Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """A method of one side, and the function that fits it and returns class probabilities."""

    method: str
    side: str
    fit: Callable[[], Probabilities]


def unscaled(data: Images) -> Images:
    """The same with pixels from 0 to 1, as published."""
    for name in ("train", "test"):
        part = getattr(data, name)
        setattr(data, name, Part(part.x * data.sd + data.mean, part.y))
    data.elsewhere = data.elsewhere * data.sd + data.mean
    return data


def untrained(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, width), nn.Tanh(), nn.Dropout(0.1)),
        *(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)),
        nn.Linear(width, 10),
    )


def trained(seed: int, data: Part, options: argparse.Namespace) -> nn.Module:
    """The published network, trained by plain torch."""
    torch.manual_seed(seed)
    network = untrained(options.width)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, weight_decay=options.decay)
    for _ in range(options.steps):
        rows = torch.randint(len(data.x), (options.batch,))
        loss = nn.functional.cross_entropy(network(data.x[rows]), data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def program(network: nn.Module, size: int, prior: Any) -> Any:
    return bdl.models.Classification(bdl.bayesianize(network, prior), num_data=size)


def softmax(network: nn.Module) -> Probabilities:
    return torch.no_grad()(lambda x: network(x).softmax(-1))


def loader(data: Part) -> DataLoader:
    return DataLoader(TensorDataset(*data), batch_size=1000)


def ours(network: nn.Module, data: Part, structure: str, subset: Any) -> Probabilities:
    """The evidence's prior and the probit of each class, as in laplace-torch."""
    prior = priors.learnable(priors.Normal(1.0))
    model = program(network, len(data.x), prior)
    guide = bdl.guides.AutoLaplaceGGN(model, structure=structure, subset=subset)
    posterior = guide.laplace_approximation(loader(data))
    bdl.evidence.maximize(posterior, linearized=False, progress=False)
    predictive = bdl.LinearizedPredictive(model, posterior)
    return lambda x: predictive.probabilities(x, method="probit")["y"]


def theirs(network: nn.Module, data: Part, structure: str, subset: Any) -> Probabilities:
    package = peer_laplace()
    posterior = package.Laplace(
        network, "classification",
        subset_of_weights=THEIR_SUBSETS[subset], hessian_structure=structure,
    )  # fmt: skip
    posterior.fit(loader(data))
    posterior.optimize_prior_precision(method="marglik")
    return lambda x: posterior(x, pred_type="glm", link_approx="probit").detach()


def ella(network: nn.Module, data: Part, options: argparse.Namespace) -> Probabilities:
    posterior = peer_laplace().ELLA(
        network, "classification",
        subsample_size=options.features, n_eigenvalues=options.features // 2,
        prior_precision=options.decay * len(data.x),
    )  # fmt: skip
    posterior.fit(DataLoader(TensorDataset(*data), batch_size=100))
    return lambda x: posterior(x, link_approx="probit").detach()


def valla(network: nn.Module, data: Part, options: argparse.Namespace) -> Probabilities:
    posterior = peer_laplace().VaLLA(
        network, "classification", "kmeans", num_inducing=options.inducing,
        prior_precision=options.decay * len(data.x),
    )  # fmt: skip
    batches = DataLoader(TensorDataset(*data), batch_size=100, shuffle=True)
    posterior.fit(batches, iterations=options.valla_steps)
    return lambda x: posterior(x, link_approx="probit").detach()


def around(network: nn.Module, data: Part, held_out: Part, options: Any) -> tuple[Any, Any]:
    """Our default: Kronecker factors whose width the held-out rows choose."""
    prior = priors.Normal.from_weight_decay(options.decay, len(data.x))
    model = program(network, len(data.x), prior)
    guide = bdl.guides.AutoLaplaceGGN(model)
    return model, guide.laplace_approximation(loader(data), held_out=tuple(held_out))


class Averaged:
    """SGD with a constant learning rate from a network, run when it is first asked for."""

    def __init__(self, network: nn.Module, data: Part, options: argparse.Namespace) -> None:
        self._network, self._data, self._options = network, data, options

    @functools.cached_property
    def _fit(self) -> tuple[Any, Any]:
        data, options = self._data, self._options
        prior = priors.Normal.from_weight_decay(options.decay, len(data.x))
        model = program(self._network, len(data.x), prior)
        guide = bdl.guides.AutoSWAG(model).prototype(data.x[:2], data.y[:2])
        collect_swag(
            model, guide, *data, snapshots=20, learning_rate=0.05, batch_size=options.batch,
            progress=False,
        )  # fmt: skip
        return model, guide.swag_approximation()

    def swag(self) -> Probabilities:
        model, posterior = self._fit
        predictive = bdl.Predictive(model, posterior, num_samples=self._options.draws)
        return lambda x: predictive.mean(x)["y"].mean(0)

    def mean(self) -> nn.Module:
        """The network at the mean of the weights (Izmailov et al. 2018)."""
        network, weights = copy.deepcopy(self._network), self._fit[1].median()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(weights[name])
        return network


def averaged(members: list[Probabilities]) -> Probabilities:
    return lambda x: torch.stack([member(x) for member in members]).mean(0)


def rows(networks: dict[str, Any], seed: int, data: Images, options: Any) -> Iterator[Row]:
    """All rows of one seed; ensembles stand under the first seed."""
    network, held, train = networks["all"][seed], networks["held-out"][seed], data.train
    few, others = Part(*(part[: -options.held_out] for part in train)), options.seeds
    apart = Part(*(part[-options.held_out :] for part in train))
    yield Row("MAP", "ours", lambda: softmax(network))
    for method, kind in STRUCTURES.items():
        yield Row(method, "ours", lambda kind=kind: ours(network, train, *kind))
        if options.peer:
            yield Row(method, "laplace-torch", lambda kind=kind: theirs(network, train, *kind))
    if options.peer:
        yield Row("ELLA", "laplace-torch", lambda: ella(network, train, options))
        yield Row("VaLLA", "laplace-torch", lambda: valla(network, train, options))
    yield Row("MAP of 55 000", "ours", lambda: softmax(held))

    def default() -> Probabilities:
        model, posterior = around(held, few, apart, options)
        predictive = bdl.LinearizedPredictive(model, posterior)
        return lambda x: predictive.probabilities(x)["y"]

    yield Row("kron, held-out width", "ours", default)
    average = Averaged(network, train, options)
    yield Row("SWAG", "ours", average.swag)
    yield Row("SWAG's mean", "ours", lambda: softmax(average.mean()))
    for method in ("all weights, kron", "all weights, diagonal"):
        yield Row(
            f"SWAG's mean, {method}",
            "ours",
            lambda kind=STRUCTURES[method]: ours(average.mean(), train, *kind),
        )
    if seed:
        return

    def each() -> Probabilities:
        members = []
        for number in range(others):
            model, posterior = around(networks["held-out"][number], few, apart, options)
            members.append(bdl.LinearizedPredictive(model, posterior))
        return averaged([lambda x, of=of: of.probabilities(x)["y"] for of in members])

    name = f"ensemble of {others}"
    yield Row(name, "ours", lambda: averaged([softmax(networks["all"][k]) for k in range(others)]))
    yield Row(f"{name}, Laplace around each", "ours", each)


def measured(row: Row, data: Images) -> dict[str, Any]:
    start = time.process_time()
    probabilities = row.fit()
    middle = time.process_time()
    known, new = predicted(probabilities, data)
    scores = scores_of(known, new, data.test.y)
    end = time.process_time()
    return {
        "method": row.method, "side": row.side, **scores,
        "fit": middle - start, "predict": end - middle,
    }  # fmt: skip


class Networks:
    """Networks by seed, trained when they are first asked for.

    :param files: how the names of the files begin that keep the networks of a long run.
    """

    def __init__(self, data: Part, options: argparse.Namespace, files: Path | None) -> None:
        self._data, self._options, self._files = data, options, files
        self._kept: dict[int, nn.Module] = {}

    def __getitem__(self, seed: int) -> nn.Module:
        if seed not in self._kept:
            self._kept[seed] = self._read_or_trained(seed)
        return self._kept[seed]

    def _read_or_trained(self, seed: int) -> nn.Module:
        if self._files is None:
            return trained(seed, self._data, self._options)
        path = self._files.with_name(f"{self._files.name}-{seed}.pt")
        if not path.exists():
            torch.save(trained(seed, self._data, self._options).state_dict(), path)
        network = untrained(self._options.width).eval()
        network.load_state_dict(torch.load(path))
        return network


def table(done: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over seeds with their standard errors, by set, method and side."""
    found: dict[str, dict[str, Any]] = {}
    for row in done:
        entry = found.setdefault(f"{row['set']}: {row['method']}, {row['side']}", {})
        for name in (*SCORES, "fit", "predict"):
            entry.setdefault(name, []).append(row[name])
        published = PUBLISHED[row["set"]].get(row["method"])
        if published:
            entry["published"] = dict(zip(SCORES, published, strict=True))
    for entry in found.values():
        for name in (*SCORES, "fit", "predict"):
            values = entry[name]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            entry[name] = {"mean": statistics.mean(values), "error": error, "seeds": len(values)}
    return found


def text(title: str, entry: dict[str, Any]) -> str:
    parts = [f"{title:60}"]
    for name in SCORES:
        value, error = entry[name]["mean"], entry[name]["error"]
        parts.append(f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else " " * 9))
    seconds = f"{entry['fit']['mean']:.1f} + {entry['predict']['mean']:.1f} s"
    published = entry.get("published")
    said = ", ".join(f"{value:.4g}" for value in published.values()) if published else ""
    return "  ".join([*parts, f"{seconds:>16}", said]).rstrip()


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two .npz files")
    parser.add_argument("--sets", nargs="+", choices=list(OTHER), default=list(OTHER))
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of a long run")
    parser.add_argument("--peer", help="folder where laplace-torch is installed")
    parser.add_argument("--only", nargs="+", help="methods to run, all by default")
    parser.add_argument("--decay", type=float, default=1e-3, help="weight decay (1e-3)")
    sizes = {
        "seeds": (5, 2, "networks"),
        "train": (60_000, 2000, "training images"),
        "held_out": (5000, 500, "of these, where rows choose the width"),
        "test": (10_000, 500, "test images of each set"),
        "width": (200, 50, "of the hidden layers"),
        "steps": (20_000, 500, "of training"),
        "batch": (100, 100, "rows of a step"),
        "draws": (50, 10, "of SWAG"),
        "features": (2000, 50, "rows of ELLA's basis, of which it keeps half"),
        "inducing": (100, 10, "inputs of VaLLA"),
        "valla_steps": (500, 5, "of VaLLA"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    if options.peer:
        peer_laplace(options.peer)
    done = harness.read_rows(options.rows)
    known = {(row["set"], row["method"], row["side"], row["seed"]) for row in done}
    for name in options.sets:
        data = unscaled(Images(options.data, name, train=options.train, test=options.test))
        few = Part(*(part[: -options.held_out] for part in data.train))
        networks = {
            part: Networks(
                rows,
                options,
                options.rows and options.rows.with_name(f"{options.rows.stem}-{name}-{part}"),
            )
            for part, rows in (("all", data.train), ("held-out", few))
        }
        for seed in range(options.seeds):
            for row in rows(networks, seed, data, options):
                key = (name, row.method, row.side, seed)
                if key in known or (options.only and row.method not in options.only):
                    continue
                torch.manual_seed(seed)
                one = {"set": name, "seed": seed, **measured(row, data)}
                harness.write_rows(options.rows, [one])
                done.append(one)
                if not options.json:
                    print(json.dumps(one), flush=True)
    found = table(done)
    if options.json:
        print(json.dumps({"machine": harness.machine(), "rows": found}))
        return
    print(harness.machine())
    print("  ".join([f"{'':60}", *(f"{name:15}" for name in SCORES), "seconds, published"]))
    for title, entry in found.items():
        print(text(title, entry))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # a network trained with dropout is at no mode
        warnings.simplefilter("ignore", UserWarning)  # of laplace-torch
        main()
