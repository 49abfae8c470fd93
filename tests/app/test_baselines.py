"""Baselines of other libraries: their densities by hand, and their rows, which are not judged."""

import numpy as np
import pytest
import torch
from helpers.comparisons import GRID, line, weights
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import PoissonRegressor, RidgeCV
from sklearn.model_selection import KFold, cross_val_predict
from torch.distributions import Normal, Poisson

from pyro_bdl import PredictiveDraws
from pyro_bdl.app import baselines
from pyro_bdl.comparison.evaluate import evaluate
from pyro_bdl.comparison.table import compare_evaluations
from pyro_bdl.data.dataset import prepare

X = np.random.default_rng(0).normal(size=(60, 2))


def data_of(y, task):
    return prepare(X, y, feature_names=("a", "b"), target_name="y", task=task)


def test_a_prediction_gets_the_variance_of_its_errors_on_left_out_folds():
    data = data_of(X[:, 0] + np.sin(X[:, 1]), "regression")
    found = baselines.predictions("sklearn-linear", data, seed=3)
    x, y = data.x_train.numpy(), data.y_train.numpy()
    model = RidgeCV(np.logspace(-3, 3, 13))
    errors = cross_val_predict(model, x, y, cv=KFold(5, shuffle=True, random_state=3)) - y
    mean = torch.from_numpy(model.fit(x, y).predict(data.x_test.numpy())).float()
    expected = Normal(mean, float(np.sqrt(np.mean(errors**2)))).log_prob(data.y_test)
    torch.testing.assert_close(found.log_likelihood[0], expected)
    torch.testing.assert_close(found.targets.mean(0), mean, rtol=1e-4, atol=1e-5)
    assert found.targets.std(0).mean() == pytest.approx(np.sqrt(np.mean(errors**2)), rel=0.02)


def test_no_class_and_no_rate_is_impossible():
    """(N p + mean of y) / (N + 1)."""
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    data = data_of(labels, "classification")
    found = baselines.predictions("sklearn-forest", data, seed=1).function[0]
    forest = RandomForestClassifier(random_state=1).fit(data.x_train, data.y_train)
    p, shares = forest.predict_proba(data.x_test), np.bincount(data.y_train) / len(data.y_train)
    rows = len(data.y_train)
    np.testing.assert_allclose(found, (rows * p + shares) / (rows + 1), rtol=1e-5)
    assert found.min() > 0 == p.min()
    data = data_of(np.random.default_rng(1).poisson(np.exp(X[:, 0])), "count")
    counts = baselines.predictions("sklearn-linear", data, seed=0)
    glm = PoissonRegressor(alpha=0.01, max_iter=1000).fit(data.x_train, data.y_train)
    rate = (rows * glm.predict(data.x_test) + data.y_train.mean().item()) / (rows + 1)
    torch.testing.assert_close(counts.function[0].exp(), torch.from_numpy(rate).float())
    expected = Poisson(torch.from_numpy(rate)).log_prob(data.y_test)
    torch.testing.assert_close(counts.log_likelihood[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_tabpfn_runs_with_weights_that_are_there_and_is_refused_without(tmp_path, monkeypatch):
    data = data_of(X[:, 0], "regression")
    monkeypatch.setenv("TABPFN_MODEL_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="needs its package"):
        baselines.predictions("tabpfn", data, seed=0)
    (tmp_path / "tabpfn.py").write_text(
        "from sklearn.linear_model import Ridge\n"
        "class TabPFNRegressor(Ridge):\n"
        "    def __init__(self, model_path=None, random_state=None):\n"
        "        super().__init__(alpha=1e-9)\n"
        "        self.model_path, self.random_state = model_path, random_state\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="weights of its regressor"):
        baselines.predictions("tabpfn", data, seed=0)
    (tmp_path / "tabpfn-v2-regressor.ckpt").touch()
    found = baselines.predictions("tabpfn", data, seed=0)
    torch.testing.assert_close(found.function[0], data.y_test, rtol=1e-3, atol=1e-3)


def test_a_baseline_has_scores_and_no_judgment():
    y = GRID[:, 0]
    mean = (0.5 + y).expand(20, 9)
    draws = PredictiveDraws(mean, mean, Normal(mean, 1.0).log_prob(y))
    a, b, other = (evaluate(line, q, GRID, y) for q in (weights(2), weights(2, seed=1), draws))
    alone = compare_evaluations({"a": a, "b": b}, "a")
    found = compare_evaluations({"a": a, "b": b}, "a", baselines={"other": (other, "a straw man")})
    row = found.numbers()["other"]
    assert row["rmse"] == pytest.approx(0.5) and row["nlpd_diff_se"] > 0
    assert row["group"] == "baseline" and "wasserstein" not in row
    assert found.summary == alone.summary and found.judgments == alone.judgments
    assert found.verdicts["other"] == "a straw man" and list(found.table.index)[-2] == "other"


def test_the_command_shows_them_as_baselines(tiny, tmp_path, rows_of):
    code, printed, err = tiny("--baselines")
    assert code == 0 and "tabpfn is left out: TabPFN needs" in err
    assert "sklearn-forest" in printed and "There is only map" in printed
    rows = rows_of(tmp_path / "out")
    names = ["sklearn-linear", "sklearn-forest", "sklearn-boosting"]
    assert list(rows) == ["map", *names]
    for name in names:
        assert float(rows[name]["rmse"]) > 0 and rows[name]["group"] == "baseline"
        assert float(rows[name]["nlpd_se"]) > 0 and "not judged" in rows[name]["verdict"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Baselines of other libraries, not judged" in page and page.count("var(--8a8f98") >= 3
