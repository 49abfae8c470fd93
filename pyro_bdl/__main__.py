"""``python -m pyro_bdl`` is ``pyro-bdl``."""

from pyro_bdl.cli.entry import script

script()
