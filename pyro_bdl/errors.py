"""The exceptions and the warning that the package raises beyond Python's own."""


class BdlWarning(UserWarning):
    """Something worked, but not quite as one would expect."""


class ArgumentError(TypeError):
    """Arguments that a program cannot compute with: no tensors, or tensors of another dtype."""


class UnusableDrawsError(ValueError):
    """Draws of a posterior that hold NaN or infinity, so that no score or distance is right.

    :param posterior: the posterior's name, where it has one.
    """

    def __init__(self, message: str, posterior: str | None = None) -> None:
        super().__init__(message)
        self.posterior = posterior


class UnsupportedProgramError(ValueError):
    """A Pyro program that cannot be read as a density of continuous latents."""


class MissingOperatorError(NotImplementedError):
    """An operator that has no translation; ``op`` holds its name, ``site`` where it came from."""

    def __init__(self, message: str, *, op: str, site: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.site = site
