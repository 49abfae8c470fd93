"""Independent fits have the same results wherever joblib runs them."""

import pickle
import warnings

import joblib
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError, MissingOperatorError, warn
from pyro_bdl.training import fit_each

X = torch.linspace(-1, 1, 8)[:, None]
Y = X[:, 0].sin()
JOBS = {"three": 3, "five": 5}


def fit(steps):
    """A training whose start, minibatches, dtype and parameters are of the job."""
    if steps < 0:
        raise FailedStepError("the loss is NaN", step=steps)
    warn(f"{steps} steps", "unfinished-training")
    net, dtype = bdl.bayesianize(nn.Linear(1, 1)), torch.get_default_dtype()
    x, y = X.to(dtype), Y.to(dtype)
    scale = float(pyro.param("scale", torch.tensor(0.5)).detach())
    model = bdl.models.Regression(net, noise=scale, num_data=len(x))
    guide = bdl.guides.AutoMeanField(model)
    bdl.training.train(model, guide, x, y, steps=steps, batch_size=3, progress=False)
    return model, guide


def numbers(fits):
    """Predictions of a posterior under the program that came with it."""
    found = {}
    for name, (model, guide) in fits.items():
        x = X.to(guide.loc.dtype)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            found[name] = guide.loc, guide.scale, bdl.Predictive(model, guide, 3)(x)["y"]
    return found


def fitted(**options):
    with pytest.warns(BdlWarning) as warned:
        fits = fit_each(fit, JOBS, progress=False, **options)
    said = [str(w.message).partition(" (")[0] for w in warned]
    assert said == ["3 steps", "5 steps"]
    return numbers(fits)


def check_same(backend, **options):
    """Everything that the numbers depend on is that of the caller, in both processes."""
    pyro.get_param_store().clear()
    pyro.param("scale", torch.tensor(2.0))
    torch.set_default_dtype(torch.float64)
    try:
        expected = fitted(n_jobs=1)
        assert expected["three"][0].dtype == torch.float64
        torch.randn(3)
        before = torch.get_rng_state(), torch.get_num_threads()
        with joblib.parallel_config(backend=backend, **options):
            found = fitted()
            errors = failing()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.get_num_threads() == before[1]
        assert pyro.param("scale").item() == 2.0
    finally:
        torch.set_default_dtype(torch.float32)
        pyro.get_param_store().clear()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert errors == failing()


def failing():
    with pytest.raises(FailedStepError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_each(fit, [-2], seed=7, progress=False)
    return str(caught.value), caught.value.step, caught.value.__notes__


def test_threads():
    check_same("threading", n_jobs=2)
    assert failing() == ("the loss is NaN", -2, ["(in job 0, which starts from seed 7)"])


@pytest.mark.slow
def test_processes():
    check_same("loky", n_jobs=2)


@pytest.mark.slow
def test_processes_whose_results_come_together():
    check_same("multiprocessing", n_jobs=2)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_cluster_of_dask(threads):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=threads, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
    ):
        check_same("dask")


def test_a_list_of_jobs_gives_a_list_and_seeds_count_up():
    found = fit_each(lambda job: (job, torch.rand(()).item()), range(3), seed=4)
    expected = []
    for job in range(3):
        torch.manual_seed(4 + job)
        expected.append((job, torch.rand(()).item()))
    assert found == expected


def test_runs_of_one_method_are_compared():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = fit_each(fit, [5, 5], progress=False)
        table = bdl.compare(fits[0][0], {"a": fits}, X, Y, reference=None, progress=False).table
    assert not torch.equal(fits[0][1].loc, fits[1][1].loc)  # other seeds
    assert table.loc["a", "nlpd"] > 0


def of_pyro(_):
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0))

    return model, pyro.infer.autoguide.AutoNormal(model)


def test_guides_that_would_not_be_their_own_are_refused():
    with pytest.raises(TypeError, match=r"return \(model, guide\)"):
        fit_each(lambda job: of_pyro(job)[1], [1])
    with pytest.raises(TypeError, match="Pyro's AutoNormal"):
        fit_each(of_pyro, [1])
    with pyro.settings.context(module_local_params=True):
        assert len(fit_each(of_pyro, [1])) == 1


@pytest.mark.parametrize(
    "error", [FailedStepError("a", step=3), MissingOperatorError("a", op="b", site="c")]
)
def test_errors_come_back_from_another_process(error):
    error.add_note("where")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))
