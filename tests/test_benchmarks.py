"""The benchmark scripts run and print what they promise, at a small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SMALL = {
    "svi": ["--steps", "3", "--repeats", "1"],
    "predictive": ["--draws", "8", "--inputs", "20", "--cnn-draws", "2", "--repeats", "1"],
    "diagnostics": [
        *("--weights", "40", "--arviz-weights", "10", "--observations", "20", "--repeats", "1"),
    ],
    "ensemble": ["--members", "2", "--width", "4", "--steps", "3", "--repeats", "1"],
    "laplace": [
        *("--digits", "40", "--predict", "5", "--compared", "10", "--steps", "2", "--repeats", "1"),
        *("--cases", "MLP:kron", "small:full", "--large", "full", "resnet", "last-layer"),
        *("--classes", "20", "--rows", "30", "--full", "300", "--images", "4", "--width", "4"),
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
