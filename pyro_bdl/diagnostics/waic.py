"""The widely applicable information criterion."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks
from pyro_bdl.diagnostics.conventions import check_convention
from pyro_bdl.diagnostics.loo import log_mean_exp, standard_error
from pyro_bdl.errors import BdlWarning

_LARGE_VARIANCE = 0.4


@dataclass(frozen=True)
class WAIC:
    """Expected log predictive density for new data, from the variance of the log likelihood.

    :param elpd: sum of ``pointwise`` over the N observations, in nats; -2 elpd is the criterion on
        the scale of a deviance.
    :param se: standard error of ``elpd`` over observations.
    :param p_waic: effective number of parameters, the sum of ``variance``.
    :param pointwise: float64, of the observations' shape.
    :param variance: float64, var_s log p(y_n | w_s); above 0.4 the criterion begins to fail.
    """

    elpd: float
    se: float
    p_waic: float
    pointwise: Tensor
    variance: Tensor

    def __str__(self) -> str:
        return (
            f"elpd_waic {self.elpd:.2f} (se {self.se:.2f}), p_waic {self.p_waic:.2f}; "
            f"{self.pointwise.numel()} observations"
        )


def waic(log_likelihood: Tensor, *, compat: str = "1.x", progress: bool | None = None) -> WAIC:
    """Widely applicable information criterion; ``loo`` is more robust and reports its failures.

    ::

        elpd = sum_n (log mean_s p(y_n | w_s) - var_s log p(y_n | w_s))

    :param log_likelihood: log p(y_n | w_s), ``(chains, draws, ...)``, in nats and unscaled.
    :param compat: ``"1.x"``: variances over S - 1 draws and N - 1 observations, as published;
        ``"0.23"``: over S and N, as ArviZ 0.23 takes them (1.x has no WAIC).
    :param progress: show a bar if it takes more than a few seconds; by default in terminals and
        notebooks.
    :returns: ``WAIC``.
    :raises TypeError: if ``log_likelihood`` is not a real tensor.
    :raises ValueError: for an unknown ``compat``, fewer than two axes or 4 draws a chain.
    :warns BdlWarning: if a variance is above 0.4.

    Source: Watanabe (2010), Asymptotic equivalence of Bayes cross validation and WAIC; Vehtari,
    Gelman, Gabry (2017), equation 11.
    """
    check_convention(compat)
    ddof = 0 if compat == "0.23" else 1

    def statistic(x: Tensor) -> Tensor:
        ll = x.flatten(1)
        deviation = ll - ll.mean(-1, keepdim=True)
        variance = deviation.square().sum(-1) / (ll.shape[-1] - ddof)
        return torch.stack([log_mean_exp(ll), variance])

    with_all, variance = map_blocks(statistic, log_likelihood, progress=progress)
    pointwise = with_all - variance
    large = int((variance > _LARGE_VARIANCE).sum())
    if large:
        warnings.warn(
            f"the variance of the log likelihood of {large} of {variance.numel()} observations is "
            f"above {_LARGE_VARIANCE}, where WAIC begins to fail: use loo",
            BdlWarning,
            stacklevel=2,
        )
    se = standard_error(pointwise, ddof=ddof)
    return WAIC(pointwise.sum().item(), se, variance.sum().item(), pointwise, variance)
