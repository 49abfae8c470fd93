"""Scores over several splits."""

import math

import pytest
import torch

from pyro_bdl import posteriors
from pyro_bdl.app import cross_validation
from pyro_bdl.comparison import scores


def test_errors_are_those_of_overlapping_splits():
    values = [1.0, 2.0, 4.0, 5.0]
    mean, error = cross_validation.mean_and_error(values, 5)
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt((1 / 4 + 1 / 4) * torch.tensor(values).var()))


def test_differences_are_paired_and_what_lacks_a_split_is_left_out():
    splits = [
        {"a": {"rmse": 1.0}, "nuts": {"rmse": 3.0}, "b": {"rmse": 0.0}},
        {"a": {"rmse": 2.0}, "nuts": {"rmse": 4.0}},
    ]
    rows, columns = cross_validation.summarized(splits, "nuts", 2)
    assert [row["posterior"] for row in rows] == ["a", "nuts"]
    assert (rows[0]["rmse_diff"], rows[0]["rmse_diff_se"]) == (-2.0, 0.0)
    assert [column.key for column in columns] == ["posterior", "rmse", "rmse_diff"]


def test_a_split_that_is_interrupted_loses_no_report_and_quiet_prints_results_only(
    tiny, tmp_path, monkeypatch, no_figures
):
    fit, calls = posteriors.fit, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 4:  # the third split
            raise KeyboardInterrupt
        return fit(*args, **options)

    monkeypatch.setattr(posteriors, "fit", interrupted)
    code, printed, err = tiny("--quiet", "--folds", "3")
    assert code == 0 and "interrupted: 2 splits were scored" in err
    answer, written = printed.splitlines()
    assert answer == "There is only map, and nothing to compare it with."
    assert written.startswith("Written to")
    assert "Scores over 2 splits" in (tmp_path / "out" / "report.html").read_text()


def test_every_score_of_one_split_is_there_over_several():
    """But those that need as many test points as all splits have together."""
    known = {score.key for score in cross_validation.SCORES}
    of_one = {m.key for m in scores.SCORES if m.group == scores.TEST_DATA and not m.detail}
    assert of_one - {"nlpd_calibrated", "ece"} == known
