"""A program of several outputs of one network, each of a kind of its own."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pyro_bdl.models.base import ObservationModel, floating, selected
from pyro_bdl.program.linear_ops.tracker import Probabilities


class MultiOutput(ObservationModel):
    """Several outputs of one network, independent given the weights, each observed in its own way.

    The observed sites have the names of the heads. Their other sites are named after them:
    ``price.f`` is the output of the head ``price``, ``price.noise`` its noise. The targets are a
    dict, ``model(x, {"price": prices, "sold": sold})``; a head whose targets are None is predicted.

    :param network: a module of ``bayesianize``, or any module that samples its weights.
    :param heads: name to a ready-made program without a network, such as ``Regression(noise=0.1)``.
        Its ``output`` says which tensor of the network's output is its f(x): by default the
        attribute or the key of the head's name, or in a tuple the one of the head's place.
    :param num_data: N, as in ``ObservationModel``; the heads have none.
    :raises ValueError: for no head, or one that has a network or ``num_data``, or is used twice.
    """

    def __init__(
        self,
        network: nn.Module,
        heads: Mapping[str, ObservationModel],
        *,
        num_data: int | None = None,
    ) -> None:
        super().__init__(network, num_data=num_data)
        if not heads:
            raise ValueError("heads is empty: give at least one, as in {'y': Regression()}")
        self._heads = tuple(heads)
        for name, head in heads.items():
            if not isinstance(head, ObservationModel) or isinstance(head, MultiOutput):
                raise TypeError(
                    f"the head {name!r} must be a ready-made program such as Regression(), got "
                    f"{type(head).__name__}"
                )
            if head.network is not None or head.num_data is not None or head._head is not None:
                raise ValueError(
                    f"the head {name!r} must be a program of its own without network and num_data, "
                    "such as Regression(noise=0.1)"
                )
            head._head = name
            setattr(self, f"head_{name}", head.to(floating(network)))

    @property
    def heads(self) -> dict[str, ObservationModel]:
        """The programs of the outputs, by name."""
        return {name: getattr(self, f"head_{name}") for name in self._heads}

    def takes_missing(self, argument: str) -> bool:
        return any(head.takes_missing(argument) for head in self.heads.values())

    def _observe(
        self, found: Any, y: Any, inputs: Any, seen: "Probabilities | None"
    ) -> dict[str, Any]:
        y = dict.fromkeys(self._heads) if y is None else y
        if not isinstance(y, Mapping) or set(y) != set(self._heads):
            given = sorted(y) if isinstance(y, Mapping) else type(y).__name__
            raise ValueError(
                f"y must be a dict with the targets of each head ({', '.join(self._heads)}; None "
                f"for those to predict), got {given}"
            )
        is_tuple = isinstance(found, tuple | list) and not hasattr(found, "_fields")
        heads = {}
        for place, (name, head) in enumerate(self.heads.items()):
            own = place if is_tuple else name
            output = selected(found, own if head.output is None else head.output)
            heads[name] = head, output, y[name]
        return self._sampled(heads, inputs, seen)
