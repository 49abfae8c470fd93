"""Methods that few programs need. Nothing in the core imports them.

``guides``, ``evidence``, ``handlers`` and ``mcmc`` have their names, which they take from here at
their first use. ``contrib.botorch`` is imported by its users.
"""

from pyro_bdl.contrib.expectation_maximization import em as em
from pyro_bdl.contrib.gaussian_locals import integrate as integrate
from pyro_bdl.contrib.inducing.guide import AutoInducing as AutoInducing
from pyro_bdl.contrib.pathfinder import AutoPathfinder as AutoPathfinder
from pyro_bdl.contrib.pyro_mcmc import run
from pyro_bdl.contrib.stochastic_gradient import PSGLD as PSGLD
from pyro_bdl.contrib.stochastic_gradient import SGNHT as SGNHT
from pyro_bdl.contrib.stochastic_gradient import SMILE as SMILE
from pyro_bdl.mcmc.sampling import BACKENDS

BACKENDS["pyro"] = run
