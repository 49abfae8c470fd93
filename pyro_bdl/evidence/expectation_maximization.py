"""Expectation maximization of programs with discrete latents."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import transform_to
from tqdm import trange

from pyro_bdl.curvature.hyperparameters import Hyperparameter, ReadParameters
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.evidence.closed_form_m_steps import (
    LOCATIONS,
    SPREADS,
    Mean,
    Selection,
    WeightedSite,
    maximizer,
    selections,
    tables_of,
)
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.progress import hidden

if TYPE_CHECKING:
    from pyro_bdl.contrib.discrete import SummedOut


@dataclass
class ExpectationMaximization:
    """The course and the end of expectation maximization.

    :param log_likelihood: (rounds + 1,), log p(y | theta) before the first round and after each;
        log p(y, w | theta) if the program has continuous latents w.
    :param responsibilities: discrete site -> p(z = k | y, theta); the last dimension is k, the
        position of z's value in its support.
    :param parameters: parameter -> its value at the end.
    :param latents: continuous latents at their mode, in their supports.
    :param converged: whether the gain of a round fell below the tolerance.
    """

    log_likelihood: Tensor
    responsibilities: dict[str, Tensor]
    parameters: dict[str, Tensor]
    latents: dict[str, Tensor]
    converged: bool


def em(
    model: Callable,
    *args: Any,
    rounds: int = 200,
    tolerance: float = 1e-7,
    steps: int = 20,
    init_loc_fn: Callable = init_to_network,
    progress: bool | None = None,
    **kwargs: Any,
) -> ExpectationMaximization:
    """Maximize log p(y | theta) of a program whose discrete sites z are summed out.

    Each round computes q(z) = p(z | y, theta), exactly, and then raises

        Q(theta) = E_q[log p(y, z | theta)],

    so that log p(y | theta) never falls (Dempster, Laird and Rubin 1977). theta are all parameters
    that the program reads (``pyro.param``, ``PyroParam``, modules of ``pyro.module``) and its
    continuous latents, which go to the mode of log p(y, w | theta), w in their supports.
    A parameter whose entries are arguments of a Normal, multivariate Normal, LogNormal, Bernoulli,
    Categorical, Multinomial, Binomial, Geometric, Poisson, Exponential or Gamma (its rate) has its
    maximum in closed form, as ``mu`` and ``weights`` have in

        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y)

    Other parameters, such as a network's, take L-BFGS steps with a line search.

    :param model: the program; its parameters change in place.
    :param args: its arguments, all of the data.
    :param rounds: at most so many.
    :param tolerance: stop where a round's gain is below tolerance x (1 + |log likelihood|).
    :param steps: L-BFGS iterations in a round.
    :param init_loc_fn: where continuous latents start.
    :param progress: show a bar over the rounds; by default in terminals and notebooks.
    :raises UnsupportedProgramError: for a program without discrete latents or without parameters,
        with subsampled data, or with learned priors of continuous latents.
    """
    run = _Maximization(model, args, kwargs, init_loc_fn)
    path, converged = [run.expect()], False
    bar = trange(rounds, desc="EM", disable=hidden(progress), leave=False, delay=1)
    for _ in bar:
        value = run.round(path[-1], steps)
        if value is None:
            warnings.warn(
                f"round {len(path)} of expectation maximization lowered the log likelihood, which "
                "its equations exclude: the parameters were put back to those before; look for "
                "random numbers or changing state in the program",
                BdlWarning,
                stacklevel=2,
            )
            break
        gain = value - path[-1]
        path.append(value)
        bar.set_postfix_str(f"log likelihood {value:.6g}")
        if gain < tolerance * (1.0 + abs(value)):
            converged = True
            break
    return ExpectationMaximization(
        log_likelihood=torch.tensor(path, dtype=torch.float64, device="cpu"),
        responsibilities=run.responsibilities(),
        parameters=run.values(),
        latents=run.latents(),
        converged=converged,
    )


class _Maximization:
    """The parameters of a program, and the expectations of the last E-step."""

    def __init__(self, model: Callable, args: tuple, kwargs: dict, init_loc_fn: Callable) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.program = Program(model, *args, **kwargs)
        if not self.program.discrete:
            raise UnsupportedProgramError(
                "the program has no discrete latent site to sum out: for continuous latents take "
                "evidence.variational_em or a guide"
            )
        start = Program(start_at(init_loc_fn)(model), *args, **kwargs)
        vector = torch.zeros(0, device="cpu")
        if start.size:
            vector = start.unconstrain(start.initial).detach().clone()
        self.vector = vector.requires_grad_(vector.numel() > 0)
        run, found = self.run()
        self.leaves = {name: parameter.leaf for name, parameter in found.items()}
        if not found and not vector.numel():
            raise UnsupportedProgramError(
                "the program has no parameter to maximize over: give it some by pyro.param, "
                "PyroParam or pyro.module"
            )
        self._check(run, found)
        self.uses = self._closed_forms(run, found)
        self.weights: dict[str, Tensor] = {}
        self.verified: set[str] = set()

    @torch.enable_grad()
    def run(
        self, values: Mapping[str, Tensor] | None = None
    ) -> tuple[Run, dict[str, Hyperparameter]]:
        """Run the program at the present latents; returns the run and the parameters it read.

        :param values: others of some parameters, by name.
        """
        latents = self.program.constrain(self.vector)[0] if self.program.size else {}
        quiet = preserved_buffers(self.model, self.args, self.kwargs)
        with evaluation_mode(self.model), quiet, ReadParameters(values) as read:
            return self.program.run(latents), read.learned()

    def _check(self, run: Run, parameters: Mapping[str, Hyperparameter]) -> None:
        for name, site in (run.latents | run.observed).items():
            if site.subsampling != 1.0:
                raise UnsupportedProgramError(
                    f"the site '{name}' stands in a subsampled plate: expectation maximization "
                    "takes all of the data at once"
                )
        for name, site in run.latents.items():
            for parameter, each in parameters.items():
                if reaches(site.distribution.log_prob(site.value.detach()), [each.value]):
                    raise UnsupportedProgramError(
                        f"the parameter '{parameter}' is of the prior of the latent '{name}', "
                        "whose mode has no maximum in it: fix it, or take evidence.maximize or "
                        "evidence.variational_em"
                    )

    def state(self) -> list[Tensor]:
        """Copies of all that the M-step changes."""
        return [leaf.detach().clone() for leaf in (self.vector, *self.leaves.values())]

    @torch.no_grad()
    def restore(self, state: list[Tensor]) -> None:
        for leaf, value in zip((self.vector, *self.leaves.values()), state, strict=True):
            leaf.copy_(value)

    @property
    def rounding(self) -> float:
        """How far, relatively, a log likelihood may fall by rounding."""
        dtypes = {leaf.dtype for leaf in (self.vector, *self.leaves.values()) if leaf.numel()}
        return 100.0 * max(torch.finfo(dtype).eps for dtype in dtypes)

    # E-step

    def expect(self) -> float:
        """Compute q(z) = p(z | y, theta); returns log p(y, w | theta)."""
        run, _ = self.run()
        with torch.no_grad():
            self.weights = _summed_out(run).weights()
            return float(run.log_prior() + run.log_likelihood())

    def responsibilities(self) -> dict[str, Tensor]:
        run, _ = self.run()
        return {name: value.detach() for name, value in _summed_out(run).responsibilities().items()}

    def factors(self, run: Run) -> dict[str, WeightedSite]:
        """All statements, each with the expected number of times that its density counts."""
        sites, result = _summed_out(run).sites, {}
        for name, site in (run.latents | run.observed | run.factors | sites).items():
            weights = self.weights.get(name)
            if weights is None:
                counts = torch.ones_like(site.distribution.log_prob(site.value))
                weights = scale_and_mask(counts, site.scale, site.mask).detach()
            result[name] = WeightedSite(site.distribution, site.value, weights)
        return result

    def expected(self) -> Tensor:
        """Q(theta), a scalar with its graph."""
        total = self.vector.new_zeros(())
        for factor in self.factors(self.run()[0]).values():
            density = factor.distribution.log_prob(factor.value)
            # a weight of 0 times a density of 0 counts nothing
            total = total + torch.where(factor.weights > 0, factor.weights * density, 0.0).sum()
        return total

    # M-step

    def round(self, before: float, steps: int) -> float | None:
        """Take an M-step and the next E-step.

        :param before: the log likelihood before.
        :returns: the log likelihood; None if it fell, after the parameters were put back.
        """
        state = self.state()
        while True:
            self._take_closed_forms(LOCATIONS)
            self._climb(steps)
            self._take_closed_forms(SPREADS)
            value = self.expect()
            if value >= before - self.rounding * (1.0 + abs(before)):
                return value
            self.restore(state)
            self.expect()
            if not self.uses:
                return None
            self.uses = {}  # the closed forms do not hold in this program

    def _take_closed_forms(self, table: Mapping[tuple[str, str], Mean]) -> None:
        """Put parameters to their maximum of Q, given the others."""
        arguments = {argument for _, argument in table}
        if not any(use[1] in arguments for uses in self.uses.values() for use in uses):
            return
        run, parameters = self.run()
        factors = self.factors(run)
        for name, uses in list(self.uses.items()):
            found = [(factors[site], argument, where) for site, argument, where in uses]
            with torch.no_grad():
                value = maximizer(found, table, parameters[name].value.detach())
            if value is None:
                continue
            slope = None if name in self.verified else self._slope(name)
            parameters[name].set(value)
            if slope is not None and not self._is_maximum(name, slope):
                del self.uses[name]  # Q is not of the form that has this maximum: climb instead
            self.verified.add(name)

    def _slope(self, name: str) -> Tensor:
        """The largest entry of dQ / d(unconstrained parameter), a scalar."""
        return torch.autograd.grad(self.expected(), self.leaves[name])[0].abs().max()

    def _is_maximum(self, name: str, before: Tensor) -> bool:
        """Return whether the slope of Q has vanished, up to rounding.

        :param before: the slope before the parameter was set.
        """
        rounding = torch.finfo(before.dtype).eps ** 0.5 * (1.0 + self.expected().detach().abs())
        return bool(self._slope(name) <= 1e-3 * before + rounding)

    def _climb(self, steps: int) -> None:
        """Take steps of L-BFGS on Q in all that has no closed form."""
        free = [leaf for name, leaf in self.leaves.items() if name not in self.uses]
        free += [self.vector] if self.vector.requires_grad else []
        if not free:
            return
        optimizer = torch.optim.LBFGS(
            free, max_iter=steps, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            value = -self.expected()
            gradients = torch.autograd.grad(value, free, allow_unused=True)
            for leaf, gradient in zip(free, gradients, strict=True):
                leaf.grad = torch.zeros_like(leaf) if gradient is None else gradient
            return value.detach()

        optimizer.step(loss)  # type: ignore[arg-type]
        for leaf in free:
            leaf.grad = None

    def _closed_forms(
        self, run: Run, parameters: Mapping[str, Hyperparameter]
    ) -> dict[str, list[tuple[str, str, Selection]]]:
        """For each parameter that only enters distributions as it is, where it does so."""
        generator = torch.Generator().manual_seed(0)
        markers = tuple(
            {name: _marker(each, generator) for name, each in parameters.items()} for _ in range(2)
        )
        with torch.no_grad():
            marked = [self.run(values)[0] for values in markers]
        first, second = (self._statements(each) for each in marked)
        pairs = {name: (first[name].distribution, second[name].distribution) for name in first}
        found = selections(pairs, markers)
        result: dict[str, list[tuple[str, str, Selection]]] = {}
        for (site, argument), selection in found.items():
            result.setdefault(selection.parameter, []).append((site, argument, selection))
        for name, each in parameters.items():
            moved = {
                site
                for site, statement in self._statements(run).items()
                if reaches(statement.distribution.log_prob(statement.value), [each.value])
            }
            held = [site for site, _, _ in result.get(name, [])]
            families = {
                (type(tables_of(first[site].distribution)[0]), argument)
                for site, argument, _ in result.get(name, [])
            }
            if sorted(held) != sorted(moved) or len(families) != 1:
                result.pop(name, None)
        return result

    def _statements(self, run: Run) -> dict[str, Site]:
        return run.observed | _summed_out(run).sites

    # The end

    def values(self) -> dict[str, Tensor]:
        return {name: each.value.detach().clone() for name, each in self.run()[1].items()}

    def latents(self) -> dict[str, Tensor]:
        if not self.program.size:
            return {}
        return {name: w.detach() for name, w in self.program.constrain(self.vector)[0].items()}


def _summed_out(run: Run) -> "SummedOut":
    assert run.discrete is not None
    return run.discrete


def _marker(parameter: Hyperparameter, generator: torch.Generator) -> Tensor:
    """A random value of a parameter."""
    leaf = parameter.leaf
    noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
    return transform_to(parameter.constraint)(noise.to(leaf.device))
