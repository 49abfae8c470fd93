"""How wide the Gaussian around a trained network is, by the density of held-out rows.

The evidence cannot choose this for a trained classifier. Its prior has to explain the size of the
weights, so that their scale is about |u*| / sqrt(gamma), and the many directions that data do not
determine get this scale too. The curvature at the mode does not see what that does: with
probabilities p near 0 and 1 it is p (1 - p), and the outputs may spread by 1 / sqrt(p (1 - p)) at
the training rows themselves.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_bdl.curvature import closed_forms
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.fisher import exact_columns, num_data, site_parameters
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import GaussianOutputs, observed_outputs
from pyro_bdl.curvature.structures.base import Precision
from pyro_bdl.distributions.parameters import is_known
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.program.batches import Batch, Batches, has_rows, leading_size, select_rows
from pyro_bdl.program.check import check_finite_batches, on_whole_data
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import listed, ranked

if TYPE_CHECKING:
    from pyro_bdl.guides.gaussian import LaplaceGuide


FACTORS = tuple(10.0 ** (exponent / 8) for exponent in range(-96, 17))
_UNCHANGED = 1e-4  # nats for each row, on average
_DRAWS = 256  # where a density has no closed form
_TOPIC = "worse than the network"
_LEAST_ROWS, _MOST_ROWS = 8, 64
_COLUMNS = 1024  # of their Jacobian, about
_LEAST_LOSS = 0.01  # nats for each row; less is no reason to act


@dataclass(frozen=True)
class HeldOutGain:
    """What held-out rows say of the posteriors N(u*, t C), linearized at u*; print it.

    The gain is the mean of log p_t(y | x) - log p_0(y | x) at the best factor t, where p_0 is the
    network itself. The posterior has this factor if the gain is above two standard errors: the
    best of many factors gains a little by chance. If not, it has the largest factor by which the
    densities of the rows change by 1e-4 nats on average. Rows of which masks leave out all targets
    do not count.

    :param rows: the number of rows; those of which masks leave out all targets do not count.
    :param factor: t, of the posterior's covariance.
    :param gain: in nats for each row.
    :param error: its standard error.
    """

    rows: int
    factor: float
    gain: float
    error: float

    @property
    def helps(self) -> bool:
        """True if the gain is above two standard errors, and above 1e-4 nats."""
        return self.gain > max(2.0 * self.error, _UNCHANGED)

    def __repr__(self) -> str:
        gain = f"{self.gain:.4f} ± {self.error:.4f} nats"
        if max(abs(self.gain), self.error) < 5e-5:
            gain = "less than 0.0001 nats"
        if self.helps:
            return f"on {self.rows} held-out rows the posterior gains {gain}"
        return (
            f"on {self.rows} held-out rows the posterior adds nothing beyond its error ({gain} at "
            "its best): the network is kept, the posterior is for inputs unlike these"
        )


@torch.no_grad()
def search(at: ProgramAtPoint, precision: Precision, held_out: Batches) -> HeldOutGain:
    """Find the factor t of the covariance C under which held-out rows are most probable.

    Each row's outputs are N(f(x; u*), t J C J'), so that one pass over the rows, for J C J', is
    enough for all factors.

    :param at: the program at u*.
    :param precision: C^-1, of the subset.
    :param held_out: rows with targets that the network was not trained on.
    :raises ValueError: for fewer than two rows, rows without targets, that are not finite, or that
        are impossible under the network itself.
    """
    check_held_out(at.model, held_out)
    log_densities, seen = densities(at, precision, held_out, (0.0, *FACTORS))
    rows = int(seen.sum())
    if rows < 2:
        raise ValueError(f"held_out needs at least two rows with targets, got {rows}")
    possible = log_densities.isfinite()
    if not possible[0].all():
        raise ValueError(
            f"held_out: rows {listed((~possible[0]).nonzero()[:, 0].tolist())} (counted over all "
            "batches) have no finite density under the network itself: leave them out, or give "
            "the observations a distribution under which they are possible"
        )
    scored = possible[1:].all(1)
    if not scored.any():
        raise ValueError("held_out: no width of the posterior gives every row a finite density")
    if not scored.all():
        left_out = [FACTORS[place] for place in (~scored).nonzero()[:, 0].tolist()]
        warn(
            f"{len(left_out)} of {len(FACTORS)} factors of the covariance, from {left_out[0]:.2g} "
            f"to {left_out[-1]:.2g}, give held-out rows no finite density and are left out",
            "held-out-widths",
        )
    changes = (log_densities[1:] - log_densities[0])[:, seen]
    gains, errors = changes.mean(1), changes.std(1) / math.sqrt(rows)
    best = int(ranked(gains).argmax())
    found = HeldOutGain(rows, FACTORS[best], float(gains[best]), float(errors[best]))
    if found.helps:
        return found
    unchanged = (changes.abs().mean(1) <= _UNCHANGED).nonzero()[:, 0].tolist()
    return replace(found, factor=FACTORS[max(unchanged, default=int(scored.nonzero()[0]))])


@torch.no_grad()
def densities(
    at: ProgramAtPoint, precision: Precision, batches: Iterable[Batch], factors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """log p_t(y | x) of each row under each factor t, (factors, n), t = 0 being the network, and
    the rows of which masks leave out not every target, bool (n,)."""
    parts, seen = [], []
    for part in at.linearizations(batches, every_output=True):
        sites = [outputs.gaussian(precision) for outputs in observed_outputs(part).values()]
        parts.append(torch.stack([log_densities(sites, factor) for factor in factors]))
        seen.append(_seen_rows(sites).to(parts[-1].device))
    return torch.cat(parts, 1), torch.cat(seen)


def check_held_out(model: Callable, held_out: Batches) -> None:
    """Check that held-out rows are finite.

    :raises ValueError: naming the argument and the rows.
    """
    try:
        check_finite_batches(model, held_out)
    except ValueError as error:
        raise ValueError(f"held_out, {error}") from None


def log_densities(sites: list[GaussianOutputs], factor: float) -> Tensor:
    """log p(y | x) of each row, (n,), where the outputs' covariances are multiplied by a factor."""
    terms = []
    for gaussian in sites:
        outputs, site = gaussian.outputs, gaussian.outputs.site
        assert site is not None
        if site.value is None:
            raise ValueError(f"held_out has no targets for the site '{outputs.name}': pass (x, y)")
        if not site.distribution.batch_shape:
            raise UnsupportedProgramError(
                f"the rows of the site '{outputs.name}' are one event, without densities of their "
                "own: observe them in a plate"
            )
        scaled = replace(gaussian)
        scaled.covariance = factor * gaussian.covariance
        density = closed_forms.log_density(scaled)
        density = _over_draws(scaled) if density is None else density
        terms.append(double(density).reshape(outputs.num_data, -1).sum(1))
        if len(terms[-1]) != len(terms[0]):
            raise UnsupportedProgramError(
                f"the site '{outputs.name}' has {outputs.num_data} rows, and "
                f"'{sites[0].outputs.name}' {len(terms[0])}, so that there is no density of each "
                "held-out row: give the rows of both as arguments"
            )
    return torch.stack(terms).sum(0)


def _seen_rows(sites: list[GaussianOutputs]) -> Tensor:
    """Which rows have a target that masks do not leave out, bool (n,)."""
    marks = []
    for outputs in (gaussian.outputs for gaussian in sites):
        assert outputs.site is not None
        marks.append(outputs.site.seen().cpu().reshape(outputs.num_data, -1).any(1))
    return torch.stack(marks).any(0)


def _over_draws(gaussian: GaussianOutputs) -> Tensor:
    """The log of the mean density over draws of the outputs, the same for every factor."""
    outputs = gaussian.outputs
    values, vectors = torch.linalg.eigh(double(gaussian.covariance))
    roots = vectors * values.clamp(min=0.0).sqrt()[:, None]
    with seeded(0):
        noise = torch.randn(_DRAWS, *gaussian.mean.shape, device="cpu").to(roots)
    drawn = gaussian.mean + torch.einsum("nij,snj->sni", roots, noise).to(gaussian.mean)
    constant = {key: value.expand(_DRAWS, *value.shape) for key, value in outputs.values.items()}
    site = outputs.observed(constant | outputs.split(drawn))
    return site.unscaled_log_prob().logsumexp(0) - math.log(_DRAWS)


@torch.no_grad()
def is_worse_than_network(guide: "LaplaceGuide", first: Linearization, batches: Batches) -> bool:
    """Return whether the posterior gives the first rows of its own data a lower log density than
    the network at u* alone does, and warn of it, once for a program.

    A posterior that is right loses there too, as the network has seen these rows. With leverages
    a, the eigenvalues of S' J C J' S for a row's Jacobian J and Fisher information S S', it loses
    at most 1/2 sum log(1 + a), where the network fits the row exactly. No right posterior has
    a > 1: the row's own likelihood alone leaves less. So the loss is to be above the mean of
    1/2 sum_{a < 1} log(1 + a) by two standard errors over the rows, and above 0.01 nats.

    :param first: of the program at u*, on the first rows, as many as the fit took at once.
    """
    rows = 0 if _TOPIC in guide.warned_of else _comparable_rows(guide, first.run, batches)
    if rows == 0:
        return _TOPIC in guide.warned_of
    alone, posterior, predicted = [], [], []
    parts: Iterable[Linearization] = [first]
    if leading_size((first.args, dict(first.kwargs))) != rows:
        some = [select_rows(batches.first(), slice(rows))]
        parts = guide.at(on_whole_data(guide.program_model)).linearizations(some, every_output=True)
    for part in parts:
        sites = [o.gaussian(guide.precision) for o in observed_outputs(part).values()]
        alone.append(log_densities(sites, 0.0))
        posterior.append(log_densities(sites, 1.0))
        predicted.append(sites)
    before, after = torch.cat(alone), torch.cat(posterior)
    losses = before - after
    loss, error = float(losses.mean()), float(losses.std()) / math.sqrt(len(losses))
    if not loss > max(2.0 * error, _LEAST_LOSS):  # what a right one loses is asked where it matters
        return False
    right = [torch.stack([_loss_of_a_right_one(site) for site in sites]) for sites in predicted]
    if not loss > float(torch.cat([part.sum(0) for part in right]).mean()) + 2.0 * error:
        return False
    guide.warned_of.add(_TOPIC)
    warn(
        f"the posterior predicts {len(losses)} of its own training rows worse than the network "
        f"alone: their log density is {float(after.mean()):.3g} nats each instead of "
        f"{float(before.mean()):.3g} (difference {-loss:.2g} ± {error:.1g}); whether it is too "
        "wide, or the network too sure of rows that it has learned by heart, other rows say, and "
        "choose the width: laplace_approximation(data, held_out=(x, y))",
        "worse-than-the-network",
    )
    return True


def _comparable_rows(guide: "LaplaceGuide", run: Run, batches: Batches) -> int:
    """The number of first rows whose densities are compared; 0 where they have none in closed form
    for each row."""
    observed = run.observed.values()
    if batches.ranks is not None or run.factors:
        return 0
    if not all(is_known(site.distribution) for site in observed):
        return 0
    batch = batches.first()
    count = leading_size(batch)
    moving = [(value, site) for site in observed for value in site_parameters(site).values()]
    numbers = sum(value.numel() / num_data(site) for value, site in moving)
    rows = min(count, _MOST_ROWS, max(_LEAST_ROWS, int(_COLUMNS / max(1.0, numbers))))
    if not all(site.distribution.batch_shape for site in observed):  # rows are one event
        return 0
    if len({num_data(site) for site in observed}) > 1:  # some are no rows of the arguments
        return 0
    needs_all = guide.config.rows == "together" or leading_size(guide.example_rows) == count
    if not has_rows(batch, count) or rows < _LEAST_ROWS or (needs_all and rows < count):
        return 0
    return rows


def _loss_of_a_right_one(gaussian: GaussianOutputs) -> Tensor:
    """1/2 sum_{a < 1} log(1 + a) over the leverages a of each row, (n,)."""
    outputs, count = gaussian.outputs, len(gaussian.mean)
    roots = [
        torch.cat([column[key].reshape(count, -1) for key in outputs.dependent], -1)
        for column in outputs.unconstrained(outputs.values, exact_columns)
    ]
    if not roots:
        return double(gaussian.mean.new_zeros(count))
    root = double(torch.stack(roots, -1))
    leverages = torch.linalg.eigvalsh(root.mT @ double(gaussian.covariance) @ root).clamp(min=0.0)
    return 0.5 * (torch.log1p(leverages) * (leverages < 1.0)).sum(-1)
