"""All cases of several processes, run by two of them."""

import datetime
import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch
from helpers import rank_cases, rank_curvature, rank_failures, rank_training  # noqa: F401
from helpers.rank_cases import CASES

LIMIT = 300.0  # seconds
ON_CUDA = ["full_batches", "same_draws_mean_field", "natural_gradients", "laplace_kron"]


def main(rank, folder, device):
    rank_cases.DEVICE = device
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    names = CASES if device == "cpu" else ON_CUDA
    found = {name: CASES[name](rank, 2) for name in names}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def start(folder, device):
    """Run both ranks. On the CPU they share the imports; CUDA forbids a fork."""
    importlib.import_module("torch._dynamo")  # which torch imports at the first step otherwise
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ranks = [context.Process(target=main, args=(rank, folder, device)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


def two_processes(folder, device):
    """The results of each process, case by case."""
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-m", "helpers.two_ranks", str(folder), device]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=LIMIT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [
        torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=False)
        for rank in range(2)
    ]


if __name__ == "__main__":
    start(Path(sys.argv[1]), sys.argv[2])
