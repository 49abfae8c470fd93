"""Public functions and classes name the argument whose value they cannot use, and change nothing.

A function that takes a number or a word needs a line in ``CALLS``: its other arguments, with which
the call is otherwise right. The wrong values follow from the annotations.
"""

import contextlib
import importlib
import inspect
import pkgutil
import traceback
import types
import typing
from pathlib import Path

import pyro
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import guides, metrics, models, plots, priors
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField, AutoSWAG

torch.manual_seed(0)
X = torch.randn(12, 2)
Y = X[:, 0] - X[:, 1]
LABELS = (Y > 0).long()
P = torch.tensor([[0.3, 0.7]]).expand(12, 2)
DRAWS = torch.randn(20, 12)
CHAINS = torch.randn(4, 50)


def program():
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    return models.Regression(bdl.bayesianize(network), noise=0.3, num_data=12)


MODEL = program()
GUIDE = AutoMeanField(MODEL).prototype(X, Y)
LAPLACE = AutoLaplaceGGN(MODEL, structure="diag")
SAMPLES = bdl.Samples({name: value[None] for name, value in GUIDE.sample_latents(8).items()})
DATA = MODEL, X, Y
LABELED = X, LABELS
STEP = {"step_size": 0.1}
STATISTICS = bdl.bayesian_linear.SufficientStatistics.of(X, Y)


@pytest.fixture(scope="module")
def posterior():
    with pytest.warns(bdl.errors.BdlWarning):
        return AutoLaplaceGGN(MODEL, structure="diag").laplace_approximation((X, Y))


def fit(*data):
    return MODEL, SAMPLES


def call(*args, **options):
    """The arguments of a call."""
    return args, options


CALLS = {
    bdl.LinearizedPredictive: call(MODEL, "posterior"),
    bdl.Predictive: call(MODEL, GUIDE),
    bdl.compare: call(MODEL, {"a": SAMPLES}, X, Y, reference=None),
    bdl.evaluate: call(MODEL, SAMPLES, X, Y),
    bdl.freeze: call(MODEL, SAMPLES, X[:1]),
    bdl.k_fold: call(fit, X, Y),
    bdl.loo: call(MODEL, SAMPLES, X, Y),
    bdl.prior_predictive: call(MODEL, X),
    bdl.summarize: call(nn.Linear(2, 2), LABELED, held_out=LABELED, test=LABELED),
    bdl.to_arviz: call(MODEL, SAMPLES, X, Y),
    bdl.acquisition.batch_bald: call(P.expand(3, 12, 2), size=2),
    bdl.bayesian_linear.maximize: call(STATISTICS),
    bdl.calibration.simulation_based_calibration: call(MODEL, GUIDE, X),
    bdl.mcmc.PSGLD: call(**STEP),
    bdl.mcmc.SGNHT: call(**STEP),
    bdl.mcmc.SMILE: call(**STEP),
    bdl.mcmc.SGHMC: call(**STEP),
    bdl.mcmc.SGLD: call(**STEP),
    bdl.mcmc.HMC: call(),
    bdl.mcmc.NUTS: call(),
    bdl.mcmc.MAMS: call(),
    bdl.mcmc.MCLMC: call(),
    bdl.mcmc.Cyclical: call(peak=0.1, period=10),
    bdl.mcmc.Polynomial: call(scale=0.1),
    bdl.mcmc.sample: call(*DATA),
    bdl.mcmc.ensemble_sample: call(*DATA),
    bdl.mcmc.sgmcmc: call(MODEL, (X, Y), kernel=bdl.mcmc.SGLD(step_size=0.1)),
    bdl.mcmc.suggest_step_size: call(MODEL, (X, Y), at=SAMPLES),
    bdl.mcmc.tempered_smc: call(*DATA),
    bdl.curvature.LowRank: call(),
    bdl.curvature.Samples: call(),
    bdl.data.two_clusters: call(),
    bdl.diagnostics.ess: call(CHAINS),
    bdl.diagnostics.mcse: call(CHAINS, kind="quantile", prob=0.5),
    bdl.diagnostics.within_ess: call(CHAINS),
    bdl.diagnostics.rhat: call(CHAINS),
    bdl.diagnostics.loo: call(DRAWS[None]),
    bdl.diagnostics.psis: call(DRAWS),
    bdl.diagnostics.summary: call(SAMPLES),
    bdl.distributed.DataParallel_ELBO: call(bdl.elbo.TemperedTrace_ELBO()),
    bdl.elbo.CompiledELBO: call(),
    bdl.elbo.MeanFieldLimit: call(),
    bdl.elbo.TemperedTrace_ELBO: call(),
    bdl.elbo.TemperedTraceMeanField_ELBO: call(),
    bdl.evidence.em: call(*DATA),
    bdl.evidence.maximize: call("posterior"),
    bdl.evidence.train_by_evidence: call(MODEL, LAPLACE, X, Y),
    bdl.evidence.variational_em: call(MODEL, GUIDE, (X, Y)),
    **{
        getattr(guides, name): call(MODEL)
        for name in guides.__all__
        if name.startswith("Auto") and name != "AutoAmortized"
    },
    guides.BernoulliNoise: call(),
    bdl.handlers.cold: call(MODEL),
    bdl.handlers.temper: call(MODEL),
    bdl.handlers.local_reparameterization: call(),
    bdl.importance.ratios: call(MODEL, GUIDE, X, Y),
    bdl.init.relative_scale: call(),
    metrics.adaptive_calibration_error: call(P, LABELS),
    metrics.expected_calibration_error: call(P, LABELS),
    metrics.reliability: call(P, LABELS),
    metrics.energy_distance: call(DRAWS, DRAWS),
    metrics.mmd: call(DRAWS, DRAWS),
    metrics.interval_coverage: call(DRAWS, Y),
    models.Regression: call(),
    models.StudentTRegression: call(),
    models.BetaRegression: call(),
    models.BinaryClassification: call(),
    models.Classification: call(),
    models.ObservationModel: call(),
    models.CensoredRegression: call(),
    models.HeteroscedasticRegression: call(),
    models.OrdinalRegression: call(num_classes=3),
    models.PoissonRegression: call(),
    models.NegativeBinomialRegression: call(),
    models.MultiOutput: call(nn.Linear(2, 1), {"y": models.Regression()}),
    bdl.nn.rank_one: call(nn.Sequential(nn.Linear(2, 2))),
    bdl.nn.lora: call(nn.Sequential(nn.Linear(2, 2)), rank=1),
    bdl.optim.IVON: call(GUIDE),
    bdl.optim.VOGN: call(GUIDE),
    bdl.optim.NoisyKFAC: call(GUIDE),
    bdl.optim.GaussNewton_ELBO: call(),
    bdl.optim.KroneckerGaussNewton_ELBO: call(),
    plots.calibration: call({"a": P}, LABELS, task="classification"),
    plots.predictive_bands: call(X[:, :1], {"a": DRAWS}),
    plots.prior_predictive: call(X[:, :1], DRAWS),
    **{
        getattr(priors, name): call()
        for name in ("ARD", "FanIn", "Horseshoe", "Laplace", "Normal", "Pretrained", "StudentT")
    },
    priors.Pooled: call(),
    priors.GPrior: call({"w": torch.ones(2)}),
    priors.Hyperprior: call(pyro.distributions.HalfNormal(1.0)),
    priors.MatrixNormal: call(),
    priors.Moped: call(),
    bdl.selectors.Random: call(),
    bdl.temperature.linear: call(start=0.1, stop=1.0, steps=10),
    bdl.temperature.cosine: call(start=0.1, stop=1.0, steps=10),
    bdl.temperature.cyclical: call(start=0.1, stop=1.0, period=10),
    bdl.temperature.overparameterized: call(tau=1.0, num_data=10, num_neurons=10),
    bdl.Checkpoint: call(),
    bdl.load_posterior: call(model=MODEL),
    bdl.references.load: call("cifar10-hmc"),
    bdl.training.HeldOut: call(share=0.2),
    bdl.training.Minibatches: call(rows=12, size=4),
    bdl.training.collect_swag: call(MODEL, AutoSWAG(MODEL).prototype(X, Y), X, Y),
    bdl.training.estimate_elbo: call(MODEL, GUIDE, X, Y),
    bdl.training.fit_each: call(fit, [X]),
    bdl.training.train: call(MODEL, GUIDE, X, Y, steps=2),
    bdl.working_memory: call(),
}
# Values that the package makes; callables that check later, as scikit-learn asks, or take marks
# in a figure, or differentiable tensors.
EXEMPT = {
    "BayesianClassifier", "BayesianRegressor", "Calibration", "Comparison", "Costs", "Dataset",
    "Evaluation", "Importance", "KFold", "PredictiveDraws", "Reference", "Stacking", "Step",
    "cost_against_quality", "load_csv", "log_evidence", "posterior", "predict",
    "temperature_curves",
}  # fmt: skip
# Any whole number, or what another library or a first run checks.
OTHERS = {"output", "dim", "functions", "ess_limit", "rhat_limit", "weight_decay"}
WRONG = {
    int: ("a", 2.5, True, float("nan"), -3),
    float: ("a", True, float("nan"), 1j),
    str: ("no such word", 3, ["nuts"]),
    Path: (3, True, b"a", ["a"]),
    "n_jobs": ("a", 2.5, True, 0, 10**9),  # -1 is all cores
}
WORDS = {
    "activation", "backend", "chain_method", "curvature", "features", "kind", "law", "mask",
    "method", "on_nonfinite", "positions", "rows", "structure", "task", "zeros",
}  # fmt: skip


def public():
    """The functions and classes that an ``__all__`` of the package names."""
    names = [module.name for module in pkgutil.walk_packages(bdl.__path__, "pyro_bdl.")]
    for name in ["pyro_bdl", *(n for n in names if n.count(".") == 1 and "__main__" not in n)]:
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", ()):
            value = getattr(module, attribute)
            if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
                yield value


def checked(function):
    """The parameters that take a number or a word, each with the kind."""
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        parts = typing.get_args(annotation) if is_union else (annotation,)
        kinds = {kind for kind in parts if kind in (int, float, str)}
        if name == "n_jobs":
            yield name, name
        elif Path in parts:
            yield name, Path
        elif name in WORDS and (str in kinds or typing.Literal in map(typing.get_origin, parts)):
            yield name, str
        elif name not in OTHERS and kinds in ({int}, {float}):
            yield name, *kinds


CASES = [
    pytest.param(function, name, kind, id=f"{function.__name__}-{name}")
    for function in CALLS
    for name, kind in checked(function)
]


def test_every_public_function_that_takes_a_number_has_a_call():
    missing = {f.__name__ for f in public() if f not in CALLS and any(checked(f))}
    assert missing - EXEMPT == set()


def state():
    return torch.get_rng_state(), set(pyro.get_param_store().keys())


@pytest.mark.parametrize("function, name, kind", CASES)
def test_wrong_numbers_and_words(function, name, kind, posterior):
    args, options = CALLS[function]
    args = tuple(posterior if arg == "posterior" else arg for arg in args)
    (random, names), before = state(), [p.requires_grad for p in MODEL.parameters()]
    MODEL.train()
    for value in WRONG[kind]:
        with pytest.raises((TypeError, ValueError), match=name) as caught:
            made = function(*args, **{**options, name: value})
            contextlib.ExitStack().enter_context(made)  # working_memory checks as it is entered
            pytest.fail(f"{name}={value!r} is taken")
        raised = traceback.extract_tb(caught.tb)[-1]
        assert Path(bdl.__file__).parent in Path(raised.filename).parents, f"another's: {value!r}"
        assert torch.equal(random, torch.get_rng_state()) and names == state()[1]
        assert before == [p.requires_grad for p in MODEL.parameters()] and MODEL.training


@pytest.mark.parametrize(
    "call",
    [
        GUIDE.save, SAMPLES.save, bdl.Samples.load, bdl.Evaluation.load,
        lambda path: bdl.data.load_csv(path, "y"),
    ],
)  # fmt: skip
def test_methods_that_take_a_path(call):
    with pytest.raises(TypeError, match="path must be a string or a Path, got list"):
        call(["a"])


@pytest.mark.parametrize(
    "call",
    [
        GUIDE.sample_latents,
        lambda n: bdl.Predictive(MODEL, GUIDE, num_samples=n)(X),
        lambda n: bdl.prior_predictive(MODEL, X, num_samples=n),
        lambda n: bdl.mcmc.sample(*DATA, num_samples=n),
        lambda n: bdl.mcmc.sample(*DATA, num_chains=n),
        lambda n: bdl.mcmc.sgmcmc(
            MODEL, (X, Y), kernel=bdl.mcmc.SGLD(step_size=0.1), num_samples=n
        ),
    ],
)
def test_counts_that_no_memory_holds(call):
    with pytest.raises(MemoryError, match=r"GiB, of which .* are free: .*fewer"):
        call(10**13)
    with pytest.raises(ValueError, match=r"must be from 1 to 9223372036854775807"):
        call(10**20)


def test_a_wrong_value_is_shown_if_it_is_short():
    with pytest.raises(TypeError, match=r"held_out, .*, got a tuple$"):
        bdl.training.train(*DATA[:1], GUIDE, X, Y, steps=1, held_out=(X, Y))


def tensors_of(function):
    """The arguments that a function needs, which are tensors."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.annotation is torch.Tensor]


@pytest.mark.parametrize("value", [[0.5] * 12, None, "a", torch.ones(12, dtype=torch.complex64)])
@pytest.mark.parametrize("name", metrics.__all__)
def test_what_is_no_real_tensor(name, value):
    """Wrong tensors in each place of a metric, whose other arguments fit each other."""
    function = getattr(metrics, name)
    names = tensors_of(function)
    for wrong in names:
        good = P if "probabilities" in names else DRAWS
        args = [
            value if n == wrong else LABELS if (n, "probabilities") == ("y", names[0]) else good
            for n in names
        ]
        with pytest.raises(TypeError, match=f"^{wrong} must"):
            function(*args)


@pytest.mark.parametrize(
    "name", [n for n in metrics.__all__ if "probabilities" in tensors_of(getattr(metrics, n))]
)
@pytest.mark.parametrize("wrong", [P.logit(), P / 2])
def test_logits_are_no_probabilities(name, wrong):
    function = getattr(metrics, name)
    rest = [LABELS] * (len(tensors_of(function)) - 1)
    with pytest.raises(ValueError, match="must be class probabilities"):
        function(wrong if rest else wrong.expand(3, 12, 2), *rest)


PROGRAMS = {
    "a program": lambda model: bdl.Program(model, X, Y),
    "a prediction": lambda model: bdl.Predictive(model, SAMPLES)(X),
    "chains": lambda model: bdl.mcmc.sample(model, X, Y),
    "a guide": lambda model: AutoMeanField(model),
    "a training": lambda model: bdl.training.train(model, GUIDE, X, Y, steps=1),
    "a bound": lambda model: bdl.training.estimate_elbo(model, GUIDE, X, Y),
    "scores": lambda model: bdl.evaluate(model, SAMPLES, X, Y),
    "a handler": lambda model: bdl.handlers.temper(model, 0.5),
    "draws of the prior": lambda model: bdl.prior_predictive(model, X),
}


@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.parametrize("model", [None, "a", 3, models.Regression], ids=str)
def test_what_is_no_program(what, model):
    with pytest.raises(
        TypeError, match=r"the program (must be a function|is the class Regression)"
    ):
        PROGRAMS[what](model)


def test_draws_of_sites_that_the_program_does_not_have():
    draws = {"weihgt": torch.randn(3, 2)}
    with pytest.raises(ValueError, match="draws of 'weihgt', which the program does not have"):
        bdl.Predictive(MODEL, draws)(X)


@pytest.mark.parametrize("x", [(3 * X).long(), X[..., None]], ids=["integers", "another shape"])
def test_an_error_inside_the_network_says_what_tensors_it_had(x):
    with pytest.raises(RuntimeError) as caught:
        bdl.Program(MODEL, x, Y)
    (note,) = caught.value.__notes__
    assert f"x {x.dtype} {tuple(x.shape)}" in note
    assert ("pass .float()" in note) == (x.dtype == torch.int64)
