"""Minibatches: how a program states the number of all data, and what is refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate

import pyro_bdl as bdl
from pyro_bdl.training.descent import Minibatches

N = 40
D = {"dtype": torch.float64}


def data():
    torch.manual_seed(5)
    x = torch.randn(N, 2, **D)
    return x, x.sum(1) + 0.3 * torch.randn(N, **D)


def plain(**plate):
    """A program with a plate of the given size and subsample."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        mean = x @ w
        options = {name: make(x) for name, make in plate.items()}
        with pyro.plate("rows", **options) as index:
            if options.get("subsample_size") == 5:  # picks its rows itself
                mean, y = mean[index], None if y is None else y[index]
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    return model


def ready_made(num_data):
    net = torch.nn.Linear(2, 1, bias=False, **D)
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=num_data)


STATING = {
    "num_data": lambda: ready_made(N),
    "tempered": lambda: bdl.handlers.temper(ready_made(N), 1.0),
    "subsample": lambda: plain(size=lambda x: N, subsample=lambda x: torch.arange(len(x))),
    "subsample_size": lambda: plain(size=lambda x: N, subsample_size=len),
}


def exact_mean():
    return Conjugate(*data(), 0.3).mean


def mean_of(latents):
    return next(iter(latents.values())).reshape(-1)


def by_train(model):
    guide = bdl.guides.AutoMAP(model)
    run = bdl.training.train(model, guide, *data(), steps=150, learning_rate=0.1, batch_size=10)
    assert run.batch_size == 10
    return mean_of(guide.median())


def by_evidence(model):
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
    posterior, _ = bdl.evidence.train_by_evidence(
        model, guide, *data(), steps=150, rounds=2, learning_rate=0.1, batch_size=10
    )
    assert posterior.num_data == N
    return mean_of(posterior.median())


def by_swag(model):
    guide = bdl.guides.AutoSWAG(model, rank=2)
    bdl.training.train(model, guide, *data(), steps=150, learning_rate=0.1)
    run = bdl.training.collect_swag(model, guide, *data(), snapshots=30)
    assert run.batch_size == 4
    return guide.swag_approximation().location()


def by_sgmcmc(model):
    kernel = bdl.mcmc.SGHMC(step_size=1e-4)
    samples = bdl.mcmc.sgmcmc(
        model, data(), kernel=kernel, batch_size=10, num_warmup=300, num_samples=300, init="uniform"
    )
    return mean_of({name: draws.mean((0, 1)) for name, draws in samples.latents.items()})


BY = {"train": by_train, "evidence": by_evidence, "swag": by_swag, "sgmcmc": by_sgmcmc}


BOTH = [(by, stated) for by in BY for stated in STATING]
ALSO = [(by, stated) for by in BY if by != "train" for stated in ("tempered", "subsample")]


@pytest.mark.parametrize(
    ("by", "stated"),
    [pytest.param(*case, marks=pytest.mark.slow if case in ALSO else ()) for case in BOTH],
)
def test_all_that_takes_minibatches_reaches_the_posterior_of_all_data(by, stated):
    torch.manual_seed(0)
    torch.testing.assert_close(BY[by](STATING[stated]()), exact_mean(), atol=0.12, rtol=0)


@pytest.mark.parametrize("stated", STATING)
def test_laplace_and_the_elbo_by_batches_are_those_of_all_rows(stated):
    """Each batch counts N / B times in a run and once in a sum."""
    x, y = data()
    model = STATING[stated]()
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    guide.loc.data.copy_(exact_mean())
    posterior = guide.laplace_approximation([(x[:15], y[:15]), (x[15:], y[15:])])
    inverse = posterior.precision.solve(torch.eye(2, **D))
    torch.testing.assert_close(inverse, Conjugate(x, y, 0.3).covariance)
    point = bdl.guides.AutoMAP(model).prototype(x, y)
    found = bdl.training.estimate_elbo(model, point, x, y, batch_size=15)
    w = mean_of(point.median())
    joint = dist.Normal(0.0, 1.0).log_prob(w).sum() + dist.Normal(x @ w, 0.3).log_prob(y).sum()
    assert found == pytest.approx(joint.item())


REFUSALS = ValueError, bdl.errors.ArgumentError, bdl.errors.UnsupportedProgramError
REFUSED = {
    "follows the rows": (
        lambda: plain(size=len),
        r'10 rows as all data.*pyro.plate\("data", 40, subsample_size=len\(x\)\).*num_data=40',
    ),
    "no num_data": (lambda: ready_made(None), "10 rows as all data"),
    "states another": (
        lambda: plain(size=lambda x: 100, subsample_size=len),
        "states 100 data, but data holds 40",
    ),
    "another num_data": (lambda: ready_made(100), "states 100 data, but data holds 40"),
    "has as many cells always": (
        lambda: plain(size=lambda x: N),
        "cannot run on 10 of its 40 rows, as batch_size=10 needs .*subsample_size=len",
    ),
    "picks rows itself": (
        lambda: plain(size=lambda x: N, subsample_size=lambda x: 5),
        "'rows' picks 5 of the 40 rows at random in each run: take all of them .* batch_size=40,",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("by", ["train", "swag", "estimate_elbo"])
def test_programs_without_minibatches_are_refused(case, by):
    make, words = REFUSED[case]
    model = make()
    guide = bdl.guides.AutoSWAG(model)
    call = {
        "train": lambda: bdl.training.train(model, guide, *data(), steps=1, batch_size=10),
        "swag": lambda: bdl.training.collect_swag(
            model, guide, *data(), snapshots=1, batch_size=10
        ),
        "estimate_elbo": lambda: bdl.training.estimate_elbo(model, guide, *data(), batch_size=10),
    }[by]
    with pytest.raises(REFUSALS, match=words):
        call()


def test_the_check_of_a_minibatch_draws_no_numbers():
    model, (x, y) = STATING["subsample_size"](), data()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    bdl.training.descent.rows_per_step(model, (x, y), 10, N)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_do_not_fill_a_batch_are_left_out_of_a_pass():
    torch.manual_seed(0)
    batches = Minibatches(10, 4)
    first, second, third = (batches.next() for _ in range(3))
    assert len(first) == len(second) == len(third) == 4
    assert len(set(first.tolist()) | set(second.tolist())) == 8
