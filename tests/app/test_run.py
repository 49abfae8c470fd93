"""The command end to end on small files, its exit codes and what it says of bad input."""

import contextlib
import csv
import io
import json

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from pyro_bdl import Comparison, posteriors
from pyro_bdl.app.command import main
from pyro_bdl.app.run import limited_threads
from pyro_bdl.curvature import config as curvature_config

TINY = ["--steps", "20", "--chains", "2", "--warmup", "20", "--draws", "20", "--hidden", "4"]
TINY += ["--max-tree-depth", "3"]


def write_table(folder):
    """A file with a number, a text and two targets."""
    random = np.random.default_rng(0)
    lines = ["size,color,price,kind"]
    for i in range(40):
        size = random.normal()
        color, kind = ("red", "green")[i % 2], ("cat", "dog", "bird")[i % 3]
        lines.append(f"{size:.3f},{color},{2 * size + 0.1 * random.normal():.3f},{kind}")
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path)


CHOSEN = ["map", "mean-field", "mean-field-tempered", "nuts"]


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """The files and the output of one run, the file of its data and its folder."""
    folder = tmp_path_factory.mktemp("regression")
    table, out = write_table(folder), folder / "out"
    given = ["--data", table, "--target", "price", "--one-hot", "--activation", "relu"]
    given += ["--noise", "robust", "--prior-gain", "2", "--guides", ",".join(CHOSEN)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["compare", *TINY, *map(str, given), "--out", str(out)]) == 0
    return table, out, printed.getvalue()


@pytest.fixture
def run(tmp_path, capsys):
    def run(*arguments):
        """Exit code, stdout and stderr."""
        code = main(["compare", *map(str, arguments), "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def rows_of(folder):
    with open(folder / "table.csv", newline="", encoding="utf-8") as file:
        return {row["posterior"]: row for row in csv.DictReader(file)}


def test_regression_writes_a_table_figures_and_a_report(regression):
    _, folder, out = regression
    assert "price: regression, 6 features, 32 training and 8 test rows" in out
    assert "RMSE, CRPS and distances are in units of price" in out
    rows = rows_of(folder)
    assert next(iter(rows)) == "nuts" and list(rows)[-1] == "nuts, half to half"
    assert sorted(rows) == sorted([*CHOSEN, "nuts, half to half"])
    assert all(float(rows[name]["rmse"]) > 0 for name in CHOSEN)
    assert all(float(rows[name]["draw_seconds"]) > 0 for name in CHOSEN)
    assert rows["map"].get("elpd_loo", "") == ""
    assert float(rows["map"]["sd_ratio"]) == 0 and rows["map"]["elbo"] == ""
    assert float(rows["mean-field"]["wasserstein"]) > 0 and rows["nuts"]["wasserstein"] == ""
    assert float(rows["nuts"]["rhat"]) > 0 and rows["nuts"]["verdict"]
    shown = {path.stem for path in folder.glob("*.png")}
    assert shown >= {"calibration", "pit", "cost", "function_space", "forest"}
    assert shown >= {"hyperparameters", "trace", "ranks", "layers"}
    assert all(imread(folder / f"{name}.png").shape[1] == 1000 for name in shown)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == len(shown)
    assert '<section class="warning">' in page and "nuts cannot be trusted" in page
    for word in ("mean-field-tempered", "half to half", "32 training", "max tree depth", "relu"):
        assert word in page


def test_everything_to_make_it_again_is_there(regression):
    table, folder, out = regression
    assert "price holds numbers" in out
    found = json.loads((folder / "report.json").read_text())
    made = found["settings"]
    assert made["Run"]["command line"].startswith("pyro-bdl compare --steps 20")
    assert "StudentT" in made["Program"]["likelihood"] and "FanIn(2)" in str(made["Program"])
    assert made["Program"]["network"] == "Linear(6, 4), ReLU, Linear(4, 1)"
    assert made["Data"]["source"] == f"the file {table}"
    assert {"Python", "torch", "numpyro", "processor"} <= set(made["Versions"])
    assert made["nuts"]["num_chains"] == 2
    lines = list(csv.DictReader(table.open()))
    for point in found["points"]:
        line = lines[point["row"] - 1]
        assert point["target"] == pytest.approx(float(line["price"]), abs=1e-3)
        assert point["inputs"]["size"] == pytest.approx(float(line["size"]), abs=1e-3)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Test points in the figures" in page
    assert any(f"row {point['row']}, target" in page for point in found["points"])


@pytest.mark.parametrize("arguments", ["--example counts", "--noise heteroscedastic"])
def test_counts_and_noise_that_varies(arguments, run, monkeypatch):
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})  # they take long
    code, out, err = run(*TINY, *arguments.split(), "--guides", "mean-field")
    assert code == 0, err
    assert ("count: count" in out) == ("counts" in arguments) and "NLPD" in out


def test_a_file_is_read_as_it_is_said_to_be_written(tmp_path, run):
    path = tmp_path / "table.tsv"
    rows = [f"2024-01-{i:02d}\t1.{100 + i}\t{i * 37 % 11},5" for i in range(1, 21)]
    path.write_text("\n".join(["day\tsize\tprice", *rows]) + "\n")
    given = ["--data", path, "--target", "price", "--guides", "map", "--quiet", *TINY]
    code, _, err = run(*given, "--separator", r"\t")
    assert code == 2 and "'day' ('2024-01-01' in row 1)" in err and "--dates" in err
    written = ["--separator", r"\t", "--decimal", ",", "--thousands", ".", "--dates", "day"]
    assert run(*given, *written)[0] == 0
    made = json.loads((tmp_path / "out" / "report.json").read_text())
    for point in made["points"]:
        assert point["inputs"]["size"] == pytest.approx(1100 + point["row"], abs=0.01)
        assert point["target"] == pytest.approx(point["row"] * 37 % 11 + 0.5, abs=0.01)
    assert made["settings"]["Data"]["features"].startswith("3: day.day, day.day_of_week, size")


def test_classes_of_text_without_the_reference(table, run, tmp_path):
    given = ["--data", table, "--target", "kind", "--one-hot", "--guides", "mean-field, map"]
    code, out, _ = run(*TINY, *given)
    assert code == 0 and "classification into 3 classes" in out and "accuracy" in out
    rows = rows_of(tmp_path / "out")
    assert sorted(rows) == ["map", "mean-field"]
    assert "sd_ratio" not in rows["map"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "calibration.png",
        "posteriors",
        "report.html",
        "report.json",
        "table.csv",
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--data nowhere.csv --target price", "there is no file nowhere.csv"),
        ("--data TABLE", "needs --target, the column to predict"),
        ("--data TABLE", "has 'size', "),
        ("--data nowhere.csv", "there is no file nowhere.csv"),
        ("--data TABLE --target prize", "did you mean 'price'"),
        ("--data TABLE --target price", "not numeric: 'color'"),
        ("--data TABLE --target kind --task regression --one-hot", "'kind' is not numeric"),
        ("--target price", "--target is of use with --data"),
        ("--example diabetes --data TABLE", "--data and --example name two problems"),
        ("--example breast-cancer --noise robust", "of use for a regression only"),
        ("--prior-gain 0", "'--prior-gain': '0' must be positive"),
        ("--guides map,foo", "unknown posterior 'foo'"),
        ("--guides ,", "'--guides': name at least one posterior"),
        ("--hidden 5,x", "'--hidden': give numbers of units such as 50"),
        ("--hidden 0", "'--hidden': give numbers"),
        ("--hidden 1000000000000", "3,000,000,000,001 weights needs about "),
        ("--data TABLE --target price --thousands .", "another one than thousands='.'"),
        ("--dates day", "--dates is of use with --data"),
        ("--chains 0", "'--chains': Input should be greater than or equal to 1"),
        ("--warmup -1", "'--warmup': Input should be greater"),
        ("--draws 2.5", "'--draws': Input should be a valid integer"),
        ("--steps 0", "'--steps': Input"),
        ("--seed -1", "'--seed': Input"),
        ("--data TABLE --target price --one-hot --test-fraction 1", "must lie between 0 and 1"),
        ("--device abacus", "'abacus' is not there; there is: cpu"),
        ("--device meta", "'meta' is not there"),
        ("--activation step", "choose 'tanh', 'relu' or 'silu'"),
        ("--nonsense", "No such option: --nonsense"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, words, table, run, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)  # nothing may be fitted
    code, out, err = run(*arguments.replace("TABLE", str(table)).split())
    assert code == 2 and out == ""
    assert words in err and err.startswith("pyro-bdl") and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("a,y\n", "has a header but no rows"),
        ("a,y\n" + "1,2.5\n" * 20, "constant"),
        ("a,y\n" + "1,cat\n" * 20, "single class 'cat'"),
        ("a,y\n" + "".join(f"{i},{i / 3}\n" for i in range(20)) + ",1.5\n", "row 21: 'a'"),
    ],
)
def test_bad_files_are_one_sentence(text, words, table, run):
    table.write_text(text)
    code, _, err = run("--data", table, "--target", "y")
    assert code == 2 and words in err and err.count("\n") == 1


def test_an_output_folder_that_is_a_file(table, capsys):
    assert main(["compare", "--out", str(table)]) == 2
    assert "--out: cannot write to" in capsys.readouterr().err


def test_a_programming_error_in_a_fit_shows_its_traceback(run, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", lambda *args, **options: None + 1)
    with pytest.raises(TypeError, match="NoneType"):
        run(*TINY, "--guides", "map")


def test_a_posterior_that_does_not_fit_in_memory_is_left_out(run, tmp_path, monkeypatch):
    """The same error as for the matrix of a large network; the exit code stays 0."""
    monkeypatch.setattr(curvature_config, "available_memory", lambda device: 5000)
    given = ["--example", "diabetes", "--guides", "map,laplace-full"]
    code, out, err = run(*TINY, *given)
    assert code == 0, err
    assert 'laplace-full is left out: structure="full" over' in err and "GiB are free" in err
    assert "laplace-full:" not in err  # before any training
    rows = rows_of(tmp_path / "out")
    assert set(rows) == {"map", "laplace-full"} and "RMSE" in out
    assert rows["laplace-full"]["verdict"].startswith('left out: structure="full" over')
    assert run(*TINY, "--example", "diabetes", "--guides", "laplace-full")[0] == 1


def test_laplace_says_its_evidence_and_its_scale(table, run, tmp_path):
    given = ["--data", table, "--target", "price", "--one-hot"]
    given += ["--guides", "map,laplace-evidence,laplace-last-layer", "--details"]
    code, out, _ = run(*TINY, *given)
    assert code == 0 and "log evid." in out
    rows = rows_of(tmp_path / "out")
    assert rows["map"]["log_evidence"] == "" == rows["laplace-last-layer"]["elbo"]
    laplace = ("laplace-evidence", "laplace-last-layer")
    assert all(float(rows[name]["log_evidence"]) < 0 for name in laplace)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<dt>prior gain</dt>" in page and "<dt>subset</dt><dd>last-layer</dd>" in page


def test_the_same_seed_gives_the_same_table_and_details_are_printed_when_asked_for(
    table, run, tmp_path, monkeypatch
):
    """The output without times and memory."""
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})  # they take long
    given = ["--data", table, "--target", "price", "--guides", "map,nuts"]
    given += ["--one-hot", *TINY, "--draws", "8", "--warmup", "8"]
    tables, printed = [], []
    for more in ([], ["--details"]):
        printed.append(run(*given, *more)[1])
        rows = rows_of(tmp_path / "out")
        for row in rows.values():
            for key in ("seconds", "draw_seconds", "memory", "ess_per_second"):
                row.pop(key)
        tables.append(rows)
    assert tables[0] == tables[1]
    short, full = printed
    assert "W2" not in short and "energy" not in short and "s / draw" not in short
    assert "W2" in full and "energy" in full and "s / draw" in full
    lines = full.split("\nmap   ")[0].splitlines()
    assert max(map(len, lines)) <= 110


def test_threads_are_given_back():
    torch.set_num_threads(2)
    with limited_threads(100):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with limited_threads(10**9):
        assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_defaults_converge(run, tmp_path):
    code, _, err = run("--example", "diabetes")
    rows = rows_of(tmp_path / "out")
    assert code == 0 and "warning" not in err
    assert float(rows["nuts"]["rhat"]) < 1.05 and float(rows["nuts"]["divergences"]) < 10
    assert -480 < float(rows["mean-field"]["elbo"]) < -465
    floor = float(rows["nuts, half to half"]["wasserstein"])
    assert all(float(rows[name]["wasserstein"]) > 3 * floor for name in ("map", "mean-field"))
    assert all(40 < float(rows[name]["rmse"]) < 65 for name in ("map", "mean-field", "nuts"))
