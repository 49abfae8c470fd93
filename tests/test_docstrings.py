"""The examples in docstrings run, and the names that are used most have one.

An example makes its own data and program. Four modules are there without an import; the first page
of the reference shows the imports.
"""

import doctest
import inspect
from types import ModuleType

import matplotlib
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import curvature, errors

# The names that most files of the README, the pages, the notebooks and the examples use, but for
# DataParallel_ELBO and Shard, which are for several processes.
MOST_USED = """
    bayesianize Checkpoint compare LinearizedPredictive Predictive Program to_arviz
    calibration.temperature_scaling data.two_clusters
    diagnostics.function_draws diagnostics.rhat diagnostics.summary
    elbo.TemperedTrace_ELBO elbo.TemperedTraceMeanField_ELBO errors.BdlWarning
    evidence.log_marginal_likelihood evidence.maximize
    guides.AutoEnsemble guides.AutoLaplaceGGN guides.AutoLastLayer guides.AutoLowRank guides.AutoMAP
    guides.AutoMCDropout guides.AutoMeanField
    mcmc.NUTS mcmc.sample metrics.expected_calibration_error
    models.BinaryClassification models.Classification models.Regression optim.IVON
    plots.predictive_bands plots.probability_maps plots.use_style
    priors.ByName priors.FanIn priors.Normal
    sklearn.BayesianClassifier sklearn.BayesianRegressor training.train
"""


def with_examples():
    """Public name -> class or function, for those with an example."""
    modules = {name: getattr(bdl, name) for name in bdl.__all__}
    modules = {name: value for name, value in modules.items() if isinstance(value, ModuleType)}
    names = {name: getattr(bdl, name) for name in bdl.__all__}
    for module in [*modules.values(), curvature, errors]:
        short = module.__name__.removeprefix("pyro_bdl.")
        names |= {f"{short}.{name}": getattr(module, name) for name in module.__all__}
    distinct = {id(value): name for name, value in reversed(names.items())}
    return {
        name: names[name]
        for name in sorted(distinct.values())
        if inspect.isclass(names[name]) or inspect.isroutine(names[name])
        if ">>> " in (names[name].__doc__ or "")
    }


EXAMPLES = with_examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    imported = {"torch": torch, "pyro": pyro, "dist": dist, "bdl": bdl}
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(EXAMPLES[name], name, globs=imported)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report = []
    with matplotlib.rc_context(), pyro.get_param_store().scope(), torch.random.fork_rng():
        failed = runner.run(example, out=report.append).failed
    assert not failed, "".join(report)
    assert torch.get_default_dtype() == torch.float32


def test_the_most_used_names_have_an_example():
    names = set(MOST_USED.split())
    assert len(names) == 40
    assert not names - set(EXAMPLES)
