"""Trainings that a fit asks for, which its caller may do at once with those of other fits."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyro_bdl.guides.base import Guide
from pyro_bdl.training.descent import Training
from pyro_bdl.training.svi import train

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A training that a fit asks for.

    :param guide: the guide, after ``prototype``.
    :param settings: arguments of ``train``.
    :param label: description of the progress bar; None for no bar.
    """

    guide: Guide
    settings: dict[str, Any] = field(default_factory=dict)
    label: str | None = None


Fitting = Generator[Asked, Training, T]
"""A fit of a guide: it yields the trainings it asks for, gets their records, and returns T."""


def carried_out(fitting: Fitting[T], model: Any, x: Any, y: Any) -> T:
    """Do the trainings that a fit asks for, one after another, and return its result.

    :param model: a program ``model(x, y)``.
    """
    try:
        asked = next(fitting)
        while True:
            run = train(model, asked.guide, x, y, progress=asked.label, **asked.settings)
            asked = fitting.send(run)
    except StopIteration as end:
        found: T = end.value
        return found
