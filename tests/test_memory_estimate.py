"""The estimate against the bytes of live tensors in the real computation."""

import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import guides, memory_estimate, training
from pyro_bdl.predictive.sampled import DRAWS_AT_ONCE
from pyro_bdl.utils.memory import LiveMemory


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 150), nn.ReLU(), nn.Linear(150, 150), nn.ReLU())
    net.append(nn.Linear(150, 3))
    x, y = torch.randn(256, 20), torch.randint(0, 3, (256,))
    return bdl.models.Classification(bdl.bayesianize(net), num_data=256), x, y


def test_live_memory_is_the_peak_of_what_lives_together():
    with LiveMemory() as live:
        first = torch.zeros(1000, dtype=torch.float64)
        view = first[:10]
        first.add_(1.0)
        del first
        assert live.now == 8000  # the view holds it
        del view
        assert live.now == 0
        second = torch.zeros(500, dtype=torch.float64) + 1.0
    assert live.peak == 8000 and live.now == 4000 == second.nbytes


@pytest.mark.parametrize(
    "make, particles",
    [
        (guides.AutoMAP, 1),
        (guides.AutoMeanField, 1),
        (guides.AutoMeanField, 4),
        (lambda model: guides.AutoLowRank(model, rank=5), 1),
        (lambda model: guides.AutoEnsemble(model, size=3), 3),
        (guides.AutoMCDropout, 1),
    ],
    ids=["map", "mean-field", "mean-field, 4 draws", "low rank", "ensemble", "dropout"],
)
def test_training(problem, make, particles):
    model, x, y = problem
    found = bdl.estimate_memory(model, make(model), x, y, batch_size=64, num_particles=particles)
    with LiveMemory() as live:
        guide = make(model).prototype(x, y)
        training.train(model, guide, x, y, steps=2, batch_size=64, num_particles=particles)
    held = sum(p.nbytes for p in guide.parameters())
    room = found.parts["room between blocks"]
    assert room == 2 * 4 * max(latent.size for latent in bdl.Program(model, x, y).latents.values())
    assert found.total - room == pytest.approx(live.peak, rel=0.25)
    assert found.parts["parameters"] == pytest.approx(held, rel=0.02)
    assert found.parts["optimizer"] == 2 * found.parts["gradients"]


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_structures(problem, structure):
    model, x, y = problem
    if structure == "full":
        net = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
        model = bdl.models.Classification(bdl.bayesianize(net), num_data=256)
    found = bdl.estimate_memory(model, structure, x, y)
    guide = guides.AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    with LiveMemory() as live:
        guide.laplace_approximation((x, y))
    room = found.parts["room between blocks"]
    workspace = found.parts.get("largest decomposition", 0)
    assert workspace == (4 * 8 * 150**2 if structure == "kron" else 0)  # most of it is LAPACK's own
    assert found.total - workspace - room == pytest.approx(
        live.peak, rel=0.35 if structure == "full" else 0.25
    )


def test_chains_and_predictions_count_their_draws(problem):
    model, x, y = problem
    size = bdl.Program(model, x, y).size
    found = bdl.estimate_memory(model, "nuts", x, y, num_samples=50, num_chains=3)
    assert found.parts["draws"] == 3 * 50 * size * 4
    assert found.parts["their blocks, while they are joined"] == found.parts["draws"]
    found = bdl.estimate_memory(model, "prediction", x, y, num_samples=10)
    assert found.parts["draws of the weights"] == 10 * size * 4
    assert found.parts["the next part of them"] == 0
    many = bdl.estimate_memory(model, "prediction", x, y, num_samples=10**6).parts
    most = DRAWS_AT_ONCE // size * size * 4  # numbers that are drawn at a time
    assert many["draws of the weights"] == many["the next part of them"] == most
    outputs = bdl.Predictive(model, guides.AutoMAP(model).prototype(x, y), 10)(x)
    assert found.parts["results"] == sum(value.numel() * 4 for value in outputs.values())


def test_what_does_not_fit_is_refused_with_what_does(problem, monkeypatch):
    model, x, y = problem
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: 5_000_000)
    found = bdl.estimate_memory(model, "full", x, y)
    assert not found.fits and "It does not fit" in str(found)
    said = r'structure="full" over .* latents needs about .* GiB, 4.77 MiB are free: use .*"diag"'
    with pytest.raises(MemoryError, match=said):
        found.require()
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: 1_500_000)
    found = bdl.estimate_memory(model, guides.AutoMeanField, x, y, batch_size=32)
    assert not found.fits and found.fitting == ("AutoMAP",)
    monkeypatch.setattr(memory_estimate, "available_memory", lambda device: None)
    bdl.estimate_memory(model, "diag", x, y).require()


def test_names_and_kinds_are_checked(problem):
    model, x, y = problem
    with pytest.raises(ValueError, match="unknown posterior 'nutz'"):
        bdl.estimate_memory(model, "nutz", x, y)
    with pytest.raises(TypeError, match="a guide, its class or a name, got int"):
        bdl.estimate_memory(model, 3, x, y)


def test_training_refuses_what_cannot_fit(problem, monkeypatch):
    model, x, y = problem
    monkeypatch.setattr(training.svi, "available_memory", lambda device: 100_000)
    with pytest.raises(MemoryError, match=r"gradients and Adam's state of .* parameters need"):
        training.train(model, guides.AutoMeanField(model), x, y, steps=1)
