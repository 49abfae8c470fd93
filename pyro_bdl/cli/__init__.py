"""The command ``pyro-bdl``."""

from pyro_bdl.cli.entry import main

__all__ = ["main"]
