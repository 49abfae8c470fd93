"""The command ``pyro-bdl``."""

from pyro_bdl.cli.entry import main, script

__all__ = ["main", "script"]
