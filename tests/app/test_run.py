"""The command end to end on small files, its exit codes and what it says of bad input."""

import contextlib
import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_bdl import Predictive, load_posterior, posteriors
from pyro_bdl.app import run as app
from pyro_bdl.app.command import main
from pyro_bdl.app.options import Options
from pyro_bdl.app.run import limited_threads
from pyro_bdl.comparison.report.figures import CAPTIONS
from pyro_bdl.curvature import config as curvature_config

pytestmark = pytest.mark.usefixtures("ctrl_c")
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
    path = folder / "mixed.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def mixed(tmp_path):
    return write_table(tmp_path)


CHOSEN = ["map", "mean-field", "mean-field-tempered", "nuts"]


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """The files and the output of one run, the file of its data and its folder."""
    folder = tmp_path_factory.mktemp("regression")
    table, out = write_table(folder), folder / "out"
    given = ["--data", table, "--target", "price", "--one-hot", "--activation", "relu"]
    given += ["--likelihood", "student_t", "--prior-gain", "2", "--guides", ",".join(CHOSEN)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["compare", *TINY, *map(str, given), "--out", str(out)]) == 0
    return table, out, printed.getvalue()


# --------------------------------------------------------------------------------------- results


def test_regression_writes_a_table_figures_and_a_report(regression, rows_of):
    _, folder, out = regression
    assert "price: regression, 6 features, 32 training and 8 test rows" in out
    assert "RMSE, CRPS and distances are in units of price" in out
    rows = rows_of(folder)
    assert next(iter(rows)) == "nuts" and list(rows)[-1] == "nuts, half to half"
    assert sorted(rows) == sorted([*CHOSEN, "nuts, half to half"])
    assert all(float(rows[name]["rmse"]) > 0 for name in CHOSEN)
    assert float(rows["map"]["sd_ratio"]) == 0 and rows["map"]["elbo"] == ""
    assert float(rows["mean-field"]["wasserstein"]) > 0 and rows["nuts"]["wasserstein"] == ""
    assert float(rows["nuts"]["rhat"]) > 0 and rows["nuts"]["verdict"]
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {"table.csv", "report.html", "report.json"}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == len(CAPTIONS) - 1  # all but the bands over a single input
    assert '<section class="warning">' in page and "nuts cannot be trusted" in page
    for word in ("mean-field-tempered", "half to half", "32 training", "max tree depth", "ReLU"):
        assert word in page


def test_everything_to_make_it_again_is_there(regression):
    table, folder, _ = regression
    report = json.loads((folder / "report.json").read_text())
    made = report["settings"]
    assert made["Run"]["command line"].startswith("pyro-bdl compare --steps 20")
    assert made["Run"]["steps"] == 20 and made["Run"]["device"] == "cpu"
    assert "StudentT" in made["Program"]["likelihood"] and "FanIn(2)" in str(made["Program"])
    assert made["Program"]["network"] == "Linear(6, 4), ReLU, Linear(4, 1)"
    assert made["Data"]["source"] == f"the file {table}"
    assert {"Python", "torch", "numpyro", "processor"} <= set(made["Versions"])
    assert made["nuts"]["num_chains"] == 2
    lines = list(csv.DictReader(table.read_text().splitlines()))
    for point in report["points"]:
        line = lines[point["row"] - 1]
        assert point["target"] == pytest.approx(float(line["price"]), abs=1e-3)
        assert point["inputs"]["size"] == pytest.approx(float(line["size"]), abs=1e-3)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Test points in the figures" in page
    assert any(f"row {point['row']}, target" in page for point in report["points"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--example counts", "count: count"),
        ("--likelihood heteroscedastic", "softplus of a second output"),
        ("--example counts --likelihood negative_binomial", "variance m + (dispersion m)^2"),
        ("--data MIXED --target kind --one-hot", "classification into 3 classes"),
    ],
)
def test_other_tasks_and_noise_that_varies(arguments, words, run, mixed, no_figures, rows_of):
    given = arguments.replace("MIXED", str(mixed)).split()
    code, printed, err = run(*TINY, *given, "--guides", "mean-field, map")
    assert code == 0, err
    assert words in printed and "NLPD" in printed
    rows = rows_of(mixed.parent / "out")
    assert sorted(rows) == ["map", "mean-field"] and "sd_ratio" not in rows["map"]


def test_shares(tmp_path, run, no_figures, rows_of):
    path = tmp_path / "shares.csv"
    rows = [f"{i},{1 / (1 + math.exp(0.3 * (10 - i)))}" for i in range(1, 25)]
    path.write_text("\n".join(["size,part", *rows]) + "\n")
    given = ["--data", path, "--target", "part", "--guides", "mean-field", *TINY]
    code, printed, err = run(*given, "--likelihood", "beta", "--baselines")
    assert code == 0, err
    assert "part: share" in printed and "y ~ Beta(mean" in printed
    found = rows_of(tmp_path / "out")
    for name in ("mean-field", "sklearn-linear", "sklearn-forest"):
        assert math.isfinite(float(found[name]["crps"])) and float(found[name]["rmse"]) < 0.3
    assert float(found["sklearn-linear"]["nlpd"]) < -3  # its logits are a line
    path.write_text(path.read_text() + "25,1.0\n")
    code, _, err = run(*given, "--task", "share")
    assert code and "does not hold shares between 0 and 1 (1 in row 25)" in err


@pytest.fixture
def censored(tmp_path):
    """A file of times of all kinds of status, and its rows."""
    random, rows = np.random.default_rng(0), []
    for i in range(48):
        x, value, status = random.normal(), 20 * math.exp(random.normal()), i % 4
        rows.append((x, value, status, 1.5 * value if status == 3 else ""))
    lines = [",".join(map(str, row)) for row in rows]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(["x,days,how,until", *lines]) + "\n")
    return path, rows


def limits(law, status, value, upper):
    """log p of what is known of a target of a law of scipy."""
    known = law.sf(value), law.pdf(value), law.cdf(value), law.cdf(upper or 0.0) - law.cdf(value)
    return math.log(known[status])


@pytest.mark.parametrize("name", ["normal", "lognormal", "weibull"])
def test_censored_targets_score_as_by_hand(name, censored, tmp_path, run, no_figures, rows_of):
    path, rows = censored
    given = {"data": path, "target": "days", "status": "how", "upper": "until"}
    words = [part for key, value in given.items() for part in (f"--{key}", value)]
    word = f"censored_{name}"
    code, printed, err = run(*TINY, *words, "--likelihood", word, "--guides", "map", "--details")
    assert code == 0, err
    assert "of 48 rows 12 known to be larger (0), 12 seen (1), 12 known to be smaller" in printed
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert all((" " in str(p["target"])) == (rows[p["row"] - 1][2] != 1) for p in report["points"])
    options = Options(**given, likelihood=word, hidden=(4,))
    data = options.load()
    (saved,) = (tmp_path / "out").glob("posteriors/*/map.safetensors")
    posterior = load_posterior(saved, options.program(data)[0])
    drawn = {n: v[0] for n, v in posterior.sample_latents(1).items()}
    f = Predictive(posterior.program_model, posterior, 1)(data.x_test)["f"][0].double().numpy()
    total = 0.0
    for place, loc in zip(data.test_rows, f, strict=True):
        scale = float(drawn["scale"])
        law = {
            "normal": stats.norm(loc * data.y_sd + data.y_mean, scale * data.y_sd),
            "lognormal": stats.lognorm(scale, scale=data.y_sd * math.exp(loc)),
            "weibull": stats.weibull_min(1 / scale, scale=data.y_sd * math.exp(loc)),
        }[name]
        _, value, status, upper = rows[place - 1]
        total += limits(law, status, value, upper)
    row = rows_of(tmp_path / "out")["map"]
    assert float(row["nlpd"]) == pytest.approx(-total / len(f), rel=1e-4)
    assert float(row["crps_censored"]) > 0 and "rmse" not in row


@pytest.mark.parametrize(
    "options, change, words",
    [
        ("", None, "need each other"),
        ("--status how --likelihood student_t", None, "need each other"),
        ("--upper until", None, "need each other"),
        ("--status kind", None, "has no column 'kind'"),
        ("--status days", None, "three columns"),
        ("--status how --upper x", (",0,", ",1,"), "in an interval (status 3) in row 4"),
        ("--status how", None, "in an interval (status 3) in row 4"),
        ("--status how --upper until", (",2,", ",4,"), "in row 3 is 4; write 0 where"),
        ("--status how --upper until", (",2,", ",,"), "in row 3 is missing; write 0 where"),
        ("--status how --upper until", (",2,", ",NA,"), "in row 3 is missing; write 0 where"),
        ("--status how --upper until", (",2,", ",dead,"), "not numeric ('dead' in row 3)"),
        ("--status how --upper until", (",3,", ",1,"), "says nothing: leave it out"),
        ("--status how --upper until --baselines", None, "no censored targets"),
    ],
)
def test_a_status_that_is_missing_or_none_is_refused(options, change, words, censored, run):
    path, _ = censored
    if change is not None:
        path.write_text(path.read_text().replace(*change))
    chosen = options if "--likelihood" in options else f"{options} --likelihood censored_weibull"
    given = ["--data", path, "--target", "days", *chosen.split()]
    code, _, err = run(*TINY, *given, "--guides", "map")
    assert code == 2 and words in err


def test_a_file_is_read_as_it_is_said_to_be_written(tmp_path, run, no_figures):
    path = tmp_path / "table.tsv"
    rows = [f"2024-01-{i:02d}\t1.{100 + i}\t{i * 37 % 11},5" for i in range(1, 21)]
    path.write_text("\n".join(["day\tsize\tprice", *rows]) + "\n")
    given = ["--data", path, "--target", "price", "--guides", "map", "--quiet", *TINY]
    written = ["--separator", r"\t", "--decimal", ",", "--thousands", ".", "--dates", "day"]
    assert run(*given, *written)[0] == 0
    made = json.loads((tmp_path / "out" / "report.json").read_text())
    for point in made["points"]:
        assert point["inputs"]["size"] == pytest.approx(1100 + point["row"], abs=0.01)
        assert point["target"] == pytest.approx(point["row"] * 37 % 11 + 0.5, abs=0.01)
    assert made["settings"]["Data"]["features"].startswith("3: day.day, day.day_of_week, size")


def test_laplace_says_its_evidence_and_its_scale(mixed, run, tmp_path, rows_of, no_figures):
    given = ["--data", mixed, "--target", "price", "--one-hot"]
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
    mixed, run, tmp_path, rows_of, no_figures
):
    given = ["--data", mixed, "--target", "price", "--guides", "map,nuts", "--fresh"]
    given += ["--one-hot", *TINY, "--draws", "8", "--warmup", "8"]
    times = ("seconds", "draw_seconds", "memory", "ess_per_second")
    short, first = run(*given)[1], rows_of(tmp_path / "out", *times)
    full, second = run(*given, "--details")[1], rows_of(tmp_path / "out", *times)
    assert first == second
    for word in ("W2", "energy", "s / draw"):
        assert word not in short and word in full
    lines = full.split("\nmap   ")[0].splitlines()
    assert max(map(len, lines)) <= 110


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--data nowhere.csv --target price", "No such file or directory: 'nowhere.csv'"),
        ("--data TABLE", "needs --target, the column to predict"),
        ("--data TABLE", "has 'size', "),
        ("--data TABLE --target prize", "did you mean 'price'"),
        ("--data TABLE --target price", "not numeric: 'color'"),
        ("--data TABLE --target kind --task regression --one-hot", "'kind' is not numeric"),
        ("--target price", "--target is of use with --data"),
        ("--dates day", "--dates is of use with --data"),
        ("--example diabetes --data TABLE", "--example and --data name two problems"),
        ("--example wien", "--example: choose 'in-between'"),
        ("--example breast-cancer --likelihood student_t", "is of a regression, and diagnosis is"),
        ("--example diabetes --folds 500 --max-tree-depth 1", "'--folds': Input should be less"),
        ("--repeats 2", "--repeats is of use with --folds only"),
        ("--prior-gain -1", "gain must be positive"),
        ("--guides map,foo", "unknown posterior 'foo'"),
        ("--guides ,", "--guides: name at least one posterior"),
        ("--hidden 5,x", "'--hidden': give numbers of units such as 50"),
        ("--hidden 0", "'--hidden': give numbers"),
        ("--hidden 1000000000000", "3,000,000,000,001 weights needs about "),
        ("--data TABLE --target price --thousands .", "another one than thousands='.'"),
        ("--chains 0", "'--chains': Input should be greater than or equal to 1"),
        ("--warmup -1", "'--warmup': Input should be greater"),
        ("--draws 2.5", "'--draws': Input should be a valid integer"),
        ("--steps 0", "'--steps': Input"),
        ("--seed -1", "'--seed': Input"),
        ("--data TABLE --target price --one-hot --test-fraction 1", "must lie between 0 and 1"),
        ("--device abacus", "'abacus' cannot be used here"),
        ("--device meta", "'meta' cannot be used here"),
        ("--activation step", "'step' is not one of 'tanh', 'relu', 'silu'"),
        ("--reference wien", "there is no reference 'wien'"),
        ("--nonsense", "No such option: --nonsense"),
        ("table.csv --target y", "(table.csv): each value has an option, such as --data FILE"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, words, mixed, run, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", None)  # nothing may be fitted
    code, out, err = run(*arguments.replace("TABLE", str(mixed)).split())
    assert code == 2 and out == ""
    assert words in err and err.startswith("pyro-bdl") and err.count("\n") == 1
    assert not (mixed.parent / "out").exists()


def test_an_output_folder_that_is_a_file(table, capsys):
    assert main(["compare", "--out", str(table)]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_programming_error_in_a_fit_shows_its_traceback(tiny, monkeypatch):
    monkeypatch.setattr(posteriors, "fit", lambda *args, **options: None + 1)
    with pytest.raises(TypeError, match="NoneType"):
        tiny()


def test_a_posterior_that_does_not_fit_in_memory_is_left_out(
    run, tmp_path, monkeypatch, rows_of, no_figures
):
    """The same error as for the matrix of a large network; the exit code stays 0."""
    monkeypatch.setattr(curvature_config, "available_memory", lambda device: 5000)
    code, out, err = run(*TINY, "--example", "diabetes", "--guides", "map,laplace-full")
    assert code == 0, err
    assert 'laplace-full is left out: structure="full" over' in err and "GiB are free" in err
    assert "laplace-full:" not in err  # before any training
    rows = rows_of(tmp_path / "out")
    assert set(rows) == {"map", "laplace-full"} and "RMSE" in out
    assert rows["laplace-full"]["verdict"].startswith('left out: structure="full" over')
    assert run(*TINY, "--example", "diabetes", "--guides", "laplace-full")[0] == 1


# ------------------------------------------------------------------------------- files and output


def test_two_draws_of_one_chain_are_enough(tiny, tmp_path, with_draws):
    with_draws(lambda values: values[:1, :2])
    code, _, err = tiny("--chains", 1, "--draws", 2, guides="map,nuts")
    assert code == 0, err
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize("name", ["table.csv", "report.html"])
def test_a_file_that_cannot_be_written_loses_no_other(name, tiny, tmp_path, no_figures):
    (tmp_path / "out" / name).mkdir(parents=True)
    code, printed, err = tiny()
    assert code == 1 and f"{name} could not be written: '" in err and "is a folder" in err
    written = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert written == {"table.csv", "report.html", "report.json"} - {name}
    assert "RMSE" in printed and name not in printed.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="of POSIX shells")
@pytest.mark.parametrize("end", [">&-", "2>&- >&-", "| iconv -f ascii"])
def test_in_a_shell(table, tmp_path, end, rows_of):
    """Streams that are closed, or lack characters."""
    root, out = Path(app.__file__).parents[2], tmp_path / "out"
    command = f"{sys.executable} -m pyro_bdl compare --data {table} --target price --steps 3"
    command += f" --hidden 2 --guides map,mean-field --out {out}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {end}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert sorted(rows_of(out)) == ["map", "mean-field"]


def test_threads_are_given_back():
    torch.set_num_threads(2)
    for numbers, threads in ((100, 1), (10**9, 2)):
        with limited_threads(numbers):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2


@pytest.mark.slow
def test_defaults_converge(run, tmp_path, rows_of):
    code, _, err = run("--example", "diabetes")
    rows = rows_of(tmp_path / "out")
    assert code == 0 and "warning" not in err
    assert float(rows["nuts"]["rhat"]) < 1.05 and float(rows["nuts"]["divergences"]) < 10
    assert -480 < float(rows["mean-field"]["elbo"]) < -465
    floor = float(rows["nuts, half to half"]["wasserstein"])
    assert all(float(rows[name]["wasserstein"]) > 3 * floor for name in ("map", "mean-field"))
    assert all(40 < float(rows[name]["rmse"]) < 65 for name in ("map", "mean-field", "nuts"))
