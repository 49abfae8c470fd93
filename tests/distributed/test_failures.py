"""A rank that is killed, and a job that goes on from its checkpoint."""

import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.utils import collectives
from pyro_bdl.utils.collectives import Ranks, writes_files

LIMIT = 240.0  # seconds
STEPS = 30

RUN = textwrap.dedent("""
    import datetime, random, sys, time, torch
    import torch.distributed as dist
    import pyro_bdl as bdl
    rank, size, folder, meeting, pause = sys.argv[1:]
    rank, size, pause = int(rank), int(size), float(pause)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{meeting}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 24)[:, None]
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), num_data=24)
    guide = bdl.guides.AutoMeanField(model).prototype(x, x)
    elbo = bdl.distributed.DataParallel_ELBO(bdl.elbo.TemperedTraceMeanField_ELBO())
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.03)
    run = bdl.Checkpoint(
        f"{folder}/run.ckpt", model=model, guide=guide, optimizer=optimizer, elbo=elbo
    )
    try:
        for step in run.steps(30, every=1):
            print(step, flush=True)
            rows = torch.randperm(24)[rank::size]  # the same order on all ranks
            optimizer.zero_grad()
            objective(x[rows], x[rows]).backward()
            optimizer.step()
            time.sleep(pause)
    except RuntimeError as error:
        print(error, flush=True)
        sys.exit(3)
    print(guide.location().detach().double().sum().item().hex(), len(rows), flush=True)
    dist.barrier()
""")


def started(folder, meeting, size=2, pause=0.0):
    folder.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(rank), str(size), str(folder), meeting, str(pause)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def ended(processes):
    return [process.communicate(timeout=LIMIT) for process in processes]


@pytest.mark.slow
def test_a_rank_that_is_killed_at_random_moments_and_the_job_that_goes_on(tmp_path):
    """The other rank stops, names it, and the resumed job ends with the same parameters."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    (expected, _), _ = ended(started(whole, "meeting"))
    draw = random.Random(0)
    for kill in range(4):
        processes = started(cut, f"meeting {kill}", pause=0.02)
        victim = kill % 2
        processes[victim].stdout.readline()
        time.sleep(draw.uniform(0.0, 0.3))
        processes[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        processes[victim].communicate(timeout=LIMIT)
        output, _ = processes[1 - victim].communicate(timeout=LIMIT)
        assert time.monotonic() - began < 60.0
        assert processes[1 - victim].returncode == 3
        assert output.splitlines()[-1].startswith(f"rank {victim} does not answer, and this rank")
    (first, _), (second, _) = ended(started(cut, "last meeting"))
    assert first.splitlines()[-1] == second.splitlines()[-1] == expected.splitlines()[-1]
    assert "0x" in first and int(first.splitlines()[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_a_job_goes_on_with_another_number_of_ranks(size, tmp_path):
    processes = started(tmp_path, "first", pause=0.05)
    lines = [processes[0].stdout.readline() for _ in range(8)]
    assert lines[-1] == "7\n"
    for process in processes:
        process.send_signal(signal.SIGKILL)
    ended(processes)
    outputs = [output.splitlines() for output, _ in ended(started(tmp_path, "second", size))]
    assert all(lines[0] == outputs[0][0] and int(lines[0]) >= 7 for lines in outputs)
    assert {lines[-1] for lines in outputs} == {outputs[0][-1]}
    assert outputs[0][-1].endswith(f" {24 // size}")


def test_the_draws_of_a_rank_follow_from_its_state(conjugate):
    """A bound that goes on from a state draws what the first one draws next."""
    guide = AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    first = DataParallel_ELBO(bdl.elbo.TemperedTraceMeanField_ELBO())

    def losses(elbo):
        pair = conjugate.model, guide, conjugate.x, conjugate.y
        return [elbo.differentiable_loss(*pair).item() for _ in range(3)]

    before = losses(first)
    state = first.state_dict()
    expected = losses(first)
    second = DataParallel_ELBO(bdl.elbo.TemperedTraceMeanField_ELBO())
    second.load_state_dict(state)
    assert second.elbo.step == second.step == 3
    torch.rand(3)
    assert losses(second) == expected != before


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_missing_ranks_are_named(alone, monkeypatch):
    monkeypatch.setattr(collectives, "_PATIENCE", 0.1)
    ranks = Ranks()
    ranks.size = 4  # of which rank 2 signs
    dist.distributed_c10d._get_default_store().set("pyro_bdl stops 2", "yes")
    expected = pytest.raises(RuntimeError, match="rank 1, 3 does not answer, and this rank stops")
    with expected, ranks._or_name_the_missing():
        raise RuntimeError("Connection closed by peer")


def test_the_first_rank_writes(alone, monkeypatch, tmp_path):
    assert writes_files()
    run = bdl.Checkpoint(tmp_path / "run")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    run.save(1)
    assert not writes_files() and not (tmp_path / "run").exists()
