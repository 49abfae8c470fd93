"""Comparison of a posterior with the network at its center, on its own training rows."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_bdl.curvature.fisher import exact_columns, num_data, site_parameters
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.curvature.linear_outputs import GaussianOutputs, observed_outputs
from pyro_bdl.distributions.parameters import is_known
from pyro_bdl.errors import warn
from pyro_bdl.guides.held_out import log_densities
from pyro_bdl.program.batches import Batches, has_rows, leading_size, taken
from pyro_bdl.program.check import on_whole_data
from pyro_bdl.program.trace import Run

if TYPE_CHECKING:
    from pyro_bdl.guides.gaussian import LaplaceGuide

_TOPIC = "worse than the network"
_LEAST_ROWS, _MOST_ROWS = 8, 64
_COLUMNS = 1024  # of their Jacobian, about
_LEAST_LOSS = 0.01  # nats for each row; less is no reason to act


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
    rows = 0 if _TOPIC in guide.told else _comparable_rows(guide, first.run, batches)
    if rows == 0:
        return _TOPIC in guide.told
    alone, posterior, right = [], [], []
    parts: Iterable[Linearization] = [first]
    if leading_size((first.args, dict(first.kwargs))) != rows:
        some = [taken(batches.first(), slice(rows))]
        parts = guide.at(on_whole_data(guide.program_model)).linearizations(some, every_output=True)
    for part in parts:
        sites = [o.gaussian(guide.precision) for o in observed_outputs(part).values()]
        alone.append(log_densities(sites, 0.0))
        posterior.append(log_densities(sites, 1.0))
        right.append(torch.stack([_loss_of_a_right_one(site) for site in sites]).sum(0))
    before, after = torch.cat(alone), torch.cat(posterior)
    losses = before - after
    loss, error = float(losses.mean()), float(losses.std()) / math.sqrt(len(losses))
    if not loss > max(float(torch.cat(right).mean()) + 2.0 * error, _LEAST_LOSS):
        return False
    guide.told.add(_TOPIC)
    warn(
        f"the posterior predicts {len(losses)} of its own training rows worse than the network "
        f"alone: their log density is {float(after.mean()):.3g} nats each instead of "
        f"{float(before.mean()):.3g} (difference {-loss:.2g} ± {error:.1g}); whether it is too "
        "wide, or the network too sure of rows that it has learned by heart, other rows say, and "
        "choose the width: laplace_approximation(data, held_out=(x, y))",
        "worse-than-the-network",
        stacklevel=5,
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
    needs_all = guide.config.rows == "together" or leading_size(guide.few_rows) == count
    if not has_rows(batch, count) or rows < _LEAST_ROWS or (needs_all and rows < count):
        return 0
    return rows


def _loss_of_a_right_one(gaussian: GaussianOutputs) -> Tensor:
    """1/2 sum_{a < 1} log(1 + a) over the leverages a of each row, (n,)."""
    outputs, count = gaussian.outputs, len(gaussian.mean)
    roots = [
        torch.cat([column[key].reshape(count, -1) for key in outputs.moving], -1)
        for column in outputs.unconstrained(outputs.values, exact_columns)
    ]
    if not roots:
        return gaussian.mean.new_zeros(count).double()
    root = torch.stack(roots, -1).double()
    leverages = torch.linalg.eigvalsh(root.mT @ gaussian.covariance.double() @ root).clamp(min=0.0)
    return 0.5 * (torch.log1p(leverages) * (leverages < 1.0)).sum(-1)
