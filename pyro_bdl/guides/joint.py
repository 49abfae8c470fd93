"""Guides that are built around a trained guide."""

from collections.abc import Callable

from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.point import UnconstrainedMAP
from pyro_bdl.program.batches import Batch


class JointGuide(Guide):
    """Base class of guides that are built around a trained guide.

    :param source: a trained guide for the same program; it is not changed.
    """

    def __init__(self, source: Guide) -> None:
        model = source.program_model
        super().__init__(model, create_plates=source.create_plates)
        self._take_structure(source)


def restored_source(model: Callable, batch: Batch) -> Guide:
    """A guide for a program, from which a joint guide of a file takes the layout."""
    args, kwargs = batch
    return UnconstrainedMAP(model).prototype(*args, **kwargs)
