"""States and files of guides, and posteriors from files."""

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.program.batches import Batch
from pyro_bdl.program.layout import Layout, differences, origin
from pyro_bdl.program.trace import leave_open, record
from pyro_bdl.samples import SAVED_KIND as SAMPLES_KIND
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.tensor_file import kind_of_file, load_tree, save_tree
from pyro_bdl.utils.trees import tree_map_only

SAVED_KIND = "posterior"
_SLACK = 1e-2  # of log densities, which differ by rounding between devices


class SavedGuide(nn.Module):
    """The part of ``Guide`` that saves and loads it."""

    layout: Layout | None
    require_layout: Any
    program_model: Callable
    few_rows: Batch
    _loaded: dict[str, Tensor] | None
    # Base classes of options that are objects, which a file holds by their attributes
    saved_parts: tuple[type, ...] = ()

    def get_extra_state(self) -> Tensor:
        """The names, shapes and order of the program's sites, saved with the parameters in
        ``state_dict``.

        They are encoded as a tensor of bytes, so that the state holds tensors only.
        """
        text = json.dumps(None if self.layout is None else sites_of(self.layout))
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state belongs to this program.

        :raises RuntimeError: if its sites have other names, shapes or another order.
        """
        theirs = json.loads(bytes(state.tolist()).decode())
        ours = sites_of(self.require_layout())
        if theirs is None or theirs == ours:
            return
        shapes = [{name: torch.Size(shape) for name, shape, _ in sites} for sites in (ours, theirs)]
        found = differences(*shapes) or "its sites have another order or other supports"
        raise RuntimeError(
            f"the state of {type(self).__name__} is of {origin(*shapes)} ({found}): load it "
            "into a guide for the program that it was saved from"
        )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *lists: Any,
    ) -> None:
        """Load parameters; before the first run, keep the values until the parameters exist.

        A state of another program is refused before any value is loaded. A state without a list of
        sites is loaded without this check. The state of a guide before its first run holds nothing,
        and changes a guide only if that has parameters: then it is refused.
        """
        if self.layout is not None:
            key = f"{prefix}_extra_state"
            if key in state_dict:
                self.set_extra_state(state_dict[key])
            unexpected_keys, errors = lists
            before = len(missing_keys) + len(unexpected_keys)
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, *lists
            )
            if key in missing_keys:
                missing_keys.remove(key)
            if len(missing_keys) + len(unexpected_keys) > before:
                errors.append(
                    f"The state is of another kind of guide than {type(self).__name__}: "
                    "guide.save(path) keeps the kind too, and bdl.load_posterior(path, model) "
                    "makes that guide."
                )
            return
        values = {
            key.removeprefix(prefix): value.detach().clone()
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        self._loaded = values if values.keys() - {"_extra_state"} else None

    def options(self) -> dict[str, Any]:
        """The constructor's options that the file of ``save`` needs, by name.

        Options that act on the start of training only are left out.
        """
        return {}

    def saved(self) -> dict[str, Any]:
        """The guide as a tree of tensors, numbers and strings, from which ``restored`` makes it."""
        return {
            "class": class_path(type(self)),
            "options": {n: described(v, *self.saved_parts) for n, v in self.options().items()},
            "state": dict(self.state_dict()),
        }

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> Any:
        """Make a guide from a tree of ``saved``.

        :param batch: arguments of the program, of which a few rows are enough.
        """
        args, kwargs = batch
        options = saved["options"].items()
        guide: Any = cls(model, **{n: from_description(v, *cls.saved_parts) for n, v in options})
        guide.load_state_dict(saved["state"])
        return guide.prototype(*args, **kwargs)

    def save(self, path: str | Path) -> Path:
        """Write the posterior to a file of tensors and JSON (safetensors) that holds no code.

        ``bdl.load_posterior(path, model)`` reads it, also in another process. The file holds the
        guide, the program's own parameters and buffers, such as a learned noise, and the first two
        rows of the data (all of them for a program that needs all), with which the program is run
        when it is read. The log densities at these rows tell another program, such as one with
        another prior or noise.

        :raises RuntimeError: before the first run.
        :raises TypeError: for options or arguments that are no tensors, numbers or strings.
        """
        model = self.program_model
        program = dict(model.state_dict()) if isinstance(model, nn.Module) else None
        tree = {"guide": self.saved(), "program": program, "batch": self.few_rows}
        return save_tree(path, {**tree, "densities": log_densities(self)}, kind=SAVED_KIND)


def load_posterior(path: str | Path, model: Callable) -> Any:
    """Read a posterior that ``guide.save(path)`` or ``samples.save(path)`` wrote.

    A guide is made for ``model``, on the device of its tensors. The program's own parameters and
    buffers, such as a learned noise or the statistics of BatchNorm layers, are set to those of the
    file. Nothing in the file is run as code.

    :param path: the file.
    :param model: the program that the posterior belongs to, made as when it was saved.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: for a file that holds no posterior, or is damaged.
    :raises RuntimeError: for a posterior of another program, such as one with another prior or
        noise, which stays as it was.
    """
    if kind_of_file(path) == SAMPLES_KIND:
        return Samples.load(path)
    tree = load_tree(path, kind=SAVED_KIND)
    before: Any = None
    device = torch.device("cpu")
    if isinstance(model, nn.Module):
        before = copy.deepcopy(model.state_dict())
        device = next((v.device for v in before.values() if isinstance(v, Tensor)), device)
    batch = tree_map_only(Tensor, lambda value: value.to(device), tree["batch"])
    try:
        if tree["program"] is not None and isinstance(model, nn.Module):
            model.load_state_dict(tree["program"])
        guide = restored(model, tree["guide"], batch)
        _check_same(tree["densities"], log_densities(guide))
        return guide
    except Exception:
        if isinstance(model, nn.Module):
            model.load_state_dict(before)
        raise


def _check_same(saved: dict[str, float], now: dict[str, float]) -> None:
    for site, value in saved.items():
        here = now.get(site, math.nan)
        if not math.isclose(value, here, rel_tol=_SLACK, abs_tol=_SLACK) and value == value:
            raise RuntimeError(
                f"the posterior is of another program: at the same weights and data the log "
                f"density of the site '{site}' was {value:.6g} and is {here:.6g} here: load it "
                "with the prior, the noise and the num_data of the program that it was saved from"
            )


def restored(model: Callable, saved: Mapping[str, Any], batch: Batch) -> Any:
    """Make a guide from a tree of ``Guide.saved``.

    :raises ValueError: for a class of guides that is not imported.
    """
    return known_class(saved["class"], SavedGuide).restored(model, saved, batch)


def sites_of(layout: Layout) -> list[list[Any]]:
    """The sites' names and their constrained and unconstrained shapes, in the vector's order."""
    return [
        [name, list(latent.shape), list(latent.unconstrained_shape)]
        for name, latent in layout.latents.items()
    ]


@torch.no_grad()
def log_densities(guide: Any) -> dict[str, float]:
    """The log density of each site of a guide's program in nats, at the guide's center and a few
    rows of the first data; none for latents in subsampled plates, of which no run holds all."""
    if guide.subsampled:
        return {}
    model, values = guide.program_model, guide.require_layout().constrain(guide.location())[0]
    with evaluation_mode(guide.program_modules), own_randomness():
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
        f"the file holds an object of the class {path}, which is not known here: "
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
