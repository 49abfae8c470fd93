"""Posterior predictive draws, vectorized over the draws of the posterior."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.distributions.take_apart import (
    Structure,
    observation_mean,
    observation_variance,
    rebuild,
    take_apart,
)
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import check_posterior, latent_draws
from pyro_bdl.program.batch_norm import computing_with, statistics_of_draws
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subsampling import on_whole_data
from pyro_bdl.program.trace import leave_open, record, sample_open
from pyro_bdl.program.vmap import Draws, map_draws, measured
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode

_MEMORY = 32 * 2**20  # larger freed blocks are returned to the system (utils/memory.py)


class PredictiveMoments(NamedTuple):
    """Moments of an observation, each ``(N, ...)``.

    :param mean: E[y], in units of y.
    :param variance: Var[y], in squared units of y, including noise.
    """

    mean: Tensor
    variance: Tensor

    def over_draws(self) -> "PredictiveMoments":
        """The moments over all draws, (N, ...), from the moments at each draw, (S, N, ...).

        E[y] = E[E[y | w]] and Var[y] = E[Var[y | w]] + Var[E[y | w]].
        """
        spread = self.mean.var(0, correction=0)
        return PredictiveMoments(self.mean.mean(0), self.variance.mean(0) + spread)


class Predictive:
    """Predictions of a program at draws of a posterior.

    ``Predictive(model, posterior)(x)`` returns S draws of each observed and each deterministic
    site, ``{"y": (S, N, ...), "f": (S, N, ...)}``, with the same keys and shapes for every
    posterior. It runs without gradients in evaluation mode, and restores the mode.

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide or ``Samples``.
    :param num_samples: S; by default all draws of ``Samples``, or 100 of a guide.
    :param memory: bytes for intermediate results; the draws are evaluated in chunks of this size.
    :param batch_norm_data: the training data, ``(x, y)`` or an iterable of batches, for networks
        with BatchNorm: each draw of the weights gets its own running statistics, from a pass over
        these data with dropout off (Maddox et al. 2019, section 3.2). For ``Samples`` they are
        computed once. By default all draws use the network's current statistics.
        :param progress: show a bar over the draws in that pass.
    :raises ValueError: by its calls, for a posterior of another program; the error names the sites.
    :raises UnsupportedProgramError: by its calls, if the program chooses rows at random
        (``subsample_size`` of a plate), or if there is no site to return.
    """

    def __init__(
        self,
        model: Callable,
        posterior: Any,
        num_samples: int | None = None,
        *,
        memory: int = _MEMORY,
        batch_norm_data: Any = None,
        progress: bool = False,
    ) -> None:
        if memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {memory}")
        self.model, self.posterior = model, posterior
        self.num_samples, self.memory = num_samples, memory
        self.batch_norm_data = None if batch_norm_data is None else Batches(batch_norm_data)
        self.progress = progress
        self._statistics: tuple[list[Any], Draws] | None = None
        self._is_checked = isinstance(posterior, Guide) and posterior.is_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws y ~ p(y | w_s, x) and the deterministic sites, each (S, ...).

        Observed sites with data, given or held by the program, are drawn too; statements after them
        use the data, not the draws. Discrete latent sites are drawn from p(z | y, w_s) if data are
        passed, and y from p(y | w_s), without these data's z. Without data they are drawn from
        p(z | w_s), and y given them. In a hidden Markov chain y_t is drawn from
        p(y_t | y_1, ..., y_{t-1}, w_s).
        """
        program = on_whole_data(self.model)

        def ancestral(draw: Draws) -> dict[str, Tensor]:
            drawn: set[str] = set()

            def sample(msg: Any) -> None:
                sample_open(msg)
                drawn.add(msg["name"])

            given = record(program, draw, args, kwargs, draw=leave_open)
            discrete = {} if given.discrete is None else given.discrete.sample()
            run = record(program, draw | discrete, args, kwargs, draw=sample)
            observed = {
                name: site.value if name in drawn else given.observed[name].distribution.sample()
                for name, site in run.observed.items()
            }
            return observed | discrete | run.deterministic

        def choose(draw: Draws) -> tuple[Callable, Callable | None]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            known = all(take_apart(site.distribution) for site in run.observed.values())
            if not known or run.followed or run.discrete is not None:
                return ancestral, None
            return _outside_vmap(program, args, kwargs, lambda d: d.sample(), values=True)

        found = self._map(choose, args, kwargs)
        if not found:
            raise UnsupportedProgramError(
                "the program samples nothing without its targets, and has no deterministic site: "
                "pass targets too (of the right shape; predictions do not depend on them), or "
                "write pyro.sample(..., obs=y) so that it also runs with y=None"
            )
        return found

    def mean(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """E[y | w_s, x] for each observed site, (S, N, ...); for classes the probabilities
        (S, N, C)."""
        return self._of_observations(observation_mean, args, kwargs)

    def draw_moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """E[y | w_s, x] and Var[y | w_s, x] for each observed site and draw, (S, N, ...)."""
        found = self._of_observations(
            lambda d: (observation_mean(d), observation_variance(d)), args, kwargs
        )
        return {name: PredictiveMoments(*values) for name, values in found.items()}

    def moments(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveMoments]:
        """Mean and variance of y for each observed site, over the draws and the noise, (N, ...).

        E[y] is the mean over the draws, and Var[y] = E[Var[y | w]] + Var[E[y | w]]. For Normal
        noise with precision tau this is 1 / tau plus the variance over the draws (Gal & Ghahramani
        2016, section 4). For classes both are moments of each class's indicator.

        ``LinearizedPredictive.moments`` differs: it returns the moments of the distribution's
        parameters. ``draw_moments(x)["y"].over_draws()`` gives the moments of y for both classes.
        """
        found = self.draw_moments(*args, **kwargs)
        return {name: moments.over_draws() for name, moments in found.items()}

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | w_s, x_n) for each observed site, (S, N); the arguments include targets.

        :raises ValueError: if no target is given.
        """

        program = on_whole_data(self.model)

        def function(draw: Draws) -> dict[str, Tensor]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            values = {
                name: site.unscaled_log_prob()
                for name, site in run.observed.items()
                if site.value is not None
            }
            if not values:
                raise ValueError("no site is observed: pass the targets as well")
            return values

        return self._map(_always(function), args, kwargs)

    def _of_observations(
        self, read: Callable[[Distribution], Any], args: tuple, kwargs: dict
    ) -> dict[str, Any]:
        """Apply ``read`` to each observed site's distribution at each draw."""
        program = on_whole_data(self.model)

        def function(draw: Draws) -> dict[str, Any]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            return {name: read(site.distribution) for name, site in run.observed.items()}

        def choose(draw: Draws) -> tuple[Callable, Callable | None]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            known = all(take_apart(site.distribution) for site in run.observed.values())
            return _outside_vmap(program, args, kwargs, read) if known else (function, None)

        return self._map(choose, args, kwargs)

    @torch.no_grad()
    def _map(self, choose: Callable[[Draws], tuple], args: tuple, kwargs: dict) -> Any:
        """Evaluate at all draws in chunks.

        :param choose: returns for an example draw the function to evaluate and the function to
            finish a chunk.
        """
        with evaluation_mode(self.model, self.posterior, args, kwargs):
            draws = latent_draws(self.posterior, self.num_samples, *args, **kwargs)
            if not self._is_checked:
                program = on_whole_data(self.model)
                check_posterior(program, self.posterior, draws, args, kwargs)
                self._is_checked = True
            if self.batch_norm_data is not None:
                layers, statistics = self._statistics or statistics_of_draws(
                    self.model, draws, self.batch_norm_data, progress=self.progress
                )
                if isinstance(self.posterior, Samples):
                    self._statistics = layers, statistics
                draws, choose = draws | statistics, _with_statistics(layers, choose)
            needed, (function, finish) = measured(choose, draws)
            chunk_size = max(1, self.memory // needed)
            return map_draws(function, draws, chunk_size=chunk_size, finish=finish)


def _outside_vmap(
    program: Callable,
    args: tuple,
    kwargs: dict,
    read: Callable[[Any], Any],
    *,
    values: bool = False,
) -> tuple[Callable[[Draws], tuple], Callable[[tuple], dict[str, Any]]]:
    """Split an evaluation into a function for ``vmap`` and one for its stacked results.

    The first returns the parameters of the observed sites' distributions at one draw, with
    ``values`` also the deterministic sites. The second rebuilds the distributions of many draws and
    applies ``read``.
    """
    structures: dict[str, Structure] = {}

    def parameters(draw: Draws) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        run = record(program, draw, args, kwargs, draw=leave_open)
        parts = {}
        for name, site in run.observed.items():
            taken: Any = take_apart(site.distribution)
            structures[name], parts[name] = taken
        return parts, run.deterministic if values else {}

    def finish(result: tuple) -> dict[str, Any]:
        parts, deterministic = result
        return {n: read(rebuild(structures[n], parts[n])) for n in parts} | deterministic

    return parameters, finish


def _always(function: Callable[[Draws], Any]) -> Callable[[Draws], tuple]:
    def choose(draw: Draws) -> tuple:
        function(draw)
        return function, None

    return choose


def _with_statistics(
    layers: list[Any], choose: Callable[[Draws], tuple]
) -> Callable[[Draws], tuple]:
    """Add each draw's own statistics of the BatchNorm layers to ``choose``."""

    def chosen(draw: Draws) -> tuple:
        with computing_with(layers, draw):
            function, finish = choose(draw)

        def evaluate(draw: Draws) -> Any:
            with computing_with(layers, draw):
                return function(draw)

        return evaluate, finish

    return chosen
