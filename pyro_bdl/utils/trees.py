"""Nested tuples, lists and dicts as lists of leaves: torch's functions for them, imported in one
place, since torch has no public name for them."""

from torch.utils._pytree import (
    TreeSpec as TreeSpec,
)
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
)
from torch.utils._pytree import (
    tree_leaves as tree_leaves,
)
from torch.utils._pytree import (
    tree_map as tree_map,
)
from torch.utils._pytree import (
    tree_map_only as tree_map_only,
)
from torch.utils._pytree import (
    tree_unflatten as tree_unflatten,
)
