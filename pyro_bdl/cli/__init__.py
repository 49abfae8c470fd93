"""The command ``pyro-bdl``."""

from pyro_bdl.cli.command import main, script

__all__ = ["main", "script"]
