"""Memory of training, Laplace approximations, MCMC and prediction, before it is spent."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl import models
from pyro_bdl.curvature import structures
from pyro_bdl.curvature.structures.kron.outer_products import memory_of_decomposition
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.kl import LARGE
from pyro_bdl.nn import bayesianize
from pyro_bdl.predictive.sampled import DRAWS_AT_ONCE, MEMORY
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.program import Program
from pyro_bdl.training.descent import rows_per_step
from pyro_bdl.training.svi import train
from pyro_bdl.utils.memory import LARGEST_KEPT, Allocations, LiveMemory, available_memory
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.tables import Column, number, to_text
from pyro_bdl.utils.validation import whole_number

_IN_JAX = ("nuts", "hmc", "mclmc", "mams")
_KERNELS = (*_IN_JAX, "sgld", "psgld", "sghmc", "sgnht", "smile")
_KRONECKER = ("kron", "ekfac")
_OF_A_CHAIN = 12  # vectors of P numbers in the state of a chain and of one step
_BLOCK = 64  # iterations in a buffer of ``mcmc.jax.chains``
_PIECE, _PER_WEIGHT = 24 * 2**20, 8  # of a curvature's pass over the data, see curvature.chunking
_LARGE_WIDTH = 512  # of a small network with large sites
_FEW = 4  # rows with which the program is run


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of memory, by parts.

    :param what: the name of what needs it.
    :param parts: bytes by part; they are needed at the same time.
    :param free: bytes that are free on the device, if known.
    :param fitting: what would fit in the free memory in its place.
    """

    what: str
    parts: Mapping[str, int]
    free: int | None = None
    fitting: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        """The sum of the parts in bytes, the estimated peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Return whether the total is free; True if the free memory is not known."""
        return self.free is None or self.total <= self.free

    def require(self) -> None:
        """Refuse what does not fit.

        :raises MemoryError: if more is needed than is free; the error names what would fit.
        """
        if not self.fits:
            advice = " or ".join(self.fitting) or "a smaller network"
            raise MemoryError(
                f"{self.what} needs about {_size(self.total)}, {_size(self.free or 0)} are free: "
                f"use {advice}"
            )

    def __str__(self) -> str:
        rows: list[dict[str, object]] = [
            {"part": name, "size": _size(size)} for name, size in self.parts.items()
        ]
        rows.append({"part": "total", "size": _size(self.total)})
        if self.free is not None:
            rows.append({"part": "free", "size": _size(self.free)})
        columns = [Column("part", self.what, style="text"), Column("size", "memory", style="text")]
        said = "" if self.fits else f"\nIt does not fit; what fits: {', '.join(self.fitting)}"
        return to_text(rows, columns) + said

    __repr__ = __str__


def estimate_memory(
    model: Callable,
    posterior: Guide | type[Guide] | str,
    x: Any,
    y: Any,
    *,
    batch_size: int | None = None,
    num_particles: int = 1,
    num_samples: int | None = None,
    num_chains: int = 4,
) -> MemoryEstimate:
    """Estimate the peak memory of a posterior beyond that of the program and the data.

    Numbers that grow with the weights are measured on a small network: the same guide takes two
    steps there with Adam, or the same structure is fitted, while the bytes of all live tensors are
    counted. They are scaled by the number of latents P; of "full" by P^2, of "kron" and "ekfac" by
    the sizes of their factors. Numbers that grow with the data come from a run of the program
    itself over four rows at one draw of the prior, the only memory that the estimate takes.
    Compiled ELBOs and other optimizers than Adam take more or less.

    :param model: a program ``model(x, y)``.
    :param posterior: a guide, trained or not, or its class, for ``training.train``; the name of a
        curvature structure, for a Laplace approximation at a trained MAP; "nuts", "hmc", "mclmc",
        "mams" or an algorithm of ``mcmc.sgmcmc``, for chains on one device; "prediction".
    :param x: ``(N, ...)``, the inputs; or a dict of such tensors.
    :param y: ``(N, ...)``, the targets; for predictions any of their kind.
    :param batch_size: rows in each step of training, by default as in ``training.train``.
    :param num_particles: draws of the guide in each step.
    :param num_samples: draws of each chain (by default 1000), or of a prediction (100).
    :param num_chains: Markov chains.
    :raises ValueError: for an unknown name.
    :raises TypeError: for another posterior.
    """
    rows = leading_size(x)
    program, per_row = _of_program(model, x, y)
    item = _item_size(program)
    size, free = program.size, available_memory(device_of_rows(x))
    if isinstance(posterior, type) and issubclass(posterior, Guide):
        posterior = posterior(model)
    if isinstance(posterior, Guide):
        some = rows_per_step(model, rows, batch_size)
        parts = _of_training(posterior, program, item, num_particles)
        parts["activations"] = int(some * num_particles * per_row)
        what = f"training {type(posterior).__name__} over {size:,} latents"
    elif not isinstance(posterior, str):
        kind = type(posterior).__name__
        raise TypeError(f"posterior must be a guide, its class or a name, got {kind}")
    elif posterior in structures.STRUCTURES:
        parts = _of_structure(posterior, program, item)
        piece = max(_PIECE, _PER_WEIGHT * size * item)
        parts["activations"] = int(min(rows * 2 * per_row, piece))
        what = f'structure="{posterior}" over {size:,} latents'
    elif posterior in _KERNELS:
        chains, draws = whole_number(num_chains, "num_chains"), num_samples or 1000
        seen = rows if batch_size is None else min(rows, batch_size)
        held = chains * whole_number(draws, "num_samples") * size * item
        parts = {
            "draws": held,
            "their blocks, while they are joined": held,
            "iterations of a block": chains * _BLOCK * size * item if posterior in _IN_JAX else 0,
            "chains": chains * _OF_A_CHAIN * size * item,
            "activations": int(2 * chains * seen * per_row),
        }
        what = f"{chains} chains of {draws} draws by {posterior} over {size:,} latents"
    elif posterior == "prediction":
        draws = whole_number(num_samples or 100, "num_samples")
        outputs = _outputs(program, x) * rows
        at_once = min(draws, max(1, MEMORY // max(1, int(rows * per_row + size * item))))
        held = min(draws, max(1, DRAWS_AT_ONCE // size)) * size * item
        parts = {
            "draws of the weights": held,
            "the next part of them": held if held < draws * size * item else 0,
            "results": draws * outputs * item,
            "activations": int(at_once * rows * per_row),
        }
        parts["noise and scales"] = max(0, held - parts["activations"]) + 2 * size * item
        what = f"{draws} predictions at {rows:,} rows"
    else:
        known = ", ".join((*structures.STRUCTURES, *_KERNELS, "prediction"))
        raise ValueError(f"unknown posterior {posterior!r} (there are guides, {known})")
    if isinstance(posterior, Guide) or posterior in structures.STRUCTURES:
        parts["room between blocks"] = _room(program, item, device_of_rows(x))
    estimate = MemoryEstimate(what, parts, free)
    if estimate.fits:
        return estimate
    fitting = _fitting(posterior, program, item, parts, estimate)
    return MemoryEstimate(what, parts, free, fitting)


def _of_program(model: Callable, x: Any, y: Any) -> tuple[Program, float]:
    """The program over a few rows, and the bytes that it allocates for each further row."""
    found = []
    count = min(2 * _FEW, leading_size(x))
    modules = [model] if isinstance(model, nn.Module) else []
    for rows in (count, max(1, count // 2)):
        index = torch.arange(rows, device=device_of_rows(x))
        args = (taken(x, index), taken(y, index))
        with own_randomness(), torch.no_grad(), preserved_buffers(*modules):
            program = Program(model, *args)
            with Allocations() as allocations:
                program.run(program.initial, *args)
        found.append((rows, allocations.bytes))
    (more, large), (fewer, small) = found
    slope = (large - small) / (more - fewer) if more > fewer else large / more
    return program, max(0.0, slope)


def _item_size(program: Program) -> int:
    return max((value.element_size() for value in program.initial.values()), default=4)


def _room(program: Program, item: int, device: torch.device) -> int:
    """Bytes of freed blocks that the C library keeps on the CPU.

    About two of the largest tensor, as measured (``benchmarks/memory.py``), where blocks of its
    size are not returned at once.
    """
    largest = item * max((latent.size for latent in program.latents.values()), default=0)
    return 2 * largest if device.type == "cpu" and largest <= LARGEST_KEPT else 0


def _outputs(program: Program, x: Any) -> int:
    """Numbers that a prediction holds for each row: observed and deterministic sites."""
    run = program.run(program.initial, *program.args)
    rows = leading_size(program.args[0])
    values = run.deterministic.values()
    held = sum(value.numel() for value in values if isinstance(value, Tensor))
    for site in run.observed.values():
        held += (site.distribution.batch_shape + site.distribution.event_shape).numel()
    return max(1, held // rows)


def _of_training(guide: Guide, program: Program, item: int, num_particles: int) -> dict[str, int]:
    """Memory of two steps of a guide of the same kind on a small network, scaled by P."""
    largest = max((latent.size for latent in program.latents.values()), default=0)
    # large sites take less for each number, see ``guides.large_draw``
    model, x, y = _small_network(64 if largest <= LARGE else _LARGE_WIDTH, item)
    with own_randomness(), LiveMemory() as live:
        try:
            small: Any = type(guide)(model, **guide.options()).prototype(x, y)
        except (KeyError, RuntimeError, TypeError, ValueError):  # options that name sites
            small = type(guide)(model).prototype(x, y)
        train(model, small, x, y, steps=2, num_particles=num_particles)
        held = sum(p.numel() * p.element_size() for p in small.parameters())
    share = program.size / small.require_layout().size
    parts = {"parameters": held, "gradients": held, "optimizer": 2 * held}
    parts["draws, noise and their gradients"] = max(0, live.peak - 4 * held)
    return {name: int(value * share) for name, value in parts.items()}


def _of_structure(name: str, program: Program, item: int) -> dict[str, int]:
    """Memory of a structure on a small network, scaled to the size of this program's."""
    model, x, y = _small_network(16 if name == "full" else 64, item)
    guide = AutoLaplaceGGN(model, structure=name).prototype(x, y)
    small = Program(model, x, y)
    with warnings.catch_warnings(), own_randomness(), LiveMemory() as live:
        warnings.simplefilter("ignore", BdlWarning)  # the small network is not trained
        guide.laplace_approximation((x, y), progress=False)
    parts = {"curvature": int(live.peak * _unit(name, program) / _unit(name, small))}
    if name in _KRONECKER:
        sides = [side for each in program.latents.values() for side in _sides(each.shape)]
        parts["largest decomposition"] = memory_of_decomposition(max(sides, default=0), item)
    return parts


def _unit(name: str, program: Program) -> int:
    """The number by which a structure's memory grows."""
    if name == "full":
        return program.size**2
    if name in _KRONECKER:
        sides = [side for each in program.latents.values() for side in _sides(each.shape)]
        return program.size + sum(side**2 for side in sides)
    return program.size


def _sides(shape: torch.Size) -> tuple[int, ...]:
    """The sizes of the Kronecker factors of a latent."""
    return () if len(shape) < 2 else (shape[0], shape[1:].numel())


def _small_network(hidden: int, item: int) -> tuple[nn.Module, Tensor, Tensor]:
    dtype = torch.float64 if item == 8 else torch.float32
    net = nn.Sequential(
        nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    ).to("cpu", dtype)
    x = torch.linspace(-1.0, 1.0, 2 * 8, dtype=dtype, device="cpu").reshape(2, 8)
    return models.Regression(bayesianize(net), noise=0.5, num_data=2), x, x[:, :1]


def _fitting(
    posterior: Guide | str,
    program: Program,
    item: int,
    parts: Mapping[str, int],
    estimate: MemoryEstimate,
) -> tuple[str, ...]:
    """The alternatives that fit in the free memory where an estimate does not."""
    free = estimate.free or 0
    rest = estimate.total - parts["activations"]
    if isinstance(posterior, Guide):
        if rest < free:
            share = (free - rest) / parts["activations"]
            return (f"batch_size of at most {share:.2g} times the rows",)
        point = _of_training(AutoMAP(program.model), program, item, 1)
        return ("AutoMAP",) if sum(point.values()) < free else ()
    if posterior in structures.STRUCTURES:
        others = ("full", "kron", "low_rank", "diag")
        there = [
            name
            for name in others
            if name != posterior and sum(_of_structure(name, program, item).values()) < free
        ]
        return (*(f'structure="{name}"' for name in there), 'subset="last-layer"')
    share = free / estimate.total
    return (f"at most {share:.2g} times the draws",)


def _size(count: int) -> str:
    """Bytes as text."""
    power = min(4, int(math.log(max(1, count), 1024)))
    return f"{number(count / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
