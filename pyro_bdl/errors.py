"""The package's own exceptions and its warning."""

import inspect
import warnings
from functools import partial

__all__ = [
    "ArgumentError",
    "BdlWarning",
    "FailedStepError",
    "MissingOperatorError",
    "UnsupportedProgramError",
    "UnusableDrawsError",
]


class BdlWarning(UserWarning):
    """A call succeeded, but with limits or approximations that the user should know.

    Example::

        >>> import warnings
        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model).prototype(x, y)  # not trained
        >>> with warnings.catch_warnings(action="error", category=bdl.errors.BdlWarning):
        ...     posterior = guide.laplace_approximation((x, y))
        Traceback (most recent call last):
        pyro_bdl.errors.BdlWarning: the guide is not at a maximum, a step would gain ...
    """


# The packages through which users call this one, by handlers, decorators and Pyro's SVI.
_BETWEEN = {"contextlib", "functools", "pyro", "torch"}


def warn(message: str, topic: str) -> None:
    """Warn at the line that called the package, with the section of the page "Warnings and errors".

    :param topic: the section's anchor.
    """
    frame, packages = inspect.currentframe(), list[str]()
    while frame is not None:
        packages.append(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    place = len(packages) - packages[::-1].index("pyro_bdl")  # after the outermost of ours
    while place < len(packages) and packages[place] in _BETWEEN:
        place += 1
    text = f"{message} (see Warnings and errors, #{topic})"
    warnings.warn(text, BdlWarning, stacklevel=place + 1)


class ArgumentError(TypeError):
    """Arguments that a program cannot use: not tensors, or tensors of another dtype."""


class UnusableDrawsError(ValueError):
    """Draws of a posterior that hold NaN or infinity, so that scores and distances are undefined.

    :param posterior: the posterior's name, if it has one.
    """

    def __init__(self, message: str, posterior: str | None = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class UnsupportedProgramError(ValueError):
    """A Pyro program that cannot be read as a density of continuous latents."""


class MissingOperatorError(NotImplementedError):
    """An operator without a translation to JAX; ``op`` is its name, ``site`` the site that needs
    it."""

    def __init__(self, message: str, *, op: str, site: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.site = site

    def __reduce__(self) -> tuple:
        """For pickle, by which an error comes back from another process."""
        return partial(type(self), op=self.op), self.args, vars(self)


class FailedStepError(RuntimeError):
    """A training step that went wrong; the message names the step, the batch and the reason.

    :param step: number of the step, from 0.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> tuple:
        """For pickle, by which an error comes back from another process."""
        return partial(type(self), step=self.step), self.args, vars(self)
