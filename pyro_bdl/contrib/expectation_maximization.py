"""Expectation maximization of programs with discrete latents.

Where an argument of a site's distribution consists of entries of one parameter theta, as
``Normal(mu[z], sigma[z])`` does, the maximum of the expected log density in theta is a ratio of
weighted sums over the elements e that hold the entry i:

    theta_i = finish( sum_{e: i(e)=i} r_e T(y_e) / sum_{e: i(e)=i} r_e c(y_e) )

with r the posterior probabilities of the discrete sites (Dempster, Laird and Rubin 1977). Both sums
are vector-Jacobian products: an element holds the entry i where its derivative in theta_i is 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import transform_to
from torch.nn import functional
from tqdm import trange

from pyro_bdl.curvature.hyperparameters import ReadParameters
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.discrete.summed_out import SummedOut
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.progress import is_silent
from pyro_bdl.utils.validation import real_number, whole_number


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
    rounds, steps = whole_number(rounds, "rounds"), whole_number(steps, "steps")
    tolerance = real_number(tolerance, "tolerance", "[0, inf)")
    run = _Maximization(model, args, kwargs, init_loc_fn)
    path, converged = [run.expect()], False
    bar = trange(rounds, desc="EM", disable=is_silent(progress), leave=False, delay=1)
    for _ in bar:
        value = run.round(path[-1], steps)
        if value is None:
            warn(
                f"round {len(path)} of expectation maximization lowered the log likelihood, which "
                "its equations exclude: the parameters were put back to those before; look for "
                "random numbers or changing state in the program",
                "random-programs",
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
        parameters={name: value.detach().clone() for name, value in run.values().items()},
        latents=run.latents(),
        converged=converged,
    )


# M-steps in closed form


class _Mean(NamedTuple):
    """One argument of a family: the statistic T, its size c, and the map from their ratio.

    :param is_simplex: whether the argument is divided by its sum, whose Jacobian is I - p 1': the
        sums of a row then lack one number, which is the same for all of its entries.
    """

    statistic: Callable[[Any, Tensor], Tensor]
    size: Callable[[Any, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] = torch.clone
    is_simplex: bool = False


class _WeightedSite(NamedTuple):
    """A site's distribution and value, and the weights of its assignments.

    :param weights: posterior probability times scale and mask, of the log density's shape.
    """

    distribution: Any
    value: Tensor
    weights: Tensor


def _value(distribution: Any, value: Tensor) -> Tensor:
    return value


def _ones(distribution: Any, value: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.get_default_dtype(), device=value.device)


def _one_hot(distribution: Any, value: Tensor) -> Tensor:
    return functional.one_hot(value.long(), distribution.param_shape[-1])


def _total(distribution: Any, value: Tensor) -> Tensor:
    return value.sum(-1, keepdim=True)


def _outer(distribution: Any, value: Tensor) -> Tensor:
    offset = value - distribution.loc
    return offset.unsqueeze(-1) * offset.unsqueeze(-2)


def _cholesky(matrix: Tensor) -> Tensor:
    return torch.linalg.cholesky_ex(matrix).L  # not finite for a component without data


def _inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv_ex(matrix).inverse


_PROBABILITY = _Mean(_value, _ones)
_LOCATIONS = {
    ("Normal", "loc"): _Mean(
        lambda d, y: y / d.scale.square(), lambda d, y: d.scale.square().reciprocal()
    ),
    ("LogNormal", "loc"): _Mean(
        lambda d, y: y.log() / d.scale.square(), lambda d, y: d.scale.square().reciprocal()
    ),
    ("MultivariateNormal", "loc"): _PROBABILITY,
    ("Bernoulli", "probs"): _PROBABILITY,
    ("Bernoulli", "logits"): _Mean(_value, _ones, torch.logit),
    ("Categorical", "probs"): _Mean(_one_hot, _ones, is_simplex=True),
    ("OneHotCategorical", "probs"): _Mean(_value, _ones, is_simplex=True),
    ("Multinomial", "probs"): _Mean(_value, _total, is_simplex=True),
    ("Binomial", "probs"): _Mean(_value, lambda d, y: d.total_count),
    ("Geometric", "probs"): _Mean(_ones, lambda d, y: 1.0 + y),
    ("Poisson", "rate"): _PROBABILITY,
    ("Exponential", "rate"): _Mean(_ones, _value),
    ("Gamma", "rate"): _Mean(lambda d, y: d.concentration, _value),
}
_SPREADS = {
    ("Normal", "scale"): _Mean(lambda d, y: (y - d.loc).square(), _ones, torch.sqrt),
    ("LogNormal", "scale"): _Mean(lambda d, y: (y.log() - d.loc).square(), _ones, torch.sqrt),
    ("MultivariateNormal", "covariance_matrix"): _Mean(_outer, _ones),
    ("MultivariateNormal", "scale_tril"): _Mean(_outer, _ones, _cholesky),
    ("MultivariateNormal", "precision_matrix"): _Mean(_outer, _ones, _inverse),
}


class _Use(NamedTuple):
    """A parameter as an argument of the distributions of sites.

    :param kind: their family, and the argument's name.
    """

    kind: tuple[str, str]
    mean: _Mean
    sites: tuple[str, ...]


def _ratio(
    mean: _Mean, arguments: list[Tensor], tops: list[Tensor], sizes: list[Tensor], theta: Tensor
) -> tuple[Tensor, Tensor]:
    """sum_e T_e / sum_e c_e over the elements e of arguments that hold an entry of theta, and the
    second sum; a ratio of zeros is no number.

    :param tops: T of the elements of each argument, of its shape; ``sizes`` are c.
    """
    if mean.is_simplex:  # the sum of c over a row is the difference of two of its entries
        sizes = [functional.pad(size[..., :1], (0, size.shape[-1] - 1)) for size in sizes]
    top, size = (
        torch.autograd.grad(arguments, theta, values, retain_graph=True) for values in (tops, sizes)
    )
    if not mean.is_simplex:
        return top[0] / size[0], size[0]
    total = size[0][..., :1] - size[0][..., 1:2]
    share = (top[0] - top[0].mean(-1, keepdim=True)) / total + 1.0 / theta.shape[-1]
    return share.clamp(min=0.0), total.expand(theta.shape)  # a count of 0 up to rounding


def _consists_of(mean: _Mean, argument: Any, theta: Tensor) -> bool:
    """Return whether each element of an argument may be an entry of theta: the mean over the
    elements that hold an entry is then the entry. Each step looks again whether Q has its maximum
    there."""
    if not reaches(argument, [theta]):
        return False
    if mean.is_simplex and not argument.shape[-1] == theta.shape[-1] > 1:
        return False
    ratio, _ = _ratio(mean, [argument], [argument.detach()], [torch.ones_like(argument)], theta)
    return torch.allclose(ratio, theta, rtol=1e-4, atol=1e-6)


def _uses(statements: Mapping[str, Site], theta: Tensor) -> _Use | None:
    """Find where a parameter is an argument; None if it enters several families, or otherwise.

    :param theta: the parameter, at a value without equal or round entries.
    """
    uses: dict[tuple[str, str], _Use] = {}
    for name, site in statements.items():
        base = base_distribution(site.distribution)
        for kind, mean in (_LOCATIONS | _SPREADS).items():
            family, argument = kind
            if family == type(base).__name__ and _consists_of(mean, getattr(base, argument), theta):
                before = uses[kind].sites if kind in uses else ()
                uses[kind] = _Use(kind, mean, (*before, name))
    return next(iter(uses.values())) if len(uses) == 1 else None


def _maximizer(use: _Use, sites: Mapping[str, _WeightedSite], theta: Tensor) -> Tensor:
    """The value of a parameter that maximizes the expected log density; entries that no weight
    falls on keep theirs."""
    arguments: list[Tensor] = []
    tops: list[Tensor] = []
    sizes: list[Tensor] = []
    for name in use.sites:
        distribution = sites[name].distribution
        base = base_distribution(distribution)
        argument, event_dims = getattr(base, use.kind[1]), distribution.event_dim - base.event_dim
        weights = sites[name].weights
        weights = weights[(...,) + (None,) * (event_dims + argument.dim() - len(base.batch_shape))]
        arguments.append(argument)
        for values, part in ((tops, use.mean.statistic), (sizes, use.mean.size)):
            with torch.no_grad():
                value = weights * part(base, sites[name].value)
                value = value.expand(torch.broadcast_shapes(value.shape, argument.shape))
                values.append(value.sum_to_size(argument.shape).to(argument))
    ratio, size = _ratio(use.mean, arguments, tops, sizes, theta)
    value = use.mean.finish(ratio)
    return torch.where(size > torch.finfo(size.dtype).tiny, value, theta.detach())


# The parameters and expectations of a program


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
        with ReadParameters() as read:
            self.run({})
        self.parameters = read.learned()
        if not self.parameters and not vector.numel():
            raise UnsupportedProgramError(
                "the program has no parameter to maximize over: give it some by pyro.param, "
                "PyroParam or pyro.module"
            )
        generator = torch.Generator("cpu").manual_seed(0)
        markers = {}
        for name, parameter in self.parameters.items():
            leaf = parameter.leaf
            noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
            marker = transform_to(parameter.constraint)(noise.to(leaf.device))
            markers[name] = marker.requires_grad_()
        run = self.run(markers)
        self._check(run, markers)
        statements = run.observed | _summed_out(run).sites
        uses = {name: _uses(statements, marker) for name, marker in markers.items()}
        self.uses = {name: use for name, use in uses.items() if use is not None}
        self.weights: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """The parameters, with their graphs."""
        return {name: parameter.now() for name, parameter in self.parameters.items()}

    @torch.enable_grad()
    def run(self, values: Mapping[str, Tensor]) -> Run:
        """Run the program at the present latents and at values of its parameters."""
        latents = self.program.constrain(self.vector)[0] if self.program.size else {}
        quiet = preserved_buffers(self.program.modules)
        with evaluation_mode(self.program.modules), quiet, ReadParameters(values):
            return self.program.run(latents)

    def _check(self, run: Run, values: Mapping[str, Tensor]) -> None:
        for name, site in (run.latents | run.observed).items():
            if site.subsampling != 1.0:
                raise UnsupportedProgramError(
                    f"the site '{name}' stands in a subsampled plate: expectation maximization "
                    "takes all of the data at once"
                )
        for name, site in run.latents.items():
            for parameter, value in values.items():
                if reaches(site.distribution.log_prob(site.value.detach()), [value]):
                    raise UnsupportedProgramError(
                        f"the parameter '{parameter}' is of the prior of the latent '{name}', "
                        "whose mode has no maximum in it: fix it, or take evidence.maximize or "
                        "evidence.variational_em"
                    )

    # E-step

    def expect(self) -> float:
        """Compute q(z) = p(z | y, theta); returns log p(y, w | theta)."""
        run = self.run(self.values())
        with torch.no_grad():
            self.weights = _summed_out(run).weights()
            return float(run.log_prior() + run.log_likelihood())

    def responsibilities(self) -> dict[str, Tensor]:
        discrete = _summed_out(self.run(self.values()))
        return {name: value.detach() for name, value in discrete.responsibilities().items()}

    def sites(self, values: Mapping[str, Tensor]) -> dict[str, _WeightedSite]:
        """All statements, each with the expected number of times that its density counts."""
        run, result = self.run(values), {}
        statements = run.priors | run.observed | run.factors | _summed_out(run).sites
        for name, site in statements.items():
            weights = self.weights.get(name)
            if weights is None:
                counts = torch.ones_like(site.distribution.log_prob(site.value))
                weights = scale_and_mask(counts, site.scale, site.mask).detach()
            result[name] = _WeightedSite(site.distribution, site.value, weights)
        return result

    def expected(self) -> Tensor:
        """Q(theta), a scalar with its graph."""
        total = self.vector.new_zeros(())
        for site in self.sites(self.values()).values():
            density = site.distribution.log_prob(site.value)
            # a weight of 0 times a density of 0 counts nothing
            total = total + torch.where(site.weights > 0, site.weights * density, 0.0).sum()
        return total

    # M-step

    def round(self, before: float, steps: int) -> float | None:
        """Take an M-step and the next E-step.

        :param before: the log likelihood before.
        :returns: the log likelihood; None if it fell, after the parameters were put back.
        """
        leaves = [self.vector, *(parameter.leaf for parameter in self.parameters.values())]
        state = [leaf.detach().clone() for leaf in leaves]
        self._take_closed_forms(_LOCATIONS)
        self._climb(steps)
        before_spreads = len(self.uses)
        self._take_closed_forms(_SPREADS)
        if len(self.uses) < before_spreads:  # a form did not hold, and its parameter has not moved
            self._climb(steps)
        value = self.expect()
        rounding = 100.0 * max(torch.finfo(leaf.dtype).eps for leaf in leaves if leaf.numel())
        if value >= before - rounding * (1.0 + abs(before)):
            return value
        with torch.no_grad():
            for leaf, saved in zip(leaves, state, strict=True):
                leaf.copy_(saved)
        return None

    def _take_closed_forms(self, table: Mapping[tuple[str, str], _Mean]) -> None:
        """Put parameters to their maximum of Q, given the others."""
        uses = {name: use for name, use in self.uses.items() if use.kind in table}
        if not uses:
            return
        values = self.values()
        sites = self.sites(values)
        for name, use in uses.items():
            parameter, value = self.parameters[name], _maximizer(use, sites, values[name])
            before, slope = parameter.leaf.detach().clone(), self._slope(name)
            parameter.set(value)
            rounding = torch.finfo(slope.dtype).eps ** 0.5 * (1.0 + self.expected().detach().abs())
            if self._slope(name) > 1e-3 * slope + rounding:
                # Q is not of the form that has this maximum, as it may be under some weights and
                # not under others: climb instead
                with torch.no_grad():
                    parameter.leaf.copy_(before)
                del self.uses[name]

    def _slope(self, name: str) -> Tensor:
        """The largest entry of dQ / d(unconstrained parameter), a scalar."""
        leaf = self.parameters[name].leaf
        return torch.autograd.grad(self.expected(), leaf)[0].abs().max()

    def _climb(self, steps: int) -> None:
        """Take steps of L-BFGS on Q in all that has no closed form."""
        free = [p.leaf for name, p in self.parameters.items() if name not in self.uses]
        free += [self.vector] if self.vector.requires_grad else []
        if not free:
            return
        optimizer = torch.optim.LBFGS(
            free, max_iter=steps, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            value = -self.expected()
            gradients = torch.autograd.grad(value, free, materialize_grads=True, allow_unused=True)
            for leaf, gradient in zip(free, gradients, strict=True):
                leaf.grad = gradient
            return value.detach()

        optimizer.step(loss)  # type: ignore[arg-type]
        for leaf in free:
            leaf.grad = None

    # The end

    def latents(self) -> dict[str, Tensor]:
        if not self.program.size:
            return {}
        return {name: w.detach() for name, w in self.program.constrain(self.vector)[0].items()}


def _summed_out(run: Run) -> SummedOut:
    assert run.discrete is not None
    return run.discrete
