"""Tempered evidence lower bounds for ``pyro.infer.SVI`` and for torch's optimizers.

The bound is L(eta) = E_q[log p(y | w)] - eta KL(q || p(w)), with the sum over data scaled by N / B.
Its optimum approximates the tempered posterior, which is proportional to p(y | w)^(1/eta) p(w); eta
= 1 is the Bayesian posterior (Huix et al. 2022).

All threads share Pyro's handlers, so only one thread at a time may run programs and take steps.
These bounds refuse a second thread; Pyro's bounds do not notice it.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.elbo.finite_loss import CheckedLoss, check_value
from pyro_bdl.elbo.step import Step, Terms
from pyro_bdl.elbo.unscaled_batches import UnscaledBatches
from pyro_bdl.errors import BdlWarning
from pyro_bdl.estimators import PerDatum, as_estimator
from pyro_bdl.estimators.per_datum import Products, active
from pyro_bdl.estimators.rows import RowwiseLikelihood
from pyro_bdl.estimators.sticking import constant_parameters
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import run_at_draw
from pyro_bdl.guides.kl import entropy, mean_field_kl, sampled_kl
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.supports import check_support, nan_outside_support
from pyro_bdl.program.trace import Run, record, sum_out_discrete
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.utils.autocast import without_autocast
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import check_temperature, whole_number

_NOTHING_OBSERVED = (
    "the program has no observed site: pass the targets to the step, so that a sample statement "
    "gets obs=..."
)
Temperature = float | Callable[[int], float]


class TemperedTrace_ELBO(CheckedLoss, Trace_ELBO):
    """L(eta) = E_q[log p(y | w)] - eta E_q[log q(w) - log p(w)], estimated at draws of the guide.

    ``pyro.factor`` terms count as likelihood. After each step ``expected_log_likelihood``,
    ``kl`` (both in nats, detached scalars) and ``temperature`` hold the terms of that step, and the
    guide has all of it as ``guide.last_step``, which natural-gradient optimizers read.

    Under ``torch.autocast`` only the program is cast, that is the network's forward pass. The
    guide's parameters and draws, the KL and sums of densities stay in float32.

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
        self.is_cold = cold_temperature is not None
        self.schedule = _as_schedule(temperature if cold_temperature is None else cold_temperature)
        self.step = 0
        self.temperature = self.schedule(0)
        self.kl: Tensor | None = None
        self.expected_log_likelihood: Tensor | None = None
        self.estimator = as_estimator(estimator)
        self.sticking_the_landing = sticking_the_landing
        self._map = DrawMap()
        self._checked: tuple[Callable, Callable] | None = None
        self._trained: tuple[Callable, Callable] | None = None
        self._parts: list[Guide] = []  # the guides of this package in the guide that is trained
        self._rows: dict[tuple[Callable, int], RowwiseLikelihood] = {}
        self.batches = UnscaledBatches(enabled=callable(temperature) or temperature == 1.0)

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats at the current step's temperature, without counting a step."""
        with torch.no_grad():
            loss = self._evaluate(model, guide, args, kwargs).loss.item()
        return check_value(loss, partial(check_data, model, guide, args, kwargs))

    def unchecked_loss(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Tensor:
        return self.take_step(model, guide, *args, **kwargs).loss

    def check_data(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        check_data(model, guide, args, kwargs)

    def take_step(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Step:
        """Take a step of the schedule, whose loss may be not finite.

        :returns: the loss to differentiate, its terms, and what optimizers need of them.
        """
        if self._trained != (model, guide):
            self._check_once(model, guide, args, kwargs)
            self._begin(model, guide)
        self.batches.expect()
        step = self._evaluate(model, guide, args, kwargs)
        self.finish(step)
        return step

    def _begin(self, model: Callable, guide: Callable) -> None:
        """Find the guides to train; warn if each step reaches some members of an ensemble only."""
        self._trained = model, guide
        parts = guide.modules() if isinstance(guide, nn.Module) else ()
        self._parts = [part for part in parts if isinstance(part, Guide)]
        self.batches.restart()
        members = guide.num_members if isinstance(guide, Guide) else 1
        if self.num_particles < members:
            warnings.warn(
                f"each step trains {self.num_particles} of the {members} members of "
                f"{type(guide).__name__}: give the ELBO num_particles={members}, which trains all "
                f"at once, or take {members / self.num_particles:.3g} times as many steps",
                BdlWarning,
                stacklevel=4,
            )

    def finish(self, step: Step) -> None:
        """Count a step, and hand it to the guides that took it."""
        self.step += 1
        detached = step._replace(loss=step.loss.detach())
        for part in self._parts:
            part.note_step(detached)

    def _evaluate(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Step:
        """-L(eta) at the current step's temperature, from new draws."""
        self._check_once(model, guide, args, kwargs)
        temperature = check_temperature(self.schedule(self.step))
        try:
            with pyro.validation_enabled(False):
                terms = self.terms(model, guide, args, kwargs)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                check_data(model, guide, args, kwargs)  # finds labels without a class
            raise
        return self.noted(terms, self.negative_bound(terms, temperature), temperature)

    def noted(self, terms: Terms, loss: Tensor, temperature: float) -> Step:
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

    def _check_once(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        if self._checked != (model, guide):
            _check(model, guide, args, kwargs)
            self._checked = model, guide

    def prepare(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> PerDatum | None:
        """The estimator of a step, after a comparison of rows alone with all rows at once where the
        program or the number of rows is new to it; None for plain draws.

        :raises UnsupportedProgramError: if the data depend on each other.
        """
        estimator = self.estimator or active()
        if estimator is None:
            return None
        key = model, leading_size((args, kwargs))
        if key not in self._rows:
            with poutine.block(), torch.no_grad(), preserved_buffers(guide), own_randomness():
                values = _values(record(guide, {}, args, kwargs))
            self._rows[key] = RowwiseLikelihood(estimator.name, model, values, args, kwargs)
        return estimator

    def terms(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Terms:
        """The parts of the bound, averaged over the particles."""
        estimator = self.prepare(model, guide, args, kwargs)
        if isinstance(guide, Guide) and not guide.subsampled:
            with guide.reading():
                return self.flat_terms(model, guide, args, kwargs, estimator)
        particles = [
            self._site_terms(model, guide, args, kwargs, estimator)
            for _ in range(self.num_particles)
        ]
        return Terms(*(torch.stack(t).mean() for t in zip(*particles, strict=True)))

    def _site_terms(
        self,
        model: Callable,
        guide: Callable,
        args: tuple,
        kwargs: dict,
        estimator: PerDatum | None,
    ) -> tuple[Any, Tensor, Tensor]:
        """log p(y | w), the KL and (in cold mode) H(q) in nats at one draw of any guide, from its
        sample statements."""
        if estimator is None:
            with without_autocast():
                q = record(guide, {}, args, kwargs)
            p = record(model, _values(q), args, kwargs, draw=sum_out_discrete)
            likelihood = self.log_likelihood(p, q.latents)
        else:
            with estimator.run({}, {}) as products:
                with without_autocast(), products:
                    q = record(guide, {}, args, kwargs, draw=products.sample)
                likelihood, p = self._row_by_row(model, _values(q), args, kwargs, products)
        with without_autocast():
            kl = self._site_kl(q, p) + q.log_likelihood()  # the latter holds the guide's factors
            q_entropy = entropy(q.latents) if self.is_cold else torch.zeros_like(kl)
            if self.sticking_the_landing:
                log_q = _log_density_without_score(guide, q, args, kwargs)
                kl, q_entropy = log_q - p.log_prior(), -log_q
        return likelihood, kl, q_entropy

    def flat_terms(
        self,
        model: Callable,
        guide: Guide,
        args: tuple,
        kwargs: dict,
        estimator: PerDatum | None,
    ) -> Terms:
        """The parts of the bound from the flat vectors of our guides, without their sample
        statements."""

        def particle(draw: dict[str, Tensor]) -> tuple[Any, Tensor, Tensor]:
            return self.particle(model, guide, draw["u"], args, kwargs, estimator)

        with without_autocast():
            vectors = guide.sample_vectors(self.num_particles)
        draw = vectors[0] if self.num_particles == 1 else vectors.detach().mean(0)
        if self.num_particles == 1:
            terms = self.particle(model, guide, draw, args, kwargs, estimator)
        else:
            terms = tuple(t.mean() for t in self._map(particle, {"u": vectors}))
        return Terms(*terms, draw.detach() if estimator is None else None)

    def particle(
        self,
        model: Callable,
        guide: Guide,
        vector: Tensor,
        args: tuple,
        kwargs: dict,
        estimator: PerDatum | None = None,
    ) -> tuple[Any, Tensor, Tensor]:
        """log p(y | w), the KL and (in cold mode) H(q) in nats at a draw u (P,)."""
        with without_autocast():
            latents, log_det = guide.require_layout().constrain(vector)
            distributions = {} if estimator is None else estimator.distributions(guide)
        if estimator is None:
            p = record(model, latents, args, kwargs, draw=sum_out_discrete)
            likelihood = self.log_likelihood(p, latents)
        else:
            with estimator.run(distributions, latents) as products:
                likelihood, p = self._row_by_row(model, latents, args, kwargs, products)
        with without_autocast():
            kl = self._flat_kl(guide, vector, log_det, p)
            q_entropy = torch.zeros_like(kl)
            if self.is_cold:
                q_entropy = self._flat_entropy(guide, vector, log_det)
        return likelihood, kl, q_entropy

    def log_likelihood(self, run: Run, latents: Collection[str]) -> Any:
        """log p(y | w) of a run in nats, a scalar; NaN if a target lies outside its support.

        :param latents: the sites whose values the run was given.
        :raises ValueError: if the program drew other latents, such as missing targets.
        """
        _require_values(run, latents)
        if self.batches.expected:
            self.batches.see(run.observed)
        return nan_outside_support(run.log_likelihood(), run)

    def _row_by_row(
        self, model: Callable, values: dict[str, Any], args: tuple, kwargs: dict,
        products: Products,
    ) -> tuple[Tensor, Run]:  # fmt: skip
        """The same with noise for each datum, and a run with the latents' priors."""

        def of_datum(program: Callable[[], Run]) -> Run:
            run = products.of_datum(program)
            _require_values(run, values)
            return run

        rows = self._rows[model, leading_size((args, kwargs))]
        likelihood, run = rows(values, args, kwargs, run=of_datum)
        if self.batches.expected:
            self.batches.see(run.observed)
        return likelihood, run

    def _site_kl(self, q: Run, p: Run) -> Tensor:
        return sampled_kl(q.latents, p.latents)

    def _flat_kl(self, guide: Guide, vector: Tensor, log_det: Tensor, p: Run) -> Tensor:
        return self._log_density(guide, vector, log_det) - p.log_prior()

    def _flat_entropy(self, guide: Guide, vector: Tensor, log_det: Tensor) -> Tensor:
        if self.sticking_the_landing:
            return -self._log_density(guide, vector, log_det)
        return guide.entropy(vector, log_det)

    def _log_density(self, guide: Guide, vector: Tensor, log_det: Tensor) -> Tensor:
        if not self.sticking_the_landing:
            return guide.log_density(vector, log_det)
        with guide.constant():
            return guide.log_density(vector, log_det)


class TemperedTraceMeanField_ELBO(TemperedTrace_ELBO):
    """L(eta) with the KL of each site in closed form, if there is one.

    For guides that factorize over the sites, such as ``AutoMeanField``. Sites without a closed
    form, and guides that emit a Delta, are evaluated at the draw, including log determinants.

    :raises ValueError: for ``sticking_the_landing``, since closed forms have no score term.
    """

    def __init__(self, *args: Any, sticking_the_landing: bool = False, **options: Any) -> None:
        if sticking_the_landing:
            raise ValueError(
                "sticking_the_landing concerns a KL that is evaluated at draws, and this ELBO has "
                "closed forms: use TemperedTrace_ELBO"
            )
        super().__init__(*args, **options)

    def _site_kl(self, q: Run, p: Run) -> Tensor:
        return mean_field_kl(q.latents, p.latents)

    def _flat_kl(self, guide: Guide, vector: Tensor, log_det: Tensor, p: Run) -> Tensor:
        return guide.kl(vector, log_det, p)


def _log_density_without_score(guide: Callable, q: Run, args: tuple, kwargs: dict) -> Tensor:
    """log q(w) at the guide's draw w, including its factors, with constant parameters.

    Dropped weights are the exception: their density is an entropy in closed form without a score.
    """
    closed = {n: s for n, s in q.latents.items() if isinstance(s.distribution, NoisyWeight)}
    with constant_parameters(guide):
        again = record(guide, _values(q), args, kwargs)
        rest = {name: site for name, site in again.latents.items() if name not in closed}
        log_q = sampled_kl(rest, {}) + again.log_likelihood()
    return log_q + sampled_kl(closed, {})


def _as_schedule(temperature: Temperature) -> Callable[[int], float]:
    if callable(temperature):
        return temperature
    check_temperature(temperature)
    return lambda step: temperature


def check_data(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
    """Check the data of a step whose loss is not finite.

    :raises ValueError: if the data are not finite, targets are missing or outside their support, or
        the guide belongs to another program.
    :raises TypeError: for an argument that the program cannot use.
    """
    check_finite(model, args, kwargs)
    with (
        poutine.block(), torch.no_grad(), preserved_buffers(model, guide),
    ):  # fmt: skip
        q, p = _draw(model, guide, args, kwargs)
        _check_sites(q, p, isinstance(guide, Guide))
        check_support(p)


def _check(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
    """Check program and guide once; later runs skip Pyro's validation.

    The random state is restored, so that training continued from a saved state draws the same
    numbers as uninterrupted training.
    """
    check_finite(model, args, kwargs)
    with (
        poutine.block(), torch.no_grad(), preserved_buffers(model, guide), own_randomness(),
    ):  # fmt: skip
        q, p = _draw(model, guide, args, kwargs)
        _check_sites(q, p, isinstance(guide, Guide))
        check_support(p)
        bias = p.bias_of_minibatches()
        if bias is not None:
            warnings.warn(bias, BdlWarning, stacklevel=3)
        hidden = [] if p.discrete is None else list(p.discrete.names)
        del q, p  # before Pyro's own run, which needs as much memory
        shown = poutine.block(model, hide=hidden) if hidden else model
        Trace_ELBO().loss(shown, guide, *args, **kwargs)


def _draw(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> tuple[Run, Run]:
    """A run of the guide, and one of the program at the guide's draw."""
    q = record(guide, {}, args, kwargs)
    return q, run_at_draw(model, _values(q), args, kwargs, draw=sum_out_discrete)


def _values(q: Run) -> dict[str, Any]:
    """The values of a guide's draw and the indices of its plates."""
    return {name: site.value for name, site in q.latents.items()} | q.subsamples


def _check_sites(q: Run, p: Run, complete: bool) -> None:
    for name, site in q.latents.items():
        if not site.distribution.has_rsample:
            raise ValueError(
                f"the guide's distribution at site '{name}' cannot be reparameterized "
                f"({type(site.distribution).__name__}): use pyro.infer.Trace_ELBO"
            )
    if not p.observed and not p.factors:
        raise ValueError(_NOTHING_OBSERVED)
    if not p.latents.keys() <= q.latents.keys():
        raise ValueError(_without_value(p, q.latents))
    surplus = [name for name in q.latents if name not in p.latents] if complete else []
    if surplus:
        raise ValueError(
            f"the guide has the site '{surplus[0]}', which is not a latent of the program here: "
            "make a new guide, and give prototype(...) the targets too"
        )


def _require_values(run: Run, latents: Collection[str]) -> None:
    """Check that a run has observed data and drew no latents besides the given ones."""
    if run.open or not run.latents.keys() <= set(latents):
        raise ValueError(_without_value(run, latents))
    if not run.observed and not run.factors:
        raise ValueError(_NOTHING_OBSERVED)


def _without_value(run: Run, latents: Collection[str]) -> str:
    names = [name for name, site in run.observed.items() if site.value is None]
    name = next(name for name in (*names, *run.latents) if name not in latents)
    return (
        f"the guide has no value for the latent site '{name}': if it is observed, pass its targets "
        "to this step too"
    )
