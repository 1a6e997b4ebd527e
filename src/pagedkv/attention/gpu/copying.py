"""Whole pages copied from block to block on the device."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    storage,
    pairs,  # int64 [n, 2]: from, to
    page_numbers,
    NUMBERS: tl.constexpr,
):
    """`NUMBERS` numbers, the `program_id(1)`th so many, of pair `program_id(0)`."""
    pair = pairs + tl.program_id(0) * 2
    source = tl.load(pair) * page_numbers
    target = tl.load(pair + 1) * page_numbers
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < page_numbers
    tl.store(storage + target + at, tl.load(storage + source + at, mask=inside), mask=inside)


def at_once(pairs: list[list[int]]) -> Iterator[list[list[int]]]:
    """`pairs` (from, to), made one after the other, in runs of which each may be made at once.

    Copies made at once must not read what another of them writes, nor write what another reads
    or writes.

    >>> list(at_once([[0, 1], [0, 2], [2, 3], [4, 0]]))
    [[[0, 1], [0, 2]], [[2, 3], [4, 0]]]
    """
    run: list[list[int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source in written or target in written or target in read:
            yield run
            run, read, written = [], set(), set()
        run.append([source, target])
        read.add(source)
        written.add(target)
    if run:
        yield run
