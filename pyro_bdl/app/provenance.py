"""Everything that it takes to make a report again."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from pyro_bdl.app.options import Options
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.posteriors import Fit
from pyro_bdl.version import __version__

_PACKAGES = ("torch", "pyro-ppl", "numpyro", "jax", "arviz", "numpy", "scikit-learn", "pandas")


def provenance(
    line: str,
    options: Options,
    data: Dataset,
    program: Mapping[str, str],
    fits: Sequence[Fit],
) -> dict[str, dict[str, object]]:
    """Program, data, run, versions and the settings of each posterior, by heading.

    :param line: the command line.
    :param program: the program in words.
    """
    settings = options.settings()
    run: dict[str, object] = {
        "command line": line,
        "guides": ", ".join(options.names()),
        "seed": options.seed,
        "device": options.device,
        "chains": settings.chains,
        "warmup": settings.warmup,
        "draws": settings.draws,
        "max tree depth": settings.max_tree_depth,
        "seconds of all fits": round(sum(fit.seconds for fit in fits), 1),
    }
    found: dict[str, dict[str, object]] = {
        "Run": run,
        "Program": dict(program),
        "Data": _data(data),
        "Versions": versions(data.x_train.device),
    }
    for fit in fits:
        found[fit.name] = dict(fit.settings) | ({"interrupted": "yes"} if fit.interrupted else {})
    return found


def versions(device: torch.device) -> dict[str, object]:
    """Versions of Python and of the packages that compute, the processor and its threads."""
    found: dict[str, object] = {"pyro_bdl": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found["processor"] = f"{_processor()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    found["threads of torch"] = torch.get_num_threads()
    found["numbers"] = str(torch.get_default_dtype()).removeprefix("torch.")
    return found


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def _data(data: Dataset) -> dict[str, object]:
    found: dict[str, Any] = {
        "source": data.source,
        "target": data.target_name,
        "task": data.task,
        "rows": f"{len(data.x_train)} for training, {len(data.x_test)} for the test",
        "split": data.split,
        "features": f"{len(data.feature_names)}: {', '.join(data.feature_names)}",
        "scaling": "none",
    }
    if data.class_names:
        found["classes"] = ", ".join(data.class_names)
    if data.x_mean:
        found["scaling"] = "features minus their mean, divided by their sd, in the training rows"
    if data.task == "regression":
        found["target's mean and sd"] = (
            f"{data.y_mean:.6g} and {data.y_sd:.6g}: the program sees (y - mean) / sd"
        )
    if data.notes:
        found["found"] = " ".join(data.notes)
    return found
