"""Draws from a posterior, be it a guide or ``Samples``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.guides.base import Guide
from pyro_bdl.program.layout import Latent, differences
from pyro_bdl.program.trace import record
from pyro_bdl.samples import Samples
from pyro_bdl.utils.validation import whole_number

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


def check_sites(
    latents: Mapping[str, Latent], draws: Mapping[str, Tensor], leading: int = 2
) -> None:
    """Whether draws are of a program's latents.

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
