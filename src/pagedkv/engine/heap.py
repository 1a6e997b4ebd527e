"""The heap that a step's activations come from."""

from __future__ import annotations

import ctypes
import sys

# What glibc's malloc.h calls M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, and what they get.
_OPTIONS = {-8: 1, -3: 32 << 20, -1: 1 << 30}


def keep_freed_memory() -> bool:
    """Let memory that one step frees be there for the next; whether the system can.

    A step takes and frees its activations layer by layer. glibc gives what is free at the end of
    its heap back to the system, at once in the heaps that threads other than the first have, and
    to have it again each page is mapped and zeroed anew: a step of 1,260 tokens of SmolLM2-135M met
    260,000 page faults in the thread of a server, and 30 now. So threads that begin after this
    call share the first one's heap, blocks below 32 MiB come from it, and up to 1 GiB that is free
    stays in it.

    To be called before threads are made: one that takes over the heap of a thread that has ended
    keeps it. Other systems' heaps are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) for name, value in _OPTIONS.items())
