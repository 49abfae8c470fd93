"""Checks of a training: a guide that has collapsed to the prior, and a prior that will to 0."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.distributions.moments import observation_mean
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.program.batches import device_of_rows, leading_size, taken
from pyro_bdl.program.trace import Site, record, sum_out_discrete
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.random_state import own_randomness

_KL = 0.1  # nats per datum
_VARIATION = 0.1  # sd of the predictions over the inputs, as a share of that of the targets
_DRAWS = 256
_ROWS = 128  # of the data that the warning looks at


class Collapse(NamedTuple):
    """How far a guide is from a posterior that ignores the data.

    :param kl: KL(q || p(w)) per datum, in nats.
    :param variation: the standard deviation over the inputs of the mean prediction, divided by that
        of the targets; of classes those of the probabilities and of the one-hot classes. It is
        estimated from 256 draws without bias in its square, and is zero for a negative estimate.
    """

    kl: float
    variation: float

    @property
    def complete(self) -> bool:
        """True if q is close to the prior and its predictions hardly depend on the inputs."""
        return self.kl < _KL and self.variation < _VARIATION


@torch.no_grad()
def collapse(model: Callable, guide: Guide, *args: Any, **kwargs: Any) -> Collapse:
    """Measure how far a guide has collapsed to the prior.

    A wide network's mean-field guide does so at temperature 1: the KL grows with the number of
    neurons and the log likelihood does not (Coker et al. 2021; Huix et al. 2022).

    :param args: the program's arguments, targets included.
    """
    guide.prototype(*args, **kwargs)
    elbo = TemperedTraceMeanField_ELBO()
    halves: list[dict[str, Any]] = [{}, {}]  # sums over the draws of each half
    with preserved_buffers(guide.program_modules), own_randomness():
        elbo.loss(model, guide, *args, **kwargs)
        for number, vector in enumerate(guide.sample_vectors(_DRAWS)):
            latents = guide.require_layout().constrain(vector)[0]
            observed = record(model, latents, args, kwargs, draw=sum_out_discrete).observed
            sites = {n: s for n, s in observed.items() if s.value is not None}
            sums = halves[number % 2]
            for name, site in sites.items():
                sums[name] = sums.get(name, 0.0) + _centered(observation_mean(site.distribution))
    rows = sum(num_data(site) * site.subsampling for site in sites.values())
    shares = []
    for name, site in sites.items():
        products = halves[0][name] * halves[1][name] / (_DRAWS / 2) ** 2
        explained = products.mean().clamp_min(0.0)
        shares.append((explained / _centered(_target(site)).square().mean()).sqrt())
    assert elbo.kl is not None
    return Collapse(float(elbo.kl / rows), float(max(shares, default=torch.nan)))


def warn_of_collapse(model: Callable, guide: Guide, elbo: Any, args: tuple) -> None:
    """Warn if a mean-field guide trained at temperature 1 has collapsed to the prior.

    :param elbo: the bound after its last step.
    :param args: the program's arguments with all rows.
    """
    bayesian = isinstance(elbo, TemperedTrace_ELBO) and elbo.temperature == 1.0
    rows = leading_size(args)
    if not bayesian or not isinstance(guide, AutoMeanField):
        return
    if elbo.kl is None or not float(elbo.kl) < _KL * rows:
        return
    some = torch.arange(min(rows, _ROWS), device=device_of_rows(args)) * rows // min(rows, _ROWS)
    kl = float(elbo.kl) / rows
    measured = collapse(model, guide, *(taken(value, some) for value in args))._replace(kl=kl)
    if measured.complete:
        warn(
            f"the guide has collapsed to the prior: KL(q || p) is {kl:.2g} nats per datum, and its "
            f"predictions vary over the inputs by {measured.variation:.1%} of what the targets do. "
            "Mean-field does so for wide networks at temperature 1: give the ELBO temperature="
            "pyro_bdl.temperature.overparameterized(tau, num_data, num_neurons), tau about 0.01",
            "collapse",
            stacklevel=3,
        )


def warn_of_joint_scales(
    model: Callable, guide: Guide, trained: Sequence[Tensor], args: tuple
) -> None:
    """Warn if weights at a point and the scales of their prior are to be trained together.

    log p(w | s) grows without bound as w and s go to 0 together, so that there is no maximum.

    :param trained: what the optimizer changes.
    :param args: the program's arguments with all rows.
    """
    if guide.has_density or not isinstance(model, nn.Module):
        return
    names = {id(p): name.removesuffix("_unconstrained") for name, p in model.named_parameters()}
    own = [p for p in trained if id(p) in names]
    if not own:
        return
    rows = leading_size(args)
    some = torch.arange(min(rows, _ROWS), device=device_of_rows(args))
    part = tuple(taken(value, some) for value in args)
    with preserved_buffers(guide.program_modules), own_randomness(), torch.enable_grad():
        vector = guide.sample_vectors(1)[0].detach()
        latents = guide.require_layout().constrain(vector)[0]
        prior = record(model, latents, part, {}, draw=sum_out_discrete).log_prior()
    scales = [names[id(p)] for p in own if reaches(prior, [p])]
    if scales:
        warn(
            f"{', '.join(scales)} of the prior and weights at a point have no maximum together, "
            "and go to 0: train the guide alone, optimizer=torch.optim.Adam(guide.parameters()) "
            "after guide.prototype(x, y), and set the prior by evidence.maximize, or let "
            "evidence.train_by_evidence do both",
            "joint-scales",
            stacklevel=3,
        )


def _target(site: Site) -> Tensor:
    base = base_distribution(site.distribution)
    if type(base).__name__ != "Categorical":
        return site.value
    return torch.nn.functional.one_hot(site.value.long(), base.probs.shape[-1]).to(base.probs)


def _centered(values: Tensor) -> Tensor:
    """Values minus their mean over the rows."""
    return values.double() - values.double().mean(0)
