"""Estimators for scikit-learn: Bayesian networks in pipelines, searches and cross-validation."""

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from pyro_bdl import posteriors, priors
from pyro_bdl.data.dataset import CENSORED
from pyro_bdl.data.programs import LIKELIHOODS, perceptron
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.saved import from_bytes, to_bytes
from pyro_bdl.nn import bayesianize
from pyro_bdl.predictive.predictor import predictor
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.samples import Samples
from pyro_bdl.utils.one_thread import in_turn
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import one_of, whole_number

__all__ = ["BayesianClassifier", "BayesianRegressor"]

Network = Callable[[int, int], nn.Module]


class _BayesianNetwork(BaseEstimator):
    """The fit of a posterior by name and the predictions at its draws, for both estimators."""

    usual: str  # likelihood

    def __init__(
        self,
        posterior: str = "laplace",
        *,
        hidden: Sequence[int] = (50,),
        activation: str = "tanh",
        network: Network | None = None,
        prior: Any = None,
        likelihood: str | None = None,
        steps: int | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.posterior, self.hidden, self.activation = posterior, hidden, activation
        self.network, self.prior, self.likelihood = network, prior, likelihood
        self.steps, self.options, self.random_state = steps, options, random_state

    @property
    def _likelihood(self) -> str:
        return self.likelihood or self.usual

    def _task(self, tasks: Sequence[str]) -> str:
        """The task of the likelihood.

        :raises ValueError: for the likelihood of another one.
        """
        known = [name for name, kind in LIKELIHOODS.items() if kind.task in tasks]
        one_of(self._likelihood, "likelihood", known)
        return LIKELIHOODS[self._likelihood].task

    def _fit(self, x: np.ndarray, y: Tensor, classes: int = 0) -> None:
        options, kind = self._options(), LIKELIHOODS[self._likelihood]
        outputs = kind.outputs or classes
        self.scaler_ = StandardScaler().fit(x)
        if not np.isfinite(self.scaler_.scale_).all():
            raise ValueError("the features' squares overflow: give them in larger units")
        inputs = self._inputs(x)
        generator = check_random_state(self.random_state)
        self.seed_ = int(generator.randint(np.iinfo(np.int32).max))
        with seeded(self.seed_):  # of the network's first weights
            if self.network is None:
                sizes = [x.shape[1], *self._hidden(), outputs]
                # drawn in float32, so that they do not depend on torch's default
                net: nn.Module = perceptron(sizes, self.activation, torch.float32)
            else:  # which may be the user's own, and stays as it is
                net = copy.deepcopy(self.network(x.shape[1], outputs))
            prior = priors.FanIn(1.0) if self.prior is None else self.prior
            network = bayesianize(net.double(), prior)
            self.model_: Any = kind.build(network, len(y), classes).double()
        options = replace(options, seed=self.seed_)
        problem = posteriors.Problem(self.model_, inputs, y, options)
        fit = posteriors.fit(self.posterior, problem, measure=False)
        if fit.interrupted:
            raise KeyboardInterrupt
        self.posterior_, costs = fit.posterior, fit.costs
        if isinstance(self.posterior_, Guide):  # some fits learn the prior, in a program of theirs
            self.model_ = self.posterior_.program_model
        self.evidence_ = costs.elbo if costs.log_evidence is None else costs.log_evidence
        self._set_predictive()

    def _options(self) -> posteriors.Options:
        """The options of the fit.

        :raises ValueError: for one that is not known.
        """
        known = [f.name for f in fields(posteriors.Options) if f.name not in ("seed", "steps")]
        more = {} if self.options is None else dict(self.options)
        for name in more.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"options has no {name!r}: {hint}")
        return posteriors.Options(steps=self.steps, **more)

    def _hidden(self) -> list[int]:
        """The units of each hidden layer.

        :raises ValueError: for anything but a sequence of whole numbers.
        """
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Sequence | np.ndarray):
            raise ValueError(
                f"hidden must be the units of each hidden layer, as in (50,), got {self.hidden!r}"
            )
        return [whole_number(units, "hidden") for units in self.hidden]

    def _set_predictive(self) -> None:
        """Fix the draws, so that a prediction does not depend on the others."""
        with seeded(self.seed_):
            self._predictive = self._predictive_at(None, self.seed_)

    def _predictive_at(self, count: int | None, seed: int) -> Any:
        """The predictions at draws of a guide, or at all draws of chains."""
        return predictor(self.model_, self.posterior_, count, seed=seed)

    def _inputs(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(self.scaler_.transform(x))

    def _checked(self, x: Any) -> Tensor:
        check_is_fitted(self)
        return self._inputs(validate_data(self, x, reset=False, dtype=np.float64))

    @in_turn
    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copies, with the posterior as the bytes of its file."""
        state = dict(super().__getstate__())
        if state.pop("_predictive", None) is not None:
            state["posterior_"] = to_bytes(state["posterior_"])
        return state

    @in_turn
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(state.get("posterior_"), bytes):
            self.posterior_ = from_bytes(state["posterior_"], self.model_)
            self._set_predictive()


class BayesianRegressor(RegressorMixin, _BayesianNetwork):
    """A regression by a network with a posterior over its weights.

    Features and target are standardized inside; predictions are in the target's units. Computed in
    float64, with fixed draws, so that the same row always gets the same mean and sd.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None].numpy(), torch.linspace(-2, 2, 20).numpy()
        >>> regressor = bdl.sklearn.BayesianRegressor("mean-field", hidden=(8,), steps=100)
        >>> mean, sd = regressor.fit(x, y).predict(x, return_std=True)
        >>> mean.shape, sd.shape
        ((20,), (20,))

    :param posterior: any name that ``pyro-bdl compare`` knows, as "laplace", "nuts", "ensemble".
    :param hidden: units of each hidden layer; ``activation`` is "tanh", "relu" or "silu".
    :param network: a function from the numbers of inputs and outputs to a torch module, in place of
        ``hidden`` and ``activation``.
    :param prior: of the weights; by default ``priors.FanIn(1.0)``.
    :param likelihood: "normal" by default, "heteroscedastic" (an sd for each input, from a second
        output of the network) or "student_t"; of counts, which are not standardized, "poisson" or
        "negative_binomial", each also after "zero_inflated_" or "hurdle_"; of shares between 0 and
        1 "beta"; "censored_normal", "censored_lognormal" or "censored_weibull" of targets (N, 2),
        value and status, or (N, 3), with upper ends (see ``models.CensoredRegression``).
    :param steps: of training; by default those of the posterior.
    :param options: of chains: ``chains``, ``warmup``, ``draws``, ``max_tree_depth``.
    :param random_state: of the first weights, training and draws.

    Fitted: ``model_``, the Pyro program; ``posterior_``, a guide or ``Samples``; ``evidence_``, the
    log evidence of a Laplace approximation or the bound, in nats, of the standardized target.
    """

    usual = "normal"

    @in_turn
    def fit(self, X: Any, y: Any) -> "BayesianRegressor":
        """Fit the posterior to features (N, D) and targets (N,), censored ones (N, 2) or (N, 3)."""
        task = self._task(("regression", "count", "share", *CENSORED))
        x, y = validate_data(
            self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2,
            multi_output=task in CENSORED,
        )  # fmt: skip
        y = np.array(y, dtype=np.float64)
        self.mean_, self.sd_ = 0.0, 1.0
        values = y
        if task in CENSORED:
            if y.ndim != 2 or y.shape[1] not in (2, 3) or not np.isin(y[:, 1], range(4)).all():
                raise ValueError(
                    f"likelihood={self._likelihood!r} needs targets (N, 2), values and status (0 "
                    f"to 3), or (N, 3), with the upper ends of intervals, got shape {y.shape}"
                )
            values = y[:, 0]
        if task == "times":
            if not (values > 0).all():
                raise ValueError(f"likelihood={self._likelihood!r} needs values above 0")
            self.sd_ = float(np.exp(np.log(values).mean()))
        elif task in ("regression", "censored"):
            size = float(np.abs(values).max()) or 1.0  # whose square may overflow
            self.mean_ = size * float((values / size).mean())
            self.sd_ = size * float((values / size).std()) or 1.0
        elif task == "count" and ((y < 0).any() or (y != np.round(y)).any()):
            raise ValueError(f"likelihood={self._likelihood!r} needs counts: 0, 1, 2 and so on")
        elif task == "share" and not ((y > 0) & (y < 1)).all():
            raise ValueError(f"likelihood={self._likelihood!r} needs shares between 0 and 1")
        numbers = y[:, ::2] if task in CENSORED else y  # without the status
        numbers -= self.mean_
        numbers /= self.sd_
        self._fit(x, torch.from_numpy(y))
        return self

    @in_turn
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean (N,), and with ``return_std`` the sd with noise too."""
        x = self._checked(X)
        moments = self._predictive.moments(x)["y"]
        mean = moments.mean.numpy() * self.sd_ + self.mean_
        return (mean, moments.variance.sqrt().numpy() * self.sd_) if return_std else mean

    @in_turn
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of the target with noise, (N, n_samples)."""
        x, generator = self._checked(X), check_random_state(random_state)
        seed = int(generator.randint(np.iinfo(np.int32).max))
        with seeded(seed):
            predictive = self._predictive_at(n_samples, seed)
            if isinstance(self.posterior_, Samples):  # as many of its draws, with replacement
                latents = self.posterior_.flat()
                total = len(next(iter(latents.values())))  # of all chains
                chosen = torch.randint(total, (n_samples,), device="cpu")
                drawn = {name: value[chosen.to(value.device)] for name, value in latents.items()}
                predictive = Predictive(
                    self.model_, Samples({k: v[None] for k, v in drawn.items()})
                )
            values = predictive(x)["y"]
        return values.T.numpy() * self.sd_ + self.mean_

    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95), n_samples: int = 1000
    ) -> np.ndarray:
        """Quantiles of the target with noise, (N, Q), of draws for all rows: the Monte Carlo error
        of a row's depends on the rows beside it."""
        return np.quantile(self.sample_y(X, n_samples), quantiles, axis=1).T


class BayesianClassifier(ClassifierMixin, _BayesianNetwork):
    """A classifier by a network with a posterior over its weights.

    Arguments and fitted attributes are those of ``BayesianRegressor``; ``likelihood`` is
    "categorical" by default, or "ordinal" for labels that are ordered numbers. ``classes_`` are the
    labels in the order of the columns of ``predict_proba``.

    Example::

        >>> x = torch.linspace(-1, 1, 20)[:, None].numpy()
        >>> y = ["low"] * 10 + ["high"] * 10
        >>> classifier = bdl.sklearn.BayesianClassifier("mean-field", hidden=(8,), steps=100)
        >>> classifier.fit(x, y).predict_proba(x).shape
        (20, 2)
        >>> [str(name) for name in classifier.classes_]
        ['high', 'low']
    """

    usual = "categorical"

    @in_turn
    def fit(self, X: Any, y: Any) -> "BayesianClassifier":
        """Fit the posterior to features (N, D) and labels (N,)."""
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        encoder = LabelEncoder().fit(y)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            raise ValueError(
                f"the labels have the single class {self.classes_[0]}: at least two are needed"
            )
        labels = torch.from_numpy(encoder.transform(y))
        self._task(("classification",))
        if self._likelihood == "ordinal" and self.classes_.dtype.kind not in "iufb":
            raise ValueError(
                "likelihood='ordinal' needs labels that are numbers, which have an order"
            )
        self._fit(x, labels, len(self.classes_))
        return self

    @in_turn
    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, (N, C); of a Laplace approximation in closed form
        (``LinearizedPredictive.probabilities``), of others the mean over the draws."""
        x = self._checked(X)
        if self._likelihood == "ordinal":
            sites, _ = self._predictive.observe(x)
            p = sites["y"].mean.mean(0).numpy()
        else:
            p = self._predictive.probabilities(x)["y"].numpy()
        return p / p.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels, (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]
