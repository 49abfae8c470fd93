"""Every test starts from the same seed, an empty parameter store and one thread."""

import gc
import math
import os
import random
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import jaxlib
import numpy as np
import pyro
import pytest
import torch
from helpers import second_device
from helpers.conjugate import Conjugate, with_ones

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.comparison import costs
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.utils.random_state import generators


def pytest_configure():
    """Import ArviZ before the workers start, and set XLA's options.

    ArviZ 0.23 writes a file into the user's cache at its first import of the day, which fails if
    two processes do it at once. With these options XLA compiles in a third of the time, and the
    programs of the tests run no slower. Only versions that are known to have them get them: XLA
    ends the process at others.
    """
    with warnings.catch_warnings():  # it also says once a day that 1.x differs
        warnings.simplefilter("ignore")
        import arviz  # noqa: F401

    if jaxlib.__version__.startswith("0.10."):
        options = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        options += " --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempt imported objects from garbage collection, which comes less often in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_collectstart(collector):
    """Give the data that a file draws as it is imported the same values in every run."""
    if isinstance(collector, pytest.Module):
        pyro.set_rng_seed(0)


def set_seed(seed):
    """``pyro.set_rng_seed``, without the stack that torch formats for each kind of device."""
    for generator in generators().values():
        generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def _fresh():
    torch.set_num_threads(1)
    set_seed(0)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def no_collection(monkeypatch):
    """Fits collect no garbage before they measure memory, which takes longer than a small fit."""
    monkeypatch.setattr(costs, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def double(_fresh):
    """Tensors are float64 by default."""
    torch.set_default_dtype(torch.float64)


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


# A warning that nobody expects is an error, but in the files beside this one and in what runs with
# other marks.
OTHER_RUNS = ("slow", "accel", "cuda", "tutorials", "bench", "smoke")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests on a second device, and register it where one of them was selected: autograd
    counts the devices at the first backward pass of a process, and has threads for them, with
    which a process cannot fork as other tests do. Where none was, the first pass is made here: by
    torch 2.14 one under ``make_fx`` starts threads too."""
    tests = Path(__file__).parent
    for item in items:
        if "device" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.accel)
        beside = item.path.parent == tests
        if beside or any(item.get_closest_marker(name) for name in OTHER_RUNS):
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)
    yield
    if any(item.get_closest_marker("accel") for item in items):
        second_device.register()
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="the second device is registered"))
    else:
        torch.ones((), device="cpu", requires_grad=True).backward()


@pytest.fixture(params=["accel", "accel without float64", CUDA])
def device(request):
    """A device that is not the CPU: a stand-in in host memory, with float64 as on CUDA and without
    as on Apple's GPUs, and CUDA where there is one."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    if reason := second_device.register():
        pytest.skip(f"the second device was not built: {reason}")
    if narrow := request.param != "accel":
        if not hasattr(torch.accelerator, "get_device_capability"):
            pytest.skip("torch < 2.10 cannot say that a device has no float64")
        second_device.set_float64(False)
    yield torch.device(second_device.NAME)
    if narrow:
        second_device.set_float64(True)


EXACT = [name for name, kind in STRUCTURES.items() if not kind.curvature.is_sampled]


# Structures left to the slow run: each resembles another diagonal or Kronecker structure, and
# tests/curvature holds the contract of all structures.
ALIKE = {"diag", "ekfac"}


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in EXACT]
)
def structure(request):
    """A curvature structure's name, for every structure without a Monte Carlo error."""
    return request.param


@pytest.fixture
def structures():
    """The names of all curvature structures without a Monte Carlo error."""
    return tuple(EXACT)


@pytest.fixture
def ctrl_c():
    """Make Ctrl-C raise, even if the shell that started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class LinearGaussian:
    """y ~ Normal(X w + b, 0.5^2) with w, b ~ Normal(0, 2^2): all in closed form.

    The posterior of (w, b), tempered at eta, is Normal(mean(eta), precision(eta)^-1); the
    mean-field optimum has that mean and the variances 1 / diag(precision).
    """

    noise, prior = 0.5, 2.0

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.x = torch.randn(8, 3, dtype=torch.float64)
        self.x[:, 1] += 0.7 * self.x[:, 0]
        self.y = self.x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) + 0.4
        self.y += 0.5 * torch.randn(8, dtype=torch.float64)
        self.design = with_ones(self.x)
        self.net = torch.nn.Linear(3, 1).double()
        self.model = models.Regression(
            bayesianize(self.net, priors.Normal(self.prior)), noise=self.noise
        )
        self.size = 4

    def precision(self, eta=1.0):
        return Conjugate(self.design, self.y, self.noise, self.prior, eta).precision

    def mean(self, eta=1.0):
        return Conjugate(self.design, self.y, self.noise, self.prior, eta).mean

    def terms(self, loc, scale):
        """E_q[log p(y | w)] and KL(q || p(w)) of q = Normal(loc, diag(scale^2))."""
        residual = self.y - self.design @ loc
        quadratic = residual.square().sum() + (self.design.square() @ scale.square()).sum()
        likelihood = -0.5 * quadratic / self.noise**2
        likelihood = likelihood - 8 * (math.log(self.noise) + 0.5 * math.log(2 * math.pi))
        ratio = scale / self.prior
        kl = 0.5 * (ratio.square() + (loc / self.prior).square() - 1).sum() - ratio.log().sum()
        return likelihood, kl

    def mean_field(self, guide, eta=1.0, cold=1.0):
        """The guide, put at the optimum."""
        guide.prototype(self.x, self.y)
        with torch.no_grad():
            guide.loc.copy_(self.mean(eta))
            guide.scale = (self.precision(eta) / cold).diagonal().rsqrt()
        return guide


@pytest.fixture
def conjugate():
    return LinearGaussian()


@pytest.fixture(scope="session")
def covariance():
    """The exact covariance of a Laplace guide, over its subset, from its quadratic form."""

    def compute(guide):
        eye = torch.eye(guide.precision.size, dtype=guide.loc.dtype)
        single = guide.precision.quadratic(eye)
        pairs = guide.precision.quadratic(eye[:, None] + eye[None])
        return torch.linalg.inv(0.5 * (pairs - single[:, None] - single[None]))

    return compute


@pytest.fixture(scope="session")
def minimize():
    """Bring a loss without noise to its minimum by a quasi-Newton method."""

    def run(parameters, loss, steps=200, **options):
        """``loss()`` is a function of the parameters; the options are those of ``LBFGS``."""
        options = {"line_search_fn": "strong_wolfe", **options}
        optimizer = torch.optim.LBFGS(list(parameters), max_iter=steps, **options)

        def closure():
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)

    return run


@pytest.fixture
def exact_expectations(monkeypatch):
    """Normal noise becomes 2 P points whose mean is 0 and covariance 1: a mean over 2 P particles
    is then the exact expectation of any quadratic function."""

    def install(size):
        points = size**0.5 * torch.cat([torch.eye(size), -torch.eye(size)]).double().reshape(-1)
        position = 0

        def draw(*shape, dtype=torch.float64, **_):
            nonlocal position
            shape = torch.Size(shape)
            index = torch.arange(position, position + shape.numel()) % len(points)
            position += shape.numel()
            return points[index].reshape(shape).to(dtype)

        def standard_normal(shape, dtype, device):
            return draw(*shape, dtype=dtype)

        monkeypatch.setattr(torch, "randn", draw)
        monkeypatch.setattr(torch.distributions.normal, "_standard_normal", standard_normal)
        return 2 * size

    return install
