"""The posteriors that ``pyro-bdl compare`` knows by name.

To add one, write a function that fits it::

    @register("my-posterior", "my posterior", "one sentence")
    def _my_posterior(problem):
        ...
        return Result(guide_or_samples, settings={"what": "it was made with"})
"""

# ruff: noqa: F401
from pyro_bdl.posteriors import variational, laplace, chains  # isort: skip
from pyro_bdl.posteriors.registry import Fit, Options, Problem, Result, entries, fit, get, register
