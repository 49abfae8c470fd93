"""Posterior predictive draws, vectorized over the draws of the posterior."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.distributions.take_apart import (
    Structure,
    observation_covariance,
    observation_mean,
    observation_variance,
    rebuild,
    take_apart,
)
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import (
    DEFAULT_DRAWS,
    as_posterior,
    check_posterior,
    latent_draws,
)
from pyro_bdl.predictive.covariances import PredictiveCovariance, total_covariance
from pyro_bdl.program.batch_norm import computing_with, statistics_of_draws
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.subsampling import on_whole_data
from pyro_bdl.program.trace import (
    Site,
    leave_any_open,
    leave_open,
    record,
    sample_any_open,
    sample_open,
)
from pyro_bdl.program.vmap import DrawMap, Draws, joined, measured, number_of_draws
from pyro_bdl.samples import Samples
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.validation import whole_number

DRAWS_AT_ONCE = 2**25  # numbers in draws of the weights that are made at a time
MEMORY = 32 * 2**20  # larger freed blocks are returned to the system (utils/memory.py)
_ROWS = "_num_predictive_samples"  # no site of any program


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


class SitePredictions(NamedTuple):
    """Predictions for one observed site at S draws of the latents, all of one run of the program.

    :param mean: E[y | w_s], ``(S, N, ...)``; for classes the probabilities ``(S, N, C)``.
    :param variance: Var[y | w_s], as ``mean``.
    :param draws: y ~ p(y | w_s), ``(S, N, ...)``.
    :param log_density: log p(y_n | w_s) in nats, ``(S, *batch)``; None without targets.
    """

    mean: Tensor
    variance: Tensor
    draws: Tensor
    log_density: Tensor | None = None


def predictions_of(distribution: Any, *, undefined: bool = False) -> dict[str, Tensor]:
    """The fields of ``SitePredictions`` that need no targets.

    :param undefined: whether some of its parameters are NaN, with which torch refuses to sample:
        all draws are NaN then.
    """
    mean = observation_mean(distribution)
    draws = mean.new_full(distribution.shape(), torch.nan) if undefined else distribution.sample()
    return {"mean": mean, "variance": observation_variance(distribution), "draws": draws}


def density_of(site: Site) -> dict[str, Tensor]:
    """log p(value) of a site by its name in ``SitePredictions``; nothing without a value."""
    return {} if site.value is None else {"log_density": site.unscaled_log_prob()}


class Predictive:
    """Predictions of a program at draws of a posterior.

    ``Predictive(model, posterior)(x)`` returns S draws of each observed and each deterministic
    site, ``{"y": (S, N, ...), "f": (S, N, ...)}``, with the same keys and shapes for every
    posterior. It runs without gradients in evaluation mode, and restores the mode.

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide of this package or of Pyro, ``Samples``, an ``MCMC`` of Pyro or
        NumPyro after its run, or a dict of draws as ``mcmc.get_samples()`` gives it. Latents that a
        dict lacks, discrete ones too, are drawn from their prior and are among the results; by
        default all are.
    :param num_samples: S; by default all draws of ``Samples``, or 100 of a guide.
    :param memory: bytes for intermediate results; the draws are evaluated in chunks of this size.
    :param batch_norm_data: the training data, ``(x, y)`` or an iterable of batches, for networks
        with BatchNorm: each draw of the weights gets its own running statistics, from a pass over
        these data with dropout off (Maddox et al. 2019, section 3.2). For ``Samples`` they are
        computed once. By default all draws use the network's current statistics.
        :param progress: show a bar over the draws in that pass; by default in terminals and
            notebooks.
    :raises ValueError: by its calls, for a posterior of another program; the error names the sites.
    :raises UnsupportedProgramError: by its calls, if the program chooses rows at random
        (``subsample_size`` of a plate), if there is no site to return, or in ``torch.export``.
    """

    def __init__(
        self,
        model: Callable,
        posterior: Any = None,
        num_samples: int | None = None,
        *,
        memory: int = MEMORY,
        batch_norm_data: Any = None,
        progress: bool | None = None,
    ) -> None:
        if memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {memory}")
        if posterior is None and num_samples is None:
            raise ValueError("give a posterior, or num_samples for draws of the prior")
        posterior = {} if posterior is None else posterior
        self._is_partial = isinstance(posterior, Mapping)
        self.model, self.posterior = model, posterior
        self.num_samples, self.memory = num_samples, memory
        self.batch_norm_data = None if batch_norm_data is None else Batches(batch_norm_data)
        self.progress = progress
        self._statistics: tuple[list[Any], Draws] | None = None
        self._is_checked = (
            isinstance(posterior, Guide) and posterior.is_of(model) and not posterior.subsampled
        )

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws y ~ p(y | w_s, x) and the deterministic sites, each (S, ...).

        Observed sites with data, given or held by the program, are drawn too; statements after them
        use the data, not the draws. Discrete latent sites are drawn from p(z | y, w_s) if data are
        passed, and y from p(y | w_s), without these data's z. Without data they are drawn from
        p(z | w_s), and y given them. In a hidden Markov chain y_t is drawn from
        p(y_t | y_1, ..., y_{t-1}, w_s).
        """
        program = on_whole_data(self.model)
        leave, sample = leave_open, sample_open
        if self._is_partial:
            leave, sample = leave_any_open, sample_any_open

        def ancestral(draw: Draws) -> dict[str, Any]:
            drawn: set[str] = set()

            def sample_and_note(msg: Any) -> None:
                sample(msg)
                drawn.add(msg["name"])

            discrete: dict[str, Tensor] = {}
            given = None
            if not self._is_partial:
                given = record(program, draw, args, kwargs, draw=leave)
                discrete = {} if given.discrete is None else given.discrete.sample()
            run = record(program, draw | discrete, args, kwargs, draw=sample_and_note)
            marginals = run.observed if given is None else given.observed
            observed = {
                name: site.value if name in drawn else marginals[name].distribution.sample()
                for name, site in run.observed.items()
            }
            observed |= {name: run.observed[name].value for name in drawn}
            return run.deterministic | observed | discrete

        def choose(draw: Draws) -> tuple[Callable, Callable | None]:
            run = record(program, draw, args, kwargs, draw=sample if self._is_partial else leave)
            whole = run.followed or run.discrete is not None
            if whole or not all(take_apart(site.distribution) for site in run.observed.values()):
                return ancestral, None
            return _outside_vmap(
                program, args, kwargs, lambda d: d.sample(), leave=leave, deterministic=True
            )

        found = self._map(choose, args, kwargs, partial=self._is_partial)
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

    def covariance(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveCovariance]:
        """Mean (N, D) and covariance (N, D, D) of the D numbers of y of each datum, for each
        observed site, over the draws and the noise: Cov[y] = E[Cov[y | w]] + Cov[E[y | w]].

        For classes they are those of the classes' indicators.
        """
        return self._covariance(args, kwargs, joint=False)

    def joint_covariance(self, *args: Any, **kwargs: Any) -> dict[str, PredictiveCovariance]:
        """The same over all data: mean (N, D) and covariance (N, D, N, D)."""
        return self._covariance(args, kwargs, joint=True)

    def _covariance(
        self, args: tuple, kwargs: dict, *, joint: bool
    ) -> dict[str, PredictiveCovariance]:
        found = self._of_observations(observation_covariance, args, kwargs)
        return {name: total_covariance(*values, joint=joint) for name, values in found.items()}

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """log p(y_n | w_s, x_n) for each observed site, (S, N); the arguments include targets.

        :raises ValueError: if no target is given.
        :raises UnsupportedProgramError: if the likelihood is in ``pyro.factor`` statements only.
        """

        program = on_whole_data(self.model)

        def function(draw: Draws) -> dict[str, Tensor]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            values = {
                name: site.unscaled_log_prob()
                for name, site in run.observed.items()
                if site.value is not None
            }
            if not values and run.factors:
                raise UnsupportedProgramError(
                    f"the factor '{min(run.factors)}' is no log likelihood of single data, and no "
                    "site is observed: write the likelihood as pyro.sample(..., obs=y), and pass "
                    "the targets as well"
                )
            if not values:
                raise ValueError("no site is observed: pass the targets as well")
            return values

        return self._map(_always(function), args, kwargs)

    def observe(
        self, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, SitePredictions], dict[str, Tensor]]:
        """All predictions of each observed site, and the deterministic sites ``(S, ...)``, of one
        run of the program at each draw.

        A site is predicted given the data of the sites before it, as in ``log_likelihood``.

        :param args: the program's arguments, with targets for their log densities.
        """
        program = on_whole_data(self.model)

        def at_draw(draw: Draws) -> tuple:
            run = record(program, draw, args, kwargs, draw=leave_open)
            sites = {
                n: predictions_of(s.distribution) | density_of(s) for n, s in run.observed.items()
            }
            return sites, run.deterministic

        def choose(draw: Draws) -> tuple[Callable, Callable | None]:
            run = record(program, draw, args, kwargs, draw=leave_open)
            parts = {name: take_apart(site.distribution) for name, site in run.observed.items()}
            if run.discrete is not None or not all(parts.values()):
                return at_draw, None
            structures: dict[str, Any] = {n: part[0] for n, part in parts.items() if part}

            def parameters(draw: Draws) -> tuple:
                run = record(program, draw, args, kwargs, draw=leave_open)
                taken: Any = {n: take_apart(site.distribution) for n, site in run.observed.items()}
                densities = {n: density_of(site) for n, site in run.observed.items()}
                return {n: part[1] for n, part in taken.items()}, densities, run.deterministic

            def finish(result: tuple) -> tuple:
                tensors, densities, deterministic = result
                sites = {
                    name: densities[name]
                    | predictions_of(
                        rebuild(structures[name], own),
                        undefined=any(bool(value.isnan().any()) for value in own.values()),
                    )
                    for name, own in tensors.items()
                }
                return sites, deterministic

            return parameters, finish

        sites, deterministic = self._map(choose, args, kwargs)
        return {name: SitePredictions(**parts) for name, parts in sites.items()}, deterministic

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

    def _draws(self, args: tuple, kwargs: dict) -> Iterator[tuple[int, Draws]]:
        """The number of all draws of the latents, with the draws: all of them, or a part at a time
        where a guide makes them one by one and all would take much memory.

        Of the prior there are none, but as many rows as there are to be draws.
        """
        if isinstance(self.posterior, Mapping) and not self.posterior:
            count = whole_number(self.num_samples, "num_samples")
            yield count, {_ROWS: torch.arange(count, device="cpu")}
            return
        self.posterior = as_posterior(self.posterior, self.model, args, kwargs)
        guide, total = self.posterior, self.num_samples
        if not isinstance(guide, Guide):
            draws = latent_draws(guide, total, *args, **kwargs)
            yield number_of_draws(draws), draws
            return
        total = DEFAULT_DRAWS if total is None else whole_number(total, "num_samples")
        most = total
        if guide.independent_draws and self.batch_norm_data is None:
            most = max(1, DRAWS_AT_ONCE // max(1, guide.require_layout().size))
        for start in range(0, total, most):
            yield total, latent_draws(guide, min(most, total - start))

    @torch.no_grad()
    def _map(
        self,
        choose: Callable[[Draws], tuple],
        args: tuple,
        kwargs: dict,
        *,
        partial: bool = False,
    ) -> Any:
        """Evaluate at all draws in chunks.

        :param choose: returns for an example draw the function to evaluate and the function to
            finish a chunk.
        :param partial: whether the posterior may lack latents.
        """
        if torch.compiler.is_exporting():
            raise UnsupportedProgramError(
                "a Predictive draws weights from its posterior at every call, which torch.export "
                "cannot keep: export the network at fixed weights, such as guide.median()"
            )
        with evaluation_mode(self.model, self.posterior, args, kwargs):
            parts = self._draws(args, kwargs)
            total, draws = next(parts)
            if not self._is_checked and not partial:
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
            each, options = DrawMap(), {"chunk_size": chunk_size, "finish": finish}
            all_parts = chain([draws], (part for _, part in parts))
            found = ((number_of_draws(part), each(function, part, **options)) for part in all_parts)
            return joined(found, total)


def _outside_vmap(
    program: Callable,
    args: tuple,
    kwargs: dict,
    read: Callable[[Any], Any],
    *,
    leave: Callable[[dict], None] = leave_open,
    deterministic: bool = False,
) -> tuple[Callable[[Draws], tuple], Callable[[tuple], dict[str, Any]]]:
    """Split an evaluation into a function for ``vmap`` and one for its stacked results.

    The first returns the parameters of the observed sites' distributions at one draw. The second
    rebuilds the distributions of many draws and applies ``read``. With ``deterministic`` both have
    the deterministic sites too.
    """
    structures: dict[str, Structure] = {}

    def parameters(draw: Draws) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        run = record(program, draw, args, kwargs, draw=leave)
        parts = {}
        for name, site in run.observed.items():
            taken: Any = take_apart(site.distribution)
            structures[name], parts[name] = taken
        return parts, run.deterministic if deterministic else {}

    def finish(result: tuple) -> dict[str, Any]:
        parts, values = result
        return {n: read(rebuild(structures[n], parts[n])) for n in parts} | values

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
