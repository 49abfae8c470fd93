"""The report is one valid, self-contained file."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from pyro_bdl import plots
from pyro_bdl.app.report import Picture, Table, write_report
from pyro_bdl.app.report.svg import inline
from pyro_bdl.plots.style import COLORS
from pyro_bdl.utils.tables import Column

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
            self.images.append(values)
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


@pytest.fixture
def page(tmp_path):
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1], [1, 3])
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
    path = write_report(
        tmp_path / "new" / "report.html",
        Table("Table", rows, columns, details=details),
        title="A & B <script>alert(1)</script>",
        pictures=[Picture(figure, 'Caption "one" <i>'), Picture(figure, "two")],
        verdicts={"<b>map</b>": "over<confident"},
        warnings=["Mind <the> gap."],
        notes=["First < note.", "Second."],
        settings={"seed": 0, "path": "<x>"},
    )
    return Page(path.read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(page):
    assert all(link.startswith("data:") or link[1:] in page.ids for link in page.links)
    assert any(link.startswith("#") for link in page.links)


def test_figures_are_svg_in_the_fonts_and_colors_of_the_page():
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1], [1, 3], color=COLORS[0], label="a & b")
    figure.legend()
    drawn = inline(figure, "key", 'One "quoted" <label>')
    root = ElementTree.fromstring(drawn)
    assert root.tag == "svg" and root.get("aria-label") == 'One "quoted" <label>'
    assert "a & b" in "".join(root.itertext())
    assert f"stroke: var(--{COLORS[0][1:]}, {COLORS[0]})" in drawn
    assert "font-family" not in drawn and "<style" not in drawn and "rdf" not in drawn
    used = set(re.findall(r"(?:#|id=\")([^)\"]+)", drawn)) - {COLORS[0][1:]}
    assert all(name.startswith("key-") for name in used if not re.fullmatch("[0-9a-f]{6}.*", name))


def test_table_shows_rounded_and_sorts_by_full_numbers(page):
    groups, heads, first, second, *_ = page.rows
    assert [cell["text"] for cell in groups] == ["", "pre<diction", "", ""]
    assert [cell["text"] for cell in heads] == ["posterior", "RMSE", "R\u2011hat", "size"]
    assert [cell["text"] for cell in first] == ["<b>map</b>", "0.123", "–", "12"]
    assert float(first[1]["data-value"]) == 0.123456
    assert "data-value" not in first[2]
    assert [cell["text"] for cell in second] == ["nuts", "–", "1.001", "–"]


def test_texts_are_there_and_escaped(page):
    for text in ("A & B <script>", "First < note.", "Second.", "Error & more.", "<x>", "seed"):
        assert text in page.text


def test_further_columns_have_a_button(page):
    assert page.rows[1][-1]["data-group"] == page.rows[2][-1]["data-group"] == "further columns"
    assert page.pressed == {"pre<diction": "true", "further columns": "false"}
    assert "How large & wide." in page.text


def test_ranked_rows_stand_under_their_headings(tmp_path):
    rows = [{"name": name} for name in "abcd"]
    ranked = [("near", ["c", "a"]), ("none", []), ("far", ["d"])]
    table = Table("Table", rows, [Column("name", "posterior", style="text")], ranked=ranked)
    path = write_report(tmp_path / "r.html", table, title="t", looks=plots.styles("abcd", "a"))
    found = Page(path.read_text(encoding="utf-8"))
    assert [row[0]["text"] for row in found.rows[1:]] == ["near", "c", "a", "far", "d", "b"]
    assert [cell["data-place"] for cell in found.lines if "data-place" in cell] == list("0123")


def test_pictures_stand_in_their_sections(tmp_path):
    pictures = [
        Picture(Figure(figsize=(1, 1)), "first caption", "first alt", section=""),
        Picture(Figure(figsize=(1, 1)), "second caption", section="Chains"),
    ]
    path = write_report(
        tmp_path / "r.html",
        Table("Table", [{"name": "row"}], [Column("name", "posterior", style="text")]),
        title="t",
        summary="The answer.",
        pictures=pictures,
        settings={"Program": {"prior": "FanIn"}},
    )
    found = Page(path.read_text(encoding="utf-8"))
    texts = ("The answer.", "first caption", "row", "Chains", "second caption", "Program", "FanIn")
    places = [found.text.index(text) for text in texts]
    assert places == sorted(places)
    assert [image["aria-label"] for image in found.images] == ["first alt", "second caption"]


def test_the_warning_comes_before_the_table_and_this_before_the_verdicts(page):
    places = [page.text.index(text) for text in ("Mind <the> gap.", "RMSE", "over<confident")]
    assert places == sorted(places)


def test_same_input_same_bytes(tmp_path):
    def write(name):
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot([0, 1], [1, 3])
        table = Table("Table", [{"name": "a"}], [Column("name", "posterior", style="text")])
        pictures = [Picture(figure, "f")]
        return write_report(tmp_path / name, table, title="t", pictures=pictures).read_bytes()

    assert write("a.html") == write("b.html")
