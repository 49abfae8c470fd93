"""``python -m pyro_bdl`` is ``pyro-bdl``."""

from pyro_bdl.cli import script

script()
