"""Recorded log densities and gradients against those of the program."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.mcmc.stochastic_gradient import scores as scores_module
from pyro_bdl.mcmc.stochastic_gradient.scores import Scores
from pyro_bdl.program import Program
from pyro_bdl.utils.module_state import evaluation_mode


def networks():
    hidden = bdl.priors.PerLayer(bdl.priors.Normal(dist.HalfCauchy(1.0)))
    mlp = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    cnn = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.GELU(), nn.Flatten())
    cnn.extend([nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)])
    return {
        "Regression": (bdl.models.Regression(bdl.bayesianize(mlp, hidden), num_data=50), False),
        "Classification": (bdl.models.Classification(bdl.bayesianize(cnn), num_data=50), True),
    }


def batch_of(rows, classes):
    y = torch.arange(rows) % 3 if classes else torch.randn(rows).double()
    return (torch.randn(rows, 3).double(), y), {}


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("name", list(networks()))
def test_recorded_scores_are_the_programs(name, chains):
    model, classes = networks()[name]
    model = model.double()
    with evaluation_mode(model):
        program = Program(model, *batch_of(8, classes)[0])
        recorded, run = Scores(program.log_density), Scores(program.log_density, traced=False)
        for rows in (8, 8, 8, 8, 5, 5, 5, 8):
            batch = batch_of(rows, classes)
            u = 0.3 * torch.randn(chains, program.size, dtype=torch.float64)
            for found, exact in zip(recorded(u, batch), run(u, batch), strict=True):
                assert torch.allclose(found, exact, rtol=1e-9, atol=1e-9)
                assert not found.requires_grad
    assert len(recorded.graphs) == 2 and None not in recorded.graphs.values()


def test_each_chain_has_its_own_gradient():
    scores = Scores(lambda u, x: -(x * u**2).sum(), traced=False)
    u, x = torch.randn(4, 3), torch.rand(3)
    values, gradient = scores(u, ((x,), {}))
    assert torch.allclose(gradient, -2 * x * u)
    assert torch.allclose(values, -(x * u**2).sum(-1))


UNRECORDABLE = {
    "control flow": lambda u, x: (u * x).sum() if x.sum() > 0 else (u**2 * x).sum(),
    "a number read off": lambda u, x: u.sum() * float(x.sum()),
    "random numbers": lambda u, x: (u * torch.randn(3)).sum(),
}


@pytest.mark.parametrize("name", list(UNRECORDABLE))
def test_what_cannot_be_recorded_is_run(name):
    density = UNRECORDABLE[name]
    scores = Scores(density)
    u = torch.randn(2, 3)
    for sign in (1, -1, 1, -1):
        x = sign * torch.ones(3)
        torch.manual_seed(0)
        values, _ = scores(u, ((x,), {}))
        if name != "random numbers":
            assert torch.allclose(values, torch.stack([density(row, x) for row in u]))
    assert list(scores.graphs.values()) == [None]


def test_arguments_that_are_not_tensors_are_part_of_what_was_recorded():
    scores = Scores(lambda u, power=1: (u**power).sum())
    u = torch.rand(2, 3)
    for power in (1, 2, 1, 2):
        assert torch.allclose(scores(u, ((), {"power": power}))[0], (u**power).sum(-1))
    assert len(scores.graphs) == 2


def test_shapes_beyond_the_most_are_run(monkeypatch):
    monkeypatch.setattr(scores_module, "_MOST_GRAPHS", 2)
    scores = Scores(lambda u, x: (u.sum() * x).sum())
    u = torch.randn(2, 3)
    for rows in (1, 2, 3, 4):
        x = torch.randn(rows)
        assert torch.allclose(scores(u, ((x,), {}))[0], u.sum(-1) * x.sum())
    assert [graph is None for graph in scores.graphs.values()] == [False, False, True, True]


def test_a_long_walk_is_recorded_and_gives_the_same_draws():
    model, _ = networks()["Regression"]
    x, y = torch.randn(50, 3), torch.randn(50)
    options = {"num_chains": 2, "init": "network", "progress": False}
    options["kernel"] = bdl.mcmc.SGHMC(step_size=1e-5)
    options |= {"num_warmup": 20, "batch_size": 10}
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    short = bdl.mcmc.sgmcmc(model, (x, y), num_samples=8, **options)
    assert len(runs) > short.info["steps"] == 100
    runs.clear()
    recorded = bdl.mcmc.sgmcmc(model, (x, y), num_samples=50, **options)
    assert recorded.info["steps"] == 520 and len(runs) < 100
    for name, value in short.latents.items():
        assert torch.allclose(value, recorded.latents[name][:, :8], rtol=1e-3, atol=1e-4)
