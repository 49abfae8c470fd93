"""Monte Carlo standard error."""

from torch import Tensor

from pyro_bdl.diagnostics.blocks import map_blocks, split_chains
from pyro_bdl.diagnostics.ess import ess_of_chains


def mcse(draws: Tensor) -> Tensor:
    """Standard error of the mean of each quantity, sd / sqrt(ESS of the mean).

    :param draws: ``(chains, draws, ...)``, any real dtype and device.
    :returns: float64 ``(...)``, in the units of the draws. NaN where there is a NaN.
    :raises TypeError: where ``draws`` is no real tensor.
    :raises ValueError: where ``draws`` has fewer than two axes or 4 draws a chain.

    Source: Vehtari et al. (2021), Rank-normalization, folding, and localization, section 3. Equal
    to ``arviz.mcse`` 0.23.
    """
    return map_blocks(_mcse_of_mean, draws)


def _mcse_of_mean(x: Tensor) -> Tensor:
    return x.flatten(1).std(-1) / ess_of_chains(split_chains(x)).sqrt()
