"""Checks for programs that choose minibatches themselves, if all data are needed."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.utils.trees import tree_leaves


class WholeData(Messenger):
    """Handler that refuses plates that choose rows of the arguments at random.

    Such a plate chooses other rows in each run, so that results for different draws of the latents
    would be for different data. A subsampled plate chooses rows if an argument has as many rows as
    the plate's full size. Otherwise it only scales the data that it is given.

    :param args: the program's arguments.
    :param kwargs: the program's keyword arguments.
    :param advice: the advice in the error.
    :raises UnsupportedProgramError: inside the context, for such a plate.
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
    """The program with each run under :class:`WholeData`."""

    @functools.wraps(model, updated=())
    def program(*args: Any, **kwargs: Any) -> Any:
        with WholeData(args, kwargs):
            return model(*args, **kwargs)

    return program
