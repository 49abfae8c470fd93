"""How often the program runs in a comparison."""

import pytest
import torch

import pyro_bdl as bdl

ROWS = 33


class Network(torch.nn.Linear):
    def forward(self, x):
        self.rows.append(len(x))
        return super().forward(x)


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    network, x = Network(1, 1), torch.linspace(-1, 1, 20)[:, None]
    network.rows, y = [], torch.linspace(-2, 2, 20)
    model = bdl.models.Regression(bdl.bayesianize(network), noise=0.5)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    trained = bdl.guides.AutoLaplaceGGN(model)
    bdl.training.train(model, trained, x, y, steps=200, learning_rate=0.1, progress=False)
    draws = {name: value[None] for name, value in guide.sample_latents(100).items()}
    posteriors = {
        "guide": guide,
        "laplace": trained.laplace_approximation((x, y)),
        "samples": bdl.Samples(draws),
    }
    return model, network.rows, posteriors


# One run reads what is observed. Draws take a run that measures their memory, and a vectorized one.
MOST = {"guide": 3, "samples": 3, "laplace": 3, "all": 7}


@pytest.mark.parametrize("name", MOST)
def test_runs_at_the_test_points(problem, name):
    model, rows, posteriors = problem
    chosen = posteriors if name == "all" else {name: posteriors[name]}
    x = torch.linspace(-2, 2, ROWS)[:, None]
    rows.clear()
    options = {"reference": None, "num_samples": 50, "progress": False}
    bdl.compare(model, chosen, x, x[:, 0], **options)
    assert rows.count(ROWS) <= MOST[name]
