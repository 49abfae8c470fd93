"""How the C library keeps freed memory for the next block of work."""

import functools

import torch

_LARGEST = 32 * 2**20 - 2**14  # what glibc still learns from, its own header and padding included


@functools.cache
def keep_freed_blocks() -> None:
    """Let blocks of up to 32 MB be reused instead of returned to the operating system.

    Work in chunks frees and asks for the same few blocks over and over. While glibc returns them,
    each new one is faulted in page by page, up to a third of the time. Freeing a block raises its
    threshold to that block's size (``mallopt(3)``, ``M_MMAP_THRESHOLD``), as any program that
    frees a large tensor does by the way; no page of this one is ever touched. Without effect
    elsewhere.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
