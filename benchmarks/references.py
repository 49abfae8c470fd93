"""The reference posteriors of ``bdl.references``: long NUTS runs on small problems.

    python benchmarks/references.py --data uci --work runs            # all
    python benchmarks/references.py --data uci --work runs wine       # one
    python benchmarks/references.py --work runs --check               # figures of those there

``--data`` is a folder with ``standard/energy/data/data.txt``, as github.com/cambridge-mlg/DUN has
it; the other data come with scikit-learn or from a formula. ``--work`` keeps all draws of the
weights, from which a file of the package is made without another run. A file is written only if
R-hat is below 1.005 for the function at every test input (split, rank-normalized, folded too), and
no draw diverged.
"""

import argparse
import json
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn import datasets

import pyro_bdl as bdl
from pyro_bdl.data.dataset import Dataset, prepare
from pyro_bdl.data.examples import EXAMPLES, two_clusters
from pyro_bdl.data.programs import program
from pyro_bdl.references import Reference

RHAT = 1.005
KEPT = 2000  # draws in the file
FOLDER = Path(bdl.__file__).parent / "references" / "data"


@dataclass(frozen=True)
class Plan:
    """The network of a problem and the lengths of its chains."""

    hidden: int
    draws: int = 4000
    warmup: int = 1500
    chains: int = 4
    accept: float = 0.85
    depth: int = 8


PLANS = {
    "iris": Plan(hidden=10, draws=2500, warmup=1000),
    "in-between": Plan(hidden=20),
    "wine": Plan(hidden=10),
    "breast-cancer": Plan(hidden=5),
    "diabetes": Plan(hidden=10),
    "energy": Plan(hidden=10, draws=5000, accept=0.95),
}


ROWS = 120  # of a UCI set: with more data the chains do not mix
COLUMNS = (
    "relative compactness", "surface area", "wall area", "roof area", "overall height",
    "orientation", "glazing area", "glazing area distribution",
)  # fmt: skip
TARGETS = {"wine": "cultivar", "breast-cancer": "diagnosis", "iris": "species"}


def dataset(name: str, folder: str) -> Dataset:
    """The data of a problem; all splits have seed 0."""
    if name == "in-between":
        found = two_clusters(100, seed=0, noise=0.1)
        return Dataset(
            found.x_train, found.y_train, found.x_test[::2], found.y_test[::2],
            found.feature_names, found.target_name, found.task,
        )  # fmt: skip
    if name == "diabetes":
        return EXAMPLES["diabetes"].load(seed=0)
    if name == "energy":
        table = np.loadtxt(Path(folder) / "standard" / "energy" / "data" / "data.txt")
        table = table[np.random.default_rng(0).permutation(len(table))[:ROWS]]
        return prepare(
            table[:, :8], table[:, 8], feature_names=COLUMNS, target_name="heating load",
            task="regression", test_fraction=0.4, seed=0,
        )  # fmt: skip
    bunch = getattr(datasets, f"load_{name.replace('-', '_')}")()
    return prepare(
        bunch.data, bunch.target, feature_names=tuple(bunch.feature_names),
        target_name=TARGETS[name], task="classification", seed=0,
    )  # fmt: skip


def in_double(data: Dataset) -> Dataset:
    """The data as the file will hold them, rounded to float32, in float64."""
    parts = {}
    for name in ("x_train", "y_train", "x_test", "y_test"):
        value = getattr(data, name)
        parts[name] = value.float().double() if value.is_floating_point() else value
    return Dataset(
        **parts, feature_names=tuple(map(str, data.feature_names)), target_name=data.target_name,
        task=data.task, class_names=tuple(map(str, data.class_names)),
        y_mean=data.y_mean, y_sd=data.y_sd,
    )  # fmt: skip


def sampled(name: str, data: Dataset, architecture: dict, plan: Plan, work: Path) -> bdl.Samples:
    """All draws of the weights, from the work folder if they are there."""
    path = work / f"{name}.safetensors"
    if path.is_file():
        return bdl.Samples.load(path)
    torch.manual_seed(0)
    model = program(data, **architecture)[0].double()
    samples = bdl.mcmc.sample(
        model, data.x_train, data.y_train, num_warmup=plan.warmup, num_samples=plan.draws,
        kernel=bdl.mcmc.NUTS(target_accept=plan.accept, max_tree_depth=plan.depth),
        num_chains=plan.chains, seed=0, progress=False,
    )  # fmt: skip
    samples.save(path)
    return samples


def made(name: str, folder: str, work: Path) -> Reference:
    """Run NUTS, or read its draws, and measure R-hat over all of them."""
    plan, data = PLANS[name], in_double(dataset(name, folder))
    architecture = {"hidden": [plan.hidden], "activation": "tanh", "gain": 1.0}
    samples = sampled(name, data, architecture, plan, work)
    model = program(data, **architecture)[0].double()
    drawn = bdl.Predictive(model, samples)(data.x_test)["f"]
    noise = samples.flat().get("noise")
    function = drawn.softmax(-1) if data.task == "classification" else drawn
    by_chain = function.unflatten(0, (samples.num_chains, -1))
    looked_at = by_chain[..., :-1] if data.task == "classification" else by_chain
    rhat, size, _ = bdl.diagnostics.convergence(looked_at.flatten(2))
    keep = torch.arange(KEPT // samples.num_chains) * samples.num_draws
    keep = keep // (KEPT // samples.num_chains)
    info = {
        "kernel": "nuts", "backend": "numpyro", "seed": 0, "dtype": "float64",
        "warmup": plan.warmup, "draws": plan.draws, "max_tree_depth": plan.depth,
        "target_accept": plan.accept, "seconds": samples.info["seconds"],
        "rhat": rhat.max().item(), "ess_min": size.min().item(),
        "ess_median": size.median().item(), "divergences": int(samples.stats["diverging"].sum()),
        "gradients": int(samples.stats["num_steps"].sum()), "made": time.strftime("%Y-%m-%d"),
        "pyro_bdl": bdl.__version__, "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "numpyro", "jax")},
    }  # fmt: skip
    return Reference(
        name=name, dataset=data, architecture=architecture,
        function=by_chain[:, keep].flatten(0, 1),
        noise=None if noise is None else noise.unflatten(0, (samples.num_chains, -1))[
            :, keep
        ].flatten(),
        chains=samples.num_chains, info=info,
    )  # fmt: skip


def save(reference: Reference, path: Path) -> None:
    """Write the file of the package, in float32."""
    data = reference.dataset
    tensors = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    # The probability of the first class follows from the others.
    classes = data.task == "classification"
    tensors["function"] = reference.function[..., 1:] if classes else reference.function
    if reference.noise is not None:
        tensors["noise"] = reference.noise
    stored = {
        name: (value.float() if value.is_floating_point() else value).contiguous().clone()
        for name, value in tensors.items()
    }
    fields = ("feature_names", "target_name", "task", "class_names", "y_mean", "y_sd")
    about = {
        "dataset": {name: getattr(data, name) for name in fields},
        "architecture": dict(reference.architecture),
        "chains": reference.chains,
        "info": dict(reference.info),
    }
    header = {name: json.dumps(value) for name, value in about.items()}
    save_file(stored, path, {"version": "1", "name": reference.name, **header})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PLANS), help="default: all")
    parser.add_argument("--data", default="uci", help="folder of the UCI data")
    parser.add_argument("--work", default="runs", help="folder of the draws of the weights")
    parser.add_argument("--check", action="store_true", help="print the figures of those there")
    options = parser.parse_args()
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        if options.check:
            reference = bdl.references.load(name)
        else:
            reference = made(name, options.data, work)
            good = reference.info["rhat"] < RHAT and not reference.info["divergences"]
            if good:
                save(reference, FOLDER / f"{name}.safetensors")
            else:
                print(f"{name}: not written")
        told = {key: reference.info[key] for key in ("rhat", "ess_min", "divergences", "seconds")}
        print(name, tuple(reference.function.shape), told, flush=True)


if __name__ == "__main__":
    main()
