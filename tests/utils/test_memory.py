import platform
import resource
import subprocess
import sys

import pytest

from pyro_bdl.utils import memory

COUNT = """
import resource, runpy, sys, torch
runpy.run_path(sys.argv[1])["keep_freed_blocks"]()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    blocks = [torch.ones(2**20) for _ in range(8)]  # 32 MB in all, in blocks of 4
    del blocks
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep memory anyway")
def test_blocks_that_are_freed_are_not_faulted_in_again():
    command = [sys.executable, "-c", COUNT, memory.__file__]  # without the rest of the package
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    once = 2**25 // resource.getpagesize()
    assert int(run.stdout) < 4 * once  # all 20 rounds would be 20 times once


def test_the_limit_of_a_piece_is_that_of_the_innermost_context():
    assert memory.bytes_at_once(7) == 7
    with memory.working_memory(100):
        with memory.working_memory(1e3):
            assert memory.bytes_at_once(7) == 1000
        assert memory.bytes_at_once(7) == 100
    assert memory.bytes_at_once(7) == 7
    with (
        pytest.raises(ValueError, match="positive number of bytes, but size is 0"),
        memory.working_memory(0),
    ):
        pass
