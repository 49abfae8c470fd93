"""Enumeration of finite discrete sites while a program runs: all values at once, in a dimension of
their own."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.discrete.elimination import ROOM, Plate, Variable


class Statement(NamedTuple):
    """A sample statement: its site, the symbols (by dimension) of the discrete sites that its
    density depends on, a discrete site's own included, and its plates."""

    name: str
    kind: str  # "discrete", or the attribute of the run that holds the site
    site: Any
    symbols: Mapping[int, int]
    plates: frozenset[str]


def why_not_enumerable(msg: Any) -> str | None:
    """Return why a discrete site without a value cannot be summed out; None where it can be."""
    fn, infer = msg["fn"], msg["infer"]
    if infer.get("enumerate") == "sequential":
        return (
            "it asks for sequential enumeration, and all its values are taken at once here: write "
            'what depends on it with indexing or torch.where, and infer={"enumerate": "parallel"}'
        )
    plate = next((frame for frame in msg["cond_indep_stack"] if not frame.vectorized), None)
    if plate is not None:
        return (
            f"it stands in the sequential plate '{plate.name}': use the plate as a context manager "
            "(with pyro.plate(...)) instead of a loop"
        )
    try:
        infer["_support"] = fn.enumerate_support(expand=False)
    except NotImplementedError as error:
        return f"its support cannot be enumerated ({str(error).splitlines()[0]})"
    return None


class Enumeration:
    """The discrete sites of one run, and the statements that depend on them.

    It takes dimensions as Pyro's ``EnumMessenger`` does: sites in ``pyro.markov`` share those of
    sites that are out of their sight.
    """

    def __init__(self) -> None:
        self.variables: dict[int, Variable] = {}
        self.statements: list[Statement] = []
        self.plates: dict[str, Plate] = {}
        self.last = ""  # the name of the last statement
        self._symbols = itertools.count()
        self._global: dict[int, int] = {}  # symbols of sites outside of pyro.markov, by dimension
        self._depths: dict[str, int] = {}
        self._passed_on: dict[str, dict[int, int]] = {}

    def before(self, msg: Any) -> None:
        """Note the symbols that may reach a statement, and give it all its values if it is to be
        summed out."""
        infer, symbols = msg["infer"], dict(self._global)
        scope = infer.get("_markov_scope")
        if scope is not None:
            for name, depth in scope.items():
                if self._depths.get(name) == depth:  # its markov context has not been left
                    symbols.update(self._passed_on[name])
            self._depths[msg["name"]] = infer["_markov_depth"]
        infer["_symbols"] = symbols
        if not infer.get("_sum_out"):
            return
        dim, symbol = -1 - ROOM - len(self._global), next(self._symbols)
        if scope is None:
            self._global[dim] = symbol
        while scope is not None and dim in symbols:
            dim -= 1
        support = infer.pop("_support")
        event = support.shape[support.dim() - msg["fn"].event_dim :]
        value = support.reshape(support.shape[:1] + (1,) * (-1 - dim) + event)
        mark = getattr(support, "_pyro_categorical_support", None)
        if mark is not None:
            value._pyro_categorical_support = mark  # for the fast log_prob of Pyro's Categorical
        values = support.reshape(support.shape[:1] + event)
        self.variables[symbol] = Variable(msg["name"], values, _plates_of(msg))
        symbols[dim], infer["_enumerated"] = symbol, dim
        msg["value"], msg["done"] = value, True

    def after(self, msg: Any, site: Any, kind: str) -> None:
        """Note a statement, and the symbols that its value passes on."""
        symbols, fn, value = msg["infer"].get("_symbols", {}), msg["fn"], msg["value"]
        self.last = name = msg["name"]
        if msg["infer"].get("_placeholder"):  # at one value of the discrete sites
            value = value[(0,) * max(0, value.dim() - fn.event_dim - ROOM)]
            msg["value"] = value
        event_dim = getattr(fn, "event_dim", 0)
        shape = value.shape[: value.dim() - event_dim] if isinstance(value, Tensor) else ()
        self._passed_on[name] = _along(symbols, [shape])
        if not kind or not symbols:
            return
        for frame in msg["cond_indep_stack"]:
            if frame.dim is not None:
                if frame.dim < -ROOM:
                    raise UnsupportedProgramError(
                        f"the plate '{frame.name}' has the dim {frame.dim}: a program with "
                        f"discrete latents has room for plates from -1 to {-ROOM}"
                    )
                full = frame.full_size or frame.size
                self.plates[frame.name] = Plate(frame.dim, frame.size, full / frame.size)
        mask = [site.mask.shape] if isinstance(site.mask, Tensor) else []
        own = msg["infer"].get("_enumerated")
        symbols = _along(symbols, [site.distribution.batch_shape, *mask], own)
        if kind == "prior_factors":
            if symbols:
                raise UnsupportedProgramError(
                    f"the prior factor '{name}' depends on a discrete site that is summed out: "
                    "let it be a pyro.factor, or depend on the continuous latents alone"
                )
            return
        self.statements.append(Statement(name, kind, site, symbols, _plates_of(msg)))

    def remove_open_sites(self, run: Any) -> None:
        """Take back the discrete sites that are open in a run and that no statement depends on:
        they would be observed, without a value."""
        for place, statement in enumerate(self.statements):
            name = statement.name
            if statement.kind != "discrete" or name not in run.observed:
                continue
            symbol = next(s for s, variable in self.variables.items() if variable.name == name)
            if any(symbol in s.symbols.values() for s in self.statements if s is not statement):
                del run.observed[name]
                continue
            run.open, run.followed = True, run.followed or name != self.last
            del self.variables[symbol]
            symbols = {d: s for d, s in statement.symbols.items() if s != symbol}
            site = statement.site._replace(value=None)
            self.statements[place] = Statement(name, "observed", site, symbols, statement.plates)


def _plates_of(msg: Any) -> frozenset[str]:
    return frozenset(frame.name for frame in msg["cond_indep_stack"])


def _along(
    symbols: Mapping[int, int], shapes: Iterable[tuple[int, ...]], own: int | None = None
) -> dict[int, int]:
    """The symbols in whose dimensions some shape has several entries, and the one of ``own``."""
    return {
        dim: symbol
        for dim, symbol in symbols.items()
        if dim == own or any(len(shape) >= -dim and shape[dim] > 1 for shape in shapes)
    }
