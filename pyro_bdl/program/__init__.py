"""A Pyro program as pure functions of its latents."""

from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.program.trace import (
    Run,
    Site,
    leave_open,
    record,
    sample_open,
    sum_out_discrete,
)

__all__ = [
    "Program",
    "Run",
    "Site",
    "leave_open",
    "record",
    "sample_open",
    "sum_out_discrete",
    "trace_once",
]
