"""Predictive draws, vectorized over the draws of the posterior, or of the prior."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.distributions.copies import is_improper
from pyro_bdl.distributions.parameters import is_known, parameters_of, rebuilt
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import (
    as_posterior,
    drawn_in_parts,
    evenly,
    latent_draws,
    run_of_posterior,
    to_samples,
)
from pyro_bdl.predictive.observations import (
    AtDraws,
    Predictions,
    densities_of,
    drawn,
)
from pyro_bdl.program.batch_norm import computing_with, statistics_of_draws
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.program import statements, trace_once
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.trace import (
    Run,
    draw_placeholder,
    placeholder_for_any,
    placeholder_for_observed,
    record,
    sample_any_open,
    sample_open,
    uses_of_placeholders,
)
from pyro_bdl.program.vmap import (
    DrawMap,
    Draws,
    bytes_of_another,
    joined,
    measured,
    number_of_draws,
)
from pyro_bdl.utils.autograd import reaches, wants_gradients
from pyro_bdl.utils.memory import require_memory
from pyro_bdl.utils.module_state import Modules, evaluation_mode
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

MEMORY = 32 * 2**20  # larger freed blocks are returned to the system (utils/memory.py)
_ROWS = "_num_predictive_samples"  # no site of any program


class Predictive(Predictions):
    """Predictions of a program at draws of a posterior.

    ``Predictive(model, posterior)(x)`` returns S draws of each observed and each deterministic
    site, ``{"y": (S, N, ...), "f": (S, N, ...)}``, with the same keys and shapes for every
    posterior. It runs in evaluation mode, and restores the mode; without gradients, if it is not
    ``differentiable``.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=50)
        >>> draws = bdl.Predictive(model, guide, num_samples=100)(x)
        >>> draws["y"].shape, draws["f"].shape
        (torch.Size([100, 20]), torch.Size([100, 20]))

    :param model: the Pyro program; call the result with its arguments, without the targets.
    :param posterior: a guide of this package or of Pyro, ``Samples``, an ``MCMC`` of Pyro or
        NumPyro after its run, or a dict of draws as ``mcmc.get_samples()`` gives it. Latents that a
        dict lacks, discrete ones too, are drawn from their prior and are among the results; by
        default all are. ``Samples`` must hold all.
    :param num_samples: S; by default all draws of ``Samples``, or 100 of a guide, and of an
        ensemble so many less that each member comes as often. Of ``Samples`` with fewer draws all
        are taken, with a note.
    :param memory: bytes for intermediate results; the draws are evaluated in chunks of this size.
    :param batch_norm_data: the training data, ``(x, y)`` or an iterable of batches, for networks
        with BatchNorm: each draw of the weights gets its own running statistics, from a pass over
        these data with dropout off (Maddox et al. 2019, section 3.2). For ``Samples`` they are
        computed once. By default all draws use the network's current statistics.
    :param progress: show a bar over the draws in that pass; by default in terminals and notebooks.
    :param differentiable: where an argument requires gradients, let them flow to it from all
        results, also from draws of y whose distribution is reparameterized. Draws of the weights
        are constants. The graph of all draws at once is kept in memory.
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
        differentiable: bool = False,
    ) -> None:
        if posterior is None and num_samples is None:
            raise ValueError("give a posterior, or num_samples for draws of the prior")
        posterior = {} if posterior is None else posterior
        self._is_partial = isinstance(posterior, Mapping)
        self.model, self.posterior = model, posterior
        self.num_samples = None if num_samples is None else whole_number(num_samples, "num_samples")
        self.memory = whole_number(memory, "memory")
        self.batch_norm_data = None if batch_norm_data is None else Batches(batch_norm_data)
        self.progress, self.differentiable = progress, differentiable
        self._modules = Modules()  # those that its calls have met
        self._statistics: tuple[list[Any], Draws] | None = None
        self._source: Any = None  # what the posterior is draws of
        self._is_checked = (
            isinstance(posterior, Guide) and posterior.is_of(model) and not posterior.subsampled
        )

    def __call__(
        self, *args: Any, sites: Collection[str] | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draws y ~ p(y | w_s, x) and the deterministic sites, each (S, ...).

        Observed sites with data, given or held by the program, are drawn too; statements after them
        use the data, not the draws. Discrete latent sites are drawn from p(z | y, w_s) if data are
        passed, and y from p(y | w_s), without these data's z. Without data they are drawn from
        p(z | w_s), and y given them. In a hidden Markov chain y_t is drawn from
        p(y_t | y_1, ..., y_{t-1}, w_s).

        :param sites: names of the sites to return, also of latents; by default the observed and
            the deterministic ones.
        :raises ValueError: for a name that is none of them.
        """
        wanted = () if sites is None else tuple(sites)
        at_draws = self._at_draws(
            drawn, args, kwargs, deterministic=True, draw=True, latents=wanted
        )
        result = at_draws.deterministic | at_draws.values
        if unknown := [name for name in wanted if name not in result]:
            raise ValueError(
                f"the program has no site {unknown[0]!r} to return: it has "
                f"{', '.join(result)}, and its latents"
            )
        if not result:
            raise UnsupportedProgramError(
                "the program samples nothing without its targets, and has no deterministic site: "
                "pass targets too (of the right shape; predictions do not depend on them), or "
                "write pyro.sample(..., obs=y) so that it also runs with y=None"
            )
        return result if sites is None else {name: result[name] for name in wanted}

    def at_fixed_draws(self, *args: Any, **kwargs: Any) -> "Predictive":
        """The same predictions with draws of the latents that are made once."""
        if isinstance(self.posterior, Mapping):
            return self
        posterior = as_posterior(self.posterior, self.model, args, kwargs)
        if not isinstance(posterior, Samples):
            count = evenly(posterior) if self.num_samples is None else self.num_samples
            with torch.no_grad():
                posterior = to_samples(posterior, count, *args, **kwargs)
        result = Predictive(
            self.model, posterior, self.num_samples, memory=self.memory,
            batch_norm_data=self.batch_norm_data, progress=self.progress,
            differentiable=self.differentiable,
        )  # fmt: skip
        result._source = self._source or self.posterior
        return result

    @property
    def samples(self) -> Samples | None:
        return self.posterior if isinstance(self.posterior, Samples) else None

    def _at_draws(
        self,
        read: Callable[[Any], Any],
        args: tuple,
        kwargs: dict,
        *,
        densities: bool = False,
        deterministic: bool = False,
        draw: bool = False,
        latents: Collection[str] = (),
    ) -> AtDraws:
        """As in ``Predictions``: by ``vmap`` over the draws.

        Distributions that can be taken apart are read outside, all draws at once.

        :param draw: draw what the program leaves open, see ``__call__``.
        :param latents: names of latents whose draws are returned with the deterministic sites.
        """
        program = on_whole_data(self.model)
        partial = draw and self._is_partial
        leave = placeholder_for_any if partial else placeholder_for_observed
        templates: dict[str, Any] = {}

        def run_at(draws: Draws, **options: Any) -> Run:
            return record(program, draws, args, kwargs, **{"draw": leave, **options})

        def latents_at(draws: Draws) -> Draws:
            return {name: draws[name] for name in latents if name in draws}

        def at_draw(draws: Draws, of_site: Callable[[str, Any], Any]) -> AtDraws:
            run = run_at(draws)
            values = {name: of_site(name, site.distribution) for name, site in run.observed.items()}
            log_densities = densities_of(run.observed) if densities else {}
            fixed = run.deterministic if deterministic else {}
            return AtDraws(values, log_densities, fixed | latents_at(draws))

        def tensors(name: str, distribution: Any) -> Any:
            templates[name] = distribution
            return parameters_of(distribution)

        def finish(at_draws: AtDraws) -> AtDraws:
            values = {n: read(rebuilt(templates[n], parts)) for n, parts in at_draws.values.items()}
            return at_draws._replace(values=values)

        def ancestral(draws: Draws) -> AtDraws:
            values = _ancestral(run_at, draws, sample_any_open if partial else sample_open, partial)
            return AtDraws(values, {}, latents_at(draws))

        def choose(draws: Draws) -> tuple[Callable, Callable | None]:
            nonlocal leave
            if partial:
                run = run_at(draws, draw=sample_any_open)
            elif self._is_checked:
                run = run_at(draws)
            else:
                source = self._source or self.posterior
                run = run_of_posterior(program, source, draws, args, kwargs)
                self._is_checked = True
            if densities and run.factors and not densities_of(run.observed):
                raise UnsupportedProgramError(
                    f"the factor '{min(run.factors)}' is no log likelihood of single data, and no "
                    "site is observed: write the likelihood as pyro.sample(..., obs=y), and pass "
                    "the targets as well"
                )
            if not draw and uses_of_placeholders(run, program, draws, args, kwargs):
                leave = draw_placeholder  # over draws of what it uses
            known = all(is_known(site.distribution) for site in run.observed.values())
            if known and run.discrete is None and not (draw and run.followed):
                return functools.partial(at_draw, of_site=tensors), finish
            read_site = functools.partial(at_draw, of_site=lambda name, known: read(known))
            return (ancestral if draw else read_site), None

        return self._map(choose, args, kwargs)

    def _draws(self, args: tuple, kwargs: dict) -> Iterator[tuple[int, Draws]]:
        """The number of all draws of the latents, with the draws: all of them, or a part at a time
        where a guide makes them one by one and all would take much memory.

        Of the prior there are none, but as many rows as there are to be draws.
        """
        if isinstance(self.posterior, Mapping) and not self.posterior:
            count = whole_number(self.num_samples, "num_samples")
            advice = "take fewer (num_samples)"
            require_memory(8 * count, torch.device("cpu"), f"{count} draws need at least", advice)
            yield count, {_ROWS: torch.arange(count, device="cpu")}
            return
        self.posterior = as_posterior(self.posterior, self.model, args, kwargs)
        guide, total = self.posterior, self.num_samples
        if not isinstance(guide, Guide):
            draws = latent_draws(guide, total, *args, **kwargs)
            yield number_of_draws(draws), draws
            return
        total = evenly(guide) if total is None else total
        if self.batch_norm_data is not None:
            yield total, latent_draws(guide, total)
            return
        for part in drawn_in_parts(guide, total):
            yield total, part

    def _map(self, choose: Callable[[Draws], tuple], args: tuple, kwargs: dict) -> Any:
        """Evaluate at all draws in chunks.

        :param choose: returns for an example draw the function to evaluate and the function to
            finish a chunk.
        """
        if torch.compiler.is_exporting():
            raise UnsupportedProgramError(
                "a Predictive draws weights from its posterior at every call, which torch.export "
                "cannot keep: export the network at fixed weights, such as guide.median()"
            )
        wanted = self.differentiable and wants_gradients(args, kwargs)
        with (
            torch.set_grad_enabled(wanted),
            evaluation_mode(self.model, self._modules, self.posterior),
        ):
            parts = self._draws(args, kwargs)
            total, draws = next(parts)
            if self.batch_norm_data is not None:
                layers, statistics = self._statistics or statistics_of_draws(
                    self.model, draws, self.batch_norm_data, progress=self.progress
                )
                if isinstance(self.posterior, Samples):
                    self._statistics = layers, statistics
                draws, choose = draws | statistics, _with_statistics(layers, set(draws), choose)
            needed, (function, finish) = measured(choose, draws)
            chunk_size = max(1, self.memory // bytes_of_another(function, draws, needed))
            evaluate = functools.partial(DrawMap(), function, chunk_size=chunk_size, finish=finish)
            all_draws = chain([draws], (part for _, part in parts))
            return joined(((number_of_draws(part), evaluate(part)) for part in all_draws), total)


def _ancestral(
    run_at: Callable[..., Run], draws: Draws, sample: Callable[[Any], None], partial: bool
) -> dict[str, Any]:
    """The observed and deterministic sites of one draw, statement after statement, and the
    discrete latents, drawn given the data that are passed."""
    drawn: set[str] = set()

    def sample_and_note(msg: Any) -> None:
        sample(msg)
        drawn.add(msg["name"])

    run_with_data = None if partial else run_at(draws)
    discrete = (
        {}
        if run_with_data is None or run_with_data.discrete is None
        else run_with_data.discrete.sample()
    )
    run = run_at(draws | discrete, draw=sample_and_note)
    marginals = run.observed if run_with_data is None else run_with_data.observed
    observed = {
        name: site.value if name in drawn else marginals[name].distribution.sample()
        for name, site in run.observed.items()
    }
    observed |= {name: run.observed[name].value for name in drawn if name in run.observed}
    return run.deterministic | observed | discrete


def _with_statistics(
    layers: list[Any], latents: set[str], choose: Callable[[Draws], tuple]
) -> Callable[[Draws], tuple]:
    """Add each draw's own statistics of the BatchNorm layers to ``choose``."""

    def chosen(draw: Draws) -> tuple:
        with computing_with(layers, draw):
            function, finish = choose({name: draw[name] for name in draw if name in latents})

        def evaluate(draw: Draws) -> Any:
            with computing_with(layers, draw):
                return function(draw)

        return evaluate, finish

    return chosen


def prior_predictive(
    model: Callable, *args: Any, num_samples: int = 500, seed: int = 0, **kwargs: Any
) -> dict[str, Tensor]:
    """Draws w ~ p(w), the deterministic sites at w, and y ~ p(y | w, x), each ``(S, ...)``.

    They show before any fit which functions and data a prior holds for likely. Draws are made all
    at once under ``vmap``, in evaluation mode; a distribution that ``vmap`` cannot draw makes them
    come one by one, with a warning that names its site.

    Example::

        >>> x = torch.linspace(-2, 2, 50)[:, None]
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> draws = bdl.prior_predictive(model, x, num_samples=200)
        >>> {name: tuple(value.shape) for name, value in draws.items()}
        {'f': (200, 50), 'weight': (200, 1, 1), 'bias': (200, 1), 'y': (200, 50)}

    :param model: the Pyro program.
    :param args: its arguments, such as x; targets may be among them, and do not count.
    :param num_samples: S.
    :param seed: seed of the draws.
    :param kwargs: the program's keyword arguments.
    :raises UnsupportedProgramError: for a prior that cannot be sampled: an improper one, one that a
        mask leaves without a density, or one with a ``priors.factor`` of latents.
    """
    count = whole_number(num_samples, "num_samples")
    with evaluation_mode(model), seeded(seed):
        run = statements(trace_once(model, args, kwargs).trace)
        return prior_draws(model, run, count, args, kwargs)


def prior_draws(
    model: Callable, run: Run, count: int, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """As ``prior_predictive``, of a program with this run, at the present random state.

    :param args: the arguments to predict at, which may lack targets.
    """
    weighed = _factor_of_latents(run, model, args, kwargs)
    if weighed is not None:
        raise UnsupportedProgramError(
            f"the prior cannot be sampled: the factor '{weighed}' weighs its latents, which draws "
            "of the sample statements do not follow"
        )
    run.refuse_improper("prior to draw from")
    for name, site in run.latents.items():
        if site.mask is False and not is_improper(site.distribution):
            raise UnsupportedProgramError(
                f"the prior cannot be sampled: a mask leaves the site '{name}' without a density"
            )
    try:
        return Predictive(model, num_samples=count)(*args, **kwargs)
    except NotImplementedError as error:
        raise UnsupportedProgramError(f"the prior cannot be sampled: {error}") from error


@torch.enable_grad()
def _factor_of_latents(run: Run, model: Callable, args: tuple, kwargs: dict) -> str | None:
    """The name of a factor of the prior that depends on latents; None where there is none."""
    if not run.prior_factors:
        return None
    values = {name: site.value.detach().clone() for name, site in run.latents.items()}
    moving = [value.requires_grad_() for value in values.values() if value.is_floating_point()]
    factors = record(model, run.subsamples | values, args, kwargs).prior_factors.items()
    return next((name for name, site in factors if reaches(site.log_prob().sum(), moving)), None)
