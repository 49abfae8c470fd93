"""Checks of a bound: of program, guide and data before its first step, and of each loss before its
gradient reaches an optimizer."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.util import check_site_shape, warn_if_nan
from torch import Tensor

from pyro_bdl.elbo.draw import values_of
from pyro_bdl.elbo.step import Step
from pyro_bdl.errors import ArgumentError, warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import run_at_draw
from pyro_bdl.program.check import check_finite
from pyro_bdl.program.supports import check_support
from pyro_bdl.program.trace import Run, Site, record, sum_out_discrete
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.module_state import preserved_buffers
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.random_state import own_randomness

_NOTHING_OBSERVED = (
    "the program has no observed site: pass the targets to the step, so that a sample statement "
    "gets obs=..."
)


# Losses


def require_gradients() -> None:
    """Check that gradients can be taken.

    :raises RuntimeError: in inference mode, which has no gradients.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() turns off the gradients that a training step needs: train "
            "outside of it"
        )


def require_differentiable(elbo: Any) -> None:
    """Check that a bound gives a loss to differentiate.

    :raises ArgumentError: for one that only makes gradients, as ``pyro.infer.RenyiELBO``, or for
        the class of one.
    """
    if isinstance(elbo, type):
        raise ArgumentError(f"elbo is the class {elbo.__name__}: make one, {elbo.__name__}()")
    if not hasattr(elbo, "differentiable_loss"):
        raise ArgumentError(
            f"{type(elbo).__name__} has no differentiable_loss: use an ELBO that has one, such as "
            "TemperedTraceMeanField_ELBO or pyro.infer.Trace_ELBO, or train with this one by "
            "pyro.infer.SVI and an optimizer of Pyro"
        )


class Objective(ELBOModule):
    """A bound at a program and its guide, a module with the parameters of both."""

    elbo: Any

    def take_step(self, *args: Any, **kwargs: Any) -> Step:
        """Take a step, see ``CheckedLoss.take_step``."""
        return self.elbo.take_step(self.model, self.guide, *args, **kwargs)


class CheckedLoss(ELBO):
    """The part of an ELBO that makes losses and gradients of its steps, and checks the losses.

    A subclass defines ``take_step``.
    """

    def __call__(self, model: Any, guide: Any) -> Objective:
        """The bound at a program and its guide, for torch's optimizers."""
        return Objective(model, guide, self)

    def take_step(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Step:
        """Take a step, whose loss is not checked: it may be not finite."""
        raise NotImplementedError

    def check_data(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Raise an error if the data cause a loss that is not finite."""
        check_data(model, guide, args, kwargs)

    def check_step(
        self, step: Step, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        """Search for bad data where a step's loss is not finite; warn of NaN where there are none.

        On an accelerator this waits for the loss. In vmap, a trace, or the capture of a CUDA graph
        it has no value to check.
        """
        capturing = step.value.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or is_transformed() or torch.compiler.is_compiling():
            return
        if not math.isfinite(step.value.item()):
            self.check_data(model, guide, args, kwargs)
            warn_if_nan(step.value, "loss")

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return -L(eta) as a tensor to differentiate; counts as a step of the schedule."""
        step = self.take_step(model, guide, *args, **kwargs)
        self.check_step(step, model, guide, args, kwargs)
        return step.loss

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return -L(eta) in nats and add its gradients to the parameters' gradients."""
        require_gradients()
        with torch.enable_grad():
            step = self.take_step(model, guide, *args, **kwargs)
        self.check_step(step, model, guide, args, kwargs)
        if step.outcome is not None or step.value.requires_grad:
            step.backward()
        return step.value.item()


def step_of(elbo: Any, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Step:
    """A step of any ELBO that has ``differentiable_loss``; unchecked, if it is of this package.

    A subclass that defines ``differentiable_loss`` anew is asked for it.
    """
    if getattr(type(elbo), "differentiable_loss", None) is CheckedLoss.differentiable_loss:
        return elbo.take_step(model, guide, *args, **kwargs)
    return Step(elbo.differentiable_loss(model, guide, *args, **kwargs))


# Programs, guides and data


def check_data(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
    """Check the data of a step whose loss is not finite.

    :raises ValueError: if the data are not finite, targets are missing or outside their support, or
        the guide belongs to another program.
    :raises TypeError: for an argument that the program cannot use.
    """
    check_finite(model, args, kwargs)
    with Hidden(), torch.no_grad(), preserved_buffers(model, guide):
        _checked_run(model, guide, args, kwargs)


def prepare(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
    """Check the arguments of a first step, and make the guide's parameters.

    A guide of this package has run its program for its parameters. Others, and those of another
    program, are checked here by a run at a draw. The random state is restored,
    so that training continued from a saved state draws the same numbers as uninterrupted training.
    """
    check_finite(model, args, kwargs)
    with (
        Hidden(), torch.no_grad(), preserved_buffers(model, guide), own_randomness(),
    ):  # fmt: skip
        if isinstance(guide, Guide):
            guide.prototype(*args, **kwargs)
            if guide.is_of(model):
                return
        _checked_run(model, guide, args, kwargs)


def check_statements(p: Run, guide: Callable) -> None:
    """Check the statements of a first step's run; warn of minibatches that give a biased bound.

    :raises ValueError: for a guide with a site that the program does not have, and as
        ``_check_shapes``.
    """
    _refuse_surplus(p, guide)
    bias = p.bias_of_minibatches()
    if bias is not None:
        warn(bias, "number-of-data")
    _check_shapes(p)


def _check_shapes(p: Run) -> None:
    """Check the batches of a program's or a guide's statements.

    :raises ValueError: Pyro's, for a statement whose batch is not that of the plates around it.
    """
    for name, site in (p.priors | p.observed | p.factors).items() if p.discrete is None else ():
        frames = [
            CondIndepStackFrame(plate, dim, len(p.subsamples[plate]), 0)
            for plate, dim in site.plates
            if plate in p.subsamples
        ]
        if len(frames) < len(site.plates):
            continue  # in a plate whose size the run does not know
        density = torch.empty(site.distribution.batch_shape, device="meta")
        statement: Any = {"name": name, "cond_indep_stack": frames, "log_prob": density}
        statement |= {"fn": site.distribution, "infer": {}}
        check_site_shape(statement, math.inf)  # type: ignore[arg-type]


def _refuse_surplus(p: Run, guide: Callable) -> None:
    sites = guide.require_layout().latents if isinstance(guide, Guide) else ()
    surplus = [name for name in sites if name not in p.latents]
    if surplus:
        raise ValueError(
            f"the guide has the site '{surplus[0]}', which is not a latent of the program here: "
            "make a new guide, and give prototype(...) the targets too"
        )


def _checked_run(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Run:
    """A run of the program at a draw of the guide."""
    q = record(guide, {}, args, kwargs)
    _check_shapes(q)
    p = run_at_draw(model, values_of(q), args, kwargs, draw=sum_out_discrete)
    for name, site in q.latents.items():
        if not site.distribution.has_rsample:
            raise ValueError(
                f"the guide's distribution at site '{name}' cannot be reparameterized "
                f"({type(site.distribution).__name__}): use pyro.infer.Trace_ELBO"
            )
    if not p.observed and not p.factors:
        raise ValueError(_NOTHING_OBSERVED)
    if not p.latents.keys() <= q.latents.keys():
        raise ValueError(_without_value(p, q.latents))
    _refuse_surplus(p, guide)
    check_support(p)
    return p


def require_values(run: Run, latents: Collection[str]) -> None:
    """Check that a run has observed data and drew no latents besides the given ones."""
    if run.open or not run.latents.keys() <= set(latents):
        raise ValueError(_without_value(run, latents))
    if not run.observed and not run.factors:
        raise ValueError(_NOTHING_OBSERVED)


def _without_value(run: Run, latents: Collection[str]) -> str:
    names = [name for name, site in run.observed.items() if site.value is None]
    name = next(name for name in (*names, *run.latents) if name not in latents)
    return (
        f"the guide has no value for the latent site '{name}': if it is observed, pass its targets "
        "to this step too"
    )


class FirstBatches:
    """The targets of a training's first two steps, compared to find batches that count as all data.

    :param steps: how many steps are compared; 0 for none.
    """

    def __init__(self, steps: int = 2) -> None:
        self._left = steps
        self._waiting = False
        self._numbers: dict[str, Tensor] = {}

    def start_step(self) -> None:
        """The next run is the first of a step."""
        self._waiting, self._left = self._left > 0, max(0, self._left - 1)

    def look(self, observed: Mapping[str, Site]) -> None:
        """Warn if the targets of a step's first run are not the numbers of the step before, in
        whatever order."""
        if not self._waiting:
            return
        self._waiting, before, self._numbers = False, self._numbers, {}
        for name, site in observed.items():
            is_whole = isinstance(site.scale, int | float) and site.scale == site.subsampling == 1
            is_in_vmap = torch._C._functorch.is_functorch_wrapped_tensor
            if not is_whole or not isinstance(site.value, Tensor) or is_in_vmap(site.value):
                continue
            numbers = site.value.detach().flatten().nan_to_num(torch.inf).sort().values
            self._numbers[name] = numbers
            if name in before and not torch.equal(before[name], numbers):
                warn(
                    f"the first batches hold different targets at site '{name}', and each counts "
                    "as all of the data (its scale is 1), so that the posterior is that of a "
                    "single batch: tell the program the number N of all data, by num_data=N or "
                    'pyro.plate("data", N, subsample=...); if each batch is all there is, ignore '
                    "this",
                    "number-of-data",
                )
                return
