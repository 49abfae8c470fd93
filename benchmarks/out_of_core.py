"""Peak memory of a posterior from images on the disk: trained, approximated, compared, exported.

    python benchmarks/out_of_core.py --data DATA --quick
    python benchmarks/out_of_core.py --data DATA

The 60,000 training images of Fashion-MNIST stand in a memory-mapped file as float32, and a
``DataLoader`` reads them 256 at a time. A network 784-50-10 is trained to the MAP, gets a Laplace
approximation with Kronecker factors and the width by test images, is compared with the MAP on these
and exported to ArviZ with them. ``--data`` is a folder with ``fashion_mnist.npz`` of the Keras
layout.
"""

import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

_AT_ONCE = 2000


class Images(Dataset):
    """Images in a memory-mapped file, and their labels."""

    def __init__(self, path: Path, labels: np.ndarray) -> None:
        self.path, self.labels = path, torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        file = np.load(self.path, mmap_mode="r")  # anew, so that pages do not stay in memory
        images = torch.from_numpy(file[rows])
        return list(zip(images, self.labels[rows], strict=True))


def written(folder: Path, source: Path, part: str, count: int | None) -> Images:
    """Images of a part of the source in a file of ``folder``, written a few at a time."""
    with np.load(source) as arrays:
        images, labels = arrays[f"x_{part}"][:count], arrays[f"y_{part}"][:count]
    path = folder / f"{part}.npy"
    shape = (len(images), images[0].size)
    file = np.lib.format.open_memmap(path, "w+", dtype=np.float32, shape=shape)
    for start in range(0, len(images), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        file[rows] = images[rows].reshape(-1, shape[1]).astype(np.float32) / 255
    file.flush()
    return Images(path, labels)


def measured(data: Path, folder: Path, epochs: int, train: int, test: int) -> dict[str, Any]:
    """Seconds and peak memory of each stage."""
    source = data / "fashion_mnist.npz"
    stages: dict[str, Any] = {}
    started = time.perf_counter()

    def end(stage: str) -> None:
        nonlocal started
        now = time.perf_counter()
        stages[stage] = {"seconds": now - started, "peak MB": harness.peak_memory_mb()}
        started = now

    images = written(folder, source, "train", train)
    held_out = written(folder, source, "test", test)
    loader = DataLoader(images, batch_size=256, shuffle=True)
    others = DataLoader(held_out, batch_size=256)
    end("files")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(784, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
    model = bdl.models.Classification(bdl.bayesianize(net), num_data=len(images))
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron")
    bdl.training.train(model, guide, loader, steps=epochs * len(loader), learning_rate=1e-3)
    end("train")
    posterior = guide.laplace_approximation(loader, held_out=others, progress=False)
    end("approximate")
    posteriors = {"MAP": guide, "Laplace": posterior}
    comparison = bdl.compare(model, posteriors, others, reference=None, num_samples=100)
    end("compare")
    found = bdl.to_arviz(model, posterior, others, num_samples=100, prior_samples=10)
    end("export")
    numbers = comparison.table["nlpd"]
    return {
        "images": len(images),
        "exported": list(found["log_likelihood"]["y"].shape),
        "stages": stages,
        "nlpd": {name: float(numbers[name]) for name in posteriors},
        "peak MB": max(stage["peak MB"] for stage in stages.values()),
    }


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with fashion_mnist.npz")
    sizes = {
        "train": (60_000, 6_000, "training images"),
        "test": (10_000, 1_000, "test images"),
        "epochs": (3, 1, "passes over the training images"),
    }
    options = harness.parse_sizes(parser, sizes)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", BdlWarning)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(
            options.data, Path(folder), options.epochs, options.train, options.test
        )  # fmt: skip
    if options.json:
        print(json.dumps(result))
        return
    for stage, numbers in result["stages"].items():
        print(f"{stage:12} {numbers['seconds']:7.1f} s   peak {numbers['peak MB']:6.0f} MB")


if __name__ == "__main__":
    main()
