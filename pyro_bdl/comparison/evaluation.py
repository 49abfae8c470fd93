"""What one posterior says at test inputs: its function, its predictions and their scores."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bdl import diagnostics, metrics
from pyro_bdl.comparison.held_out import Observation, PredictiveDraws, Test, Units
from pyro_bdl.comparison.leave_one_out import leave_one_out
from pyro_bdl.comparison.program_sites import Subject, as_samples, of_program, stated_num_data
from pyro_bdl.comparison.scores import (
    check_draws,
    class_labels,
    log_likelihood,
    score_classes,
    score_draws_of_classes,
    score_draws_of_numbers,
    score_numbers,
)
from pyro_bdl.diagnostics.loo import LOO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.metrics import Uncertainty
from pyro_bdl.predictive.linearized import UNKNOWN, LinearizedPredictive, is_linear
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.samples import Samples

__all__ = ["Evaluation", "Test", "Units", "class_labels", "convergence", "evaluate"]

# Draws times numbers per draw that are in memory at once while the test points are scored.
_NUMBERS_AT_ONCE = 2**24
_LEAST_DRAWS, _LEAST_FOR_RANGE = 4, 40


@dataclass(frozen=True)
class Evaluation:
    """One posterior at the test inputs.

    :param task: ``"regression"`` or ``"classification"``.
    :param chains: how many Markov chains the draws are of, one after the other; 1 for a guide.
    :param function: ``(S, N, ...)``, draws of f in the target's units, or of class probabilities,
        at the points that were kept.
    :param mean: ``(N, ...)``, the mean prediction, or the mean class probabilities, at all points.
    :param predictions: ``(S, N)``, draws of the target, noise included, at the points that were
        kept; of classes None.
    :param scores: what the table says of the posterior alone, by key.
    :param expected: ``(S, N, ...)``, of a regression E[y | draw] at the points that were kept.
    :param noise: ``(S, N, ...)``, of a regression Var[y | draw] there.
    :param pit: of a regression the probability integral transforms of all test targets.
    :param loo: leave-one-out on the training data, where they are known.
    """

    task: str
    chains: int
    function: Tensor
    mean: Tensor
    predictions: Tensor | None
    scores: Mapping[str, float | str] = field(default_factory=dict)
    expected: Tensor | None = None
    noise: Tensor | None = None
    pit: Tensor | None = None
    loo: LOO | None = None

    def moments(self) -> Tensor:
        """``(S, 2, N, ...)``, mean and variance of the target given the draw."""
        assert self.expected is not None and self.noise is not None
        return torch.stack([self.expected, self.noise], 1)

    def uncertainty(self) -> Uncertainty | None:
        """Aleatoric and epistemic parts of entropy or variance at the points that were kept."""
        if self.task == "classification":
            return metrics.entropy_parts(self.function)
        if self.expected is None or self.noise is None:
            return None
        return metrics.variance_parts(self.expected, self.noise)

    def halves(self) -> tuple["Evaluation", "Evaluation"]:
        """Half of the chains and the others, or both ends of a single chain."""
        names = ("function", "expected", "noise")
        parts = {
            name: metrics.halves(value, chains=self.chains)
            for name in names
            if (value := getattr(self, name)) is not None
        }
        chains = (1, 1) if self.chains == 1 else (self.chains // 2, -(-self.chains // 2))
        first, second = ({name: part[i] for name, part in parts.items()} for i in (0, 1))
        return self._of_draws(chains[0], **first), self._of_draws(chains[1], **second)

    def _of_draws(self, chains: int, **draws: Any) -> "Evaluation":
        return replace(self, chains=chains, **draws)


def evaluate(
    name: str,
    subject: Subject,
    posterior: Any,
    test: Test,
    *,
    num_samples: int,
    kept: Tensor,
    units: Units,
    train: Test | None = None,
    ood: tuple[Tensor, ...] | None = None,
    batch_norm_data: Any = None,
) -> Evaluation:
    """Push one set of draws of the posterior through the program, and score them.

    :param name: of the posterior, for messages.
    :param subject: the program.
    :param posterior: a guide or ``Samples``, of which all draws are taken.
    :param test: the test data.
    :param num_samples: draws of a guide.
    :param kept: row numbers at which the draws are kept.
    :param units: of the target; of no effect for classes.
    :param train: the data that the posterior was fitted to, for leave-one-out.
    :param ood: inputs from elsewhere, that its uncertainty should tell from the test inputs.
    :param batch_norm_data: see ``Predictive``.
    :raises TypeError: where the posterior is neither a guide nor ``Samples``.
    :raises ValueError: for a posterior of another program, or targets that do not fit the
        predictions.
    :raises UnusableDrawsError: where some of the draws are not finite.
    """
    predictive: Any
    model, observation = subject.model, subject.observation
    linear = is_linear(posterior)  # a Gauss-Newton posterior is of the linear model
    if linear and not observation.linear:
        said_of = UNKNOWN.format(kind=observation.kind, posterior=repr(name))
        warnings.warn(said_of, BdlWarning, stacklevel=3)
        linear = False
    if linear:
        samples = of_program(name, subject, posterior, as_samples(name, posterior, 1, test))
        predictive = LinearizedPredictive(model, posterior, num_samples)
    else:
        drawn = as_samples(name, posterior, num_samples, test)
        samples = of_program(name, subject, posterior, drawn)
        predictive = Predictive(model, samples, batch_norm_data=batch_norm_data)
    for site, values in samples.flat().items():
        check_draws(f"values of the site {site!r}", ~values.isfinite())
    parts = _parts(test, predictive, observation)
    pit = None
    scores: dict[str, Any]
    if observation.is_class:
        mean, scores = score_classes(predictive, observation, parts, test.rows)
    else:
        mean, pit, scores = score_numbers(predictive, observation, parts, test.rows, units)
    said = _at(predictive, observation, test.part(kept).inputs, units, samples.num_chains)
    said = replace(said, mean=mean, pit=pit)
    scores |= parts_of_uncertainty(said) | range_of_coverage(said)
    if ood is not None:
        elsewhere = _at(predictive, observation, ood, units, samples.num_chains)
        scores |= detection(said, elsewhere)
    if isinstance(posterior, Samples):
        told = said.function
        if observation.fixed_mean:  # draws of the target are noisy, and always seem to mix
            told = log_likelihood(predictive, observation.site, test)
        scores |= convergence(told, posterior)
    loo = None
    if train is not None:
        pieces = _parts(train, predictive, observation)
        found = None
        if observation.joint:
            warnings.warn(
                f"the site {observation.site!r} is one observation of all rows, of which none can "
                "be left out: there is no elpd",
                BdlWarning,
                stacklevel=3,
            )
        else:
            found = leave_one_out(model, posterior, samples, predictive, observation.site, pieces)
        if found is not None:
            loo, kind = found
            scores |= {"elpd_loo": loo.elpd, "elpd_loo_se": loo.se, "p_loo": loo.p_loo}
            scores["high_k"], scores["loo_by"] = loo.num_bad, kind
    return replace(said, scores=scores, loo=loo)


def evaluate_draws(
    name: str,
    observation: Observation,
    draws: PredictiveDraws,
    test: Test,
    *,
    kept: Tensor,
    units: Units,
) -> Evaluation:
    """As ``evaluate``, of predictions without a posterior: what can be said from them alone.

    :param observation: the program's observed site.
    """
    draws.check_rows(name, test.rows)
    held = draws.at(kept)
    scores: dict[str, Any]
    if observation.is_class:
        p = draws.function
        if observation.kind == "Bernoulli" and p[0].numel() == test.y.numel():
            p = observation.probabilities(p)
        if p.dim() != 3 or bool(((p.sum(-1) - 1).abs() > 1e-3).any()):
            raise ValueError(
                f"posterior {name!r} must hold class probabilities (draws, points, classes) that "
                f"sum to 1, got shape {tuple(draws.function.shape)}"
            )
        mean, scores = score_draws_of_classes(p, test.y)
        said = Evaluation("classification", draws.chains, p[:, kept], mean, None)
    else:
        mean, pit, scores = score_draws_of_numbers(draws, test.y, units)
        predictions = None
        if held.targets is not None:
            predictions = held.targets * units.scale + units.shift
        function = held.function * units.scale + units.shift
        said = Evaluation("regression", draws.chains, function, mean, predictions, pit=pit)
    scores |= parts_of_uncertainty(said) | range_of_coverage(said)
    if draws.chains > 1:
        scores |= _by_chain(said.function, draws.chains)
    return replace(said, scores=scores)


def parts_of_uncertainty(said: Evaluation) -> dict[str, float]:
    """Of classes the mean entropies in nats; of numbers sds, root mean square over the points."""
    parts = said.uncertainty()
    if parts is None:
        return {}
    means = {"aleatoric": parts.aleatoric.mean(), "epistemic": parts.epistemic.mean()}
    if said.task == "regression":
        means = {key: value.sqrt() for key, value in means.items()}
    return {key: value.item() for key, value in means.items()}


def range_of_coverage(said: Evaluation) -> dict[str, float]:
    """What the coverage at 90 % lies between with probability 95 % if the predictions are right."""
    if said.predictions is None or len(said.predictions) < _LEAST_FOR_RANGE:
        return {}
    low, high = metrics.coverage_range(said.predictions).tolist()
    return {"coverage_from": low, "coverage_to": high}


def detection(known: Evaluation, elsewhere: Evaluation) -> dict[str, float]:
    """AUROC of telling the second inputs from the first by the predictive entropy or variance, and
    by its epistemic part."""
    here, there = known.uncertainty(), elsewhere.uncertainty()
    if here is None or there is None:
        return {}
    return {
        "auroc": metrics.auroc(here.total, there.total).item(),
        "auroc_epistemic": metrics.auroc(here.epistemic, there.epistemic).item(),
    }


def convergence(function: Tensor, samples: Samples) -> dict[str, float]:
    """R-hat and ESS of the function at the test points, and the number of divergences.

    Quantities that are constant, such as a probability that rounds to 1, are left out.
    """
    found: dict[str, float] = {}
    if "diverging" in samples.stats:
        found["divergences"] = int(samples.stats["diverging"].sum())
    return found | _by_chain(function, samples.num_chains)


def _by_chain(function: Tensor, chains: int) -> dict[str, float]:
    found: dict[str, float] = {}
    if len(function) // chains < _LEAST_DRAWS:
        return found
    by_chain = function.reshape(chains, len(function) // chains, -1)
    by_chain = by_chain[..., by_chain.flatten(0, 1).std(0) > 0]
    rhat, size, _ = diagnostics.convergence(by_chain)
    rhat, size = rhat[~rhat.isnan()], size[~size.isnan()]
    if rhat.numel():
        found["rhat"] = rhat.max().item()
    if size.numel():
        found["ess_min"], found["ess_median"] = size.min().item(), size.median().item()
    return found


# ----------------------------------------------------------------------------------- the parts


def _at(
    predictive: Any, observation: Observation, inputs: tuple, units: Units, chains: int
) -> Evaluation:
    """Draws of the function and, of a regression, of the target and its moments."""
    if observation.is_class:
        mean = predictive.mean(*inputs, None)[observation.site]
        p = observation.probabilities(mean)
        return Evaluation("classification", chains, p, p.mean(0), None)
    drawn = predictive(*inputs, None)
    # With the same latents; of the linear model each call has draws of its own.
    expected, noise = predictive.draw_moments(*inputs, None)[observation.site]
    function = drawn.get("f")
    if function is None or function.shape[1:2] != (len(inputs[0]),):
        function = drawn[observation.site] if observation.fixed_mean else expected
    bad = ~function.isfinite()
    check_draws("functions", bad & ~bad.all(0))  # in all draws it is the distribution's mean
    return Evaluation(
        task="regression",
        chains=chains,
        function=function * units.scale + units.shift,
        mean=expected.mean(0) * units.scale + units.shift,
        predictions=drawn[observation.site] * units.scale + units.shift,
        expected=expected * units.scale + units.shift,
        noise=noise * units.scale**2,
    )


def _parts(test: Test, predictive: Any, observation: Observation) -> list[Test]:
    """The test rows in parts that bound the memory of their draws; of a joint observation all."""
    if observation.joint:
        return [test]
    draws = predictive.num_samples
    if draws is None:
        draws = predictive.posterior.num_chains * predictive.posterior.num_draws
    size = max(1, _NUMBERS_AT_ONCE // (draws * max(1, test.y[0].numel())))
    most = stated_num_data(predictive.model)
    if most is not None:
        size = min(size, most)  # the program refuses more rows with targets
    return [test.part(slice(start, start + size)) for start in range(0, test.rows, size)]
