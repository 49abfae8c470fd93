"""Collective operations on the processes of a torch.distributed group: sums, broadcasts, checks."""

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def writes_files() -> bool:
    """Return whether this process writes what all ranks have in common: rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Ranks:
    """The processes ("ranks") of a group; this process alone if torch.distributed is not in use.

    All methods are collective: every rank must call them, in the same order.

    :param group: a process group; None for all processes.
    :param patience: seconds that the ranks have to sign when a collective operation failed.
    :raises RuntimeError: if there are several processes and no process group, or if this process is
        not in the group.
    """

    def __init__(self, group: Any = None, *, patience: float = 5.0) -> None:
        self.group, self.number, self.size = group, 0, 1
        self.patience = patience
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
        with self._or_name_the_missing():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, function: Callable[[], Any]) -> Any:
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
        if self.size == 1:
            return
        kinds = self.gather([f"{tuple(t.shape)} {t.dtype}" for t in tensors])
        for rank, other in enumerate(kinds):
            if other != kinds[0]:
                raise RuntimeError(
                    f"rank {rank} has other sums than rank 0 ({_first_difference(kinds[0], other)})"
                    ": run the same program on all ranks, on data of the same kind"
                )
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, without a check that shapes and dtypes
        agree."""
        if self.size == 1:
            return
        whole = tensor.detach().contiguous()
        with self._or_name_the_missing():
            dist.all_reduce(whole, group=self.group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def stack(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have the same shape and dtype."""
        if self.size == 1:
            return [tensor]
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._or_name_the_missing():
            dist.all_gather(found, own, group=self.group)
        return found

    def broadcast(self, named: Mapping[str, Tensor]) -> None:
        """Replace the values of tensors by the values on rank 0.

        :raises RuntimeError: if the ranks' tensors differ in name, shape or dtype.
        """
        if self.size == 1:
            return
        kinds = self.gather([f"{n} {tuple(t.shape)} {t.dtype}" for n, t in named.items()])
        for rank, other in enumerate(kinds):
            if other != kinds[0]:
                raise RuntimeError(
                    f"rank {rank} has other parameters than rank 0 "
                    f"({_first_difference(kinds[0], other)}): make the same program and guide on "
                    "all ranks"
                )
        for tensor in named.values():
            tensor.detach().copy_(self._of_rank_0(tensor))

    def check_same(self, named: Mapping[str, Tensor]) -> None:
        """Check that tensors equal those of rank 0 up to rounding; names and shapes must agree.

        :raises RuntimeError: on all ranks, with the name of a tensor that differs and its rank.
        """
        if self.size == 1:
            return
        apart: tuple[str, float] | None = None
        for name, tensor in named.items():
            reference = self._of_rank_0(tensor)
            difference = _difference(tensor.detach(), reference)
            if apart is None and difference > 0:
                apart = name, difference
        for rank, found in enumerate(self.gather(apart)):
            if found is not None:
                raise RuntimeError(
                    f"'{found[0]}' on rank {rank} lies up to {found[1]:.3g} from that of rank 0: "
                    "take the same steps on all ranks; pyro_bdl.distributed.broadcast(model, "
                    "guide) puts the values of rank 0 on all"
                )

    def _of_rank_0(self, tensor: Tensor) -> Tensor:
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        with self._or_name_the_missing():
            dist.broadcast(value, source, group=self.group)
        return value

    @contextmanager
    def _or_name_the_missing(self) -> Iterator[None]:
        """If a collective operation fails, name the ranks that do not answer.

        Each rank that sees the failure signs in the store at which the processes met.

        :raises RuntimeError: naming them.
        """
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._missing()}, and this rank stops: start the job again, which goes on from "
                "its last checkpoint"
            ) from error

    def _missing(self) -> str:
        """A clause that names the ranks that do not answer."""
        end = time.monotonic() + self.patience
        missing = []
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"pyro_bdl stops {self.number}", "yes")
            for rank in set(range(self.size)) - {self.number}:
                left = max(0.1, end - time.monotonic())
                try:
                    store.wait([f"pyro_bdl stops {rank}"], datetime.timedelta(seconds=left))
                except RuntimeError:
                    missing.append(rank)
        except RuntimeError:
            return "the process at which the ranks met does not answer (rank 0, or torchrun)"
        names = ", ".join(map(str, missing))
        return f"rank {names} does not answer" if missing else "a connection between ranks broke"


def _difference(value: Tensor, reference: Tensor) -> float:
    """The largest difference; 0 if it is only rounding. Equal infinities and NaN differ by 0."""
    if not value.numel() or torch.equal(value, reference):
        return 0.0
    value, reference = value.double(), reference.double()
    gap = (value - reference).abs()
    gap[(value == reference) | (value.isnan() & reference.isnan())] = 0.0
    largest = float(gap.nan_to_num(nan=torch.inf).max())
    size = float(reference[reference.isfinite()].abs().max()) if reference.isfinite().any() else 0.0
    return largest if largest > 1e-5 * size else 0.0


def _first_difference(left: Sequence[str], right: Sequence[str]) -> str:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return f"{other} instead of {one}"
    return f"{len(right)} tensors instead of {len(left)}"
