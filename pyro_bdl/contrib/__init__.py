"""Methods that few programs need. Nothing in the core imports them.

Its public names belong to modules of the core (``guides.AutoInducing``, ``evidence.em``,
``mcmc.SGNHT``), and are put there below, when the package is imported. ``contrib.botorch`` is
imported by its users.
"""

from pyro_bdl import evidence, guides, handlers, mcmc
from pyro_bdl.contrib.expectation_maximization import em
from pyro_bdl.contrib.gaussian_locals import integrate
from pyro_bdl.contrib.inducing.guide import AutoInducing
from pyro_bdl.contrib.pathfinder import AutoPathfinder
from pyro_bdl.contrib.pyro_mcmc import run
from pyro_bdl.contrib.stochastic_gradient import PSGLD, SGNHT, SMILE
from pyro_bdl.mcmc.sampling import BACKENDS

BACKENDS["pyro"] = run
vars(guides).update(AutoInducing=AutoInducing, AutoPathfinder=AutoPathfinder)
vars(evidence).update(em=em)
vars(mcmc).update(PSGLD=PSGLD, SGNHT=SGNHT, SMILE=SMILE)
vars(handlers).update(integrate=integrate)
