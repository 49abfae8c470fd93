"""A comparison as a page, and as HTML for notebooks."""

import html
import re

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import plots
from pyro_bdl.comparison.judge import criteria
from pyro_bdl.data import Dataset


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    x, y = torch.randn(20, 2), torch.randn(20)
    rows = tuple(range(101, 121))
    return Dataset(x, y, x, y, ("a", "b"), "price", "regression", test_rows=rows)


@pytest.fixture(scope="module")
def comparison(data):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    model = bdl.models.Regression(bdl.bayesianize(net))
    kinds = {"vi": bdl.guides.AutoMeanField, "map": bdl.guides.AutoMAP}
    kinds["dropout"] = bdl.guides.AutoMCDropout
    train = (data.x_train, data.y_train)
    made = {name: kind(model).prototype(*train) for name, kind in kinds.items()}
    costs = {name: bdl.Costs(seconds=1.0 + i) for i, name in enumerate(made)}
    return bdl.compare(model, made, *train, reference="vi", num_samples=40, costs=costs)


def test_the_page_has_answer_ranking_and_figures(comparison, data, tmp_path):
    figures = comparison.figures(data=data)
    given = {"title": "A & B", "data": data, "figures": figures, "about": "about it"}
    path = comparison.report(tmp_path / "r.html", **given)
    page = path.read_text(encoding="utf-8")
    text = html.unescape(page)
    assert "<title>A &amp; B</title>" in page and "<h1>A &amp; B</h1>" in page
    assert text.index(comparison.summary) < text.index("<figure>") < text.index("<table>")
    assert criteria("vi") in text and "in units of price" in text and "about it" in text
    assert page.count("<figure>") == len(figures)
    names = re.findall(r'<tr data-place="\d+"><th[^>]*><svg.*?</svg>(.*?)</th>', page)
    assert names == list(comparison.judgments)
    lines = re.findall(r"<text[^>]*>(row 1\d\d,|target -?\d[\d.]*)<", page)
    assert len(set(lines)) > 2 and re.search(r"<dt>row 1\d\d, target \S+</dt><dd>a ", page)


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
    for name, judgment in comparison.judgments.items():  # the findings are tooltips
        verdict = html.escape(judgment.verdict, quote=False).replace("'", "&#39;")
        assert f'title="{verdict}"><svg' in shown, name
        assert f'<tr class="rank {judgment.group}">' in shown
    for group in ("alike", "usable", "far"):
        assert f".{group}" in shown[: shown.index("</style>")]
    assert "@scope (.pyro-bdl)" in shown and not re.search(r"\bbody\s*\{", shown)
    assert len(shown) < 60_000
