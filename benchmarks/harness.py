"""Timing in turns, memory of a process and output, for all benchmark scripts."""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    cores = torch.get_num_threads()
    result.add_argument("--threads", type=int, default=cores, help="of torch, default %(default)s")
    result.add_argument("--repeats", type=int, default=5, help="timed rounds (default 5)")
    return result


def parse_sizes(
    parser: argparse.ArgumentParser, sizes: dict[str, tuple[float, float, str]]
) -> argparse.Namespace:
    """Parse the options, with ``--quick`` and one for each size.

    :param sizes: name: (full size, that of ``--quick``, help).
    """
    parser.add_argument("--quick", action="store_true", help="minutes on two cores")
    for name, (full, quick, text) in sizes.items():
        shown = f"{text} ({full}; quick {quick})"
        parser.add_argument("--" + name.replace("_", "-"), type=type(full), help=shown)
    options = parser.parse_args()
    for name, (full, quick, _) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def set_device(device: str) -> None:
    """Make new tensors on ``device``; on the CPU leave torch's default, since any
    ``set_default_device`` puts a Python call around every operation, which slows Pyro most."""
    if device != "cpu":
        torch.set_default_device(device)


def in_turns(
    sides: dict[str, Callable[[], Any]],
    repeats: int,
    *,
    slow: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each side; the sides take turns, so that both see the same machine.

    :param slow: a side whose first call, which does not count otherwise, takes longer than so
        many seconds is not called again.
    :param clock: ``time.process_time`` on a loaded machine.
    """
    seconds: dict[str, list[float]] = {}
    once: dict[str, float] = {}
    for name, function in sides.items():
        first = _seconds(function, clock)
        if first > slow:
            once[name] = first
        else:
            seconds[name] = []
    for _ in range(repeats):
        for name, values in seconds.items():
            values.append(_seconds(sides[name], clock))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return once | medians


def _seconds(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


def repeated(step: Callable[[], Any], count: int) -> Callable[[], None]:
    """Many steps as one timed call, the GPU's work included."""

    def run() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for _ in range(count):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def reset_peak_memory() -> None:
    """Start a new count of the peak of this process (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """The largest resident size of this process since the reset, in MB (Linux)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def memory_of(function: Callable[[], Any]) -> float:
    """How far a call's peak lies above what this process held before, in MB (Linux)."""
    reset_peak_memory()
    before = peak_memory_mb()
    function()
    return peak_memory_mb() - before


def in_own_process(script: str, *arguments: str) -> Any:
    """What a script prints last, as JSON, when called with this process's options and more."""
    command = [sys.executable, script, *sys.argv[1:], *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows that earlier runs wrote to a file, one JSON object a line."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Append rows, so that a run that was killed can go on with those that are missing."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return f"{device or platform.machine()}, torch {torch.__version__}"


def show(title: str, results: dict[str, Any], as_json: bool) -> None:
    """Print results as JSON or as aligned lines."""
    results = {"machine": machine()} | results
    if as_json:
        print(json.dumps({"benchmark": title} | results))
        return
    print(title)
    width = max(map(len, results))
    for name, value in results.items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"  {name:<{width}}  {text}")


def curve_over_seeds(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Mean and standard error over seeds of each number of a list, such as accuracies by step."""
    columns = list(zip(*(row[name] for row in rows), strict=True))
    root = len(rows) ** 0.5
    errors = [statistics.stdev(c) / root if len(rows) > 1 else math.nan for c in columns]
    return [statistics.mean(column) for column in columns], errors


def draw_curves(
    path: Path, panels: dict[str, dict[str, tuple[Any, Any, Any]]], xlabel: str, ylabel: str
) -> None:
    """A figure with a panel for each title, of curves (x, y, standard error) by name."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        1, len(panels), figsize=(2.0 + 4.0 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    for axes, (title, curves) in zip(grid[0], panels.items(), strict=True):
        for name, (x, y, error) in curves.items():
            axes.errorbar(x, y, error, label=name, capsize=2)
        axes.set(xlabel=xlabel, title=title)
    grid[0, 0].set_ylabel(ylabel)
    grid[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
