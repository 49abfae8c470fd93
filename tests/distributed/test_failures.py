"""A rank that is killed, and a job that goes on from its checkpoint."""

import datetime
import importlib
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.utils.collectives import writes_files

LIMIT = 400.0  # seconds, of all jobs together
STEPS, ROWS, KILLS = 200, 24, 20


def rank_main(rank, size, folder, meeting, pause):
    """One rank of a job: trains from the checkpoint on, and writes down its steps and its end."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{meeting}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, ROWS)[:, None]
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), num_data=ROWS)
    guide = AutoMeanField(model).prototype(x, x)
    elbo = DataParallel_ELBO(bdl.elbo.TemperedTraceMeanField_ELBO())
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.03)
    run = bdl.Checkpoint(
        folder / "run.ckpt", model=model, guide=guide, optimizer=optimizer, elbo=elbo
    )
    with open(folder / f"{meeting}.{rank}", "w", buffering=1) as log:
        try:
            for step in run.steps(STEPS, every=1):
                print(step, file=log)
                rows = torch.randperm(ROWS)[rank::size]  # of one order on all ranks
                optimizer.zero_grad()
                objective(x[rows], x[rows]).backward()
                optimizer.step()
                time.sleep(pause)
            print(guide.location().detach().double().sum().item().hex(), len(rows), file=log)
            dist.barrier()
        except RuntimeError as error:
            print(error, file=log)
            sys.exit(3)


class Job:
    """Ranks in processes of their own, forked from this one."""

    def __init__(self, folder, meeting, size=2, pause=0.0):
        folder.mkdir(exist_ok=True)
        context = multiprocessing.get_context("fork")
        self.logs = [folder / f"{meeting}.{rank}" for rank in range(size)]
        self.ranks = [
            context.Process(target=rank_main, args=(rank, size, folder, meeting, pause))
            for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def lines(self, rank):
        return self.logs[rank].read_text().splitlines() if self.logs[rank].exists() else []

    def wait_for(self, rank, count):
        while len(self.lines(rank)) < count and self.ranks[rank].is_alive():
            time.sleep(0.001)

    def end(self):
        """The lines of all ranks, and their exit codes."""
        for process in self.ranks:
            process.join()
        return [self.lines(rank) for rank in range(len(self.ranks))], [
            process.exitcode for process in self.ranks
        ]


def main(folder):
    """Train once without a stop, and once with kills; go on with other numbers of ranks."""
    importlib.import_module("torch._dynamo")  # which each rank would import otherwise
    whole, cut = folder / "whole", folder / "cut"
    found = {"whole": Job(whole, "meeting").end(), "kills": []}
    draw = random.Random(0)
    for kill in range(KILLS):
        job, victim = Job(cut, f"meeting{kill}", pause=0.02), kill % 2
        job.wait_for(victim, 2)
        time.sleep(draw.uniform(0.0, 0.1))
        job.ranks[victim].kill()
        lines, codes = job.end()
        found["kills"].append((lines[1 - victim], codes[1 - victim]))
    for size in (1, 3):
        other = folder / f"of {size}"
        shutil.copytree(cut, other)
        found[f"of {size}"] = Job(other, "meeting", size).end()
    found["rest"] = Job(cut, "last").end()
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_rank_that_is_killed_and_the_job_that_goes_on(tmp_path):
    """The other rank stops. The resumed job ends with the same parameters."""
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for lines, code in found["kills"]:
        assert code == 3
        assert lines[-1].startswith("another rank does not answer, and this rank stops")
    expected = {lines[-1] for lines in found["whole"][0]}
    rest = found["rest"][0]
    assert {lines[-1] for lines in rest} == expected and len(expected) == 1
    assert KILLS <= int(rest[0][0]) < STEPS
    for size in (1, 3):
        logs, codes = found[f"of {size}"]
        assert codes == [0] * size
        assert all(lines[0] == rest[0][0] for lines in logs)  # the same step
        assert len({lines[-1] for lines in logs}) == 1
        assert logs[0][-1].startswith(("0x", "-0x")) and logs[0][-1].endswith(f" {ROWS // size}")


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


def test_the_first_rank_writes(alone, monkeypatch, tmp_path):
    assert writes_files()
    run = bdl.Checkpoint(tmp_path / "run")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    run.save(1)
    assert not writes_files() and not (tmp_path / "run").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
