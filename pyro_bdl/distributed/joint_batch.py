"""The joint batch of several ranks: its number of data, and the weight of each rank in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample

from pyro_bdl.curvature.fisher import check_scales, num_data
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.handlers import Handled
from pyro_bdl.program.batch_norm import layers_called, uses_its_batch
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.check import WholeData
from pyro_bdl.program.trace import Run, is_deterministic, record, sum_out_discrete
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.random_state import own_randomness


class BatchReading(NamedTuple):
    """The number of data of a rank's batch, as its program sees it.

    :param rows: B_k, the number of data in the batch.
    :param size: N according to the program; None if the batch counts as all data.
    :param stated: the program's attribute ``num_data``, if there is one.
    :param local: the name of a latent for each datum, if there is one.
    :param factor: a factor statement, if there is one.
    :param normalized: a layer that normalizes by its batch, if there is one.
    """

    rows: int
    size: int | None
    stated: int | None
    local: str | None
    factor: str | None
    normalized: str | None


def read_batch(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> BatchReading:
    """Run program and guide once, without side effects, and read how the program counts the batch.

    :raises ValueError: if the program counts other rows than the arguments have.
    :raises UnsupportedProgramError: if a plate chooses rows at random.
    """
    seen = _Statements(args, kwargs)
    with (
        poutine.block(hide_types=["sample"]),
        torch.no_grad(),
        preserved_buffers(model, guide),
        own_randomness(),
        layers_called(model, guide, chosen=uses_its_batch) as layers,
    ):
        q = record(guide, {}, args, kwargs)
        values = {name: site.value for name, site in q.latents.items()} | q.subsamples
        p = record(Handled(model, seen), values, args, kwargs, draw=sum_out_discrete)
    rows, size = _rows(p, leading_size((args, kwargs)))
    stated = getattr(model, "num_data", None)
    stated = stated if isinstance(stated, int) else None
    factor = next(iter(p.factors), None)
    normalized = next((type(layer).__name__ for layer in layers), None)
    return BatchReading(rows, size, stated, seen.local(), factor, normalized)


def _rows(run: Run, leading: int) -> tuple[int, int | None]:
    """B_k and N of a run; N is None if no site is scaled up.

    :param leading: the number of rows of the arguments.
    """
    sites = {name: site for name, site in run.observed.items() if site.value is not None}
    if not sites and not run.factors:
        raise ValueError(
            "the program has no observed site: pass the targets to the step, so that a sample "
            "statement gets obs=..."
        )
    check_scales(sites)
    scaled = {name: site for name, site in sites.items() if site.subsampling != 1}
    for name, site in scaled.items():
        if num_data(site) != leading:
            raise ValueError(
                f"the observed site '{name}' has {num_data(site)} rows of larger data, and the "
                f"arguments have {leading}, by which ranks count: train the program in one process"
            )
    for site in scaled.values():
        return leading, round(leading * site.subsampling)
    return max(map(num_data, sites.values()), default=1), None


class _Statements(WholeData):
    """Handler that refuses plates that choose rows at random, and records the plates of all
    sites."""

    def __init__(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        super().__init__(
            args, kwargs, advice="pass each rank its rows as arguments, and N as num_data"
        )
        self.latents: dict[str, set[str]] = {}
        self.leading: set[str] = set()

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or isinstance(msg["fn"], _Subsample):
            return
        frames = [frame for frame in msg["cond_indep_stack"] if frame.vectorized]
        if not msg["is_observed"]:
            self.latents[msg["name"]] = {frame.name for frame in frames}
        elif frames:
            self.leading.add(min(frames, key=lambda frame: frame.dim).name)

    def local(self) -> str | None:
        """The name of a latent in the plate of the data, or None."""
        return next((name for name, plates in self.latents.items() if plates & self.leading), None)


class JointBatch(NamedTuple):
    """How the losses L_k of the ranks add up to that of the joint batch, sum_k weight_k L_k / sum_k
    weight_k.

    :param pair: the program and its guide.
    :param model: the program to run instead.
    :param scaled: whether the program scales the batch up to N data by itself. The weights are then
        B_k, and 1 otherwise.
    """

    pair: tuple[Callable, Callable]
    model: Callable
    scaled: bool

    def weight(self, args: tuple, kwargs: dict) -> float:
        """The weight of this rank's loss."""
        return float(leading_size((args, kwargs))) if self.scaled else 1.0


def joint_batch(model: Callable, guide: Callable, ranks: Sequence[BatchReading]) -> JointBatch:
    """The weights of the ranks' losses in the loss of the joint batch.

    :param ranks: the reading of each rank.
    :raises ValueError: if ranks disagree on N, or have more than N rows.
    :raises UnsupportedProgramError: for layers, latents and factors whose role in the joint batch
        is unknown.
    """
    pair, first = (model, guide), ranks[0]
    if len(ranks) == 1:
        return JointBatch(pair, model, False)
    for number, other in enumerate(ranks):
        if other.size != first.size:
            raise ValueError(
                f"the program counts {_data(other)} on rank {number} and {_data(first)} on rank 0: "
                "give it the number of all data of all ranks together (num_data)"
            )
    if first.normalized is not None:
        raise UnsupportedProgramError(
            f"a {first.normalized} layer in training mode normalizes by the batch of its rank, not "
            "by the joint batch: put it into evaluation mode (module.eval()), or use LayerNorm or "
            "GroupNorm"
        )
    rows = sum(reading.rows for reading in ranks)
    size = first.stated if first.size is None else first.size
    if size is not None and rows > size:
        raise ValueError(
            f"the batches of the ranks have {rows} rows together, but the program states {size} "
            "data: give each rank its own rows, and the program the number of all data (num_data)"
        )
    if first.size is not None:
        return JointBatch(pair, model, True)
    if first.local is not None:
        raise UnsupportedProgramError(
            f"the latent '{first.local}' is in the plate of the data, which has another batch "
            "on every rank: give the plate the size of all data, and the indices of the batch"
        )
    if first.factor is not None:
        raise UnsupportedProgramError(
            f"the factor '{first.factor}' may be about the data of a rank or about none: let the "
            "program scale its data up to all of them (num_data), where a factor counts once"
        )
    return JointBatch(pair, Handled(model, _StandForAll(len(ranks))), False)


def _data(reading: BatchReading) -> str:
    return "its batch alone" if reading.size is None else f"{reading.size} data"


class _StandForAll(Messenger):
    """Handler that counts the observations of a batch K times, so that the mean of K ranks' bounds
    is sum_k log p(y_k | w) - KL."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def _process_message(self, msg: Any) -> None:
        if msg["type"] != "sample" or not msg["is_observed"] or is_deterministic(msg):
            return
        if msg["cond_indep_stack"] or base_distribution(msg["fn"]).batch_shape:
            msg["scale"] = msg["scale"] * self.ranks  # may be a tensor
