"""Gradient steps in JAX: a bound is translated once, and its steps run in one compiled loop.

A step of a small network costs a few operators and much Python. Here the bound's loss, with the
program and the guide inside, is traced to ATen operators and translated to JAX, which
differentiates it; the loop over minibatches with the optimizer's update is compiled as a whole.
Between two stretches of steps the parameters and the optimizer's state are torch's own.
"""

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pyro_bdl.elbo.checks import step_of
from pyro_bdl.elbo.step import Terms
from pyro_bdl.elbo.tempered import TemperedTrace_ELBO
from pyro_bdl.errors import FailedStepError, UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.tracing.compiled import split
from pyro_bdl.tracing.jax.ops.registry import aten
from pyro_bdl.tracing.jax.translate import KEYS, loss_to_jax, shared
from pyro_bdl.training.descent import Descent
from pyro_bdl.utils.autograd import have_hooks
from pyro_bdl.utils.module_state import Modules, without_side_effects
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.random_state import continued
from pyro_bdl.utils.validation import real_number

STEPS_AT_ONCE = 500
_COUNT = 3  # the place of the number of steps among the arguments of the loop
_ROUNDING = 100.0  # by how many units two runs with the same numbers may differ: a GPU's sums do
Arrays = dict[str, jax.Array]

# ------------------------------------------------------------------------ updates of optimizers


def adam(
    options: Mapping[str, Any], parameter: Any, gradient: Any, state: Arrays, rate: Any
) -> tuple[Any, Arrays]:
    """The update of ``torch.optim.Adam`` and ``AdamW``: a parameter and its state after a step.

    :param options: those of the parameter's group.
    :param rate: the learning rate.
    """
    decay, decoupled = options["weight_decay"], options.get("decoupled_weight_decay", False)
    if decay and decoupled:
        parameter = parameter * (1.0 - rate * decay)
    elif decay:
        gradient = gradient + decay * parameter
    first, second = options["betas"]
    step = state["step"] + 1
    count = step.astype(parameter.dtype)
    mean = first * state["exp_avg"] + (1.0 - first) * gradient
    square = second * state["exp_avg_sq"] + (1.0 - second) * gradient**2
    scale = jnp.sqrt(square / _one_minus_power(second, count)) + options["eps"]
    parameter = parameter - rate / _one_minus_power(first, count) * mean / scale
    return parameter, {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def sgd(
    options: Mapping[str, Any], parameter: Any, gradient: Any, state: Arrays, rate: Any
) -> tuple[Any, Arrays]:
    """The update of ``torch.optim.SGD`` without dampening: a parameter and its state after a
    step."""
    gradient = gradient + options["weight_decay"] * parameter
    if not options["momentum"]:
        return parameter - rate * gradient, state
    buffer = options["momentum"] * state["momentum_buffer"] + gradient
    gradient = gradient + options["momentum"] * buffer if options["nesterov"] else buffer
    return parameter - rate * gradient, {"momentum_buffer": buffer}


def _one_minus_power(base: float, count: Any) -> Any:
    """1 - base^count, without cancellation."""
    return -jnp.expm1(count * math.log(base)) if base else jnp.ones_like(count)


# For each optimizer its update, and its options that the update does not have, off.
UPDATES: dict[type, tuple[Callable, dict[str, Any]]] = {
    torch.optim.Adam: (adam, {"amsgrad": False, "maximize": False}),
    torch.optim.AdamW: (adam, {"amsgrad": False, "maximize": False}),
    torch.optim.SGD: (sgd, {"dampening": 0, "maximize": False}),
}


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps call hooks, of the optimizer or of all optimizers."""
    for register in (
        optimizer.register_step_pre_hook, optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook, register_optimizer_step_post_hook,
    ):  # fmt: skip
        with register(lambda *_: None) as handle:  # which knows the hooks beside its own
            hooks: Any = handle.hooks_dict_ref()
            if len(hooks) > 1:
                return True
    return False


def _fresh_state(update: Callable, options: Mapping[str, Any], parameter: Tensor) -> dict:
    """The state of an optimizer before its first step, under torch's names."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    if update is adam:
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return {"momentum_buffer": zeros} if options["momentum"] else {}


# ------------------------------------------------------------------------------------- the loop


@runtime_checkable
class PureLoss(Protocol):
    """A loss that is a function of parameters and data, without random numbers and schedules."""

    def pure_loss(self, model: Callable, guide: Guide, args: tuple, kwargs: dict) -> Tensor:
        """The loss in nats, a scalar, by a run of the program, which was checked before."""
        ...


@runtime_checkable
class JointUpdate(Protocol):
    """An optimizer whose update moves all parameters together, with the first one's state."""

    def fresh_state(self) -> dict[str, Any]:
        """The state before the first step."""
        ...

    @staticmethod
    def jax_update(
        options: Mapping[str, Any], parameters: Any, gradients: Any, state: Any, rate: Any,
        temperature: Any, draw: Any,
    ) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
        """The parameters and the state after a step, in JAX.

        :param draw: the mean of the step's draws; None where it is not known.
        """
        ...


def loop_over_steps(
    function: Callable[..., Any],
    update: Callable,
    groups: Sequence[Mapping[str, Any]],
    places: Sequence[int],
    cut: Sequence[bool],
    *,
    joint: bool = False,
) -> Callable[..., Any]:
    """The loop over steps, which ends before a step whose loss or gradient is not finite.

    ``jax.vmap`` of it takes the steps of several fits, each of which ends for itself.

    :param function: of a ``JaxLoss``.
    :param update: of the optimizer.
    :param groups: the optimizer's options for each parameter.
    :param places: the number of each parameter's group.
    :param cut: for each argument whether steps are on some of its rows.
    :param joint: whether the update is that of all parameters together.
    """

    def run(
        parameters: list, states: list, seed: Any, count: Any, rows: Any, rates: Any,
        scheduled: Any, constants: list, data: list,
    ) -> Any:  # fmt: skip
        key = jax.random.key(seed, impl=KEYS)

        def value(parameters: list, key: Any, arguments: list) -> tuple[Any, Any]:
            first, *terms = function(parameters, constants, key, *arguments)
            return first, terms

        def arguments(i: Any) -> list:
            parts = [
                leaf.at[rows[i]].get(mode="promise_in_bounds") if is_cut else leaf
                for leaf, is_cut in zip(data, cut, strict=True)
            ]
            return [*parts, *scheduled[i]]

        def evaluate(i: Any, parameters: list) -> Any:
            at = jax.value_and_grad(value, has_aux=True)
            return at(parameters, jax.random.fold_in(key, i), arguments(i))

        def body(carry: Any) -> Any:
            i, _, parameters, states, losses, _ = carry
            (loss, terms), gradients = evaluate(i, parameters)
            finite = jnp.isfinite(loss)
            for gradient in gradients:
                finite &= jnp.isfinite(jnp.abs(gradient).max(initial=0.0))
            if joint:
                draw = terms[-1] if terms else None
                now = rates[i, 0], scheduled[i][0], draw
                moved, state = update(groups[0], parameters, gradients, states[0], *now)
                after = list(zip(moved, [state, *states[1:]], strict=True))
            else:
                after = [
                    update(group, *three, rates[i, number])
                    for group, number, *three in zip(
                        groups, places, parameters, gradients, states, strict=True
                    )
                ]
            before = list(zip(parameters, states, strict=True))
            after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, before)
            losses = losses.at[i].set(loss)
            return i + finite, finite, *map(list, zip(*after, strict=True)), losses, terms

        shapes = jax.eval_shape(evaluate, 0, parameters)[0]
        loss, terms = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        losses = jnp.zeros(len(scheduled), loss.dtype)
        start = jnp.array(0), jnp.array(True), parameters, states, losses, terms
        return jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[1], body, start)

    return run


class JaxDescent(Descent):
    """Gradient steps as :class:`Descent` takes them, many at a time in a compiled loop.

    Minibatches, learning rates, temperatures and other schedules are those of ``Descent``, and so
    are the parameters after a step without random numbers, up to rounding. Random numbers are
    others than torch's: where the loss has any, their key is drawn by torch's generator at the
    start of each stretch of steps, so that a seed and a checkpoint determine them. What else the
    program reads stays as it is meanwhile.

    :param steps: the number of all steps.
    :param rates: the learning rates of the optimizer's groups as a function of the step's number.
    :param stride: steps at once; a stretch ends where its multiples do.
    :param convolutions: whether a loss with convolutions has such steps.
    :param options: those of ``Descent``.
    :raises UnsupportedProgramError: for an optimizer, a bound or a guide that has no such steps.
    :raises MissingOperatorError: for an operator without translation.
    """

    def __init__(
        self,
        *args: Any,
        steps: int,
        rates: Callable[[int], list[float]],
        stride: int = STEPS_AT_ONCE,
        convolutions: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.steps, self.rates, self.stride = steps, rates, min(stride, steps)
        self._pure = isinstance(self._bound, PureLoss)
        self._update = self._supported()
        rows = self.batches.size if self.batches.size < self.batches.rows else None
        whole = split(self.args, {})
        first = self.args if rows is None else self._rows_of(slice(rows))
        example = split(first, {})
        self._cut = [
            a.shape != b.shape for a, b in zip(whole.tensors, example.tensors, strict=True)
        ]
        bound, model, guide = self._bound, self.objective.model, self.objective.guide
        modules = Modules(model, guide)
        dtype = self._check_one_loss(first, modules)
        guides = [part for part in guide.modules() if isinstance(part, Guide)]
        self._numbers = [(part, tuple(part.numbers())) for part in guides]
        scheduled = torch.tensor(self._scheduled(0), dtype=dtype, device="cpu").unbind()

        def loss(*tensors: Tensor) -> tuple[Tensor, ...]:
            count = len(example.tensors)
            args, kwargs = example.rebuild(tensors[:count])
            temperature, *numbers = tensors[count:]
            left = iter(numbers)
            with ExitStack() as stack:
                for part, names in self._numbers:
                    stack.enter_context(part.at_parameters({name: next(left) for name in names}))
                if self._pure:
                    return (bound.pure_loss(model, guide, args, kwargs) * self.scale,)
                terms = bound.terms(model, guide, args, kwargs)
            return bound.negative_bound(terms, temperature) * self.scale, *terms[:3], terms.draw

        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        with without_side_effects(modules), Hidden(), pyro.validation_enabled(False):
            translated = loss_to_jax(loss, trained, [*example.tensors, *scheduled])
        if not convolutions and aten.convolution.default in translated.operators:
            raise UnsupportedProgramError("convolutions take longer there")
        self.parameters = translated.parameters
        groups = self.optimizer.param_groups
        self._places = [  # of each parameter's group
            place
            for parameter in self.parameters
            for place, group in enumerate(groups)
            if any(parameter is other for other in group["params"])
        ]
        seeded = torch.Tag.nondeterministic_seeded
        self._draws = any(seeded in getattr(op, "tags", ()) for op in translated.operators)
        self.double = translated.double
        self._dtype = str(dtype).removeprefix("torch.")
        with jax.enable_x64(self.double):
            self.data = [jnp.asarray(tensor.detach().cpu().numpy()) for tensor in whole.tensors]
            self.constants = [jnp.asarray(constant) for constant in translated.constants]
        fixed = [
            (place, name, value)
            for place in self._places
            for name, value in groups[place].items()
            if name not in ("params", "lr")
        ]
        key = translated.signature, self._update.__qualname__, repr((fixed, self._cut))
        self._function, self.key = translated.function, (*key, self.double)
        self._loop = shared(self.key, lambda: jax.jit(self.loop()))

    @property
    def _bound(self) -> Any:
        return self.objective.elbo

    def _joint_update(self) -> JointUpdate | None:
        """The optimizer, if its own class, and not a base class alone, has a joint update."""
        optimizer: Any = self.optimizer
        own = "jax_update" in vars(type(optimizer))
        return optimizer if own and isinstance(optimizer, JointUpdate) else None

    def _supported(self) -> Callable:
        """The optimizer's update in JAX.

        :raises UnsupportedProgramError: where there is none.
        """
        name = type(self.optimizer).__name__
        update, off = UPDATES.get(type(self.optimizer), (None, {}))
        joint = self._joint_update()
        if joint is not None:
            update = joint.jax_update
        elif update is None:
            known = ", ".join([*(optimizer.__name__ for optimizer in UPDATES), "IVON"])
            raise UnsupportedProgramError(f"the optimizer {name} has no steps there ({known} have)")
        for option, value in off.items():
            if any(group.get(option, value) != value for group in self.optimizer.param_groups):
                raise UnsupportedProgramError(f"{name} has no option {option} there")
        if _has_hooks(self.optimizer):
            raise UnsupportedProgramError("the optimizer has hooks, which are called at each step")
        if have_hooks(p for group in self.optimizer.param_groups for p in group["params"]):
            raise UnsupportedProgramError("a parameter has a hook on its gradient")
        if not (self._pure or isinstance(self._bound, TemperedTrace_ELBO)):
            raise UnsupportedProgramError(
                f"{type(self._bound).__name__} is none of the tempered bounds"
            )
        return update

    def loop(self) -> Callable[..., Any]:
        options = [  # without the parameters, which the compiled loop would keep
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        groups = [options[place] for place in self._places]
        joint = self._joint_update() is not None
        return loop_over_steps(
            self._function, self._update, groups, self._places, self._cut, joint=joint
        )

    def _scheduled(self, ahead: int) -> list[float]:
        """The temperature after so many more steps, and the numbers of the guides."""
        bound = self._bound
        numbers = [part.numbers(ahead)[name] for part, names in self._numbers for name in names]
        temperature = (
            1.0 if self._pure else real_number(bound.schedule(bound.step + ahead), "temperature")
        )
        return [temperature, *numbers]

    def _check_one_loss(self, args: tuple, modules: Modules) -> torch.dtype:
        """Check program, guide and data, and that the loss is one function of torch's random
        numbers; return its dtype.

        :raises UnsupportedProgramError: if it differs between two steps with the same ones.
        """
        bound, losses, numbers = self._bound, list[Tensor](), list[dict]()
        model, guide = self.objective.model, self.objective.guide
        pure = self._pure
        step = None if pure else bound.step
        for seed in range(2):
            with without_side_effects(modules), torch.set_grad_enabled(pure):
                torch.manual_seed(0)
                random.seed(seed)
                np.random.seed(seed)
                if pure and losses:  # whose objective would make a graph
                    loss = bound.pure_loss(model, guide, args, {})
                else:
                    loss = step_of(bound, model, guide, args, {}).value
                losses.append(loss.detach())
            numbers.append(_numbers_in(modules))
            if not pure:
                bound.step = step
        for (module, name), value in numbers[0].items():
            if value != numbers[1].get((module, name), value):
                raise UnsupportedProgramError(
                    f"each run changes {type(module).__name__}.{name}, now {value!r}, which would "
                    "stay as it is there"
                )
        first, second = losses
        if (first - second).abs() > _ROUNDING * torch.finfo(first.dtype).eps * first.abs():
            raise UnsupportedProgramError(
                f"the loss is {first:.6g} in one step and {second:.6g} in another with the same "
                "random numbers of torch: the program keeps a counter, or draws with numpy or "
                "Python"
            )
        return first.dtype

    # ---------------------------------------------------------------------------------- stretches

    def advance(self, number: int) -> int:
        """Take the steps to the end of a stretch; return the number of the next step."""
        rows = self.next_rows(number)
        while rows:
            with jax.enable_x64(self.double):
                results = jax.device_get(self._loop(*self.inputs(number, rows)))
            taken = self.take(number, rows, results)
            number, rows = number + taken, rows[taken:]
        return number

    def at(self, parameters: Sequence[Tensor], args: tuple) -> "JaxDescent":
        """The same steps from other parameters and on other data, of the same shapes.

        The guide must have no ``numbers`` that change from step to step: it counts its own steps.

        :param parameters: in the place of ``parameters``, without gradients.
        """
        other = copy.copy(self)
        other.objective = copy.copy(self._bound)(self.objective.model, self.objective.guide)
        other.parameters = list(parameters)
        before, now = split(self.args, {}).tensors, split(args, {}).tensors
        other.args = args
        other.data = [
            known if a is b else jnp.asarray(_array(b))
            for known, a, b in zip(self.data, before, now, strict=True)
        ]
        other.begin()
        return other

    def next_rows(self, number: int) -> list[Tensor | None]:
        """The rows of each step to the end of the stretch in which a step is."""
        end = min((number // self.stride + 1) * self.stride, self.steps)
        rows = [self.batches.next() for _ in range(end - number)]
        self._check_rows(rows)
        return rows

    def _check_rows(self, rows: Iterable[Tensor | None]) -> None:
        """Compare rows alone with the rows of each step, in the first pass over the data."""
        model, guide = self.objective.model, self.objective.guide
        if self._pure:
            return
        for indices in rows:
            if not self._bound.check_rows(model, guide, self._rows_of(indices), {}):
                return

    def inputs(self, number: int, rows: list[Tensor | None]) -> tuple:
        """The arguments of the loop for steps with these rows."""
        count = len(rows)
        scheduled = [self._scheduled(i) for i in range(count)]
        rates = np.array([self.rates(number + i) for i in range(count)], self._dtype)
        chosen = [indices for indices in rows if indices is not None]  # all of them, or none
        indices = torch.stack(chosen).cpu().numpy() if chosen else np.zeros((count, 0), int)
        seed = int(torch.randint(2**31, (), device="cpu")) if self._draws else 0
        return (
            [_array(parameter) for parameter in self.parameters],
            [{n: self._number(v) for n, v in state.items()} for state in self._states()],
            np.int32(seed), np.int32(count), self._padded(indices), self._padded(rates),
            self._padded(np.asarray(scheduled, self._dtype)), self.constants, self.data,
        )  # fmt: skip

    def take(self, number: int, rows: list[Tensor | None], results: tuple) -> int:
        """Write what the loop gave for these rows; return how many steps were tried: those up to
        the first that failed."""
        done, finite, parameters, after, losses, terms = results
        bound, done = self._bound, int(done)
        self._write(parameters, self._states(), after)
        device = self.parameters[0].device
        self.losses.extend(torch.from_numpy(losses[:done].copy()).to(device).unbind())
        tried = done if finite else done + 1
        temperature = self._scheduled(tried - 1)[0]
        last = torch.tensor(losses[tried - 1], device=device)
        if not self._pure:
            values: Any = [None if t is None else torch.tensor(t, device=device) for t in terms]
            bound.skip(tried)
            bound.record_terms(Terms(*values), last, temperature)
        if not finite:
            self.fail(number + done, last, rows[done])
        return tried

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """Values of each step, as many in every stretch, so that one loop is compiled."""
        missing = self.stride - len(values)
        widths = [(0, missing), *[(0, 0)] * (values.ndim - 1)]
        return np.pad(values, widths)

    def _number(self, value: Any) -> np.ndarray:
        """A part of the optimizer's state, a tensor or a number."""
        if isinstance(value, Tensor):
            return _array(value)
        return np.asarray(value, self._dtype if isinstance(value, float) else None)

    def _states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter, made where there is none yet."""
        states = []
        joint = self._joint_update()
        if joint is not None and not self.optimizer.state[self.parameters[0]]:
            self.optimizer.state[self.parameters[0]].update(joint.fresh_state())
        for parameter, place in zip(self.parameters, self._places, strict=True):
            state = self.optimizer.state[parameter]
            if not state and joint is None:
                options = self.optimizer.param_groups[place]
                state.update(_fresh_state(self._update, options, parameter))
            states.append(dict(state))
        return states

    @torch.no_grad()
    def _write(self, parameters: Sequence, states: Sequence[dict], after: Sequence[dict]) -> None:
        """Give torch's parameters and the optimizer's state the values after a stretch."""
        for parameter, value in zip(self.parameters, parameters, strict=True):
            parameter.copy_(torch.from_numpy(np.array(value)))
        for parameter, state, values in zip(self.parameters, states, after, strict=True):
            for name, before in state.items():
                if isinstance(before, Tensor):
                    before.copy_(torch.from_numpy(np.array(values[name])))
                else:
                    self.optimizer.state[parameter][name] = type(before)(values[name])


class Together:
    """Steps of several fits of one shape in one compiled loop, by ``vmap`` over the fits.

    Each has its own parameters, state of the optimizer, random numbers and data, and comes out as
    it would alone. A fit whose step is not finite leaves it out while the others go on, or its
    error ends them all, as its policy says.

    :param fits: their programs, guides and optimizers differ in their numbers alone.
    :param states: those of torch's generators for each fit, which its steps move.
    :raises UnsupportedProgramError: for fits that differ in more.
    """

    def __init__(self, fits: Sequence[JaxDescent], states: Sequence[dict[str, Tensor]]) -> None:
        self.fits, self.states = list(fits), list(states)
        first = self.fits[0]
        self.stride = first.stride
        if any(fit.key != first.key for fit in fits):
            raise UnsupportedProgramError("the fits differ in more than their numbers")
        axes = [  # none for an array that all fits read
            [
                None if all(one is each[0] for one in each) else 0
                for each in zip(*lists, strict=True)
            ]
            for lists in ([fit.constants for fit in fits], [fit.data for fit in fits])
        ]
        self._axes = axes
        key = *first.key, repr(axes)
        self._loop = shared(key, lambda: jax.jit(jax.vmap(first.loop(), (*[0] * 7, *axes))))

    def advance(self, number: int) -> int:
        """Take the steps to the end of a stretch; return the number of the next step.

        :raises FailedStepError: of a fit, with its number in a note.
        """
        first, rows, numbers = self.fits[0], list[list](), [number] * len(self.fits)
        for fit, states in zip(self.fits, self.states, strict=True):
            with continued(states):
                rows.append(fit.next_rows(number))
        inputs: list[tuple] = [()] * len(rows)
        while any(rows):
            for i, (fit, states) in enumerate(zip(self.fits, self.states, strict=True)):
                if rows[i]:
                    with continued(states):
                        inputs[i] = fit.inputs(numbers[i], rows[i])
                else:
                    inputs[i] = (*inputs[i][:_COUNT], np.int32(0), *inputs[i][_COUNT + 1 :])
            with jax.enable_x64(first.double):
                results = jax.device_get(self._loop(*self._stacked(inputs)))
            for i, fit in enumerate(self.fits):
                if rows[i]:
                    own = jax.tree.map(lambda value, i=i: value[i], results)
                    try:
                        with continued(self.states[i]):
                            taken = fit.take(numbers[i], rows[i], own)
                    except FailedStepError as error:
                        error.add_note(f"(in fit {i})")
                        raise
                    numbers[i], rows[i] = numbers[i] + taken, rows[i][taken:]
        return numbers[0]

    def _stacked(self, inputs: Sequence[tuple]) -> tuple:
        """The arguments of all fits, those that they share once."""

        def joined(axis: int | None, *parts: Any) -> Any:
            return parts[0] if axis is None else jax.tree.map(lambda *a: np.stack(a), *parts)

        *numbers, constants, data = zip(*inputs, strict=True)
        lists = [
            [joined(*each) for each in zip(axes, *parts, strict=True)]
            for axes, parts in zip(self._axes, (constants, data), strict=True)
        ]
        return (*[joined(0, *parts) for parts in numbers], *lists)


def _numbers_in(modules: Modules) -> dict[tuple[nn.Module, str], Any]:
    """The numbers and words among the attributes of modules."""
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
