"""The exceptions and the warning that the package raises beyond Python's own."""


class BdlWarning(UserWarning):
    """Something worked, but not quite as one would expect."""


class UnsupportedProgramError(ValueError):
    """A Pyro program that cannot be read as a density of continuous latents."""


class MissingOperatorError(NotImplementedError):
    """An operator that has no translation; ``op`` holds its name, ``site`` where it came from."""

    def __init__(self, message: str, *, op: str, site: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.site = site
