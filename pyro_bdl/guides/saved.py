"""What the file of a guide holds besides its state: classes by their paths, and log densities."""

from collections.abc import Mapping
from typing import Any

import torch

from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import own_randomness

SAVED_KIND = "posterior"


@torch.no_grad()
def log_densities(guide: Any) -> dict[str, float]:
    """The log density of each site of a guide's program in nats, at the guide's center and a few
    rows of the first data; none for latents in subsampled plates, of which no run holds all."""
    if guide.subsampled:
        return {}
    model, values = guide.program_model, guide.require_layout().constrain(guide.location())[0]
    with evaluation_mode(model), own_randomness():
        run = record(model, values, *guide.few_rows, draw=leave_open)
    sites = run.latents | run.observed | run.factors
    return {
        name: float(site.log_prob().sum()) for name, site in sites.items() if site.value is not None
    }


def class_path(kind: type) -> str:
    """The module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def known_class(path: str, *bases: type) -> Any:
    """The class with the path of ``class_path``, among some classes and their subclasses.

    :raises ValueError: for a class that is not imported.
    """
    waiting = list(bases)
    while waiting:
        kind = waiting.pop()
        if class_path(kind) == path:
            return kind
        waiting += kind.__subclasses__()
    raise ValueError(
        f"the file holds a {bases[0].__name__} of the class {path}, which is not known here: "
        "import its module first"
    )


def described(value: Any, *bases: type) -> Any:
    """An object of some classes as a tree of its class and attributes; any other as it is."""
    if not isinstance(value, bases):
        return value
    parts = {name: described(part, *bases) for name, part in vars(value).items()}
    return {"class": class_path(type(value)), **parts}


def from_description(saved: Any, *bases: type) -> Any:
    """The object of a tree of ``described``."""
    if not isinstance(saved, Mapping) or "class" not in saved:
        return saved
    kind = known_class(saved["class"], *bases)
    result = kind.__new__(kind)
    parts = {name: part for name, part in saved.items() if name != "class"}
    vars(result).update({name: from_description(part, *bases) for name, part in parts.items()})
    return result
