"""What comparisons refuse, and in which words."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import GRID, labels, line, weights

import pyro_bdl as bdl
from pyro_bdl import PredictiveDraws, Samples, compare

Y, CLASSES = GRID[:, 0], torch.arange(9) % 2
F = torch.randn(100, 9)


def nothing_observed(x, y=None):
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def fold(rows=9, y=Y):
    return bdl.KFold(1.0, 1.0, torch.ones(rows), torch.zeros(rows, dtype=torch.int64), y)


def compared(program=line, y=Y, exact=None, **change):
    options = {"posteriors": {"a": weights(2)}, "reference": None} | change
    posteriors = options.pop("posteriors")
    if exact is not None:
        posteriors["exact"] = PredictiveDraws(exact)
    return compare(program, posteriors, GRID, y, **options)


OF_COMPARE = [
    ({"posteriors": {}}, "posteriors is empty"),
    ({"reference": "c"}, r"reference 'c' is not among the posteriors \('a'\)"),
    ({"costs": {"c": bdl.Costs()}}, "costs 'c' is not among"),
    ({"y": Y[:4]}, "same number of rows"),
    ({"y": torch.zeros(9, 3)}, r"y_test has shape \(9, 3\), but the program predicts \(9,\)"),
    ({"y": Y * torch.nan}, "y_test holds NaN"),
    ({"y": None}, "y_test must be a tensor, got NoneType"),
    (
        {"posteriors": {"a": Samples({"v": torch.randn(2, 5, 2)})}},
        "'a': the posterior is of another program .no value for: 'w'; .* not have: 'v'",
    ),
    ({"posteriors": {"a": 3.0}}, "posterior 'a': a posterior is a guide or Samples"),
    ({"posteriors": {"a": Samples({"w": torch.ones(1, 1, 2)})}}, "'a': it has one draw"),
    ({"num_samples": 1}, "num_samples must be at least 2"),
    ({"units": (0.0, 1.0)}, "units must be .scale, shift. with a positive"),
    ({"train": GRID}, "train must be a tuple of tensors"),
    ({"train": (GRID,)}, "train must hold inputs and, last, targets.*got 1"),
    ({"train": (GRID, None)}, "y_train must be a tensor"),
    ({"train": (GRID, Y[:3])}, "train data must have the same number of rows"),
    ({"ood": GRID * torch.nan}, "ood holds NaN"),
    ({"ood": (GRID, GRID)}, "ood must hold inputs without targets"),
    ({"program": nothing_observed}, "a program with an observed site: pass the targets last"),
    ({"exact": torch.zeros(5, 8)}, "at 8 points, but .* 9 test"),
    ({"exact": torch.zeros(5, 9, 2)}, "y_test has shape"),
    (
        {"exact": torch.ones(5, 9, 2), "program": labels(lambda f: dist.Categorical(f.exp()))}
        | {"y": CLASSES},
        "'exact': it must hold class probabilities",
    ),
    ({"posteriors": {"a": (weights(2),)}}, r"\(program, posterior\)"),
    ({"left_out": {"typo": fold()}}, "left_out 'typo' is not among the posteriors"),
    (
        {"left_out": {"a": fold(7, Y[:7])}, "train": (GRID, Y)},
        "cross-validation of 7 rows, but train has 9",
    ),
    ({"left_out": {"a": fold(y=Y + 1)}, "train": (GRID, Y)}, "cross-validation of other targets"),
]
REFUSALS = [
    *((lambda change=change: compared(**change), words) for change, words in OF_COMPARE),
    (lambda: bdl.compare_evaluations({}), "give at least one"),
    (
        lambda: bdl.compare_evaluations({"a": bdl.evaluate(line, weights(2), GRID, Y)}, "nuts"),
        "'nuts' is not among the evaluations",
    ),
    (
        lambda: bdl.k_fold(lambda x, y: (line, weights(2)), GRID, Y, folds=10),
        "folds must be from 2 to 9",
    ),
    (
        lambda: bdl.k_fold(lambda x, y: (line, weights(2)), GRID, Y, folds=[2001, 2002]),
        "folds needs a label for each of 9 rows",
    ),
    (lambda: PredictiveDraws(F[:1]), "at least 2 draws"),
    (lambda: PredictiveDraws(F, F[:9]), "targets has .draws, points. .9, 9., but function"),
    (lambda: PredictiveDraws(F * torch.inf), "function holds NaN or infinity"),
    (lambda: PredictiveDraws(F, chains=3), "chains=3 does not divide the 100 draws"),
]


@pytest.mark.parametrize("call, words", REFUSALS)
def test_refusals(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
