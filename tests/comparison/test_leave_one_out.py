"""Leave-one-out: exact in a conjugate model, equal to ArviZ, and corrected for guides."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.comparison import leave_one_out as module
from pyro_bdl.comparison.kind import observed
from pyro_bdl.comparison.leave_one_out import difference, leave_one_out
from pyro_bdl.comparison.metric import measure, total_error
from pyro_bdl.diagnostics.loo import difference_estimate

pytestmark = pytest.mark.filterwarnings("ignore:.*#k-hat")  # few draws

N = 20


def shift(x, y=None):
    """w ~ Normal(0, 2), y_n ~ Normal(w, 1)."""
    w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w.expand(len(x)), 1.0), obs=y)


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.zeros(N, 1), 0.5 + torch.randn(N)


def posterior(y):
    precision = 0.25 + len(y)
    return y.sum() / precision, precision**-0.5


def exact(y):
    """log p(y_n | the others), Normal with the mean of the others' posterior."""
    total = torch.zeros(())
    for n in range(len(y)):
        others = torch.cat([y[:n], y[n + 1 :]])
        mean, sd = posterior(others)
        total = total + dist.Normal(mean, math.sqrt(1 + sd**2)).log_prob(y[n])
    return total.item()


def chains(y, count=4000, width=1.0):
    mean, sd = posterior(y)
    return bdl.Samples({"w": mean + width * sd * torch.randn(4, count // 4)})


def found(q, samples, data, predictive=None, **options):
    predictive = predictive or bdl.Predictive(shift, samples)
    kind = observed(shift, data, q).kind
    return leave_one_out(shift, kind, q, predictive, data, **options)


def guide(y, width=1.0):
    mean, sd = posterior(y)
    made = bdl.guides.AutoMeanField(shift).prototype(torch.zeros(N, 1), y)
    with torch.no_grad():
        made.loc.fill_(mean)
        made.scale = torch.full_like(made.scale, width * sd)
    return made


def test_of_exact_draws_it_is_exact(data):
    samples = chains(data[1])
    loo, kind = found(samples, samples, data)
    assert kind == "draws" and loo.num_bad == 0
    assert loo.elpd == pytest.approx(exact(data[1]), abs=0.02)


def test_a_guide_that_is_too_wide_is_mended_by_its_density(data):
    """Without the correction a guide with twice the sd is wrong."""
    q = guide(data[1], width=2.0)
    samples = bdl.Samples({"w": q.sample_latents(4000)["w"].detach()[None]})
    loo, kind = found(q, samples, data)
    assert kind == "p / q" and loo.num_bad == 0
    assert loo.elpd == pytest.approx(exact(data[1]), abs=0.02)
    plain = bdl.diagnostics.loo(
        bdl.Predictive(shift, samples).log_likelihood(*data)["y"][None],
    )
    assert abs(plain.elpd - exact(data[1])) > 0.1


def laplace(data):
    point = bdl.guides.AutoLaplaceGGN(shift, structure="full").prototype(*data)
    with torch.no_grad():
        point.loc.fill_(posterior(data[1])[0])
    return point.laplace_approximation(data)


@pytest.mark.parametrize("other", ["site", "factor"])
def test_weights_are_of_the_whole_program_where_a_part_of_it_is_scored(data, other):
    """A second observed site, or a factor, says as much of w as 30 data at 2."""
    sd = 30**-0.5

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.tensor(0.0), 2.0))
        if other == "site":
            pyro.sample("z", dist.Normal(w, sd), obs=torch.tensor(2.0))
        else:
            pyro.factor("z", dist.Normal(w, sd).log_prob(torch.tensor(2.0)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.expand(len(x)), 1.0), obs=y)

    x, y = data
    precision = 0.25 + N + 30
    q = bdl.guides.AutoMeanField(model).prototype(x, y)
    with torch.no_grad():
        q.loc.fill_((y.sum() + 60) / precision)
        q.scale = torch.full_like(q.scale, 1.3 * precision**-0.5)
    found = bdl.evaluate(model, q, x, y, train=data, observed="y", num_samples=8000)
    means = (y.sum() + 60 - y) / (precision - 1)
    elpd = dist.Normal(means, (1 + 1 / (precision - 1)) ** 0.5).log_prob(y).sum()
    assert found.scores["loo_by"] == "p / q"
    assert float(found.loo.elpd) == pytest.approx(float(elpd), abs=0.05)


def test_what_was_fitted_to_a_datum_is_not_left_out(data):
    """A linearization keeps its point, so that there is no value, and nothing is computed."""
    q = laplace(data)
    one = bdl.Samples({"w": q.sample_latents(1)["w"][None]})
    predictive = bdl.LinearizedPredictive(shift, q, 4000)
    predictive.log_likelihood = None
    assert found(q, one, data, predictive) == (None, "not refitted")


def test_nothing_can_be_left_out_of_points(data):
    point = bdl.guides.AutoMAP(shift).prototype(*data)
    samples = bdl.Samples({"w": point.sample_latents(50)["w"].detach()[None]})
    assert found(point, samples, data) == (None, "")
    few = bdl.Samples({"w": torch.randn(5).repeat(20)[None]})
    assert found(point, few, data) == (None, "")


def test_parts_change_nothing(data):
    for q in (chains(data[1]), guide(data[1], width=1.5)):
        samples = q
        if not isinstance(q, bdl.Samples):
            samples = bdl.Samples({"w": q.sample_latents(1000)["w"].detach()[None]})
        whole, _ = found(q, samples, data)
        with bdl.working_memory(8 * 10 * len(samples.flat()["w"])):
            parts, _ = found(q, samples, data)
        torch.testing.assert_close(parts.pointwise, whole.pointwise)
        assert (parts.elpd, parts.se, parts.p_loo) == pytest.approx(
            (whole.elpd, whole.se, whole.p_loo)
        )


def test_the_error_of_a_difference_is_unknown_for_one_datum():
    one = bdl.diagnostics.loo(torch.randn(2, 100, 1))
    assert math.isnan(one.se) and math.isnan(difference(one, one)[1])


def test_the_error_over_the_draws_is_the_spread_of_elpd_over_sets_of_draws(data):
    """Of PSIS-LOO and of k-fold cross-validation, whose data are the same in all sets."""
    torch.manual_seed(0)
    mean, sd = posterior(data[1])
    loos = [
        bdl.diagnostics.loo(dist.Normal(mean + sd * torch.randn(4, 50, 1), 1.0).log_prob(data[1]))
        for _ in range(100)
    ]

    def fit(x, y):
        mean, sd = posterior(y)
        return shift, bdl.Samples({"w": mean + sd * torch.randn(4, 50)})

    folds = [bdl.k_fold(fit, *data, folds=4, seed=seed, progress=False) for seed in range(40)]
    same = [fold.elpd - sum(expected(fold.fold, data[1])) for fold in folds]
    for found, values in ((loos, [loo.elpd for loo in loos]), (folds, same)):
        spread = torch.tensor(values).std().item()
        mean_square = torch.tensor([one.draws_se for one in found]).square().mean().sqrt().item()
        assert 0.8 < mean_square / spread < 1.35


def expected(fold, y):
    """log p(y_k | the other folds), exact, of each fold."""
    for k in range(int(fold.max()) + 1):
        mean, sd = posterior(y[fold != k])
        held = y[fold == k]
        yield dist.Normal(mean, math.sqrt(1 + sd**2)).log_prob(held).sum().item()


@pytest.mark.parametrize("of", [list, torch.as_tensor, lambda years: [f"site {y}" for y in years]])
def test_labels_are_folds_and_units_of_the_errors(data, of):
    """Rows of a label are held out together; the errors are those of sums over labels."""
    years = [3, 3, 3, 3, 7, 7, 7, 1, 1, 1, 1, 1, 1, 5, 5, 5, 5, 5, 9, 9]

    def fit(width):
        return lambda x, y: (shift, chains(y, 400, width))

    wide, right = (
        bdl.k_fold(fit(width), *data, folds=of(years), progress=False) for width in (30.0, 1.0)
    )
    groups = [torch.tensor([year == one for year in years]) for one in sorted(set(years))]
    assert right.folds == 5 and all(len(right.fold[group].unique()) == 1 for group in groups)
    assert right.elpd == pytest.approx(sum(expected(right.fold, data[1])), abs=0.3)
    sums = torch.stack([right.pointwise[group].sum() for group in groups])
    assert right.se == pytest.approx(math.sqrt(5 * sums.var()))
    gaps = torch.stack([(right.pointwise - wide.pointwise)[group].sum() for group in groups])
    better = right.difference(wide)
    assert better.elpd == pytest.approx(gaps.sum().item())
    assert better.se == pytest.approx(math.sqrt(5 * gaps.var()))
    over_draws = math.hypot(right.draws_se, wide.draws_se)
    of_table = total_error((better.se, 4.0), (over_draws, 9.0))
    assert difference(right, wide) == pytest.approx((better.elpd, of_table), rel=0.1)


def test_what_the_table_shows_of_each(data):
    """p / q is of the exact posterior, and its difference is not shown; high k-hats, and what was
    fitted to all data, are withheld with the reason."""
    posteriors = {name: guide(data[1], width) for name, width in (("wide", 3.0), ("narrow", 0.05))}
    posteriors |= {"nuts": chains(data[1]), "laplace": laplace(data)}
    found = bdl.compare(shift, posteriors, *data, train=data, num_samples=1000)
    rows = found.numbers()
    by = {name: rows[name]["loo_by"] for name in posteriors}
    assert by == {
        "wide": "p / q",
        "narrow": "withheld, k high",
        "nuts": "draws",
        "laplace": "withheld, not refitted",
    }
    assert rows["nuts"]["elpd_loo"] and rows["wide"]["elpd_loo"] and rows["narrow"]["high_k"] > 1
    assert not {"elpd_loo", "elpd_diff"} & (rows["narrow"].keys() | rows["laplace"].keys())
    assert "elpd_diff" not in rows["wide"] and "left-out" not in found.verdicts["wide"]
    assert found.evaluations["narrow"].loo.elpd  # kept for who asks
    text = " ".join(str(found).split())
    assert "is withheld, since k-hat is too high" in text and "fitted to all data" in text


def test_folds_reach_the_verdict(data):
    def fit(width):
        return lambda x, y: (shift, chains(y, 400, width))

    left_out = {
        name: bdl.k_fold(fit(width), *data, folds=4, progress=False)
        for name, width in (("wide", 40.0), ("nuts", 1.0))
    }
    posteriors = {"wide": guide(data[1], width=3.0), "nuts": chains(data[1])}
    found = bdl.compare(shift, posteriors, *data, train=data, left_out=left_out)
    row = found.numbers()["wide"]
    assert row["elpd_diff"] < -10 and row["loo_by"] == "4 folds"
    assert row["elpd_loo"] == left_out["wide"].elpd
    findings = {finding.key: finding for finding in found.judgments["wide"].findings}
    assert findings["elpd_diff"].fault == "worse predictions"


def test_without_each_datum_the_conjugate_posterior_is_exact(data):
    """Refits of one datum each are leave-one-out; their sum is the exact one."""

    def fit(x, y):
        assert len(x) == len(y) == N - 1
        return shift, chains(y)

    result = bdl.k_fold(fit, *data, folds=N, progress=False)
    assert result.elpd == pytest.approx(exact(data[1]), abs=0.02)
    assert sorted(result.fold.tolist()) == list(range(N)) and result.folds == N
    assert result.se == pytest.approx(math.sqrt(N) * result.pointwise.std().item())
    again = bdl.k_fold(fit, *data, folds=N, progress=False)
    assert torch.equal(again.pointwise, result.pointwise)


def test_of_many_data_a_part_is_left_out_and_the_errors_say_so(data):
    samples = chains(data[1], 1000)
    with bdl.working_memory(8 * 10 * 1000):
        whole, _ = found(samples, samples, data)
        part, kind = found(samples, samples, data, most=10)
    assert kind == "draws" and len(part.rows) == 10 and part.subsampling_se > 0
    torch.testing.assert_close(part.pointwise, whole.pointwise[part.rows])
    assert abs(part.elpd - whole.elpd) < 4 * part.subsampling_se
    row = measure(module.LEFT_OUT, "regression", {"loo": (part, kind)})
    assert row["loo_by"] == "draws, 10 of 20 data" and part.draws_se > 0
    assert row["elpd_loo_se"] == math.hypot(part.total_se, part.draws_se)
    assert part.draws_se == 2 * part.left_out.draws_se and difference(part, part)[0] == 0.0
    assert module.comparable(part, part) and not module.comparable(part, whole)
    again = module.of_state(module.state_of(part))
    assert again.total_se == part.total_se and again.num_bad == part.num_bad


def test_the_error_of_a_difference_holds_that_of_subsampling(data):
    samples, other = chains(data[1], 1000), chains(data[1], 1000, width=1.5)
    a, b = (found(q, q, data, most=10)[0] for q in (samples, other))
    gap = a.pointwise - b.pointwise
    total, sampling, over_data = difference_estimate(gap, a.approximation - b.approximation, a.rows)
    assert sampling > 0
    parts = [(sampling, 9), (over_data, N - 1), (a.draws_se, math.inf), (b.draws_se, math.inf)]
    assert difference(a, b) == pytest.approx((total, total_error(*parts)))


@pytest.mark.parametrize("bad, shown", [(1, True), (2, False)])
def test_a_twentieth_of_the_k_hats_may_be_high(bad, shown):
    loo = bdl.diagnostics.loo(torch.randn(4, 200, 20).double())
    k = torch.where(torch.arange(20) < bad, 0.9, 0.1)
    found = module.elpd_loo.function(replace(loo, pareto_k=k), "draws")
    assert (found[0] == loo.elpd) if shown else (found is None)
