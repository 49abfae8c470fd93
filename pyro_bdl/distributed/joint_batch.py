"""The joint batch of several ranks: how each rank's program counts its part."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pyro import poutine

from pyro_bdl.curvature.fisher import check_scales, num_data
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.handlers import WithHandler
from pyro_bdl.program.batch_norm import layers_called, uses_its_batch
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.check import WholeData
from pyro_bdl.program.trace import record, sum_out_discrete
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.random_state import own_randomness


class BatchReading(NamedTuple):
    """The number of data of a rank's batch, as its program sees it.

    :param rows: B_k, the number of data in the batch.
    :param size: N according to the program; None if the batch counts as all data.
    :param normalized: a layer that normalizes by its batch, if there is one.
    """

    rows: int
    size: int | None
    normalized: str | None


def read_batch(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> BatchReading:
    """Run program and guide once, without side effects, and read how the program counts the batch.

    :raises ValueError: if the program counts other rows than the arguments have.
    :raises UnsupportedProgramError: if a plate chooses rows at random.
    """
    whole = WholeData(
        args, kwargs, advice="pass each rank its rows as arguments, and N as num_data"
    )
    with (
        poutine.block(hide_types=["sample"]),
        torch.no_grad(),
        preserved_buffers(model, guide),
        own_randomness(),
        layers_called(model, guide, chosen=uses_its_batch) as layers,
    ):
        q = record(guide, {}, args, kwargs)
        values = {name: site.value for name, site in q.latents.items()} | q.subsamples
        p = record(WithHandler(model, whole), values, args, kwargs, draw=sum_out_discrete)
    rows, size = leading_size((args, kwargs)), None
    sites = {name: site for name, site in p.observed.items() if site.value is not None}
    check_scales(sites)
    for name, site in sites.items():
        if site.subsampling != 1 and num_data(site) != rows:
            raise ValueError(
                f"the observed site '{name}' has {num_data(site)} rows of larger data, and the "
                f"arguments have {rows}, by which ranks count: train the program in one process"
            )
        if site.subsampling != 1:
            size = round(rows * site.subsampling)
    return BatchReading(rows, size, next((type(layer).__name__ for layer in layers), None))


def check_joint_batch(ranks: Sequence[BatchReading]) -> None:
    """Check that the losses of several ranks add up to that of the joint batch.

    :param ranks: the reading of each rank.
    :raises ValueError: if ranks do not know N, disagree on it, or have more than N rows.
    :raises UnsupportedProgramError: for layers that normalize by their batch.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return
    if first.normalized is not None:
        raise UnsupportedProgramError(
            f"a {first.normalized} layer in training mode normalizes by the batch of its rank, not "
            "by the joint batch: put it into evaluation mode (module.eval()), or use LayerNorm or "
            "GroupNorm"
        )
    number = "give it the number of all data of all ranks together (num_data)"
    for rank, reading in enumerate(ranks):
        if reading.size is None:
            raise ValueError(f"the program counts its batch on rank {rank} as all data: {number}")
        if reading.size != first.size:
            raise ValueError(
                f"the program counts {reading.size} data on rank {rank} and {first.size} data on "
                f"rank 0: {number}"
            )
    rows = sum(reading.rows for reading in ranks)
    if first.size is not None and rows > first.size:
        raise ValueError(
            f"the batches of the ranks have {rows} rows together, but the program states "
            f"{first.size} data: give each rank its own rows, and the program the number of all "
            "data (num_data)"
        )
