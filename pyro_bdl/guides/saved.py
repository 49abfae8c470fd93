"""States and files of guides, and posteriors from files."""

import json
import tempfile
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.errors import ArgumentError, warn
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.layout import Layout, other_program
from pyro_bdl.program.samples import SAVED_KIND as SAMPLES_KIND
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.saved import (
    check_same,
    check_sites,
    described_program,
    taking_up,
)
from pyro_bdl.utils.tensor_file import kind_of_file, load_tree, save_tree

SAVED_KIND = "posterior"


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_DEFINE_OPTIONS = (
    "let its method options() return the constructor's options that a file needs, such as "
    "{'rank': self.rank}, and save it again"
)


class SavedGuide(nn.Module):
    """The part of ``Guide`` that saves and loads it."""

    layout: Layout | None
    require_layout: Any
    location: Any
    subsampled: set[str]
    program_model: Callable
    example_rows: Batch
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
        source = other_program(*shapes) or (
            "another program (its sites have another order or other supports)"
        )
        raise RuntimeError(
            f"the state of {type(self).__name__} is of {source}: "
            "load it into a guide for the program that it was saved from"
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
            self._check_shapes(state_dict, prefix)
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

    def _check_shapes(self, state: Mapping[str, Any], prefix: str) -> None:
        """Check that the guide's own tensors have the shapes of a state.

        :raises RuntimeError: if they have others, as of a guide with other options.
        """
        for name, own in [*self._parameters.items(), *self._buffers.items()]:
            value = state.get(f"{prefix}{name}")
            if own is None or value is None or value.shape == own.shape:
                continue
            kind = type(self).__name__
            raise RuntimeError(
                f"the {kind} of the state has '{name.removesuffix('_unconstrained')}' of shape "
                f"{tuple(value.shape)}, and this one of shape {tuple(own.shape)}: make it with the "
                f"same options; if it came from load_posterior, {_DEFINE_OPTIONS}"
            )

    def options(self) -> dict[str, Any]:
        """The constructor's options that the file of ``save`` needs, by name.

        A subclass with options that its parameters' shapes or its law depend on returns them here:
        ``{"rank": self.rank}``. Options that act on the start of training only are left out.
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
        saved_options = saved["options"].items()
        options = {n: from_description(v, *cls.saved_parts) for n, v in saved_options}
        expected = list(signature(cls).parameters.values())[1:]  # without the program
        for option in expected:
            required = option.default is Parameter.empty and option.kind in _NAMED
            if required and option.name not in options:
                raise ArgumentError(
                    f"{cls.__name__} cannot be made again without the argument '{option.name}', "
                    f"which the file does not hold: {_DEFINE_OPTIONS}"
                )
        guide: Any = cls(model, **options)
        guide.load_state_dict(saved["state"])
        return guide.prototype(*args, **kwargs)

    def save(self, path: str | Path) -> Path:
        """Write the posterior to a file of tensors and JSON (safetensors) that holds no code.

        ``bdl.load_posterior(path, model)`` reads it, also in another process. The file holds the
        guide, the program's own parameters and buffers, such as a learned noise, and the first two
        rows of the data (all of them for a program that needs all), with which the program is run
        when it is read. Its densities and distributions at these rows tell another program, such as
        one with another prior or noise.

        :raises RuntimeError: before the first run.
        :raises TypeError: for options or arguments that are no tensors, numbers or strings.
        """
        layout, center = self.require_layout(), None
        if not self.subsampled:  # no run holds all latents of a subsampled plate
            center = layout.constrain(self.location())[0]
        program = described_program(self.program_model, self.example_rows, center)
        tree = {"guide": self.saved(), "program": {**program, "point": None}}
        return save_tree(path, tree, kind=SAVED_KIND)


def load_posterior(path: str | Path, model: Callable) -> Any:
    """Read a posterior that ``guide.save(path)`` or ``samples.save(path)`` wrote.

    A guide is made for ``model``; it and ``Samples`` are on the device of the program's tensors.
    The program's own parameters and buffers, such as a learned noise, layers without a prior or the
    statistics of BatchNorm layers, are set to those of the file. Nothing in the file is run as
    code.

    :param path: the file.
    :param model: the program that the posterior belongs to, made as when it was saved.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: for a file that holds no posterior, or is damaged.
    :raises RuntimeError: for a posterior of another program, such as one with another prior or
        noise, which stays as it was.
    :warns BdlWarning: for draws in a file without their program.
    """
    if kind_of_file(path) == SAMPLES_KIND:
        return _loaded_samples(Samples.load(path), model)
    tree = load_tree(path, kind=SAVED_KIND)
    with taking_up(model, tree["program"]) as (_, program):
        guide = restored(model, tree["guide"], program["batch"])
        if program["statements"]:
            check_same(model, program, guide.require_layout().constrain(guide.location())[0])
    return guide


def to_bytes(posterior: Any) -> bytes:
    """The file of a posterior, in memory: a pickled guide holds no program."""
    with tempfile.TemporaryDirectory() as folder:
        path: Path = posterior.save(Path(folder) / "posterior.safetensors")
        return path.read_bytes()


def from_bytes(data: bytes, model: Callable) -> Any:
    """The posterior of ``to_bytes``, see ``load_posterior``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        path.write_bytes(data)
        return load_posterior(path, model)


def _loaded_samples(samples: Samples, model: Callable) -> Samples:
    """Draws whose program is ``model``, which takes up what the file holds of it."""
    if samples.program is None:
        warn(
            "the file holds draws alone: no parameters and buffers of their program (layers "
            "without a prior, a learned noise, statistics of BatchNorm), which stay as they are "
            "here, and nothing by which another program would be recognized; "
            "bdl.Samples(draws).of_program(bdl.Program(model, x, y)).save(path) writes them too",
            "draws-without-their-program",
        )
        return samples
    with taking_up(model, samples.program) as (program, tree):
        check_sites(program, tree["point"])
        check_same(model, tree, tree["point"])
    like = next(iter(tree["point"].values()))
    return samples.to(like.device)


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


def class_path(kind: type) -> str:
    """The module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def known_class(path: str, *bases: type) -> Any:
    """The class with the path of ``class_path``, among some classes and their subclasses; or the
    only one of that name in the same package, where it has moved since.

    :raises ValueError: for a class that is not imported.
    """
    known, waiting = {}, list(bases)
    while waiting:
        kind = waiting.pop()
        known[class_path(kind)] = kind
        waiting += kind.__subclasses__()
    moved = [kind for other, kind in known.items() if _ends(other) == _ends(path)]
    if path in known or len(moved) == 1:
        return known.get(path, *moved[:1])
    raise ValueError(
        f"the file holds an object of the class {path}, which is not known here: "
        "import its module first"
    )


def _ends(path: str) -> tuple[str, str]:
    """The package of a class and its name."""
    return path.split(".")[0], path.split(".")[-1]


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
