"""Draws of a guide as the bounds take them: of our families over a flat vector, and of any guide
from its sample statements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pyro
from torch import Tensor, nn

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.estimators.per_datum import Products
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.kl import entropy, mean_field_kl, sampled_kl
from pyro_bdl.program.trace import Run, record


class FlatDraw:
    """A draw w = T(u) of a guide of this package.

    :param vector: u, (P,).
    :param products: what follows the draw in the program, for noise of each datum.
    :ivar latents: w, by site.
    """

    def __init__(self, guide: Guide, vector: Tensor, products: Products | None = None) -> None:
        self.guide, self.vector = guide, vector
        self.latents: dict[str, Any]
        self.latents, self.log_det = guide.require_layout().constrain(vector)
        if products is not None:
            for site, distribution in products.estimator.distributions(guide).items():
                products.drawn(site, distribution, self.latents[site])

    def expected_log_likelihood(self, run_at: Callable, log_likelihood: Callable) -> Any:
        """See ``Family.expected_log_likelihood``."""
        return self.guide.expected_log_likelihood(self.latents, run_at, log_likelihood)

    def kl(self, run: Run) -> Tensor:
        """KL(q || p) in nats for the prior p of a run at the draw, in closed form if there is
        one."""
        return self.guide.kl(self.vector, self.log_det, run)

    def log_density(self, *, constant: bool = False) -> Tensor:
        """log q(w) in nats.

        :param constant: treat the parameters of q as constants, which drops the score: the direct
            term of the gradient, of mean zero (Roeder et al. 2017).
        """
        with self.guide.constant() if constant else nullcontext():
            return self.guide.log_density(self.vector, self.log_det)

    def entropy(self) -> Tensor:
        """H(q) in nats, in closed form if there is one."""
        return self.guide.entropy(self.vector, self.log_det)


class SiteDraw:
    """The same of any guide, such as Pyro's, from one run of its sample statements.

    :param args: of the guide; and its ``kwargs``.
    """

    def __init__(
        self, guide: Callable, args: tuple, kwargs: dict, products: Products | None = None
    ) -> None:
        self.guide, self.arguments = guide, (args, kwargs)
        with products or nullcontext():
            draw = None if products is None else products.sample
            self.q = record(guide, {}, args, kwargs, draw=draw)
        self.latents = values_of(self.q)

    def expected_log_likelihood(self, run_at: Callable, log_likelihood: Callable) -> Any:
        run = run_at(self.latents)
        return log_likelihood(run), run

    def kl(self, run: Run) -> Tensor:
        # the second term holds the guide's factors
        return mean_field_kl(self.q.latents, run.priors) + self.q.log_likelihood()

    def log_density(self, *, constant: bool = False) -> Tensor:
        if not constant:
            return sampled_kl(self.q.latents, {}) + self.q.log_likelihood()
        # Dropped weights are the exception: their density is an entropy without a score.
        sites = self.q.latents.items()
        closed = {n: s for n, s in sites if isinstance(s.distribution, NoisyWeight)}
        with constant_parameters(self.guide):
            again = record(self.guide, self.latents, *self.arguments)
            rest = {name: site for name, site in again.latents.items() if name not in closed}
            log_q = sampled_kl(rest, {}) + again.log_likelihood()
        return log_q + sampled_kl(closed, {})

    def entropy(self) -> Tensor:
        return entropy(self.q.latents)


Draw = FlatDraw | SiteDraw


def values_of(q: Run) -> dict[str, Any]:
    """The values of a guide's draw and the indices of its plates."""
    return {name: site.value for name, site in q.latents.items()} | q.subsamples


@contextmanager
def constant_parameters(guide: Callable) -> Iterator[None]:
    """Treat a guide's parameters, and those in Pyro's store, as constants inside the context."""
    own = guide.parameters() if isinstance(guide, nn.Module) else ()
    stored = (value for _, value in pyro.get_param_store().named_parameters())
    changed = [p for p in (*own, *stored) if p.requires_grad and p.is_leaf]
    try:
        for parameter in changed:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)
