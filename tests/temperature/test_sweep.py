"""Sweeps reach the known optimum at every temperature, and their table holds its numbers."""

import math

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import temperature
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError

DOUBLE = {"dtype": torch.float64}
X = torch.linspace(-1, 1, 30, **DOUBLE)[:, None]
LABELS = (X[:, 0] > 0.2).long()


def family(width):
    net = nn.Sequential(nn.Linear(1, width, **DOUBLE), nn.ReLU(), nn.Linear(width, 2, **DOUBLE))
    return bdl.models.Classification(bdl.bayesianize(net), num_data=30)


def linear(x, y=None):
    """y = a b x with b fixed to one by a narrow prior: a linear regression in a, of one neuron."""
    b = pyro.sample("b", dist.Normal(torch.ones(1, 1, **DOUBLE), 1e-6).to_event(2))
    a = pyro.sample("a", dist.Normal(torch.zeros(1, 1, **DOUBLE), 1.0).to_event(2))
    f = (x @ b) @ a
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f[:, 0], 0.5), obs=y)


@pytest.fixture(scope="module")
def classes():
    return temperature.sweep(
        family, bdl.guides.AutoMeanField, (X, LABELS), (X, LABELS), ood=X + 3,
        taus=[0.01, 1.0], etas=[1.0], widths=[4, 8], steps=30, num_samples=20, batch_size=10,
        learning_rate=0.05,
    )  # fmt: skip


def test_the_optimum_at_every_temperature():
    """Precision x' x / (sigma^2 eta) + 1 of the tempered posterior, trained at once."""
    y = 0.8 * X[:, 0]
    etas = [0.1, 1.0, 10.0]
    found = temperature.sweep(
        linear, bdl.guides.AutoMeanField, (X, y), (X, y), etas=etas, steps=100,
        learning_rate=0.15, num_particles=8, num_samples=10,
    )  # fmt: skip
    for row in found.rows:
        eta = row["eta"]
        guide = found.guides[1, eta]
        at = guide.require_layout().slices["a"]
        precision = (X.square().sum() / 0.5**2 / eta + 1).item()
        mean = (X[:, 0] @ y / 0.5**2 / eta).item() / precision
        assert guide.scale[at].item() == pytest.approx(precision**-0.5, rel=0.05)
        assert guide.loc[at].item() == pytest.approx(mean, abs=0.15 * precision**-0.5)
        s, m = guide.scale.detach(), guide.loc.detach()
        prior = torch.tensor([1.0 if name == "a" else 1e-6 for name in ("b", "a")], **DOUBLE)
        center = torch.tensor([1.0, 0.0], **DOUBLE)
        kl = ((prior / s).log() + (s**2 + (m - center) ** 2) / (2 * prior**2) - 0.5).sum()
        assert row["kl"] == pytest.approx(kl.item(), rel=1e-9) and row["tau"] == eta / 30


class Averaged(nn.Module):
    """f(x) = 1/N sum_j a_j relu(b_j x), the scaling of the theory."""

    def __init__(self, width):
        super().__init__()
        self.b = nn.Linear(1, width, bias=False, **DOUBLE)
        self.a = nn.Linear(width, 1, bias=False, **DOUBLE)

    def forward(self, x):
        return self.a(self.b(x).relu()) / len(self.b.weight)


@pytest.mark.slow
def test_the_kl_vanishes_at_temperature_1_and_stays_of_order_n_at_tau_p_over_n():
    """Huix et al. (2022): KL(q* || prior) -> 0 at eta = 1; at eta = tau p / N it grows as N."""
    found = temperature.sweep(
        lambda width: bdl.models.Regression(bdl.bayesianize(Averaged(width)), noise=1.0),
        lambda model: bdl.guides.AutoMeanField(model, init_scale=0.9),
        (X, 2 * X[:, 0]), (X, 2 * X[:, 0]), taus=[0.01], etas=[1.0], widths=[4, 60], steps=250,
        learning_rate=0.05, num_particles=8, num_samples=4,
    ).to_frame()  # fmt: skip
    bayes, scaled = (found[found.eta == 1.0].kl, found[found.eta != 1.0].kl_per_neuron)
    assert bayes.iloc[1] < 0.1 < 5 * bayes.iloc[1] + 0.1 < bayes.iloc[0] + 0.1
    assert 0.5 < scaled.iloc[1] / scaled.iloc[0] < 1.5 and scaled.iloc[1] > 0.5


def test_the_table(classes):
    assert [(row["neurons"], round(row["eta"], 6)) for row in classes.rows] == [
        (4, 0.075), (4, 1.0), (4, 7.5), (8, 0.0375), (8, 1.0), (8, 3.75),
    ]  # fmt: skip
    frame = classes.to_frame()
    assert isinstance(frame, pd.DataFrame) and len(frame) == 6
    kept = ["accuracy", "nlpd", "expected_nll", "ece", "confidence", "ood_entropy", "kl"]
    assert set(kept) <= set(frame.columns) and frame[kept].notna().all().all()
    assert (frame.expected_nll >= frame.nlpd).all()
    assert (frame.kl_per_neuron - frame.kl / frame.neurons).abs().max() < 1e-12
    assert (frame.tau - frame.eta * frame.neurons / 30).abs().max() < 1e-12
    assert (frame.ood_entropy <= math.log(2) + 1e-9).all()
    assert "mean NLL" in str(classes) and len(str(classes).splitlines()) == 9


def test_rows_are_those_of_their_guides(classes):
    row = classes.rows[0]
    guide = classes.guides[row["neurons"], row["eta"]]
    again = bdl.compare(
        guide.program_model, {"": guide}, X, LABELS, reference=None, num_samples=20, seed=0
    )
    assert again.rows[0]["nlpd"] == row["nlpd"]
    assert guide is not classes.guides[4, 1.0]
    assert not torch.equal(guide.loc, classes.guides[4, 1.0].loc)


def test_figures_mark_the_temperatures(classes):
    assert classes.best_tau() in [row["tau"] for row in classes.rows]
    figures = classes.figures(tau=0.5)
    assert list(figures) == ["scores", "kl", "scores_by_tau"]
    curves = [line for line in figures["scores_by_tau"].axes[0].lines if len(line.get_xdata()) == 3]
    taus = [row["tau"] for row in classes.rows]
    assert [list(line.get_xdata()) for line in curves] == [taus[:3], taus[3:]]
    assert len(figures["scores_by_tau"].axes[0].lines) == 2
    axis = figures["scores"].axes[0]
    marked = {line.get_xdata()[0] for line in axis.lines if len(set(line.get_xdata())) == 1}
    assert marked == {1.0, 0.5 * 30 / 4, 0.5 * 30 / 8}
    assert [t.get_text() for t in figures["scores"].legends[0].get_texts()] == ["N = 4", "N = 8"]


def test_files(classes, tmp_path):
    saved = pd.read_csv(classes.to_csv(tmp_path / "sweep.csv"))
    pd.testing.assert_frame_equal(saved, classes.to_frame(), check_dtype=False)


def test_local_reparameterization_and_one_program():
    found = temperature.sweep(
        family(5), bdl.guides.AutoMeanField, (X, LABELS), (X, LABELS), etas=[0.1, 1.0], steps=5,
        estimator="local_reparameterization", num_samples=4,
    )  # fmt: skip
    assert [row["neurons"] for row in found.rows] == [5, 5]


def test_laplace_is_that_of_the_tempered_posterior():
    """Precision x' x / (sigma^2 eta) + 1 of the linear regression, at any point."""
    y, etas = 0.8 * X[:, 0], [0.1, 1.0]
    with pytest.warns(BdlWarning, match="not at a maximum"):  # of b, whose prior is so narrow
        found = temperature.sweep(
            linear, lambda model: bdl.guides.AutoLaplaceGGN(model, structure="full"), (X, y),
            (X, y), etas=etas, steps=60, learning_rate=0.1, num_samples=4,
        )  # fmt: skip
    for eta, row in zip(etas, found.rows, strict=True):
        guide = found.guides[1, eta]
        precision = (X.square().sum() / 0.5**2 / eta + 1).item()
        at = guide.require_layout().slices["a"]
        assert guide.variances()[at].item() == pytest.approx(1 / precision, rel=0.02)
        assert row["kl"] > 0.1 and math.isfinite(row["nlpd"])


def test_every_family_that_is_trained_by_its_elbo():
    for guide in (bdl.guides.AutoMatrixNormal, bdl.guides.AutoMCDropout, bdl.guides.AutoEnsemble):
        found = temperature.sweep(
            family(3), guide, (X, LABELS), (X, LABELS), etas=[0.1, 1.0], steps=3, num_samples=4
        )
        assert len(found.rows) == 2 and math.isfinite(found.rows[0]["kl"])
        start = found.guides[3, 0.1].location()
        assert not torch.equal(start, found.guides[3, 1.0].location())


def test_temperatures_that_differ_by_rounding_are_one():
    found = temperature.sweep(
        family(3), bdl.guides.AutoMeanField, (X, LABELS), (X, LABELS), etas=[0.7],
        taus=[0.7 * 3 / 30 * (1 + 1e-15), 0.1], steps=1, num_samples=2,
    )  # fmt: skip
    assert [row["eta"] for row in found.rows] == pytest.approx([0.7, 1.0])


def test_refusals():
    data = {"train": (X, LABELS), "test": (X, LABELS)}
    with pytest.raises(ValueError, match=r"give taus=... or etas=..."):
        temperature.sweep(family(3), **data)
    with pytest.raises(ValueError, match="positive finite"):
        temperature.sweep(family(3), **data, etas=[0.0])
    with pytest.raises(ValueError, match=r"sweep needs train=\(x, y\)"):
        temperature.sweep(family(3), etas=[1.0])
    many = {"etas": [1.0], "steps": 1} | data
    for options, error, told in (
        ({"model": family}, TypeError, r"model does not take \(x, y\).*with widths"),
        ({"widths": [2]}, TypeError, "model is a Classification: with widths"),
        ({"model": family, "widths": []}, ValueError, "sweep needs widths"),
        ({"model": family, "widths": [0]}, ValueError, "widths must be at least 1"),
        ({"guide": bdl.guides.AutoSWAG}, TypeError, "guide makes a AutoSWAG"),
        ({"guide": AutoNormal}, TypeError, "guide makes a AutoNormal"),
        ({"guide": bdl.guides.AutoMeanField(family(3))}, TypeError, "guide is a AutoMeanField"),
        ({"model": normalized()}, UnsupportedProgramError, "'network.network.1' is a BatchNorm1d"),
    ):
        with pytest.raises(error, match=told):
            temperature.sweep(**({"model": family(3)} | many | options))


def normalized():
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    return bdl.models.Classification(bdl.bayesianize(net), num_data=30)
