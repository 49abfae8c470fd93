"""The report is one valid, self-contained file."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from pyro_bdl import plots
from pyro_bdl.comparison.columns import Column
from pyro_bdl.comparison.report.svg import inline
from pyro_bdl.comparison.report.write import Table, page
from pyro_bdl.plots.style import COLORS

VOID = {"meta", "link"}


class Page(HTMLParser):
    """Collects tags, links and table cells, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.images, self.rows, self.text = [], [], [], [], ""
        self.ids, self.pressed, self.lines = set(), {}, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.links += [values[key] for key in ("src", "href", "action") if key in values]
        if "id" in values:
            assert values["id"] not in self.ids
            self.ids.add(values["id"])
        if tag == "svg" and values.get("role") == "img":
            self.images.append(values["aria-label"])
        if "data-shows" in values:
            self.pressed[values["data-shows"]] = values["aria-pressed"]
        if tag == "tr":
            self.rows.append([])
            self.lines.append(values)
        if tag in ("td", "th"):
            self.rows[-1].append(values | {"text": ""})
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open or "script" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1]["text"] += data


def drawn():
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1], [1, 3], color=COLORS[0], label="a & b")
    figure.legend()
    return figure


def made():
    columns = [
        Column("name", "posterior", style="text"),
        Column("rmse", "RMSE", "pre<diction", help="Error & more."),
        Column("rhat", "R-hat", digits=4),
    ]
    rows = [
        {"name": "<b>map</b>", "rmse": 0.123456, "size": 12},
        {"name": "nuts", "rhat": 1.00123},
    ]
    details = [Column("size", "size", help="How large & wide.")]
    return page(
        title="A & B <script>alert(1)</script>",
        summary="The answer.",
        warnings=["Mind <the> gap."],
        table=Table("Table", rows, columns, details=details),
        sections={"": [(drawn(), 'First "one" <i>')], "Chains": [(drawn(), "second caption")]},
        verdicts={"<b>map</b>": "over<confident"},
        notes=["First < note.", "Second."],
        settings={"Program": {"prior": "FanIn", "path": "<x>"}, "Empty": {}},
    )


@pytest.fixture(scope="module")
def found():
    return Page(made())


def test_the_same_input_gives_the_same_text():
    assert made() == made()


def test_nothing_is_loaded_from_elsewhere(found):
    assert all(link.startswith("data:") or link[1:] in found.ids for link in found.links)
    assert any(link.startswith("#") for link in found.links)


def test_figures_are_svg_in_the_fonts_and_colors_of_the_page():
    text = inline(drawn(), "key", 'One "quoted" <label>')
    root = ElementTree.fromstring(text)
    assert root.tag == "svg" and root.get("aria-label") == 'One "quoted" <label>'
    assert "a & b" in "".join(root.itertext())
    assert f"stroke: var(--{COLORS[0][1:]}, {COLORS[0]})" in text
    assert "font-family" not in text and "<style" not in text and "rdf" not in text
    used = set(re.findall(r"(?:#|id=\")([^)\"]+)", text)) - {COLORS[0][1:]}
    assert all(name.startswith("key-") for name in used if not re.fullmatch("[0-9a-f]{6}.*", name))


def test_the_table_shows_rounded_and_sorts_by_full_numbers(found):
    groups, heads, first, second, *_ = found.rows
    assert [cell["text"] for cell in groups] == ["", "pre<diction", "", ""]
    assert [cell["text"] for cell in heads] == ["posterior", "RMSE", "R\u2011hat", "size"]
    assert [cell["text"] for cell in first] == ["<b>map</b>", "0.123", "–", "12"]
    assert float(first[1]["data-value"]) == 0.123456
    assert "data-value" not in first[2]
    assert [cell["text"] for cell in second] == ["nuts", "–", "1.001", "–"]
    assert heads[-1]["data-group"] == first[-1]["data-group"] == "further columns"
    assert found.pressed == {"pre<diction": "true", "further columns": "false"}


def test_texts_are_there_escaped_and_in_their_order(found):
    texts = ["A & B <script>", "The answer.", "Mind <the> gap.", 'First "one" <i>', "RMSE"]
    texts += ["Error & more.", "How large & wide.", "First < note.", "Second.", "over<confident"]
    texts += ["Chains", "second caption", "Program", "FanIn", "<x>"]
    places = [found.text.index(text) for text in texts]
    assert places == sorted(places) and "Empty" not in found.text
    assert found.images == ['First "one" <i>', "second caption"]


def test_ranked_rows_stand_under_their_headings():
    rows = [{"name": name} for name in "abcd"]
    ranked = [("near", ["c", "a"]), ("none", []), ("far", ["d"])]
    table = Table("Table", rows, [Column("name", "posterior", style="text")], ranked=ranked)
    found = Page(page(title="t", table=table, sections={}, looks=plots.styles("abcd", "a")))
    assert [row[0]["text"] for row in found.rows[1:]] == ["near", "c", "a", "far", "d", "b"]
    assert [cell["data-place"] for cell in found.lines if "data-place" in cell] == list("0123")
