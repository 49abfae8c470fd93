"""``python -m pyro_bdl`` is ``pyro-bdl``."""

from pyro_bdl.app.command import script

script()
