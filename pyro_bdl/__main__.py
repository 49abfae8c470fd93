"""``python -m pyro_bdl`` is ``pyro-bdl``."""

import sys

from pyro_bdl.cli.entry import main

sys.exit(main())
