"""Programs that choose a minibatch of their data themselves, where all of them are needed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_bdl.errors import UnsupportedProgramError


class WholeData(Messenger):
    """Refuses a plate that picks rows of the arguments at random, other ones in each run, so that
    results for draws of the latents would be of different data.

    A plate is taken to do so where an argument has as many rows as the plate stands for. One that
    stands for more data than it is called with only scales.

    :param args: the program's arguments; ``kwargs`` its keyword arguments.
    :param advice: what to do instead.
    :raises UnsupportedProgramError: within it, by such a plate.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        advice: str = "predict with a program without subsample_size, which takes all rows",
    ) -> None:
        super().__init__()
        self.advice = advice
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        self.rows = {len(tensor) for tensor in tensors if tensor.dim()}

    def _pyro_sample(self, msg: Any) -> None:
        plate = msg["fn"]
        if not isinstance(plate, _Subsample) or msg["value"] is not None:
            return
        held = plate.size if plate.subsample_size is None else plate.subsample_size
        if held < plate.size and plate.size in self.rows:
            raise UnsupportedProgramError(
                f"the plate '{msg['name']}' picks {held} of the {plate.size} rows at random in "
                f"each run: {self.advice}"
            )


def on_whole_data(model: Callable) -> Callable:
    """The program, each run of it under :class:`WholeData`."""

    @functools.wraps(model, updated=())
    def program(*args: Any, **kwargs: Any) -> Any:
        with WholeData(args, kwargs):
            return model(*args, **kwargs)

    return program
