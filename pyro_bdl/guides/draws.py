"""Draws from a posterior, be it a guide or ``Samples``, and their log densities."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.base import Guide
from pyro_bdl.program.layout import Latent, differences
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import record
from pyro_bdl.program.vmap import map_draws
from pyro_bdl.samples import Samples
from pyro_bdl.utils.whole_numbers import whole_number

DEFAULT_DRAWS = 100


@torch.no_grad()
def latent_draws(
    posterior: Any, num_samples: int | None, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """Draws of the latents, site -> (num_samples, *shape).

    :param posterior: ``Samples``, a guide of this package, or any Pyro guide.
    :param num_samples: how many; by default all of ``Samples``, 100 of a guide.
    :param args: the program's arguments, which Pyro's own guides are run with.
    """
    if num_samples is not None:
        num_samples = whole_number(num_samples, "num_samples")
    if isinstance(posterior, Samples):
        return posterior.flat(num_samples)
    num_samples = DEFAULT_DRAWS if num_samples is None else num_samples
    if isinstance(posterior, Guide):
        return posterior.sample_latents(num_samples)
    if not callable(posterior):
        raise TypeError(f"a posterior is a guide or Samples, got {type(posterior).__name__}")
    draws = []
    for _ in range(num_samples):
        sites = record(posterior, {}, args, kwargs).latents
        draws.append({name: site.value for name, site in sites.items()})
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def to_samples(posterior: Any, num_samples: int, *args: Any, **kwargs: Any) -> Samples:
    """Draws made once, as ``Samples``: those of a guide are one chain.

    :param posterior: ``Samples``, which are returned as they are, or a guide.
    :param num_samples: draws of a guide.
    :param args: the program's arguments, which Pyro's own guides are run with.
    """
    if isinstance(posterior, Samples):
        return posterior
    latents = latent_draws(posterior, num_samples, *args, **kwargs)
    return Samples({site: value[None] for site, value in latents.items()})


def samples_of_program(latents: Mapping[str, Latent], posterior: Any, samples: Samples) -> Samples:
    """The program's latents among the draws; Pyro's own guides have auxiliary sites too.

    :param latents: the program's latent sites.
    :param posterior: the guide or ``Samples`` that the draws are of.
    :raises ValueError: for a posterior of another program, with the sites that do not match.
    """
    draws = dict(samples.latents)
    if not isinstance(posterior, Guide | Samples):
        draws = {site: value for site, value in draws.items() if site in latents}
    check_sites(latents, draws)
    return Samples(draws, samples.stats, samples.info)


def log_densities(
    program: Program,
    guide: Guide,
    vectors: Tensor,
    target: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(u) and log q(u) over the unconstrained latents, ``(S,)`` each.

    :param vectors: ``(S, P)``, the unconstrained draws.
    :param target: the log density of the latents; by default ``program.log_joint``.
    :returns: None for log q where the guide has no density over all latents.
    """
    density = target or program.log_joint

    def both(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        vector = draw["u"]
        latents, log_det = program.constrain(vector)
        found = {"p": density(latents) + log_det}
        if guide.has_density:
            found["q"] = guide.log_density(vector, log_det) + log_det
        return found

    found = map_draws(both, {"u": vectors})
    return found["p"], found.get("q")


def check_sites(
    latents: Mapping[str, Latent], draws: Mapping[str, Tensor], leading: int = 2
) -> None:
    """Check that draws are of a program's latents.

    :param latents: the program's latent sites.
    :param draws: site -> values with ``leading`` dimensions before the site's own.
    :raises ValueError: where names or shapes do not match, with all that do not.
    """
    found = differences(
        {name: latent.shape for name, latent in latents.items()},
        {name: value.shape[leading:] for name, value in draws.items()},
    )
    if found:
        raise ValueError(f"the posterior is of another program ({found})")
