"""How often the command runs the program."""

import sys
from collections import Counter

import pytest
import torch

from pyro_bdl.app.options import Options
from pyro_bdl.app.run import run

RUNS = {("program/trace.py", "record"), ("program/program.py", "trace_once")}


@pytest.mark.slow  # the profile takes most of the time
def test_two_guides_of_a_small_file(tmp_path):
    """Training, two bounds of 512 draws, a curvature, two evaluations and leave-one-out, once each:
    the program was run 118 times."""
    torch.manual_seed(0)
    rows = [f"{a:.4f},{b:.4f},{a - b:.4f}" for a, b in torch.randn(60, 2).tolist()]
    (tmp_path / "data.csv").write_text("\n".join(["a,b,y", *rows]))
    counts = Counter()

    def count(frame, event, arg):
        code = frame.f_code
        file = "/".join(code.co_filename.rsplit("/")[-2:])
        if event == "call" and (file, code.co_name) in RUNS:
            counts[code.co_name] += 1

    options = Options(
        data=tmp_path / "data.csv", target="y", guides="laplace,mean-field", steps=50,
        out=tmp_path / "out", quiet=True,
    )  # fmt: skip
    sys.setprofile(count)
    try:
        assert run(options, "") == 0
    finally:
        sys.setprofile(None)
    assert sum(counts.values()) <= 40
