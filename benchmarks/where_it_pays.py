"""Gains of posteriors over their networks alone, on all data sets of other scripts' rows.

    python benchmarks/published_laplace.py --data DATA --rows images.jsonl
    python benchmarks/published_draws.py --data DATA --rows tables.jsonl
    python benchmarks/where_it_pays.py --rows images.jsonl tables.jsonl

Every row of those files is a method on a set with a seed. The gain is the network's NLL minus the
method's, in nats of a test row, and the method's AUROC of foreign inputs minus the network's where
it was measured. Both come from the same seed, so that what a split or a training shares is gone
from the difference; errors are standard errors over seeds. A posterior whose width held-out rows
chose is compared with the network that was trained without them.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import harness

NETWORKS = {"kron, held-out width": "MAP of 55 000"}  # by method; the others have "MAP"
METHODS = {
    "kron, held-out width": "Laplace, held-out width",
    "linearized, held-out prior": "Laplace, held-out width",
    "all weights, kron": "Laplace, evidence",
    "linearized, evidence's prior": "Laplace, evidence",
    "last layer, kron": "last layer, evidence",
    "draws, fixed prior": "Laplace by draws of the weights",
    "SWAG": "SWAG",
    "SWAG's mean, all weights, kron": "Laplace around SWAG's mean, evidence",
    "NUTS": "NUTS",
}
SCORES = {"NLL": -1.0, "NLPD": -1.0, "OOD-AUROC": 1.0}


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean differences with their standard errors, by set and method."""
    ours = [row for row in rows if row.get("side", "ours") == "ours"]
    by_key = {(row["set"], row["method"], row["seed"]): row for row in ours}
    found = []
    for name in dict.fromkeys(row["set"] for row in ours):
        for method, title in METHODS.items():
            entry: dict[str, Any] = {"set": name, "method": title}
            for score, sign in SCORES.items():
                values = [
                    sign * (row[score] - by_key[name, NETWORKS.get(method, "MAP"), seed][score])
                    for (of, which, seed), row in by_key.items()
                    if (of, which) == (name, method) and score in row
                ]
                if values:
                    entry["NLL" if score == "NLPD" else score] = mean_and_error(values)
            if len(entry) > 2:
                found.append(entry)
    return found


def mean_and_error(values: list[float]) -> dict[str, float]:
    """``{"gain": m, "error": s / sqrt(n), "seeds": n}``, the error NaN for one seed."""
    count = len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return {"gain": statistics.mean(values), "error": error, "seeds": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--rows", nargs="+", type=Path, required=True, help="files of other scripts"
    )
    options = parser.parse_args()
    found = gains([row for file in options.rows for row in harness.read_rows(file)])
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'':16}{'':38}{'gain in NLL':>20}{'in OOD-AUROC':>20}  seeds")
    for entry in found:
        shown = [
            f"{entry[s]['gain']:+.4f} ± {entry[s]['error']:.4f}" if s in entry else ""
            for s in ("NLL", "OOD-AUROC")
        ]
        print(f"{entry['set']:16}{entry['method']:38}{shown[0]:>20}{shown[1]:>20}"
              f"  {entry['NLL']['seeds']}")  # fmt: skip


if __name__ == "__main__":
    main()
