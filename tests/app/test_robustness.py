"""Errors after the fits do not lose the fits, and bad input is refused before fitting."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyro_bdl import Comparison, Samples, posteriors
from pyro_bdl.app import run as cli
from pyro_bdl.app.command import main
from pyro_bdl.posteriors import registry

TINY = ["--steps", "3", "--hidden", "2"]


pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.fixture
def run(table, tmp_path, capsys):
    def run(*arguments, guides="map"):
        """Exit code, stdout and stderr."""
        given = ["--data", table, "--target", "price", "--out", tmp_path / "out"]
        given += ["--guides", guides, *TINY, *arguments]
        code = main(["compare", *map(str, given)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def with_draws(monkeypatch):
    """ "nuts" takes no time, and has these draws of every site."""
    fit = posteriors.fit

    def install(change=lambda values: values):
        def fitted(name, problem, options=None, **kwargs):
            if name != "nuts":
                return fit(name, problem, options, **kwargs)
            guide = fit("map", problem, options).posterior
            latents = {
                site: change(value[None] + 0.1 * torch.randn(2, 10, *value.shape[1:]))
                for site, value in guide.sample_latents(1).items()
            }
            latents = {n: v.abs() if n == "noise" else v for n, v in latents.items()}
            return registry.Fit("nuts", Samples(latents), 1.5, None, {})

        monkeypatch.setattr(posteriors, "fit", fitted)

    return install


def rows_of(folder):
    with open(folder / "table.csv", newline="", encoding="utf-8") as file:
        return {row["posterior"]: row for row in csv.DictReader(file)}


# ------------------------------------------------------------------------------------- Ctrl-C


def test_fits_that_are_not_compared_are_kept(run, out, monkeypatch, with_draws):
    def failing(*args, **kwargs):
        raise KeyboardInterrupt

    with_draws()
    with monkeypatch.context() as patch:
        patch.setattr(cli, "compare_evaluations", failing)
        found, _, err = run(guides="mean-field,nuts")
    assert found == 130 and "pyro-bdl: interrupted" in err and "Traceback" not in err
    assert [path.name for path in out.iterdir()] == ["posteriors"]
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})
    code, printed, err = run(guides="mean-field,nuts")
    assert code == 0 and "where mean-field, nuts are finished; --fresh fits anew" in err
    assert printed.count("finished before") == 2 and set(rows_of(out)) >= {"mean-field", "nuts"}


def test_ctrl_c_while_the_elbo_is_estimated_keeps_the_fit(run, out, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "estimate_elbo", interrupted)
    code, _, err = run(guides="mean-field,map")
    assert code == 0 and "interrupted; not fitted: map" in err
    assert list(rows_of(out)) == ["mean-field"] and rows_of(out)["mean-field"]["rmse"]


# ------------------------------------------------------------------------------- draws and data


def test_a_posterior_whose_draws_are_nan_is_left_out(run, out, with_draws):
    def spoil(values):
        values[1, 3] = torch.nan
        return values

    with_draws(spoil)
    code, _, err = run(guides="map,nuts")
    assert code == 1 and "nuts is left out: 1 of 20 draws" in err
    rows = rows_of(out)
    assert list(rows) == ["map", "nuts"] and rows["nuts"]["rmse"] == ""
    assert rows["nuts"]["verdict"].startswith("left out: 1 of 20 draws")
    code, _, err = run(guides="nuts")
    assert code == 1 and "nuts is left out" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--chains 1 --draws 1", "'--draws': Input should be greater than or equal to 2"),
        ("--test-fraction 0.999", "(--test-fraction) leaves 0 of the 20 rows"),
        ("--hidden 1000000000000", "GiB are free; choose fewer units"),
    ],
)
def test_refused_before_anything_is_fitted(arguments, words, run, out, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)
    code, printed, err = run(*arguments.split())
    assert code == 2 and words in err and err.count("\n") == 1 and printed == ""
    assert not out.exists()


def test_a_huge_cell_is_refused_before_anything_is_fitted(run, table, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)
    table.write_text(table.read_text() + "1e300,0.5\n")
    code, _, err = run()
    assert code == 2 and "numbers too large" in err and "row 21: 'size'" in err


def test_two_draws_of_one_chain_are_enough(run, out, with_draws):
    with_draws(lambda values: values[:1, :2])
    code, _, err = run("--chains", 1, "--draws", 2, guides="map,nuts")
    assert code == 0, err
    assert (out / "report.html").is_file()


# --------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["table.csv", "report.html", "cost.png"])
def test_a_folder_in_place_of_a_file(name, run, out, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)
    (out / name).mkdir(parents=True)
    code, _, err = run()
    assert code == 2 and f"{name}' is a folder, but a file" in err


def test_figures_of_an_earlier_run_are_removed_and_other_files_are_not(run, out):
    out.mkdir()
    for name in ("ranks.png", "mine.png", "notes.txt"):
        (out / name).write_text("old")
    assert run()[0] == 0
    names = {path.name for path in out.iterdir()}
    assert {"mine.png", "notes.txt", "calibration.png"} <= names and "ranks.png" not in names


def test_files_are_written_before_the_table_is_printed(run, out, monkeypatch):
    to_text = Comparison.to_text
    seen = []

    def watched(self, *args, **kwargs):
        seen.append({path.name for path in out.iterdir()})
        return to_text(self, *args, **kwargs)

    monkeypatch.setattr(Comparison, "to_text", watched)
    assert run()[0] == 0
    assert {"table.csv", "report.html", "calibration.png"} <= seen[0]


@pytest.mark.parametrize("name", ["table.csv", "report.html", "pit.png"])
def test_a_file_that_cannot_be_written_loses_no_other(name, run, out, monkeypatch):
    replace = Path.replace

    def full(self, target):
        if Path(target).name == name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    code, printed, err = run()
    assert code == 1 and f"{name} could not be written: [Errno 28] No space left" in err
    written = {path.name for path in out.iterdir()}
    assert written > {"table.csv", "report.html", "pit.png", "calibration.png"} - {name}
    assert name not in written
    assert "RMSE" in printed and name not in printed.splitlines()[-1]


# -------------------------------------------------------------------------------------- output


def test_an_ascii_output_shows_the_table(run, out, monkeypatch, with_draws):
    with_draws()
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})
    code, _, err = run(guides="map,nuts")
    assert code == 0, err
    assert b" +-" in raw.getvalue() and b"Written to" in raw.getvalue()


def test_a_closed_output_is_no_error(run, out, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})
    code, _, err = run()
    assert code == 0 and "Traceback" not in err and rows_of(out)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="of POSIX shells")
@pytest.mark.parametrize("end", ["2>&1 | head -1", ">&-", "2>&- >&-", "| true"])
def test_in_a_shell(table, out, end):
    root = Path(cli.__file__).parents[2]
    command = f"{sys.executable} -m pyro_bdl compare --data {table} --target price --steps 3"
    command += f" --hidden 2 --guides map,mean-field --out {out}"
    script = f"set -o pipefail; {command} {end}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert sorted(rows_of(out)) == ["map", "mean-field"]
