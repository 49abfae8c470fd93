"""Independent fits, one after another or in several processes by joblib."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyro_bdl.utils.progress import shown


def results_of(
    function: Callable[..., Any],
    jobs: Iterable[tuple],
    description: str,
    *,
    n_jobs: int | None,
    progress: bool | None,
) -> Iterator[Any]:
    """The results of a function for each tuple of arguments, in their order.

    Each job has to set its own random state, so that results do not depend on where it runs.

    :param n_jobs: processes at once, as in joblib: -1 for all cores; None for one after another,
        or what ``joblib.parallel_config`` says.
    """
    from joblib import Parallel, delayed  # imported when needed, it takes long

    waiting = list(jobs)
    parallel = Parallel(n_jobs=n_jobs, return_as="generator")
    results = parallel(delayed(function)(*job) for job in waiting)
    yield from shown(results, description, progress, total=len(waiting))
