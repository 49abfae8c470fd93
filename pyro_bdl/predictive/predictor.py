"""The predictions of any posterior: of the program at its draws, or of the linearized program."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyro_bdl.distributions.moments import observation_kind
from pyro_bdl.distributions.parameters import is_known
from pyro_bdl.errors import warn
from pyro_bdl.guides.draws import evenly, samples_of_program, to_samples
from pyro_bdl.predictive.linearized import OF_WEIGHTS, LinearizedPredictive, is_linear
from pyro_bdl.predictive.observations import Predictions
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.trace import Site


def predictor(
    model: Callable,
    posterior: Any,
    num_samples: int | None = None,
    *,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    unknown: str = "",
    latents: Mapping[str, Latent] | None = None,
    batch_norm_data: Any = None,
) -> Predictions:
    """Make the predictions of a posterior at fixed draws.

    A Gauss-Newton posterior belongs to the linearized program, and predicts by it, if the
    linearized program knows the observations.

    :param num_samples: draws of a guide, 100 by default; of ``Samples`` all draws are used.
    :param args: the program's arguments, which Pyro's own guides are run with.
    :param seed: of the functions of the linearized program, by default new ones in each call; draws
        of the program follow the present random state.
    :param unknown: names of the distributions that the linearized program does not know.
    :param latents: of the program, where they are known: the posterior must have these sites.
    :param batch_norm_data: as in ``Predictive``.
    :raises ValueError: for a posterior of other sites; the error names them.
    :warns BdlWarning: if a posterior of the linearized program goes through the network.
    """
    if is_linear(posterior) and not unknown:
        own = None if seed is None else seed + OF_WEIGHTS
        if latents is not None:
            samples_of_program(latents, posterior, to_samples(posterior, 1))
        return LinearizedPredictive(model, posterior, num_samples, seed=own)
    if is_linear(posterior):
        warn(
            f"the linearized model does not know {unknown} observations: the draws of the "
            "posterior go through the network itself",
            "moments-of-distributions",
        )
    count = evenly(posterior) if num_samples is None else num_samples
    samples = to_samples(posterior, count, *args, **(kwargs or {}))
    if latents is not None:
        samples = samples_of_program(latents, posterior, samples)
    return Predictive(model, samples, batch_norm_data=batch_norm_data)


def unknown_kinds(sites: Iterable[Site]) -> str:
    """The names of the distributions of sites of which the linearized program does not know some,
    in words; empty where it knows all."""
    distributions = [site.distribution for site in sites]
    if all(map(is_known, distributions)):
        return ""
    return " and ".join(sorted({observation_kind(known) for known in distributions}))
