"""The limit of the ELBO of wide networks, in which the network's output no longer varies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.distributions.parameters import is_known, parameters_of, rebuilt
from pyro_bdl.elbo.draw import FlatDraw
from pyro_bdl.elbo.step import Terms
from pyro_bdl.elbo.tempered import Temperature, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators import PerDatum
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.trace import Run, record, sum_out_discrete


class MeanFieldLimit(TemperedTraceMeanField_ELBO):
    """The log likelihood of the mean output, log p(y | E_q[f(x)]) - eta KL(q || p(w)).

    For a network f(x) = 1/N sum_j s(w_j, x) of one hidden layer and a q that factorizes over the N
    neurons, the ELBO differs from it by at most C p / N for p data: the expectation moves inside
    the loss, and the output's variance is of order 1/N (Huix et al. 2022). With the temperature
    eta = tau p / N it depends on the distribution of the neurons, and no longer on their number.

    E_q is the mean over draws of the parameters of the observation's distribution: the location of
    a Normal, the logits of classes. Its error adds about the gap between ELBO and limit, divided by
    the number of draws.

    :param temperature: see ``TemperedTraceMeanField_ELBO``, which also explains
        ``cold_temperature``.
    :param num_particles: draws that the output is averaged over.
    :raises UnsupportedProgramError: at a step, for an observation's distribution that is not made
        of known parameters.
    :raises TypeError: at a step, for a guide that is not one of this package.
    """

    def __init__(
        self,
        temperature: Temperature = 1.0,
        num_particles: int = 64,
        *,
        cold_temperature: Temperature | None = None,
    ) -> None:
        super().__init__(temperature, num_particles, cold_temperature=cold_temperature)

    def terms(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Terms:
        if not isinstance(guide, Guide) or guide.subsampled:
            raise TypeError(
                f"MeanFieldLimit averages outputs over draws of a guide of pyro_bdl without "
                f"latents in subsampled plates, got {type(guide).__name__}"
            )
        return super().terms(model, guide, args, kwargs)

    def flat_terms(
        self, model: Callable, guide: Guide, args: tuple, kwargs: dict, estimator: PerDatum | None
    ) -> Terms:
        if estimator is not None:
            raise ValueError(
                f"MeanFieldLimit averages the outputs at shared draws, and cannot use {estimator}"
            )
        vectors, offset = guide.sample_with_offset(self.num_particles)

        def run_at(draw: FlatDraw) -> Run:
            run = record(model, draw.latents, args, kwargs, draw=sum_out_discrete)
            self.log_likelihood(run, draw.latents)  # which checks the run
            return run

        def particle(vectors: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
            draw = FlatDraw(guide, vectors["u"])
            run = run_at(draw)
            return _parameters(run), *self.divergence(draw, run)

        outputs, kl, q_entropy = self._map(particle, {"u": vectors})
        with torch.no_grad():
            run = run_at(FlatDraw(guide, vectors[0].detach()))
        for name, site in run.observed.items():
            means = {key: value.mean(0) for key, value in outputs[name].items()}
            distribution = rebuilt(site.distribution, means, masks=True)
            run.observed[name] = site._replace(distribution=distribution)
        likelihood = torch.as_tensor(run.log_likelihood(), device=kl.device)
        return Terms(likelihood, kl.mean() + offset, q_entropy.mean(), vectors.detach().mean(0))


def _parameters(run: Run) -> dict[str, dict[str, Tensor]]:
    """The parameters of the observed sites' distributions."""
    for name, site in run.observed.items():
        if not is_known(site.distribution):
            raise UnsupportedProgramError(
                f"the parameters of the observed site '{name}' are not known, so that the mean "
                f"output is not either: its distribution is {type(site.distribution).__name__}"
            )
    return {name: parameters_of(site.distribution) for name, site in run.observed.items()}
