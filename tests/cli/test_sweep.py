"""``pyro-bdl sweep`` end to end, and its answers to bad input."""

import pandas as pd
import pytest
from matplotlib.image import imread

from pyro_bdl.cli import entry

TINY = ["--steps", "5", "--draws", "5", "--widths", "3,6", "--taus", "0.01"]


@pytest.fixture
def run(tmp_path, capsys):
    def run(*arguments):
        """Exit code, stdout and stderr."""
        code = entry.main(["sweep", *map(str, arguments), "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_it_writes_the_table_and_the_figures(run, tmp_path):
    path = tmp_path / "table.csv"
    lines = [f"{i},{i % 3},{'ab'[i % 2]}" for i in range(30)]
    path.write_text("\n".join(["size,rest,kind", *lines]) + "\n")
    code, out, _ = run(*TINY, "--data", path, "--target", "kind")
    assert code == 0 and "kind: classification, 24 training rows" in out
    assert "Lowest NLPD" in out and max(map(len, out.splitlines())) <= 160
    table = pd.read_csv(tmp_path / "out" / "sweep.csv")
    assert list(table.neurons) == [3, 3, 6, 6]
    assert sorted(table[table.neurons == 6].eta) == pytest.approx([0.01 * 24 / 6, 1.0])
    for name in ("scores", "kl", "scores_by_tau"):
        assert imread(tmp_path / "out" / f"sweep_{name}.png").shape[0] > 300


def test_regression_on_the_built_in_data(run):
    code, out, _ = run(*TINY, "--widths", "3")
    assert code == 0 and "RMSE" in out and "for standardized targets" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--widths", "3,x"], "--widths must be positive numbers such as 1,10, got '3,x'"),
        (["--taus", "0,1"], "--taus must be positive numbers"),
        (["--etas=-1"], "--etas must be positive numbers"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--target", "kind"], "--target is of use with --data only"),
    ],
)
def test_bad_input(run, given, said):
    code, _, err = run(*TINY, *given)
    assert code == 2 and said in err
