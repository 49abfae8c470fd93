"""The base class of all guides: layout of the latents, parameters, draws and summaries."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from pyro_bdl.curvature.hyperparameters import few_rows
from pyro_bdl.guides.saved import SAVED_KIND, class_path, known_class, log_densities
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.batches import Batch
from pyro_bdl.program.check import refuse_sharded
from pyro_bdl.program.gaussian_prior import GaussianPrior
from pyro_bdl.program.layout import Latent, Layout, differences, origin
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.program.trace import Run, distribution_of_targets
from pyro_bdl.utils.module_state import modules_of, outside_inference_mode
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.tensor_file import save_tree

_DRAWS = 4096  # for quantiles without a closed form
_NUMBERS = 2**24  # in draws that are held at a time


class Guide(OwnParameters, AutoGuide):
    """Base class of all guides: an ``AutoGuide`` over one flat unconstrained vector u.

    The latents are w = T(u), with P numbers in u. A subclass defines

    - ``_create_parameters(start)``, which creates its parameters from an initial vector;
    - ``forward(*args)``, which makes a sample statement for each latent site;
    - ``sample_vectors(num_samples)``, ``log_density(vector, log_det)``, ``location()`` and
      ``variances()``, all over the vector u;
    - ``normal_marginals = True``, if every number of u has a Normal marginal with that location and
      variance, or is fixed; else quantiles come from draws, unless ``vector_quantiles(levels)``
      knows better.

    :param model: a Pyro program.
    :param init_loc_fn: a per-site initialization, one of Pyro's or ``init_to_network``.
    :param create_plates: see Pyro's autoguides; for programs with latents in subsampled plates.
    """

    layout: Layout | None
    normal_marginals = False
    # Draws that a step must take to train all of the guide: the number of an ensemble's members.
    num_members = 1
    # The ELBO's last step that no optimizer has read yet, a ``pyro_bdl.elbo.Step``.
    last_step: Any = None

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_network,
        create_plates: Callable | None = None,
    ) -> None:
        AutoGuide.__init__(self, start_at(init_loc_fn)(model), create_plates=create_plates)
        self.layout = None
        self._take_name()
        self._program_model = (model,)  # in a tuple, so that it is no submodule
        # The parameters' values, while ``reading`` or ``holding`` is active.
        self._values: dict[str, Any] | None = None
        self._detached = False
        self.subsampled: set[str] = set()
        self.told: set[str] = set()  # warnings about the program that are given once
        self._loaded: dict[str, Tensor] | None = None
        # A few rows of the first data, with which a program that reads a file is run.
        self.few_rows: Batch = (), {}

    @property
    def program_model(self) -> Callable:
        """The program as the user gave it."""
        return self._program_model[0]

    # Structure

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        """Return whether a statement of the first run is not a latent site; check observed
        sites."""
        if msg["type"] == "sample" and msg["is_observed"]:
            distribution_of_targets(msg)
        return prototype_hide_fn(msg)

    def prototype(self, *args: Any, **kwargs: Any) -> "Guide":
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
        refuse_sharded(modules_of(self.program_model))
        trace = trace_once(poutine.block(self.model, self._prototype_hide_fn), args, kwargs)
        program = Program.from_trace(self.model, trace, args, kwargs)
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
        self._create_parameters(start)
        try:
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
        without_arguments(trace)
        self.prototype_trace = trace
        with own_randomness():
            self.few_rows = few_rows(self.program_model, self.layout, start, (args, kwargs))

    def _create_parameters(self, start: Tensor) -> None:
        """Create the parameters.

        :param start: the initial unconstrained vector (P,).
        """
        raise NotImplementedError

    def _take_structure(self, source: "Guide") -> None:
        """Copy the layout of a guide for the same program, instead of ``prototype``."""
        self.layout = source.require_layout()
        self._rename()
        self.subsampled = source.subsampled
        self.told = source.told
        self.prototype_trace = source.prototype_trace
        self._prototype_frames = source._prototype_frames
        self.few_rows = source.few_rows

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

    def get_extra_state(self) -> Tensor:
        """The names, shapes and order of the program's sites, saved with the parameters in
        ``state_dict``.

        They are encoded as a tensor of bytes, so that the state holds tensors only.
        """
        text = json.dumps(None if self.layout is None else _sites_of(self.layout))
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state belongs to this program.

        :raises RuntimeError: if its sites have other names, shapes or another order.
        """
        theirs = json.loads(bytes(state.tolist()).decode())
        ours = _sites_of(self.require_layout())
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
            "options": self.options(),
            "state": dict(self.state_dict()),
        }

    @classmethod
    def restored(cls, model: Callable, saved: Mapping[str, Any], batch: Batch) -> "Guide":
        """Make a guide from a tree of ``saved``.

        :param batch: arguments of the program, of which a few rows are enough.
        """
        args, kwargs = batch
        guide = cls(model, **saved["options"]).prototype(*args, **kwargs)
        guide.load_state_dict(saved["state"])
        return guide

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

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read each parameter only once, by a ``pyro.param`` statement that optimizers see."""
        with self._pyro_context, self._reading_from({}):
            yield

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Read parameters from ``values``, so that the guide is a function of its parameters."""
        with self._reading_from(dict(values)):
            yield

    @contextmanager
    def _reading_from(self, values: dict[str, Tensor]) -> Iterator[None]:
        before, self._values = self._values, values
        try:
            yield
        finally:
            self._values = before

    @contextmanager
    def constant(self) -> Iterator[None]:
        """Read parameters as constants."""
        before, self._detached = self._detached, True
        try:
            yield
        finally:
            self._detached = before

    def _parameter(self, name: str) -> Tensor:
        value = self._attached(name)
        return value.detach() if self._detached else value

    def _attached(self, name: str) -> Tensor:
        if self._values is not None and name in self._values:
            return self._values[name]
        self.require_layout()
        self._follow_store(name)
        value = getattr(self, name)
        if self._values is not None:
            self._values[name] = value
        return value

    # Draws and summaries

    def site_distributions(self) -> dict[str, TorchDistribution] | None:
        """One distribution for each site, if the sites of q(w) are independent of each other; else
        None.

        Event dimensions count as batch dimensions here.
        """
        return None

    @property
    def has_density(self) -> bool:
        """True if ``log_density`` is a density over all latents; False if some or all latents are
        fixed."""
        return True

    @property
    def independent_draws(self) -> bool:
        """True if draws do not depend on how many are made at once; False for members of an
        ensemble, of which each comes once."""
        return True

    def sample_vectors(self, num_samples: int) -> Tensor:
        """Independent unconstrained draws (num_samples, P), differentiable in the parameters if
        possible."""
        raise NotImplementedError

    def note_step(self, step: Any) -> None:
        """Keep a step of an ELBO of this package for the optimizer that goes on from it."""
        self.last_step = step

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """log q(w), a scalar, at w = T(u).

        :param vector: u, (P,).
        :param log_det: log |det dT/du|.
        """
        raise NotImplementedError

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """KL(q || p) in nats for the prior p of ``run``, a scalar; by default an estimate at the
        run's draw."""
        return self.log_density(vector, log_det) - run.log_prior()

    def entropy(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """The entropy H(q) in nats, a scalar; by default the estimate -log q(w) at the draw."""
        return -self.log_density(vector, log_det)

    def location(self) -> Tensor:
        """The guide's center as an unconstrained vector (P,)."""
        raise NotImplementedError

    def variances(self) -> Tensor:
        """The marginal variances (P,) of the unconstrained vector."""
        raise NotImplementedError

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        """Marginal quantiles (levels, P) of the unconstrained vector.

        For a Normal marginal they are m + s Phi^-1(level), for a fixed number m; for others those
        of 4096 draws.
        """
        if not self.normal_marginals:
            with torch.no_grad():
                return empirical_quantiles(self.sample_vectors(_DRAWS), levels)
        scale = self.variances().sqrt()
        offsets = scale * torch.special.ndtri(levels)[:, None]
        return self.location() + torch.where(scale > 0, offsets, torch.zeros_like(offsets))

    def sample_latents(self, num_samples: int) -> dict[str, Tensor]:
        """Independent draws as a dict site -> (num_samples, *shape)."""
        layout = self.require_layout()
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
        layout = self.require_layout()
        like = self.location()
        levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device)
        if ((levels < 0) | (levels > 1)).any():
            raise ValueError(f"quantiles must lie between 0 and 1, got {levels.tolist()}")
        levels = levels.reshape(-1)
        found = layout.constrain(self.vector_quantiles(levels))[0]
        for name, latent in layout.latents.items():
            if not _is_increasing(latent.transform):
                draws = self._draws_of(latent)
                values = empirical_quantiles(draws.flatten(1), levels)
                found[name] = values.reshape(len(levels), *latent.shape)
        return found

    def _draws_of(self, latent: Latent) -> Tensor:
        """4096 draws of a site (4096, *shape), of which few whole vectors are held at a time."""
        layout, parts = self.require_layout(), []
        most = max(1, _NUMBERS // layout.size)
        for start in range(0, _DRAWS, most):
            vectors = self.sample_vectors(min(most, _DRAWS - start))
            parts.append(vectors[:, layout.slices[latent.name]].clone())
        draws = torch.cat(parts).reshape(_DRAWS, *latent.unconstrained_shape)
        return draws if latent.transform is None else latent.transform(draws)

    def _prototype_if_given(self, args: tuple, kwargs: dict) -> None:
        if args or kwargs:
            self.prototype(*args, **kwargs)

    def as_prior(self) -> GaussianPrior:
        """A copy of this posterior as the prior of a next task (continual learning).

        See ``model.update_prior`` and ``handlers.with_prior``.

        :raises TypeError: for a posterior that is not Gaussian in the unconstrained vector.
        """
        raise TypeError(
            f"{type(self).__name__} is not a Gaussian over the unconstrained latents and cannot be "
            "a prior: take AutoMeanField, AutoLowRank, AutoMatrixNormal or a Laplace approximation"
        )

    def _require_global(self) -> None:
        if self.subsampled:
            raise ValueError(
                f"the latent site '{min(self.subsampled)}' is in a subsampled plate and is "
                "about the data of this task alone: a prior for the next needs latents outside"
            )

    # Sample statements

    def _vectors_in_plates(self) -> Tensor:
        """Draw one vector for each cell of the plates around the guide, (*plates, P).

        Pyro's vectorized particles are such a plate.
        """
        sizes = {dim: frame.size for frame in get_plates() if (dim := frame.dim) is not None}
        shape = torch.Size([sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)])
        return self.sample_vectors(shape.numel()).reshape(*shape, -1)

    def _sites(
        self, args: tuple, kwargs: dict, *vectors: Tensor
    ) -> Iterator[tuple[Latent, list[Tensor]]]:
        """Yield each site with its slices of the vectors; the site's plates are open meanwhile.

        :param vectors: (P,), or (*plates, P) with the plates around the guide.
        """
        layout = self.require_layout()
        plates = self._create_plates(*args, **kwargs)
        parts = [layout.unflatten(vector) for vector in vectors]
        for name, latent in layout.latents.items():
            values = [_aligned(part[name], latent) for part in parts]
            if not latent.plates:
                yield latent, values
                continue
            with ExitStack() as stack:
                for plate in latent.plates:
                    indices = stack.enter_context(plates[plate])
                    if name in self.subsampled:
                        dim = plates[plate].dim - latent.unconstrained_event_dim
                        rows = indices.to(values[0].device)  # Pyro draws them on the CPU
                        values = [
                            v if v.shape[dim] == 1 else v.index_select(dim, rows) for v in values
                        ]
                yield latent, values

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
        digest = hashlib.sha256(json.dumps(_sites_of(self.layout)).encode()).hexdigest()
        return f"{kind}_{digest[:8]}"

    def _shared_on_copy(self) -> tuple[str, ...]:
        return "_model", "_program_model", "master"

    def __getstate__(self) -> dict[str, Any]:
        """The state without the model, which stays in the original."""
        state = dict(super(AutoGuide, self).__getstate__())
        state.update(_model=None, _program_model=None, master=None, last_step=None)
        return state


def _sites_of(layout: Layout) -> list[list[Any]]:
    """The sites' names and their constrained and unconstrained shapes, in the vector's order."""
    return [
        [name, list(latent.shape), list(latent.unconstrained_shape)]
        for name, latent in layout.latents.items()
    ]


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


def _aligned(value: Tensor, latent: Latent) -> Tensor:
    """Align an unconstrained value (*plates, *shape) with the plates around the guide.

    The batch dimensions of the shape replace the last plates, which have size one there.
    """
    outer = value.shape[: value.dim() - len(latent.unconstrained_shape)]
    own = len(latent.unconstrained_shape) - latent.unconstrained_event_dim
    if not outer or not own:
        return value
    if outer[-own:].numel() > 1:
        raise ValueError(
            f"a plate around the guide has a dimension in which the site '{latent.name}' has its "
            "own: give that plate a dim to the left of all plates of the program, and declare "
            "other dimensions of the site by .to_event(...)"
        )
    return value.reshape(*outer[:-own], *latent.unconstrained_shape)


def sample_site(latent: Latent, distribution: Any) -> Tensor:
    """Make a guide's sample statement at a latent's site."""
    return pyro.sample(
        latent.name, distribution.to_event(latent.event_dim - distribution.event_dim)
    )


def _is_increasing(transform: Any) -> bool:
    """Return whether a transform maps numbers one by one, in their order."""
    try:
        sign = 1 if transform is None else transform.sign
    except NotImplementedError:
        return False
    return bool((sign > 0).all()) if isinstance(sign, Tensor) else sign > 0


def empirical_quantiles(
    draws: Tensor, levels: Tensor, *, numbers_at_once: int = _NUMBERS
) -> Tensor:
    """Interpolated quantiles (levels, P) of draws (S, P), computed a few columns at a time.

    :param numbers_at_once: numbers that ``torch.quantile`` may hold; it refuses more than 2^24.
    """
    columns = max(1, numbers_at_once // (2 * len(draws)))
    return torch.cat([torch.quantile(part, levels, dim=0) for part in draws.split(columns, 1)], 1)


def without_arguments(trace: Any) -> None:
    """Remove the arguments of a run and what it returned from its trace, which is kept."""
    for name in {"_INPUT", "_RETURN"} & trace.nodes.keys():
        trace.remove_node(name)


def restored(model: Callable, saved: Mapping[str, Any], batch: Batch) -> Guide:
    """Make a guide from a tree of ``Guide.saved``.

    :raises ValueError: for a class of guides that is not imported.
    """
    return known_class(saved["class"], Guide).restored(model, saved, batch)
