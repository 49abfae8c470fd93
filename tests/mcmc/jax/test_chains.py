"""How chains share a machine: the faster way is measured, and each device has its chains."""

import subprocess
import sys

import pytest
import torch
from helpers.killed_runs import drawn

from pyro_bdl.mcmc.jax.chains import fastest

_TWO_DEVICES = """
import sys
sys.path[:0] = sys.argv[1:]
import jax, torch
from helpers.killed_runs import drawn
from pyro_bdl.mcmc.jax import chains

assert len(jax.devices()) == 2
seen = []
stage = chains.Chain._run_stage
def watched(self, *args):
    stage(self, *args)
    seen.append((self.place, *jax.tree.leaves(self.state)[0].devices()))
chains.Chain._run_stage = watched
two = drawn("nuts", chain_method="sequential")
assert {(place, device.id) for place, device in seen} == {(0, 0), (1, 1)}, seen
print(two.latents["w"].sum().item())
"""


def test_the_method_of_least_time_per_iteration_is_taken():
    """Seconds of an iteration after the first call, which compiles: "a" 0.03, "b" 0.02."""
    now, called = [0.0], []

    def side(name, compilation, each):
        def run(count):
            now[0] += each * count + (compilation if name not in called else 0.0)
            called.append(name)

        return run

    sides = {"a": side("a", 1.0, 0.03), "b": side("b", 50.0, 0.02)}
    assert fastest(sides, lambda: now[0]) == "b"
    assert now[0] < 51 + 2  # less than a second of measuring for each


def test_the_method_taken_is_named_and_kept(tmp_path):
    first = drawn("mclmc", 2, chain_method="auto", checkpoint=tmp_path)
    chosen = first.info["chain_method"]
    assert chosen == ("parallel" if (tmp_path / "chain-0").exists() else "vectorized")
    again = drawn("mclmc", 3, chain_method=chosen, checkpoint=tmp_path)
    assert torch.equal(again.latents["w"][:, :2], first.latents["w"])
    assert drawn("mclmc", 3, chain_method="auto", checkpoint=tmp_path).num_draws == 3


@pytest.mark.slow
def test_single_chains_take_turns_on_the_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-c", _TWO_DEVICES, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = drawn("nuts", chain_method="sequential").latents["w"].sum().item()
    assert float(done.stdout.split()[-1]) == pytest.approx(expected)
