"""Baselines of scikit-learn, and TabPFN where its weights are there, as predictive draws."""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import logit
from torch import Tensor
from torch.distributions import Normal, Poisson

from pyro_bdl.comparison.observe import PredictiveDraws
from pyro_bdl.data.dataset import Dataset

NAMES = {
    "sklearn-linear": "a linear model of scikit-learn",
    "sklearn-forest": "a random forest of scikit-learn",
    "sklearn-boosting": "gradient boosting of scikit-learn",
    "tabpfn": "TabPFN",
}
_DRAWS, _FOLDS = 1000, 5
_DENSITY = {
    "regression": "a Normal around its prediction, whose variance is the mean square of its "
    f"errors on {_FOLDS} left-out folds of the training rows",
    "classification": "its class probabilities, with the shares of the classes as one more row",
    "share": "a Normal of the logit around its prediction of it, with a variance from "
    f"{_FOLDS} left-out folds",
    "count": "a Poisson at its rate, with the mean count as one more row",
}


def in_words(name: str, task: str) -> str:
    """A baseline in words, and how its density is made."""
    return f"{NAMES[name]}, not judged: {_DENSITY[task]}"


def predictions(name: str, data: Dataset, seed: int) -> PredictiveDraws:
    """Fit a baseline to the training rows and predict the test rows, in the program's units.

    The function has no spread. Draws of a target are in pairs around the mean, so that their mean
    is exact. Class probabilities and rates p become (N p + mean of y) / (N + 1), of N training
    rows: none is zero.

    :param name: one of ``NAMES``.
    :raises ValueError: for TabPFN without its package or weights.
    """
    x, y, x_test = (part.cpu().numpy() for part in (data.x_train, data.y_train, data.x_test))
    rows, dtype = len(y), data.x_train.dtype
    if data.task == "share":
        y = logit(y.astype(float))
    random = torch.Generator(device="cpu").manual_seed(seed)
    model = _model(name, data.task, seed)

    def draws(values: Any, count: int = _DRAWS) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device="cpu").expand(count, *np.shape(values))

    if data.task == "classification":
        shares = np.eye(len(data.class_names))[y].mean(0)
        p = np.zeros((len(x_test), len(shares)))
        model.fit(x, y)
        p[:, model.classes_] = model.predict_proba(x_test)
        return PredictiveDraws(draws((rows * p + shares) / (rows + 1)))
    y_test = data.y_test.cpu().to(dtype)
    if data.task == "count":
        rate = draws((rows * model.fit(x, y).predict(x_test) + y.mean()) / (rows + 1))
        counts = torch.poisson(rate, generator=random)
        return PredictiveDraws(rate.log(), counts, Poisson(rate).log_prob(y_test))
    from sklearn.model_selection import KFold, cross_val_predict

    folds = KFold(_FOLDS, shuffle=True, random_state=seed)
    sd = float(np.sqrt(np.mean((cross_val_predict(model, x, y, cv=folds) - y) ** 2)))
    mean = draws(model.fit(x, y).predict(x_test))
    noise = sd * torch.randn(_DRAWS // 2, len(x_test), dtype=dtype, device="cpu", generator=random)
    targets, law = mean + torch.cat([noise, -noise]), Normal(mean, sd)
    if data.task == "share":
        density = law.log_prob(y_test.logit()) - (y_test * (1 - y_test)).log()
        return PredictiveDraws(mean, targets.sigmoid(), density)
    return PredictiveDraws(mean, targets, law.log_prob(y_test))


def _model(name: str, task: str, seed: int) -> Any:
    """The estimator of a baseline."""
    from sklearn import ensemble, linear_model

    kind = "Classifier" if task == "classification" else "Regressor"
    if name == "tabpfn":
        return _tabpfn(kind, seed)
    if name == "sklearn-forest":
        return getattr(ensemble, f"RandomForest{kind}")(random_state=seed)
    if name == "sklearn-boosting":
        loss = {"loss": "poisson"} if task == "count" else {}
        return getattr(ensemble, f"HistGradientBoosting{kind}")(random_state=seed, **loss)
    if task == "classification":
        return linear_model.LogisticRegression(max_iter=1000)
    if task == "count":
        return linear_model.PoissonRegressor(alpha=0.01, max_iter=1000)
    return linear_model.RidgeCV(np.logspace(-3, 3, 13))


def _tabpfn(kind: str, seed: int) -> Any:
    """TabPFN with weights that are on this machine: nothing is downloaded."""
    folder = Path(os.environ.get("TABPFN_MODEL_CACHE_DIR", Path.home() / ".cache" / "tabpfn"))
    weights = sorted(folder.glob(f"*{kind.lower()}*.ckpt"))
    if find_spec("tabpfn") is None or not weights:
        raise ValueError(
            f"TabPFN needs its package (pip install tabpfn) and the weights of its {kind.lower()} "
            f"in {folder}, or in the folder that TABPFN_MODEL_CACHE_DIR names"
        )
    tabpfn = importlib.import_module("tabpfn")
    return getattr(tabpfn, f"TabPFN{kind}")(model_path=str(weights[-1]), random_state=seed)
