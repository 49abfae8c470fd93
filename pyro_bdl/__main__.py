"""``python -m pyro_bdl`` is ``pyro-bdl``."""

import sys

from pyro_bdl.cli import main

sys.exit(main())
