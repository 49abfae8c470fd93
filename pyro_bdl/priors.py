"""Weight priors: callables ``(name, module, parameter) -> Distribution or None``.

``name`` is the parameter's name in the network, ``module`` the torch module that holds it,
``parameter`` its current value, which determines the distribution's shape, dtype and device. None
leaves the parameter learnable. A scale is a number, a ``PyroParam`` (learned by maximizing the
objective) or a distribution (a hyperprior: the scale becomes a latent site ``<label>.scale``).
The networks of a plate (``bayesianize(net, prior, plate=...)``) share these hyperparameters.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Self

import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.distributions import matrix_normal
from pyro_bdl.distributions.dropout_noise import ImproperLogUniform
from pyro_bdl.program.normalized import NORMALIZATIONS, Exponents, normalized_groups
from pyro_bdl.program.trace import prior_factor as factor
from pyro_bdl.scales import Hyperprior, Scale, checked, hyperparameter, present_scope
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tree_leaves
from pyro_bdl.utils.validation import real_number

__all__ = [
    "ARD",
    "ByName",
    "FanIn",
    "GPrior",
    "Horseshoe",
    "Hyperprior",
    "Laplace",
    "LogUniform",
    "MatrixNormal",
    "Moped",
    "Normal",
    "PerLayer",
    "PerNormalizedGroup",
    "Pooled",
    "Pretrained",
    "StudentT",
    "factor",
    "learnable",
]

PriorFunction = Callable[[str, nn.Module, Tensor], Distribution | None]


def check_prior(prior: Any, argument: str) -> None:
    """Check that a prior is a function that returns distributions.

    :raises TypeError: if it is not, for example if it is a distribution.
    """
    if callable(prior) and not isinstance(prior, Distribution):
        try:
            signature = inspect.signature(prior)
        except ValueError:  # of a function written in C
            return
        try:
            signature.bind("weight", None, None)
        except TypeError as error:
            raise TypeError(
                f"{argument} is called with (name, module, parameter), but takes "
                f"{signature}: {error}"
            ) from None
        return
    kind = "the distribution " if isinstance(prior, Distribution) else ""
    raise TypeError(
        f"{argument} must be one of pyro_bdl.priors, such as Normal(1.0), or a function (name, "
        f"module, parameter) -> Distribution or None, got {kind}{type(prior).__name__}"
    )


class Prior:
    """Base class of the priors below.

    ``label`` is the prefix of its hyperparameters' sites. A class that defines ``__call__`` may
    declare ``constant = True`` beside it: the distribution depends only on the prior's attributes
    and on the parameter's name, shape, dtype and device, so that it is made once and not in each
    run. Without that declaration it is not.
    """

    label: str = "prior"
    constant: Any = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__call__" in vars(cls) and "constant" not in vars(cls):
            cls.constant = False  # not that of a class whose ``__call__`` it replaces

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution | None:
        raise NotImplementedError

    def labeled(self, label: str) -> "Prior":
        """A copy with separate hyperparameters, named ``<label>.…``."""
        result = copy.copy(self)
        result.label = label
        return result

    def _value(self, argument: str, like: Tensor) -> Tensor:
        return hyperparameter(getattr(self, argument), f"{self.label}.{argument}", like)


def _of_numbers(prior: Prior) -> bool:
    """Return whether a prior has no hyperparameter."""
    changing = PyroParam | Distribution | Hyperprior
    return all(not isinstance(value, changing) for value in vars(prior).values())


def _spread(base: Any, parameter: Tensor) -> Distribution:
    return base.expand(parameter.shape).to_event(parameter.dim())


def _normal(parameter: Tensor, scale: Any, loc: Tensor | None = None) -> Distribution:
    """Independent Normals over a parameter, around zero by default."""
    loc = parameter.new_zeros(()) if loc is None else loc
    return _spread(dist.Normal(loc, scale), parameter)


class Normal(Prior):
    """w ~ Normal(0, scale^2), independently for every weight.

    Example::

        >>> layer = torch.nn.Linear(3, 1)
        >>> prior = bdl.priors.Normal(2.0)
        >>> prior("weight", layer, layer.weight).stddev
        tensor([[2., 2., 2.]])
        >>> bnn = bdl.bayesianize(layer, prior)
    """

    constant = property(_of_numbers)

    def __init__(self, scale: Scale = 1.0) -> None:
        self.scale = checked(scale, "scale")

    @classmethod
    def from_weight_decay(cls, decay: float, num_data: int) -> "Normal":
        """The prior under which a network trained with weight decay is the MAP::

            mean loss + decay / 2 |w|^2  =  -(log p(y | w) + log p(w)) / N,  precision = N decay

        That is the decay of torch's ``SGD`` and ``Adam`` beside a loss averaged over data. The
        decay of ``AdamW`` belongs to no loss; the same prior is near it.

        :param decay: the optimizer's ``weight_decay``, positive.
        :param num_data: N.
        :raises ValueError: for a decay or number that is not positive.
        """
        precision = decay * num_data
        if not precision > 0:
            raise ValueError(
                f"decay and num_data must be positive, got {decay} and {num_data}: for a network "
                "that was trained without weight decay take a small one, such as 1e-4"
            )
        return cls(precision**-0.5)

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        return _normal(parameter, self._value("scale", parameter))


class FanIn(Prior):
    """w ~ Normal(0, gain^2 / fan_in) for weight matrices and kernels, Normal(0, gain^2) for
    biases and other vectors (Neal 1996, section 2.1: the output's variance does not depend on
    the width).

    Example::

        >>> layer = torch.nn.Linear(100, 1)
        >>> prior = bdl.priors.FanIn(2.0)
        >>> prior("weight", layer, layer.weight).stddev.mean()
        tensor(0.2000)
        >>> bnn = bdl.bayesianize(layer, prior)
    """

    constant = property(_of_numbers)

    def __init__(self, gain: Scale = 1.0) -> None:
        self.gain = checked(gain, "gain")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        scale = self._value("gain", parameter)
        if parameter.dim() >= 2 and not isinstance(module, nn.Embedding):
            scale = scale / math.sqrt(parameter[0].numel())
        return _normal(parameter, scale)


class MatrixNormal(Prior):
    """W ~ MN(0, scale^2 U, V) for weight matrices and kernels, Normal(0, scale^2) for biases and
    other vectors: weights that depend on each other.

    U is the covariance of the rows (outputs), V that of the columns (inputs; a kernel's columns are
    its input channels and pixels). Without U every row is an independent multivariate Normal with
    covariance V. Correlated weights of neighboring pixels fit trained networks better than
    independent ones (Fortuin et al. 2021).

    :param columns: V, (q, q), or None for the identity. It must fit the weight.
    :param rows: U, (p, p), or None for the identity.
    :param scale: of all weights.
    :raises ValueError: for a covariance that is not square or not positive definite; with a
        network, for one that does not fit the weight: choose by ``ByName``.
    """

    constant = property(_of_numbers)

    def __init__(
        self, columns: Tensor | None = None, rows: Tensor | None = None, scale: float = 1.0
    ) -> None:
        self.scale = float(checked(scale, "scale"))  # type: ignore[arg-type]
        self.factors = _factor(rows, "rows"), _factor(columns, "columns")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        if parameter.dim() < 2:
            return _normal(parameter, parameter.new_full((), self.scale))
        sides = []
        sizes = len(parameter), parameter[0].numel()
        for kind, root, size in zip(("rows", "columns"), self.factors, sizes, strict=True):
            if root is not None and len(root) != size:
                raise ValueError(
                    f"the prior's covariance of the {kind} has {len(root)} {kind}, but the "
                    f"weight '{name}' has {size}: choose another prior for it by ByName"
                )
            sides.append(parameter.new_ones(size) if root is None else root.to(parameter))
        zero = torch.zeros_like(parameter.detach())
        return matrix_normal.MatrixNormal(zero, self.scale * sides[0], sides[1])


def _factor(covariance: Tensor | None, argument: str) -> Tensor | None:
    """The Cholesky factor of a covariance."""
    if covariance is None:
        return None
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"{argument} must be a square matrix, got {tuple(covariance.shape)}")
    root, failed = torch.linalg.cholesky_ex(double(covariance))
    if failed:
        raise ValueError(f"{argument} must be positive definite: add to its diagonal")
    return root


class Pooled(Prior):
    """w ~ Normal(m, scale^2) around a mean m ~ ``mean`` that is a latent itself, for each weight.

    The site ``<name>_mean`` joins the latents. For a plate of networks this is partial pooling:
    all of them share m, and a scale with a hyperprior says how far they lie from it (Gelman & Hill
    2007, chapter 12).

    :param scale: of the weights around m.
    :param mean: the prior of m; Normal(1.0) by default.
    """

    def __init__(self, scale: Scale = 1.0, mean: PriorFunction | None = None) -> None:
        self.scale = checked(scale, "scale")
        if mean is not None:
            check_prior(mean, "mean")
        self.mean = Normal(1.0) if mean is None else mean

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        distribution = self.mean(name, module, parameter)
        if distribution is None:
            raise ValueError(f"the prior of the mean of '{name}' is None: give it a distribution")
        mean = present_scope().sample(f"{name}_mean", distribution)
        return dist.Normal(mean, self._value("scale", parameter)).to_event(parameter.dim())


class ARD(Prior):
    """w_oi ~ Normal(0, theta_i^2), with one scale theta_i for each input of a layer, and for biases
    and other vectors Normal(0, scale^2): automatic relevance determination (MacKay 1994).

    The scales are ``PyroParam``s, (1, inputs, 1, ...), one set for each weight matrix or kernel.
    The evidence takes those of inputs that the target does not depend on to zero. For the first
    layer alone: ``ByName({"0.weight": ARD(), "*": Normal(1.0)})``.

    :param scale: where the scales start.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.start = float(checked(scale, "scale"))  # type: ignore[arg-type]

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        if parameter.dim() < 2:
            return _normal(parameter, parameter.new_full((), self.start))
        shape = (1, parameter.shape[1], *(1,) * (parameter.dim() - 2))
        start = parameter.detach().new_full(shape, self.start)
        own = PyroParam(start, constraint=dist.constraints.positive)
        return _normal(parameter, hyperparameter(own, f"{self.label}.{name}.scale", parameter))


class LogUniform(Prior):
    """p(w) proportional to 1 / |w|: the improper prior of variational dropout (Kingma et al. 2015).

    Only for weights that ``AutoMCDropout`` multiplies by ``GaussianNoise``: there is no posterior
    under this prior (Hron et al. 2018), and a point mass would fall to zero.
    """

    constant = property(_of_numbers)

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        return _spread(ImproperLogUniform(parameter.new_zeros(())), parameter)


class Laplace(Prior):
    """w ~ Laplace(0, scale), independently for every weight."""

    constant = property(_of_numbers)

    def __init__(self, scale: Scale = 1.0) -> None:
        self.scale = checked(scale, "scale")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        scale = self._value("scale", parameter)
        return _spread(dist.Laplace(parameter.new_zeros(()), scale), parameter)


class StudentT(Prior):
    """w ~ StudentT(df, 0, scale), independently for every weight."""

    constant = property(_of_numbers)

    def __init__(self, df: Scale = 4.0, scale: Scale = 1.0) -> None:
        self.df = checked(df, "df")
        self.scale = checked(scale, "scale")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        df, scale = self._value("df", parameter), self._value("scale", parameter)
        return _spread(dist.StudentT(df, parameter.new_zeros(()), scale), parameter)


class Horseshoe(Prior):
    """w_i ~ Normal(0, (tau l_i)^2), l_i ~ HalfCauchy(1), tau ~ HalfCauchy(scale)
    (Carvalho, Polson & Scott 2010), with one tau per parameter.

    The sites ``<name>.global_scale`` and ``<name>.local_scale`` join the latents.
    """

    def __init__(self, scale: Scale = 1.0) -> None:
        self.scale = checked(scale, "scale")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        scope = present_scope()
        tau = scope.sample(f"{name}.global_scale", dist.HalfCauchy(self._value("scale", parameter)))
        local = scope.sample_for_each(
            f"{name}.local_scale", _spread(dist.HalfCauchy(parameter.new_ones(())), parameter)
        )
        return dist.Normal(parameter.new_zeros(()), tau * local).to_event(parameter.dim())


class Pretrained(Prior):
    """w ~ Normal(w0, scale^2) around the network's values w0, such as those of a pretrained
    network.

    An empirical Bayes prior (Krishnan et al. 2020, section 3).
    """

    def __init__(self, scale: Scale = 1.0) -> None:
        self.scale = checked(scale, "scale")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        return _normal(parameter, self._value("scale", parameter), parameter.detach())


class Moped(Prior):
    """w ~ Normal(w0, (delta max(|w0|, floor))^2) around the network's values w0 (MOPED, Krishnan et
    al. 2020, section 3).

    :param delta: the scale in units of |w0|.
    :param floor: a lower bound of |w0|, so that zeros get a scale too.
    """

    def __init__(self, delta: Scale = 0.1, *, floor: float = 1e-3) -> None:
        self.delta = checked(delta, "delta")
        self.floor = float(checked(floor, "floor"))  # type: ignore[arg-type]

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        value = parameter.detach()
        scale = self._value("delta", parameter) * value.abs().clamp(min=self.floor)
        return _normal(parameter, scale, value)


class GPrior(Prior):
    """w_i ~ Normal(0, scale^2 / h_i), with h the diagonal of the curvature sum_n J_n' F_n J_n.

    The diagonal g-prior of the linearized model (Zellner 1986; Antoran et al. 2023, section 4): the
    predictive does not depend on the units of a layer's inputs and weights, and the scale is the
    only hyperparameter. ``nn.with_prior(model, GPrior(h))`` gives it to a program, whose MAP was
    trained with another prior.

    :param curvature: h by the parameter's name, flat or with its shape.
    :param floor: the smallest h, as a share of the largest of the parameter, so that weights that
        the data do not inform have a finite variance; 1 where all h are zero.
    """

    def __init__(
        self, curvature: Mapping[str, Tensor], scale: Scale = 1.0, *, floor: float = 1e-6
    ) -> None:
        self.scale = checked(scale, "scale")
        self.curvature = {
            name: h.detach().clamp(min=real_number(floor, "floor") * float(h.max()) or 1.0)
            for name, h in curvature.items()
        }

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution:
        if name not in self.curvature:
            raise ValueError(f"GPrior has no curvature of parameter {name!r}: give one")
        h = self.curvature[name].to(parameter).reshape(parameter.shape)
        return _normal(parameter, self._value("scale", parameter) * h.rsqrt())


class ByName(Prior):
    """The prior of the first pattern (shell wildcards) that a parameter's name matches.

    Example::

        >>> rules = {"0.*": bdl.priors.Normal(1.0), "1.weight": bdl.priors.FanIn(), "*": None}
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> bnn = bdl.bayesianize(net, bdl.priors.ByName(rules))  # the last bias stays a parameter
        >>> list(bdl.Program(bnn, torch.zeros(1, 2)).latents)
        ['0.weight', '0.bias', '1.weight']

    :param rules: pattern -> prior, or None for a parameter that stays learnable. A name that
        no pattern matches stays learnable too. Rules with hyperparameters do not share them.
    """

    def __init__(self, rules: Mapping[str, PriorFunction | None]) -> None:
        if not rules:
            raise ValueError("ByName needs at least one rule, such as {'*.weight': Normal(1.0)}")
        for pattern, rule in rules.items():
            if rule is not None:
                check_prior(rule, f"ByName[{pattern!r}]")
        self.rules = {
            pattern: rule.labeled(f"prior[{pattern}]") if isinstance(rule, Prior) else rule
            for pattern, rule in rules.items()
        }

    @property
    def constant(self) -> bool:
        return all(is_constant(rule) for rule in self.rules.values() if rule is not None)

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution | None:
        for pattern, rule in self.rules.items():
            if fnmatchcase(name, pattern):
                return None if rule is None else rule(name, module, parameter)
        return None

    def labeled(self, label: str) -> "ByName":
        result = copy.copy(self)
        result.rules = {
            pattern: rule.labeled(f"{label}[{pattern}]") if isinstance(rule, Prior) else rule
            for pattern, rule in self.rules.items()
        }
        return result


class PerLayer(Prior):
    """One prior for every layer, with separate hyperparameters for each layer.

    A layer is the module that holds the parameter; its hyperparameters' sites are named
    ``<layer>.prior.…``.
    """

    def __init__(self, prior: Prior) -> None:
        if not isinstance(prior, Prior):
            raise TypeError(f"{type(self).__name__} takes one of the priors of pyro_bdl.priors")
        self.prior = prior

    @property
    def constant(self) -> bool:
        return self.prior.constant

    def labeled(self, label: str) -> Self:
        result = copy.copy(self)
        result.prior = self.prior.labeled(label)
        return result

    def group(self, name: str) -> str:
        """The parameters of one group share hyperparameters; "" has no name of its own."""
        return name.rpartition(".")[0]

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution | None:
        group = self.group(name)
        label = f"{group}.{self.prior.label}" if group else self.prior.label
        return self.prior.labeled(label)(name, module, parameter)


class PerNormalizedGroup(PerLayer):
    """One prior for every weight, with separate hyperparameters for each normalized group.

    A layer is normalized if its scale does not change the network's outputs. Layers that can only
    be scaled together are one group, such as those that write to the residual stream of a
    transformer which normalizes where it reads, ``x + block(norm(x))``. All other layers share one
    set of hyperparameters.

    A layer before a normalization can be scaled without a change of the outputs. The size of its
    weights is arbitrary, so that a precision shared with other layers would be arbitrary too
    (Antoran et al. 2022, recommendation 2). Such layers are found from the operators of one run of
    the network in evaluation mode; values do not matter. Of a layer with ``weight_norm`` it is the
    direction alone that can be scaled: this parameter is a group of its own.

    :param prior: one of the priors of this module, with a PyroParam or a hyperprior.
    :param network: the network; it is not changed.
    :param inputs: arguments of the network, with some data.
    """

    def __init__(self, prior: Prior, network: nn.Module, *inputs: Any) -> None:
        super().__init__(prior)
        if not inputs:
            raise ValueError("PerNormalizedGroup needs some inputs of the network, as in (.., x)")
        found = normalized_layers(network, *inputs)
        self.groups = tuple(found)
        self._group_of = {name: group for group, names in found.items() for name in names}

    def group(self, name: str) -> str:
        return self._group_of.get(name, "")


def normalized_layers(network: nn.Module, *inputs: Any) -> dict[str, tuple[str, ...]]:
    """The layers, single parameters or layers together whose scale does not change a network's
    outputs, by name, with their parameters."""
    copied = copy.deepcopy(network).eval().requires_grad_()
    layers: dict[str, list[str]] = {}
    parameters = dict(copied.named_parameters(remove_duplicate=False))
    for name in parameters:
        layer = name.rpartition(".")[0]
        if not isinstance(copied.get_submodule(layer), NORMALIZATIONS):
            layers.setdefault(layer, []).append(name)
    weights = {name: parameters[name] for own in layers.values() for name in own}
    with torch.enable_grad(), Exponents(weights) as exponents:
        outputs = copied(*inputs)
    return normalized_groups(exponents, tree_leaves(outputs), layers)


def learnable(prior: Any) -> Any:
    """Replace the number in a prior's scale, gain or delta by a ``PyroParam``.

    Evidence and empirical Bayes can then set it. An existing PyroParam or ``Hyperprior`` is kept.

    :raises TypeError: for a prior that has no such number.
    """
    if isinstance(prior, PerLayer):
        result = copy.copy(prior)
        result.prior = learnable(prior.prior)
        return result
    if isinstance(prior, ByName):
        rules = {k: None if rule is None else learnable(rule) for k, rule in prior.rules.items()}
        return ByName(rules)
    name = _scale_name(prior)
    if name is None:
        raise TypeError(f"{type(prior).__name__} has no scale, gain or delta that is a number")
    value = getattr(prior, name)
    if isinstance(value, PyroParam | Hyperprior):
        return prior
    result = copy.copy(prior)
    start = torch.tensor(float(value), device="cpu")
    setattr(result, name, PyroParam(start, constraint=dist.constraints.positive))
    return result


def _scale_name(prior: Any) -> str | None:
    """The attribute that is a prior's scale, a number or what has its place already."""
    kinds = int | float | PyroParam | Hyperprior
    names = ("scale", "gain", "delta")
    return next((name for name in names if isinstance(getattr(prior, name, None), kinds)), None)


def has_scale(prior: Any) -> bool:
    """Return whether ``learnable`` takes a prior."""
    if isinstance(prior, PerLayer):
        return has_scale(prior.prior)
    if isinstance(prior, ByName):
        return all(has_scale(rule) for rule in prior.rules.values() if rule is not None)
    return _scale_name(prior) is not None


def is_constant(prior: PriorFunction) -> bool:
    """Return whether a prior's distributions can be cached between runs, while ``arguments_of`` it
    stays the same."""
    return isinstance(prior, Prior) and bool(prior.constant)


def arguments_of(prior: Any) -> Any:
    """A value that differs for another prior, and for one whose attributes were set anew."""
    if isinstance(prior, Prior):
        return type(prior), *map(arguments_of, vars(prior).values())
    if isinstance(prior, Mapping):
        return tuple(prior), *map(arguments_of, prior.values())
    return prior if isinstance(prior, int | float | str) else id(prior)
