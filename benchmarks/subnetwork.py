"""Subnetworks: what they keep of a posterior, and what they cost.

    python benchmarks/subnetwork.py --figure gap.png
    python benchmarks/subnetwork.py --task rotated-mnist --data mnist.npz
    python benchmarks/subnetwork.py --task large

``gap``: the posterior sd inside a gap of one-dimensional data, relative to NUTS, for every way to
choose half, 3 % and 1 % of the weights (Daxberger et al. 2021, section 6.1).
``rotated-mnist``: accuracy and calibration on digits that are turned further and further (6.3).
``large``: time and memory of selection and inference in a network of 11 million weights.

Each task has a module ``subnetwork_<task>.py`` of its own, which says what is measured and how.
"""

import json
from importlib import import_module

import torch
from harness import machine, parser

TASKS = ("gap", "rotated-mnist", "large")


def module(task: str):
    return import_module(f"subnetwork_{task.replace('-', '_')}")


def main() -> None:
    options_parser = parser("Subnetworks: what they keep of a posterior, and what they cost.")
    options_parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    options_parser.add_argument("--figure", help="write a figure there, as .png or .pdf")
    for task in TASKS:
        module(task).arguments(options_parser)
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = module(options.task)
    results, extra = chosen.run(options)
    results = {"benchmark": f"subnetwork, {options.task}", "machine": machine(), **results}
    if options.json:
        print(json.dumps(results))
    else:
        chosen.show(results)
    if options.figure:
        chosen.figure(results, extra, options.figure)


if __name__ == "__main__":
    main()
