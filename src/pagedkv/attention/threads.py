"""Threads that share the work of one call.

Where torch is loaded its own threads are taken: they are awake between two products of a model,
and a second set beside them would wait for the same cores. Elsewhere they are Python's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from pagedkv.compiling import CompiledTask


def num_cpus() -> int:
    """CPUs that this process may use; all there are where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Threads:
    """Up to `most` threads, the calling one among them, that run one task at a time."""

    def __init__(self, most: int) -> None:
        self.most = most

    def run(self, task: CompiledTask, numbers: Any, num_threads: int) -> None:
        """Run `task` with the address of `numbers`, a `ctypes` array of int64, in some threads.

        They share the numbers, and take their shares of the work by counting in them. It may be
        that fewer threads run than were asked for: one alone must do all there is to do.
        """
        address = ctypes.addressof(numbers)
        if num_threads == 1:
            task.function(address)
            return
        parallel = _openmp_of_torch()
        if parallel is not None:
            parallel(task.address, address, num_threads, 0)
            return
        others = [self._pool.submit(task.function, address) for _ in range(1, num_threads)]
        task.function(address)
        # One that has not begun would find nothing left to do.
        wait([other for other in others if not other.cancel()])

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.most - 1, "pagedkv")


@functools.cache
def _openmp_of(module: str) -> Callable[..., Any] | None:
    """OpenMP's entry, in the very library that the extension module in file `module` uses."""
    try:
        parallel = ctypes.CDLL(module).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _openmp_of_torch() -> Callable[..., Any] | None:
    """How torch's threads are called, where torch is loaded and they are OpenMP's."""
    torch = sys.modules.get("torch._C")
    return None if torch is None else _openmp_of(torch.__file__)
