"""``cite``: the papers behind a posterior."""

from typing import Any

from pyro.infer.autoguide import AutoGuideList

from pyro_bdl.guides.draws import as_posterior
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mixture import MixtureGuide
from pyro_bdl.mcmc.kernels import KERNELS
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils import bibliography
from pyro_bdl.version import __version__

SOFTWARE = (
    f"The pyro_bdl authors (2026), pyro_bdl: Bayesian deep learning as a plugin on Pyro, version "
    f"{__version__}"
)


def cite(posterior: Any) -> str:
    """The software and the papers behind a posterior, one a line.

    They are those of the guide, of the curvature structure and of the kernel that were used. Papers
    on a prior, a temperature or a likelihood are not among them: the page "Coming from a paper" has
    more.

    Example::

        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> print(bdl.cite(bdl.guides.AutoSWAG(model)))
        The pyro_bdl authors (2026), pyro_bdl: Bayesian deep learning as a plugin on Pyro, ...
        Bingham et al. (2019), Pyro: deep universal probabilistic programming, ...
        Maddox, Garipov, Izmailov, Vetrov & Wilson (2019), A simple baseline for Bayesian ...

    :param posterior: a guide, ``Samples``, or an MCMC of Pyro or NumPyro after its run.
    :raises TypeError: for what is no posterior.
    """
    return "\n".join(
        dict.fromkeys([SOFTWARE, bibliography.PYRO, *_papers(as_posterior(posterior))])
    )


def _papers(posterior: Any) -> list[str]:
    if isinstance(posterior, Samples):
        return _of_chains(posterior)
    found = list(getattr(posterior, "papers", ()))
    if isinstance(posterior, LaplaceGuide):
        found += posterior.config.structure.papers
    parts: Any = ()
    if isinstance(posterior, MixtureGuide):
        parts = posterior.members
    elif isinstance(posterior, AutoGuideList):
        parts = posterior
    return found + [paper for part in parts for paper in _papers(part)]


def _of_chains(samples: Samples) -> list[str]:
    kinds = KERNELS | {kind.name: kind for kind in StochasticKernel.__subclasses__()}
    kind = kinds.get(str(samples.info.get("kernel")))
    found = [] if kind is None else list(kind.papers)
    if samples.info.get("backend") == "numpyro":
        found.append(bibliography.NUMPYRO)
    if "ensemble" in samples.info:
        found.append(bibliography.CHAINS_OF_ENSEMBLE)
    return found
