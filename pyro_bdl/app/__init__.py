"""The command ``pyro-bdl``, and the figures and the report of a comparison."""
