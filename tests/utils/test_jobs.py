"""Independent fits in several processes say what they say one after another."""

import functools
import warnings

import joblib
import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.model_selection import GridSearchCV

import pyro_bdl as bdl
from pyro_bdl.comparison.leave_one_out import k_fold
from pyro_bdl.utils.jobs import Job, results_of

D = {"dtype": torch.float64}


def program(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def fitted(model, x, y):
    """A posterior by a training that draws random numbers."""
    guide = bdl.guides.AutoMeanField(model)
    bdl.training.train(model, guide, x, y, steps=5)
    return guide


def fit(x, y):
    return program, fitted(program, x, y)


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.randn(12, 2, **D)
    return x, x.sum(1) + 0.3 * torch.randn(12, **D)


def folds(x, y, **options):
    return k_fold(fit, x, y, folds=3, num_samples=20, progress=False, **options)


def simulated(x, y, **options):
    return bdl.calibration.simulation_based_calibration(
        program, fitted, x, y, num_simulations=10, num_draws=9, progress=False, **options
    )


@pytest.mark.slow
def test_folds_and_simulations_do_not_depend_on_the_processes(data):
    """The same numbers, in loky's processes and one after another."""
    with warnings.catch_warnings(), joblib.parallel_config(backend="loky", n_jobs=2):
        warnings.simplefilter("ignore")
        found = folds(*data), simulated(*data, n_jobs=2)
    torch.manual_seed(7)  # which no result depends on
    expected = folds(*data, n_jobs=1), simulated(*data, n_jobs=1)
    assert torch.equal(found[0].pointwise, expected[0].pointwise)
    assert torch.equal(found[1].ranks, expected[1].ranks)


def test_a_fold_does_not_depend_on_what_was_drawn_before(data):
    first = folds(*data).pointwise
    torch.randn(3)
    assert torch.equal(folds(*data, n_jobs=1).pointwise, first)


def test_results_come_in_order_and_leave_the_random_state():
    before = torch.get_rng_state()
    jobs = (Job(f"job {n}", n, (n, 3)) for n in range(5))
    found = results_of(divmod, jobs, "", n_jobs=None, progress=False)
    assert list(found) == [divmod(n, 3) for n in range(5)]
    assert torch.equal(torch.get_rng_state(), before)


def test_folds_in_threads_run_one_after_another_with_the_same_numbers(data):
    """Pyro has one stack for all threads, so that the caller runs them itself."""
    with joblib.parallel_config(backend="threading", n_jobs=2):
        found = folds(*data), simulated(*data)
    assert torch.equal(found[0].pointwise, folds(*data, n_jobs=1).pointwise)
    assert torch.equal(found[1].ranks, simulated(*data, n_jobs=1).ranks)


def with_a_parameter(x, y):
    """A fit that goes on from the parameter that the fit before it left in Pyro's store."""
    scale = pyro.param("start", torch.tensor(1.0, **D))
    with torch.no_grad():
        scale.mul_(3.0)
    return program, bdl.Samples({"w": scale.detach() * torch.ones(1, 4, 2, **D)})


def test_a_fold_does_not_start_from_the_parameters_of_another_one(data):
    pyro.clear_param_store()
    start = pyro.param("start", torch.tensor(2.0, **D))
    found = k_fold(with_a_parameter, *data, folds=3, progress=False)
    x, y = data
    expected = dist.Normal(x @ torch.full((2,), 6.0, **D), 0.3).log_prob(y)
    torch.testing.assert_close(found.pointwise, expected)
    assert start.item() == pyro.param("start").item() == 2.0
    pyro.clear_param_store()


def test_an_error_names_its_fold(data):
    def fails(x, y):
        raise bdl.errors.FailedStepError("the loss is NaN", step=3)

    with pytest.raises(bdl.errors.FailedStepError, match="loss is NaN") as caught:
        k_fold(fails, *data, folds=3, progress=False)
    assert caught.value.__notes__ == ["(in fold 0, which starts from seed 0)"]


@pytest.mark.slow
def test_a_spawned_process_fits(data):
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.map(functools.partial(_pointwise, *data), [0])
    assert found == folds(*data).pointwise.tolist()


def _pointwise(x, y, _):
    torch.set_num_threads(1)
    return folds(x, y).pointwise.tolist()


@pytest.mark.slow
def test_a_search_over_estimators_in_two_processes(data):
    x, y = (part.numpy() for part in data)
    regressor = bdl.sklearn.BayesianRegressor("mean-field", steps=5, random_state=0)
    choices = {"hidden": [(2,), (3,)]}
    one, two = (
        GridSearchCV(regressor, choices, cv=2, n_jobs=n).fit(x, y).cv_results_["mean_test_score"]
        for n in (1, 2)
    )
    assert one.tolist() == pytest.approx(two.tolist())
