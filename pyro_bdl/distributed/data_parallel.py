"""Training and curvature on several processes, each with a part of the data.

Started by ``torchrun --nproc_per_node=K script.py``, K processes ("ranks") run the same script,
each on its own rows::

    torch.distributed.init_process_group()
    rows = slice(torch.distributed.get_rank(), None, K)     # or a DistributedSampler
    elbo = bdl.distributed.DataParallel_ELBO(bdl.elbo.TemperedTraceMeanField_ELBO())
    svi = pyro.infer.SVI(model, guide, optimizer, elbo)     # or torch's loop, elbo(model, guide)
    ...
    posterior = guide.laplace_approximation(bdl.distributed.Shard((x[rows], y[rows])))

N (``num_data``, or the size of the program's plate) counts the data of all ranks.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_bdl.distributed.joint_batch import check_joint_batch, read_batch
from pyro_bdl.elbo.checks import CheckedLoss, check_data, require_differentiable, step_of
from pyro_bdl.elbo.step import Step
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import Batches, leading_size
from pyro_bdl.tracing.step import Outcome
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number


class Shard(Batches):
    """This rank's part of the data, to be passed instead of the data.

    ``guide.laplace_approximation(Shard(data))``, called on every rank at the same parameters, gives
    every rank the posterior that a single process computes from all data. Sums over the data
    (curvature, log likelihood, squared residuals) are added over the ranks after each pass. This is
    exact for all structures: "full", "diag" and "kron" are sums; "ekfac" adds its factors, and in
    its second pass the moments in their common eigenbasis; "low_rank" adds the products of each
    pass. Only "ggn-mc" differs, since it draws other observations. The evidence follows from these
    sums. Methods that need all data for another purpose raise an error.

    A datum on two ranks counts twice. A DistributedSampler repeats rows, unless the number of data
    is a multiple of K or ``drop_last=True``; ``x[rank::K]`` repeats none.

    :param data: ``(x, y)`` or an iterable of batches; at least one batch on each rank.
    :param group: a process group; None for all processes.
    :raises RuntimeError: if there are several processes and no process group.
    """

    def __init__(self, data: Any, *, group: Any = None) -> None:
        super().__init__(data)
        ranks = Ranks(group)
        self.ranks = ranks if ranks.size > 1 else None


def broadcast(*modules: nn.Module, group: Any = None) -> None:
    """Give all ranks the parameters and buffers of rank 0, in place.

    ``DataParallel_ELBO`` does so at its first step; this is for guides that were trained or loaded
    without it.

    :param modules: modules such as the program and its guide, after ``guide.prototype``.
    :param group: a process group; None for all processes.
    :raises RuntimeError: if the ranks' modules differ in names or shapes.
    """
    for module in modules:
        if isinstance(module, Guide):
            module.require_layout()
    Ranks(group).broadcast(_values_of(modules))


class DataParallel_ELBO(CheckedLoss):
    """The bound of the joint batch of all ranks, and its gradient, on each rank.

    Rank k has a batch of B_k data, B = sum_k B_k, and L_k is the bound of this batch, with its sum
    over data scaled by N / B_k. Then

        sum_k (B_k / B) L_k = (N / B) sum_n E_q[log p(y_n | w)] - eta KL(q || p(w))

    is the bound of the joint batch. Its KL counts once, also if batches have different sizes. Every
    rank has the loss and gradients of the joint batch before the optimizer uses them, in Pyro's
    loop and in torch's, so that the ranks' parameters stay equal. All ranks must take the same
    number of steps, with at least one datum in each.

    Every rank draws its own latents, so that K ranks give K particles at the cost of one. For a
    gradient G(w, D) at a draw w and data D the mean over ranks has the variance Var(G) / K. With
    one draw for all ranks, as in a single process with the joint batch, the variance is larger by
    (1 - 1/K) Var_w(E[G | w]).

    The first step gives all ranks the parameters and buffers of rank 0. An error inside a step is
    raised on all ranks, with the number of the rank where it happened. If a rank is gone, the
    others' next step raises an error that names it, at the latest after the group's timeout.

    ``state_dict`` holds what a ``Checkpoint`` needs to go on: the steps, and the seed of all ranks'
    draws. The job may go on with another number of ranks.

    :param elbo: any ELBO with ``differentiable_loss``: the tempered ones, those for natural
        gradients, or Pyro's. Its attributes, such as ``kl``, describe this rank's batch only.
    :param same_draws: use one draw of the latents for all ranks. Not for estimators with noise for
        every datum, since rows of different ranks would share the noise.
    :param check_every: steps between comparisons of the ranks' parameters.
    :param group: a process group; None for all processes.
    :raises RuntimeError: if there are several processes and no process group; at a step, on all
        ranks, if parameters differ between ranks, another rank failed or is gone.
    :raises TypeError: for an ELBO without ``differentiable_loss``.
    :raises ValueError: at the first step, on several ranks, for a program that does not know N.
    :raises UnsupportedProgramError: at the first step, for BatchNorm layers in training mode, which
        would normalize by the rank's batch; for plates that pick rows at random.
    """

    def __init__(
        self,
        elbo: Any,
        *,
        same_draws: bool = False,
        check_every: int = 100,
        group: Any = None,
    ) -> None:
        require_differentiable(elbo)
        super().__init__(num_particles=elbo.num_particles)
        self.elbo, self.ranks = elbo, Ranks(group)
        self.same_draws, self.check_every = same_draws, whole_number(check_every, "check_every")
        self.step = 0
        self._pair: tuple[Callable, Callable] | None = None
        self._leaves: dict[str, Tensor] = {}
        self._form: tuple[int, torch.dtype] | None = None  # of what a step reduces
        self._seed: int | None = None
        self._draws = 0

    def state_dict(self) -> dict[str, Any]:
        """The steps taken, and what the next draws of all ranks depend on."""
        inner = getattr(self.elbo, "step", None)
        return {"step": self.step, "bound": inner, "seed": self._seed, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the steps of ``state_dict``, on any number of ranks."""
        self.step, self._seed, self._draws = state["step"], state["seed"], state["draws"]
        if state["bound"] is not None:
            self.elbo.step = state["bound"]

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return the loss of the joint batch; every rank must call it."""

        def bound(*of: Any) -> Step:
            value = self.elbo.loss(model, guide, *args, **kwargs)
            return Step(torch.tensor(value, dtype=torch.double, device=self._device()))

        with torch.no_grad():
            value = self._joint(bound, model, guide, args, kwargs).value.item()
        if math.isnan(value):
            self.ranks.on_all_ranks(lambda: None)  # a rank that failed tells why
        return value

    def take_step(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Step:
        """Take a step on the joint batch; ``backward()`` gives its gradient on every rank.

        Temperature and draw are those of the joint batch too, the parts of the bound this rank's.
        """
        if self._leaves and self.step and self.step % self.check_every == 0:
            self.ranks.check_same(self._leaves)
        step = self._joint(partial(step_of, self.elbo), model, guide, args, kwargs)
        self.step += 1
        return step

    def check_data(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Search for bad data on all ranks; all ranks call it, since they have the same joint
        loss."""
        self.ranks.on_all_ranks(lambda: check_data(model, guide, args, kwargs))

    def _get_trace(self, model: Callable, guide: Callable, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)

    # The first step

    def _prepare(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Check the joint batch of a new program and guide, and give all ranks one state."""
        if self._pair == (model, guide):
            return

        def look() -> Any:
            with poutine.trace(param_only=True) as statements:
                reading = read_batch(model, guide, args, kwargs)
            self._leaves = tensor_leaves(model, guide, statements.trace)
            if self._seed is None:  # a run that goes on draws nothing here
                self._seed = int(torch.randint(2**62, (), device="cpu").item())
            return reading, self._seed, self._draws

        readings = self.ranks.gather(self.ranks.on_all_ranks(look))
        check_joint_batch([reading for reading, *_ in readings])
        modules = [part for part in (model, guide) if isinstance(part, nn.Module)]
        self.ranks.broadcast(self._leaves | _values_of(modules))
        _, self._seed, self._draws = readings[0]
        self._form, self._pair = None, (model, guide)

    def _noise(self) -> AbstractContextManager[None]:
        """Draw from this rank's random state, or from one that all ranks share; the caller's state
        is unchanged."""
        rank = 0 if self.same_draws else self.ranks.number
        seed = random.Random(f"{self._seed} {rank} {self._draws}").getrandbits(62)
        self._draws += 1
        return seeded(seed)

    def _device(self) -> torch.device:
        return next((leaf.device for leaf in self._leaves.values()), torch.device("cpu"))

    # A step

    def _joint(
        self, bound: Callable[..., Step], model: Callable, guide: Any, args: tuple, kwargs: dict
    ) -> Step:
        """The step on the joint batch; with gradients if they are turned on.

        :param bound: a step of the rank's ELBO.
        """
        self._prepare(model, guide, args, kwargs)

        def here() -> tuple[float, Step, dict[str, Tensor], Sequence[Tensor]]:
            weight = float(leading_size((args, kwargs))) if self.ranks.size > 1 else 1.0
            with poutine.trace(param_only=True) as statements, self._noise():
                step = bound(model, guide, args, kwargs)
            loss = step.loss
            if not loss.requires_grad:
                return weight, step, {}, ()
            leaves = tensor_leaves(model, guide, statements.trace)
            gradients = torch.autograd.grad(
                loss, [*leaves.values()], materialize_grads=True, allow_unused=True
            )
            return weight, step, leaves, gradients

        form = self._form if torch.is_grad_enabled() else (2, torch.float64)
        weight, step, leaves, gradients = (
            self.ranks.on_all_ranks(here) if form is None else self._or_tell(here, *form)
        )
        if not leaves:
            value = step.value.to(self._device()).reshape(1)
            (value,), _ = self._reduced([value], weight, torch.float64)
            return Step(value[0])
        self._leaves = leaves
        draw = [] if step.draw is None else [step.draw]
        values = [step.value.detach().reshape(1), *draw, *gradients]
        (value, *joint), self._form = self._reduced(values, weight, torch.float32)
        outcome = Outcome((value[0],), tuple(joint[len(draw) :]), [*leaves.values()])
        joint_draw = joint[0] if draw else None
        return replace(step, value=value[0], draw=joint_draw, outcome=outcome)

    def _or_tell(self, function: Callable[[], Any], count: int, dtype: torch.dtype) -> Any:
        """Call a function; if it fails, let the other ranks learn of it, and raise the error.

        The others add up what the ranks send. NaN from this rank makes their joint loss NaN, for
        which they search together, and get this rank's error as the reason.

        :param count: how many numbers the ranks send.
        """
        try:
            return function()
        except Exception as error:
            self.ranks.add(torch.full((count,), torch.nan, dtype=dtype, device=self._device()))
            self.ranks.gather(f"{type(error).__name__}: {error}")
            raise

    def _reduced(
        self, values: list[Tensor], weight: float, dtype: torch.dtype
    ) -> tuple[list[Tensor], tuple[int, torch.dtype] | None]:
        """sum_k weight_k values_k / sum_k weight_k, by one reduction in at least this dtype.

        :returns: the means, and how many numbers of which dtype were sent; None for one process.
        """
        if self.ranks.size == 1:
            return [value.detach() for value in values], None
        for value in values:
            dtype = torch.promote_types(dtype, value.dtype)
        parts = [value.detach().reshape(-1).to(dtype) for value in values]
        flat = torch.cat([*parts, parts[0].new_ones(1)]).mul_(weight)
        self.ranks.add(flat)
        flat /= flat[-1].clone()
        pieces = flat[:-1].split([value.numel() for value in values])
        means = [p.view(v.shape).to(v.dtype) for p, v in zip(pieces, values, strict=True)]
        return means, (flat.numel(), dtype)


def tensor_leaves(model: Callable, guide: Callable, trace: Any) -> dict[str, Tensor]:
    """The parameters of a program and guide by name, from modules and ``pyro.param`` statements.

    Names in statements number the guides of a class, which may differ between ranks.
    """
    named: list[tuple[str, Any]] = []
    for role, module in (("model", model), ("guide", guide)):
        if isinstance(module, nn.Module):
            named += [(f"{role}.{name}", leaf) for name, leaf in module.named_parameters()]
    named += [(name, site["value"].unconstrained()) for name, site in trace.nodes.items()]
    leaves: dict[int, tuple[str, Tensor]] = {}
    for name, leaf in named:
        if leaf is not None and leaf.requires_grad and leaf.is_leaf:
            leaves.setdefault(id(leaf), (name, leaf))
    return dict(leaves.values())


def _values_of(modules: Any) -> dict[str, Tensor]:
    """Parameters and buffers of modules."""
    return {
        f"{number}.{name}": value
        for number, module in enumerate(modules)
        for name, value in chain(module.named_parameters(), module.named_buffers())
    }
