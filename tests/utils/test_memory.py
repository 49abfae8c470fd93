import platform
import resource
import subprocess
import sys
import weakref

import pytest
import torch

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
        pytest.raises(ValueError, match="size must be positive and finite, got 0"),
        memory.working_memory(0),
    ):
        pass


def test_a_count_keeps_no_tensor():
    tensor = torch.ones(3, 1).expand(3, 5)
    assert memory.stored_numbers(tensor) == 3
    left = weakref.ref(tensor)
    del tensor
    assert left() is None


GB = 2**30


def _machine(root, files):
    for name, text in {"proc/meminfo": f"MemAvailable: {64 * 2**20} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.memory_of_machine(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        # version 2, as a container sees its own group
        ({
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{8 * GB}\n",
            "sys/fs/cgroup/memory.current": f"{5 * GB}\n",
            "sys/fs/cgroup/memory.stat": f"anon {3 * GB}\ninactive_file {GB}\nactive_file {GB}\n",
        }, 4),
        # no limit of its own, but one of the group around it
        ({
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job.scope/memory.current": f"{GB}\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{10 * GB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{4 * GB}\n",
        }, 6),
        # version 1, under the path that the machine has
        ({
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GB}\n",
        }, 1),
        ({
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
        }, 64),
    ],
    ids=["machine", "v2", "v2 around it", "v1", "v1 without a limit"],
)  # fmt: skip
def test_available_memory_is_that_below_the_limits_of_a_container(tmp_path, files, expected):
    assert _machine(tmp_path, files) == expected * GB


def test_available_memory_is_unknown_without_these_files(tmp_path):
    assert memory.memory_of_machine(tmp_path) is None
