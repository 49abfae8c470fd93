"""Base class of estimators with noise for every datum, and the tracking of products with
latents."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import Distribution

from pyro_bdl.distributions.dropout_noise import NoisyWeight
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators.product import DataProduct, Operand, data_product
from pyro_bdl.program.linear_ops.recognize import recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker, returns_values
from pyro_bdl.program.trace import is_deterministic
from pyro_bdl.utils.one_thread import OneThread, handlers
from pyro_bdl.utils.trees import tree_leaves

if TYPE_CHECKING:
    from pyro_bdl.guides.base import Guide

Rule = Callable[[DataProduct, dict[str, Tensor]], Tensor]


class Products(Tracker):
    """Tracker that computes products of one datum with latents by the rule of an estimator; other
    operations use the draws. The guide's draws are followed inside its context.

    :ivar computed: uses of each latent in this run that the rule computed.
    :ivar read: uses of its draw, in this run and in the guide's.
    """

    def __init__(self, estimator: "PerDatum") -> None:
        super().__init__()
        self.estimator = estimator
        self.in_program = False  # else in the guide, which computes with its draws
        self.distributions: dict[str, Distribution] = {}
        self.values: dict[str, Tensor] = {}  # those that the datum of this run has drawn
        self.computed: dict[str, list[Tag]] = defaultdict(list)
        self.read: dict[str, list[Tag]] = defaultdict(list)

    def drawn(self, site: str, distribution: Distribution, value: Tensor) -> None:
        """Follow a latent's draw, unless it is a point or the value of an earlier site."""
        is_point = isinstance(base_distribution(distribution, through_masks=False), Delta)
        if not is_point and id(value) not in self.tags:
            self.distributions[site] = distribution
            self.track(site, value)

    def sample(self, msg: Any) -> None:
        """Draw the value of a guide's sample statement, and follow it."""
        fn = msg["fn"]
        msg["value"] = fn.rsample() if fn.has_rsample else fn.sample()
        msg["done"] = True
        self.drawn(msg["name"], fn, msg["value"])

    def of_datum(self, program: Callable[[], Any]) -> Any:
        """Run the program on one datum."""
        of_guide = self.read
        self.read = defaultdict(list, {site: [*tags] for site, tags in of_guide.items()})
        self.computed, self.values, self.in_program = defaultdict(list), {}, True
        try:
            with self:
                return program()
        finally:
            self.read, self.in_program = of_guide, False

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        op = recognize(func, args, kwargs, self.is_latent) if self.in_program else None
        product = data_product(op, self._operand)
        if product is not None:
            for operand in product.operands:
                assert operand.tag is not None
                self._meets(operand.tag, self.read)
                if not self.estimator.shared:
                    self._meets(operand.tag, self.computed)
                self.computed[operand.tag.site].append(operand.tag)
            return product.back(self.estimator.rule(product, self.values))
        result = func(*args, **kwargs)
        if returns_values(func, result):
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
                f"tied weights, or a penalty), and {self.estimator.name} would give it another "
                "value each time: use plain sampling (estimator=None) for this program"
            )


class PerDatum(OneThread):
    """A context in which products of data with latents have separate noise for every datum.

    Inside it, the ELBOs of this package use another estimator of the expected log likelihood: they
    run the program on one datum at a time, by ``vmap``. The terms of each single datum keep their
    distribution. KL terms are not affected: they use closed forms or one draw for all data.

    :param rule: maps a product, and a dict of the values that the datum has drawn by site, to the
        outputs.
    :param name: the estimator's name, for messages.
    :param shared: whether all products with a latent use the same value of it for each datum.
    :raises UnsupportedProgramError: inside the context, for an ELBO of Pyro's; at a step, if the
        estimator applies to no layer, or if data depend on each other.
    """

    def __init__(self, rule: Rule, name: str, *, shared: bool = False) -> None:
        super().__init__()
        self.rule, self.name, self.shared = rule, name, shared

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["is_observed"] and not is_deterministic(msg):
            raise UnsupportedProgramError(
                f"{self.name} runs the program on one datum at a time, which only the ELBOs of "
                "this package do: use pyro_bdl.elbo.TemperedTrace_ELBO(), which at its default "
                "temperature is Pyro's Trace_ELBO"
            )

    @contextmanager
    def run(self) -> Iterator[Products]:
        """A context for a guide's draw, whose sites ``Products.drawn`` follows, and for the runs of
        a program at it.

        :raises UnsupportedProgramError: if the program computes no product of data with a latent.
        """
        products = Products(self)
        yield products
        if not products.computed:
            raise UnsupportedProgramError(
                f"{self.name} found no layer that multiplies data with a latent that has its own "
                "distribution in the guide (linear, convolution, embedding, attention, product "
                "with @): use plain sampling (estimator=None)"
            )

    def distributions(self, guide: "Guide") -> Mapping[str, Distribution]:
        """The distributions of a guide's sites.

        :raises UnsupportedProgramError: if the sites depend on each other.
        """
        distributions = guide.site_distributions()
        if distributions is None:
            raise UnsupportedProgramError(
                f"{self.name} needs a guide with a separate distribution at each site, such as "
                f"AutoMeanField, and {type(guide).__name__} is none: use plain sampling "
                "(estimator=None)"
            )
        return distributions


def active() -> PerDatum | None:
    """The innermost open context of this class, or None."""
    for handler in reversed(handlers()):
        if isinstance(handler, PerDatum):
            return handler
    return None


def require_normal(product: DataProduct, name: str) -> None:
    """Check that the latents of a product are independent Normals.

    :raises UnsupportedProgramError: if a latent of a product is not independent Normal in the
        guide.
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


def _overlap(a: Tag, b: Tag) -> bool:
    if a.indices is None or b.indices is None:
        return True
    return bool(torch.isin(a.indices.flatten(), b.indices.flatten()).any())
