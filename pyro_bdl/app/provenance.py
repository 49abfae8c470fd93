"""Everything that it takes to make a report again."""

import os
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from pyro_bdl.app.fits import Fits
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.version import __version__

_PACKAGES = ("torch", "pyro-ppl", "numpyro", "jax", "arviz", "numpy", "scikit-learn", "pandas")


def provenance(line: str, fits: Fits) -> dict[str, dict[str, Any]]:
    """Run, program, data, versions and the settings of each posterior, by heading.

    :param line: the command line.
    """
    options = fits.options
    seconds = sum(fit.costs.seconds or 0.0 for fit in fits.fits.values())
    settings = {k.replace("_", " "): v for k, v in asdict(options.settings()).items()}
    interrupted = {name: {"interrupted": "yes"} for name, f in fits.fits.items() if f.interrupted}
    return {
        "Run": {
            "command line": line,
            "posteriors": ", ".join(fits.names),
            "device": options.device,
            **{name: value for name, value in settings.items() if value is not None},
            "seconds of all fits": round(seconds, 1),
        },
        "Program": fits.words,
        "Data": _data(fits.data),
        "Versions": _versions(fits.problem.x.device),
        **{name: {**f.settings, **interrupted.get(name, {})} for name, f in fits.fits.items()},
    }


def _versions(device: torch.device) -> dict[str, Any]:
    """Versions of Python and of the packages that compute, the machine and its threads."""
    cuda = device.type == "cuda"
    return {
        "pyro_bdl": __version__,
        "Python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        **({"device": torch.cuda.get_device_name(device)} if cuda else {}),
        "threads of torch": torch.get_num_threads(),
        "numbers": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _data(data: Dataset) -> dict[str, Any]:
    values = {
        "source": data.source,
        "target": data.target_name,
        "task": data.task,
        "rows": f"{len(data.x_train)} for training, {len(data.x_test)} for the test",
        "split": data.split,
        "features": f"{len(data.feature_names)}: {', '.join(data.feature_names)}",
        "scaling": "features minus their mean, divided by their sd, in the training rows"
        if data.x_mean
        else "none",
        "classes": ", ".join(data.class_names),
        "inferred": " ".join(data.notes),
    }
    if data.task in ("regression", "censored"):
        values["target's mean and sd"] = (
            f"{data.y_mean:.6g} and {data.y_sd:.6g}: the program sees (y - mean) / sd"
        )
    if data.task == "times":
        values["target's geometric mean"] = f"{data.y_sd:.6g}: the program sees y / mean"
    return {name: value for name, value in values.items() if value}
