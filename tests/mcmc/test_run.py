"""How chains share a machine: each device has its chains."""

import subprocess
import sys

import pytest
from helpers.killed_runs import drawn

_TWO_DEVICES = """
import sys
sys.path[:0] = sys.argv[1:]
import jax, torch
from helpers.killed_runs import drawn
from pyro_bdl.mcmc import run

assert len(jax.devices()) == 2
seen = []
iterate = run.Chain._iterate
def watched(self, *args):
    iterate(self, *args)
    seen.append((self.device, *jax.tree.leaves(self.state)[0].devices()))
run.Chain._iterate = watched
two = drawn("nuts")
assert {(own.id, device.id) for own, device in seen} == {(0, 0), (1, 1)}, seen
print(two.latents["w"].sum().item())
"""


@pytest.mark.slow
def test_single_chains_take_turns_on_the_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-c", _TWO_DEVICES, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = drawn("nuts").latents["w"].sum().item()
    assert float(done.stdout.split()[-1]) == pytest.approx(expected)
