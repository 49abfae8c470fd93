"""The benchmark scripts run and print what they promise, at a small size."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.bench


def printed(name, options, *arguments):
    """What a script prints.

    :param options: its options in one string; ``arguments`` are further ones.
    """
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options.split(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=True)
    return done.stdout


def run(name, options, *arguments):
    """The last line that a script prints, as JSON."""
    return json.loads(printed(name, f"--json {options}", *arguments).strip().splitlines()[-1])


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def digits(tmp_path):
    """A folder with random images under the names of the sets."""
    generator = np.random.default_rng(0)
    images = {
        f"{key}_{part}": generator.integers(0, 10, shape).astype(np.uint8)
        for part, count in (("train", 60), ("test", 20))
        for key, shape in (("x", (count, 28, 28)), ("y", (count,)))
    }
    for name in ("mnist", "fashion_mnist"):
        np.savez(tmp_path / f"{name}.npz", **images)
    return tmp_path


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


SMALL = {
    "svi": "--steps 3 --repeats 1",
    "compiled": "--steps 2 --repeats 1 --cases 8-50-50-1",
    "training": "--steps 600 --torch-steps 60 --repeats 1 --cases 8-50-50-1 --guides mean-field",
    "predictive": "--draws 8 --inputs 20 --cnn-draws 2 --repeats 1",
    "gradient_variance": "--draws 3 --steps 1 --train 1 --repeats 1",
    "sgmcmc": "--steps 20 --chains 2 --repeats 1",
    "diagnostics": "--weights 40 --arviz-weights 10 --observations 800 --repeats 1",
    "ensemble": "--members 2 --width 4 --steps 3 --repeats 1",
    "laplace": "--digits 40 --predict 5 --compared 10 --steps 2 --repeats 1 --cases MLP:kron "
    "small:full --large full resnet last-layer --classes 20 --rows 30 --full 300 --images 4 "
    "--width 4",
    "function_space": "--quick",
    "distributed": "--steps 1 --batches 8 4 --rows 20 --repeats 1",
    "gpu": "--device cpu --quick",
    "large": "--quick",
    "peers": "--steps 1 --repeats 1",
    "networks_in_plate": "--quick --networks 2 --methods SVI",
    "mcmc": "--chains 2 --iterations 20 --nuts 10 --depth 3 --networks 4 --only mclmc nuts",
    "nuts": "--warmup 10 --draws 5 --depth 3 --pyro-draws 2 --repeats 1",
}


@pytest.mark.parametrize("name", SMALL)
def test_benchmark_prints_both_sides_and_the_ratio(name):
    result = run(name, SMALL[name])
    ratios = [value for key, value in result.items() if "ratio" in key]
    assert ratios and all(value > 0 for value in ratios)
    assert "machine" in result and "torch" in result["machine"]


def test_scaling_prints_exponents_and_draws_them(tmp_path):
    result = run("scaling", "--quick --figure", tmp_path / "scaling.png")
    assert sum("exponent" in key for key in result) == 20 and is_png(tmp_path / "scaling.png")


def test_verdicts_prints_rates():
    text = printed("verdicts", "--json --repetitions 1 --references", "4 x 25")
    rates = json.loads(text)["conjugate"]["4 x 25"]
    assert all(sum(groups.values()) == 1 for groups in rates["groups"].values())
    assert rates["reference"].keys() == {"not converged", "doubtful"}


SUBNETWORK = {
    "gap": "--steps 5 --initializations 1 --random 1 --chains 2 --warmup 10 --draws 5 --depth 2",
    "rotated-mnist": "--train-size 40 --held-out 10 --test-size 8 --epochs 1 --angle-step 90 "
    "--members 2 --predictive-draws 3 --sizes 0.001 0.002",
    "large": "--width 4 --images 4 --predicted 2 --counts 50 300 --most 100",
}


@pytest.mark.parametrize("task", SUBNETWORK)
def test_tasks_of_subnetwork(task, digits):
    options = f"--task {task} {SUBNETWORK[task]} --data"
    result = run("subnetwork", options, digits / "mnist.npz")
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


def test_tempering_draws_its_figures_and_checks_its_statements(digits):
    options = (
        "--steps 3 --widths 3 6 --draws 4 --parts images cold resnet priors --sets mnist "
        "--resnet-steps 3 --cold-steps 3 --cold-images 20"
    )
    result = run("tempering", options, "--data", digits, "--figures", digits)
    assert sum("eta = 1: accuracy" in key for key in result) == 2 * 2  # two estimators
    statements = [value for value in result.values() if value in ("holds", "does not hold")]
    assert len(statements) == 2 * 7 + 2 + 1
    assert sum(key.startswith("priors:") for key in result) == 6 * 5
    for name in ("bayes_by_backprop_scores", "local_reparameterization_scores", "cold_scores"):
        assert is_png(digits / f"mnist_{name}.png")
    assert is_png(digits / "resnet_kl.png")


def test_cold_posteriors_have_a_curve_for_each_method(digits):
    options = "--quick --steps 5 --draws 4 --depth 2 --temperatures 0.5 1"
    files = "--data", digits / "mnist.npz", "--figure", digits / "cold.png"
    result = run("cold_posteriors", options, *files)
    assert sum("cold posterior effect" in key for key in result) == 2 * 4
    assert is_png(digits / "cold.png")


def test_posteriors_on_a_folder_of_the_uci_layout(line):
    rows, names = line / "rows.jsonl", ["MAP, prior by validation", "Laplace, full", "ensemble"]
    options = "--sets line --kinds standard --steps 50"
    rest = "--data", line, "--rows", rows, "--columns", *names
    for seeds in ("--seeds 1", "--seeds 2"):  # the second run adds a seed
        found = run("uci", f"{options} {seeds}", *rest)
    assert found == [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["column"] for row in found} == set(names) and len(found) == 3 * 2 * 2
    assert {row["split"] for row in found} == {0, 1}
    text = printed("uci", options, *rest)
    assert "| sd over seeds |" in text and "nan" not in text


def test_exported_models_have_the_same_numbers():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    found = run("export", "--quick --repeats 1")
    errors = [row["errors"] for row in found.values() if isinstance(row, dict)]
    assert len(errors) == 3
    assert all(max(row.values()) < 1e-5 for row in errors)


def test_calibration_on_a_folder_of_the_uci_layout(line):
    pytest.importorskip("mapie")
    rows = "--rows", line / "rows.jsonl"
    options = "--sets line --posteriors map --quick --steps 300 --data"
    found = run("calibration", options, line, *rows)
    numbers, classes = found["line, map"], found["digits, map"]
    assert min(numbers[f"in {name}"] for name in ("scaled", "conformal", "by sd")) > 0.6
    assert numbers["nlpd scaled"] < numbers["nlpd own"] + 0.3 and classes["in set"] > 0.9
    assert len((line / "rows.jsonl").read_text().splitlines()) == 2


def test_last_layers_on_a_folder_and_images(line, digits):
    pytest.importorskip("vbll")
    options = "--quick --threads 1 --repeats 1 --steps 3 --image-steps 3 --sets line"
    found = run("variational_last_layer", options, "--data", line, "--images", digits)
    assert found.keys() == {"line", "Fashion-MNIST features"}
    for part in found.values():
        assert "vbll" in part["scores"] and part["ms a step"]["vbll"] > 0


def test_dropout_on_a_folder_of_the_uci_layout(line):
    """Under a name of its own: two rates, two seeds."""
    options = "--sets line --splits 2 --seeds 2 --steps 400 --draws 50 --rates 0.005 0.3 --data"
    found = run("dropout_uci", options, line)["sets"]["line"]
    assert [row["rate"] for row in found["splits"]] == [0.005] * 4
    assert found["rmse"]["mean"] < 2.0 and "published" not in found["rmse"]
    assert found["rmse"]["standard error"] >= 0 and found["rmse"]["sd over seeds"] > 0


def test_chains_from_an_ensemble_on_a_folder_of_the_uci_layout(line):
    options = "--set line --splits 0 1 --members 2 --steps 50 --warmup 20 --draws 20 --thinning 5"
    found = run("mile", f"{options} --data", line)
    assert found["splits"] == 2 and found["ensemble of chains: draws per chain"] == 20
    for score in ("RMSE", "NLL of the Normal"):
        chains, boosting = (found[f"{n}: {score}"] for n in ("ensemble of chains", "boosting"))
        assert found[f"boosting: {score}, above the chains"] == pytest.approx(boosting - chains)
        assert found[f"boosting: {score}, its standard error"] > 0


def test_in_between_measures_every_posterior_against_nuts(tmp_path):
    options = (
        "--steps 300 --initializations 1 --function-draws 500 --chains 2 --warmup 100 --draws 50 "
        "--depth 6 --figure"
    )
    rows = run("in_between", options, tmp_path / "in_between.png")["posteriors"]
    assert len(rows) == 10 and rows["NUTS"]["ratio to NUTS in the gap"] == 1
    for name in ("mean-field", "mean-field, local noise", "MC dropout", "concrete dropout"):
        # however little they were trained; the sd of 500 draws is right to 3 %
        assert rows[name]["of bound"] < 1.1
        assert rows[name]["ratio to NUTS in the gap"] < 0.5
    for name in ("NUTS", "Laplace, full"):
        assert rows[name]["gap to clusters"] > 2
    assert is_png(tmp_path / "in_between.png")


def test_inducing_rows_of_every_task(line, tmp_path):
    options = "--quick --tasks gap width uci --widths 4 --sets line --rows"
    rows = run("inducing", options, tmp_path / "rows.jsonl", "--data", line)["rows"]
    assert len(rows) == 4 + 2 + 4 and all(row["kl"] > 0 for row in rows)
    bounds = {row["posterior"]: row["elbo"] for row in rows if row["task"] == "gap"}
    assert bounds["inducing"] > bounds["mean-field"]  # from its start on
    assert all("log likelihood" in row for row in rows if row["task"] == "uci")


def test_lora_scores_every_posterior(digits):
    options = (
        "--seeds 2 --steps 3 --upright 20 --upright-steps 3 --train-size 20 --width 4 "
        "--held-out 10 --draws 3 --data"
    )
    rows = run("lora", options, digits / "mnist.npz")["posteriors"]
    assert len(rows) == 7
    assert all(row["log likelihood"][0] < 0 for row in rows.values())
    assert all(len(row["prior scales"]) == 2 for name, row in rows.items() if name != "before")


def test_tomography_scores_every_posterior(tmp_path):
    options = "--digits 0 --angles 2 --steps 3 --evidence-steps 2 --width 2 --draws 3 --figure"
    (rows,) = run("tomography", options, tmp_path / "tomography.png")["tables"].values()
    assert len(rows) == 4
    assert all(0 <= row["in 90 %"][0] <= 1 for row in rows.values())
    assert is_png(tmp_path / "tomography.png")


def test_a_run_against_the_references_goes_on_where_it_was_killed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    known = {"problem": "iris", "posterior": "mean-field", "failed": "MemoryError: none"}
    rows.write_text(json.dumps(known) + "\n")
    options = "--quick --problems iris --guides mean-field map"
    files = "--rows", rows, "--picture", tmp_path / "picture.png"
    first, second = run("against_references", options, *files)
    assert first == known and second["posterior"] == "map" and second["group"] == "far"
    assert [json.loads(line) for line in rows.read_text().splitlines()] == [first, second]
    assert is_png(tmp_path / "picture.png")


IMAGES = {
    "image_laplace": "--seeds 1 --train 30 --held-out 10 --epochs 1 --draws 2 --width 0.05",
    "marglik_training": "--networks MLP --sets mnist --train 30 --held-out 10 --epochs 2 "
    "--burn-in 1 --every 1 --width 0.02",
    "normalised_evidence": "--networks CNN --train 20 --steps 3 --width 2",
}


@pytest.mark.parametrize("name", IMAGES)
def test_laplace_of_image_classifiers(name, digits):
    result = run(name, f"--quick --test 10 {IMAGES[name]} --data", digits)
    if name == "image_laplace":
        assert len(result["rows"]) == 4
    elif name == "marglik_training":
        methods = ["cross-validation", "evidence", "evidence, trained on"]
        assert [row["method"] for row in result["rows"]] == methods
        assert all(row["published"][0] > 98 for row in result["rows"])
    else:
        (rows,) = result["networks"].values()
        assert len(rows) == 5 and all(row["NLL"][0] > 0 for row in rows.values())


def test_a_posterior_of_images_on_the_disk(digits):
    result = run("out_of_core", "--quick --train 30 --test 10 --data", digits)
    assert list(result["stages"]) == ["files", "train", "approximate", "compare", "export"]
    assert result["images"] == 30 and result["exported"] == [1, 100, 10]
    assert all(nlpd > 0 for nlpd in result["nlpd"].values())


def test_posteriors_of_trained_networks():
    result = run("trained_network", "--quick --epochs 1 --draws 2 --networks MLP")
    (rows,) = result["networks"].values()
    assert len(rows) == 10 and result["harmed"] == []
    assert all("NLL" in row or "skipped" in row for row in rows.values())


def test_priors_on_uci_against_nuts(line):
    rows = line / "rows.jsonl"
    options = (
        "--sets line --kinds standard --splits 0 --members 2 --programs program factor --steps 20 "
        "--rounds 1 --warmup 10 --draws 10 --depth 3"
    )
    for _ in range(2):  # the second run finds all rows in the file
        found = run("uci_priors", options, "--data", line, "--rows", rows)
    assert found == [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 2 + 4 and all(len(row["members"]) == 2 for row in found)


def test_posterior_samples_of_a_small_resnet():
    result = run("laplace_samples", "--quick --width 2 --images 4 --samples 2 --steps 2")
    assert sum("gamma" in key for key in result) == 4
    assert all(value > 0 for key, value in result.items() if key.endswith("GB"))


def test_rank_one_scores_every_side(digits):
    result = run("rank_one", "--quick --test 10", "--data", digits)
    ensemble, one = (result[f"{side}: bytes"] for side in ("ensemble", "rank-one, of four"))
    assert 0.0 <= result["rank-one, mixture: accuracy"] <= 1.0 and one < ensemble


def test_bayesian_optimization_goes_on_from_its_rows(tmp_path):
    pytest.importorskip("botorch")
    options = f"--quick --threads 1 --tasks jump --rows {tmp_path / 'rows.jsonl'}"
    found = run("bayesian_optimization", options, "--figure", tmp_path / "regret.png")
    surrogates = ("gp", "nuts", "laplace", "last layer", "ensemble")
    for surrogate in surrogates:
        assert 0.0 <= found[f"jump, {surrogate}"]["regret"] < 3.0
    assert is_png(tmp_path / "regret.png")
    assert run("bayesian_optimization", options) == found


def test_a_posterior_around_a_large_network():
    result = run("large_trained", "--quick --threads 1")
    assert result["last layer: frozen, forwards"] < 2
    assert result["last layer: Predictive, forwards"] < 4
    assert result["all weights: frozen, forwards"] < 2 * 6 + 1
    assert result["all weights: mean of draws, forwards"] < 40


def test_published_laplace_prints_both_numbers(digits):
    options = "--seeds 2 --train 50 --held-out 10 --test 10 --width 4 --steps 3 --draws 2 --data"
    rows = digits / "rows.jsonl"
    result = run("published_laplace", options, digits, "--rows", rows)["rows"]
    assert len(result) == 2 * 13 and len(rows.read_text().splitlines()) == 2 * (2 * 11 + 2)
    entry = result["mnist: all weights, kron, ours"]
    assert entry["NLL"]["seeds"] == 2 and entry["published"]["NLL"] == 0.0945
    again = run("published_laplace", options, digits, "--rows", rows)["rows"]
    assert again == result


def test_published_draws_judges_by_nuts(tmp_path):
    (tmp_path / "glass").mkdir()
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 3)), generator.integers(0, 3, 40)
    np.savetxt(tmp_path / "glass" / "X.txt", x)
    np.savetxt(tmp_path / "glass" / "Y.txt", y, fmt="%d")
    options = "--quick --sets glass --seeds 2 --width 3 --steps 5 --draws 5 --warmup 5 --chain 5"
    result = run("published_draws", options, "--data", tmp_path)["sets"]["glass"]
    assert len(result) == 6 and 0 < result["NUTS"]["from NUTS"][0] < 1  # between its chains
    assert result["linearized, fixed prior"]["published NLPD"] == 1.65


def test_where_it_pays_pairs_the_seeds(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"set": "glass", "seed": seed, "method": method, "NLPD": shared + own}
        for seed, shared in enumerate((1.0, 5.0))
        for method, own in (("MAP", 0.5), ("NUTS", 0.25 + 0.01 * seed))
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    (found,) = run("where_it_pays", "--rows", file)
    assert found["NLL"] == pytest.approx({"gain": 0.245, "error": 0.005, "seeds": 2})


def test_published_hmc_measures_agreement(tmp_path):
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 6)):
        files = []
        for _ in range(count):
            file = io.BytesIO()
            pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            image.fromarray(pixels).save(file, "JPEG")
            files.append(file.getvalue())
        ends = np.cumsum([0, *map(len, files)])
        more = {"hmc_probs": generator.dirichlet(np.ones(10), count)} if part == "test" else {}
        np.savez(
            tmp_path / f"cifar10_{part}.npz", offsets=ends, labels=np.arange(count) % 10,
            jpeg=np.frombuffer(b"".join(files), np.uint8), **more,
        )  # fmt: skip
    options = "--quick --train 20 --width 2 --batch 10 --only MAP ensemble --data"
    result = run("published_hmc", options, tmp_path)
    assert result["shortened"] and result["rows"]["HMC"]["agreement"] == 1.0
    assert 0 <= result["rows"]["ensemble"]["total variation"] <= 1


def test_exact_limits_measures_chains_against_the_process():
    options = "--quick --layers 1 --widths 10 --only NUTS mclmc --warmup 5 --draws 5"
    result = run("exact_limits", options)
    assert [row["method"] for row in result["rows"]] == ["NUTS", "mclmc"]
    assert set(result["check"]) == {"erf, 1 hidden"}


def test_active_learning_counts_labels(digits):
    options = (
        "--seeds 2 --pool 55 --test 10 --rounds 2 --size 3 --members 2 --steps 3 --draws 2 "
        "--sets mnist --choices random BatchBALD --data"
    )
    figure = digits / "curve.png"
    result = run("active_learning", options, digits, "--figure", figure)["choices"]
    assert list(result) == ["mnist, dropout", "mnist, ensemble"] and is_png(figure)
    for entries in result.values():
        assert len(entries["BatchBALD"]["accuracy"]) == 3
        assert entries["random"]["gain over random"] == [0.0, 0.0]


def test_continual_learns_tasks_in_turn(digits):
    options = (
        "--seeds 1 --tasks 2 --train 50 --test 10 --width 4 --steps 3 --batch 10 --curvature 20 "
        "--data"
    )
    result = run("continual", options, digits, "--figure", digits / "tasks.png")["methods"]
    assert len(result) == 4 and all(len(entry["accuracy"]) == 2 for entry in result.values())
    assert is_png(digits / "tasks.png")


def test_published_mnist_prints_both_numbers(digits):
    options = (
        "--quick --train 50 --test 10 --width 4 --channels 0.1 --batch 10 --nets 2 --members 2 "
        "--lenet-steps 2 --vi-steps 2 --draws 2 --langevin 1e-6 --preconditioned 1e-6 --data"
    )
    rows = digits / "rows.jsonl"
    found = run("published_mnist", options, digits, "--rows", rows)
    assert len(found["rows"]) == 9 + 2 * 4 and len(rows.read_text().splitlines()) == 9 + 2 * 3
    assert found["shortened"]["width"] == 4 and found["rows"]["LeNet-5, mnist: refined VI"] == {
        "published": {"NLL": 0.034, "accuracy": 0.990, "ECE": 0.010}, "seeds": 0,
    }  # fmt: skip
    entry = found["rows"]["MLP, mnist: preconditioned SGLD"]
    assert entry["published"]["log likelihood"] == -661
    assert entry["log likelihood"]["mean"] == pytest.approx(-10 * entry["NLL"]["mean"])
    assert run("published_mnist", options, digits, "--rows", rows) == found


def test_low_rank_metric_counts_effective_draws():
    result = run("low_rank_metric", "--quick --kernels mclmc")["table"]
    assert [entry["low rank"] for entry in result] == [False, True]
    assert all(entry["min ESS of f / gradients"][0] > 0 for entry in result)


def test_tempered_evidence_has_both_evidences():
    (row,) = run("tempered_evidence", "--quick --threads 1")["rows"]
    assert row["error"] > 0 and row["copies"] == pytest.approx(math.log(8))
