"""The report in headless Chromium: nothing is said on the console, every image loads, headings
sort the table they belong to, and the page fits a phone and a sheet of paper."""

import json
import os
import re
import shutil
import subprocess

import pytest
from matplotlib.figure import Figure

from pyro_bdl.comparison.columns import Column
from pyro_bdl.comparison.report.write import Table, page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

# What the page looks like after each of its clicks, left in the page for --dump-dom to show.
PROBE = """
window.addEventListener("load", async () => {
  await Promise.all([...document.images].map(image => image.decode().catch(() => null)));
  const names = table => [...table.querySelectorAll("tbody tr:not([hidden])")]
    .map(row => row.cells[0].textContent);
  const seen = {
    images: [...document.querySelectorAll("figure svg")].map(image => image.clientWidth),
    loaded: [...document.images].map(image => image.complete && image.naturalWidth),
    width: [document.documentElement.scrollWidth, window.innerWidth],
    tables: [],
  };
  for (const table of document.querySelectorAll("table")) {
    const steps = [names(table)];
    for (const button of table.querySelectorAll("[data-column]"))
      for (const click of [0, 1]) {
        button.click();
        steps.push([button.parentElement.ariaSort, ...names(table)]);
      }
    const marked = table.querySelectorAll("[aria-sort]").length;
    document.querySelector("[data-ranked]").click();
    const more = document.querySelector("[data-shows='further columns']");
    const before = table.querySelector("thead tr:last-child").lastElementChild.clientWidth;
    more.click();
    const after = table.querySelector("thead tr:last-child").lastElementChild.clientWidth;
    seen.tables.push({steps, marked, ranked: names(table), further: [before, after > 0]});
  }
  const said = document.createElement("pre");
  said.id = "probe";
  said.textContent = JSON.stringify(seen);
  document.body.append(said);
});
"""


@pytest.fixture
def report(tmp_path):
    figures = [(Figure(figsize=(5, 3)), name) for name in ("first", "second")]
    for figure, _ in figures:
        figure.subplots().plot([0, 1], [1, 3])
    table = Table(
        "Table",
        [
            {"name": "nine", "error": 9.5, "size": 3},
            {"name": "ten", "error": 10.25, "size": 1},
            {"name": "none", "size": 2},
            {"name": "tiny", "error": 1e-12, "size": 20},
        ],
        [Column("name", "posterior", style="text"), Column("error", "error", "group")]
        + [Column(f"more{i}", f"another number {i}") for i in range(12)],
        details=[Column("size", "size")],
        ranked=[("near", ["ten", "nine"]), ("far", ["none", "tiny"])],
    )
    text = page(
        table=table,
        title="Posteriors of a neural network for something with a long name",
        sections={"": figures},
        verdicts={"nine": "much alike", "averyveryverylongnameofaposterior": "overconfident"},
        warnings=["the reference cannot be trusted"],
        settings={"Run": {"path": "/a/" + 30 * "long/"}},
    )
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def browse(page, *options):
    """Chromium's standard output and its error output."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", *options]
    ran = subprocess.run(
        [*command, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(page.parent)},
    )
    return ran.stdout, ran.stderr


def probed(report, *, script=PROBE, width=1200):
    page = report.with_name("probed.html")
    text = report.read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", f"</main><script>{script}</script>"), encoding="utf-8")
    out, errors = browse(page, f"--window-size={width},900", "--dump-dom")
    found = re.search(r'<pre id="probe">(.*?)</pre>', out, re.S)
    assert found, errors
    return json.loads(found.group(1)), [line for line in errors.splitlines() if "CONSOLE" in line]


def test_console_is_silent_and_images_load(report):
    seen, console = probed(report)
    assert console == []
    assert len(seen["images"]) == 2 and all(width > 0 for width in seen["images"])


def test_an_error_would_be_seen(report):
    """The check above can fail: a script that throws, an image from elsewhere."""
    text = report.read_text(encoding="utf-8")
    text = text.replace("</main>", '</main><img alt="x" src="https://example.org/x.png">')
    report.write_text(text, encoding="utf-8")
    seen, console = probed(report, script=f"{PROBE}\nnothing.there();")
    assert any("Content Security Policy" in line for line in console)
    assert any("nothing is not defined" in line for line in console)
    assert seen["loaded"] == [0]


def test_headings_sort_and_the_ranking_comes_back(report):
    seen, _ = probed(report)
    (table,) = seen["tables"]
    ranked = ["near", "ten", "nine", "far", "none", "tiny"]
    assert table["steps"][0] == ranked
    assert table["steps"][1:5] == [
        ["ascending", "nine", "none", "ten", "tiny"],
        ["descending", "tiny", "ten", "none", "nine"],
        ["ascending", "tiny", "nine", "ten", "none"],  # full numbers, what has none is last
        ["descending", "ten", "nine", "tiny", "none"],
    ]
    assert table["steps"][-2:] == [
        ["ascending", "ten", "none", "nine", "tiny"],
        ["descending", "tiny", "nine", "none", "ten"],
    ]
    assert table["marked"] == 1 and table["ranked"] == ranked
    assert table["further"] == [0, True]


def test_a_phone_scrolls_the_table_and_not_the_page(report):
    """Chromium's window is 500 pixels wide at least: a frame has a phone's width."""
    frame = report.with_name("frame.html")
    frame.write_text(
        f'<iframe src="{report.name}" style="width: 390px; height: 800px; border: 0"></iframe>'
        "<script>window.addEventListener('load', () => {"
        "  const page = document.querySelector('iframe').contentDocument;"
        "  const table = page.querySelector('.scroll');"
        "  const said = document.createElement('pre');"
        "  said.id = 'probe';"
        "  said.textContent = JSON.stringify([page.documentElement.scrollWidth,"
        "    table.scrollWidth, table.clientWidth]);"
        "  document.body.append(said);"
        "});</script>",
        encoding="utf-8",
    )
    out, errors = browse(frame, "--allow-file-access-from-files", "--dump-dom")
    found = re.search(r'<pre id="probe">(.*?)</pre>', out, re.S)
    assert found, errors
    page, inside, outside = json.loads(found.group(1))
    assert page <= 390
    assert inside > outside


def test_it_prints(report):
    target = report.with_name("report.pdf")
    browse(report, f"--print-to-pdf={target}", "--no-pdf-header-footer")
    assert target.read_bytes().startswith(b"%PDF")
