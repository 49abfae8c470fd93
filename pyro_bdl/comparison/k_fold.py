"""K-fold cross-validation: posteriors fitted again without a part of the data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.comparison.kind import read_kind
from pyro_bdl.comparison.observe import log_densities
from pyro_bdl.diagnostics.loo import log_mean_exp, standard_error
from pyro_bdl.predictive.linearized import LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.batches import as_dicts, device_of_rows, leading_size, taken
from pyro_bdl.samples import Samples
from pyro_bdl.utils.progress import shown
from pyro_bdl.utils.random_state import seeded


@dataclass(frozen=True)
class KFold:
    """Result of ``k_fold``.

    :param elpd: sum over the N data of log p(y_n | the data of the other folds), in nats.
    :param se: its standard error over the data, sqrt(N var(pointwise)).
    :param pointwise: float64 ``(N,)``, in the order of the data.
    :param fold: ``(N,)``, the fold in which each datum was held out.
    """

    elpd: float
    se: float
    pointwise: Tensor
    fold: Tensor

    @property
    def folds(self) -> int:
        """K."""
        return int(self.fold.max()) + 1

    def __str__(self) -> str:
        return f"elpd {self.elpd:.2f} (se {self.se:.2f}) of {self.folds} folds"


def k_fold(
    fit: Callable[..., Any],
    *data: Any,
    folds: int = 10,
    num_samples: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
) -> KFold:
    """Expected log predictive density by fitting a posterior again without each fold.

    ::

        elpd = sum_k sum_{n in fold k} log E_{q_k} p(y_n | w),   q_k fitted to the other folds

    It scores the predictions of the approximation itself, with all that is fitted to data:
    features, prior scales, linearization points. PSIS does not: it keeps what was fitted, and with
    weights p / q it scores the exact posterior. Each q_k has only (K - 1) / K of the data.

    :param fit: ``fit(*inputs, y)`` of some rows returns a program for these rows, whose
        ``num_data`` is their number, and its posterior: a guide or ``Samples``.
    :param data: the inputs and, last, the targets.
    :param folds: K, from 2 to N; the rows are dealt at random.
    :param num_samples: draws of a guide; of ``Samples`` all draws are used.
    :param seed: seed of the folds and of each fit.
    :param progress: show a bar; by default in terminals and notebooks.
    :returns: ``KFold``. Two results of equal data, ``folds`` and ``seed`` have equal folds.
    :raises ValueError: if K is not between 2 and N.
    :raises UnusableDrawsError: if a log likelihood is NaN.

    Source: Vehtari, Gelman, Gabry (2017), Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC, section 2.3.
    """
    args, device = tuple(map(as_dicts, data)), device_of_rows(data)
    rows = leading_size(args)
    if not 2 <= folds <= rows:
        raise ValueError(f"folds must lie between 2 and the {rows} rows, got {folds}")
    with seeded(seed):
        order = torch.randperm(rows, device="cpu")
    fold = torch.empty(rows, dtype=torch.int64, device="cpu")
    fold[order] = torch.arange(rows, device="cpu") % folds
    pointwise = torch.zeros(rows, dtype=torch.float64, device=device)
    for k in shown(range(folds), "folds", progress):
        train, held = (
            taken(args, m.nonzero().flatten().to(device)) for m in (fold != k, fold == k)
        )
        with seeded(seed):
            model, posterior = fit(*train)
            found = _log_density(model, posterior, held, num_samples)
        pointwise[(fold == k).to(device)] = found.to(pointwise)
    return KFold(float(pointwise.sum()), standard_error(pointwise), pointwise, fold)


@torch.no_grad()
def _log_density(model: Callable, posterior: Any, args: tuple, num_samples: int) -> Tensor:
    """log E p(y_n | w) of each row, ``(N,)``."""
    kind = read_kind(model, args, posterior)
    if not kind.by_rows or kind.is_joint:
        raise ValueError(
            f"k_fold leaves out rows, and the observed sites {', '.join(map(repr, kind.sites))} "
            "have no common plate with a cell for each row"
        )
    count = None if isinstance(posterior, Samples) else num_samples
    linear = kind.linear and is_linear(posterior)
    make: Any = LinearizedPredictive if linear else Predictive
    predictive, found = make(model, posterior, count), []
    for part, _ in kind.batches(args, num_samples):
        density = log_densities(predictive, kind, part).double()
        found.append(log_mean_exp(density.reshape(len(density), leading_size(part), -1).sum(-1).T))
    return torch.cat(found)
