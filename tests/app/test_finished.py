"""Finished posteriors are kept, and the same command fits only what is missing."""

import csv
import errno
import os
import signal
from dataclasses import replace

import pytest

from pyro_bdl import Comparison, Evaluation, posteriors
from pyro_bdl.app.command import main
from pyro_bdl.guides import AutoMAP, AutoMeanField

pytestmark = pytest.mark.usefixtures("ctrl_c")
TIMES = ("seconds", "draw_seconds", "memory")


@pytest.fixture
def run(table, tmp_path, capsys, monkeypatch):
    """Run the command without figures; exit code, stdout and stderr."""
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})

    def run(*more, guides="map,mean-field,last-layer", folder="out"):
        given = ["--data", table, "--target", "price", "--out", tmp_path / folder]
        given += ["--guides", guides, "--steps", "3", "--hidden", "2", *more]
        code = main(["compare", *map(str, given)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def fitted(monkeypatch):
    """The names of the posteriors that are fitted; ``fitted.before`` is called with each name."""
    fit, names = posteriors.fit, []

    class Fitted(list):
        before = staticmethod(lambda name: None)

    names = Fitted()

    def counted(name, *args, **kwargs):
        names.before(name)
        names.append(name)
        return fit(name, *args, **kwargs)

    monkeypatch.setattr(posteriors, "fit", counted)
    return names


def rows_of(folder, *without):
    with open(folder / "table.csv", newline="", encoding="utf-8") as file:
        rows = {row["posterior"]: row for row in csv.DictReader(file)}
    return {n: {k: v for k, v in row.items() if k not in without} for n, row in rows.items()}


def test_the_same_command_goes_on_after_kill_9(run, fitted, tmp_path):
    def killed(name):
        if name == "last-layer":
            os.kill(os.getpid(), signal.SIGKILL)

    fitted.before = killed
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    fitted.before = lambda name: None
    code, printed, err = run()
    assert code == 0 and "map, mean-field are finished" in err and fitted == ["last-layer"]
    lines = [line for line in printed.splitlines() if line.endswith("finished before")]
    assert [line.split()[0] for line in lines] == ["map", "mean-field"]
    run(folder="whole")
    assert rows_of(tmp_path / "out", *TIMES) == rows_of(tmp_path / "whole", *TIMES)
    del fitted[:]
    assert run()[0] == 0 and fitted == []
    assert run("--fresh")[0] == 0 and fitted == ["map", "mean-field", "last-layer"]


def test_ctrl_c_keeps_what_is_finished_and_not_what_is_half_done(run, fitted, tmp_path):
    def pressed(name):
        if name == "mean-field":
            raise KeyboardInterrupt

    fitted.before = pressed
    assert "interrupted; not fitted: mean-field, last-layer" in run()[2]
    fitted.before = lambda name: None
    assert run()[0] == 0 and fitted == ["map", "mean-field", "last-layer"]


def test_a_failure_has_a_row_that_says_why_and_is_tried_again(run, fitted, tmp_path):
    def failing(name):
        if name == "mean-field":
            raise ValueError("no luck today")

    fitted.before = failing
    code, printed, _ = run()
    said = "left out: no luck today"
    assert code == 1 and f"  mean-field  {said}" in printed
    rows = rows_of(tmp_path / "out")
    assert rows["mean-field"]["verdict"] == said and float(rows["last-layer"]["rmse"]) > 0
    assert said in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    fitted.before = lambda name: None
    assert run()[0] == 0 and fitted == ["map", "last-layer", "mean-field"]


def folders(tmp_path):
    return sorted((tmp_path / "out" / "posteriors").iterdir())


@pytest.mark.parametrize("name", ["mean-field.safetensors", "mean-field.json"])
def test_a_damaged_posterior_is_fitted_again(name, run, fitted, tmp_path):
    run()
    before = rows_of(tmp_path / "out", *TIMES)
    (folder,) = folders(tmp_path)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    del fitted[:]
    code, _, err = run()
    assert code == 0 and "mean-field is fitted again: the finished one is damaged" in err
    assert fitted == ["mean-field"] and rows_of(tmp_path / "out", *TIMES) == before


def test_scores_are_kept_too(run, tmp_path):
    run(guides="map")
    (folder,) = folders(tmp_path)
    path = folder / "map.evaluation"
    kept = Evaluation.load(path)
    assert kept.scores["rmse"] == float(rows_of(tmp_path / "out")["map"]["rmse"])
    replace(kept, scores={**kept.scores, "rmse": 1234.5}).save(path)
    assert "1234" in run(guides="map")[1]


@pytest.mark.parametrize(
    "more",
    [["--steps", "4"], ["--seed", "1"], ["--hidden", "3"], ["--test-fraction", "0.3"]],
)
def test_another_command_starts_anew_and_loses_nothing(more, run, fitted, tmp_path):
    run(guides="map")
    assert run(*more, guides="map")[0] == 0 and fitted == ["map", "map"]
    assert len(folders(tmp_path)) == 2
    assert run(guides="map")[0] == 0 and fitted == ["map", "map"]


def test_other_data_of_the_same_shape_start_anew(run, table, fitted):
    run(guides="map")
    table.write_text(table.read_text().replace("0.", "1.", 1))
    assert run(guides="map")[0] == 0 and fitted == ["map", "map"]


def test_further_posteriors_are_added(run, fitted):
    run(guides="map")
    assert run(guides="map,mean-field")[0] == 0 and fitted == ["map", "mean-field"]


def test_a_full_disk_loses_no_other_posterior(run, fitted, monkeypatch):
    save = AutoMeanField.save

    def full(self, path):
        if type(self) is not AutoMAP:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, path)

    monkeypatch.setattr(AutoMeanField, "save", full)
    code, printed, err = run(guides="map,mean-field")
    assert code == 0 and "RMSE" in printed
    assert "mean-field could not be kept in" in err and "No space left on device" in err
    monkeypatch.setattr(AutoMeanField, "save", save)
    del fitted[:]
    assert run(guides="map,mean-field")[0] == 0 and fitted == ["mean-field"]


def test_the_splits_of_folds_are_kept_too(run, fitted, tmp_path):
    assert run("--folds", "2", guides="map")[0] == 0 and fitted == ["map"] * 3
    assert len(folders(tmp_path)) == 3
    assert run("--folds", "2", guides="map")[0] == 0 and fitted == ["map"] * 3
