"""Two processes, each with a part of the data, against one process with all of them.

Each case is a function of the data of one process. The two processes run all of them once, in
``main`` below; the test process runs the same functions on all data.
"""

import datetime
import functools
import importlib
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroParam
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO, Shard, broadcast
from pyro_bdl.distributed.data_parallel import tensor_leaves
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.evidence import (
    MarginalLikelihoodTraining,
    log_marginal_likelihood,
    maximize,
    variational_em,
)
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoLastLayer,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
    AutoSubnetwork,
    selectors,
)
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO, InSVI
from pyro_bdl.utils.collectives import Ranks

N = 23
DEVICE = "cpu"
LIMIT = 300.0  # seconds
ROWS = {(0, 1): slice(None), (0, 2): slice(0, 14), (1, 2): slice(14, None)}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def data(rank, size):
    """This process's rows of 23: all, the first 14 or the last 9."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = x[:, 0].sin() + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)
    return x[ROWS[rank, size]].to(DEVICE), y[ROWS[rank, size]].to(DEVICE)


def network(seed=0, *, outputs=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def program(num_data=N, **options):
    scale = PyroParam(torch.tensor(1.3, dtype=torch.float64), dist.constraints.positive)
    noise = PyroParam(torch.tensor(0.4, dtype=torch.float64), dist.constraints.positive)
    network_ = bdl.bayesianize(network(**options), bdl.priors.Normal(scale))
    return bdl.models.Regression(network_, noise=noise, num_data=num_data).to(DEVICE)


def parameters(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def in_svi(model, guide, elbo, batches, optimizer=None):
    svi = SVI(model, guide, optimizer or pyro.optim.Adam({"lr": 0.05}), elbo)
    return [svi.step(*batch) for batch in batches]


def in_torch(model, guide, elbo, batches):
    guide.prototype(*batches[0])
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = objective(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ----------------------------------------------------------------------------------- training


@case
def plate_of_the_batch(rank, size):
    """A program that treats its batch as all data; the single process has all data."""
    model = program(None, seed=rank)
    guide = AutoMAP(model)
    elbo = TemperedTraceMeanField_ELBO()
    elbo = elbo if size == 1 else DataParallel_ELBO(elbo)
    losses = in_svi(model, guide, elbo, [data(rank, size)] * 5)
    return losses, parameters(model, guide)


@case
def unequal_minibatches(rank, size):
    """Joint batches of 8, 8 and 7 of the 23 data, split 5 + 3, 4 + 4, 6 + 1."""
    model = program(seed=rank)
    guide = AutoMAP(model)
    x, y = data(0, 1)
    order = torch.arange(N).split([5, 3, 4, 4, 6, 1])
    rows = order[rank::2] if size == 2 else [torch.cat(order[i : i + 2]) for i in (0, 2, 4)]
    batches = [(x[part], y[part]) for part in rows] * 2
    elbo = TemperedTraceMeanField_ELBO(bdl.temperature.linear(0.1, 1.0, 4))
    elbo = elbo if size == 1 else DataParallel_ELBO(elbo)
    return in_torch(model, guide, elbo, batches), parameters(model, guide)


class Cold(TemperedTrace_ELBO):
    def __init__(self):
        super().__init__(cold_temperature=0.5, sticking_the_landing=True)


DRAWING = {
    "mean_field": lambda: TemperedTraceMeanField_ELBO(0.5, num_particles=2),
    "cold": Cold,
    "compiled": lambda: CompiledELBO(0.5),
}


def same_draws(name):
    def run(rank, size):
        found = []
        for num_data in (N, None):
            model = program(num_data)
            guide = AutoMeanField(model)
            torch.manual_seed(3 + rank)
            elbo = DataParallel_ELBO(DRAWING[name](), same_draws=True)
            found += [in_svi(model, guide, elbo, [data(rank, size)] * 5), *parameters(model, guide)]
        return found

    run.__name__ = f"same_draws_{name}"
    return case(run)


for name in DRAWING:
    same_draws(name)


def by_hand(x, y):
    scale = pyro.param("scale", x.new_tensor(0.7), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), scale).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, noise), obs=y)


@case
def pyros_own(rank, size):
    """A function with ``pyro.param`` statements under Pyro's guide and ELBOs."""
    found = []
    for elbo in (Trace_ELBO(), TraceMeanField_ELBO()):
        pyro.clear_param_store()
        guide = AutoNormal(by_hand)
        torch.manual_seed(3 + rank)
        parallel = DataParallel_ELBO(elbo, same_draws=True)
        found.append(in_svi(by_hand, guide, parallel, [data(rank, size)] * 5))
        found += [value.detach().clone() for _, value in sorted(pyro.get_param_store().items())]
    return found


@case
def natural_gradients(rank, size):
    found = []
    observed = GaussNewton_ELBO(curvature="empirical-fisher")  # each rank draws its own targets
    for make, elbo in ((IVON, TemperedTrace_ELBO()), (VOGN, observed)):
        for num_data in (N, None):
            torch.manual_seed(3 + rank)
            model = program(num_data)
            guide = AutoMeanField(model).prototype(*data(rank, size))
            optimizer = InSVI(make(guide), others=pyro.optim.Adam({"lr": 0.01}))
            parallel = DataParallel_ELBO(elbo, same_draws=True)
            losses = in_svi(model, guide, parallel, [data(rank, size)] * 4, optimizer)
            found += [losses, *parameters(model, guide)]
    return found


GUIDES = {
    "low_rank": lambda model: AutoLowRank(model, rank=2),
    "matrix_normal": AutoMatrixNormal,
    "dropout": lambda model: AutoMCDropout(model, p=0.2),
    "concrete_dropout": lambda model: AutoMCDropout(model, p=0.2, learn_p=True),
    "ensemble": lambda model: AutoEnsemble(model, size=3),
}


@case
def other_guides(rank, size):
    found = []
    for make in GUIDES.values():
        torch.manual_seed(3)
        model = program()
        guide = make(model)
        elbo = TemperedTraceMeanField_ELBO(num_particles=3)
        parallel = DataParallel_ELBO(elbo, same_draws=True)
        found += [in_torch(model, guide, parallel, [data(rank, size)] * 3), *parameters(guide)]
    return found


@case
def latents_of_the_data(rank, size):
    """A latent of each datum, in a plate that knows its indices; a prior's parameter."""

    def random_effects(x, y, rows):
        scale = pyro.param("scale", x.new_tensor(0.7), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), scale).to_event(1))
        with pyro.plate("data", N, subsample=rows):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 0.5))
            pyro.sample("y", dist.Normal(x @ w + z, 0.3), obs=y)

    def plates(x, y, rows):
        return pyro.plate("data", N, subsample=rows)

    pyro.clear_param_store()
    guide = AutoMAP(random_effects, create_plates=plates)
    whole = data(0, 1)
    order = torch.arange(N).split([5, 3, 4, 4, 6, 1])
    rows = order[rank::2] if size == 2 else [torch.cat(order[i : i + 2]) for i in (0, 2, 4)]
    elbo = TemperedTrace_ELBO()
    elbo = elbo if size == 1 else DataParallel_ELBO(elbo)
    batches = [(*(part[r] for part in whole), r) for r in rows]
    guide.prototype(*batches[0]).loc.data.copy_(torch.linspace(-0.5, 0.5, N + 3))
    losses = in_svi(random_effects, guide, elbo, batches)
    return losses, parameters(guide), pyro.param("scale").detach().clone()


class Recorded(TemperedTraceMeanField_ELBO):
    """Keeps each loss of its own, and the first number that could be drawn in its place."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def differentiable_loss(self, model, guide, *args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(())
        loss = super().differentiable_loss(model, guide, *args, **kwargs)
        self.seen.append((noise, loss.detach()))
        return loss


@case
def own_draws(rank, size):
    """Each rank draws for itself, whatever its seed; IVON's control variate is the ranks' mean."""
    torch.manual_seed(0)
    model = program()
    guide = AutoMeanField(model).prototype(*data(rank, size))
    elbo = Recorded(estimator="local_reparameterization")
    state = torch.get_rng_state()
    parallel = DataParallel_ELBO(elbo)
    losses = in_svi(model, guide, parallel, [data(rank, size)] * 3)
    torch.set_rng_state(state)
    with bdl.handlers.flipout():
        in_svi(model, guide, DataParallel_ELBO(TemperedTrace_ELBO()), [data(rank, size)] * 2)
    ivon, plain = IVON(guide), DataParallel_ELBO(TemperedTrace_ELBO())
    in_svi(model, guide, plain, [data(rank, size)] * 3, InSVI(ivon, pyro.optim.Adam({"lr": 0.01})))
    return losses, elbo.seen, parameters(model, guide)


@case
def evaluation(rank, size):
    model = program()
    guide = AutoMAP(model)
    elbo = DataParallel_ELBO(TemperedTrace_ELBO())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    first = svi.evaluate_loss(*data(rank, size))
    found = [first, svi.step(*data(rank, size)), svi.evaluate_loss(*data(rank, size))]
    with torch.no_grad():
        found.append(elbo(model, guide)(*data(rank, size)))
    return found


# ----------------------------------------------------------------------------------- curvature

STRUCTURES = {
    "full": {"structure": "full"},
    "kron": {"structure": "kron"},
    "ekfac": {"structure": "ekfac"},
    "diag": {"structure": "diag"},
    "low_rank": {"structure": "low_rank", "rank": 6},
    "hessian": {"structure": "full", "curvature": "hessian"},
    "empirical": {"structure": "kron", "curvature": "empirical-fisher"},
}


def shard(rank, size):
    batch = data(rank, size)
    if size == 1:
        return batch
    parts = [part.split(5) for part in batch]
    return Shard(list(zip(*parts, strict=True)))


def facts(posterior):
    """Numbers that depend on all of a posterior."""
    precision, p = posterior.precision, posterior.subset.size
    directions = torch.linspace(-1.0, 1.0, 3 * p, dtype=torch.float64).view(3, p).sin()
    return [
        precision.logdet().detach(),
        precision.variances(),
        precision.quadratic(directions),
        posterior.location(),
        posterior.log_likelihood,
        posterior.squares,
        float(posterior.num_data),
        log_marginal_likelihood(posterior).detach(),
    ]


@functools.cache
def maximum():
    """The result of a single process with all data."""
    model = program()
    guide = AutoMAP(model).prototype(*data(0, 1))
    optimizer = torch.optim.LBFGS([guide.loc], max_iter=500, line_search_fn="strong_wolfe")
    objective = TemperedTrace_ELBO()(model, guide)

    def closure():
        optimizer.zero_grad()
        loss = objective(*data(0, 1))
        loss.backward()
        return loss

    optimizer.step(closure)
    return guide.loc.detach()


def laplace(name):
    def run(rank, size):
        model = program(seed=rank)
        guide = AutoLaplaceGGN(model, **STRUCTURES[name]).prototype(*data(rank, size))
        if rank == 0:
            guide.loc.data.copy_(maximum())
        broadcast(model, guide)
        posterior = guide.laplace_approximation(shard(rank, size))
        found = facts(posterior)
        if name == "hessian":  # which would not be positive elsewhere
            return found
        found += facts(posterior.update(shard(rank, size)))
        exact = name == "full"  # others find the linearized model's optimum to a tolerance
        return [*found, *maximize(posterior, steps=5, linearized=exact).history]

    run.__name__ = f"laplace_{name}"
    return case(run)


for name in STRUCTURES:
    laplace(name)


@case
def last_layer(rank, size):
    """Classes, whose mode takes passes over the data; and rates in closed form."""
    x, y = data(rank, size)
    classes = (y > 0).long() + (y > 0.5).long()
    found = []
    for model, target in (
        (program(), y),
        (bdl.models.Classification(bdl.bayesianize(network(outputs=3), bdl.priors.Normal(1.0)),
                                   num_data=N), classes),
    ):  # fmt: skip
        guide = AutoLastLayer(model).prototype(x, target)
        batch = (x, target)
        found += facts(guide.laplace_approximation(Shard(batch) if size > 1 else batch))
    return found


@case
def built_on_laplace(rank, size):
    """Subnetworks chosen by Laplace, members of an ensemble, hyperparameters in training."""
    found = []
    torch.manual_seed(0)
    model = program()
    guide = AutoSubnetwork(model, select=selectors.LargestVariance(), size=6)
    guide.prototype(*data(rank, size)).loc.data.copy_(maximum())
    found += facts(guide.laplace_approximation(shard(rank, size)))
    model = program()
    ensemble = AutoEnsemble(model, size=2).prototype(*data(rank, size))
    for member in ensemble.laplace_approximation(shard(rank, size)).members:
        found += facts(member)
    guide = AutoLaplaceGGN(model).prototype(*data(rank, size))
    guide.loc.data.copy_(maximum())
    online = MarginalLikelihoodTraining(guide, shard(rank, size), every=1, burn_in=0)
    online.step()
    return [*found, *facts(online.finish()), *parameters(model)]


# ----------------------------------------------------------------------------------- what fails


def failure(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def first_step(model, guide, batch):
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO())
    return failure(lambda: in_svi(model, guide, elbo, [batch]))


@case
def failures(rank, size):
    if size == 1:
        return {}
    x, y = data(rank, size)
    found = {}
    model = program()
    guide = AutoMAP(model)
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO(), check_every=2)
    in_svi(model, guide, elbo, [(x, y)] * 2)
    if rank == 1:
        with torch.no_grad():
            guide.loc[3] += 0.5
    found["apart"] = failure(lambda: in_svi(model, guide, elbo, [(x, y)]))
    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    laplace.loc.data += 0.1 * rank
    found["other point"] = failure(lambda: laplace.laplace_approximation(Shard((x, y))))

    bad = x.clone()
    bad[2, 1] = math.nan if rank else 0.0
    model = program()
    guide = AutoMAP(model)
    elbo = DataParallel_ELBO(TemperedTraceMeanField_ELBO())
    in_svi(model, guide, elbo, [(x, y)])
    before = parameters(guide)
    found["nan"] = failure(lambda: in_svi(model, guide, elbo, [(bad, y)]))
    found["kept"] = all(map(torch.equal, before, parameters(guide)))
    found["later step"] = failure(lambda: in_svi(model, guide, elbo, [(x, y[: len(y) - rank])]))
    found["evaluation"] = failure(lambda: elbo.loss(model, guide, x, y[: len(y) - rank]))
    in_svi(model, guide, elbo, [(x, y)])  # which the ranks still do together
    found["kept in step"] = parameters(guide)
    model = program()
    found["first step"] = first_step(model, AutoMAP(model), (x, y[: 9 - rank]))
    wide = nn.Sequential(nn.Linear(3, 4 + rank), nn.Tanh(), nn.Linear(4 + rank, 1)).double()
    model = bdl.models.Regression(bdl.bayesianize(wide), noise=0.4, num_data=N)
    found["other network"] = first_step(model, AutoMAP(model), (x, y))
    model = program(20)
    found["too many"] = first_step(model, AutoMAP(model), (x, y))
    model = program(20 + rank)
    found["other N"] = first_step(model, AutoMAP(model), (x[:2], y[:2]))
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = bdl.models.Regression(bdl.bayesianize(layers), noise=0.4, num_data=N)
    found["batch norm"] = first_step(model, AutoMAP(model), (x, y))
    model.eval()
    found["batch norm, evaluation mode"] = first_step(model, AutoMAP(model), (x, y))

    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    batches = [(x, y), (bad, y)]
    found["first batch"] = failure(lambda: laplace.laplace_approximation(Shard(batches[::-1])))
    found["second batch"] = failure(lambda: laplace.laplace_approximation(Shard(batches)))
    nothing = [(x, y)][rank:]
    found["no batch"] = failure(lambda: laplace.laplace_approximation(Shard(nothing)))

    def picks(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x), subsample_size=4) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    def local(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("y", dist.Normal(x @ w + z, 1.0), obs=y)

    def factor(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        pyro.factor("fit", -(y - x @ w).square().sum())

    for function in (picks, local, factor):
        found[function.__name__] = first_step(function, AutoMeanField(function), (x[:9], y[:9]))
    model = program()
    guide = AutoMeanField(model).prototype(x, y)
    found["all data"] = failure(lambda: variational_em(model, guide, Shard((x, y)), rounds=1))
    sampler = torch.utils.data.DistributedSampler(range(N), 2, rank, shuffle=False)
    x, y = (part[list(sampler)] for part in data(0, 1))
    laplace = AutoLaplaceGGN(program()).prototype(x, y)
    with pytest.warns(bdl.errors.BdlWarning) as caught:
        laplace.laplace_approximation(Shard((x, y)))
    found["repeated"] = " ".join(str(warning.message) for warning in caught)
    return found


@case
def gathered(rank, size):
    """Chains and predictive draws of each rank, put together."""
    if size == 1:
        return {}
    model, (x, y) = program(), data(0, 1)
    torch.manual_seed(rank)
    options = {"step_size": 1e-4, "num_warmup": 2, "num_samples": 3, "thinning": 1}
    chains = bdl.mcmc.sgmcmc(model, (x, y), num_chains=2, seed=rank, progress=False, **options)
    guide = AutoMeanField(model).prototype(x, y)
    draws = bdl.Predictive(model, guide, num_samples=2 + rank)(x)
    found = {
        "mine": (dict(chains.latents), dict(chains.stats), draws),
        "joint": bdl.distributed.gather(chains),
        "draws": bdl.distributed.gather(draws),
    }
    found["joint"] = dict(found["joint"].latents), dict(found["joint"].stats)
    same = {"y": torch.ones(3, 2)}
    found["same"] = failure(lambda: bdl.distributed.gather(same))
    other = bdl.Samples({"w": torch.randn(1, 3 + rank, 2)})
    found["other"] = failure(lambda: bdl.distributed.gather(other))
    return found


# ----------------------------------------------------------------------------------- processes


ON_CUDA = ["plate_of_the_batch", "same_draws_mean_field", "natural_gradients", "laplace_kron"]


def main(rank, folder, device):
    global DEVICE
    DEVICE = device
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    names = CASES if device == "cpu" else ON_CUDA
    found = {name: CASES[name](rank, 2) for name in names}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def start(folder, device):
    """Run both ranks. On the CPU they share the imports; CUDA forbids a fork."""
    importlib.import_module("torch._dynamo")  # which torch imports at the first step otherwise
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ranks = [context.Process(target=main, args=(rank, folder, device)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


def two_processes(folder, device):
    """The results of each process, case by case."""
    command = [sys.executable, __file__, str(folder), device]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return [
        torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=False)
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return two_processes(tmp_path_factory.mktemp("ranks"), "cpu")


def flat(found):
    if isinstance(found, torch.Tensor):
        return [found.double().reshape(-1).cpu()]
    if isinstance(found, float):
        return [torch.tensor([found], dtype=torch.float64)]
    return [value for part in found for value in flat(part)]


EXACT = [name for name in CASES if name not in ("own_draws", "failures", "gathered")]


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("name", EXACT)
def test_two_processes_do_what_one_does(both, name):
    torch.manual_seed(3)
    one = flat(CASES[name](0, 1))
    for rank in range(2):
        other = flat(both[rank][name])
        assert len(one) == len(other) and len(one) > 2
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-10, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
def test_two_processes_on_a_gpu(tmp_path, monkeypatch):
    """They share it, which gloo allows; sums on a GPU are in no fixed order."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cuda")
    maximum.cache_clear()
    found = two_processes(tmp_path, "cuda")
    for name in ON_CUDA:
        torch.manual_seed(3)
        one = flat(CASES[name](0, 1))
        for rank in range(2):
            for mine, theirs in zip(one, flat(found[rank][name]), strict=True):
                torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-9)
    maximum.cache_clear()


@pytest.mark.parametrize("name", EXACT)
def test_ranks_are_the_same_to_the_last_bit(both, name):
    zipped = zip(flat(both[0][name]), flat(both[1][name]), strict=True)
    assert all(torch.equal(left, right) for left, right in zipped)


def test_ranks_draw_for_themselves(both):
    (losses, left, first), (_, right, second) = (found["own_draws"] for found in both)
    for loss, (noise, mine), (other_noise, theirs) in zip(losses, left, right, strict=True):
        assert noise != other_noise
        assert loss == pytest.approx(float(14 * mine + 9 * theirs) / N, rel=1e-6)
    assert all(map(torch.equal, first, second))


def test_draws_of_the_ranks_are_put_together(both):
    first, second = (found["gathered"] for found in both)
    for found in (first, second):
        for number in range(2):  # latents and statistics
            for name, value in found["joint"][number].items():
                mine = [part["mine"][number][name] for part in (first, second)]
                assert torch.equal(value, torch.cat(mine)) and len(value) == 4
        for name, value in found["draws"].items():
            mine = [part["mine"][2][name] for part in (first, second)]
            assert torch.equal(value, torch.cat(mine)) and len(value) == 5
        assert found["same"] == (
            "ValueError: rank 1 has the same draws as rank 0: give each rank a seed of its own"
        )
        assert found["other"].startswith("ValueError: rank 1 has chains of shapes {'w': (4, 2)}")


def test_alone_draws_are_what_they_are():
    draws = {"y": torch.ones(2)}
    assert bdl.distributed.gather(draws) is draws


def test_one_process_has_the_noise_of_a_seed_and_leaves_the_callers_alone(conjugate):
    elbo, guide = Recorded(), AutoMeanField(conjugate.model)
    guide.prototype(conjugate.x, conjugate.y)
    parallel = DataParallel_ELBO(elbo)
    parallel.loss(conjugate.model, guide, conjugate.x, conjugate.y)
    state = torch.get_rng_state()
    losses = [
        parallel.differentiable_loss(conjugate.model, guide, conjugate.x, conjugate.y)
        for _ in range(2)
    ]
    assert torch.equal(state, torch.get_rng_state())
    assert elbo.seen[0][0] != elbo.seen[1][0]
    assert [loss.item() for loss in losses] == [loss.item() for _, loss in elbo.seen]


MESSAGES = {
    "apart": "RuntimeError: 'guide.loc' on rank 1 lies up to 0.5 from that of rank 0",
    "other point": "RuntimeError: 'location' on rank 1 lies up to 0.1 from that of rank 0",
    "other network": "RuntimeError: rank 1 has other parameters than rank 0 (",
    "too many": "ValueError: the batches of the ranks have 23 rows together, but the program "
    "states 20 data",
    "other N": "ValueError: the program counts 21 data on rank 1 and 20 data on rank 0",
    "batch norm": "UnsupportedProgramError: a BatchNorm1d layer in training mode normalizes",
    "batch norm, evaluation mode": "none",
    "picks": "UnsupportedProgramError: the plate 'data' picks 4 of the 9 rows at random",
    "local": "UnsupportedProgramError: the latent 'z' is in the plate of the data",
    "factor": "UnsupportedProgramError: the factor 'fit' may be about the data of a rank",
    "all data": "TypeError: a Shard holds one rank's part of the data",
}


@pytest.mark.parametrize("name", list(MESSAGES))
def test_every_rank_says_what_is_wrong(both, name):
    for found in both:
        assert found["failures"][name].startswith(MESSAGES[name]), found["failures"][name]


def test_a_failure_on_one_rank_is_told_by_the_other(both):
    first, second = (found["failures"] for found in both)
    assert second["nan"].startswith("ValueError: x holds NaN or infinity in rows 2, columns 1")
    assert first["nan"].startswith("RuntimeError: rank 1 failed with ValueError: x holds NaN")
    assert first["kept"] and second["kept"]
    for name in ("later step", "evaluation"):
        assert second[name].startswith("ValueError: y has shape (8,)"), second[name]
        assert first[name].startswith("RuntimeError: rank 1 failed with ValueError: y has shape")
    assert all(map(torch.equal, first["kept in step"], second["kept in step"]))
    for name in ("first batch", "second batch"):
        assert "ValueError: " in second[name] and "rank 1 failed with ValueError: " in first[name]
    assert "data holds no batch" in second["no batch"] and "rank 1" in first["no batch"]
    assert first["first step"].startswith("ValueError: y has shape (9,)")
    assert second["first step"].startswith("ValueError: y has shape (8,)")


def test_rows_that_two_ranks_hold_are_told(both):
    for found in both:
        assert (
            "the processes hold 24 data, but the program states 23"
            in (found["failures"]["repeated"])
        )


def test_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        DataParallel_ELBO(Trace_ELBO())
    with pytest.raises(RuntimeError, match="init_process_group"):
        Shard([])


def test_refused_arguments():
    with pytest.raises(TypeError, match="ReweightedWakeSleep has no differentiable_loss"):
        DataParallel_ELBO(pyro.infer.ReweightedWakeSleep())
    with pytest.raises(ValueError, match="check_every"):
        DataParallel_ELBO(Trace_ELBO(), check_every=0)
    with pytest.raises(RuntimeError, match="no parameters yet"):
        broadcast(AutoMAP(program()))


def test_a_program_and_a_guide_with_parameters_of_the_same_names():
    found = tensor_leaves(nn.Linear(1, 2), nn.Linear(1, 2), pyro.poutine.Trace())
    assert list(found) == ["model.weight", "model.bias", "guide.weight", "guide.bias"]


def test_alone_a_shard_is_all_of_the_data():
    assert len(list(Shard(data(0, 1)))) == 1
    assert Ranks().gather(3) == [3]


def test_an_error_alone_is_itself():
    def fail():
        raise UnsupportedProgramError("no")

    with pytest.raises(UnsupportedProgramError, match="no"):
        Ranks().together(fail)


if __name__ == "__main__":
    start(Path(sys.argv[1]), sys.argv[2])
