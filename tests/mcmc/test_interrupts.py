"""Ctrl-C while chains run, and what is kept of chains of different lengths."""

import gc
import signal
import threading
import time
from concurrent.futures import wait

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import mcmc
from pyro_bdl.errors import BdlWarning
from pyro_bdl.mcmc import run as jax_run
from pyro_bdl.mcmc.chains import Chains, stack_chains
from pyro_bdl.mcmc.run import deferred_interrupt

pytestmark = [
    pytest.mark.usefixtures("ctrl_c"),
    pytest.mark.filterwarnings("ignore:.*#divergences"),  # chains of a few draws
    pytest.mark.filterwarnings("ignore:.*#stuck-chains"),  # which start where they stay
]


def one_mean(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def chain(draws, value, interrupted=False):
    values = torch.full((1, draws, 2), float(value))
    return Chains(values, {"diverging": values[..., 0]}, interrupted)


@pytest.mark.parametrize(
    "lengths, kept, draws",
    [((5, 5, 5), (0, 1, 2), 5), ((5, 1, 5), (0, 2), 5), ((5, 4, 3), (0, 1, 2), 3)],
)
def test_as_many_draws_as_possible_are_kept(lengths, kept, draws):
    chains = [chain(length, i, length < 5) for i, length in enumerate(lengths)]
    if len(kept) < 3:
        with pytest.warns(
            BdlWarning, match="1 of 3 chains are left out: they ended with at most 1"
        ):
            joined = stack_chains(chains)
    else:
        joined = stack_chains(chains)
    assert joined.vectors[:, 0, 0].tolist() == list(kept)
    assert joined.vectors.shape == (len(kept), draws, 2)
    assert joined.stats["diverging"].shape == (len(kept), draws)
    assert joined.interrupted == (min(lengths) < 5)


@pytest.mark.filterwarnings("ignore:.*chains are left out")  # by where each of them was
def test_ctrl_c_ends_parallel_chains_and_keeps_their_draws(monkeypatch, slow_clock):
    chains = []

    class Watched(jax_run.Chain):
        def __init__(self, *args):
            super().__init__(*args)
            chains.append(self)

    calls = []

    def interrupted_once(running, **options):
        """Ctrl-C reaches the waiting thread as soon as each chain has a draw."""
        calls.append(options)
        if len(calls) > 1:
            return wait(running, **options)
        while not all(chain.blocks for chain in chains) and not all(f.done() for f in running):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(jax_run, "Chain", Watched)
    monkeypatch.setattr(jax_run, "wait", interrupted_once)
    with pytest.warns(BdlWarning, match="interrupted"):
        samples = mcmc.sample(
            one_mean,
            torch.tensor(0.5),
            num_chains=2,
            num_warmup=20,
            num_samples=20_000,
            chain_method="parallel",
            progress=False,
        )
    assert samples.info["interrupted"]
    assert 0 < samples.num_draws < 20_000
    assert samples.latents["mean"].isfinite().all()


class Collecting:
    """A bar in which garbage is collected after n iterations, with Ctrl-C in the midst of it."""

    def __init__(self, n):
        self.left = n

    def update(self, size):
        before, self.left = self.left, self.left - size
        if before > 0 >= self.left:
            gc.callbacks.append(self.strike)
            gc.collect()

    def strike(self, phase, info):
        gc.callbacks.remove(self.strike)
        signal.raise_signal(signal.SIGINT)

    def close(self):
        pass


@pytest.mark.parametrize(
    "chains, method",
    [(1, None), pytest.param(2, "vectorized", marks=pytest.mark.slow)],
)
def test_ctrl_c_inside_the_garbage_collector(chains, method, monkeypatch, slow_clock):
    """Python drops exceptions in callbacks of the garbage collector; JAX has such a callback."""
    monkeypatch.setattr(jax_run, "progress_bar", lambda *_: Collecting(50))
    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(BdlWarning, match="interrupted"):
        samples = mcmc.sample(
            one_mean,
            torch.tensor(0.5),
            num_chains=chains,
            num_warmup=20,
            num_samples=100,
            chain_method=method,
        )
    assert samples.info["interrupted"] and 0 < samples.num_draws < 100
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_the_last_block_is_told(monkeypatch):
    monkeypatch.setattr(jax_run, "progress_bar", lambda *_: Collecting(40))
    with pytest.warns(BdlWarning, match="interrupted: 20 of 20 draws"):
        samples = mcmc.sample(one_mean, torch.tensor(0.5), num_warmup=20, num_samples=20)
    assert samples.info["interrupted"]


def test_the_first_interrupt_is_remembered_and_the_second_raised():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as event:
        assert not event.is_set()
        signal.raise_signal(signal.SIGINT)
        assert event.is_set()
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with deferred_interrupt() as event:
            seen.append((event.is_set(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
