import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from pyro_bdl.allocator import keep_freed_blocks
if sys.argv[1] == "kept":
    keep_freed_blocks()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**21)
before = faults()
for _ in range(20):
    blocks = [torch.ones(2**20) for _ in range(8)]  # 32 MB: beyond what is kept otherwise
    del blocks
print(faults() - before)
"""


def page_faults(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep memory anyway")
def test_blocks_that_are_freed_are_not_faulted_in_again():
    assert page_faults("kept") < page_faults("returned") / 5
