"""Enumeration of finite discrete sites while a program runs: all values at once, in a dimension of
their own."""

from typing import Any

from pyro.poutine.runtime import _EnumAllocator
from torch import Tensor

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.program.elimination import ROOM, Plate, Statement, Variable, symbols_of


def why_not_enumerable(msg: Any) -> str | None:
    """Return why a discrete site without a value cannot be summed out; None where it can be."""
    fn, infer = msg["fn"], msg["infer"]
    if not getattr(fn, "has_enumerate_support", False):
        return "its support cannot be enumerated"
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


def is_enumerable(msg: Any) -> bool:
    """Return whether a site without a value is discrete with a support that can be summed over."""
    return getattr(msg["fn"], "has_enumerate_support", False) and why_not_enumerable(msg) is None


class Enumeration:
    """The discrete sites of one run, and what depends on them.

    Dimensions are given out as Pyro's ``EnumMessenger`` does it.
    """

    def __init__(self) -> None:
        self.variables: dict[int, Variable] = {}
        self.statements: list[Statement] = []
        self.plates: dict[str, Plate] = {}
        self._allocator = _EnumAllocator()
        self._allocator.set_first_available_dim(-1 - ROOM)
        self.last = ""  # the name of the last statement
        self._depths: dict[str, int] = {}
        self._value_symbols: dict[str, dict[int, int]] = {}

    def before(self, msg: Any) -> None:
        """Note the symbols that may reach a statement, and give it all its values if asked for."""
        scope = msg["infer"].get("_markov_scope")
        symbols = self._allocator.dim_to_id.copy()
        if scope is not None:
            for name, depth in scope.items():
                if self._depths.get(name) == depth:  # its markov context has not been left
                    symbols.update(self._value_symbols[name])
            self._depths[msg["name"]] = msg["infer"]["_markov_depth"]
        msg["infer"]["_symbols"] = symbols
        if msg["infer"].get("_sum_out"):
            self._enumerate(msg, None if scope is None else set(symbols))

    def _enumerate(self, msg: Any, taken: set[int] | None) -> None:
        fn = msg["fn"]
        support = msg["infer"].pop("_support")
        dim, symbol = self._allocator.allocate(taken)
        event = support.shape[support.dim() - fn.event_dim :]
        value = support.reshape(support.shape[:1] + (1,) * (-1 - dim) + event)
        mark = getattr(support, "_pyro_categorical_support", None)
        if mark is not None:
            value._pyro_categorical_support = mark  # for the fast log_prob of Pyro's Categorical
        plates = frozenset(frame.name for frame in msg["cond_indep_stack"])
        self.variables[symbol] = Variable(msg["name"], value, plates, fn.event_dim)
        msg["infer"]["_symbols"][dim] = symbol
        msg["infer"]["_enumerated"] = True
        msg["value"], msg["done"] = value, True

    def without_enumerated_dims(self, msg: Any) -> Any:
        """A placeholder's value at one value of the discrete sites, so that it passes none on."""
        value = msg["value"]
        if not self.variables:
            return value
        extra = value.dim() - msg["fn"].event_dim - ROOM
        return value[(0,) * extra] if extra > 0 else value

    def after(self, msg: Any, site: Any, kind: str) -> None:
        """Note a statement, and the symbols that its value passes on."""
        symbols = msg["infer"].get("_symbols", {})
        self.last = name = msg["name"]
        value = msg["value"]
        shape: tuple[int, ...] = ()
        if isinstance(value, Tensor) and symbols:
            shape = tuple(value.shape[: value.dim() - getattr(msg["fn"], "event_dim", 0)])
        self._value_symbols[name] = {
            dim: symbol for dim, symbol in symbols.items() if len(shape) >= -dim and shape[dim] > 1
        }
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
        plates = frozenset(frame.name for frame in msg["cond_indep_stack"])
        self.statements.append(Statement(name, kind, site, symbols, plates))

    def own_symbols(self) -> dict[str, int]:
        """The symbol of each variable, by its site."""
        return {variable.name: symbol for symbol, variable in self.variables.items()}

    def used(self) -> set[int]:
        """The symbols of the sites that some other statement depends on."""
        own, found = self.own_symbols(), set()
        for statement in self.statements:
            found |= {*symbols_of(statement).values()} - {own.get(statement.name)}
        return found

    def leave_open(self, name: str) -> None:
        """Take a discrete site for one that would be observed, without a value."""
        symbol = self.own_symbols()[name]
        del self.variables[symbol]
        for place, statement in enumerate(self.statements):
            if statement.name == name:
                left = {d: s for d, s in statement.symbols.items() if s != symbol}
                site = statement.site._replace(value=None)
                self.statements[place] = Statement(name, "observed", site, left, statement.plates)
