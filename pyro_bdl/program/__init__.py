"""A Pyro program as pure functions of its latents."""

# ruff: noqa: F401
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site, record
