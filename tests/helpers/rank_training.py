"""Cases of several processes: training, evaluation, and draws put together."""

import pyro
import pyro.distributions as dist
import torch
from helpers.rank_cases import N, case, data, failure, in_svi, in_torch, parameters, program
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMCDropout,
    AutoMeanField,
)
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO


@case
def full_batches(rank, size):
    model = program(seed=rank)
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
        model = program()
        guide = AutoMeanField(model)
        torch.manual_seed(3 + rank)
        elbo = DataParallel_ELBO(DRAWING[name](), same_draws=True)
        return [in_svi(model, guide, elbo, [data(rank, size)] * 5), *parameters(model, guide)]

    run.__name__ = f"same_draws_{name}"
    return case(run)


for name in DRAWING:
    same_draws(name)


def by_hand(x, y):
    scale = pyro.param("scale", x.new_tensor(0.7), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), scale).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("data", N, subsample_size=len(x)):
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
        torch.manual_seed(3 + rank)
        model = program()
        guide = AutoMeanField(model).prototype(*data(rank, size))
        optimizer = make(guide)
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

    def take_step(self, model, guide, *args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(())
        step = super().take_step(model, guide, *args, **kwargs)
        self.seen.append((noise, step.value.detach()))
        return step


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
    in_svi(model, guide, plain, [data(rank, size)] * 3, ivon)
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


@case
def gathered(rank, size):
    """Chains, predictive draws and members of an ensemble of each rank, put together."""
    if size == 1:
        return {}
    model, (x, y) = program(), data(0, 1)
    torch.manual_seed(rank)
    options = {"num_warmup": 2, "num_samples": 3}
    options["kernel"] = bdl.mcmc.SGHMC(step_size=1e-4, thinning=1)
    chains = bdl.mcmc.sgmcmc(model, (x, y), num_chains=2, seed=rank, progress=False, **options)
    guide = AutoMeanField(model).prototype(x, y)
    draws = bdl.Predictive(model, guide, num_samples=2 + rank)(x)
    ensemble = AutoEnsemble(model, size=2).prototype(x, y)
    members = bdl.Predictive(model, ensemble, num_samples=2)(x)
    found = {
        "mine": (dict(chains.latents), dict(chains.stats), draws, members),
        "members": bdl.distributed.gather(members),
        "joint": bdl.distributed.gather(chains),
        "draws": bdl.distributed.gather(draws),
    }
    found["joint"] = dict(found["joint"].latents), dict(found["joint"].stats)
    same = {"y": torch.ones(3, 2)}
    found["same"] = failure(lambda: bdl.distributed.gather(same))
    other = bdl.Samples({"w": torch.randn(1, 3 + rank, 2)})
    found["other"] = failure(lambda: bdl.distributed.gather(other))
    return found
