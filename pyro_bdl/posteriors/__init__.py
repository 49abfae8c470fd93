"""The posteriors that ``pyro-bdl compare`` knows by name.

To add one, write a function that fits it::

    @register("my-posterior", "my posterior", "one sentence")
    def _my_posterior(problem):
        ...
        return Result(guide_or_samples, settings={"what": "it was made with"})
"""

from pyro_bdl.posteriors import variational, laplace, ensembles, chains  # isort: skip  # noqa: F401
from pyro_bdl.posteriors.registry import (
    Entry,
    Fit,
    Options,
    Problem,
    Result,
    entries,
    fit,
    fit_together,
    get,
    register,
)

__all__ = [
    "Entry",
    "Fit",
    "Options",
    "Problem",
    "Result",
    "entries",
    "fit",
    "fit_together",
    "get",
    "register",
]
