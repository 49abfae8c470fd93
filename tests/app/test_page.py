"""A comparison as a page, and as HTML for notebooks."""

import html
import re

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import plots
from pyro_bdl.app.figures import shown_points
from pyro_bdl.comparison.judge import criteria


@pytest.fixture(scope="module")
def comparison():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    model = bdl.models.Regression(bdl.bayesianize(net))
    x, y = torch.randn(20, 2), torch.randn(20)
    made = {
        name: kind(model).prototype(x, y)
        for name, kind in (
            ("vi", bdl.guides.AutoMeanField),
            ("map", bdl.guides.AutoMAP),
            ("dropout", bdl.guides.AutoMCDropout),
        )
    }
    costs = {name: bdl.Costs(seconds=1.0 + i) for i, name in enumerate(made)}
    return bdl.compare(model, made, x, y, reference="vi", num_samples=40, costs=costs)


def test_the_page_has_answer_ranking_and_figures(comparison, tmp_path):
    figures = comparison.figures(points=[f"row {i}, target 1" for i in range(20)])
    path = comparison.report(
        tmp_path / "r.html", figures=figures, about="about it", points={"row 3": "a 1"}
    )
    page = path.read_text(encoding="utf-8")
    text = html.unescape(page)
    assert text.index(comparison.summary) < text.index("<figure>") < text.index("<table>")
    assert criteria("vi") in text
    assert page.count("<figure>") == len(figures)
    names = re.findall(r'<tr data-place="\d+"><th[^>]*><svg.*?</svg>(.*?)</th>', page)
    assert names == list(comparison.judgments)
    assert re.search(r"Scatter plot of time to fit against distance to vi: \w+ [\d.]+ after", page)
    lines = re.findall(r"<text[^>]*>(row \d+,|target 1)<", page)
    assert len(set(lines)) > 1 and "target 1" in lines and "row 3" in page


def test_marks_are_the_same_in_every_figure(comparison):
    look = plots.styles(comparison.evaluations, "vi")
    for line in comparison.figures()["cost"].axes[0].lines:
        if line.get_label() in look:
            mark = {"color": line.get_color(), "marker": line.get_marker()}
            assert mark == look[line.get_label()]


def test_a_notebook_shows_answer_table_and_picture(comparison):
    shown = comparison._repr_html_()
    assert comparison.summary in html.unescape(shown) and shown.count("<figure>") == 1
    assert "<script" not in shown and "<button" not in shown
    assert "@scope (.pyro-bdl)" in shown and not re.search(r"\bbody\s*\{", shown)
    assert len(shown) < 60_000


def test_points_that_figures_show_one_by_one(comparison):
    assert comparison.first.places.tolist() == list(range(20))
    assert len(shown_points(comparison)) == 4


def test_noise_is_in_the_targets_units(tmp_path):
    torch.manual_seed(0)
    draws = {"noise": torch.rand(2, 10), "w": torch.randn(2, 10)}

    def model(x, y=None):
        import pyro
        import pyro.distributions as dist

        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(w * x, noise), obs=y)

    x = torch.randn(6)
    samples = bdl.Samples(draws)
    found = bdl.compare(model, {"nuts": samples}, x, x, units=(50.0, 0.0))
    figures = found.figures(posteriors={"nuts": samples}, scales={"noise": 50.0})
    axes = {axis.get_title(loc="left"): axis for axis in figures["trace"].axes}
    (first, _) = axes["noise, target's units"].lines[:2]
    assert torch.allclose(torch.tensor(first.get_ydata()), 50 * draws["noise"][0].double())
    assert "w" in axes
