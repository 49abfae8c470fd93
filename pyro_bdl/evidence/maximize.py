"""Hyperparameters that maximize the evidence of a Laplace approximation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_bdl.curvature.hyperparameters import (
    ParameterReading,
    followed,
    other_noise,
    owners_of_priors,
    restored_on_error,
)
from pyro_bdl.curvature.prior import hyperpriors
from pyro_bdl.distributions.parameters import base_distribution, is_known, parameters_of
from pyro_bdl.errors import warn
from pyro_bdl.evidence.formula import NoFixedPointError, formula_of, read_guide
from pyro_bdl.evidence.linearized import LinearizedModel, LinearizedPoint
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.gaussian import LaplaceGuide
from pyro_bdl.guides.mode import find_mode
from pyro_bdl.program.network_sites import OWNER_KEY
from pyro_bdl.program.normalized import NORMALIZATIONS, Exponents, normalized_groups
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import placeholder_for_observed, record
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.validation import one_of, real_number, whole_number

_SHOWN = 6  # groups in the warning
METHODS = ("fixed-point", "gradient")
_ROUNDING = 1e-4  # of the log evidence
_NEWTON_STEPS = 5  # to the linearized model's optimum, after each change of hyperparameters
_ROUNDS = 50  # of hyperparameters and a last layer's mode
_VANISHED = 1e-3  # of its value before


def warn_of_shared_scales(guide: Guide, subset: Subset, reading: ParameterReading) -> None:
    """Warn, once for a program, if a hyperparameter that the evidence sets scales the prior of
    normalized weights together with that of others.

    The size k of normalized weights does not change the outputs, and their best precision is
    proportional to 1 / k^2: a shared one, and the predictive, depend on an arbitrary k (Antoran et
    al. 2022, proposition 3 and recommendation 2). Where no scale is learned there is nothing to
    separate, and a prior of ``PerNormalizedGroup`` is the same prior: no warning.

    :param guide: a guide of the program.
    :param reading: of the program.
    """
    looked_at = f"shared scales of {', '.join(subset.parts)}"
    if "shared scales" in guide.warned_of or looked_at in guide.warned_of:
        return
    guide.warned_of.add(looked_at)
    owners = owners_of_priors(reading, subset)
    sets = {name: {s for s, owner in owners.items() if owner == name} for name in owners.values()}
    shared = {name: sites for name, sites in sets.items() if len(sites) > 1}
    sites = [site for site in subset.parts if any(site in known for known in shared.values())]
    groups = _normalized(guide, sites) if sites else {}
    found = {
        name: [group for group, own in groups.items() if known & set(own) and known - set(own)]
        for name, known in shared.items()
    }
    name = max(found, key=lambda name: len(found[name]), default="")
    if not found.get(name):
        return
    guide.warned_of.add("shared scales")
    names = ", ".join(repr(group) for group in found[name][:_SHOWN])
    more = ", ..." if len(found[name]) > _SHOWN else ""
    warn(
        f"the weights of {names}{more} are normalized, so that their size has no effect on the "
        f"outputs, but the prior scale '{name}' is shared with other weights: the evidence and the "
        "predictive depend on an arbitrary size; give every normalized layer a scale of its own, "
        "as in bayesianize(net, priors.PerNormalizedGroup(prior, net, x))",
        "normalized-layers",
    )


def _normalized(guide: Guide, sites: list[str]) -> dict[str, tuple[str, ...]]:
    """Normalized groups among the layers of some sites, which the operators of one run prove: a
    few rows have them all."""
    layers: dict[str, list[str]] = {}
    trace: Any = guide.prototype_trace
    for site in sites:  # of ``bayesianize``, with the module that a weight is of
        known = {} if trace is None else trace.nodes[site]["infer"]
        if not isinstance(known.get(OWNER_KEY, (None,))[0], NORMALIZATIONS):
            layers.setdefault(site.rpartition(".")[0], []).append(site)
    latents = guide.require_layout().constrain(guide.location().detach())[0]
    weights = {
        name: latents[name].detach().requires_grad_() for own in layers.values() for name in own
    }
    args, kwargs = guide.example_rows
    with (
        torch.enable_grad(),
        evaluation_mode(guide.program_modules),
        Exponents(weights) as exponents,
    ):
        run = record(
            guide.program_model, latents | weights, args, kwargs, draw=placeholder_for_observed
        )
    bases = [base_distribution(site.distribution) for site in run.observed.values()]
    outputs = [value for base in bases for value in parameters_of(base).values()]
    return normalized_groups(exponents, outputs, layers)


@dataclass
class Evidence:
    """The maximum of the evidence; print it.

    :param log_evidence: log p(y), in nats, at the optimum of the linearized model unless
        ``linearized=False``; that of ``log_marginal_likelihood`` is at the weights by default.
    :param gamma: the effective number of parameters.
    :param hyperparameters: name -> value.
    :param history: log p(y) before every step.
    :param gap: how far the log joint density of the linearized model is from its maximum, about,
        in nats; None where the evidence is evaluated at the trained weights.
    """

    log_evidence: float
    gamma: float
    hyperparameters: dict[str, Tensor]
    history: list[float] = field(default_factory=list)
    gap: float | None = None

    def __repr__(self) -> str:
        rows = {"log evidence": f"{self.log_evidence:.6g}", "gamma": f"{self.gamma:.4g}"}
        for name, value in self.hyperparameters.items():
            low, high = float(value.min()), float(value.max())
            rows[name] = f"{low:.4g}" if value.numel() == 1 else f"{low:.3g} to {high:.3g}"
        width, numbers = max(map(len, rows)), max(map(len, rows.values()))
        return "\n".join(f"{name:{width}}  {text:>{numbers}}" for name, text in rows.items())


def maximize(
    guide: LaplaceGuide,
    *,
    method: str = "fixed-point",
    steps: int = 100,
    learning_rate: float = 0.1,
    tolerance: float = 1e-4,
    linearized: bool | None = None,
    progress: bool | None = None,
) -> Evidence:
    """Set the program's hyperparameters to the maximum of the evidence, with the MAP fixed.

    "fixed-point" iterates, for every positive ``PyroParam`` theta that scales Normal priors, s_i =
    c_i theta, and for one that scales the noise of a Normal observation:

        theta^2 = sum_i (w_i / c_i)^2 / gamma,  gamma = sum_i (1 - C_ii / s_i^2)
        noise^2 = sum of squared residuals / (N - gamma of all latents)

    (MacKay 1992, section 3; alpha = gamma / w'w, beta = (N - gamma) / residuals). "gradient"
    ascends the log evidence by Adam in all parameters of the priors and of a Normal's noise. The
    ascent also takes over where a hyperparameter is no such scale, and, with a warning, where the
    fixed point does not exist (gamma not below N, possible if the curvature is not the full matrix
    of all latents) or loses evidence. Hyperparameters with a prior of their own
    (``priors.Hyperprior``, or a ``pyro.factor`` that depends on parameters alone) add its log
    density (type-II MAP) and take the ascent.

    The weights w and the residuals are taken at the optimum of the linearized model under the
    present hyperparameters, not at the trained weights, whose training may have stopped early
    (Antoran et al. 2022, recommendation 1): in linear regression this is the maximum of the exact
    evidence. The parameters change in place, and the guide follows; retrain the MAP afterwards, or
    use ``train_by_evidence``. For a last layer whose mode is found by steps (``AutoLastLayer`` with
    classes or counts) the evidence is at its mode, which moves along.

    Example::

        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> y = 2 * x[:, 0] + 0.3 * torch.tensor([1.0, -1.0]).repeat(10)
        >>> noise = pyro.nn.PyroParam(torch.tensor(1.0), dist.constraints.positive)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=noise)
        >>> guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> evidence = bdl.evidence.maximize(guide.laplace_approximation((x, y)))
        >>> round(model.noise.item(), 2)
        0.32

    :param guide: a guide of ``laplace_approximation``.
    :param method: "fixed-point" or "gradient".
    :param steps: the largest number of steps.
    :param learning_rate: learning rate of gradient ascent, in unconstrained units.
    :param tolerance: the fixed point stops when no parameter changes by more than this fraction.
    :param linearized: False evaluates at the trained weights; so does the default where the
        program's observations cannot be linearized.
    :param progress: show a bar over the steps; by default in terminals and notebooks.
    :raises ValueError: for an unknown method, or a program without hyperparameters.
    :raises NotImplementedError: with ``linearized=True``, for observations that are not made of
        tensors.
    """
    one_of(method, "method", METHODS)
    steps, learning_rate = whole_number(steps, "steps"), real_number(learning_rate, "learning_rate")
    tolerance = real_number(tolerance, "tolerance", "[0, inf)")
    reading = read_guide(guide)
    if not followed(reading):
        if reading.in_likelihood:
            raise ValueError(
                f"the evidence cannot tune '{reading.in_likelihood[0]}', which the likelihood "
                "depends on otherwise than by one number of noise: give all targets one noise "
                "parameter, or train it by SVI"
            )
        raise ValueError(
            "the priors and the noise have no PyroParam to tune: make a prior's scale one, as in "
            "priors.Normal(PyroParam(torch.tensor(1.0), constraint=constraints.positive)), or, "
            "with a prior of its own, priors.Normal(priors.Hyperprior(LogNormal(0.0, 1.0)))"
        )
    warn_of_shared_scales(guide, guide.subset, reading)
    left = [name for name in other_noise(reading) if name not in guide.warned_of]
    if left:
        guide.warned_of.update(left)
        warn(
            f"the evidence leaves {', '.join(left)} as trained, since the noise of the data "
            "depends on it otherwise than by one number: give all targets one noise parameter to "
            "have it set too",
            "evidence",
        )
    if hyperpriors(reading.run, reading.leaves):
        method = "gradient"  # the fixed point knows no hyperpriors
    if guide.mode is not None:
        linearized = False  # the guide is at the optimum, and goes along with it
    elif linearized is None:
        linearized = all(is_known(site.distribution) for site in reading.run.observed.values())
    with torch.enable_grad(), restored_on_error(reading.parameters, guide.refresh):
        for _ in range(_ROUNDS):
            search = _Search(guide, reading, linearized, progress)
            before = search.hyperparameters()
            result = search.run(method, steps, learning_rate, tolerance)
            if guide.mode != "steps":
                break
            find_mode(guide)
            reading = read_guide(guide)
            if _are_close(result.hyperparameters, before, tolerance):
                break
    return result


def _are_close(after: dict[str, Tensor], before: dict[str, Tensor], tolerance: float) -> bool:
    """Return whether no value has changed by more than a fraction."""
    return all(float((v / before[k]).log().abs().max()) < tolerance for k, v in after.items())


class _Search:
    """The evidence of a guide at the present hyperparameters, which the guide follows."""

    def __init__(
        self,
        guide: LaplaceGuide,
        reading: ParameterReading,
        linearized: bool,
        progress: bool | None,
    ) -> None:
        self.guide, self.progress = guide, progress
        self.formula, self.tuned = formula_of(guide, reading), followed(reading)
        if linearized:
            guide.refresh(reading)
        self.model = LinearizedModel(guide) if linearized else None

    def run(self, method: str, steps: int, learning_rate: float, tolerance: float) -> Evidence:
        before = self.hyperparameters()
        history: list[float] = []
        left = steps
        if method == "fixed-point" and self.tuned.keys() <= self.formula.covered:
            self.formula.follow()
            history, left = self._fixed_point(steps, tolerance)
        if left:
            history += self._ascend(left, learning_rate)
        self.formula.follow()
        point = self._point(last=True)
        value, gamma = self.formula.value(point).item(), float(self.guide.effective_parameters())
        if point is not None:
            point.warn()
            self._warn_of_vanished(before)
        gap = None if point is None else point.gap
        return Evidence(value, gamma, self.hyperparameters(), history, gap)

    def _warn_of_vanished(self, before: dict[str, Tensor]) -> None:
        now = self.hyperparameters().items()
        if names := [name for name, v in now if bool((v < _VANISHED * before[name]).any())]:
            warn(
                f"the evidence takes {', '.join(names)} towards 0, since the linearized model can "
                "do without what they scale, as layers before the last: linearized=False evaluates "
                "at the trained weights, and one scale for all layers has no such limit",
                "evidence",
            )

    def hyperparameters(self) -> dict[str, Tensor]:
        return {name: p.now().detach().clone() for name, p in self.tuned.items()}

    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.tuned[name].set(value)
        self.formula.follow()

    def _point(self, *, last: bool = False) -> LinearizedPoint | None:
        """The optimum of the linearized model; after a few steps, since the hyperparameters move
        on, or the last one."""
        if self.model is None:
            return None
        return self.model.optimum() if last else self.model.optimum(steps=_NEWTON_STEPS)

    def _counted(self, steps: int) -> Iterable[int]:
        return progress_bar(range(steps), "evidence, at most", self.progress)

    def _fixed_point(self, steps: int, tolerance: float) -> tuple[list[float], int]:
        """The history, and how many steps are left to gradient ascent where it fails."""
        start, history = self.hyperparameters(), []
        for step in self._counted(steps):
            now, parts = self.hyperparameters(), self.formula.parts(self._point())
            history.append(parts.value.item())
            try:
                values = self.formula.fixed_point(parts)
            except NoFixedPointError as error:
                warn(str(error), "evidence")
                return history, steps - step
            self._put(values)
            if _are_close(values, now, tolerance):
                break
        reached = self.formula.value(self._point()).item()
        if reached >= history[0] - _ROUNDING * max(1.0, abs(history[0])):
            return history, 0
        warn(
            f"the fixed point has taken the log evidence from {history[0]:.6g} to {reached:.6g}: "
            "gradient ascent continues from where it started",
            "evidence",
        )
        self._put(start)
        return history, steps

    def _ascend(self, steps: int, learning_rate: float) -> list[float]:
        """Take steps of Adam, and then the best of them."""
        leaves = [parameter.leaf for parameter in self.tuned.values()]
        gradients, history = [leaf.grad for leaf in leaves], []
        top, best = -math.inf, [leaf.detach().clone() for leaf in leaves]
        optimizer = torch.optim.Adam(leaves, lr=learning_rate)
        try:
            for _ in self._counted(steps):
                point = self._point()
                with torch.enable_grad():
                    value = self.formula.value(point)
                found: Any = torch.autograd.grad(-value, leaves, allow_unused=True)
                history.append(value.item())
                if not math.isfinite(history[-1]):
                    warn(
                        f"the log evidence is {history[-1]} after {len(history) - 1} steps of "
                        "gradient ascent, which ends there: the best hyperparameters before it are "
                        "taken; lower learning_rate",
                        "evidence",
                    )
                    break
                if history[-1] > top:
                    top, best = history[-1], [leaf.detach().clone() for leaf in leaves]
                for leaf, gradient in zip(leaves, found, strict=True):
                    leaf.grad = gradient
                optimizer.step()
                if point is not None:
                    self.formula.follow()
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
        with torch.no_grad():
            for leaf, value in zip(leaves, best, strict=True):
                leaf.copy_(value)
        return history
