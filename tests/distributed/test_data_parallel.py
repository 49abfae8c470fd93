"""Two processes, each with a part of the data, against one process with all of them.

Each case is a function of the data of one process (``helpers/rank_*.py``). The two processes run
all of them once (``helpers/two_ranks.py``); the test process runs the same functions on all data.
"""

import pyro
import pytest
import torch
from helpers import rank_cases
from helpers.rank_cases import CASES, N, data, program
from helpers.rank_curvature import maximum
from helpers.rank_training import Recorded
from helpers.two_ranks import ON_CUDA, two_processes
from pyro.infer import Trace_ELBO

import pyro_bdl as bdl
from pyro_bdl.distributed import DataParallel_ELBO, Shard, broadcast
from pyro_bdl.guides import AutoMAP, AutoMeanField


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
    monkeypatch.setattr(rank_cases, "DEVICE", "cuda")
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
        for name, value in found["members"].items():
            mine = [part["mine"][3][name] for part in (first, second)]
            assert torch.equal(value, torch.cat(mine)) and len(value) == 4
        assert found["same"] == (
            "ValueError: rank 1 has the same draws as rank 0: give each rank a seed of its own"
        )
        assert found["other"].startswith("ValueError: rank 1 has chains of shapes {'w': (4, 2)}")


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
    "unknown N": "ValueError: the program counts its batch on rank 0 as all data",
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
        words = "the program states 23 data, but 24 were passed: their curvature is scaled down"
        assert words in found["failures"]["repeated"]


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


def test_alone_shards_and_draws_are_all_there_are():
    assert len(list(Shard(data(0, 1)))) == 1
    draws = {"y": torch.ones(2)}
    assert bdl.distributed.gather(draws) is draws
