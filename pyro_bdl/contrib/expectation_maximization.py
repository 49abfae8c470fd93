"""Expectation maximization of programs with discrete latents.

Where an argument of a site's distribution consists of entries of one parameter theta, as
``Normal(mu[z], sigma[z])`` does, the maximum of the expected log density in theta is a ratio of
weighted sums over the elements e that hold the entry i:

    theta_i = finish( sum_{e: i(e)=i} r_e T(y_e) / sum_{e: i(e)=i} r_e c(y_e) )

with r the posterior probabilities of the discrete sites (Dempster, Laird and Rubin 1977).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import transform_to
from torch.nn import functional
from tqdm import trange

from pyro_bdl.contrib.discrete import SummedOut
from pyro_bdl.curvature.hyperparameters import Hyperparameter, ReadParameters
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.init import init_to_network, start_at
from pyro_bdl.program.program import Program
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode, preserved_buffers
from pyro_bdl.utils.progress import hidden


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


# M-steps in closed form


class _Mean(NamedTuple):
    """One argument of a family: the statistic T, its size c, and the map from their ratio."""

    statistic: Callable[[Any, Tensor], Tensor]
    size: Callable[[Any, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] = torch.clone


class _WeightedSite(NamedTuple):
    """A site's distribution and value, and the weights of its assignments.

    :param weights: posterior probability times scale and mask, of the log density's shape.
    """

    distribution: Any
    value: Tensor
    weights: Tensor


class _Selection(NamedTuple):
    """An argument whose elements are entries of a parameter.

    :param entries: for each element of the argument the entry's flat index.
    """

    parameter: str
    entries: Tensor


def _value(distribution: Any, value: Tensor) -> Tensor:
    return value


def _ones(distribution: Any, value: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.get_default_dtype(), device=value.device)


def _one_hot(distribution: Any, value: Tensor) -> Tensor:
    return functional.one_hot(value.long(), distribution.param_shape[-1])


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
    ("Categorical", "probs"): _Mean(_one_hot, _ones),
    ("OneHotCategorical", "probs"): _PROBABILITY,
    ("Multinomial", "probs"): _Mean(_value, lambda d, y: y.sum(-1, keepdim=True)),
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


def _tables_of(distribution: Any) -> tuple[Any, dict[str, _Mean]]:
    """Return a distribution without wrappers, and its arguments that have a closed form."""
    base = base_distribution(distribution)
    family = type(base).__name__
    return base, {
        argument: mean
        for (name, argument), mean in (_LOCATIONS | _SPREADS).items()
        if name == family
    }


def _selections(
    sites: Mapping[str, tuple[Any, Any]], markers: tuple[Mapping[str, Tensor], ...]
) -> dict[tuple[str, str], _Selection]:
    """Find the arguments that consist of entries of one parameter.

    :param sites: for each site its distribution where the parameters have the first markers for
        values, and where they have the second ones.
    :param markers: parameter -> values, all of them different, twice.
    :returns: (site, argument) -> the parameter and the entries' indices.
    """
    found = {}
    for name, distributions in sites.items():
        bases = [_tables_of(each)[0] for each in distributions]
        for argument, mean in _tables_of(distributions[0])[1].items():
            values = [_shrunk(getattr(base, argument)) for base in bases]
            matrix = mean.statistic is _outer
            for parameter in markers[0]:
                entries = [marker[parameter].reshape(-1) for marker in markers]
                index = _index(values[0], entries[0], matrix)
                if all(
                    torch.allclose(value, marker[index], rtol=1e-5, atol=1e-7)
                    for value, marker in zip(values, entries, strict=True)
                ):
                    found[name, argument] = _Selection(parameter, index)
    return found


def _shrunk(argument: Tensor) -> Tensor:
    """The argument with one element for each dimension along which it repeats itself."""
    for dim in range(argument.dim()):
        if argument.stride(dim) == 0 and argument.shape[dim] > 1:
            argument = argument.narrow(dim, 0, 1)
    return argument


def _index(value: Tensor, marker: Tensor, matrix: bool) -> Tensor:
    """For each element of ``value`` the nearest marker; for matrices those of one block."""
    if matrix:
        size = value.shape[-1]
        first = _index(value[..., 0, 0], marker, False)
        block = torch.arange(size * size, device=value.device).view(size, size)
        return (first[..., None, None] + block).clamp(max=len(marker) - 1)
    ordered, order = marker.sort()
    above = torch.searchsorted(ordered, value.contiguous()).clamp(max=len(ordered) - 1)
    below = (above - 1).clamp(min=0)
    nearer = (value - ordered[below]).abs() < (ordered[above] - value).abs()
    return order[torch.where(nearer, below, above)]


def _maximizer(
    uses: list[tuple[_WeightedSite, str, _Selection]],
    table: Mapping[tuple[str, str], _Mean],
    like: Tensor,
) -> Tensor | None:
    """Return the value of a parameter that maximizes the expected log density.

    :param uses: the sites that hold it, in which argument, the same for all, and where.
    :param table: ``_LOCATIONS`` or ``_SPREADS``.
    :param like: its present value; entries that no weight falls on keep it.
    :returns: None if the argument is not in the table.
    """
    finish = None
    sums = [torch.zeros_like(like).reshape(-1) for _ in range(2)]
    for factor, argument, selection in uses:
        base = base_distribution(factor.distribution)
        event_dims = factor.distribution.event_dim - base.event_dim
        mean = table.get((type(base).__name__, argument))
        if mean is None:
            return None
        finish = mean.finish
        shape = getattr(base, argument).shape
        weights = factor.weights[
            (...,) + (None,) * (event_dims + len(shape) - len(base.batch_shape))
        ]
        for total, part in zip(sums, (mean.statistic, mean.size), strict=True):
            _add(total, weights * part(base, factor.value), shape, selection.entries)
    assert finish is not None
    ratio, tiny = sums[0] / sums[1], torch.finfo(like.dtype).tiny
    result = finish(ratio.reshape(like.shape))
    return torch.where((sums[1] > tiny).reshape(like.shape), result, like)


def _add(total: Tensor, values: Tensor, shape: torch.Size, index: Tensor) -> None:
    """Add each element of ``values`` to the entry of ``total`` that ``index`` gives it.

    :param shape: the argument's shape; ``values`` repeat along dimensions that they lack.
    """
    shape = torch.broadcast_shapes(values.shape, shape)
    index = index[(None,) * (len(shape) - index.dim())]
    values = values.expand(shape).sum_to_size(index.shape)
    total.index_add_(0, index.reshape(-1), values.reshape(-1).to(total))


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
            for parameter, read in parameters.items():
                if reaches(site.distribution.log_prob(site.value.detach()), [read.value]):
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

    def factors(self, run: Run) -> dict[str, _WeightedSite]:
        """All statements, each with the expected number of times that its density counts."""
        sites, result = _summed_out(run).sites, {}
        for name, site in (run.latents | run.observed | run.factors | sites).items():
            weights = self.weights.get(name)
            if weights is None:
                counts = torch.ones_like(site.distribution.log_prob(site.value))
                weights = scale_and_mask(counts, site.scale, site.mask).detach()
            result[name] = _WeightedSite(site.distribution, site.value, weights)
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
            self._take_closed_forms(_LOCATIONS)
            self._climb(steps)
            self._take_closed_forms(_SPREADS)
            value = self.expect()
            if value >= before - self.rounding * (1.0 + abs(before)):
                return value
            self.restore(state)
            self.expect()
            if not self.uses:
                return None
            self.uses = {}  # the closed forms do not hold in this program

    def _take_closed_forms(self, table: Mapping[tuple[str, str], _Mean]) -> None:
        """Put parameters to their maximum of Q, given the others."""
        arguments = {argument for _, argument in table}
        if not any(use[1] in arguments for uses in self.uses.values() for use in uses):
            return
        run, parameters = self.run()
        factors = self.factors(run)
        for name, uses in list(self.uses.items()):
            found = [(factors[site], argument, where) for site, argument, where in uses]
            with torch.no_grad():
                value = _maximizer(found, table, parameters[name].value.detach())
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
    ) -> dict[str, list[tuple[str, str, _Selection]]]:
        """For each parameter that only enters distributions as it is, where it does so."""
        generator = torch.Generator().manual_seed(0)
        markers = tuple(
            {name: _marker(p, generator) for name, p in parameters.items()} for _ in range(2)
        )
        with torch.no_grad():
            marked = [self.run(values)[0] for values in markers]
        first, second = map(self._statements, marked)
        pairs = {name: (first[name].distribution, second[name].distribution) for name in first}
        found = _selections(pairs, markers)
        result: dict[str, list[tuple[str, str, _Selection]]] = {}
        for (site, argument), selection in found.items():
            result.setdefault(selection.parameter, []).append((site, argument, selection))
        for name, parameter in parameters.items():
            moved = {
                site
                for site, statement in self._statements(run).items()
                if reaches(statement.distribution.log_prob(statement.value), [parameter.value])
            }
            held = [site for site, _, _ in result.get(name, [])]
            families = {
                (type(_tables_of(first[site].distribution)[0]), argument)
                for site, argument, _ in result.get(name, [])
            }
            if sorted(held) != sorted(moved) or len(families) != 1:
                result.pop(name, None)
        return result

    def _statements(self, run: Run) -> dict[str, Site]:
        return run.observed | _summed_out(run).sites

    # The end

    def values(self) -> dict[str, Tensor]:
        return {name: p.value.detach().clone() for name, p in self.run()[1].items()}

    def latents(self) -> dict[str, Tensor]:
        if not self.program.size:
            return {}
        return {name: w.detach() for name, w in self.program.constrain(self.vector)[0].items()}


def _summed_out(run: Run) -> SummedOut:
    assert run.discrete is not None
    return run.discrete


def _marker(parameter: Hyperparameter, generator: torch.Generator) -> Tensor:
    """A random value of a parameter."""
    leaf = parameter.leaf
    noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
    return transform_to(parameter.constraint)(noise.to(leaf.device))
