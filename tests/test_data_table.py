"""The table of data and methods in the documents: each cell is run, and compared with it."""

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
    return bdl.evidence.train_by_evidence(model, guide, *given, steps=2)[0].location().sum()


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
}
MEMORY = ("`evaluate`", "`compare`, `train=`", "`to_arviz`")


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        try:
            number = float(METHODS[method](DATA[data]()))
            found = "together" if method in MEMORY else "yes"
        except (TypeError, ValueError) as error:
            assert len(str(error)) > 40 and "\n" not in str(error)
            found = "no"
        else:
            assert math.isfinite(number)
    assert _read()[1][data][method] == found


def test_the_table_has_all_of_them():
    head, cells = _read()
    assert head == list(METHODS) and list(cells) == list(DATA)
