"""Functions that an earlier command compiled, in the user's cache folder."""

import os
from pathlib import Path
from typing import Any

import jax

_BYTES = 2**28  # of the folder; those not used for longest go first
_SECONDS = 0.05  # of compilation that are worth a file


def keep_compiled() -> None:
    """Keep what this process compiles for later ones, in ``~/.cache/pyro_bdl/jax`` or the like
    under ``$XDG_CACHE_HOME``. JAX recognizes it by function, version and processor. A folder that
    was set before (``JAX_COMPILATION_CACHE_DIR``) stays."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None:
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "pyro_bdl" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", _BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
