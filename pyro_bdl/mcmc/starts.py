"""Starting points of chains, and the log density as a function of some of a program's latents."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import as_posterior, latent_draws
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.subnetwork import SubsetNormal
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.program import Program, check_program, trace_once
from pyro_bdl.program.saved import described_at
from pyro_bdl.program.subset import Subset
from pyro_bdl.utils.memory import require_memory
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import require

_ATTEMPTS = 100
_RADIUS = 2.0  # of uniform starts, as in NumPyro and Stan


def checked_program(
    model: Callable, args: tuple, kwargs: dict[str, Any], init: Any
) -> tuple[Program, bool]:
    """The program with finite data, whose contract holds, and whether log density and gradient
    are finite at its first latents.

    Its first run is at ``init`` where that says values. Draws of the prior may be values that the
    program's distributions refuse, as NaN of a logarithm: the starts are looked for later.

    :param init: as in ``starting_vectors``.
    """
    check_finite(model, args, kwargs)
    values: Any = {}
    if isinstance(init, Mapping):
        values = init
    elif init is not None and not isinstance(init, str | Tensor):
        with own_randomness():
            draws = latent_draws(init, 1, *args, **kwargs)
        values = {name: value[0] for name, value in draws.items()}
    with pyro.validation_enabled(False), torch.no_grad():
        program, first = Program.with_run(model, args, kwargs, values)
    for name, site in first.latents.items():
        given = isinstance(init, Mapping) and name in init and site.mask is not False
        support: Any = site.distribution.support
        if given and not support.check(site.value).all():
            raise ValueError(
                f"init has numbers for the latent site '{name}' outside of its support, {support}"
            )
    if program.discrete and not program.observed and not program.factors:
        program.require_observed()
    if not program.latents:
        raise UnsupportedProgramError(
            "the program has no continuous latent site to draw: Program(model, *args)"
            ".responsibilities({}) are the posterior of discrete ones"
        )
    leaf = program.unconstrain(program.initial).detach().requires_grad_()
    with torch.enable_grad():
        latents, log_det = program.constrain(leaf)
        run = check_program(model, {**first.subsamples, **latents}, args, kwargs, first)
        value = run.log_prior() + run.log_likelihood() + log_det
    return program, _is_finite(value, leaf)


class Restriction:
    """A program's log density as a function of some of its latents' numbers (p,).

    :param guide: over the free numbers, with the others fixed; None if all are free (then p = P).
    :raises TypeError: for anything else.
    """

    subset: Subset | None
    at: Tensor | None

    def __init__(self, program: Program, guide: Any = None) -> None:
        self.program, self.subset, self.at = program, None, None
        if guide is None:
            return
        text = "subset must be a guide over some weights, such as AutoSubnetwork makes"
        require(guide, LaplaceGuide | SubsetNormal, text)
        self.subset, self.at = guide.subset, guide.location().detach()
        if self.at.shape != (program.size,):
            raise ValueError(
                f"subset is a guide of {self.at.numel()} numbers, and the program has "
                f"{program.size}"
            )

    def require_memory(self, num_chains: int, num_samples: int) -> None:
        """Check that the draws of chains fit in memory.

        :raises MemoryError: if they do not.
        """
        like = self.program.unconstrain(self.program.initial)
        size = like.numel() if self.subset is None else self.subset.size
        require_memory(
            num_chains * num_samples * size * like.element_size(),
            like.device,
            f"{num_samples} draws (num_samples) of {num_chains} chains (num_chains) over {size} "
            "numbers need",
            "keep fewer draws, or sample a subset",
        )

    def whole(self, vector: Tensor) -> Tensor:
        """The vector (P,) with ``vector`` (p,) at the chosen numbers."""
        if self.subset is None or self.at is None:
            return vector
        return self.subset.put(self.at.to(vector), vector)

    def chosen(self, vector: Tensor) -> Tensor:
        """The chosen numbers (..., p) of vectors (..., P)."""
        return vector if self.subset is None else self.subset.take(vector)

    def log_density(self, vector: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Program.log_density`` at the chosen numbers (p,)."""
        return self.program.log_density(self.whole(vector), *args, **kwargs)

    def log_density_terms(self, vector: Tensor) -> dict[str, Tensor]:
        return self.program.log_density_terms(self.whole(vector))

    @torch.no_grad()
    def described(self, vector: Tensor) -> dict[str, Any]:
        """The program as files of draws hold it, with its statements at numbers (p,)."""
        latents = self.program.layout.constrain(self.whole(vector))[0]
        return described_at(self.program, latents)

    def constrain(self, vectors: Tensor) -> dict[str, Tensor]:
        """The latents at vectors (..., p); fixed sites are expanded, not copied."""
        layout = self.program.layout
        if self.subset is None or self.at is None:
            return layout.constrain(vectors)[0]
        fixed = layout.unflatten(self.at.to(vectors))
        result = {}
        for name, latent in layout.latents.items():
            value = fixed[name].expand((*vectors.shape[:-1], *fixed[name].shape))
            if name in self.subset.parts:
                part, entries = vectors[..., self.subset.parts[name]], self.subset.chosen[name]
                if entries is not None:
                    flat = fixed[name].reshape(-1).expand(*vectors.shape[:-1], -1)
                    part = flat.index_copy(-1, entries.to(flat.device), part)
                value = part.reshape(value.shape)
            result[name] = value if latent.transform is None else latent.transform(value)
        return result


def as_start(init: Any, subset: Any = None) -> Any:
    """Return the user's ``init``, with a guide or ``Samples`` where it is a posterior.

    :param init: by default ``subset``, the guide over the numbers that are drawn, or the prior.
    :raises TypeError: for what is none of the kinds that ``starting_vectors`` takes.
    """
    if init is None:
        init = "prior" if subset is None else subset
    if isinstance(init, Mapping):
        return {
            name: value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
            for name, value in init.items()
        }
    return init if isinstance(init, str | Tensor) else as_posterior(init)


def starting_vectors(
    restriction: Restriction, init: Any, num_chains: int, *, usable: bool = False
) -> Tensor:
    """Starting points (chains, p) at which the log density and its gradient are finite.

    :param init: "prior" (each at a draw of the prior; sites with an improper prior are drawn like
        "uniform"), "uniform" (unconstrained numbers between -2 and 2, as in NumPyro), "network"
        (the values of the networks' parameters), a guide or ``Samples`` (each at a draw of it), or
        a dict of latents.
    :param usable: whether the program's first latents are such a point; they start a chain then
        if they are of ``init`` themselves.
    :raises ValueError: if no such point is found, or for another ``init``.
    """
    known = usable and restriction.subset is None and isinstance(init, str) and init == "prior"
    if known:
        first = _unconstrained(restriction.program, restriction.program.initial)[None]
        if num_chains == 1:
            return first
    starts = _proposed_starts(restriction, init, num_chains - known)
    unknown = list(range(len(starts)))
    for _ in range(_ATTEMPTS):
        unknown = [i for i in unknown if not _is_usable(restriction, starts[i])]
        if not unknown:
            return torch.cat([first, starts]) if known else starts
        starts[unknown] = _proposed_starts(restriction, init, len(unknown))
    raise ValueError(
        f"no starting point with a finite log density was found from init={init!r}: "
        "start from a trained guide (init=guide), from given latents (init={'w': ...}) or "
        "elsewhere (init='uniform'), or check the program's data, and that its prior does not "
        "allow parameters that its distributions refuse"
    )


def _proposed_starts(restriction: Restriction, init: Any, count: int) -> Tensor:
    program = restriction.program
    if isinstance(init, str) and init == "uniform":
        like = program.unconstrain(program.initial)
        starts = torch.rand(count, program.size, dtype=like.dtype, device=like.device)
        starts = _RADIUS * (2.0 * starts - 1.0)
    elif init is None or isinstance(init, str | Mapping | Tensor):
        rows = [_unconstrained(program, _named_start(program, init)) for _ in range(count)]
        starts = torch.stack(rows)
    else:
        draws = latent_draws(init, count, *program.args, **program.kwargs)
        starts = _unconstrained(program, draws)
    return restriction.chosen(starts)


def _named_start(program: Program, init: Any) -> Mapping[str, Any]:
    if isinstance(init, Mapping):
        return init
    if isinstance(init, str) and init == "prior":
        with pyro.validation_enabled(False):  # what is no start is drawn again
            first = trace_once(program.model, program.args, program.kwargs)
        trace = prune_subsample_sites(first.trace)
        return {name: trace.nodes[name]["value"] for name in program.latents}
    if isinstance(init, str) and init == "network":
        started = start_at(init_to_network)(program.model)
        return Program(started, *program.args, **program.kwargs).initial
    raise ValueError(
        "init must be 'prior', 'uniform', 'network', a guide, Samples or a dict, got "
        + (f"'{init}'" if isinstance(init, str) else type(init).__name__)
    )


def _unconstrained(program: Program, latents: Mapping[str, Any]) -> Tensor:
    missing = [name for name in program.latents if name not in latents]
    if missing:
        raise ValueError(f"init has no value for the latent site '{missing[0]}'")
    reference = next(iter(program.latents.values()))
    moved = {name: latents[name].to(reference.device) for name in program.latents}
    return program.unconstrain(moved).detach().to(reference.dtype)


def _is_usable(restriction: Restriction, vector: Tensor) -> bool:
    leaf = vector.detach().requires_grad_()  # torch.func refuses programs that call autograd.grad
    with torch.enable_grad():
        return _is_finite(restriction.log_density(leaf), leaf)


def _is_finite(value: Tensor, leaf: Tensor) -> bool:
    """Return whether a log density and its gradient are finite."""
    (gradient,) = torch.autograd.grad(value, leaf)
    return bool(torch.isfinite(value) & torch.isfinite(gradient).all())
