"""Ready-made programs: a network of ``bayesianize`` with an observation model.

Each program is ``model(x, y=None)``. It observes the site ``y`` inside the plate ``data`` and
records the network's output f(x) as the deterministic site ``f``. Outputs and targets with a single
column (N, 1) are treated as (N,).

A network that takes keywords gets them as a dict in the place of x, or as keywords of the call::

    model({"input_ids": ids, "attention_mask": mask}, y)
    model(input_ids=ids, attention_mask=mask, y=y)

Of a network whose output is no tensor ``output`` says which tensor is f(x); by default it is the
output's ``logits``, as in networks of the Hugging Face kind.

Where some numbers of several targets were not observed they are NaN, and
``Regression(bnn, missing_targets=True)`` leaves them out of the likelihood; so does a head of
``MultiOutput``.

``MultiOutput`` observes several outputs of one network, each with a program of its own kind::

    heads = {"price": Regression(noise=0.1), "sold": BinaryClassification()}
    model = MultiOutput(network, heads, num_data=N)
    model(x, {"price": prices, "sold": sold})
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus

from pyro_bdl.distributions.censored import LAWS, Censored
from pyro_bdl.distributions.ordered_logistic import OrderedLogistic
from pyro_bdl.errors import warn
from pyro_bdl.program.batches import as_dicts, leading_size
from pyro_bdl.program.gaussian_prior import TaskPrior
from pyro_bdl.program.linear_ops.probabilities import Probabilities
from pyro_bdl.program.network_sites import SampledNetwork
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.trace import prior_factor
from pyro_bdl.scales import Hyperprior, Scale, checked, hyperparameter, on_device
from pyro_bdl.utils.autocast import to_full_precision
from pyro_bdl.utils.validation import whole_number

__all__ = [
    "BetaRegression",
    "BinaryClassification",
    "CensoredRegression",
    "Classification",
    "HeteroscedasticRegression",
    "MultiOutput",
    "NegativeBinomialRegression",
    "ObservationModel",
    "OrdinalRegression",
    "PoissonRegression",
    "Regression",
    "StudentTRegression",
]

Output = str | int | Callable[[Any], Tensor] | None
Scales = Scale | Tensor | Sequence[float]


class ObservationModel(TaskPrior, OwnParameters):
    """Base class of the programs: network, plate and checks; a subclass defines p(y | f).

    :param network: a module of ``bayesianize``, or any module that samples its weights; none for a
        head of ``MultiOutput``.
    :param num_data: N, the number of data that the posterior is about, where the program is
        called with minibatches: their log likelihood then counts N / B times.
    :param output: of a network whose output is no tensor, which tensor of it is f(x): an attribute
        or a key ("logits", "last_hidden_state"), a place in a tuple, or a function of the output.
    :param missing_targets: whether NaN in y is a number that was not observed, which counts
        nowhere, as what ``obs_mask`` leaves out. Otherwise NaN is refused.
    :raises ValueError: for a ``num_data`` that is not a whole number of at least 1.
    """

    _head: str | None = None  # the name of a head of MultiOutput
    _takes_logits = False
    _was_called = False

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.num_data = None if num_data is None else whole_number(num_data, "num_data")
        self.output, self.missing_targets = output, missing_targets

    def likelihood(self, output: Tensor) -> Distribution:
        """Return p(y | f) with batch shape (N,) for outputs of shape (N, ...)."""
        raise NotImplementedError

    def observation_shape(self, output: Tensor) -> torch.Size:
        """Return the shape of the targets for outputs of shape (N, ...)."""
        return output.shape

    def forward(self, x: Any = None, y: Any = None, **inputs: Any) -> Any:
        """Observe or sample the targets.

        :param x: the network's inputs: a tensor (N, ...), or a dict of keywords of a network that
            takes them; a network that takes a dict as such gets it as it is.
        :param y: the targets (N, ...).
        :param inputs: more keywords of the network.
        """
        network = self.network
        if network is None:
            raise TypeError(
                f"{type(self).__name__} has no network: pass it, or make this a head of MultiOutput"
            )
        seen = None
        if not self._was_called:
            self._was_called, seen = True, Probabilities()
        with self._under_task_prior():
            with nullcontext() if seen is None else seen:
                found = _called(network, x, inputs)
            return self._observe(found, y, (x, inputs), seen)

    def _observe(self, found: Any, y: Any, inputs: Any, seen: "Probabilities | None") -> Any:
        return self._sampled({"y": (self, _selected(found, self.output), y)}, inputs, seen)["y"]

    def _sampled(
        self,
        heads: "Mapping[str, tuple[ObservationModel, Any, Any]]",
        inputs: Any,
        seen: "Probabilities | None",
    ) -> dict[str, Any]:
        """Observe or sample the targets of each site, given its program, f(x) and targets.

        :param inputs: of the network; ``seen`` what it computed, in the first call.
        """
        outputs: dict[str, Tensor] = {}
        for site, (head, output, _) in heads.items():
            end = None if seen is None or not head._takes_logits else seen.name(output)
            if end is not None:
                warn(
                    f"the network's outputs for {head._targets_name} are probabilities (its last "
                    f"operation is {end}), but {type(head).__name__} takes logits, "
                    "of which it computes the probabilities itself: remove that layer",
                    "probabilities-as-logits",
                    stacklevel=3,
                )
            if isinstance(output, Tensor) and not output.dim():
                rows = leading_size(inputs)
                if rows != 1:
                    raise ValueError(
                        f"the network's output is a single number for {rows} rows: return one for "
                        "each row, (N,) or (N, targets)"
                    )
                output = output[None]  # a network that ends in squeeze(), at one row
            outputs[site] = output = to_full_precision(_without_single_column(output))
            batch = output.shape[0]
            if not batch:
                raise ValueError("the batch has no rows: pass at least one datum")
            if batch != next(iter(outputs.values())).shape[0]:
                counts = {name: value.shape[0] for name, value in outputs.items()}
                raise ValueError(
                    f"the outputs of the network have different numbers of rows: {counts}"
                )
        likelihoods: dict[str, Any] = {}  # Distribution, which Pyro extends
        targets, size = {}, batch
        for site, (head, _, y) in heads.items():
            if y is not None:
                targets[site] = head._checked_targets(outputs[site], y)
                size = self._plate_size(batch)
            likelihoods[site] = head.likelihood(outputs[site])
            if site in targets:
                both = likelihoods[site], targets[site]
                likelihoods[site], targets[site] = head._as_observed(*both)
        device = outputs[site].device
        with pyro.plate("data", size, subsample=torch.arange(batch, device=device)):
            return {
                site: pyro.sample(site, likelihood, obs=targets.get(site))
                for site, likelihood in likelihoods.items()
            }

    def _plate_size(self, batch: int) -> int:
        if self.num_data is None:
            return batch
        if self.num_data < batch:
            raise ValueError(
                f"num_data is {self.num_data}, but the batch has {batch} rows: num_data is the "
                "number of all training data"
            )
        return self.num_data

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        expected = self.observation_shape(output)
        given, y = y, _without_single_column(y)
        if given.shape == expected:  # such as the classes of sequences of length 1
            return given
        if y.shape != expected:
            raise ValueError(
                f"{self._targets_name} has shape {tuple(y.shape)}, but the network's output "
                f"{tuple(output.shape)} asks for targets of shape {tuple(expected)}"
            )
        return y

    def _as_observed(self, likelihood: Any, y: Tensor) -> tuple[Any, Tensor]:
        """The distribution of checked targets, and the values that it observes."""
        return _where_seen(likelihood, y) if self.missing_targets else (likelihood, y)

    def takes_missing(self, argument: str) -> bool:
        """Return whether NaN in an argument of this name is a number that was not observed."""
        return self.missing_targets and argument == self._targets_name

    @property
    def _targets_name(self) -> str:
        return "y" if self._head is None else f"y[{self._head!r}]"

    def _site(self, name: str) -> str:
        """The name of a site of this program, or of this head."""
        return name if self._head is None else f"{self._head}.{name}"

    def record(self, output: Tensor) -> Tensor:
        """Return the output, named as the function f that predictions and comparisons are of."""
        return pyro.deterministic(self._site("f"), output)

    def _declare(self, name: str, value: Scales) -> None:
        """Keep a hyperparameter: a number, several, a PyroParam, or a distribution to sample."""
        if isinstance(value, Tensor) or _are_numbers(value):
            numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
            if not bool((numbers.isfinite() & (numbers > 0)).all()):
                raise ValueError(f"{name} must be positive finite numbers, got {value}")
            self.register_buffer(name, numbers.to(_floating(self.network)))
            return
        value = checked(value, name)  # type: ignore[arg-type]
        if isinstance(value, Hyperprior):
            setattr(self, f"_{name}", value)
            value = value.parameter
        if isinstance(value, PyroParam):
            own = self if self.network is None else self.network
            setattr(self, name, on_device(own, value))
        elif isinstance(value, Distribution) and value.batch_shape:
            joint: Any = value
            setattr(self, f"_{name}", joint.to_event(len(value.batch_shape)))
        else:
            setattr(self, f"_{name}", value)

    def _hyperparameter(self, name: str, like: Tensor) -> Tensor:
        """The present value: of a single number (), of one for each target (targets,)."""
        if name in self._pyro_params or name in self._buffers:
            value = getattr(self, name)
            hyperprior = getattr(self, f"_{name}", None)
            if isinstance(hyperprior, Hyperprior):
                prior_factor(f"{self._site(name)}.hyperprior", hyperprior.log_prob(value))
            value = value.to(like)
        else:
            value = hyperparameter(getattr(self, f"_{name}"), self._site(name), like)
        if value.dim() and value.shape[-1] not in (1, like.shape[-1]):
            raise ValueError(
                f"{self._site(name)} holds {value.shape[-1]} numbers, but there are "
                f"{like.shape[-1]} targets: give one number for each, or one for all"
            )
        return value


class Regression(ObservationModel):
    """y ~ Normal(f(x), noise^2); several targets are independent given f.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> bnn = bdl.bayesianize(torch.nn.Linear(1, 1))
        >>> model = bdl.models.Regression(bnn, noise=dist.HalfNormal(1.0))
        >>> list(bdl.Program(model, x, y).latents)
        ['weight', 'bias', 'noise']

    :param noise: the noise's standard deviation, in units of y: a number, a ``PyroParam`` or a
        distribution (then a latent site ``noise``). Of D targets each has its own where it is D
        numbers, a ``PyroParam`` of them, or a distribution of batch shape (D,).
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        noise: Scales | None = None,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)

    def likelihood(self, output: Tensor) -> Distribution:
        noise = self._hyperparameter("noise", output)
        return dist.Normal(self.record(output), noise).to_event(output.dim() - 1)


class HeteroscedasticRegression(ObservationModel):
    """y ~ Normal(f(x), s(x)^2), with f and s from the network.

    The last dimension of the output is split into two halves: f, and r with s = floor +
    softplus(r). The site ``f`` is the mean, the deterministic site ``noise`` is s.

    The likelihood has no maximum without a floor: a network that passes through a single point may
    let s go to zero there, and the density at that point goes to infinity. A long training of a
    point estimate does so, one point after another, and its log likelihood on held-out data falls
    while that on the training data grows. A floor at the size of the measurement error bounds this,
    ``training.train(..., held_out=0.1)`` stops before it, and averaging over the posterior does not
    run into it.

    :param floor: the smallest s, in units of y; by default the rounding error of the dtype.
    :raises ValueError: for a floor that is not positive and finite.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        floor: float | None = None,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        if floor is not None and not 0 < floor < float("inf"):
            raise ValueError(f"floor must be positive and finite, got {floor}")
        self.floor = floor

    def likelihood(self, output: Tensor) -> Distribution:
        mean, raw = _halves(self, output)
        floor = torch.finfo(raw.dtype).eps if self.floor is None else self.floor
        noise = pyro.deterministic(self._site("noise"), softplus(raw) + floor)
        return dist.Normal(self.record(mean), noise).to_event(mean.dim() - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        return _halves(self, output)[0].shape


class StudentTRegression(ObservationModel):
    """y ~ StudentT(df, f(x), noise): regression that is robust to outliers.

    :param noise: the scale, in units of y; ``df``: the degrees of freedom. Each a number, a
        ``PyroParam`` or a distribution (then a latent site of that name), for all targets or, as
        in ``Regression``, for each.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        noise: Scales | None = None,
        df: Scales = 4.0,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        self._declare("noise", dist.HalfNormal(1.0) if noise is None else noise)
        self._declare("df", df)

    def likelihood(self, output: Tensor) -> Distribution:
        df, noise = self._hyperparameter("df", output), self._hyperparameter("noise", output)
        return dist.StudentT(df, self.record(output), noise).to_event(output.dim() - 1)


class Classification(ObservationModel):
    """y ~ Categorical(softmax(f(x))) for outputs (N, classes) and integer targets (N,).

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> model = bdl.models.Classification(bdl.bayesianize(net))
        >>> draws = bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))  # of the prior
        >>> draws["f"].shape, draws["y"].shape
        (torch.Size([10, 5, 3]), torch.Size([10, 5]))
    """

    _takes_logits = True

    def likelihood(self, output: Tensor) -> Distribution:
        shape = self.observation_shape(output)
        return dist.Categorical(logits=self.record(output)).to_event(len(shape) - 1)

    def observation_shape(self, output: Tensor) -> torch.Size:
        if output.dim() < 2:
            raise ValueError(
                "Classification needs a network with one output per class, got output shape "
                f"{tuple(output.shape)}; for two classes and one output use BinaryClassification"
            )
        return output.shape[:-1]

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        y = super()._checked_targets(output, y)
        if self.missing_targets:
            raise ValueError(
                "missing_targets marks numbers by NaN, and class numbers are integers: leave it "
                "out, and rows without a class too"
            )
        return _checked_classes(self._targets_name, y)


class OrdinalRegression(ObservationModel):
    """Ordered classes by cumulative logits, P(y <= k) = sigmoid(c_k - f(x)) for y in 0 ... K - 1.

    The cut points c_0 < ... < c_(K-2) are the latent site ``cutpoints``. By default their prior has
    its medians where all classes are equally likely at f = 0: c_0 and the logarithms of the gaps
    are Normal with sd 1.

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.OrdinalRegression(bdl.bayesianize(net), num_classes=4)
        >>> bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))["y"].max() <= 3  # of the prior
        tensor(True)

    :param num_classes: K; as many as the cut points say where they are given.
    :param cutpoints: K - 1 increasing numbers, or a distribution of an ordered vector.
    :raises ValueError: without both, if they contradict, or for numbers that do not increase.

    Source: McCullagh (1980), Regression models for ordinal data.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        num_classes: int | None = None,
        *,
        cutpoints: Distribution | Tensor | Sequence[float] | None = None,
        num_data: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output)
        if cutpoints is None:
            if num_classes is None:
                raise ValueError("OrdinalRegression needs num_classes, or the cutpoints")
            count = whole_number(num_classes, "num_classes")
            if count < 2:
                raise ValueError(f"num_classes must be at least 2, got {num_classes}")
            medians = torch.arange(1, count, dtype=torch.float64, device="cpu").div(count).logit()
            gaps = torch.cat([medians[:1], medians.diff().log()])
            self._cutpoints: Any = dist.TransformedDistribution(
                dist.Normal(gaps, 1.0).to_event(1), dist.transforms.OrderedTransform()
            )
        elif isinstance(cutpoints, Distribution):
            self._cutpoints = cutpoints
        else:
            numbers = torch.as_tensor(cutpoints, dtype=torch.float64, device="cpu")
            if numbers.dim() != 1 or not bool((numbers.diff() > 0).all()):
                raise ValueError(f"cutpoints must be increasing numbers, got {cutpoints}")
            self.register_buffer("_cutpoints", numbers.to(_floating(self.network)))
        given = self._cutpoints
        shape = given.event_shape if isinstance(given, Distribution) else given.shape
        if len(shape) != 1 or num_classes not in (None, shape[0] + 1):
            raise ValueError(
                f"cutpoints of shape {tuple(shape)} do not fit num_classes={num_classes}: they are "
                "num_classes - 1 numbers"
            )
        self.num_classes = shape[0] + 1

    def likelihood(self, output: Tensor) -> Distribution:
        cutpoints = self._cutpoints
        if isinstance(cutpoints, Distribution):
            cutpoints = hyperparameter(cutpoints, self._site("cutpoints"), output)
        likelihood: Any = OrderedLogistic(self.record(output), cutpoints.to(output))
        return likelihood.to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return _checked_classes(self._targets_name, super()._checked_targets(output, y))


class BinaryClassification(ObservationModel):
    """y ~ Bernoulli(sigmoid(f(x))), y in {0, 1} as integers, booleans or floats.

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.BinaryClassification(bdl.bayesianize(net))
        >>> draws = bdl.Predictive(model, num_samples=10)(torch.randn(5, 2))  # of the prior
        >>> draws["f"].shape, draws["y"].shape
        (torch.Size([10, 5]), torch.Size([10, 5]))
    """

    _takes_logits = True

    def likelihood(self, output: Tensor) -> Distribution:
        return dist.Bernoulli(logits=self.record(output)).to_event(output.dim() - 1)

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class PoissonRegression(ObservationModel):
    """y ~ Poisson(exp(f(x))) for counts y.

    :param zero_inflated: whether y is zero besides with probability sigmoid(g(x)). The last
        dimension of the network's output is then split into two halves, f and g, and the
        deterministic site ``gate`` is this probability.

    Source: Lambert (1992), Zero-inflated Poisson regression.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        zero_inflated: bool = False,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        self.zero_inflated = zero_inflated

    def likelihood(self, output: Tensor) -> Distribution:
        f, gate = _halves(self, output) if self.zero_inflated else (output, None)
        counts: Any = self._counts(self.record(f))
        if gate is not None:
            pyro.deterministic(self._site("gate"), gate.sigmoid())
            counts = dist.ZeroInflatedDistribution(counts, gate_logits=gate)
        return counts.to_event(f.dim() - 1)

    def _counts(self, f: Tensor) -> Distribution:
        return dist.Poisson(f.exp())

    def observation_shape(self, output: Tensor) -> torch.Size:
        return _halves(self, output)[0].shape if self.zero_inflated else output.shape

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        return super()._checked_targets(output, y).to(output.dtype)


class NegativeBinomialRegression(PoissonRegression):
    """Counts y with mean m = exp(f(x)) and variance m + (dispersion m)^2: Poisson counts whose rate
    varies around m by a Gamma distribution. Without dispersion they are those of a Poisson.

    :param dispersion: the sd of the rate, as a share of m: a number, a ``PyroParam`` or a
        distribution (then a latent site of that name; by default a LogNormal with median 0.5), for
        all targets or, as in ``Regression``, for each.
    :param zero_inflated: as of ``PoissonRegression``.

    Source: Cameron & Trivedi (1998), Regression analysis of count data, the model NB2.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        dispersion: Scales | None = None,
        zero_inflated: bool = False,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(
            network,
            zero_inflated=zero_inflated,
            num_data=num_data,
            output=output,
            missing_targets=missing_targets,
        )
        self._declare("dispersion", dist.LogNormal(-0.7, 1.0) if dispersion is None else dispersion)

    def _counts(self, f: Tensor) -> Distribution:
        dispersion = self._hyperparameter("dispersion", f)
        count = dispersion.square().reciprocal()
        return dist.NegativeBinomial(count, logits=f + 2 * dispersion.log())


class BetaRegression(ObservationModel):
    """Shares y between 0 and 1, y ~ Beta(m precision, (1 - m) precision).

    Their mean is m = sigmoid(f(x)), their variance m (1 - m) / (1 + precision). Targets that are 0
    or 1 have no finite density: move them inside, or write a statement of their own for them.

    :param precision: as ``noise`` of ``Regression``; by default a LogNormal with median 7.4.

    Source: Ferrari & Cribari-Neto (2004), Beta regression for modelling rates and proportions.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        precision: Scales | None = None,
        num_data: int | None = None,
        output: Output = None,
        missing_targets: bool = False,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output, missing_targets=missing_targets)
        self._declare("precision", dist.LogNormal(2.0, 1.0) if precision is None else precision)

    def likelihood(self, output: Tensor) -> Distribution:
        precision, f = self._hyperparameter("precision", output), self.record(output)
        return dist.Beta(f.sigmoid() * precision, (-f).sigmoid() * precision).to_event(f.dim() - 1)


class CensoredRegression(ObservationModel):
    """Times and other numbers of which some are only known to be beyond a limit, or between two.

    y = f(x) + scale e or, of the other laws, log y = f(x) + scale e, with e of a standard Normal
    or, for the Weibull, a law of smallest extreme values; its shape is then 1 / scale.

    The targets are ``(N, 2)``, a value and its status, as in R's ``Surv``: 1, it is y; 0
    (right-censored), y is larger; 2 (left-censored), y is smaller. Intervals have the status 3 and
    their upper end in a third column, ``(N, 3)``, which other rows may have anything finite in.
    Predictions are of y itself. ``compare`` has the log score, in which a censored target counts as
    what is known of it; RMSE and CRPS would take the limit for y.

    :param law: "normal", "lognormal" or "weibull".
    :param scale: as ``noise`` of ``Regression``.
    :raises ValueError: for another law; of the call, for targets of another shape or status.

    Source: Klein & Moeschberger (2003), Survival analysis, sections 3.5 and 12.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        law: str = "lognormal",
        *,
        scale: Scale | None = None,
        num_data: int | None = None,
        output: Output = None,
    ) -> None:
        super().__init__(network, num_data=num_data, output=output)
        if law not in LAWS:
            raise ValueError(f"law must be one of {', '.join(map(repr, LAWS))}, got {law!r}")
        self.law = law
        self._declare("scale", dist.HalfNormal(1.0) if scale is None else scale)

    def likelihood(self, output: Tensor) -> Distribution:
        status, upper = torch.ones_like(output), torch.zeros_like(output)
        scale = self._hyperparameter("scale", output)
        return Censored(self.law, self.record(output), scale, status, upper)

    def observation_shape(self, output: Tensor) -> torch.Size:
        if output.dim() != 1:
            raise ValueError(
                f"CensoredRegression needs a network with one output, got output shape "
                f"{tuple(output.shape)}"
            )
        return output.shape

    def _checked_targets(self, output: Tensor, y: Tensor) -> Tensor:
        rows = self.observation_shape(output)[0]
        if y.shape not in ((rows, 2), (rows, 3)):
            raise ValueError(
                f"{self._targets_name} has shape {tuple(y.shape)}, but must be ({rows}, 2), values "
                f"and status, or ({rows}, 3), with the upper ends of intervals"
            )
        return y.to(output)

    def _as_observed(self, likelihood: Any, y: Tensor) -> tuple[Any, Tensor]:
        loc, scale, upper = likelihood.loc, likelihood.scale, likelihood.upper
        upper = y[:, 2] if y.shape[1] == 3 else upper
        return Censored(self.law, loc, scale, y[:, 1], upper), y[:, 0]


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
            setattr(self, f"head_{name}", head.to(_floating(network)))

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
            output = _selected(found, own if head.output is None else head.output)
            heads[name] = head, output, y[name]
        return self._sampled(heads, inputs, seen)


def _where_seen(likelihood: Any, y: Tensor) -> tuple[Distribution, Tensor]:
    """A likelihood in which targets that are NaN are masked, and targets without NaN."""
    seen, numbers = ~y.isnan(), len(likelihood.event_shape)
    base = likelihood.base_dist if numbers else likelihood
    anything = 0.0 if base.support.is_discrete else 0.5  # in the support
    return base.mask(seen).to_event(numbers), torch.where(seen, y, anything)


def _called(network: nn.Module, x: Any, inputs: Mapping[str, Any]) -> Any:
    """The network's output, a mapping being its keywords where it takes them."""
    if x is None and not inputs:
        raise TypeError("the program needs the network's inputs: pass x, or its keywords")
    if isinstance(x, Mapping):
        x = as_dicts(x)
        if _takes(network, {**x, **inputs}):
            return network(**x, **inputs)
    return network(**inputs) if x is None else network(x, **inputs)


def _takes(network: nn.Module, keywords: Mapping[str, Any]) -> bool:
    while isinstance(network, SampledNetwork):
        network = network.network
    try:
        inspect.signature(network.forward).bind(**keywords)
    except TypeError:
        return False
    return True


def _selected(found: Any, output: Output) -> Any:
    """The tensor of a network's output that is f(x).

    :raises TypeError: where ``output`` names no tensor in it.
    """
    if callable(output):
        return output(found)
    if output is None and isinstance(found, Tensor):
        return found
    entry = "logits" if output is None else output
    try:
        if isinstance(entry, int) or isinstance(found, Mapping):
            value = found[entry]
        else:
            value = getattr(found, entry)
    except (AttributeError, IndexError, KeyError, TypeError):
        value = None
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the network's output is a {type(found).__name__} without a tensor {entry!r}: say by "
            "output= which of its tensors is f(x), as in output='last_hidden_state', output=0 or "
            "output=lambda found: found.mean"
        )
    return value


def _floating(network: nn.Module | None) -> Tensor:
    """Some tensor of the dtype and on the device of a network's weights."""
    if network is None:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    tensors = chain(network.parameters(), network.buffers())
    found = (tensor for tensor in tensors if tensor.is_floating_point())
    return next(found, torch.empty(0, device="cpu"))


def _are_numbers(value: Any) -> bool:
    is_sequence = isinstance(value, Sequence) and len(value) > 0
    return is_sequence and all(isinstance(number, int | float) for number in value)


def _halves(program: ObservationModel, output: Tensor) -> tuple[Tensor, Tensor]:
    if output.dim() < 2 or output.shape[-1] % 2:
        raise ValueError(
            f"{type(program).__name__} needs a network with two outputs per target, got output "
            f"shape {tuple(output.shape)}"
        )
    first, second = output.chunk(2, -1)
    return _without_single_column(first), _without_single_column(second)


def _checked_classes(name: str, y: Tensor) -> Tensor:
    if y.is_floating_point():
        raise ValueError(f"{name} must hold class numbers as integers, got dtype {y.dtype}")
    return y


def _without_single_column(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    return value.squeeze(-1) if value.dim() > 1 and value.shape[-1] == 1 else value
