"""The base of estimators with noise for every datum: which latents they reach, and which not."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.distributions.take_apart import base_distribution
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.estimators.product import Batch, DataProduct, Operand, data_product, sizes_of
from pyro_bdl.program.linear_ops.recognize import recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.trace import is_deterministic

if TYPE_CHECKING:
    from pyro_bdl.guides.base import Guide

Rule = Callable[[DataProduct, dict[str, Tensor]], Tensor]


class _ProductTracker(Tracker):
    """Computes products of data with latents by a rule; all else gets the latents' draws.

    :param rule: from a product, and what it keeps by site in a run, to the outputs.
    :param name: of the estimator, for messages.
    :param shared: whether the products of a latent agree on its value for each datum.
    """

    def __init__(self, rule: Rule, name: str, shared: bool) -> None:
        super().__init__()
        self.rule, self.name, self.shared = rule, name, shared
        self.kept: dict[str, Tensor] = {}
        self.points: dict[int, Tensor] = {}  # values of point masses, by their id
        self.batch = Batch()
        self.distributions: dict[str, Distribution] = {}
        self.computed: dict[str, list[Tag]] = defaultdict(list)  # by the rule
        self.read: dict[str, list[Tag]] = defaultdict(list)  # as a draw
        self.depth = 0
        self.observed = False  # whether a run has met data
        self.told = False

    def end_run(self, stacklevel: int) -> None:
        """Warn, once, of a run in which no product was computed by the rule."""
        if self.observed and not self.computed and not self.told:
            self.told = True
            warnings.warn(
                f"{_no_layer(self.name)}: all data share one draw, as without it",
                BdlWarning,
                stacklevel=stacklevel,
            )
        self.forget()

    def forget(self) -> None:
        self.observed = False
        for kept in (
            self.tags, self.points, self.distributions, self.computed, self.read, self.kept,
        ):  # fmt: skip
            kept.clear()  # type: ignore[attr-defined]

    def drawn(self, site: str, distribution: Distribution, value: Tensor) -> None:
        """A latent's draw: a site that is drawn again begins another run. A point mass is kept
        too, since Pyro's ELBOs replay it in the program under the prior."""
        if id(value) in self.tags or id(value) in self.points:
            return
        if site in self.distributions:
            self.end_run(stacklevel=2)
        self.distributions[site] = distribution
        if isinstance(base_distribution(distribution, through_masks=False), Delta):
            self.points[id(value)] = value
        else:
            self.track(site, value)

    def look_into(self, func: Any, args: tuple, kwargs: dict, body: Callable[[], Any]) -> Any:
        if func is not F.multi_head_attention_forward:
            return super().look_into(func, args, kwargs, body)
        query = args[0] if args else kwargs["query"]
        outside = self.batch
        size = query.shape[1] if query.dim() == 3 else 1
        self.batch = Batch(outside.sizes, size)
        try:
            return super().look_into(func, args, kwargs, body)
        finally:
            self.batch = outside

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        if len(_PYRO_STACK) <= self.depth:  # between the runs: densities
            return func(*args, **kwargs)
        op = recognize(func, args, kwargs, self.is_latent)
        product = data_product(op, self._operand, self.batch)
        if product is not None:
            for operand in product.operands:
                assert operand.tag is not None
                self._meets(operand.tag, self.read)
                if not self.shared:
                    self._meets(operand.tag, self.computed)
                self.computed[operand.tag.site].append(operand.tag)
            return product.back(self.rule(product, self.kept))
        result = func(*args, **kwargs)
        if _tells_numbers(func, result):
            for tag in tagged:
                self._meets(tag, self.computed)
                self.read[tag.site].append(tag)
            for leaf in tree_leaves(result):
                self.tags.pop(id(leaf), None)  # changed in place
        return result

    def _operand(self, value: Tensor) -> Operand:
        tag = self.tag(value)
        return Operand(value, tag, None if tag is None else self.distributions[tag.site])

    def _meets(self, tag: Tag, earlier: Mapping[str, list[Tag]]) -> None:
        if any(_overlap(tag, other) for other in earlier.get(tag.site, ())):
            raise UnsupportedProgramError(
                f"the latent '{tag.site}' is used twice in one run (a layer that is called again, "
                f"tied weights, or a penalty), and {self.name} would give it another value each "
                "time: use plain sampling (estimator=None) for this program"
            )


class PerDatum(Messenger):
    """A context in which products of data with latents get noise of their own for every datum.

    Inside, the ELBOs of this package and of Pyro train as they do outside, with another estimator
    of the expected log likelihood. Within a datum nothing changes: each datum's terms have the
    distribution that they have under one draw of the latents. KL terms are evaluated in closed
    form or at one draw for all, as without it. Where no layer is reached, this package's ELBOs
    raise an error, and those of Pyro go on as outside, with a warning.

    :param rule: how a product is computed, and what of it is kept by site within a run.
    :param name: for messages.
    :param shared: whether the products of a latent agree on its value for each datum.
    """

    def __init__(self, rule: Rule, name: str, *, shared: bool = False) -> None:
        super().__init__()
        self.name = name
        self._products = _ProductTracker(rule, name, shared)

    def __enter__(self) -> "PerDatum":
        super().__enter__()
        self._products.depth = len(_PYRO_STACK)
        self._products.__enter__()
        _active.set((*_active.get(), self))
        return self

    def __exit__(self, *error: Any) -> None:
        _active.set(tuple(context for context in _active.get() if context is not self))
        self._products.__exit__(*error)
        super().__exit__(*error)
        if error and error[0] is not None:
            self._products.forget()
        else:
            self._products.end_run(stacklevel=3)

    # Sample statements, of Pyro's own ELBOs

    def _postprocess_message(self, msg: Any) -> None:
        if msg["type"] != "sample":
            return
        if isinstance(msg["fn"], _Subsample):
            self._products.batch = Batch(self._products.batch.sizes | {len(msg["value"])})
        elif msg["is_observed"]:
            self._products.observed |= not is_deterministic(msg)
        elif isinstance(msg["value"], Tensor):
            self._products.drawn(msg["name"], msg["fn"], msg["value"])

    # Runs, of the ELBOs of this package

    def about(self, args: tuple, kwargs: Mapping[str, Any], plates: frozenset[int]) -> None:
        """There may be as many data as the first tensor of a program's arguments has rows, or as
        a plate has."""
        self._products.batch = Batch(sizes_of(tree_leaves((args, kwargs))) | plates)

    @contextmanager
    def run(
        self, distributions: Mapping[str, Distribution], draws: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Let the program run once at a draw of a guide; or a guide and then the program,
        where the guide's statements are drawn by ``sample``.

        :param distributions: the guide's, by site.
        :param draws: values of the same sites.
        :raises UnsupportedProgramError: if no product of data with a latent was met.
        """
        products = self._products
        products.forget()
        for site, distribution in distributions.items():
            products.drawn(site, distribution, draws[site])
        depth = products.depth
        try:
            if self in _active.get():
                yield
            else:
                products.depth = len(_PYRO_STACK)
                with products:
                    yield
            reached = bool(products.computed)
        finally:
            products.depth = depth
            products.forget()
        if not reached:
            raise UnsupportedProgramError(
                f"{_no_layer(self.name)}: use plain sampling (estimator=None)"
            )

    def sample(self, msg: Any) -> None:
        """Draw the value of a guide's sample statement, and follow it."""
        fn = msg["fn"]
        msg["value"] = fn.rsample() if fn.has_rsample else fn.sample()
        msg["done"] = True
        self._products.drawn(msg["name"], fn, msg["value"])

    def distributions(self, guide: "Guide") -> Mapping[str, Distribution]:
        """The distributions of a guide's sites.

        :raises UnsupportedProgramError: if the sites depend on each other.
        """
        distributions = guide.site_distributions()
        if distributions is None:
            raise UnsupportedProgramError(
                f"{self.name} needs a guide with a distribution of its own at each site, such as "
                f"AutoMeanField, and {type(guide).__name__} is none: use plain sampling "
                "(estimator=None)"
            )
        return distributions


def _no_layer(name: str) -> str:
    return (
        f"{name} found no layer that multiplies data with a latent of its own distribution in the "
        "guide (linear, convolution, embedding, attention, product with @)"
    )


_active: ContextVar[tuple[PerDatum, ...]] = ContextVar("pyro_bdl_per_datum", default=())


def active() -> PerDatum | None:
    """The innermost of these contexts that is open."""
    contexts = _active.get()
    return contexts[-1] if contexts else None


def require_normal(product: DataProduct, name: str) -> None:
    """Check that the latents of a product are independent Normals.

    :raises UnsupportedProgramError: if a latent of a product has no independent Normals.
    """
    for operand in product.operands:
        if operand.normal is None:
            assert operand.tag is not None
            kind, instead = type(operand.base).__name__, "use plain sampling (estimator=None)"
            if isinstance(operand.base, NoisyWeight):
                kind = "dropout"
                instead = (
                    "use per_example_dropout, or Gaussian factors for each weight "
                    '(noise=GaussianNoise(), mask="weights")'
                )
            raise UnsupportedProgramError(
                f"{name} needs independent Normals where a latent multiplies data, and the guide "
                f"has {kind} at site '{operand.tag.site}': give that site a Normal, or {instead}"
            )


_SHAPES = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    "requires_grad_",
}  # fmt: skip
_NUMBERS = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__"}


def _tells_numbers(func: Any, result: Any) -> bool:
    """Return whether a result depends on the entries of a tensor, and not on its shape alone."""
    name = getattr(func, "__name__", "")
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        return name not in _SHAPES
    return name in _NUMBERS


def _overlap(a: Tag, b: Tag) -> bool:
    if a.indices is None or b.indices is None:
        return True
    return bool(torch.isin(a.indices.flatten(), b.indices.flatten()).any())
