"""Tempered evidence lower bounds for ``pyro.infer.SVI`` and for torch's optimizers.

The bound is L(eta) = E_q[log p(y | w)] - eta KL(q || p(w)), with the sum over data scaled by N / B.
Its optimum approximates the tempered posterior, which is proportional to p(y | w)^(1/eta) p(w); eta
= 1 is the Bayesian posterior (Huix et al. 2022).

All threads share Pyro's handlers, so only one thread at a time may run programs and take steps.
These bounds refuse a second thread (``utils/one_thread.py``); Pyro's bounds do not notice it.
"""

import contextlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pyro
import torch
from pyro.infer import ELBO, Trace_ELBO
from torch import Tensor, nn

from pyro_bdl.elbo.checks import (
    CheckedLoss,
    FirstBatches,
    check_data,
    check_statements,
    prepare,
    require_values,
)
from pyro_bdl.elbo.draw import Draw, FlatDraw, SiteDraw, values_of
from pyro_bdl.elbo.step import Step, Terms
from pyro_bdl.errors import warn
from pyro_bdl.estimators import PerDatum, as_estimator
from pyro_bdl.estimators.per_datum import Products, active
from pyro_bdl.estimators.rows import RowwiseLikelihood
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.supports import nan_outside_support
from pyro_bdl.program.trace import Run, record, sum_out_discrete
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.one_thread import Hidden, OneThread
from pyro_bdl.utils.precision import without_autocast
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import real_number, whole_number

Temperature = float | Callable[[int], float]


class TemperedTrace_ELBO(CheckedLoss, Trace_ELBO):
    """L(eta) = E_q[log p(y | w)] - eta E_q[log q(w) - log p(w)], estimated at draws of the guide.

    ``pyro.factor`` terms count as likelihood, those of ``priors.factor`` as prior. After each step
    ``expected_log_likelihood``, ``kl`` (both in nats, detached scalars) and ``temperature`` hold
    the terms of that step. ``take_step`` returns all of it as a :class:`Step`, which
    natural-gradient optimizers take.

    Under ``torch.autocast`` only the program is cast, that is the network's forward pass. The
    guide's parameters and draws, the KL and sums of densities stay in float32.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLowRank(model, rank=1)
        >>> elbo = bdl.elbo.TemperedTrace_ELBO(num_particles=8)
        >>> training = bdl.training.train(model, guide, x, y, steps=50, elbo=elbo)
        >>> elbo.kl.shape  # in nats, of the last step
        torch.Size([])

    :param temperature: eta, a number or a schedule ``step -> eta``.
    :param cold_temperature: T of the cold mode, given instead of eta: the target is the cold
        posterior (p(y | w) p(w))^(1/T) and the bound E_q[log p(y, w)] + T H(q).
    :param num_particles: draws per step, evaluated at once by ``vmap``.
    :param estimator: the estimator of the expected log likelihood. "local_reparameterization",
        "flipout" and, for dropout guides, "per_example_dropout" draw separate noise for every
        datum; None uses one draw for all data. It may also be one of these contexts of
        ``pyro_bdl.handlers``; inside an open context None means that context.
    :param sticking_the_landing: treat the parameters of q inside log q(w) as constants (Roeder et
        al. 2017). The dropped gradient has mean zero, so that the gradient stays unbiased; with
        ``estimator=None`` it vanishes at every draw if q is the posterior. The guide's parameters
        must be ``pyro.param`` statements or attributes of a PyroModule.
    :raises ValueError: for a temperature that is not positive, an unknown estimator; at a step, for
        data that are not finite, or targets that are missing or outside their support.
    :raises TypeError: at a step, for an argument that the program cannot use: an array, a list, or
        a tensor with another dtype than the weights.
    :raises UnsupportedProgramError: at a step, for a program that the estimator does not support.
    """

    closed_forms = False  # of the KL

    def __init__(
        self,
        temperature: Temperature = 1.0,
        num_particles: int = 1,
        *,
        cold_temperature: Temperature | None = None,
        estimator: str | PerDatum | None = None,
        sticking_the_landing: bool = False,
    ) -> None:
        super().__init__(num_particles=whole_number(num_particles, "num_particles"))
        if cold_temperature is not None and (callable(temperature) or temperature != 1.0):
            raise ValueError("give either temperature or cold_temperature, not both")
        if self.closed_forms and sticking_the_landing:
            raise ValueError(
                "sticking_the_landing concerns a KL that is evaluated at draws, and this ELBO has "
                "closed forms: use TemperedTrace_ELBO"
            )
        self.is_cold = cold_temperature is not None
        name = "cold_temperature" if self.is_cold else "temperature"
        self.schedule = _as_schedule(cold_temperature if self.is_cold else temperature, name)
        self.step = 0
        self.temperature = self.schedule(0)
        self.kl: Tensor | None = None
        self.expected_log_likelihood: Tensor | None = None
        self.estimator = as_estimator(estimator)
        self.sticking_the_landing = sticking_the_landing
        self._map = DrawMap()
        self._checked: tuple[Callable, Callable] | None = None
        self._is_first = False  # whether the next run is the first of this program and guide
        self._trained: tuple[Callable, Callable] | None = None
        self.parts: list[Guide] = []  # the guides of this package in the guide that is trained
        self._rows: dict[Callable, RowwiseLikelihood] = {}
        self._weighted = not callable(temperature) and temperature != 1.0  # the KL, by hand
        self._batches = FirstBatches(0)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies, without the program and the guide that were trained."""
        fresh: dict[str, Any] = {"_checked": None, "_trained": None, "parts": [], "_rows": {}}
        return {**vars(self), **fresh, "_map": DrawMap(), "_batches": FirstBatches(0)}

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats at the current step's temperature, without counting a step."""
        with torch.no_grad():
            self._check(model, guide, args, kwargs)
            step = self._evaluate(model, guide, args, kwargs)
        self.check_step(step, model, guide, args, kwargs)
        return step.value.item()

    def take_step(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Step:
        """Take a step of the schedule, whose loss may be not finite.

        :returns: the loss to differentiate, its terms, and what optimizers need of them.
        """
        self._begin(model, guide, args, kwargs)
        return self.plain_step(model, guide, args, kwargs)

    def plain_step(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Step:
        """A step by a run of the program."""
        self._batches.start_step()
        step = self._evaluate(model, guide, args, kwargs)
        self.skip(1)
        return step

    def _begin(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Begin a step, where the pair is new with the guides to train; warn if each step reaches
        some members of an ensemble only."""
        self._check(model, guide, args, kwargs)
        if self._trained == (model, guide):
            return
        self._trained = model, guide
        parts = guide.modules() if isinstance(guide, nn.Module) else ()
        self.parts = [part for part in parts if isinstance(part, Guide)]
        self._batches = FirstBatches(0 if self._weighted else 2)
        _warn_of_members(guide, self.num_particles)

    def begin_training(self) -> None:
        """Make ready for a training, which may be of another program than the last one."""

    def skip(self, count: int) -> None:
        """Count steps, as the guides that take them do."""
        self.step += count
        for part in self.parts:
            part.skip_steps(count)

    def _evaluate(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Step:
        """-L(eta) at the current step's temperature, from new draws."""
        temperature = real_number(self.schedule(self.step), "temperature")
        try:
            with OneThread(), pyro.validation_enabled(False):
                terms = self.terms(model, guide, args, kwargs)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                check_data(model, guide, args, kwargs)  # finds labels without a class
            raise
        self._is_first = False
        return self.record_terms(terms, self.negative_bound(terms, temperature), temperature)

    def record_terms(self, terms: Terms, loss: Tensor, temperature: float) -> Step:
        """The step of a loss, whose terms are this bound's attributes from here on."""
        self.temperature = temperature
        self.expected_log_likelihood = terms.log_likelihood.detach()
        self.kl = terms.kl.detach()
        return Step(loss, self.expected_log_likelihood, self.kl, temperature, terms.draw)

    def negative_bound(self, terms: Terms, temperature: float | Tensor) -> Tensor:
        """Return -L(eta) from the results of ``terms``."""
        if self.is_cold:
            return -(terms.log_likelihood - terms.kl + (temperature - 1.0) * terms.entropy)
        return temperature * terms.kl - terms.log_likelihood

    def _check(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Check the arguments of a new program and guide, whose statements the next run checks; and
        rows alone, where an estimator takes them."""
        if self._checked != (model, guide):
            prepare(model, guide, args, kwargs)
            self._checked, self._is_first = (model, guide), True
            self._map = DrawMap(modules=guide.program_modules if isinstance(guide, Guide) else None)
        self.check_rows(model, guide, args, kwargs)

    def check_rows(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> bool:
        """Compare rows alone with all rows of a batch, in the first pass over the data, where an
        estimator takes them alone.

        :returns: whether they were compared.
        :raises UnsupportedProgramError: if the data depend on each other.
        """
        estimator = self.estimator or active()
        if estimator is None:
            return False
        rows = self._rows.setdefault(model, RowwiseLikelihood(estimator.name, model))
        if not rows.is_due(args, kwargs):
            return False
        with Hidden(), torch.no_grad(), preserved_buffers(guide), own_randomness():
            values = values_of(record(guide, {}, args, kwargs))
        rows.check(values, args, kwargs)
        return True

    def terms(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Terms:
        """The parts of the bound, averaged over the particles."""
        estimator = self.estimator or active()
        if isinstance(guide, Guide) and not guide.subsampled:
            with guide.cached_parameters():
                return self.flat_terms(model, guide, args, kwargs, estimator)
        draw = partial(SiteDraw, guide, args, kwargs)
        particles = [
            self.particle(model, draw, args, kwargs, estimator) for _ in range(self.num_particles)
        ]
        return Terms(*(torch.stack(t).mean() for t in zip(*particles, strict=True)))

    def flat_terms(
        self,
        model: Callable,
        guide: Guide,
        args: tuple,
        kwargs: dict,
        estimator: PerDatum | None,
    ) -> Terms:
        """The parts of the bound from the flat vectors of our guides, at once by ``vmap``."""

        def particle(draw: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
            at = partial(FlatDraw, guide, draw["u"])
            return self.particle(model, at, args, kwargs, estimator)

        with without_autocast():
            vectors, offset = guide.sample_with_offset(self.num_particles)
        draw = vectors.squeeze(0) if self.num_particles == 1 else vectors.detach().mean(0)
        if self.num_particles == 1:
            terms = particle({"u": draw})
        else:
            terms = tuple(t.mean() for t in self._map(particle, {"u": vectors}))
        likelihood, kl, entropy = terms
        return Terms(likelihood, kl + offset, entropy, draw.detach() if estimator is None else None)

    def particle(
        self,
        model: Callable,
        make: Callable[..., Draw],
        args: tuple,
        kwargs: dict,
        estimator: PerDatum | None = None,
    ) -> tuple[Any, Tensor, Tensor]:
        """log p(y | w), the KL and (in cold mode) H(q) in nats at a draw.

        :param make: makes the draw.
        """
        if estimator is None:
            with without_autocast():
                draw = make()
            latents = draw.latents
            likelihood, p = draw.expected_log_likelihood(
                lambda values: record(model, values, args, kwargs, draw=sum_out_discrete),
                lambda run: self.log_likelihood(run, latents),
            )
        else:
            with estimator.run() as products:
                with without_autocast():
                    draw = make(products=products)
                likelihood, p = self._row_by_row(model, draw.latents, args, kwargs, products)
        if self._is_first:
            check_statements(p, draw.guide)
        with without_autocast():
            return likelihood, *self.divergence(draw, p)

    def log_likelihood(self, run: Run, latents: Collection[str]) -> Any:
        """log p(y | w) of a run in nats, a scalar; NaN if a target lies outside its support.

        :param latents: the sites whose values the run was given.
        :raises ValueError: if the program drew other latents, such as missing targets.
        """
        require_values(run, latents)
        self._batches.look(run.observed)
        return nan_outside_support(run.log_likelihood(), run)

    def _row_by_row(
        self, model: Callable, values: dict[str, Any], args: tuple, kwargs: dict,
        products: Products,
    ) -> tuple[Tensor, Run]:  # fmt: skip
        """The same with noise for each datum, and a run with the latents' priors."""

        def of_datum(program: Callable[[], Run]) -> Run:
            run = products.of_datum(program)
            require_values(run, values)
            return run

        likelihood, run = self._rows[model](values, args, kwargs, run=of_datum)
        self._batches.look(run.observed)
        return likelihood, run

    def divergence(self, draw: Draw, p: Run) -> tuple[Tensor, Tensor]:
        """The KL and (in cold mode) H(q) in nats at a draw and a run of the program there."""
        if self.closed_forms:
            kl = draw.kl(p)
        else:
            log_q = draw.log_density(constant=self.sticking_the_landing)
            kl = log_q - p.log_prior()
        if not self.is_cold:
            return kl, torch.zeros_like(kl)
        return kl, -log_q if self.sticking_the_landing else draw.entropy()


def _warn_of_members(guide: Callable, num_particles: int) -> None:
    members = guide.num_members if isinstance(guide, Guide) else 1
    if num_particles < members:
        warn(
            f"each step trains {num_particles} of the {members} members of "
            f"{type(guide).__name__}: give the ELBO num_particles={members}, which trains all at "
            f"once, or take {members / num_particles:.3g} times as many steps",
            "members",
        )


class TemperedTraceMeanField_ELBO(TemperedTrace_ELBO):
    """L(eta) with the KL of each site in closed form, if there is one.

    For guides that factorize over the sites, such as ``AutoMeanField``. Sites without a closed
    form, and guides that emit a Delta, are evaluated at the draw, including log determinants.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoMeanField(model)
        >>> elbo = bdl.elbo.TemperedTraceMeanField_ELBO(temperature=0.1)
        >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
        >>> losses = [svi.step(x, y) for _ in range(50)]
        >>> losses[-1] < losses[0]
        True

    :raises ValueError: for ``sticking_the_landing``, since closed forms have no score term.
    """

    closed_forms = True


def _as_schedule(temperature: Any, name: str) -> Callable[[int], float]:
    if isinstance(temperature, type | ELBO):  # both can be called
        raise TypeError(
            "temperature must be a number or a function step -> number, got the ELBO "
            f"{getattr(temperature, '__name__', type(temperature).__name__)}"
        )
    if callable(temperature):
        return temperature
    return partial(_constant, real_number(temperature, name))


def _constant(temperature: float, step: int) -> float:
    return temperature
