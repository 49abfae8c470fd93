"""The scripts of ``examples`` run at a tiny size, and print what they promise."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The text that a script prints with these arguments, in a folder of its own."""

    def printed(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return printed


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("target", ["price", pytest.param("kind", marks=pytest.mark.slow)])
def test_own_csv(run, tmp_path, target):
    size = np.random.default_rng(0).normal(size=30)
    values = {"price": 2 * size, "kind": np.where(size > 0, "big", "small")}[target]
    rows = (f"{s},{value}" for s, value in zip(size, values, strict=True))
    (tmp_path / "houses.csv").write_text("\n".join([f"size,{target}", *rows]))
    text = run(
        "own_csv.py", "houses.csv", "--target", target, "--hidden", 2, "--steps", 2, "--draws", 0
    )
    assert all(name in text for name in ("map", "mean-field", "ensemble", "laplace"))
    assert (tmp_path / "report.html").read_text().startswith("<!")


def test_images(run, tmp_path):
    rng = np.random.default_rng(0)
    parts = {f"x_{part}": rng.integers(0, 255, (12, 8, 8)) for part in ("train", "test")}
    parts |= {f"y_{part}": np.arange(12) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "images.npz", **parts)
    text = run("images.py", "--data", "images.npz", "--epochs", 1, "--batch-size", 6)
    assert "epoch 1" in text and "Laplace  accuracy" in text


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_data_to_verdict(run, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    np.savez(tmp_path / "table.npz", x=x, y=100 + 5 * x[:, 0])
    text = run(
        "data_to_verdict.py", "--data", "table.npz", "--hidden", 2, "--steps", 5, "--draws", 20
    )
    assert "under the prior" in text and "distance to nuts" in text and " predicts " in text
    assert (tmp_path / "verdict.html").exists() and (tmp_path / "posterior.safetensors").exists()


def test_hierarchical(run):
    text = run("hierarchical.py", "--groups", 2, "--steps", 2, "--draws", 4)
    assert text.count("±") == 6 and "R-hat" in text


def test_lightning_module(run):
    """Lightning gives the numbers of ``train``, and those of a run that was never stopped."""
    pytest.importorskip("lightning")
    text = run("lightning_module.py", "--steps", 6, "--rows", 16)
    for words in ("Adam: losses", "IVON: losses"):
        assert f"{words} differ from those of train by 0, guides by 0" in text
    assert "went on from half differs by 0\n" in text


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize(
    "posterior", ["laplace", pytest.param("mean-field", marks=pytest.mark.slow)]
)
def test_adapter_trainer(run, posterior):
    for package in ("transformers", "accelerate", "peft"):
        pytest.importorskip(package)
    options = ["--rows", 16, "--epochs", 1, "--steps", 3]
    text = run("adapter_trainer.py", "--posterior", posterior, *options)
    # rank 2 in the query, value and four dense layers, and the head of two classes
    assert f"{posterior} over 482 weights of 14 tensors" in text
    assert text.count("log likelihood") == 2
