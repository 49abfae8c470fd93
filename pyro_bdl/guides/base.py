"""The base class of all guides: one adapter from families over a flat vector to Pyro's guides."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor

from pyro_bdl.errors import ArgumentError, warn
from pyro_bdl.guides.family import Family, site_quantiles
from pyro_bdl.guides.saved import SavedGuide, sites_of
from pyro_bdl.guides.statements import sample_all
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.batches import Batch, Batches
from pyro_bdl.program.check import require_program
from pyro_bdl.program.layout import Latent, Layout
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.program.saved import example_rows
from pyro_bdl.program.trace import (
    Run,
    distribution_of_targets,
    is_marked_imputed,
    is_recording,
)
from pyro_bdl.utils.memory import require_memory
from pyro_bdl.utils.module_state import Modules, device_of, outside_inference_mode
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import tree_map_only
from pyro_bdl.utils.validation import real_number, whole_number

_BYTES = 4  # of a number, at least
SET_BY_STEPS = ("plates",)  # attributes of guides that change from step to step


class Guide(Family, SavedGuide, OwnParameters, AutoGuide):
    """Base class of all guides: an ``AutoGuide`` over one flat unconstrained vector u.

    A family is a subclass that defines the methods of ``Family``, and ``options()`` with the
    constructor's options that a file needs.

    :param model: a Pyro program.
    :param init_loc_fn: a per-site initialization, one of Pyro's or ``init_to_network``.
    :param create_plates: see Pyro's autoguides; for programs with latents in subsampled plates.
    """

    layout: Layout | None

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_network,
        create_plates: Callable | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            own = inspect.signature(type(self).__init__).parameters.values()
            names = [option.name for option in own if option.kind is option.KEYWORD_ONLY]
            raise ArgumentError(
                f"{type(self).__name__} has no option {', '.join(map(repr, unknown))}: it has "
                f"{', '.join(names)}, and those that help({type(self).__name__}) lists"
            )
        require_program(model)
        AutoGuide.__init__(self, start_at(init_loc_fn)(model), create_plates=create_plates)
        self.layout = None
        self._take_name()
        self._program_model = (model,)  # in a tuple, so that it is no submodule
        # Those of the program, which calls them in its first run.
        self.program_modules = Modules(model)
        self.observed_sites: frozenset[str] = frozenset()  # in the program's first run
        self._values: Mapping[str, Tensor] | None = None  # of parameters, while ``at_parameters``
        self.subsampled: set[str] = set()
        self.warned_of: set[str] = set()  # warnings about the program that are given once
        self._loaded: dict[str, Tensor] | None = None
        # A few rows of the first data, with which a program that reads a file is run.
        self.example_rows: Batch = (), {}

    @property
    def program_model(self) -> Callable:  # type: ignore[override]
        """The program as the user gave it.

        :raises RuntimeError: for a guide from a pickle, which holds none.
        """
        if self._program_model is None:
            raise RuntimeError(
                f"this {type(self).__name__} comes from a pickle, which holds no program: take "
                "guide.save(path) and bdl.load_posterior(path, model)"
            )
        return self._program_model[0]

    def batches(self, data: Any = None) -> Batches:
        """Data on the device of the guide and its program, see ``Batches``; None for a program
        without arguments."""
        device = device_of(self, *(self._program_model or ()))
        return Batches([()] if data is None else data).to(device)

    # Structure

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        """Return whether a statement of the first run is not a latent site, nor imputed; check
        observed sites."""
        if is_marked_imputed(msg):
            return False
        if msg["type"] == "sample" and msg["is_observed"]:
            distribution_of_targets(msg)
        return prototype_hide_fn(msg)

    def prototype(self, *args: Any, **kwargs: Any) -> Self:
        """Run the program once to create the parameters, unless they exist; return the guide.

        :param args: the program's arguments, targets included.
        """
        if self.prototype_trace is None:
            # loaded values replace what is drawn here, and later draws are those of the saved run
            with nullcontext() if self._loaded is None else own_randomness():
                self._setup_prototype(*args, **kwargs)
        return self

    @outside_inference_mode()
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        observed: set[str] = set()

        def hide(msg: Any) -> bool:
            if msg["type"] == "sample" and msg["is_observed"]:
                observed.add(msg["name"])
            return self._prototype_hide_fn(msg)

        first = trace_once(self.model, args, kwargs, hide)
        program, trace = Program.from_run(self.model, first, args, kwargs), first.trace
        self.program_modules, self.observed_sites = first.modules, frozenset(observed)
        start, full = at_full_size(program, trace)
        if self.master is not None:
            self.master()._check_prototype(trace)
        self._prototype_frames = {
            frame.name: frame
            for name in program.latents
            for frame in trace.nodes[name]["cond_indep_stack"]
        }
        self.layout = Layout(full)
        self._rename()
        self.subsampled = {
            name
            for name, latent in self.layout.latents.items()
            if latent.shape != program.latents[name].shape
        }
        try:
            with own_randomness():
                model, arguments, whole = self.program_model, (args, kwargs), Run()
                for name in self.layout.latents.keys() - self.subsampled:
                    whole.add(trace.nodes[name])
                self.example_rows = example_rows(model, self.layout, start, arguments, whole)
            self.create_parameters(start)
            if self._loaded is not None:
                self.load_state_dict(self._loaded)
        except Exception:
            self.layout = None
            raise
        self._loaded = None
        for name, latent in self.layout.latents.items():
            if latent.transform is None:  # of the values only the shapes are needed from here on
                node = trace.nodes[name]
                node["value"] = node["value"].new_zeros(()).expand(node["value"].shape)
        self.prototype_trace = trace

    def _take_structure(self, source: "Guide") -> None:
        """Copy the layout of a guide for the same program, instead of ``prototype``."""
        self.layout = source.require_layout()
        self.program_modules = source.program_modules
        self.observed_sites = source.observed_sites
        self._rename()
        self.subsampled = source.subsampled
        self.warned_of = source.warned_of
        self.prototype_trace = source.prototype_trace
        self._prototype_frames = source._prototype_frames
        self.example_rows = source.example_rows

    def __repr__(self) -> str:
        """A line; the program inside would fill pages."""
        if self.layout is None:
            return f"{type(self).__name__}(no parameters yet)"
        sites = len(self.layout.latents)
        return f"{type(self).__name__}({self.layout.size} latent numbers, {sites} sites)"

    def is_of(self, model: Callable) -> bool:
        """Return whether the guide was made for this program object; False for a guide from a
        file."""
        return self._program_model is not None and self._program_model[0] is model

    def require_layout(self) -> Layout:
        """Return the layout of the latents.

        :raises RuntimeError: before the first run, which finds the latents.
        """
        if self.layout is None and self._loaded is not None:
            raise RuntimeError(
                f"{type(self).__name__} keeps the loaded state until its first run, which creates "
                "the parameters: call guide.prototype(*args) with the program's arguments"
            )
        if self.layout is None:
            raise RuntimeError(
                f"{type(self).__name__} has no parameters yet: call guide.prototype(*args) with "
                "the program's arguments, or take one SVI step"
            )
        return self.layout

    # Parameters

    def parameter(self, name: str) -> Tensor:
        """A parameter or buffer; inside ``at_parameters`` the value that is held."""
        if self._values is not None and name in self._values:
            return self._values[name]
        self.require_layout()
        self._follow_store(name)
        return getattr(self, name)

    def numbers(self, ahead: int = 0) -> dict[str, float]:
        """Numbers that the guide computes with and that change from step to step, by name.

        :param ahead: those after so many more steps.
        """
        return {}

    def number(self, name: str) -> float | Tensor:
        """One of ``numbers``; inside ``at_parameters`` the value that is held."""
        if self._values is not None and name in self._values:
            return self._values[name]
        return self.numbers()[name]

    @contextmanager
    def at_parameters(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Read parameters and numbers from ``values``, so that the guide is a function of them."""
        before, self._values = self._values, values
        try:
            yield
        finally:
            self._values = before

    @contextmanager
    def cached_parameters(self) -> Iterator[None]:
        """Read each parameter once, by a ``pyro.param`` statement that optimizers see."""
        with self._pyro_context, self._held(detached=False):
            yield

    def constant(self) -> AbstractContextManager:
        """Read parameters as constants."""
        return self._held(detached=True)

    @contextmanager
    def _held(self, *, detached: bool) -> Iterator[None]:
        """Hold the parameters, those of guides inside this one included."""
        guides = [part for part in self.modules() if isinstance(part, Guide)]
        before = [guide._values for guide in guides]
        try:
            for guide in guides:  # not through PyroModule, which looks for parameters each time
                vars(guide)["_values"] = {**(guide._values or {}), **guide._read(detached)}
            yield
        finally:
            for guide, values in zip(guides, before, strict=True):
                vars(guide)["_values"] = values

    def _read(self, detached: bool) -> dict[str, Tensor]:
        """The parameters by name."""
        self.require_layout()
        found = {}
        for name in self._parameters:
            plain = name.removesuffix("_unconstrained")
            value = self.parameter(plain)
            if value is not None:
                found[plain] = value.detach() if detached else value
        return found

    # Summaries

    @property
    def numbers_drawn(self) -> int:
        """How many numbers of the vector differ between draws."""
        return self.require_layout().size

    def _checked_count(self, num_samples: Any) -> int:
        """A number of draws whose numbers fit in memory.

        :raises MemoryError: if they do not.
        """
        count, size = whole_number(num_samples, "num_samples"), self.numbers_drawn
        what = f"{count} draws (num_samples) of {size} numbers need at least"
        device = device_of(self) or torch.device("cpu")
        require_memory(_BYTES * count * size, device, what, "take fewer draws")
        return count

    def sample_latents(self, num_samples: int) -> dict[str, Tensor]:
        """Independent draws as a dict site -> (num_samples, *shape); those of a site that the guide
        holds at a point are views of one value."""
        num_samples, layout = self._checked_count(num_samples), self.require_layout()
        return layout.constrain(self.sample_vectors(num_samples))[0]

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """T(m), site -> value, for the marginal medians m of the unconstrained vector.

        They are the marginal medians of a site whose numbers are transformed one by one, and a
        value in the support of any other, such as a simplex.
        """
        self._prototype_if_given(args, kwargs)
        layout, center = self.require_layout(), self.location()
        if not self.normal_marginals:
            center = self.vector_quantiles(center.new_tensor([0.5]))[0]
        return {name: value.clone() for name, value in layout.constrain(center)[0].items()}

    @torch.no_grad()
    def quantiles(
        self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Marginal quantiles of each site, site -> (len(quantiles), *shape).

        For a site whose numbers depend on several of the unconstrained ones, as on a simplex, they
        are those of 4096 draws.
        """
        self._prototype_if_given(args, kwargs)
        like = self.location()
        values = quantiles.reshape(-1).tolist() if isinstance(quantiles, Tensor) else quantiles
        values = values if isinstance(values, Sequence) else [values]
        levels = like.new_tensor([real_number(q, "quantiles", "[0, 1]") for q in values])
        return site_quantiles(self, levels)

    def _prototype_if_given(self, args: tuple, kwargs: dict) -> None:
        if args or kwargs:
            self.prototype(*args, **kwargs)

    def _require_global(self) -> None:
        if self.subsampled:
            raise ValueError(
                f"the latent site '{min(self.subsampled)}' is in a subsampled plate and is "
                "about the data of this task alone: a prior for the next needs latents outside"
            )

    # Sample statements

    def site_distributions(self) -> dict[str, TorchDistribution] | None:
        """One distribution for each site, if the sites are independent of each other; else None."""
        vectors = self.site_vectors()
        if vectors is None:
            return None
        layout = self.require_layout()
        parts = [layout.unflatten(vector) for vector in vectors]
        return {
            name: self.site_distribution(latent, *(part[name] for part in parts))
            for name, latent in layout.latents.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Make a sample statement at every site; returns site -> value."""
        self.prototype(*args, **kwargs)
        if not is_recording() and "imputed" not in self.warned_of:
            self._warn_of_imputed()
        return sample_all(self, args, kwargs)

    def _warn_of_imputed(self) -> None:
        self.warned_of.add("imputed")
        trace: Any = self.prototype_trace
        nodes = trace.nodes.items()
        for name in [name for name, node in nodes if is_marked_imputed(node)]:
            warn(
                f"Pyro's own ELBOs count the density of '{name}', of which this guide has no "
                "values: a noise that is learned becomes too small. Train by "
                "bdl.training.train or bdl.elbo.TemperedTrace_ELBO, or write "
                "poutine.mask(mask=seen) in place of obs_mask; predictions are not concerned",
                "obs-mask",
            )

    def skip_steps(self, count: int) -> None:
        """Count steps of an ELBO of this package."""

    # Names and copies

    def _name_of_kind(self) -> str:
        """The name in Pyro's store: the class and, once the program is known, a digest of its
        sites.

        It does not depend on the process or on other guides, so that a guide for the same program
        finds its parameters again.
        """
        kind = super()._name_of_kind()
        if self.layout is None:
            return kind
        digest = hashlib.sha256(json.dumps(sites_of(self.layout)).encode()).hexdigest()
        return f"{kind}_{digest[:8]}"

    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        self.example_rows = tree_map_only(Tensor, function, self.example_rows)
        return super()._apply(function, recurse)

    def _shared_on_copy(self) -> tuple[str, ...]:
        return "_model", "_program_model", "program_modules", "master"

    def __getstate__(self) -> dict[str, Any]:
        """The state without the model, which stays in the original."""
        state = dict(super(AutoGuide, self).__getstate__())
        state.update(_model=None, _program_model=None, master=None)
        state["program_modules"] = Modules()
        return state


def at_full_size(program: Program, trace: Any) -> tuple[Tensor, list[Latent]]:
    """The initial vector and the latents, with subsampled plates expanded to their full size."""
    start, latents = [], []
    for name, latent in program.latents.items():
        value = program.initial[name]
        if latent.transform is not None:
            value = latent.transform.inv(value)
        shape = list(latent.shape)
        for frame in trace.nodes[name]["cond_indep_stack"]:
            full_size = frame.full_size or frame.size
            if full_size != frame.size:
                value = periodic_repeat(
                    value, full_size, frame.dim - latent.unconstrained_event_dim
                )
                shape[frame.dim - latent.event_dim] = full_size
        start.append(value.reshape(-1))
        state = {**vars(latent), "shape": torch.Size(shape), "unconstrained_shape": value.shape}
        latents.append(Latent(**state))
    if not latents:
        raise ValueError("the program has no latent site: give its weights priors")
    return torch.cat(start).contiguous(), latents
