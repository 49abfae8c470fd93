"""Checks of a training run: a guide that ignores the inputs, a prior that shrinks to 0."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.fisher import num_data
from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.low_rank import AutoLowRank
from pyro_bdl.guides.matrix_normal import AutoMatrixNormal
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.program.batches import Batch, device_of_rows, leading_size, select_rows
from pyro_bdl.program.trace import Run, Site, record, sum_out_discrete
from pyro_bdl.training.descent import counted
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import require

_FAMILIES = AutoMeanField, AutoLowRank, AutoMatrixNormal
_KL = 0.1  # nats per datum
_GAIN = 0.05  # nats per datum: -1/2 log(1 - r^2) of a correlation r of 0.3 with the targets
_DRAWS = 256
_GROUPS = 8  # of draws, each left out once
_OTHERS = 8  # rows whose inputs are exchanged for those of each datum
_TRAINED = 100  # steps, after which a guide is no longer where it began
_ROWS = 256  # that the warning looks at, where steps are taken on minibatches


class Collapse(NamedTuple):
    """How far a guide is from a posterior that ignores the inputs.

    :param kl: KL(q || p(w)) per datum, in nats.
    :param gain: how much the inputs improve the predictions, in nats per datum,

            mean_n log q(y_n | x_n) - log mean_m q(y_n | x_m),

        with the predictive density q(y | x) of 256 draws and m over 8 other rows; rows that are
        masked do not count. NaN where data depend on each other.
    :param error: the standard error of ``gain``, over data and over draws.
    """

    kl: float
    gain: float
    error: float

    @property
    def complete(self) -> bool:
        """True if q is close to the prior, and the gain is surely small and not surely above 0."""
        return self.kl < _KL and _ignores_inputs(self)


def _ignores_inputs(found: Collapse) -> bool:
    """Return whether the gain is surely small and not surely above 0."""
    bound = 2.0 * found.error
    return found.gain <= bound and found.gain + bound < _GAIN


@torch.no_grad()
def collapse(model: Callable, guide: Guide, *args: Any, **kwargs: Any) -> Collapse:
    """Measure how far a guide has collapsed to the prior.

    A wide network's mean-field guide does so at temperature 1: the KL grows with the number of
    neurons and the log likelihood does not (Coker et al. 2021; Huix et al. 2022).

    :param args: the program's arguments, targets included.
    """
    require(guide, Guide, "collapse takes the guides of pyro_bdl")
    guide.prototype(*args, **kwargs)
    elbo = TemperedTraceMeanField_ELBO()
    with preserved_buffers(guide.program_modules), own_randomness():
        elbo.loss(model, guide, *args, **kwargs)
    kl = _kl_of_latents(elbo, model, guide, args, kwargs)
    return _measured(model, guide, [(args, kwargs)], kl)


@torch.no_grad()
def _kl_of_latents(elbo: Any, model: Callable, guide: Guide, args: tuple, kwargs: Any) -> Tensor:
    """The KL of a bound's last step, which counts the prior's factors too, without these: they are
    of hyperparameters or of weights that are no latents."""
    with preserved_buffers(guide.program_modules), own_randomness():
        latents = guide.require_layout().constrain(guide.sample_vectors(1)[0])[0]
        run = record(model, latents, args, kwargs, draw=sum_out_discrete)
    total: Tensor = elbo.kl
    for site in run.prior_factors.values():
        total = total + site.log_prob().sum()
    return total


def warn_of_collapse(
    model: Callable, guide: Guide, elbo: Any, batch: Batch, size: int, *, total: int, steps: int
) -> None:
    """Warn if a Gaussian guide of more numbers than data, trained at temperature 1, ignores the
    inputs.

    After few steps that is to be expected, unless it has collapsed to the prior. The KL alone does
    not tell: of many weights it is large even where the last layer alone has been shut.

    :param elbo: the bound after its last step.
    :param batch: the program's arguments with all rows, or with those of one step.
    :param size: the rows of a step, so that the program is run on no other number of them.
    :param total: the number of all data.
    :param steps: the number of steps taken.
    """
    bayesian = isinstance(elbo, TemperedTrace_ELBO) and elbo.temperature == 1.0
    if not bayesian or elbo.kl is None or not isinstance(guide, _FAMILIES):
        return
    rows = leading_size(batch)
    latents = guide.require_layout().latents.values()
    shared = sum(latent.unconstrained_shape.numel() for latent in latents if not latent.plates)
    if not total < shared:
        return
    batches = [batch]
    if size < rows:
        count = max(1, min(rows, _ROWS) // size)
        spread = torch.arange(count * size, device=device_of_rows(batch)) * rows // (count * size)
        batches = [select_rows(batch, part) for part in spread.split(size)]
    kl = _kl_of_latents(elbo, model, guide, *batches[0])
    if steps < _TRAINED and not float(kl) < _KL * total:
        return
    measured = _measured(model, guide, batches, kl, total)
    if not _ignores_inputs(measured):
        return
    found = (
        f"KL(q || p) is {measured.kl:.2g} nats per datum, and the inputs raise the log density of "
        f"a target by {measured.gain:.2g} ± {measured.error:.1g} nats"
    )
    if not measured.complete:
        warn(
            f"the guide's predictions ignore the inputs after {steps} steps, or the inputs say "
            f"nothing of the targets: {found}. Where a network trained by AutoMAP predicts better, "
            "the training left the data or did not reach them: lower the learning rate, above all "
            "of a natural-gradient optimizer, take more steps, or temper the ELBO",
            "collapse",
        )
        return
    warn(
        f"the guide has collapsed to the prior, or the inputs say nothing of the targets: {found}. "
        "Mean-field of a wide network collapses at temperature 1: give the ELBO temperature="
        "pyro_bdl.temperature.overparameterized(tau, num_data, num_neurons), tau about 0.01",
        "collapse",
    )


@torch.no_grad()
def _measured(
    model: Callable, guide: Guide, batches: Sequence[Batch], kl: Tensor, rows: int = 0
) -> Collapse:
    """The numbers of a collapse from the densities of some data; the KL is per datum of ``rows``,
    by default of as many as the program states."""
    own, others, seen, stated = [], [], [], 1
    with preserved_buffers(guide.program_modules), own_randomness():
        vectors = guide.sample_vectors(_DRAWS)
        for args, kwargs in batches:
            densities = []
            for vector in vectors:
                latents = guide.require_layout().constrain(vector)[0]
                run = record(model, latents, args, kwargs, draw=sum_out_discrete)
                densities.append(_densities(run))
            sites, stated = run.observed.values(), max(1, counted(run.observed)[1])
            if any(density is None for density in densities):
                return Collapse(float(kl) / (rows or stated), math.nan, math.nan)
            stacked = torch.stack(densities)  # type: ignore[arg-type]
            own.append(stacked[:, 0])
            others.append(stacked[:, 1:])
            marks = [
                site.seen().to(site.value.device).reshape(len(site.value), -1) for site in sites
            ]
            seen.append(torch.cat(marks, 1).any(1))
    known = torch.cat(seen)
    log_q, log_c = torch.cat(own, -1)[:, known], torch.cat(others, -1)[..., known]
    gains = _gains(log_q, log_c)
    groups = torch.arange(len(log_q), device=log_q.device) % _GROUPS
    left = torch.stack([
        _gains(log_q[groups != group], log_c[groups != group]).mean() for group in range(_GROUPS)
    ])  # fmt: skip
    error = (gains.var() / len(gains) + (_GROUPS - 1) * left.var(correction=0)).sqrt()
    return Collapse(float(kl) / (rows or stated), float(gains.mean()), float(error))


def _gains(log_q: Tensor, log_c: Tensor) -> Tensor:
    """log q(y_n | x_n) - log mean_m q(y_n | x_m), (n,), of densities (S, n) and (S, m, n)."""
    of_others = log_c.flatten(0, 1)
    own = log_q.logsumexp(0) - math.log(len(log_q))
    return own - of_others.logsumexp(0) + math.log(len(of_others))


def _densities(run: Run) -> Tensor | None:
    """log p(y_n | w, x_n) of each row, and log p(y_n | w, x_m) with the inputs of others,
    (1 + others, n); None where there are no rows that can be exchanged."""
    sites = [site for site in run.observed.values() if site.value is not None]
    counts = {num_data(site) for site in sites}
    (count,) = counts if len(counts) == 1 else (1,)
    if count == 1 or run.factors or run.coupled_data() or not all(map(_has_rows, sites)):
        return None
    size = min(_OTHERS, count - 1)
    shifts = sorted({count * (number + 1) // (size + 1) for number in range(size)})
    total: Any = 0.0
    for site in sites:
        rows = []
        for shift in (0, *shifts):
            moved = site._replace(value=site.value.roll(shift, 0), mask=_rolled(site.mask, shift))
            density = double(moved.unscaled_log_prob())
            rows.append(density.reshape(count, -1).sum(1).roll(-shift, 0))
        total = total + torch.stack(rows)
    return total


def _has_rows(site: Site) -> bool:
    """Return whether targets and mask have the data in front, with no mask at another place."""
    count, mask = num_data(site), site.mask
    masked = isinstance(mask, Tensor) and mask.shape != site.distribution.batch_shape
    return len(site.value) == count and not masked and not masks_of(site.distribution)


def _rolled(mask: Any, shift: int) -> Any:
    return mask.roll(shift, 0) if isinstance(mask, Tensor) else mask


def warn_of_joint_scales(
    model: Callable, guide: Guide, trained: Sequence[Tensor], batch: Batch
) -> None:
    """Warn if weights at a point and the scales of their prior are to be trained together.

    log p(w | s) grows without bound as w and s go to 0 together, so that there is no maximum.

    :param trained: what the optimizer changes.
    :param batch: the program's arguments, of which the first rows will do.
    """
    if guide.has_density or not isinstance(model, nn.Module):
        return
    names = {id(p): name.removesuffix("_unconstrained") for name, p in model.named_parameters()}
    own = [p for p in trained if id(p) in names]
    if not own:
        return
    some = torch.arange(min(leading_size(batch), _ROWS), device=device_of_rows(batch))
    args, kwargs = select_rows(batch, some)
    with preserved_buffers(guide.program_modules), own_randomness(), torch.enable_grad():
        vector = guide.sample_vectors(1)[0].detach()
        latents = guide.require_layout().constrain(vector)[0]
        run = record(model, latents, args, kwargs, draw=sum_out_discrete)
    priors = [site.log_prob().sum() for site in run.latents.values()]
    scales = [names[id(p)] for p in own if any(reaches(prior, [p]) for prior in priors)]
    if scales:
        warn(
            f"{', '.join(scales)} of the prior and weights at a point have no maximum together, "
            "and go to 0: train the guide alone, optimizer=torch.optim.Adam(guide.parameters()) "
            "after guide.prototype(x, y), and set the prior by evidence.maximize, or let "
            "evidence.train_by_evidence do both",
            "joint-scales",
        )
