"""Estimators of an ELBO's gradient with separate noise for every datum."""

from collections.abc import Callable

from pyro_bdl.estimators.dropout import per_example_dropout
from pyro_bdl.estimators.flipout import flipout
from pyro_bdl.estimators.local_reparameterization import local_reparameterization
from pyro_bdl.estimators.per_datum import PerDatum

_BY_NAME: dict[str, Callable[[], PerDatum]] = {
    "local_reparameterization": local_reparameterization,
    "flipout": flipout,
    "per_example_dropout": per_example_dropout,
}


def as_estimator(estimator: str | PerDatum | None) -> PerDatum | None:
    """Return the estimator with this name.

    :raises ValueError: for an unknown name.
    """
    if estimator is None or isinstance(estimator, PerDatum):
        return estimator
    if estimator not in _BY_NAME:
        raise ValueError(
            f"unknown estimator {estimator!r}: it is one of {', '.join(_BY_NAME)}, or None"
        )
    return _BY_NAME[estimator]()
