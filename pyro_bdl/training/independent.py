"""Independent fits: seeds, settings, the posteriors of a comparison, members trained separately."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro
from pyro.infer.autoguide import AutoGuide

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.saved import from_bytes, to_bytes
from pyro_bdl.utils.jobs import Job, processes, results_of
from pyro_bdl.utils.random_state import checked_seed


def fit_each(
    fit: Callable[[Any], Any],
    jobs: Iterable[Any] | Mapping[Any, Any],
    *,
    seed: int = 0,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Call a function for each of several independent fits, in processes or on a cluster.

    Results do not depend on where they are made: job i starts from ``seed + i``, and from the
    parameter store, default dtype and settings of Pyro that are here.

    Example::

        >>> def fit(rate):
        ...     x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        ...     model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        ...     guide = bdl.guides.AutoMeanField(model)
        ...     training = bdl.training.train(model, guide, x, y, steps=5, learning_rate=rate)
        ...     return model, guide
        >>> fits = bdl.training.fit_each(fit, {"slow": 0.001, "fast": 0.01})  # n_jobs=2
        >>> list(fits)
        ['slow', 'fast']

    :param fit: a function of one job that makes its own program and returns it with the posterior,
        ``(model, posterior)``, as ``compare`` takes them; or anything else that can be pickled.
    :param jobs: seeds, names, settings; of a mapping ``fit`` gets the values.
    :param n_jobs: processes of joblib at once (-1 for all cores); by default one fit after another,
        or as ``joblib.parallel_config`` says. Its threads are not used: Pyro has one stack for all.
    :returns: the results in the order of the jobs; for a mapping a dict with its keys.
    :raises TypeError: for a guide without its program, or one of Pyro, whose parameters are shared
        by all of its class in a process.
    :raises Exception: that of a fit, with a note that names the job.
    """
    seed, n_jobs = checked_seed(seed), processes(n_jobs)
    named = dict(jobs) if isinstance(jobs, Mapping) else dict(enumerate(jobs))
    each = (
        Job(f"job {name!r}", seed + i, (fit, value))
        for i, (name, value) in enumerate(named.items())
    )
    results = results_of(_packed, each, "fits", n_jobs=n_jobs, progress=progress)
    by_name = {name: _unpacked(result) for name, result in zip(named, results, strict=True)}
    return by_name if isinstance(jobs, Mapping) else list(by_name.values())


class _File(bytes):
    """A guide as the bytes of its file: a pickled guide holds no program."""


def _packed(fit: Callable[[Any], Any], value: Any) -> Any:
    result = fit(value)
    pair = isinstance(result, tuple) and len(result) == 2
    posterior = result[1] if pair else result
    if not isinstance(posterior, AutoGuide):
        return result
    if not pair:
        raise TypeError("fit returned a guide without its program: return (model, guide)")
    if isinstance(posterior, Guide):
        return result[0], _File(to_bytes(posterior))
    if not pyro.settings.get("module_local_params"):
        raise TypeError(
            f"fit returned Pyro's {type(posterior).__name__}, and Pyro shares the parameters of "
            "all guides of a class in a process: set pyro.settings.set(module_local_params=True) "
            "before, or return its draws"
        )
    return result


def _unpacked(result: Any) -> Any:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], _File):
        return result[0], from_bytes(result[1], result[0])
    return result
