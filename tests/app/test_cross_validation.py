"""Scores over several splits."""

import csv
import json
import math

import pytest
import torch

from pyro_bdl import Comparison, posteriors
from pyro_bdl.app import cross_validation
from pyro_bdl.app.command import main


def test_errors_are_those_of_overlapping_splits():
    values = [1.0, 2.0, 4.0, 5.0]
    mean, error = cross_validation.mean_and_error(values, 5)
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt((1 / 4 + 1 / 4) * torch.tensor(values).var()))
    assert math.isnan(cross_validation.mean_and_error([1.0], 5)[1])


def test_differences_are_paired_and_what_lacks_a_split_is_left_out():
    found = [
        {"a": {"rmse": 1.0}, "nuts": {"rmse": 3.0}, "b": {"rmse": 0.0}},
        {"a": {"rmse": 2.0}, "nuts": {"rmse": 4.0}},
    ]
    rows, columns = cross_validation.summarized(found, ["a", "b", "nuts"], "nuts", 2)
    assert [row["posterior"] for row in rows] == ["a", "nuts"]
    assert (rows[0]["rmse_diff"], rows[0]["rmse_diff_se"]) == (-2.0, 0.0)
    assert [column.key for column in columns] == ["posterior", "rmse", "rmse_diff"]


def test_the_command_scores_every_fold(tmp_path, capsys):
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "y"])
        writer.writerows([i, i * 0.37 % 1] for i in range(24))
    given = ["compare", "--data", path, "--target", "y", "--guides", "map", "--steps", "5"]
    given += ["--hidden", "3", "--folds", "3", "--out", tmp_path / "out"]
    assert main(list(map(str, given))) == 0
    assert "Over 3 splits" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())["cross_validation"]
    assert row["posterior"] == "map" and row["rmse"] > 0 and row["rmse_se"] > 0
    assert "Scores over 3 splits" in (tmp_path / "out" / "report.html").read_text()
    assert main(["compare", "--folds", "3", "--out", str(tmp_path / "out")]) == 2


@pytest.fixture
def few(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{i},{i * 0.37 % 1:.2f}\n" for i in range(12)))
    given = ["compare", "--data", path, "--target", "y", "--guides", "map", "--steps", "3"]
    return [*map(str, given), "--hidden", "2", "--quiet", "--out", str(tmp_path / "out")]


def test_more_folds_than_rows_are_refused_before_anything_is_fitted(few, capsys, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)
    assert main([*few, "--folds", "13"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "13 folds (--folds) are too many for 12 rows" in said.err


def test_a_split_that_is_interrupted_loses_no_report_and_quiet_prints_results_only(
    few, tmp_path, capsys, monkeypatch
):
    fit, calls = posteriors.fit, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 4:  # the third split
            raise KeyboardInterrupt
        return fit(*args, **options)

    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})  # they take long
    monkeypatch.setattr(posteriors, "fit", interrupted)
    assert main([*few, "--folds", "3"]) == 0
    said = capsys.readouterr()
    assert "interrupted: 2 splits were scored" in said.err
    answer, written = said.out.splitlines()
    assert answer == "There is only map, and nothing to compare it with."
    assert written.startswith("Written to")
    assert "Scores over 2 splits" in (tmp_path / "out" / "report.html").read_text()
