"""A Pyro program as a family of pure functions of its latents.

``Program`` runs the program once to find its latent and observed sites. From then on it offers
functions of the latents that survive ``torch.func.vmap``, ``grad``, ``jvp`` and ``vjp``,
``make_fx`` and ``torch.compile``. Everything else in the package is built on these.

The factor N / B of a minibatch comes from the plates around a site: ``Run.add`` reads it into
``Site.scale`` (with 1 / temperature) and ``Site.subsampling`` (alone), ``Site.log_prob`` multiplies
by the scale, and ``log_joint`` is the sum over sites of that.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_bdl.distributions.copies import is_improper
from pyro_bdl.distributions.parameters import parameters_of
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.check import (
    check_finite,
    check_module,
    explain,
    refuse_sparse,
    require_program,
    without_handlers,
)
from pyro_bdl.program.layout import Latent, Layout, transform_of_latent
from pyro_bdl.program.rows import check_repeated, check_rows
from pyro_bdl.program.supports import check_fixed_supports, check_support, feasible_value
from pyro_bdl.program.trace import (
    NOTHING_OBSERVED,
    RENAME,
    Run,
    Site,
    is_deterministic,
    is_imputed,
    placeholder_for_observed,
    record,
    sum_out_discrete,
    why_not_summed_out,
)
from pyro_bdl.program.vmap import RowMap
from pyro_bdl.utils.autograd import reaches, wants_gradients
from pyro_bdl.utils.module_state import (
    Modules,
    changed,
    evaluation_mode,
    preserved_buffers,
    watching_calls,
)
from pyro_bdl.utils.one_thread import Hidden, OneThread
from pyro_bdl.utils.random_state import own_randomness


class Program:
    """The pure functions of a Pyro program.

    Latents are dicts from site to a tensor in the site's support; a vector is their unconstrained
    image in R^P, site after site in the program's order. If a function takes ``*args, **kwargs``
    and none are given, the arguments of the construction are used, with the indices that its plates
    drew then; ``latents`` may hold other indices under a plate's name. All functions run the
    program in its modules' current mode (training or evaluation).

    Finite discrete latent sites are no latents here: ``discrete`` names them, and all functions sum
    them out exactly (``program/discrete``). Nor is what ``pyro.sample(..., obs=y, obs_mask=seen)``
    leaves unobserved, ``name_unobserved``, if no statement after it uses its value: it integrates
    to one and is drawn in predictions. If one does (a missing input), it is a latent.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=1.0)
        >>> program = bdl.Program(model, x, y)
        >>> program.size, list(program.latents)
        (2, ['weight', 'bias'])
        >>> torch.func.grad(program.log_density)(torch.tensor([2.0, 0.0]))  # of log p(w, y)
        tensor([-2.,  0.])

    :param model: any Pyro program.
    :param args: the arguments of one run, including the targets.
    :raises UnsupportedProgramError: for a discrete latent site that cannot be summed out, a support
        that depends on other latents, a sequential plate, or weights sampled inside a plate.
    :raises ValueError: for targets outside the supports of their distributions.
    """

    layout: Layout

    def __init__(self, model: Callable, *args: Any, **kwargs: Any) -> None:
        self._read(model, trace_once(model, args, kwargs), args, kwargs)
        if self.discrete and not self.observed and not self.factors:
            raise UnsupportedProgramError(
                f"the site '{self.discrete[0]}' is discrete and has no value, and nothing is "
                "observed: pass the targets to the program, so that a sample statement gets obs=..."
            )

    @classmethod
    def from_run(cls, model: Callable, first: "FirstRun", args: tuple, kwargs: dict) -> "Program":
        """Make the program from the model's first run."""
        program = cls.__new__(cls)
        program._read(model, first, args, kwargs)
        return program

    @classmethod
    def with_run(
        cls,
        model: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> "tuple[Program, Run]":
        """The program, and its statements at ``initial``, from one run; discrete sites are summed
        out in a second one.

        :param values: of latents, as in ``trace_once``.
        """
        program = cls.__new__(cls)
        run = program._read(model, trace_once(model, args, kwargs, values=values), args, kwargs)
        return program, program.run(program.initial) if program.discrete else run

    def _read(self, model: Callable, first: "FirstRun", args: tuple, kwargs: dict) -> Run:
        self.model, self.args, self.kwargs = model, args, kwargs
        trace, self.modules = first
        run = statements(trace)
        sizes = ((name, trace.nodes[name]["fn"].size) for name in run.subsamples)
        self.plates = {name: (size, len(run.subsamples[name])) for name, size in sizes}
        latents = [name for name in run.latents if _is_continuous(name, trace.nodes[name])]
        discrete = [name for name in run.latents if name not in latents]
        check_support(run)
        self._subsamples = run.subsamples
        self.observed, self.discrete = tuple(run.observed), tuple(discrete)
        self.deterministic = tuple(run.deterministic)
        self.factors = tuple(name for name, site in run.factors.items() if _is_factor(site))
        values = [site.value for site in (*run.latents.values(), *run.observed.values())]
        device = _device([*values, *run.deterministic.values(), *run.subsamples.values()])
        self.initial = {name: run.latents[name].value.detach().to(device) for name in latents}
        self.layout = Layout(
            [_read_latent(name, trace.nodes[name], self.initial[name]) for name in latents]
        )
        check_fixed_supports(self)
        return run

    # Latents and vectors

    @property
    def latents(self) -> dict[str, Latent]:
        """The latent sites in the program's order."""
        return self.layout.latents

    @property
    def size(self) -> int:
        """P, the number of unconstrained numbers of all latents."""
        return self.layout.size

    @property
    def slices(self) -> dict[str, slice]:
        """The index range of each latent site in the vector."""
        return self.layout.slices

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Unconstrained values (..., *shape) as a vector (..., P)."""
        return self.layout.flatten(values)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector (..., P) as unconstrained values (..., *shape)."""
        return self.layout.unflatten(vector)

    def constrain(self, vector: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A vector u (..., P) as latents T(u), and log |det dT/du| of shape (...)."""
        return self.layout.constrain(vector)

    def unconstrain(self, latents: Mapping[str, Tensor]) -> Tensor:
        """Latents (..., *shape) as the vector (..., P) that maps to them."""
        return self.layout.unconstrain(latents)

    # Densities

    def run(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Run:
        """Run the program at ``latents``; observed sites without targets stay without a value."""
        if not args and not kwargs:
            args, kwargs = self.args, self.kwargs
            latents = {**self._subsamples, **latents}
        return record(self.model, latents, args, kwargs, draw=self._open)

    def log_prior(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """log p(w) in nats with the terms of ``priors.factor``, a scalar; terms in a subsampled
        plate are scaled."""
        return _as_tensor(self.run(latents, *args, **kwargs).log_prior(), latents)

    def observations(
        self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Site]:
        """For each observed site its distribution p(y | w, x), value, scale N/B and mask."""
        return self.run(latents, *args, **kwargs).observed

    def log_likelihood(
        self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """For each observed site log p(y_n | w, x_n) per datum: masked entries 0, not scaled.

        Discrete sites are summed out for each datum where they stand in its plate. A discrete site
        outside of it leaves one term for all data of the site; sites that share discrete sites, as
        in a hidden Markov chain, have terms log p(y_t | y_1, ..., y_{t-1}, w). In any case the
        terms add up to log p(y | w).
        """
        observed = self.run(latents, *args, **kwargs).observed
        return {
            name: site.unscaled_log_prob()
            for name, site in observed.items()
            if site.value is not None
        }

    def log_joint(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """log p(w) + (N/B) sum_n log p(y_n | w, x_n) + factors in nats, a scalar; tempered under
        ``temper``."""
        run = self.run(latents, *args, **kwargs)
        return _as_tensor(run.log_prior() + run.log_likelihood(), latents)

    def log_density(self, vector: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """log p(T(u), y) + log |det dT/du| in nats at an unconstrained vector u (P,), a scalar."""
        latents, log_det = self.constrain(vector)
        return self.log_joint(latents, *args, **kwargs) + log_det

    def log_density_terms(self, vector: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """``log_density`` without the log determinant, as one scalar per site."""
        run = self.run(self.constrain(vector)[0], *args, **kwargs)
        sites = run.priors | run.observed | run.factors
        return {
            name: site.log_prob().sum() for name, site in sites.items() if site.value is not None
        }

    def responsibilities(
        self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """p(z_n = k | y, w) for each discrete site, (*plates, K), k in the order of its support.

        Exact, and differentiable in the latents; the data of all observed sites count.
        """
        discrete = self.run(latents, *args, **kwargs).discrete
        return {} if discrete is None else discrete.responsibilities()

    def check(self, *, rows: str = "together") -> None:
        """Check the contract of a program on its arguments, as :func:`check_program` does.

        :param rows: "alone" to check too that each row of the arguments alone is what it is beside
            the others, as curvature and estimators with noise for every datum need it.
        """
        latents = {**self._subsamples, **self.initial}
        check_program(self.model, latents, self.args, self.kwargs)
        if rows == "alone":
            check_rows(
                self.model,
                latents,
                (self.args, self.kwargs),
                RowMap(),
                subject="the method",
                advice='it is for methods that take whole batches (rows="together")',
            )

    def require_observed(self) -> None:
        """Check that the program has observed data.

        :raises UnsupportedProgramError: if it has none.
        """
        if not self.observed and not self.factors:
            raise UnsupportedProgramError(NOTHING_OBSERVED)

    def require_all_data(self, subject: str) -> None:
        """Check that the plates hold all data that they state.

        :param subject: what needs them, for the error.
        :raises ValueError: for a plate with less data than its size.
        """
        for name, (size, present) in self.plates.items():
            if present < size:
                raise ValueError(
                    f"{subject} needs all data in one call, without subsampling: the plate "
                    f"'{name}' has size {size} but holds {present}"
                )

    def to_jax(self, *args: Any, **kwargs: Any) -> Any:
        """The log density as a JAX function of u (P,) and of the data, with its gradient and T(u).

        See :class:`pyro_bdl.program.jax_density.JaxDensity`.

        :param args: the program's arguments; by default those of the construction.
        :raises MissingOperatorError: if an operator has no translation to JAX.
        """
        from pyro_bdl.program.jax_density import JaxDensity

        if not args and not kwargs:
            return JaxDensity(self)
        return JaxDensity(Program(self.model, *args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The log density as a graph of torch's operators, for many evaluations: a function of u
        (P,) whose gradient can be taken once.

        See :class:`pyro_bdl.tracing.compiled.CompiledDensity`.

        :param args: the program's arguments; by default those of the construction.
        """
        from pyro_bdl.tracing.compiled import CompiledDensity

        program = Program(self.model, *args, **kwargs) if args or kwargs else self
        return CompiledDensity(program.log_density, program.modules)

    def _open(self, msg: Any) -> None:
        if msg["name"] in self.latents:
            raise KeyError(f"no value for the latent site '{msg['name']}'")
        if msg["name"] in self.discrete:
            sum_out_discrete(msg)
        else:
            placeholder_for_observed(msg)


def check_program(
    model: Callable,
    latents: Mapping[str, Tensor],
    args: tuple,
    kwargs: Mapping[str, Any],
    first: Run | None = None,
) -> Run:
    """Check the contract of a program (``program/check.py``) by two runs at some latents.

    Random states are as before on exit; modules are in evaluation mode meanwhile.

    :param first: one of these runs, where it is known.
    :returns: the other run, with gradients if a latent requires them.
    :raises ValueError: for arguments that are not finite, or targets outside the supports of their
        distributions.
    :raises ArgumentError: for sparse tensors.
    :raises UnsupportedProgramError: if nothing is observed, or the two runs differ, as with a
        latent that ``poutine.block`` hides.
    """
    refuse_sparse(model, args, kwargs)
    check_finite(model, args, kwargs)
    with own_randomness(), evaluation_mode(without_handlers(model)):
        if first is None:
            with torch.no_grad():
                first = record(model, latents, args, kwargs, draw=placeholder_for_observed)
        check_support(first)
        observed = [site for site in first.observed.values() if site.value is not None]
        if not observed and not any(map(_is_factor, first.factors.values())):
            raise UnsupportedProgramError(NOTHING_OBSERVED)
        with torch.set_grad_enabled(wants_gradients(latents)):
            second = record(
                model, {**first.subsamples, **latents}, args, kwargs, draw=placeholder_for_observed
            )
        with torch.no_grad():
            check_repeated(first, second)
    return second


def _as_drawn(value: Tensor, distribution: Any) -> Tensor:
    """A value of a latent in the dtype of its distribution's parameters, by which it is drawn."""
    floats = [v for v in parameters_of(distribution).values() if v.is_floating_point()]
    if not floats or distribution.support.is_discrete:
        return value
    return value.to(floats[0].dtype)


class _FirstRun(OneThread):
    """Handler of the first run: names must differ, and latents with an improper prior, which
    cannot be sampled, get a value.

    What ``obs_mask`` leaves unobserved is drawn, and counts as imputed if the densities of no other
    statements depend on it, which autograd tells; ``used`` are the names of those that are used.

    :param values: of latents, site -> value; those that do not fit are left to the prior.
    :param used: names that are known to be used.
    """

    def __init__(self, values: Mapping[str, Any], used: Collection[str] = ()) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.values, self.used = values, set(used)
        self.imputed: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            raise UnsupportedProgramError(f"two statements are named '{msg['name']}': {RENAME}")
        self.names.add(msg["name"])
        value = self.values.get(msg["name"])
        if msg["value"] is None and isinstance(value, Tensor) and value.shape == msg["fn"].shape():
            msg["value"] = _as_drawn(value, msg["fn"])
        if msg["value"] is None and is_improper(msg["fn"]):
            msg["value"] = feasible_value(msg["fn"], radius=2.0)
        if msg["is_observed"] or msg["name"] in self.used or site_is_subsample(msg):
            return
        if is_imputed(msg, self.names):
            msg["value"] = msg["fn"].sample()
            msg["is_observed"], msg["infer"]["_imputed"] = True, True
            self.imputed[msg["name"]] = msg["value"]
            if msg["value"].is_floating_point():
                torch.set_grad_enabled(True)  # until the end of the run
                msg["value"].requires_grad_()

    def _pyro_post_sample(self, msg: Any) -> None:
        infer, plate = msg["infer"], site_is_subsample(msg)
        if not self.imputed or plate or infer.get("_imputed") or infer.get("_deterministic"):
            return
        density = None if is_improper(msg["fn"]) else msg["fn"].log_prob(msg["value"]).sum()
        for name, value in self.imputed.items():
            if not value.requires_grad or (density is not None and reaches(density, [value])):
                self.used.add(name)


class FirstRun(NamedTuple):
    """A program's first run.

    :param trace: its Pyro trace.
    :param modules: the program, if it is a module, and the modules that it called, with their
        parts; without networks whose parameters it reads and that it does not call.
    """

    trace: Any
    modules: Modules


def trace_once(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    hide: Callable[[Any], bool] = lambda msg: False,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> FirstRun:
    """Run a program once, without a change of buffers (BatchNorm statistics).

    A second run follows where what ``obs_mask`` leaves unobserved is used by later statements.

    :param hide: whether a statement is left out of the trace.
    :param values: of latents, site -> value; the others are drawn from the prior.
    """
    require_program(model)
    first, program = _FirstRun(values), without_handlers(model)
    with (
        changed(lambda module, args: check_module(module), program) as modules,
        preserved_buffers(program),
    ):
        try:
            while True:
                tracer = poutine.trace()  # as a function's it ends each error in a table of shapes
                with Hidden(), torch.no_grad(), watching_calls(first=True), tracer:
                    poutine.block(first(model), hide)(*args, **kwargs)
                trace = tracer.trace
                if first.used.isdisjoint(first.imputed):
                    return FirstRun(_without_graph(trace) if first.imputed else trace, modules)
                first = _FirstRun(values, first.used)
        except Exception as error:
            explain(error, model, args, kwargs)
            for name, plate in _sites_in_plates(tracer.trace).items():
                error.add_note(
                    f"if '{name}' are weights: they are sampled inside the plate '{plate}', which "
                    "gives every datum its own copy: call the network outside the plate and "
                    "observe inside it"
                )
            raise


def statements(trace: Any) -> Run:
    """The sample statements of a trace, by kind; what no statement observes is a latent."""
    run = Run()
    for name, node in trace.nodes.items():
        if node["type"] == "sample" and site_is_subsample(node):
            run.subsamples[name] = node["value"]
        elif node["type"] == "sample":
            run.add(node)
    return run


def _without_graph(trace: Any) -> Any:
    for node in trace.nodes.values():
        if isinstance(node.get("value"), Tensor):
            node["value"] = node["value"].detach()
    return trace


def _is_factor(site: Site) -> bool:
    """Return whether a factor is one, and not the Delta of a reparameterization without density."""
    return isinstance(site.distribution, Unit) or bool(site.unscaled_log_prob().any())


def _sites_in_plates(trace: Any) -> dict[str, str]:
    """The latent sites with event dimensions in a plate, with the plate's name."""
    return {
        name: node["cond_indep_stack"][0].name
        for name, node in trace.nodes.items()
        if node["type"] == "sample"
        and not node["is_observed"]
        and not site_is_subsample(node)
        and node["fn"].event_dim >= 1
        and node["cond_indep_stack"]
    }


def _device(values: Iterable[Tensor]) -> torch.device:
    """The device of all latents: an accelerator if the value of any site is on one.

    Priors of plain numbers, such as Normal(0.0, 1.0), draw on the CPU.
    """
    devices = (value.device for value in values)
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _is_continuous(name: str, node: Any) -> bool:
    """Return whether a latent is continuous; check that it can be one, or be summed out."""
    shape = node["fn"].batch_shape
    sizes = {frame.dim: frame.size for frame in node["cond_indep_stack"]}
    for handler in ("mask", "scale"):
        cells = node[handler].shape if isinstance(node[handler], Tensor) else ()
        for dim in range(-len(cells), 0):
            size = shape[dim] if -dim <= len(shape) else 1
            if cells[dim] > 1 and max(size, sizes.get(dim, 1)) == 1:
                raise UnsupportedProgramError(
                    f"the poutine.{handler} around the site '{name}' is a tensor with more cells "
                    "than the plates of the site, which would count it several times: put it "
                    "around the statements in those plates only"
                )
    reason = why_not_summed_out(node) if node["fn"].support.is_discrete else None
    if reason is not None:
        raise UnsupportedProgramError(
            f"the discrete latent site '{name}' ({type(node['fn']).__name__}) cannot be summed "
            f"out, since {reason}; or observe it (were the targets passed?)"
        )
    return not node["fn"].support.is_discrete


def _read_latent(name: str, node: Any, value: Tensor) -> Latent:
    distribution = node["fn"]
    plates = []
    for frame in node["cond_indep_stack"]:
        if not frame.vectorized:
            raise UnsupportedProgramError(
                f"the latent site '{name}' is in the sequential plate '{frame.name}': use the "
                "plate as a context manager (with pyro.plate(...)) instead of a loop"
            )
        plates.append(frame.name)
    transform = transform_of_latent(name, distribution)
    with torch.no_grad():
        unconstrained = value if transform is None else transform.inv(value)
    return Latent(
        name=name,
        shape=value.shape,
        unconstrained_shape=unconstrained.shape,
        event_dim=distribution.event_dim,
        support=distribution.support,
        transform=transform,
        plates=tuple(plates),
        dtype=value.dtype,
        device=value.device,
    )


def _as_tensor(value: Tensor | float, latents: Mapping[str, Tensor]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    like = next(iter(latents.values()), torch.empty(0, device="cpu"))
    return like.new_tensor(value)


class SiteShape(NamedTuple):
    """The value of a site in one run.

    :param shape: its shape.
    :param is_latent: the site is neither observed nor deterministic.
    """

    shape: torch.Size
    is_latent: bool


def site_shapes(model: Callable, args: tuple, kwargs: dict) -> dict[str, SiteShape]:
    """The shapes of a program's sites in one run; the indices of plates are no sites."""
    return {
        name: SiteShape(node["value"].shape, not node["is_observed"] and not is_deterministic(node))
        for name, node in trace_once(model, args, kwargs).trace.nodes.items()
        if node["type"] == "sample" and not site_is_subsample(node)
    }
