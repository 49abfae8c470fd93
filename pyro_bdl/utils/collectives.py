"""Collective operations on the processes of a torch.distributed group: sums, broadcasts, checks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import equal_numbers


def writes_files() -> bool:
    """Return whether this process writes what all ranks have in common: rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Ranks:
    """The processes ("ranks") of a group; this process alone if torch.distributed is not in use.

    All methods are collective: every rank must call them, in the same order.

    :param group: a process group; None for all processes.
    :raises RuntimeError: if there are several processes and no process group, or if this process is
        not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self.group, self.number, self.size = group, 0, 1
        if dist.is_available() and dist.is_initialized():
            self.number, self.size = dist.get_rank(group), dist.get_world_size(group)
            if self.number < 0:
                raise RuntimeError("this process is not in the group: call it on its ranks only")
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"there are {os.environ['WORLD_SIZE']} processes and no process group, so that "
                "each would work alone: call torch.distributed.init_process_group() first"
            )

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; values must be picklable."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _all_ranks():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """Call a function on all ranks; an error on one rank is raised on all. Returns its result.

        Without this the other ranks would wait forever for the rank that failed.

        :raises RuntimeError: if another rank failed, with its message.
        """
        try:
            result = function()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, message in enumerate(self.gather(None)):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed with {message}")
        return result

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks; the sums agree bit for bit on all ranks.

        :raises RuntimeError: if the ranks' tensors differ in number, shape or dtype.
        """
        self._check_kinds("sums", [f"{tuple(t.shape)} {t.dtype}" for t in tensors])
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, without a check that shapes and dtypes
        agree."""
        if self.size == 1:
            return
        whole = tensor.detach().contiguous()
        with _all_ranks():
            dist.all_reduce(whole, group=self.group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Replace the values of tensors by the values on rank 0.

        :raises RuntimeError: if the ranks' tensors differ in name, shape or dtype.
        """
        kinds = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named.items()]
        self._check_kinds("parameters", kinds)
        for tensor in named.values() if self.size > 1 else ():
            tensor.detach().copy_(self._of_rank_0(tensor))

    def _check_kinds(self, what: str, kinds: list[str]) -> None:
        """Check that the ranks' tensors agree in number, name, shape and dtype."""
        first, *others = self.gather(kinds)
        for rank, other in enumerate(others, 1):
            if other != first:
                pairs = zip(first, other, strict=False)
                difference = next(
                    (f"{theirs} instead of {ours}" for ours, theirs in pairs if ours != theirs),
                    f"{len(other)} tensors instead of {len(first)}",
                )
                raise RuntimeError(
                    f"rank {rank} has other {what} than rank 0 ({difference}): run the same "
                    "program and guide on all ranks, on data of the same kind"
                )

    def check_same(self, named: Mapping[str, Tensor]) -> None:
        """Check that tensors equal those of rank 0 up to rounding; names and shapes must agree.

        :raises RuntimeError: on all ranks, with the name of a tensor that differs and its rank.
        """
        if self.size == 1:
            return
        differences = {
            name: _difference(tensor.detach(), self._of_rank_0(tensor))
            for name, tensor in named.items()
        }
        apart = {name: size for name, size in differences.items() if size > 0}
        for rank, other in enumerate(self.gather(apart)):
            for name, size in other.items():
                raise RuntimeError(
                    f"'{name}' on rank {rank} lies up to {size:.3g} from that of rank 0: "
                    "take the same steps on all ranks; pyro_bdl.distributed.broadcast(model, "
                    "guide) puts the values of rank 0 on all"
                )

    def _of_rank_0(self, tensor: Tensor) -> Tensor:
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        with _all_ranks():
            dist.broadcast(value, source, group=self.group)
        return value


@contextmanager
def _all_ranks() -> Iterator[None]:
    """Say what to do if a collective operation fails."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "another rank does not answer, and this rank stops: the log of the one that died says "
            "why; start the job again, which goes on from its last checkpoint"
        ) from error


def _difference(value: Tensor, reference: Tensor) -> float:
    """The largest difference; 0 if it is only rounding. Equal infinities and NaN differ by 0."""
    if equal_numbers(value, reference):
        return 0.0
    return float((double(value) - double(reference)).abs().nan_to_num(nan=torch.inf).max())
