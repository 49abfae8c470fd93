"""The report is one valid, self-contained file."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from pyro_bdl.report import write_report
from pyro_bdl.utils.tables import Column

VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """Collects tags, links and table cells, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.images, self.rows, self.text = [], [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.links += [values[key] for key in ("src", "href", "action") if key in values]
        if tag == "img":
            self.images.append(values)
        if tag == "tr":
            self.rows.append([])
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
    path = write_report(
        tmp_path / "new" / "report.html",
        title="A & B <script>alert(1)</script>",
        rows=[
            {"name": "<b>map</b>", "rmse": 0.123456, "size": 12},
            {"name": "nuts", "rhat": 1.00123},
        ],
        columns=columns,
        figures={'Caption "one" <i>': figure, "two": figure},
        details=[Column("size", "size", help="How large & wide.")],
        verdicts={"<b>map</b>": "over<confident"},
        warnings=["Mind <the> gap."],
        notes=["First < note.", "Second."],
        settings={"seed": 0, "path": "<x>"},
    )
    return Page(path.read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(page):
    assert page.links and all(link.startswith("data:") for link in page.links)


def test_images_decode_to_svg(page):
    assert [image["alt"] for image in page.images] == ['Caption "one" <i>', "two"]
    for image in page.images:
        kind, data = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(data, validate=True))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(rb'(href|src)="(?!#)', base64.b64decode(data))


def test_table_shows_rounded_and_sorts_by_full_numbers(page):
    groups, heads, first, second, *_ = page.rows
    assert [cell["text"] for cell in groups] == ["", "pre<diction", ""]
    assert [cell["text"] for cell in heads] == ["posterior", "RMSE", "R\u2011hat"]
    assert [cell["text"] for cell in first] == ["<b>map</b>", "0.123", "–"]
    assert float(first[1]["data-value"]) == 0.123456
    assert "data-value" not in first[2]
    assert [cell["text"] for cell in second] == ["nuts", "–", "1.001"]


def test_texts_are_there_and_escaped(page):
    for text in ("A & B <script>", "First < note.", "Second.", "Error & more.", "<x>", "seed"):
        assert text in page.text


def test_details_are_a_table_of_their_own(page):
    heads, first, second = page.rows[4:]
    assert [cell["text"] for cell in heads] == ["posterior", "size"]
    assert [cell["text"] for cell in first] == ["<b>map</b>", "12"]
    assert [cell["text"] for cell in second] == ["nuts", "–"]
    assert "How large & wide." in page.text


def test_the_warning_comes_before_the_verdicts_and_these_before_the_table(page):
    places = [page.text.index(text) for text in ("Mind <the> gap.", "over<confident", "RMSE")]
    assert places == sorted(places)


def test_same_input_same_bytes(tmp_path):
    def write(name):
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot([0, 1], [1, 3])
        column = Column("name", "posterior", style="text")
        return write_report(
            tmp_path / name,
            title="t",
            rows=[{"name": "a"}],
            columns=[column],
            figures={"f": figure},
        ).read_bytes()

    assert write("a.html") == write("b.html")
