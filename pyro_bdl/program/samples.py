"""``Samples``: draws of one or several Markov chains."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.infer.mcmc.api import MCMC
from torch import Tensor

from pyro_bdl.errors import warn
from pyro_bdl.program.program import Program
from pyro_bdl.program.saved import described_at
from pyro_bdl.utils.tensor_file import load_tree, save_tree
from pyro_bdl.utils.validation import require, require_tensors, whole_number

SAVED_KIND = "file of samples"


@dataclass(frozen=True)
class Samples:
    """Draws of Markov chains: ``samples.latents["w"]`` by chain, ``samples.flat()["w"]`` in a row.

    :param latents: site -> (chains, draws, *shape), in the site's support.
    :param stats: name -> (chains, draws): ``potential_energy`` and ``energy`` (nats), ``num_steps``
        (gradient evaluations), ``accept_prob``, ``step_size``, ``diverging``.
    :param info: how the draws were made (kernel, backend, seed, seconds, ...); JSON types only.
    :param resume: number of draws -> ``Samples`` of that many more, from the end of the chains; not
        saved. None if they cannot go on from there.
    :param program: what ``save`` writes of the draws' program, as it was when they were made: its
        own parameters and buffers, two rows of its data and its densities there. None where it is
        unknown.
    """

    latents: Mapping[str, Tensor]
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    resume: Callable[[int], "Samples"] | None = field(default=None, repr=False, compare=False)
    program: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle, without the way to go on, as in a file."""
        return {**vars(self), "resume": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Samples":
        values = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return Samples(**values)

    def __post_init__(self) -> None:
        require(self.latents, Mapping, "latents must be a dict from sites to draws")
        require_tensors(**self.latents)
        leading = {name: tuple(value.shape[:2]) for name, value in self.latents.items()}
        if not leading:
            raise ValueError("Samples needs at least one latent site")
        if len(set(leading.values())) != 1 or any(len(shape) < 2 for shape in leading.values()):
            raise ValueError(f"all latents must begin with the same (chains, draws), got {leading}")

    @property
    def num_chains(self) -> int:
        return next(iter(self.latents.values())).shape[0]

    @property
    def num_draws(self) -> int:
        """Draws per chain."""
        return next(iter(self.latents.values())).shape[1]

    def flat(self, num_samples: int | None = None) -> dict[str, Tensor]:
        """All draws, chain after chain, site -> (chains * draws, *shape).

        :param num_samples: return only this many draws, evenly spaced.
        """
        flat = {name: value.flatten(0, 1) for name, value in self.latents.items()}
        total = self.num_chains * self.num_draws
        if num_samples is None or num_samples == total:
            return flat
        num_samples = whole_number(num_samples, "num_samples", most=total)
        first = next(iter(flat.values()))
        chosen = (torch.arange(num_samples, device=first.device) * total) // num_samples
        return {name: value[chosen] for name, value in flat.items()}

    def to(self, *args: Any, **kwargs: Any) -> "Samples":
        """Convert the latents as ``Tensor.to`` does; statistics change only their device."""
        latents = {name: value.to(*args, **kwargs) for name, value in self.latents.items()}
        device = next(iter(latents.values())).device
        stats = {name: value.to(device) for name, value in self.stats.items()}
        return Samples(latents, stats, dict(self.info), self.resume, self.program)

    def extend(self, num_samples: int) -> "Samples":
        """All draws and ``num_samples`` more of each chain, from the end of the chains.

        There is no new warm-up. The draws are those that a longer run would have made.

        :raises ValueError: for samples that cannot go on: from a file, of Pyro's backend, or of
            chains that were interrupted at different draws.
        """
        if self.resume is None:
            raise ValueError(
                "these samples do not know the end of their chains, as those from a file, of "
                "backend='pyro' and of chains that stopped at different draws: give mcmc.sample a "
                "folder as checkpoint, from which a larger num_samples goes on"
            )
        more = self.resume(num_samples).to(next(iter(self.latents.values())).device)
        latents = {
            name: torch.cat([value, more.latents[name].to(value)], 1)
            for name, value in self.latents.items()
        }
        stats = {
            name: torch.cat([value, more.stats[name]], 1) for name, value in self.stats.items()
        }
        seconds = self.info.get("seconds", 0.0) + more.info["seconds"]
        info = {**more.info, "seconds": seconds}
        return Samples(latents, stats, info, more.resume, self.program)

    @classmethod
    def from_pyro(cls, mcmc: Any) -> "Samples":
        """The draws of ``pyro.infer.MCMC`` after its run, with ``diverging`` of HMC and NUTS.

        :param mcmc: as it stands after ``mcmc.run(...)``.
        :raises TypeError: for another object, such as ``StreamingMCMC``, which keeps no draws.
        :raises ValueError: before the run.
        """
        require(mcmc, MCMC, "from_pyro needs a pyro.infer.MCMC, which keeps its draws")
        if mcmc._samples is None:
            raise ValueError("this MCMC has no draws yet: call mcmc.run(...) first")
        latents = mcmc.get_samples(group_by_chain=True)
        stats = {}
        diagnostics: Any = mcmc._diagnostics
        marked = [chain.get("divergences") for chain in diagnostics if chain]
        if marked and all(rows is not None for rows in marked):
            first = next(iter(latents.values()))
            diverging = torch.zeros(first.shape[:2], dtype=torch.bool, device=first.device)
            for chain, rows in enumerate(marked):
                diverging[chain, rows] = True
            stats["diverging"] = diverging
        info = {
            "kernel": type(mcmc.kernel).__name__.lower(),
            "backend": "pyro",
            "num_warmup": mcmc.warmup_steps,
        }
        return cls(latents, stats, info)

    @classmethod
    def from_numpyro(cls, mcmc: Any) -> "Samples":
        """The draws of ``numpyro.infer.MCMC`` after its run: its latents, and as statistics the
        ``extra_fields`` that it was asked for. Deterministic sites are left out.

        :param mcmc: as it stands after ``mcmc.run(...)``.
        :raises TypeError: for another object, or a kernel of a ``potential_fn`` over one array,
            whose draws have no sites.
        :raises ValueError: before the run.
        """
        if not is_numpyro_mcmc(mcmc):
            raise TypeError(f"from_numpyro needs a numpyro.infer.MCMC, got {type(mcmc).__name__}")
        if mcmc.last_state is None:
            raise ValueError("this MCMC has no draws yet: call mcmc.run(...) first")
        draws = mcmc.get_samples(group_by_chain=True)
        if not isinstance(draws, Mapping):
            raise TypeError(
                "the draws of this MCMC are one array without sites: make the kernel of a model, "
                "or of a potential_fn over a dict of sites"
            )
        held = getattr(mcmc.last_state, mcmc.sampler.sample_field)
        latents = {site: as_tensor(value) for site, value in draws.items() if site in held}
        fields = mcmc.get_extra_fields(group_by_chain=True)
        stats = {name.rpartition(".")[2]: as_tensor(value) for name, value in fields.items()}
        info = {
            "kernel": type(mcmc.sampler).__name__.lower(),
            "backend": "numpyro",
            "num_warmup": mcmc.num_warmup,
        }
        return cls(latents, stats, info)

    def of_program(self, program: Program) -> "Samples":
        """The same draws, with what ``save`` writes of their program, as it is now.

        Those of ``mcmc.sample`` and ``mcmc.sgmcmc`` have it. For draws from elsewhere it is
        ``bdl.Samples(draws).of_program(bdl.Program(model, x, y)).save(path)``.

        :raises RuntimeError: for draws with other sites or shapes than the program's latents.
        """
        point = {name: value[0, 0] for name, value in self.latents.items()}
        return replace(self, program=described_at(program, point))

    def save(self, path: str | Path) -> Path:
        """Write to a file of tensors and JSON (safetensors), which holds no code.

        ``bdl.load_posterior(path, model)`` reads it, as it does the file of a guide, which says
        what it holds of the program. If writing fails, an existing file stays as it was.

        :warns BdlWarning: for a program whose arguments or buffers are no tensors, numbers or
            strings: the file then holds the draws alone.
        """
        tree = {"latents": self.latents, "stats": self.stats, "info": self.info}
        if self.program is None:
            return save_tree(path, tree, kind=SAVED_KIND)
        try:
            return save_tree(path, {**tree, "program": self.program}, kind=SAVED_KIND)
        except TypeError as error:  # the draws are not lost for that
            warn(
                f"the file holds the draws without their program: {error}",
                "draws-without-their-program",
            )
        return save_tree(path, tree, kind=SAVED_KIND)

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> "Samples":
        """Read the draws of a file that ``save`` wrote; ``bdl.load_posterior`` gives their program
        its numbers too.

        :raises FileNotFoundError: if there is no such file.
        :raises ValueError: for a file that ``save`` did not write, or that is damaged.
        """
        return cls(**load_tree(path, kind=SAVED_KIND)).to(device)

    def __repr__(self) -> str:
        return (
            f"Samples({self.num_chains} chains x {self.num_draws} draws, "
            f"sites: {', '.join(self.latents)})"
        )


def is_numpyro_mcmc(value: Any) -> bool:
    """Return whether an object is an MCMC of NumPyro; NumPyro is not imported for that."""
    kinds = type(value).__mro__
    return any(
        kind.__module__ == "numpyro.infer.mcmc" and kind.__name__ == "MCMC" for kind in kinds
    )


def as_tensor(value: Any) -> Tensor:
    """A tensor, or a tensor with the numbers of an array of numpy or JAX."""
    return value if isinstance(value, Tensor) else torch.from_numpy(np.array(np.asarray(value)))
