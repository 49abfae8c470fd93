"""The table of data and methods in the documents: each cell is run, and compared with it."""

import functools
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning

FILE = Path(__file__).parent.parent / "docs" / "pages" / "tasks" / "minibatches.md"
N = 8
D = {"dtype": torch.float64}
X = torch.linspace(-1, 1, 2 * N, **D).reshape(N, 2)
Y = X.sum(1) + 0.1


def _halves(*data):
    return list(zip(*(part.split(N // 2) for part in data), strict=True))


DATA = {
    "tensors `x, y`": lambda: (X, Y),
    "a tuple `(x, y)`": lambda: ((X, Y),),
    "a `DataLoader`": lambda: (DataLoader(TensorDataset(X, Y), batch_size=N // 2),),
    "a list of batches": lambda: (_halves(X, Y),),
    "a function that makes an iterator": lambda: (lambda: iter(_halves(X, Y)),),
    "batches by name, `{\"x\": x, \"y\": y}`": lambda: (
        [{"x": x, "y": y} for x, y in _halves(X, Y)],
    ),
    "an iterator": lambda: (iter(_halves(X, Y)),),
}  # fmt: skip


def _model():
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1, bias=False, **D)
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=N)


def _trained(family, *given):
    model = _model()
    guide = family(model)
    bdl.training.train(model, guide, *given, steps=2)
    return model, guide


def _posterior():
    model = _model()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(X, Y)
    return model, guide.laplace_approximation((X, Y))


def _single(given):
    """Data as one argument, for methods that take them so."""
    return given[0] if len(given) == 1 else given


def _swag(given):
    model, guide = _trained(bdl.guides.AutoSWAG, X, Y)
    bdl.training.collect_swag(model, guide, *given, snapshots=2, learning_rate=1e-4)
    return guide.snapshots.count


def _laplace(given):
    guide = bdl.guides.AutoLaplaceGGN(_model(), structure="full")
    return guide.laplace_approximation(_single(given), held_out=_single(given)).held_out.factor


def _evidence(given):
    model = _model()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    options = {"steps": 2, "rounds": 1, "between": 1}
    return bdl.evidence.train_by_evidence(model, guide, *given, **options)[0].location().sum()


def _sgmcmc(given):
    kernel, options = bdl.mcmc.SGLD(step_size=1e-5), {"num_warmup": 1, "num_samples": 2}
    samples = bdl.mcmc.sgmcmc(_model(), _single(given), kernel=kernel, **options)
    return next(iter(samples.latents.values())).sum()


def _scores(given):
    model, posterior = _posterior()
    return bdl.evaluate(model, posterior, *given, num_samples=4).scores["nlpd"]


def _compare(given):
    model, posterior = _posterior()
    return bdl.compare(
        model, {"a": posterior}, *given, train=_single(given), num_samples=4, reference=None
    ).table["nlpd"]["a"]


def _export(given):
    model, posterior = _posterior()
    return float(bdl.to_arviz(model, posterior, *given, num_samples=3)["observed_data"]["y"].sum())


def _fitted(x, y):
    net = torch.nn.Linear(2, 1, bias=False, **D)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    return model, guide.laplace_approximation((x, y))


def _loo(given):
    w = torch.randn(2, 30, 1, 2, generator=torch.Generator().manual_seed(0), **D)
    return bdl.loo(_model(), bdl.Samples({"weight": w}), *given).elpd


def _predict(given):
    model, posterior = _posterior()
    predictive = bdl.LinearizedPredictive(model, posterior, 3)
    return sum(len(mean["y"][0]) for mean in predictive.in_batches(_single(given), "mean"))


METHODS = {
    "`train`": lambda given: _trained(bdl.guides.AutoMeanField, *given)[1].location().sum(),
    "of `AutoEnsemble`": lambda given: _trained(bdl.guides.AutoEnsemble, *given)[1].locs.sum(),
    "`collect_swag`": _swag,
    "`train_by_evidence`": _evidence,
    "`laplace_approximation`, `held_out=`": _laplace,
    "`sgmcmc`": _sgmcmc,
    "`estimate_elbo`": lambda given: bdl.training.estimate_elbo(
        *_trained(bdl.guides.AutoMeanField, X, Y), *given, num_particles=16
    ),
    "`in_batches`": _predict,
    "`evaluate`": _scores,
    "`compare`, `train=`": _compare,
    "`to_arviz`": _export,
    "`k_fold`": lambda given: bdl.k_fold(_fitted, *given, folds=2, num_samples=20).elpd,
    "`loo`": _loo,
}
MEMORY = ("`evaluate`", "`compare`, `train=`", "`to_arviz`", "`k_fold`", "`loo`")


def _read():
    """The cells of the document by data and method."""
    text = FILE.read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    head = next(row for row in rows if row[0] == "data")
    cells = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows if row[0] in DATA}
    return head[1:], cells


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", DATA)
def test_a_cell_is_what_happens(data, method):
    """ "yes", read batch by batch; "together", held in memory; "no", refused in a sentence."""
    found = _called(method, DATA[data]())
    if isinstance(found, float):
        assert math.isfinite(found)
        found = "together" if method in MEMORY else "yes"
    else:
        assert len(found) > 40 and "\n" not in found
        found = "no"
    assert _read()[1][data][method] == found


def test_the_table_has_all_of_them():
    head, cells = _read()
    assert head == list(METHODS) and list(cells) == list(DATA)


def _called(method, given):
    """The number that a method gives, from the same random state; or its refusal."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        try:
            return float(torch.as_tensor(METHODS[method](given)).detach())
        except (TypeError, ValueError) as error:
            return str(error)


@functools.cache
def _of_tensors(method):
    return _called(method, (X, Y))


def _made_without_gradients():
    with torch.inference_mode():
        return X.clone(), Y.clone()


LEAF = X.clone().requires_grad_()
EQUAL = {
    "that require gradients": lambda: (LEAF, Y.clone().requires_grad_()),
    "computed from what does": lambda: (1.0 * LEAF, Y),
    "made in inference mode": _made_without_gradients,
    "that are views": lambda: (torch.stack([X, X], -1)[..., 0], torch.stack([Y, Y], 1)[:, 1]),
    "of targets (N, 1)": lambda: (X, Y[:, None]),
    "of a function, as one batch": lambda: (lambda: (X, Y),),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", EQUAL)
def test_the_same_numbers_give_the_same_result(data, method):
    assert _called(method, EQUAL[data]()) == _of_tensors(method)
    assert LEAF.grad is None


NAN = torch.where(torch.arange(N)[:, None] == 5, torch.nan, X)
REFUSED = {
    "an empty list": (lambda: ([],), "data holds no batch"),
    "a data set": (lambda: (TensorDataset(X, Y),), "whose items are single rows"),
    "NaN": (lambda: (NAN, Y), "x.* holds NaN or infinity in rows 5"),
    "NaN in the second batch": (lambda: (_halves(NAN, Y),), "x.* holds NaN or infinity in rows"),
    "sparse targets": (lambda: (X, Y.to_sparse()), "sparse"),
    "tensors without numbers": (lambda: (X.to("meta"), Y.to("meta")), "meta device"),
    "no rows": (lambda: (X[:0], Y[:0]), "no rows|at least one row"),
}
# predictions that are NaN there, and tensors of which nobody knows the device
ACCEPTED = {("NaN", "`in_batches`"), ("NaN in the second batch", "`in_batches`")}
ACCEPTED |= {("tensors without numbers", "`k_fold`")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", REFUSED)
def test_what_holds_no_data_is_refused_in_a_sentence(data, method):
    given, words = REFUSED[data]
    if (data, method) not in ACCEPTED:
        found = _called(method, given())
        assert isinstance(found, str) and re.search(words, found) and "\n" not in found


MORE = [*_halves(X, Y), *_halves(X.flip(0), Y.flip(0))]  # a pass that holds each datum twice


@pytest.mark.parametrize("count", [N - 2, 2 * N])
def test_another_number_of_data_than_is_stated_is_said_and_the_stated_one_counts(count):
    given = (X[:count], Y[:count]) if count < N else MORE
    guide = bdl.guides.AutoMAP(_model())
    laplace = bdl.guides.AutoLaplaceGGN(_model(), structure="full").prototype(X, Y)
    calls = [
        lambda: bdl.training.train(guide.program_model, guide, given, steps=4),
        lambda: bdl.training.estimate_elbo(guide.program_model, guide, given),
        lambda: laplace.laplace_approximation(given),
    ]
    warned = []
    for call in calls if count < N else calls[2:]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", BdlWarning)
            posterior = call()
        warned.append([str(w.message) for w in seen if "states" in str(w.message)])
    rows = X[:count].T @ X[:count] if count < N else X.T @ X
    expected = rows / 0.09 * N / len(X[:count]) + torch.eye(2, **D)
    inverse = posterior.precision.solve(torch.eye(2, **D))
    torch.testing.assert_close(inverse, expected.inverse())
    assert all(len(words) == 1 and f"states {N} data" in words[0] for words in warned)
