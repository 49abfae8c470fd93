"""The program of a posterior in its file: its own numbers, a few rows of data, and what its
statements say there, by which another program is recognized."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn

from pyro_bdl.distributions.parameters import is_known, parameters_of
from pyro_bdl.program.batches import NOT_ON_SOME, Batch, has_rows, leading_size, select_rows
from pyro_bdl.program.check import without_handlers
from pyro_bdl.program.layout import describe_mismatch, shape_mismatches
from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.program.rows import differing_prior
from pyro_bdl.program.trace import Run, placeholder_for_observed, record
from pyro_bdl.utils.module_state import Modules, device_of, evaluation_mode
from pyro_bdl.utils.one_thread import OneThread
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.trees import tree_map_only

LOG_DENSITY = "log density"
_FACTOR = "factor (N / B, 1 / temperature)"
_LOAD_IT = (
    "load it with the prior, the noise and the num_data of the program that it was saved from"
)
FEW = 2  # rows of an example
_SLACK = 1e-2  # of numbers of another device or of half precision, which differ by rounding
_SLACKS = {torch.float32: 1e-3, torch.float64: 1e-6}  # of those of the same kind of device


def example_rows(
    model: Callable, layout: Any, vector: Tensor, batch: Batch, whole: Run | None = None
) -> Batch:
    """A copy of a batch's first rows, if the program runs on so few, with the priors that it has on
    the batch; else the batch itself.

    :param whole: the priors of a run on the batch at ``vector``, those that are to be compared.
    """
    try:
        few = first_rows(batch)
        if few is batch:
            return batch
        few = tree_map_only(Tensor, torch.clone, few)
        with torch.no_grad(), evaluation_mode(model):
            run = record(model, layout.constrain(vector)[0], *few, draw=placeholder_for_observed)
            run.log_likelihood()
    except NOT_ON_SOME:  # it needs all of its data, or they have no rows, as sparse tensors
        return batch
    needs_all = whole is not None and differing_prior(whole, run, whole.priors) is not None
    return batch if needs_all else few


def first_rows(batch: Batch) -> Batch:
    """A batch's first rows, or the batch itself where it has no more, or no rows."""
    count = leading_size(batch)
    if count <= FEW or not has_rows(batch, count):
        return batch
    return select_rows(batch, slice(FEW))


def described_at(program: Program, latents: Mapping[str, Tensor]) -> dict[str, Any]:
    """``described_program`` with a few rows of the program's arguments.

    :raises RuntimeError: for latents with other names or shapes than the program's.
    """
    check_sites(program, latents)
    point = {name: latents[name].detach().to(own.device) for name, own in program.latents.items()}
    batch = program.args, program.kwargs
    with suppress(*NOT_ON_SOME):
        few = first_rows(batch)
        if few is not batch:
            return described_program(program.model, few, point)
    return described_program(program.model, batch, point)


def described_program(
    model: Callable, batch: Batch, latents: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """A program as a tree of tensors, numbers and strings.

    It holds copies of the parameters and buffers of its modules and of the parameters that it
    declares by ``pyro.param``, the batch, and what ``statements`` says of each site.

    :param latents: the point of the statements, which the tree holds too; None to leave them out.
    """
    read, run, called = _run(model, batch, latents)
    modules = _outermost(called)
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    tree = {
        "states": [module.state_dict() for module in modules],
        "parameters": {n: value for n, (value, leaf) in read.items() if id(leaf) not in held},
        "batch": batch,
        "point": latents,
        "statements": {} if latents is None else statements(run),
        "device": next((value.device.type for value in (latents or {}).values()), "cpu"),
    }
    return tree_map_only(Tensor, lambda value: value.detach().to("cpu", copy=True), tree)


@contextmanager
def taking_up(model: Callable, tree: dict[str, Any]) -> Iterator[tuple[Program, dict[str, Any]]]:
    """Set a program's own numbers to those of a tree of ``described_program``.

    The context gives the program on the tree's batch, and the tree on the program's device. If it
    ends with an error, the program is as it was.

    :raises RuntimeError: if they do not fit, or the file holds those of other modules.
    """
    store, device = pyro.get_param_store(), _device(model, tree["batch"])
    tree = tree_map_only(Tensor, lambda value: value.to(device), tree)
    args, kwargs = tree["batch"]
    known = {name: value.detach().clone() for name, value in store.items()}
    with own_randomness(), evaluation_mode(model):  # it takes up the values of Pyro's store
        program = Program(model, *args, **kwargs)
    modules = _outermost(program.modules)
    before = [copy.deepcopy(module.state_dict()) for module in modules]
    try:
        _load(modules, tree["states"])
        for name, value in tree["parameters"].items():
            store[name] = value
        yield program, tree
    except BaseException:
        for module, state in zip(modules, before, strict=True):
            module.load_state_dict(state)
        for name in tree["parameters"].keys() & known.keys():
            store[name] = known[name]
        raise


def check_same(
    model: Callable,
    tree: Mapping[str, Any],
    latents: Mapping[str, Tensor],
    *,
    factors: bool = True,
    advice: str = _LOAD_IT,
) -> None:
    """Check that a program says the same as the one of a tree of ``described_program``.

    :param latents: the point of its statements.
    :param factors: whether the factors of the densities count: N / B and tempering.
    :param advice: what to do, at the end of the error.
    :raises RuntimeError: if a site is missing, or its density, scale or parameters differ.
    """
    now, before = statements(_run(model, tree["batch"], latents).run), tree["statements"]
    added = [name for name in now if name not in before and LOG_DENSITY in now[name]]
    for site in [*before, *added]:
        saved, here = before.get(site), now.get(site)
        if saved is None or here is None:
            where = "only in the program of the file" if here is None else "only in this one"
            raise RuntimeError(f"the posterior is of another program: the site '{site}' is {where}")
        scaled = (
            torch.equal(saved[_FACTOR].cpu(), here[_FACTOR].cpu()) if _FACTOR in saved else True
        )
        left_out = set() if factors else {_FACTOR} if scaled else {_FACTOR, LOG_DENSITY}
        for name, value in saved.items():
            if name in left_out:
                continue
            slack = _SLACK
            if isinstance(value, Tensor) and tree.get("device") == value.device.type:
                slack = _SLACKS.get(value.dtype, _SLACK)
            found = _difference(value, here.get(name), saved.get("scale", 1.0), slack)
            if found:
                raise RuntimeError(
                    f"the posterior is of another program: at the same weights and data the {name} "
                    f"of the site '{site}' {found} here: {advice}"
                )


def check_sites(program: Program, latents: Mapping[str, Tensor]) -> None:
    """Check that draws are of the latents of a program.

    :param latents: one draw.
    :raises RuntimeError: if they have other names or shapes.
    """
    theirs = {name: value.shape for name, value in latents.items()}
    ours = {name: latent.shape for name, latent in program.latents.items()}
    found = shape_mismatches(ours, theirs)
    if found:
        raise RuntimeError(
            f"the draws are of {describe_mismatch(ours, theirs)} ({found}): load them with the "
            "program that they are of"
        )


def statements(run: Run) -> dict[str, dict[str, Any]]:
    """For each site of a run its factor and log density, summed, in nats; for observed sites the
    parameters of their distributions too."""
    result: dict[str, dict[str, Any]] = {}
    for name, site in (run.priors | run.observed | run.factors).items():
        result[name] = {_FACTOR: torch.as_tensor(site.scale, device="cpu")}
        if site.value is not None:
            result[name][LOG_DENSITY] = site.log_prob().sum()
        if name in run.observed and is_known(site.distribution):
            result[name] |= parameters_of(site.distribution)
    return result


class _Reads(OneThread):
    """Handler that collects the parameters that a program declares."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, tuple[Tensor, Any]] = {}

    def _pyro_post_param(self, msg: Any) -> None:
        value = msg["value"]
        leaf = value.unconstrained() if hasattr(value, "unconstrained") else value
        self.values[msg["name"]] = value, leaf


class _Seen(NamedTuple):
    """The parameters that a program reads, each with its unconstrained tensor, its run, and the
    modules that it calls."""

    read: dict[str, tuple[Tensor, Any]]
    run: Run
    modules: Modules


@torch.no_grad()
def _run(model: Callable, batch: Batch, latents: Mapping[str, Tensor] | None) -> _Seen:
    draw = None if latents is None else placeholder_for_observed
    with evaluation_mode(model) as modules, own_randomness(), _Reads() as reads:
        run = record(model, latents or {}, *batch, draw=draw)
    return _Seen(reads.values, run, modules)


def _outermost(modules: Modules) -> list[nn.Module]:
    """Modules that are no parts of others among them."""
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in parts]


def _device(model: Callable, batch: Batch) -> torch.device:
    """The device of the first tensor of a program's modules; the CPU where they hold none."""
    modules = Modules(without_handlers(model))
    if not any(map(device_of, modules)):  # those that it calls, up to where it meets the wrong one
        with evaluation_mode(modules), own_randomness(), suppress(Exception):
            trace_once(model, *batch)
    devices = (device_of(module) for module in modules)
    return next((device for device in devices if device is not None), torch.device("cpu"))


def _load(modules: list[nn.Module], states: list[dict[str, Any]]) -> None:
    if len(modules) != len(states):
        raise RuntimeError(
            f"the posterior is of another program: it has {len(states)} modules in the file and "
            f"{len(modules)} here"
        )
    for module, state in zip(modules, states, strict=True):
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            found = _first_difference(module.state_dict(), state)
            if not found:
                raise
            raise RuntimeError(
                f"the posterior is of another program: {found}, in the state of "
                f"{type(module).__name__}: make the program as it was when the posterior was "
                "saved, update_prior included"
            ) from error


def _first_difference(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """The first entry of two states that only one of them has, or that has another shape; empty
    if there is none."""

    def shape(state: Mapping[str, Any], name: str) -> str:
        if name not in state:
            return "missing"
        value = state[name]
        return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "present"

    for name in {**saved, **here}:
        there, now = shape(saved, name), shape(here, name)
        if there != now:
            return f"'{name}' is {there} in the file and {now} here"
    return ""


def _difference(saved: Any, here: Any, scale: Any, slack: float) -> str:
    """What a number, or the first of a tensor of them, was and is; empty if all are the same up to
    rounding.

    :param scale: of the site's distribution, in which differences count.
    """
    first, second, size = (
        double(torch.as_tensor(value, device="cpu").detach())
        for value in (saved, torch.nan if here is None else here, scale)
    )
    units = first.abs().nan_to_num(0.0, 0.0, 0.0).max() + size.abs().max()
    limit = slack * float(units)
    if first.shape == second.shape:
        alike = (first == second) | first.isnan() | ((first - second).abs() <= limit)
        if bool(alike.all()):
            return ""
        first, second = first[~alike], second[~alike]
    return f"was {first.reshape(-1)[0]:.6g} and is {second.reshape(-1)[0]:.6g}"
