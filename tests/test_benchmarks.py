"""The benchmark scripts run and print what they promise, at a small size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "svi": ["--steps", "3", "--repeats", "1"],
    "compiled": ["--steps", "2", "--repeats", "1", "--cases", "8-50-50-1"],
    "predictive": ["--draws", "8", "--inputs", "20", "--cnn-draws", "2", "--repeats", "1"],
    "gradient_variance": ["--draws", "3", "--steps", "1", "--train", "1", "--repeats", "1"],
    "sgmcmc": ["--steps", "20", "--chains", "2", "--repeats", "1"],
    "diagnostics": [
        *("--weights", "40", "--arviz-weights", "10", "--observations", "800", "--repeats", "1"),
    ],
    "ensemble": ["--members", "2", "--width", "4", "--steps", "3", "--repeats", "1"],
    "laplace": [
        *("--digits", "40", "--predict", "5", "--compared", "10", "--steps", "2", "--repeats", "1"),
        *("--cases", "MLP:kron", "small:full", "--large", "full", "resnet", "last-layer"),
        *("--classes", "20", "--rows", "30", "--full", "300", "--images", "4", "--width", "4"),
    ],
    "function_space": ["--quick"],
    "distributed": [
        *("--steps", "1", "--batches", "8", "4", "--rows", "20", "--repeats", "1"),
    ],
    "gpu": ["--device", "cpu", "--quick"],
    "large": ["--quick"],
    "peers": ["--steps", "1", "--repeats", "1"],
    "networks_in_plate": ["--quick", "--networks", "2", "--methods", "SVI"],
    "mcmc": [
        *("--chains", "2", "--iterations", "20", "--nuts", "10", "--depth", "3"),
        *("--networks", "4", "--only", "mclmc", "nuts"),
    ],
    "nuts": [
        *("--warmup", "10", "--draws", "5", "--depth", "3", "--pyro-draws", "2", "--repeats", "1")
    ],
}


@pytest.mark.bench
@pytest.mark.parametrize("name", list(SMALL))
def test_benchmark_prints_both_sides_and_the_ratio(name):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *SMALL[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    ratios = [value for key, value in result.items() if "ratio" in key]
    assert ratios and all(value > 0 for value in ratios)
    assert "machine" in result and "torch" in result["machine"]


@pytest.mark.bench
def test_scaling_prints_exponents_and_draws_them(tmp_path):
    figure = tmp_path / "scaling.png"
    command = [sys.executable, str(FOLDER / "scaling.py"), "--json", "--quick"]
    command += ["--figure", str(figure)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum("exponent" in key for key in result) == 20 and figure.stat().st_size > 0


@pytest.mark.bench
def test_verdicts_prints_rates():
    command = [sys.executable, str(FOLDER / "verdicts.py"), "--json", "--repetitions", "1"]
    command += ["--references", "4 x 25"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    rates = json.loads(done.stdout)["conjugate"]["4 x 25"]
    assert all(sum(groups.values()) == 1 for groups in rates["groups"].values())
    assert rates["reference"].keys() == {"not converged", "doubtful"}


SUBNETWORK = {
    "gap": [
        *("--steps", "5", "--initializations", "1", "--random", "1"),
        *("--chains", "2", "--warmup", "10", "--draws", "5", "--depth", "2"),
    ],
    "rotated-mnist": [
        *("--train-size", "40", "--held-out", "10", "--test-size", "8", "--epochs", "1"),
        *("--angle-step", "90", "--members", "2", "--predictive-draws", "3"),
        *("--sizes", "0.001", "0.002"),
    ],
    "large": [
        *("--width", "4", "--images", "4", "--predicted", "2"),
        *("--counts", "50", "300", "--most", "100"),
    ],
}


@pytest.mark.bench
@pytest.mark.parametrize("task", list(SUBNETWORK))
def test_tasks_of_subnetwork(task, tmp_path):
    generator = np.random.default_rng(0)
    images = {
        f"{key}_{part}": generator.integers(0, 10, shape).astype(np.uint8)
        for part, count in (("train", 50), ("test", 8))
        for key, shape in (("x", (count, 28, 28)), ("y", (count,)))
    }
    np.savez(tmp_path / "digits.npz", **images)
    command = [sys.executable, str(FOLDER / "subnetwork.py"), "--json", "--task", task]
    command += [*SUBNETWORK[task], "--data", str(tmp_path / "digits.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if task == "gap":
        assert "2701" in result["network"]
        rows = result["share of NUTS's sd"]
        assert sum(row["posterior"].startswith("variance") for row in rows) == 9
        assert all(row["gap"] >= 0 for row in rows)
    elif task == "rotated-mnist":
        assert len(result["posteriors"]) == 12
        for entry in result["posteriors"].values():
            assert list(entry["scores"]) == ["angle", "noise", "blur", "contrast"]
            assert list(entry["scores"]["angle"]) == ["0", "90", "180"]
            assert len(entry["scores"]["blur"]) == 5
    else:
        assert result["counts"]["50"]["MB in all"] > 0
        assert result["counts"]["300"]["float32"].startswith("fits")


def _digits(folder, *names):
    generator = np.random.default_rng(0)
    images = {
        f"{key}_{part}": generator.integers(0, 10, shape).astype(np.uint8)
        for part, count in (("train", 40), ("test", 20))
        for key, shape in (("x", (count, 28, 28)), ("y", (count,)))
    }
    for name in names:
        np.savez(folder / f"{name}.npz", **images)


@pytest.mark.bench
def test_tempering_draws_its_figures_and_checks_its_statements(tmp_path):
    _digits(tmp_path, "mnist", "fashion_mnist")
    command = [sys.executable, str(FOLDER / "tempering.py"), "--json", "--data", str(tmp_path)]
    command += ["--figures", str(tmp_path), "--steps", "3", "--widths", "3", "6", "--draws", "4"]
    command += ["--parts", "images", "cold", "resnet", "priors", "--sets", "mnist"]
    command += ["--resnet-steps", "3", "--cold-steps", "3", "--cold-images", "20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum("eta = 1: accuracy" in key for key in result) == 2 * 2  # two estimators
    told = [value for value in result.values() if value in ("holds", "does not hold")]
    assert len(told) == 2 * 7 + 2 + 1
    assert sum(key.startswith("priors:") for key in result) == 6 * 5
    for name in (
        "mnist_bayes_by_backprop_scores", "mnist_local_reparameterization_scores",
        "mnist_cold_scores", "resnet_kl",
    ):  # fmt: skip
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_cold_posteriors_have_a_curve_for_each_method(tmp_path):
    _digits(tmp_path, "mnist")
    command = [sys.executable, str(FOLDER / "cold_posteriors.py"), "--json", "--quick"]
    command += ["--data", str(tmp_path / "mnist.npz"), "--figure", str(tmp_path / "cold.png")]
    command += ["--steps", "5", "--draws", "4", "--depth", "2", "--temperatures", "0.5", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum("cold posterior effect" in key for key in result) == 2 * 4
    assert (tmp_path / "cold.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def line(tmp_path):
    """A folder of the UCI layout: a line with little noise; two distinct splits, and a copy."""
    folder = tmp_path / "standard" / "line" / "data"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 2))
    y = 5.0 * x[:, :1] + 0.1 * generator.normal(size=(80, 1))
    np.savetxt(folder / "data.txt", np.concatenate([x, y], 1))
    np.savetxt(folder / "index_features.txt", [0, 1], fmt="%d")
    np.savetxt(folder / "index_target.txt", [2], fmt="%d")
    for split in range(2):
        order = generator.permutation(80)
        for copy in (split, 2):
            np.savetxt(folder / f"index_train_{copy}.txt", order[: 72 - split], fmt="%d")
            np.savetxt(folder / f"index_test_{copy}.txt", order[72:], fmt="%d")
    return tmp_path


@pytest.mark.bench
def test_posteriors_on_a_folder_of_the_uci_layout(line):
    rows = line / "rows.jsonl"
    command = [sys.executable, str(FOLDER / "uci.py"), "--json", "--data", str(line)]
    command += ["--sets", "line", "--kinds", "standard", "--steps", "50", "--rows", str(rows)]
    names = ["MAP, prior by validation", "Laplace, full", "ensemble"]
    command += ["--columns", *names]
    for seeds in ("1", "2"):  # the second run adds a seed
        done = subprocess.run(
            [*command, "--seeds", seeds], capture_output=True, text=True, cwd=FOLDER, check=True
        )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["column"] for row in found} == set(names) and len(found) == 3 * 2 * 2
    assert {row["split"] for row in found} == {0, 1}
    text = subprocess.run(
        command[:2] + command[3:], capture_output=True, text=True, cwd=FOLDER, check=True
    ).stdout
    assert "| sd over seeds |" in text and "nan" not in text


@pytest.mark.bench
def test_dropout_on_a_folder_of_the_uci_layout(line):
    """Under a name of its own: two rates, two seeds."""
    command = [sys.executable, str(FOLDER / "dropout_uci.py"), "--json", "--data", str(line)]
    command += ["--sets", "line", "--splits", "2", "--seeds", "2", "--steps", "400"]
    command += ["--draws", "50", "--rates", "0.005", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])["sets"]["line"]
    assert [row["rate"] for row in found["splits"]] == [0.005] * 4
    assert found["rmse"]["mean"] < 2.0 and "published" not in found["rmse"]
    assert found["rmse"]["standard error"] >= 0 and found["rmse"]["sd over seeds"] > 0


@pytest.mark.bench
def test_in_between_measures_every_posterior_against_nuts(tmp_path):
    path = tmp_path / "in_between.png"
    command = [sys.executable, str(FOLDER / "in_between.py"), "--json", "--figure", str(path)]
    command += ["--steps", "300", "--initializations", "1", "--function-draws", "500"]
    command += ["--chains", "2", "--warmup", "100", "--draws", "50", "--depth", "6"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    rows = json.loads(done.stdout.strip().splitlines()[-1])["posteriors"]
    assert len(rows) == 10 and rows["NUTS"]["ratio to NUTS in the gap"] == 1
    thin = ["mean-field", "mean-field, local noise", "MC dropout", "concrete dropout"]
    for name in thin:  # however little they were trained; the sd of 500 draws is right to 3 %
        assert rows[name]["of bound"] < 1.1
        assert rows[name]["ratio to NUTS in the gap"] < 0.5
    for name in ("NUTS", "Laplace, full"):
        assert rows[name]["gap to clusters"] > 2
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_lora_scores_every_posterior(tmp_path):
    generator = np.random.default_rng(0)
    images = {
        f"{key}_{part}": generator.integers(0, 10, shape).astype(np.uint8)
        for part, count in (("train", 60), ("test", 8))
        for key, shape in (("x", (count, 28, 28)), ("y", (count,)))
    }
    np.savez(tmp_path / "digits.npz", **images)
    command = [sys.executable, str(FOLDER / "lora.py"), "--json", "--seeds", "2", "--steps", "3"]
    command += ["--upright", "20", "--upright-steps", "3", "--train-size", "20", "--width", "4"]
    command += ["--held-out", "10", "--draws", "3", "--data", str(tmp_path / "digits.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    rows = json.loads(done.stdout.strip().splitlines()[-1])["posteriors"]
    assert len(rows) == 7
    assert all(row["log likelihood"][0] < 0 for row in rows.values())
    assert all(len(row["prior scales"]) == 2 for name, row in rows.items() if name != "before")


@pytest.mark.bench
def test_tomography_scores_every_posterior(tmp_path):
    path = tmp_path / "tomography.png"
    command = [sys.executable, str(FOLDER / "tomography.py"), "--json", "--digits", "0"]
    command += ["--angles", "2", "--steps", "3", "--evidence-steps", "2", "--width", "2"]
    command += ["--draws", "3", "--figure", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    (rows,) = json.loads(done.stdout.strip().splitlines()[-1])["tables"].values()
    assert len(rows) == 4
    assert all(0 <= row["in 90 %"][0] <= 1 for row in rows.values())
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_a_run_against_the_references_goes_on_where_it_was_killed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    known = {"problem": "iris", "posterior": "mean-field", "failed": "MemoryError: none"}
    rows.write_text(json.dumps(known) + "\n")
    command = [sys.executable, str(FOLDER / "against_references.py"), "--json", "--quick"]
    command += ["--problems", "iris", "--guides", "mean-field", "map", "--rows", str(rows)]
    command += ["--picture", str(tmp_path / "picture.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    first, second = json.loads(done.stdout.strip().splitlines()[-1])
    assert first == known and second["posterior"] == "map" and second["group"] == "far"
    assert [json.loads(line) for line in rows.read_text().splitlines()] == [first, second]
    assert (tmp_path / "picture.png").stat().st_size > 0


IMAGES = {
    "image_laplace": [
        *("--seeds", "1", "--train", "30", "--held-out", "10", "--epochs", "1", "--draws", "2"),
        *("--width", "0.05"),
    ],
    "marglik_training": [
        *("--networks", "MLP", "--sets", "mnist", "--train", "30", "--held-out", "10"),
        *("--epochs", "2", "--burn-in", "1", "--every", "1", "--width", "0.02"),
    ],
    "normalised_evidence": ["--networks", "CNN", "--train", "20", "--steps", "3", "--width", "2"],
}


@pytest.mark.bench
@pytest.mark.parametrize("name", list(IMAGES))
def test_laplace_of_image_classifiers(name, tmp_path):
    _digits(tmp_path, "mnist", "fashion_mnist")
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", "--quick"]
    command += ["--data", str(tmp_path), "--test", "10", *IMAGES[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if name == "image_laplace":
        assert len(result["rows"]) == 4
    elif name == "marglik_training":
        methods = ["cross-validation", "evidence", "evidence, trained on"]
        assert [row["method"] for row in result["rows"]] == methods
        assert all(row["published"][0] > 98 for row in result["rows"])
    else:
        (rows,) = result["networks"].values()
        assert len(rows) == 5 and all(row["NLL"][0] > 0 for row in rows.values())


@pytest.mark.bench
def test_posteriors_of_trained_networks():
    command = [sys.executable, str(FOLDER / "trained_network.py"), "--json", "--quick"]
    command += ["--epochs", "1", "--draws", "2", "--networks", "MLP"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    (rows,) = result["networks"].values()
    assert len(rows) == 10 and result["harmed"] == []
    assert all("NLL" in row or "skipped" in row for row in rows.values())


@pytest.mark.bench
def test_priors_on_uci_against_nuts(line):
    rows = line / "rows.jsonl"
    command = [sys.executable, str(FOLDER / "uci_priors.py"), "--json", "--data", str(line)]
    command += ["--sets", "line", "--kinds", "standard", "--splits", "0", "--members", "2"]
    command += ["--programs", "program", "factor", "--steps", "20", "--rounds", "1"]
    command += ["--warmup", "10", "--draws", "10", "--depth", "3", "--rows", str(rows)]
    for _ in range(2):  # the second run finds all rows in the file
        done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 2 + 4 and all(len(row["members"]) == 2 for row in found)


@pytest.mark.bench
def test_posterior_samples_of_a_small_resnet():
    command = [sys.executable, str(FOLDER / "laplace_samples.py"), "--json", "--quick"]
    command += ["--width", "2", "--images", "4", "--samples", "2", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert sum("gamma" in key for key in result) == 4
    assert all(value > 0 for key, value in result.items() if key.endswith("GB"))
