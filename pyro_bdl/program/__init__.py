"""A Pyro program as pure functions of its latents."""

from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site, record

__all__ = ["Program", "Run", "Site", "record"]
