"""Finished posteriors are kept, and the same command fits only what is missing."""

import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pyro_bdl import Evaluation
from pyro_bdl.app import ahead
from pyro_bdl.app import run as app
from pyro_bdl.app.fits import Fits
from pyro_bdl.app.options import Options
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoMAP, AutoMeanField
from pyro_bdl.posteriors import registry

pytestmark = pytest.mark.usefixtures("ctrl_c", "no_figures")
TIMES = ("seconds", "draw_seconds", "memory")
TWO = {"guides": "map,mean-field"}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def folders(out):
    return sorted((out / "posteriors").iterdir())


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # where another test started JAX
def test_the_same_command_goes_on_after_kill_9(tiny, fitted, tmp_path, out, rows_of):
    def killed(name):
        if name == "mean-field":
            os.kill(os.getpid(), signal.SIGKILL)

    fitted.before = killed
    child = os.fork()
    if child == 0:
        try:
            tiny(**TWO)
        finally:  # never back into pytest
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    fitted.before = lambda name: None
    code, printed, err = tiny(**TWO)
    assert code == 0 and "map is finished" in err and fitted == ["mean-field"]
    (line,) = (line for line in printed.splitlines() if " s before, " in line)
    assert line.split()[0] == "map"
    tiny(**TWO, folder="whole")
    assert rows_of(out, *TIMES) == rows_of(tmp_path / "whole", *TIMES)


def test_ctrl_c_keeps_what_is_finished_and_not_what_is_half_done(tiny, fitted):
    def pressed(name):
        if name == "mean-field":
            raise KeyboardInterrupt

    fitted.before = pressed
    assert "interrupted; not fitted: mean-field" in tiny(**TWO)[2]
    fitted.before = lambda name: None
    assert tiny(**TWO)[0] == 0 and fitted == ["map", "mean-field"]


def test_ctrl_c_while_the_elbo_is_estimated_keeps_the_fit(tiny, out, rows_of, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "estimate_elbo", interrupted)
    code, _, err = tiny(guides="mean-field,map")
    assert code == 0 and "interrupted; not fitted: map" in err
    assert list(rows_of(out)) == ["mean-field"] and rows_of(out)["mean-field"]["rmse"]


def test_fits_that_are_not_compared_are_kept(tiny, out, rows_of, monkeypatch, with_draws):
    def failing(*args, **kwargs):
        raise KeyboardInterrupt

    with_draws()
    with monkeypatch.context() as patch:
        patch.setattr(app, "compare_evaluations", failing)
        code, _, err = tiny(guides="mean-field,nuts")
    assert code == 130 and "pyro-bdl: interrupted" in err and "Traceback" not in err
    assert [path.name for path in out.iterdir()] == ["posteriors"]
    code, printed, err = tiny(guides="mean-field,nuts")
    assert code == 0 and "where mean-field, nuts are finished; --fresh fits anew" in err
    assert printed.count(" s before, ") == 2 and set(rows_of(out)) >= {"mean-field", "nuts"}


def test_a_failure_has_a_row_that_says_why_and_is_tried_again(tiny, fitted, out, rows_of):
    def failing(name):
        if name == "map":
            raise ValueError("no luck today")

    fitted.before = failing
    code, _, err = tiny(**TWO)
    said = "left out: no luck today"
    assert code == 1 and f"map is {said}" in err
    rows = rows_of(out)
    assert rows["map"]["verdict"] == said and float(rows["mean-field"]["rmse"]) > 0
    assert said in (out / "report.html").read_text(encoding="utf-8")
    fitted.before = lambda name: None
    assert tiny(**TWO)[0] == 0 and fitted == ["mean-field", "map"]


def test_a_posterior_whose_draws_are_nan_is_left_out(tiny, out, rows_of, with_draws):
    def spoil(values):
        values[1, 3] = torch.nan
        return values

    with_draws(spoil)
    code, _, err = tiny(guides="map,nuts")
    assert code == 1 and "nuts is left out: 1 of 20 draws" in err
    rows = rows_of(out)
    assert list(rows) == ["map", "nuts"] and rows["nuts"]["rmse"] == ""
    assert tiny(guides="nuts")[0] == 1


@pytest.mark.parametrize(
    "name", ["mean-field.safetensors", pytest.param("mean-field.json", marks=pytest.mark.slow)]
)
def test_a_damaged_posterior_is_fitted_again(name, tiny, fitted, out, rows_of):
    tiny(**TWO)
    before = rows_of(out, *TIMES)
    path = folders(out)[0] / name
    path.write_bytes(path.read_bytes()[:-20])
    del fitted[:]
    code, _, err = tiny(**TWO)
    assert code == 0 and "mean-field is fitted again: the finished one is damaged" in err
    assert fitted == ["mean-field"] and rows_of(out, *TIMES) == before


def test_scores_are_kept_too_unless_all_is_fitted_afresh(tiny, fitted, out, rows_of):
    tiny()
    path = folders(out)[0] / "map.evaluation"
    kept = Evaluation.load(path)
    assert kept.scores["rmse"] == float(rows_of(out)["map"]["rmse"])
    replace(kept, scores={**kept.scores, "rmse": 1234.5}).save(path)
    assert "1234" in tiny()[1] and fitted == ["map"]
    assert "1234" not in tiny("--fresh")[1] and fitted == ["map"] * 2


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


# Options of the run, of the network, and other data: one of each kind in the default run
@pytest.mark.parametrize(
    "more", ["--steps 4", slow("--seed 1"), "--hidden 3", slow("--test-fraction 0.3"), ""]
)
def test_another_command_or_other_data_start_anew_and_lose_nothing(more, tiny, table, fitted, out):
    tiny()
    before = table.read_text()
    if not more:
        table.write_text(before.replace("0.", "1.", 1))
    assert tiny(*more.split())[0] == 0 and fitted == ["map", "map"] and len(folders(out)) == 2
    table.write_text(before)
    assert tiny(guides="map,mean-field")[0] == 0 and fitted == ["map", "map", "mean-field"]


def test_a_full_disk_loses_no_other_posterior(tiny, fitted, monkeypatch):
    save = AutoMeanField.save

    def full(self, path):
        if type(self) is not AutoMAP:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, path)

    monkeypatch.setattr(AutoMeanField, "save", full)
    code, printed, err = tiny(guides="map,mean-field")
    assert code == 0 and "RMSE" in printed
    assert "mean-field could not be kept in" in err and "No space left on device" in err
    monkeypatch.setattr(AutoMeanField, "save", save)
    del fitted[:]
    assert tiny(guides="map,mean-field")[0] == 0 and fitted == ["mean-field"]


@pytest.mark.slow
def test_fits_of_another_process_are_found_and_are_the_same(tiny, table, fitted, tmp_path, rows_of):
    out = tmp_path / "out"
    options = Options(data=table, target="price", steps=3, hidden=(2,), folds=2, out=out)
    job = pickle.dumps((options, ("mean-field", "laplace"), ((0, 1),)))
    command = [sys.executable, "-m", "pyro_bdl.app.ahead"]
    done = subprocess.run(command, input=job, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and len(folders(out)) == 2
    said = io.BytesIO(done.stdout)
    warned, of_splits = pickle.load(said), pickle.load(said)
    assert all(isinstance(message, BdlWarning) for message in warned) and of_splits == []
    chosen = {"guides": "mean-field,map,laplace"}
    assert tiny(**chosen)[0] == 0 and fitted == ["map"]
    tiny(**chosen, folder="alone")
    assert rows_of(out, *TIMES) == rows_of(tmp_path / "alone", *TIMES)


def test_another_process_ends_with_the_block_that_started_it(table, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead.torch, "get_num_threads", lambda: 1)
    script = tmp_path / "reads-and-ends"
    script.write_text("#!/bin/sh\ncat > /dev/null\n")
    script.chmod(0o755)
    monkeypatch.setattr(ahead.sys, "executable", str(script))
    monkeypatch.setattr(ahead, "available_memory", lambda device: 2**40)
    monkeypatch.setattr(ahead, "_cores", lambda: 2)
    options = Options(data=table, target="price", device=torch.device("cpu"), out=tmp_path)
    with ahead.Ahead(options, ["map", "swag", "laplace", "nuts"], []) as other:
        assert other.names == ["map", "laplace"]
        other.wait()
    with ahead.Ahead(options, ["map", "swag", "nuts"], []) as other:
        assert not other.names


def test_posteriors_of_another_process_come_last_and_keep_their_place(tiny, fitted, table, out):
    options = Options(
        data=table, target="price", steps=3, hidden=(2,), guides="mean-field,map,swag", out=out
    )
    before = []

    def wait():
        before.append(list(fitted))

    fits = Fits(options, options.load(), shown=False)
    fits.fit_all(["mean-field"], wait)
    assert before == [["map", "swag"]] and fitted == ["map", "swag", "mean-field"]
    assert list(fits.evaluations) == list(fits.fits) == ["mean-field", "map", "swag"]


def test_the_splits_of_folds_are_kept_too(tiny, fitted, out):
    code, printed, _ = tiny("--folds", "2")
    assert code == 0 and fitted == ["map"] * 3 and len(folders(out)) == 3
    assert "Scores over 2 splits" in printed
    (row,) = json.loads((out / "report.json").read_text())["cross_validation"]
    assert row["posterior"] == "map" and row["rmse"] > 0 and row["rmse_se"] > 0
    assert tiny("--folds", "2")[0] == 0 and fitted == ["map"] * 3
