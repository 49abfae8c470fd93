"""Data that masks leave out of the likelihood count nowhere in a comparison."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import pyro_bdl as bdl
from pyro_bdl.comparison import leave_one_out
from pyro_bdl.comparison.distances import ALL_DISTANCES
from pyro_bdl.comparison.kind import observed
from pyro_bdl.comparison.leave_one_out import LEFT_OUT, k_fold
from pyro_bdl.comparison.metric import of_task
from pyro_bdl.comparison.scores import SCORES

N, DRAWS, FILLER = 40, 400, 77.0
RANDOM = {"crps", "coverage", "coverage_50", "coverage_95", "coverage_from", "coverage_to", "pit"}


def _noise(f, seen, y, wrap, event=0):
    """The statement of Normal data with the mask that ``wrap`` writes."""
    normal = dist.Normal(f, 0.5).to_event(event)
    return wrap(lambda d: pyro.sample("y", d, obs=y), normal, seen)


def _around(statement, distribution, seen):
    with poutine.mask(mask=seen):
        return statement(distribution)


def _of_distribution(statement, distribution, seen):
    return statement(distribution.mask(seen))


def _both(statement, distribution, seen):
    half = torch.arange(len(seen)) % 2 == 0
    with poutine.mask(mask=seen | half[: len(seen)]):
        return statement(distribution.mask(seen | ~half[: len(seen)]))


def _inside_event(statement, distribution, seen):
    base = distribution.base_dist
    cells = seen[:, None].expand(base.batch_shape)
    return statement(base.mask(cells).to_event(1))


def _unmasked(statement, distribution, seen):
    return statement(distribution)


def numbers(wrap):
    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return _noise(x @ w, seen, y, wrap)

    return model, "regression"


def several_numbers(wrap):
    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        f = torch.stack([x @ w, x @ w.flip(0)], -1)
        with pyro.plate("data", len(x)):
            return _noise(f, seen, y, wrap, event=1)

    return model, "regression"


def two_sites(wrap):
    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        y = (None, None) if y is None else y.unbind(-1)
        with pyro.plate("data", len(x)):
            wrap(lambda d: pyro.sample("a", d, obs=y[0]), dist.Normal(x @ w, 0.5), seen)
            wrap(lambda d: pyro.sample("b", d, obs=y[1]), dist.Normal(x @ w.flip(0), 0.3), seen)

    return model, "regression"


def classes(wrap):
    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        logits = torch.stack([x @ w, x @ w.flip(0), torch.zeros(len(x))], -1)
        with pyro.plate("data", len(x)):
            d = dist.Categorical(logits=logits)
            return wrap(lambda d: pyro.sample("y", d, obs=y), d, seen)

    return model, "classification"


def several_labels(wrap):
    def model(x, seen, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        logits = torch.stack([x @ w, x @ w.flip(0)], -1)
        with pyro.plate("data", len(x)):
            d = dist.Bernoulli(logits=logits).to_event(1)
            return wrap(lambda d: pyro.sample("y", d, obs=y), d, seen)

    return model, "classification"


# Every kind of mask with one kind of program, and every kind of program with two masks at once.
CASES = [
    *((numbers, wrap) for wrap in (_around, _of_distribution, _both)),
    *((program, _both) for program in (several_numbers, two_sites, classes, several_labels)),
    *((program, _inside_event) for program in (several_numbers, several_labels)),
]


def _data(program):
    torch.manual_seed(0)
    x = torch.randn(N, 2)
    seen = torch.rand(N) < 0.6
    seen[14:21] = False
    f = x @ torch.tensor([1.0, -1.0])
    if program in (several_numbers, two_sites):
        y = torch.stack([f, -f], -1) + 0.5 * torch.randn(N, 2)
        return x, seen, torch.where(seen[:, None], y, torch.tensor(FILLER))
    if program is numbers:
        return x, seen, torch.where(seen, f + 0.5 * torch.randn(N), torch.tensor(FILLER))
    if program is classes:
        return x, seen, torch.where(seen, (f > 0).long(), torch.tensor(2))
    y = torch.stack([f > 0, f < 0], -1) ^ (torch.rand(N, 2) < 0.1)
    return x, seen, torch.where(seen[:, None], y, torch.tensor(False)).float()


def _draws(center=(1.0, -1.0), sd=0.3):
    generator = torch.Generator().manual_seed(1)
    w = torch.tensor(center) + sd * torch.randn(DRAWS, 2, generator=generator)
    return bdl.Samples({"w": w[None]})


def _table(program, wrap, data):
    model, _ = program(wrap)
    posteriors = {"a": _draws(), "b": _draws((0.8, -1.0), 0.2)}
    return bdl.compare(model, posteriors, *data, reference="a", train=data, progress=False)


@pytest.mark.parametrize(
    ("program", "wrap"), CASES, ids=[f"{p.__name__}-{w.__name__}" for p, w in CASES]
)
def test_every_number_is_that_of_the_rows_that_were_seen(program, wrap, monkeypatch):
    if wrap is _both:  # several batches, of which one has no row that was seen
        monkeypatch.setattr("pyro_bdl.comparison.kind._DRAWS_AT_ONCE", 8 * DRAWS * 7)
    data = _data(program)
    seen = data[1]
    found = _table(program, wrap, data)
    expected = _table(program, _unmasked, tuple(part[seen] for part in data))
    task = program(wrap)[1]
    keys = [m.key for m in of_task((*SCORES, *LEFT_OUT, *ALL_DISTANCES), task)]
    known = [k for k in dict.fromkeys(keys) if k in expected.table.columns]
    assert {"nlpd", "loo_by", "wasserstein", "nlpd_calibrated", "temperature"} <= set(known)
    for name in expected.table.index:
        for key in [k for k in (*known, *(f"{k}_se" for k in known)) if k in found.table]:
            ours, theirs = found.table.loc[name, key], expected.table.loc[name, key]
            if isinstance(theirs, str):
                assert ours == theirs
                continue
            tolerance = 0.06 if key.removesuffix("_se") in RANDOM else 1e-5
            tolerance = 0.15 if key == "pit_se" else tolerance  # of few groups of random numbers
            assert math.isnan(theirs) == math.isnan(ours), (name, key)
            if not math.isnan(theirs):
                assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance), (name, key)
    per_row = data[2][0].numel()
    assert found.table.attrs["seen"] == (int(seen.sum()) * per_row, N * per_row)
    assert "seen" not in expected.table.attrs
    assert any("Masks leave out" in note for note in found.notes)
    for name, evaluation in found.evaluations.items():
        other = expected.evaluations[name]
        assert evaluation.rows == int(seen.sum())
        assert evaluation.places.tolist() == seen.nonzero().flatten().tolist()
        torch.testing.assert_close(evaluation.y, other.y)
        torch.testing.assert_close(evaluation.loo.pointwise, other.loo.pointwise)
        torch.testing.assert_close(evaluation.loo.se, other.loo.se)


# Single numbers of a target


def _some_numbers(x, seen, y=None):
    """Targets of which single numbers are missing; rows 0 to 9 lack both."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = torch.stack([x @ w, x @ w.flip(0)], -1)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.5).mask(seen).to_event(1), obs=y)


def _in_two_plates(x, seen, y=None):
    """The same, with a plate for the numbers and the mask around the statement."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = torch.stack([x @ w, x @ w.flip(0)], -1)
    with pyro.plate("data", len(x)), pyro.plate("numbers", 2), poutine.mask(mask=seen.T):
        return pyro.sample("y", dist.Normal(f.T, 0.5), obs=None if y is None else y.T)


def _partly():
    torch.manual_seed(0)
    x, seen = torch.randn(N, 2), torch.rand(N, 2) < 0.6
    seen[:10] = False
    f = x @ torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    return x, seen, torch.where(seen, f + 0.5 * torch.randn(N, 2), torch.tensor(FILLER))


def _by_hand(x, seen, y):
    """Scores of the numbers that were seen, from the draws of their means."""
    w = _draws().flat()["w"]
    f = torch.stack([w @ x.T, w.flip(1) @ x.T], -1)
    cells = torch.where(seen, dist.Normal(f, 0.5).log_prob(y), torch.tensor(0.0)).double()
    rows = seen.any(1)
    mean, variance = f.double().mean(0), 0.25 + f.double().var(0, correction=0)
    ratios = ((y - mean).square() / variance)[seen]
    density = cells.sum(-1)[:, rows].logsumexp(0) - math.log(DRAWS)
    normal = dist.Normal(mean, variance.sqrt()).log_prob(y.double())[seen]
    return {
        "rmse": (y - mean)[seen].square().mean().sqrt(),
        "nlpd": -density.mean(),
        "nlpd over points": density.std() / rows.sum().sqrt(),
        "nlpd_normal": -normal.mean(),
        "temperature": ratios.mean(),
        "expected_nll": -cells.sum(-1)[:, rows].mean(),
    }


def test_of_a_target_the_numbers_that_were_seen_count():
    x, seen, y = _partly()
    found = bdl.evaluate(_some_numbers, _draws(), x, seen, y, train=(x, seen, y), progress=False)
    numbers = found.scores | {"nlpd over points": found.points["nlpd"].over_points}
    for key, value in _by_hand(x, seen, y).items():
        assert numbers[key] == pytest.approx(float(value), rel=1e-5), key
    assert found.scores["coverage"] > 0.75
    assert found.scores["crps"] < 0.5
    assert found.seen == (int(seen.sum()), 2 * N)
    assert found.rows == len(found.loo.pointwise) == int(seen.any(1).sum())
    assert found.pit.shape == (int(seen.sum()),)
    assert torch.equal(found.y.isnan(), ~seen[seen.any(1)])


def test_cells_of_two_plates_that_were_seen_are_the_data():
    x, seen, y = _partly()
    found = bdl.evaluate(_in_two_plates, _draws(), x, seen, y, progress=False)
    w = _draws().flat()["w"]
    f = torch.stack([w @ x.T, w.flip(1) @ x.T], -1)
    cells = dist.Normal(f, 0.5).log_prob(y).double().logsumexp(0) - math.log(DRAWS)
    assert found.scores["nlpd"] == pytest.approx(float(-cells[seen].mean()), rel=1e-5)
    expected = _by_hand(x, seen, y)
    for key in ("rmse", "nlpd_normal"):
        assert found.scores[key] == pytest.approx(float(expected[key]), rel=1e-5), key
    assert found.rows == int(seen.sum())


def test_the_error_of_weighted_rows_is_that_of_a_ratio():
    x, seen, y = _partly()
    found = bdl.evaluate(_some_numbers, _draws(), x, seen, y, progress=False).points["nlpd_normal"]
    w = _draws().flat()["w"].double()
    f = torch.stack([w @ x.T.double(), w.flip(1) @ x.T.double()], -1)
    sd = (0.25 + f.var(0, correction=0)).sqrt()
    values = torch.where(seen, -dist.Normal(f.mean(0), sd).log_prob(y.double()), 0.0)[10:]
    rows = seen[10:].any(1)
    total, counts = values.sum(1)[rows], seen[10:].sum(1)[rows].double()
    ratio = total.sum() / counts.sum()
    error = (total - ratio * counts).std() / counts.mean() / len(total) ** 0.5
    assert found.number == pytest.approx(float(ratio), rel=1e-6)
    assert found.over_points == pytest.approx(float(error), rel=1e-6)


def test_densities_in_other_units_are_of_the_numbers_that_were_seen():
    x, seen, y = _partly()
    scores = [
        bdl.evaluate(_some_numbers, _draws(), x, seen, y, units=units, progress=False).scores
        for units in ((1.0, 0.0), (10.0, 3.0))
    ]
    per_row = float(seen.sum() / seen.any(1).sum())
    gap = scores[1]["nlpd"] - scores[0]["nlpd"]
    assert gap == pytest.approx(per_row * math.log(10.0), rel=1e-5)
    assert scores[1]["rmse"] == pytest.approx(10 * scores[0]["rmse"], rel=1e-5)


# What else scores data


def test_predictions_that_are_known_are_scored_where_data_were_seen():
    x, seen, y = _data(numbers)
    f = _draws().flat()["w"] @ x.T
    density = dist.Normal(f, 0.5).log_prob(y)
    known = bdl.PredictiveDraws(f, log_likelihood=density)
    model, _ = numbers(_around)
    table = bdl.compare(
        model, {"a": _draws(), "known": known}, x, seen, y, reference="a", progress=False
    ).table
    for key in ("rmse", "nlpd", "nlpd_se"):
        assert table.loc["known", key] == pytest.approx(table.loc["a", key], rel=1e-5)
    assert table.loc["known", "wasserstein"] == pytest.approx(0.0, abs=1e-6)


def test_folds_have_values_of_the_data_that_were_seen():
    x, seen, y = _data(numbers)
    model, _ = numbers(_around)
    found = k_fold(lambda *rows: (model, _draws()), x, seen, y, folds=4, progress=False)
    f = _draws().flat()["w"] @ x.T
    each = dist.Normal(f, 0.5).log_prob(y).double().logsumexp(0) - math.log(DRAWS)
    torch.testing.assert_close(found.pointwise, each[seen])
    assert found.elpd == pytest.approx(float(each[seen].sum()))
    assert len(found.fold) == int(seen.sum())


def test_many_data_are_subsampled_among_those_that_were_seen(monkeypatch):
    monkeypatch.setattr(leave_one_out, "MOST_LEFT_OUT", 10)
    data = _data(numbers)
    model, _ = numbers(_around)
    kind = observed(model, data, _draws()).kind
    loo, _ = leave_one_out.leave_one_out(
        model, kind, _draws(), bdl.Predictive(model, _draws()), data, most=10
    )
    assert len(loo.approximation) == int(data[1].sum())
    assert len(loo.rows) == 10


def test_test_data_of_which_nothing_was_seen_are_refused():
    x, seen, y = _data(numbers)
    model, _ = numbers(_around)
    with pytest.raises(ValueError, match="masks leave out all test data of 'y'"):
        bdl.evaluate(model, _draws(), x, torch.zeros_like(seen), y, progress=False)


def test_temperature_scaling_is_of_the_data_that_were_seen():
    x, seen, y = _data(numbers)
    found = bdl.calibration.temperature_scaling(numbers(_around)[0], _draws(), x, seen, y)
    rows = x[seen], seen[seen], y[seen]
    expected = bdl.calibration.temperature_scaling(numbers(_unmasked)[0], _draws(), *rows)
    assert (found.value, found.error) == pytest.approx((expected.value, expected.error))


def test_what_was_seen_is_saved(tmp_path):
    x, seen, y = _data(numbers)
    found = bdl.evaluate(numbers(_around)[0], _draws(), x, seen, y, progress=False)
    again = bdl.comparison.evaluate.Evaluation.load(found.save(tmp_path / "e"))
    assert again.seen == found.seen == (int(seen.sum()), N)


# Censored data, by a mask and a factor


def _censored(x, seen, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    d = dist.Normal(x @ w, 0.5)
    with pyro.plate("data", len(x)):
        if y is not None:
            later = torch.where(seen, torch.tensor(0.0), (1 - d.cdf(y)).clamp_min(1e-6).log())
            pyro.factor("censored", later)
        with poutine.mask(mask=seen):
            return pyro.sample("y", d, obs=y)


def test_censored_data_are_likelihood_that_is_not_scored():
    x, seen, y = _data(numbers)
    y = torch.where(seen, y, torch.tensor(1.0))
    found = bdl.compare(_censored, {"a": _draws()}, x, seen, y, reference=None, progress=False)
    rows = x[seen], seen[seen], y[seen]
    expected = bdl.evaluate(numbers(_unmasked)[0], _draws(), *rows, progress=False).scores
    for key in ("nlpd", "nlpd_se", "rmse", "nlpd_normal", "expected_nll"):
        assert found.table.loc["a", key] == pytest.approx(expected[key], rel=1e-5)
    assert any("'censored' belongs to no single datum" in note for note in found.notes)
