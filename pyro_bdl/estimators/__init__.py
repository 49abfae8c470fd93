"""Estimators of an ELBO's gradient with separate noise for every datum."""

from collections.abc import Callable

from pyro_bdl.estimators.dropout import per_example_dropout
from pyro_bdl.estimators.flipout import flipout
from pyro_bdl.estimators.local_reparameterization import local_reparameterization
from pyro_bdl.estimators.per_datum import PerDatum
from pyro_bdl.utils.validation import one_of

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
    one_of(estimator, "estimator", (None, *_BY_NAME))
    return _BY_NAME[estimator]()
