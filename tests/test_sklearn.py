"""The estimators: scikit-learn's own checks, and numbers of the package behind them."""

import pickle

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.sklearn import BayesianClassifier, BayesianRegressor

SMALL = {"hidden": (6,), "random_state": 0}
SCORED = "check_regressors_train", "check_classifiers_train"  # checks that score predictions


@parametrize_with_checks(
    [
        BayesianRegressor("map", steps=5, hidden=(8,)),
        BayesianClassifier("map", steps=5, hidden=(8,)),
    ]
)
def test_checks_of_scikit_learn(estimator, check):
    if check.func.__name__ in SCORED:
        estimator.set_params(steps=80)
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [BayesianRegressor(steps=300, hidden=(8,)), BayesianClassifier(steps=40, hidden=(8,))]
)
def test_checks_of_scikit_learn_with_laplace(estimator, check):
    check(estimator)


def data(seed=0, rows=60):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 3))
    return x, 50.0 + 10.0 * (x @ [1.0, -2.0, 0.5]) + 3.0 * generator.normal(size=rows)


def test_a_linear_network_is_bayesian_linear_regression():
    """At the noise's mode the Laplace approximation is the exact posterior, in the data's units;
    the uncertain noise adds to the variance by less than a tenth."""
    x, y = data()
    linear = BayesianRegressor(
        "laplace-full", network=lambda inputs, outputs: nn.Linear(inputs, outputs),
        prior=bdl.priors.Normal(1.0), steps=400, random_state=0,
    ).fit(x, y)  # fmt: skip
    noise = linear.posterior_.median()["noise"].item()
    design = np.hstack([(x - x.mean(0)) / x.std(0), np.ones((len(x), 1))])
    covariance = np.linalg.inv(design.T @ design / noise**2 + np.eye(4))
    weights = covariance @ design.T @ ((y - y.mean()) / y.std()) / noise**2
    variance = np.einsum("ni,ij,nj->n", design, covariance, design) + noise**2
    mean, sd = linear.predict(x, return_std=True)
    np.testing.assert_allclose(mean, design @ weights * y.std() + y.mean(), atol=1e-2)
    ratio = sd**2 / (variance * y.var())
    assert ((ratio > 0.999) & (ratio < 1.1)).all()


@pytest.mark.parametrize("likelihood", ["normal", "heteroscedastic", "student_t"])
def test_draws_agree_with_moments(likelihood):
    x, y = data()
    network = BayesianRegressor("mean-field", likelihood=likelihood, steps=60, **SMALL).fit(x, y)
    mean, sd = network.predict(x[:5], return_std=True)
    draws = network.sample_y(x[:5], 4000)
    assert draws.shape == (5, 4000)
    # moments are over 100 draws of the weights: a standard error of a tenth of an sd
    assert (np.abs(draws.mean(1) - mean) < 0.4 * sd).all()
    low, high = network.predict_quantiles(x[:5], (0.1, 0.9), 4000).T
    inside = ((draws > low[:, None]) & (draws < high[:, None])).mean()
    assert abs(inside - 0.8) < 0.03


def test_targets_are_drawn_from_all_chains():
    """Four chains marked by their offsets, 0, 100, 200 and 300 sds: a quarter of the draws each."""
    x, y = data()
    options = {"chains": 4, "warmup": 5, "draws": 10, "max_tree_depth": 2}
    chains = BayesianRegressor("nuts", options=options, **SMALL).fit(x, y)
    latents = {name: value.clone() for name, value in chains.posterior_.latents.items()}
    bias = next(name for name, value in latents.items() if value.shape[2:] == (1,))
    latents[bias] += 100.0 * torch.arange(4).reshape(4, 1, 1)
    chains.posterior_ = bdl.Samples(latents)
    draws = (chains.sample_y(x[:1], 2000)[0] - chains.mean_) / chains.sd_
    shares = np.histogram(draws, [-50, 50, 150, 250, 350])[0] / 2000
    np.testing.assert_allclose(shares, 0.25, atol=0.04)
    assert len(np.unique(np.round(draws / 100) * 100)) == 4
    low, high = (chains.predict_quantiles(x[:1], (0.05, 0.95))[0] - chains.mean_) / chains.sd_
    assert low < 50 and high > 250


def test_probabilities_of_a_laplace_approximation_are_in_closed_form():
    x, y = data()
    classifier = BayesianClassifier("laplace", steps=50, **SMALL).fit(x, y > y.mean())
    predictive = bdl.LinearizedPredictive(classifier.model_, classifier.posterior_)
    scaled = torch.from_numpy(classifier.scaler_.transform(x))
    exact = predictive.probabilities(scaled)["y"].numpy()
    np.testing.assert_allclose(classifier.predict_proba(x), exact, rtol=1e-9)


CHAINS = {"chains": 1, "warmup": 10, "draws": 10, "max_tree_depth": 3}


@pytest.mark.parametrize("posterior", ["laplace", "ensemble", "nuts"])
def test_pickles_and_copies_predict_alike(posterior):
    x, y = data(rows=30)
    network = BayesianRegressor(posterior, steps=30, options=CHAINS, **SMALL).fit(x, y)
    again = pickle.loads(pickle.dumps(network))
    np.testing.assert_allclose(again.predict(x), network.predict(x), rtol=1e-10)
    np.testing.assert_allclose(again.sample_y(x, 25), network.sample_y(x, 25), rtol=1e-10)
    assert network.sample_y(x, 25).shape == (30, 25)  # more than a chain's 10 draws
    np.testing.assert_allclose(clone(network).fit(x, y).predict(x), network.predict(x), rtol=1e-6)


def test_pipelines_searches_and_frames():
    frame, labels = load_iris(return_X_y=True, as_frame=True)
    names = np.array(["a", "b", "c"])[labels]
    search = GridSearchCV(
        make_pipeline(PolynomialFeatures(1), BayesianClassifier("map", steps=100, **SMALL)),
        {"bayesianclassifier__hidden": [(3,), (6,)]}, cv=2,
    ).fit(frame, names)  # fmt: skip
    assert search.best_score_ > 0.9
    alone = BayesianClassifier("map", steps=100, **SMALL).fit(frame, names)
    assert list(alone.feature_names_in_) == list(frame.columns)
    assert alone.predict_proba(frame).shape == (150, 3)
    assert set(alone.predict(frame)) == {"a", "b", "c"}


def test_the_posterior_is_that_of_the_package():
    x, y = data()
    network = BayesianRegressor("laplace", steps=100, **SMALL).fit(x, y)
    assert isinstance(network.posterior_, bdl.guides.LaplaceGuide)
    z = torch.from_numpy((x - x.mean(0)) / x.std(0))
    moments = bdl.LinearizedPredictive(network.model_, network.posterior_).parameter_moments(z)["y"]
    expected = moments.mean["loc"].numpy() * y.std() + y.mean()
    np.testing.assert_allclose(network.predict(x), expected, rtol=1e-8)
    assert network.evidence_ == pytest.approx(
        bdl.evidence.log_marginal_likelihood(network.posterior_).item()
    )


def test_the_users_network_stays_as_it_is():
    x, y = data()
    own = nn.Linear(3, 1)
    before = own.weight.detach().clone()
    regressor = BayesianRegressor("map", network=lambda inputs, outputs: own, steps=3).fit(x, y)
    assert own.weight.dtype == torch.float32 and torch.equal(own.weight, before)
    assert regressor.model_.network.network is not own


def test_the_default_dtype_does_not_matter():
    x, y = data()
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(BayesianRegressor("map", steps=20, **SMALL).fit(x, y).predict(x))
        finally:
            torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(*found)


def test_without_gradients_it_fits_all_the_same():
    x, y = data()
    expected = BayesianRegressor("laplace", steps=20, **SMALL).fit(x, y).predict(x)
    with torch.no_grad():
        found = BayesianRegressor("laplace", steps=20, **SMALL).fit(x, y).predict(x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("unit", [1e200, 1e-200])
def test_targets_in_any_unit(unit):
    x, y = data()
    small, large = (
        BayesianRegressor("map", steps=50, **SMALL).fit(x, factor * y).predict(x, return_std=True)
        for factor in (1.0, unit)
    )
    np.testing.assert_allclose(large, unit * np.array(small), rtol=1e-6)


COUNTS = (
    "poisson",
    "negative_binomial",
    "zero_inflated_poisson",
    "zero_inflated_negative_binomial",
    "hurdle_poisson",
    "hurdle_negative_binomial",
)


@pytest.mark.parametrize("likelihood", COUNTS)
def test_counts_are_not_standardized_and_have_the_moments_of_their_draws(likelihood):
    x, y = data()
    counts = np.random.default_rng(0).poisson(np.exp(1.0 + 0.3 * y / y.std()))
    network = BayesianRegressor("mean-field", likelihood=likelihood, steps=60, **SMALL)
    mean, sd = network.fit(x, counts).predict(x, return_std=True)
    draws = network.sample_y(x, 4000)
    assert (draws == np.round(draws)).all() and (draws >= 0).all()
    np.testing.assert_allclose(draws.mean(1), mean, rtol=0.2)
    np.testing.assert_allclose(draws.std(1), sd, rtol=0.3)
    with pytest.raises(ValueError, match="needs counts"):
        network.fit(x, counts - 50)


def test_shares_are_not_standardized_and_have_the_moments_of_their_draws():
    x, y = data()
    shares = 1 / (1 + np.exp(-y / y.std()))
    network = BayesianRegressor("mean-field", likelihood="beta", steps=300, **SMALL)
    mean, sd = network.fit(x, shares).predict(x, return_std=True)
    draws = network.sample_y(x, 4000)
    assert ((draws > 0) & (draws < 1)).all() and np.corrcoef(mean, shares)[0, 1] > 0.8
    np.testing.assert_allclose(draws.mean(1), mean, rtol=0.1)
    np.testing.assert_allclose(draws.std(1), sd, rtol=0.2)
    with pytest.raises(ValueError, match="needs shares between 0 and 1"):
        network.fit(x, np.round(shares))


@pytest.mark.parametrize("law", ["normal", "lognormal", "weibull"])
def test_censored_targets(law):
    """Right-censored values count as larger: predictions lie above those that take limits for
    values, and in other units they are the same."""
    x, y = data()
    y = y / y.std() if law == "normal" else np.exp(y / y.std())
    limit = np.quantile(y, 0.6)
    seen = np.minimum(y, limit), (y < limit).astype(float)
    options = {"likelihood": f"censored_{law}", "steps": 300, **SMALL}
    network = BayesianRegressor("mean-field", **options).fit(x, np.stack(seen, 1))
    found = network.predict(x)
    alike = BayesianRegressor("mean-field", **options).fit(
        x, np.stack([seen[0], np.ones(len(y))], 1)
    )
    cut = seen[1] == 0
    assert found[cut].mean() > alike.predict(x)[cut].mean() * 1.05
    three = np.stack([1000 * seen[0], seen[1], np.full(len(y), 7.0)], 1)
    large = BayesianRegressor("mean-field", **options).fit(x, three)
    np.testing.assert_allclose(large.predict(x), 1000 * found, rtol=1e-6)
    for wrong in (y[:, None], np.stack([seen[0], seen[1] + 3], 1)):
        with pytest.raises(ValueError, match=r"needs targets \(N, 2\)"):
            network.fit(x, wrong)
    if law != "normal":
        with pytest.raises(ValueError, match="needs values above 0"):
            network.fit(x, np.stack([seen[0] - limit, seen[1]], 1))


@pytest.mark.parametrize("posterior", ["laplace", "mean-field"])
def test_ordered_labels(posterior):
    x, y = data()
    grades = np.digitize(y, np.quantile(y, [1 / 3, 2 / 3])) - 1.0
    network = BayesianClassifier(posterior, likelihood="ordinal", steps=300, **SMALL).fit(x, grades)
    p = network.predict_proba(x)
    np.testing.assert_allclose(p.sum(1), 1.0)
    assert network.classes_.tolist() == [-1.0, 0.0, 1.0] and network.score(x, grades) > 0.5
    with pytest.raises(ValueError, match="needs labels that are numbers"):
        network.fit(x, np.where(grades > 0, "high", "low"))
    with pytest.raises(ValueError, match="must be one of 'categorical', 'ordinal', got 'normal'"):
        BayesianClassifier(likelihood="normal").fit(x, grades)


REFUSED = {
    "likelihood": {"likelihood": "loud"},
    "did you mean 'laplace'": {"posterior": "laplac"},
    r"hidden must be the units of each hidden layer, as in \(50,\), got 5": {"hidden": 5},
    "hidden must be at least 1": {"hidden": (0,)},
    "activation must be one of 'tanh', .*'gelu'": {"activation": "gelu"},
    "options has no 'chain': did you mean 'chains'": {"options": {"chain": 1}},
    "options has no 'seed'": {"options": {"seed": 1}},
    "steps must be at least 1, got 0": {"steps": 0},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    with pytest.raises(ValueError, match=words):
        BayesianRegressor(**{"posterior": "map", "steps": 3} | REFUSED[words]).fit(*data(rows=10))


def test_a_single_class_and_features_that_overflow():
    x, y = data(rows=10)
    with pytest.raises(ValueError, match="the single class cat"):
        BayesianClassifier("map").fit(x, np.full(10, "cat"))
    with pytest.raises(ValueError, match="features' squares overflow"):
        BayesianRegressor("map").fit(1e200 * x, y)


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_two_jobs_find_what_one_finds(backend):
    x, y = data(rows=30)
    regressor = BayesianRegressor("map", steps=20, **SMALL)
    search = {"param_grid": {"hidden": [(2,), (4,)]}, "cv": 2}
    labels = (y > 50).astype(int)
    classifier = BayesianClassifier("map", steps=20, **SMALL)
    scores, best = [], []
    for jobs in (1, 2):
        with joblib.parallel_config(backend=backend):
            scores.append(cross_val_score(regressor, x, y, cv=3, n_jobs=jobs))
            found = GridSearchCV(classifier, **search, n_jobs=jobs).fit(x, labels)
        best.append(found.cv_results_["mean_test_score"])
    np.testing.assert_array_equal(*scores)
    np.testing.assert_array_equal(*best)
    assert np.isfinite(scores).all() and np.isfinite(best).all()
